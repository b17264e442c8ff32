"""Put the later patches on top of an edit, in a tree of their own: the person's stays as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from k3patches import files, messages, series
from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.rebase import carry, gitwork, kept
from k3patches.rebase.carry import Conflict, Labels
from k3patches.rebase.errors import NeedsPerson
from k3patches.rebase.gitwork import Commit
from k3patches.rebase.progress import Progress
from k3patches.tree import PRISTINE_TAG
from k3patches.work.opening import QUILT_PATCHES, QUILT_STATE
from k3patches.work.place import Place, State

FILE = "carry.json"


@dataclass
class Waiting:
    """What waits for a person: ``edited`` is the edit's commit, ``asked`` the patches that somebody was asked about.

    While ``theirs``, the tree is the person's; otherwise ``head`` is the last commit that was carried whole.
    """

    edited: str
    asked: list[str] = field(default_factory=list)
    theirs: bool = True
    head: str = ""


class Carrying:
    """The patches of ``state``'s edit, whole, as commits in ``tree``."""

    def __init__(self, place: Place, state: State) -> None:
        self.place, self.state = place, state
        self.folder = place.folder / "carry"
        self.tree = self.folder / "tree"
        self.waiting = Waiting("")
        self.progress = Progress([])

    @property
    def left(self) -> bool:
        """Whether the tree was left to a person."""
        return (self.folder / FILE).is_file()

    @property
    def commits(self) -> list[Commit]:
        return gitwork.above(self.tree, PRISTINE_TAG)

    def start(self, edited: str) -> None:
        """Carry everything onto the edit's commit ``edited``; with quilt, commit its patches."""
        shutil.rmtree(self.folder, ignore_errors=True)
        objects = [self.place.store.objects, self.place.tree / ".git" / "objects"]
        gitwork.work_tree(self.tree, self.state.pristine, objects)
        self.waiting = Waiting(edited)
        if self.state.quilt:
            self._take_quilted()
        else:
            git("reset", "-q", "--hard", edited, cwd=self.tree)
            self._carry()

    def go_on(self, edited: str) -> None:
        """Take the tree back from the person."""
        try:
            self.waiting = Waiting(**json.loads((self.folder / FILE).read_text()))
        except (ValueError, TypeError):
            raise UserError(f"{self.folder / FILE} is damaged: start anew with --abort") from None
        if self.waiting.edited != edited:
            raise UserError(
                f"{self.place.shown(self.place.tree)} was changed while {self.shown} waited: go back to "
                f"{self.waiting.edited[:12]} there, or throw the half-carried patches away with --abort"
            )
        if self.waiting.theirs:
            kept.take_back(self.tree, self.shown)
        else:
            # Killed while it went on: what is in no commit is its own.
            git("reset", "-q", "--hard", self.waiting.head, cwd=self.tree)
            git("clean", "-q", "-f", "-d", cwd=self.tree)
        self._mark()
        self._carry()

    def leave(self) -> None:
        """Leave the tree to a person."""
        self.waiting.theirs = True
        self._save()

    def _mark(self) -> None:
        """Note how far it is, where somebody's work is in the tree."""
        if self.waiting.asked:
            self.waiting.theirs, self.waiting.head = False, gitwork.head(self.tree)
            self._save()

    def _save(self) -> None:
        files.write_record(self.folder / FILE, self.waiting)

    def drop(self) -> None:
        """Leave nothing; a kill in between leaves what nobody waits for."""
        (self.folder / FILE).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def shown(self) -> Path:
        return self.place.shown(self.tree)

    def _carry(self) -> None:
        for name, commit in self.state.later:
            source = gitwork.commit_of(self.tree, commit)
            there = {fix for c in self.commits for fix in messages.fixes(c.message)}
            if messages.fixes(source.message)[0] in there:
                continue
            if name in self.waiting.asked:
                self.progress.say(f"  {name}: left out by hand")
                continue
            if gitwork.parent(self.tree, commit) == gitwork.head(self.tree):
                # Nothing changed below it.
                git("reset", "-q", "--hard", commit, cwd=self.tree)
                continue
            before = gitwork.commit_of(self.tree)
            merged = carry.merge(self.tree, source, source.message, Labels("the edit", "the series before it", name))
            if merged.conflicts:
                self._stop(name, f"{len(merged.conflicts)} files in conflict", merged.conflicts)
            if merged.content == before.tree:
                self._stop(name, "nothing is left of it", [])
            self._mark()

    def _take_quilted(self) -> None:
        """Commit quilt's patches one by one, and make sure that the tree holds nothing else."""
        folder, tree = self.place.tree / QUILT_PATCHES, self.place.tree
        at = {"": self.state.pristine}
        for name in series.listed(folder):
            try:
                how = ("--quiet", "--keep-non-patch", "--no-gpg-sign", "--committer-date-is-author-date")
                git("am", *how, "--whitespace=nowarn", (folder / name).resolve(), cwd=self.tree)
            except GitError as e:
                raise UserError(
                    f"{name} is no mail that applies on what comes before it ({e.brief}): quilt push -a and quilt "
                    f"refresh what does not fit, and give a new patch its mail's head with quilt header -e"
                ) from None
            at[name] = gitwork.head(self.tree)
        applied = tree / QUILT_STATE / "applied-patches"
        last = ["", *(applied.read_text().split() if applied.is_file() else [])][-1]
        if last not in at:
            raise UserError(f"{last} is applied in {self.place.shown(tree)}, but in no series any more: quilt pop it")
        there = gitwork.content_of_worktree(tree)
        for changed in git("diff", "--name-only", "-z", at[last], there, cwd=self.tree).split("\0")[:-1]:
            raise UserError(
                f"{self.place.shown(tree / changed)} has changes that no patch has: quilt add it before an edit and "
                f"quilt refresh after it, or take them back"
            )

    def _stop(self, name: str, why: str, conflicts: Sequence[Conflict]) -> NoReturn:
        for conflict in conflicts:
            self.progress.say(f"    {conflict.path}: {conflict.how}, {len(conflict.hunks)} hunks")
        self.waiting.asked.append(name)
        self.leave()
        raise NeedsPerson(
            f"{name} needs a person on top of the edit, {why}: edit it in {self.shown} with ordinary git, then run "
            f"{self.place.command('refresh.sh', '--continue')} (git cherry-pick --skip leaves the patch out, --abort "
            f"goes back to the edit)"
        )
