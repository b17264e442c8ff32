"""Write an edit back: carried, checked, and then the series as a whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from k3patches import base as bases
from k3patches import messages, refresh, series
from k3patches.errors import UserError
from k3patches.git import GitError, git
from k3patches.messages import CONTRACT
from k3patches.pr import difference
from k3patches.rebase import gitwork, kept, publish
from k3patches.rebase.bench import Bench
from k3patches.rebase.errors import NeedsPerson
from k3patches.series import Patch
from k3patches.tree import PRISTINE_TAG
from k3patches.work import checks
from k3patches.work.carrying import Carrying
from k3patches.work.place import Place, State, digests

EDITED = "the edit"
NEW, GONE = "new", "removed"


@dataclass(frozen=True)
class Options:
    """What the command line says: whether to fold what is not committed, and what to run."""

    amend: bool = False
    run: bool = True
    python: str = ""


@dataclass(frozen=True)
class Written:
    """``changed`` says how each file of the series differs from what was there; ``fixes`` are those of its patches."""

    changed: dict[str, str]
    fixes: set[str] = field(default_factory=set)


class Writing:
    """One base's edit, on its way back."""

    def __init__(self, place: Place, options: Options) -> None:
        self.place, self.options = place, options
        self.state: State = place.state()
        self.carrying = Carrying(place, self.state)

    def abort(self) -> None:
        """Throw away what was carried; the edit stays."""
        if not self.carrying.left:
            raise UserError(
                f"nothing of vLLM {self.place.release} waits for anybody: the edit itself is thrown away with "
                f"{self.place.command('edit.sh', '--abort')}"
            )
        self.carrying.drop()

    def run(self, go_on: bool) -> Written:
        """Carry the later patches on top, check, and write."""
        if go_on and not self.carrying.left:
            raise UserError(f"nothing of vLLM {self.place.release} waits for anybody: leave out --continue")
        if self.carrying.left and not go_on:
            raise NeedsPerson(
                f"{self.carrying.shown} holds patches that somebody was asked to edit: go on with --continue, or go "
                f"back to the edit with --abort"
            )
        edited = self._edited()
        if go_on:
            self.carrying.go_on(edited)
        else:
            self.carrying.start(edited)
        try:
            written = self._finish()
        except UserError as e:
            if not self.carrying.waiting.asked:
                self.carrying.drop()
                raise
            # What a person did to conflicts is there and nowhere else.
            self.carrying.leave()
            raise NeedsPerson(
                f"{e.message}, or amend the commits in {self.carrying.shown}, which have your resolutions too, and run "
                f"{self.place.command('refresh.sh', '--continue')}"
            ) from None
        self.place.close()
        return written

    def _edited(self) -> str:
        """The commit that the person means to write back."""
        tree, shown = self.place.tree, self.place.shown(self.place.tree)
        try:
            head = gitwork.head(tree)
            git("merge-base", "--is-ancestor", self.state.pristine, head, cwd=tree)
            merges = git("rev-list", "--merges", f"{self.state.pristine}..{head}", cwd=tree)
            dirty = git("status", "--porcelain", cwd=tree)
        except GitError as e:
            raise UserError(
                f"{shown} is no git tree on vLLM {self.place.release}'s source any more ({e.brief}): start anew with "
                f"{self.place.command('edit.sh', '--abort')}"
            ) from None
        if self.state.quilt:
            if self.options.amend:
                raise UserError(f"{shown} is quilt's: quilt refresh takes what is changed into a patch, not --amend")
            return head
        if kept.under_way(tree) or gitwork.picking(tree) or gitwork.unmerged(tree):
            raise UserError(f"a git rebase, am or merge is under way in {shown}: finish or abort it first")
        if merges:
            raise UserError(f"{shown} has a merge, {merges[:12]}: make it a line of commits")
        if not dirty:
            return head
        if not self.options.amend:
            first = dirty.splitlines()[0][3:]
            raise UserError(
                f"{shown}/{first} is in no commit: commit it, or fold all such changes into the last commit with "
                f"{self.place.command('refresh.sh', '--amend')}"
            )
        return self._fold(head)

    def _fold(self, head: str) -> str:
        if head == self.state.pristine:
            raise UserError(f"{self.place.shown(self.place.tree)} has no commit to fold changes into: commit them")
        tree, last = self.place.tree, gitwork.commit_of(self.place.tree)
        git("add", "-A", cwd=tree)
        content = git("write-tree", cwd=tree).strip()
        made = gitwork.write_commit(tree, content, gitwork.parent(tree, head), last.message, last.author)
        git("reset", "-q", "--soft", made, cwd=tree)
        return made

    def _finish(self) -> Written:
        below = self.state.pristine
        for commit in self.carrying.commits:
            what = f"commit {commit.id[:12]} ({messages.subject(commit.message)})"
            if not messages.fixes(commit.message):
                raise UserError(
                    f"{what} has no {CONTRACT} trailer: add one with the id of its fix, or squash it into its patch "
                    f"(git rebase -i --autosquash {PRISTINE_TAG})"
                )
            if gitwork.tree_of(self.carrying.tree, below) == commit.tree:
                raise UserError(f"{what} changes nothing: leave it out")
            below = commit.id
        folder = self.carrying.folder / f"v{self.place.release}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.place.series_dir, folder)
        refresh.refresh(self.carrying.tree, folder)
        files = publish.contents(folder)
        if publish.same(self.place.series_dir, files):
            return Written({})
        if digests(self.place.series_dir) != self.state.series:
            raise UserError(
                f"{self.place.shown(self.place.series_dir)} changed since {self.place.shown(self.place.tree)} was "
                f"opened: save your commits with git format-patch, run {self.place.command('edit.sh', '--abort')}, "
                f"open it again and git am them"
            )
        patches, old = series.load(folder), self.place.patches
        changed = _changed(old, patches)
        self._check(patches, old, changed)
        with self.place.project.lock():
            publish.put(self.place.series_dir, files, self.place.stage)
        self.place.store.remember(self.carrying.tree, [p.data for p in patches])
        told = [p for p in [*patches, *old] if p.name in changed]
        return Written(changed, {fix for p in told for fix in p.contracts})

    def _check(self, patches: list[Patch], old: list[Patch], changed: Mapping[str, str]) -> None:
        place = self.place
        firsts = [p.contracts[0] for p in patches]
        found = [f"two patches are for {fix}: squash them" for fix in sorted(set(firsts)) if firsts.count(fix) > 1]
        found += checks.unwritten(patches, place.contracts)
        found = found or checks.linted(
            bases.load(self.carrying.folder / f"v{place.release}"),
            place.source(),
            patches,
            place.contracts,
            self.carrying.folder,
        )
        if self.options.run and not found:
            found = self._runs(patches, old, changed)
        if found:
            raise UserError(
                f"nothing is written: {'; '.join(found)}; mend it in {place.shown(place.tree)} and run "
                f"{place.command('refresh.sh')} again"
            )

    def _runs(self, patches: list[Patch], old: list[Patch], changed: Mapping[str, str]) -> list[str]:
        bench = Bench(self.place.contracts, self.options.python, self.place.root / "outcomes")
        # A tree of its own: what a person resolved stays where it is.
        tree = self.carrying.folder / "runs"
        shutil.rmtree(tree, ignore_errors=True)
        objects = [self.place.store.objects, *(t / ".git" / "objects" for t in (self.place.tree, self.carrying.tree))]
        gitwork.work_tree(tree, self.state.pristine, objects)
        runs = checks.Runs(tree, self.carrying.commits, patches, bench, self._log)
        touched = [p for p in patches if p.name in changed]
        edited = [p for p in touched if changed[p.name] in (EDITED, NEW)]
        have = {fix for p in patches for fix in p.contracts}
        gone = {fix for p in old for fix in p.contracts} - have
        found = runs.with_the_series({fix for p in touched for fix in p.contracts}, gone)
        for patch in edited:
            found += runs.without_it(patch)
        if edited and not found:
            found += runs.own_tests(edited)
        return [f"{', '.join(found)} (what pytest printed last is in {self.place.shown(self._log)})"] if found else []

    @property
    def _log(self) -> Path:
        return self.place.folder / "runs.log"


def _changed(old: list[Patch], new: list[Patch]) -> dict[str, str]:
    """How each patch differs from that of its fix before, by the new file's name; one that is gone by its old name."""
    before = {patch.contracts[0]: patch for patch in old}
    changed = {}
    for patch in new:
        was = before.pop(patch.contracts[0], None)
        if was is None:
            changed[patch.name] = NEW
        elif was.data != patch.data:
            how = difference.how(was.data, patch.data)
            changed[patch.name] = how if "blob ids" in how else EDITED
        elif was.name != patch.name:
            changed[patch.name] = f"was {was.name}"
    return changed | {patch.name: GONE for patch in before.values() if patch.name not in changed}
