"""Find what must be recorded for the engine to come to the same commits by itself."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from k3patches import messages
from k3patches.git import git
from k3patches.rebase import carry, gitwork, resolutions
from k3patches.rebase.gitwork import Commit
from k3patches.rebase.merger import Merger
from k3patches.rebase.plan import Step
from k3patches.tree import PRISTINE_TAG


class Recorder:
    """Works on the commits of ``tree``; ``folder`` may be made, for merges that are not known yet."""

    def __init__(self, tree: Path, folder: Path, merger: Merger) -> None:
        self.tree, self.folder, self.merger = tree, folder, merger
        self._scratch: Path | None = None

    def record(self, commits: Sequence[Commit], plain: Sequence[Step], steps: Sequence[Step]) -> dict[str, bytes]:
        """The files of the folder of resolutions; ``plain`` are the steps that the bases alone ask for."""
        by_fix = {fix: step for step in [*steps, *plain] for fix in step.fixes}
        files: dict[str, bytes] = {}
        order: list[str] = []
        available: set[str] = set()
        parent = gitwork.commit_of(self.tree, PRISTINE_TAG)
        for commit in commits:
            fixes = messages.fixes(commit.message)
            step = next((by_fix[f] for f in fixes if f in by_fix and by_fix[f].key not in order), None)
            step = step or Step(fixes[0], (fixes[0],))
            order.append(step.key)
            merged = self.merger.known(step, parent) or self._merge(step, parent)
            message = messages.trimmed(merged.message, self.merger.failing, available)
            by_itself = (merged.content, message, merged.author)
            if merged.conflicts or (commit.tree, commit.message, commit.author) != by_itself:
                # The scratch tree sees the other's objects as well as its own.
                where = self._scratch or self.tree
                files[f"{step.key}.patch"] = carry.record(where, parent.id, merged.content, commit)
            available.update(fixes)
            parent = commit
        dropped = [step.key for step in plain if step.key not in order]
        if dropped or order != [step.key for step in plain]:
            files[resolutions.ORDER_FILE] = resolutions.order_file(order, dropped)
        return files

    def _merge(self, step: Step, parent: Commit) -> carry.Merge:
        if not self._scratch:
            shutil.rmtree(self.folder, ignore_errors=True)
            objects = [self.merger.store.objects, self.tree / ".git" / "objects"]
            gitwork.work_tree(self.folder, gitwork.pristine(self.tree), objects)
            self._scratch = self.folder
        git("reset", "-q", "--hard", parent.id, cwd=self._scratch)
        git("clean", "-q", "-f", "-d", cwd=self._scratch)
        return self.merger.merge(self._scratch, step, parent)
