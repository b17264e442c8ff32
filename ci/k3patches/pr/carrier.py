"""Carry patches onto upstream's tree, with the engine's merge and what a person once made of its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3patches import files
from k3patches.git import git
from k3patches.rebase import carry, gitwork
from k3patches.rebase.carry import Conflict, Labels
from k3patches.rebase.gitwork import Commit
from k3patches.series import Patch


@dataclass(frozen=True)
class Stopped(Exception):
    """A patch needs a person: ``why`` in a few words; the tree holds the merge as far as it goes."""

    patch: Patch
    why: str
    conflicts: list[Conflict]


class Carrier:
    """Works in ``tree``; ``sources`` are the commits of the series ``release``, by the patch's name.

    ``recorded`` are folders with a mail for each patch that does not carry over by itself; the first one counts.
    """

    def __init__(self, tree: Path, upstream: str, release: str, sources: dict[str, Commit], recorded: Sequence[Path]):
        self.tree, self.upstream, self.release = tree, upstream, release
        self.sources, self.recorded = sources, recorded

    def bring(self, patch: Patch) -> Commit:
        """Commit ``patch`` onto the tree's HEAD, with the message and the author that it has in the series."""
        before = gitwork.commit_of(self.tree)
        merged = self.merge(patch)
        if mail := self.mail(patch):
            if self._resolved(patch, before, merged, mail):
                return self._as_in_the_series(patch, before)
            merged = self.merge(patch)
        if not merged.conflicts and merged.content != before.tree:
            return self._as_in_the_series(patch, before)
        why = f"{len(merged.conflicts)} files in conflict" if merged.conflicts else "nothing is left of it"
        if mail:
            why += f", and what {mail.parent.name}/{mail.name} records does not fit"
        raise Stopped(patch, why, merged.conflicts)

    def merge(self, patch: Patch) -> carry.Merge:
        """The automatic merge onto the tree's HEAD."""
        source = self.sources[patch.name]
        return carry.merge(self.tree, source, source.message, self.labels(patch))

    def labels(self, patch: Patch) -> Labels:
        return Labels(self.upstream, f"vLLM {self.release} up to {patch.name}", f"{patch.name} of vLLM {self.release}")

    def mail(self, patch: Patch) -> Path | None:
        mails = (folder / f"{patch.contracts[0]}.patch" for folder in self.recorded)
        return next((mail for mail in mails if mail.is_file()), None)

    def difference(self, patch: Patch, before: Commit, result: Commit) -> bytes | None:
        """The mail that leads from the automatic merge onto ``before`` to ``result``; none where that is the result."""
        git("reset", "-q", "--hard", before.id, cwd=self.tree)
        merged = self.merge(patch)
        git("reset", "-q", "--hard", before.id, cwd=self.tree)
        if not merged.conflicts and merged.content == result.tree:
            return None
        source = self.sources[patch.name]
        wanted = Commit("", result.tree, source.message, source.author)
        return carry.record(self.tree, before.id, merged.content, wanted)

    def _resolved(self, patch: Patch, before: Commit, merged: carry.Merge, mail: Path) -> bool:
        fits = carry.resolve(self.tree, before.id, merged.content, mail)
        if fits:
            names = git("diff", "--name-only", "-z", before.id, "HEAD", cwd=self.tree).split("\0")
            fits = not carry.markers(self.tree, self.labels(patch), [n for n in names if n])
        if not fits:
            git("reset", "-q", "--hard", before.id, cwd=self.tree)
        return fits

    def _as_in_the_series(self, patch: Patch, before: Commit) -> Commit:
        source = self.sources[patch.name]
        made = gitwork.write_commit(self.tree, gitwork.tree_of(self.tree), before.id, source.message, source.author)
        git("reset", "-q", "--soft", made, cwd=self.tree)
        return gitwork.commit_of(self.tree)


def note(folder: Path, patch: Patch, mail: bytes | None) -> None:
    """Make ``mail`` what ``folder`` records of the patch; none where it carries over by itself."""
    path = folder / f"{patch.contracts[0]}.patch"
    if mail is None:
        path.unlink(missing_ok=True)
        return
    files.write(path, mail)
