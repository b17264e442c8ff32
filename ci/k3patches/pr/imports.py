"""Make a branch the patch again: its edit goes into the series, and what comes after it is carried on top."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from k3patches import files, messages, series
from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.messages import CONTRACT
from k3patches.pr import carrier as carriers
from k3patches.pr import difference, place, record, squash, strip
from k3patches.pr import upstream as upstreams
from k3patches.pr.carrier import Stopped
from k3patches.pr.desk import Desk
from k3patches.rebase import carry, gitwork, kept, publish
from k3patches.rebase.carry import Labels
from k3patches.rebase.errors import NeedsPerson
from k3patches.rebase.gitwork import Commit
from k3patches.series import Patch
from k3patches.tree import PRISTINE_TAG

FILE = "import.json"


@dataclass(frozen=True)
class Branch:
    """``gitdir`` and a branch in it; ``since`` is the last commit below it that is not the patch's.

    ``result`` is the folder of its export, where there was one from here.
    """

    gitdir: Path
    name: str
    since: str | None = None
    result: Path | None = None


@dataclass
class State:
    """An import under way; ``waiting``, ``head`` and ``asked`` are as in an export's state.

    ``tip`` is the branch's commit and ``below`` the one that its edit stands on.  While ``edited`` is not there yet,
    the tree holds the merge of the edit, for the patch's message ``message``.
    """

    patch: str
    tip: str
    below: str
    result: str | None
    message: str
    head: str
    edited: bool = False
    waiting: bool = False
    asked: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        files.write_record(folder / FILE, self)


@dataclass(frozen=True)
class Imported:
    """``files`` is the whole folder of the series; ``changed`` names what differs in it, with a word on how."""

    files: Mapping[str, bytes]
    changed: dict[str, str]


def locate(desk: Desk, patch: Patch, gitdir: Path | None, name: str | None, since: str | None) -> Branch:
    """The branch that the command line means, and the export that it came from."""
    fix = patch.contracts[0]
    results = sorted((desk.root / ("check" if desk.trial else "")).glob(f"v{desk.release}*/*-{fix}/{record.EXPORTED}"))
    known = {path.parent: found for path in results if (found := record.exported(path.parent))}
    if gitdir is None:
        here = [folder for folder, found in known.items() if found.gitdir is None]
        if not here:
            raise UserError(
                f"{patch.name} has no exported branch in {desk.shown(desk.root)}: name its repository with --from"
            )
        tree = here[0] / place.TREE
        try:
            busy = git("status", "--porcelain", cwd=tree) or kept.under_way(tree)
        except GitError as e:
            raise UserError(
                f"{desk.shown(tree)} is no git tree any more ({e.brief}): delete it and export again"
            ) from None
        if busy:
            raise UserError(f"{desk.shown(tree)} has changes that are in no commit: commit or amend, then import")
        return Branch(tree, name or known[here[0]].branch, since, here[0])
    gitdir = gitdir.resolve()
    wanted = name or place.branch_of(fix)
    mine = [folder for folder, found in known.items() if (found.gitdir, found.branch) == (str(gitdir), wanted)]
    if not mine and not since:
        raise UserError(
            f"{wanted} of {gitdir} was not exported from here: name the commit below its first one with --since"
        )
    return Branch(gitdir, wanted, since, mine[0] if mine else None)


class Import:
    """The import of one patch's branch."""

    def __init__(self, desk: Desk, patch: Patch) -> None:
        self.desk, self.patch = desk, patch
        self.folder = desk.root / "work" / f"v{desk.release}.import"
        self.tree = self.folder / "tree"

    def abort(self) -> None:
        if not self.folder.exists():
            raise UserError(f"no import into vLLM {self.desk.release} was kept: there is nothing to abort")
        shutil.rmtree(self.folder)

    def start(self, branch: Branch) -> Imported:
        """Merge and carry all; the series is not written yet."""
        left = self._left()
        if left and left.waiting:
            raise NeedsPerson(
                f"{self._shown} holds an import of {left.patch} that somebody was asked to edit: go on with "
                f"--continue, or throw it away with --abort"
            )
        self._set_up(branch)
        return self._finish()

    def go_on(self) -> Imported:
        left = self._left()
        if not left:
            raise UserError(f"no import into vLLM {self.desk.release} waits for anybody: start one without --continue")
        if left.patch != self.patch.name:
            raise UserError(f"the import that waits is that of {left.patch}: name it")
        self.state = left
        if left.waiting:
            kept.take_back(self.tree, self._shown)
            left.waiting = False
        else:
            # Killed on the way: what is in no commit is the engine's own.
            git("reset", "-q", "--hard", left.head, cwd=self.tree)
            git("clean", "-q", "-f", "-d", cwd=self.tree)
        if not left.edited:
            self._take_edit()
        return self._finish()

    def write(self, imported: Imported) -> None:
        """Write the series, whole or not at all, and note that the branch is in it."""
        if imported.changed:
            with self.desk.project.lock():
                publish.put(self.desk.folder, imported.files, self.desk.stage)
        if self.state.result:
            folder = Path(self.state.result)
            if (known := record.exported(folder)) and known.parent == self.state.below:
                self._note_resolution(folder.parent.name)
            if known and self.state.tip != known.commit:
                known.imported = self.state.tip
                known.save(folder)
        shutil.rmtree(self.folder)

    # The steps.

    def _left(self) -> State | None:
        path = self.folder / FILE
        try:
            return State(**json.loads(path.read_text())) if path.is_file() else None
        except (ValueError, TypeError):
            raise UserError(f"{path} is damaged: save what you need beside it, and start anew with --abort") from None

    def _set_up(self, branch: Branch) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        source = self.desk.sources[self.patch.name]
        objects = [self.desk.store.objects, upstreams.common(branch.gitdir) / "objects"]
        gitwork.work_tree(self.tree, self.desk.release_commit, objects, upstreams.shallow(branch.gitdir))
        tip, since = self._find(branch.gitdir, f"refs/heads/{branch.name}"), branch.since
        exported = self._exported(branch, self._find(branch.gitdir, since) if since else None)
        # Without a counterpart of the patch, all of the branch is the edit, of the tree that the patch itself is for.
        below = exported.parent if exported else self._find(branch.gitdir, str(since))
        found = squash.commits(self.tree, below, tip)
        if not since:
            squash.require_own(branch.gitdir, branch.name, below, tip)
        if len(found) > 1:
            told = "; ".join(messages.subject(commit.message) for commit in found)
            self.desk.progress.say(f"  {len(found)} commits of the branch become one: {told}")
        message = squash.message(found, source, exported.commit if exported else None)
        start, theirs = (source.id, exported.commit.id) if exported else (gitwork.parent(self.tree, source.id), below)
        self.state = State(self.patch.name, tip, below, str(branch.result) if branch.result else None, message, start)
        git("reset", "-q", "--hard", start, cwd=self.tree)
        self.state.save(self.folder)
        edit = gitwork.write_commit(self.tree, gitwork.tree_of(self.tree, tip), theirs, message, source.author)
        labels = Labels(f"{self.patch.name} in the series", f"{self.patch.name} as exported", f"branch {branch.name}")
        merged = carry.merge(self.tree, gitwork.commit_of(self.tree, edit), message, labels)
        if merged.conflicts:
            self._stop(self.patch.name, f"the edit of {self.patch.name} does not fit the series", merged.conflicts)
        self._take_edit()

    def _find(self, gitdir: Path, ref: str) -> str:
        try:
            return git("rev-parse", "-q", "--verify", f"{ref}^{{commit}}", cwd=gitdir).strip()
        except GitError:
            raise UserError(f"{gitdir} has no commit {ref.removeprefix('refs/heads/')}: fetch it first") from None

    def _exported(self, branch: Branch, since: str | None) -> _Counterpart | None:
        """The patch as it was exported; where nobody knows any more, as it would be on the commit ``since``."""
        known = record.exported(branch.result) if branch.result else None
        if known and not since:
            if not gitwork.has(self.tree, known.commit):
                self.desk.progress.say(f"  {known.commit[:12]}, as exported, is gone: compared with today's patch")
                since = known.parent
            else:
                return _Counterpart(gitwork.commit_of(self.tree, known.commit), known.parent)
        assert since
        git("reset", "-q", "--hard", since, cwd=self.tree)
        upstream = branch.result.parent.name if branch.result else f"v{self.desk.release}"
        try:
            made = self.desk.carrier(self.tree, upstream).bring(self.patch)
        except Stopped:
            git("reset", "-q", "--hard", since, cwd=self.tree)
            return None
        [stripped] = strip.strip(self.tree, since, [made.id])
        return _Counterpart(gitwork.commit_of(self.tree, stripped), since)

    def _take_edit(self) -> None:
        """Make what the tree holds the patch's commit."""
        source = self.desk.sources[self.patch.name]
        below = gitwork.parent(self.tree, source.id)
        content = strip.with_own_files(self.tree, gitwork.tree_of(self.tree), source.id)
        made = gitwork.write_commit(self.tree, content, below, self.state.message, source.author)
        git("reset", "-q", "--hard", made, cwd=self.tree)
        self._mark(edited=True)

    def _mark(self, edited: bool) -> None:
        self.state.edited, self.state.head = edited, gitwork.head(self.tree)
        self.state.save(self.folder)

    def _finish(self) -> Imported:
        """Carry the rest of the series on top, and say what it comes to."""
        place_ = [p.name for p in self.desk.patches].index(self.patch.name)
        rest = self.desk.patches[place_ + 1 :]
        if gitwork.head(self.tree) == self.desk.sources[self.patch.name].id and rest:
            # Nothing was edited.
            git("reset", "-q", "--hard", self.desk.sources[rest[-1].name].id, cwd=self.tree)
        for patch in rest:
            self._carry(patch)
        commits = gitwork.above(self.tree, PRISTINE_TAG)
        wanted = [p.contracts[0] for p in self.desk.patches]
        if [(messages.fixes(c.message) or [""])[0] for c in commits] != wanted:
            self._stop(None, f"{self._shown} must hold a commit for each of {', '.join(wanted)}, in this order", [])
        mails = publish.patches(self.tree, commits)
        return Imported(self._files(mails), self._changed(mails))

    def _carry(self, patch: Patch) -> None:
        there = {f for c in gitwork.above(self.tree, PRISTINE_TAG) for f in messages.fixes(c.message)}
        if patch.contracts[0] in there:
            return
        if patch.name in self.state.asked:
            self._stop(
                None, f"{patch.name} has no commit in {self._shown} (trailer {CONTRACT}: {patch.contracts[0]})", []
            )
        before, source = gitwork.commit_of(self.tree), self.desk.sources[patch.name]
        labels = Labels(f"{self.patch.name} with the edit", "the series before it", patch.name)
        merged = carry.merge(self.tree, source, source.message, labels)
        if merged.conflicts or merged.content == before.tree:
            why = f"{len(merged.conflicts)} files in conflict" if merged.conflicts else "nothing is left of it"
            self._stop(patch.name, f"{patch.name} needs a person on top of the edit, {why}", merged.conflicts)
        self._mark(edited=True)

    def _files(self, mails: Mapping[str, bytes]) -> dict[str, bytes]:
        folder = self.desk.folder
        files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        files = {name: data for name, data in files.items() if not name.endswith(".patch")} | dict(mails)
        if list(mails) != series.listed(folder):
            files[series.SERIES_FILE] = publish.series_file(list(mails), f"vLLM {self.desk.release}", folder)
        return files

    def _changed(self, mails: Mapping[str, bytes]) -> dict[str, str]:
        """What differs from the series that is there: the edit itself, and what follows from it."""
        changed = {}
        old = {patch.contracts[0]: patch for patch in self.desk.patches}
        for (name, data), fix in zip(mails.items(), old, strict=True):
            if name != old[fix].name or data != old[fix].data:
                changed[name] = "the edit" if fix == self.patch.contracts[0] else difference.how(old[fix].data, data)
        return changed

    def _note_resolution(self, upstream: str) -> None:
        """Keep what an export of the edited patch could not do by itself."""
        git("checkout", "-q", "--detach", self.state.head, cwd=self.tree)
        made = {messages.fixes(c.message)[0]: c for c in gitwork.above(self.tree, PRISTINE_TAG)}
        patch = made[self.patch.contracts[0]]
        carrier = self.desk.carrier(self.tree, upstream, {self.patch.name: patch})
        content = strip.with_own_files(self.tree, gitwork.tree_of(self.tree, self.state.tip), patch.id)
        wanted = Commit(self.state.tip, content, patch.message, patch.author)
        mail = carrier.difference(self.patch, gitwork.commit_of(self.tree, self.state.below), wanted)
        folders = self.desk.recorded(upstream)
        carriers.note(folders[0 if "-onto-" in upstream else 1], self.patch, mail)

    @property
    def _shown(self) -> Path:
        return self.desk.shown(self.tree)

    def _stop(self, name: str | None, message: str, conflicts: list[carry.Conflict]) -> NoReturn:
        """Leave the tree to a person."""
        for conflict in conflicts:
            self.desk.progress.say(f"    {conflict.path}: {conflict.how}, {len(conflict.hunks)} hunks")
        self.state.waiting = True
        self.state.asked += [name] if name else []
        self.state.save(self.folder)
        command = self.desk.command("import-pr.sh", self.patch)
        raise NeedsPerson(
            f"{message}: edit it in {self._shown} with ordinary git, then run {command} --continue "
            f"(--abort throws it away)"
        )


@dataclass(frozen=True)
class _Counterpart:
    """The patch's commit as upstream would have it, on ``parent``."""

    commit: Commit
    parent: str
