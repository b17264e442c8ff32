"""Merge the steps of a plan onto a target, and remember what came out."""

from __future__ import annotations

from pathlib import Path

from k3patches import base as bases
from k3patches import fetch, messages, series
from k3patches.project import Project
from k3patches.rebase import carry, gitwork
from k3patches.rebase.carry import Labels, Merge
from k3patches.rebase.gitwork import Commit
from k3patches.rebase.plan import Candidate, Step
from k3patches.rebase.store import Store
from k3patches.source import Sdist


class Merger:
    """``target`` is what conflict markers call the target; ``failing`` are the fixes that it lacks."""

    def __init__(self, project: Project, store: Store, cache: Path, target: str, failing: set[str]) -> None:
        self.project, self.store, self.cache, self.target, self.failing = project, store, cache, target, failing
        # What automatic merges gave, by commit and the tree that they were carried onto.
        self._known: dict[tuple[str, str], Merge] = {}
        self._sources: dict[str, dict[str, Commit]] = {}

    def merge(self, tree: Path, step: Step, before: Commit) -> Merge:
        """Merge onto ``tree``'s HEAD, which is ``before``; a patch of the target's own starts from what is there."""
        labels = self.labels(step)
        if not step.candidate or not labels:
            return Merge(before.tree, "", ("", "", ""), [])
        commit = self.source(step.candidate)
        wanted = messages.trimmed(commit.message, step.fixes, self.failing)
        merged = carry.merge(tree, commit, wanted, labels)
        self._known[commit.id, before.tree] = merged
        return merged

    def known(self, step: Step, before: Commit) -> Merge | None:
        """What :meth:`merge` gave before, if it did."""
        if not step.candidate:
            return Merge(before.tree, "", ("", "", ""), [])
        return self._known.get((self.source(step.candidate).id, before.tree))

    def labels(self, step: Step) -> Labels | None:
        return Labels.of(self.target, step.candidate.release, step.key) if step.candidate else None

    def source(self, candidate: Candidate) -> Commit:
        """The commit of a patch in its own base's series."""
        if candidate.release not in self._sources:
            folder = self.project.series_dir(candidate.release)
            base, patches = bases.load(folder), series.load(folder)
            source = Sdist(fetch.fetch(base.sdist, self.cache), base.sdist.sha256)
            commits = self.store.series(self.store.pristine(source), patches)
            known = {p.name: gitwork.commit_of(self.store.path, c) for p, c in zip(patches, commits, strict=True)}
            self._sources[candidate.release] = known
        return self._sources[candidate.release][candidate.patch.name]
