"""Run contracts on a tree, and remember how trees did that were tried before."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from k3patches import contracts, files
from k3patches.contracts import Outcome
from k3patches.errors import UserError
from k3patches.rebase import gitwork
from k3patches.rebase.errors import Broken

IDENTITY = "import sys, importlib.metadata as m; print(sys.version, m.version('torch'))"


class Bench:
    """Contracts in ``folder``, run with ``python``; ``memory`` is a folder that may be lost at any time.

    What is remembered goes by content: the tree's, the contract's with all that contracts share, and torch's.
    """

    def __init__(self, folder: Path, python: str, memory: Path, fresh: bool = False) -> None:
        self.folder, self.python, self.memory, self.fresh = folder, python, memory, fresh

    @property
    def fixes(self) -> list[str]:
        return contracts.fixes(self.folder)

    def run(
        self, tree: Path, fixes: Sequence[str], output: Path, in_short: bool = False, jobs: int = contracts.PARALLEL
    ) -> dict[str, Outcome]:
        """How ``tree``, which is a clean git work tree, does in the contracts of ``fixes``.

        ``in_short`` ends a contract at its first failure; what pytest prints goes to ``output``.
        """
        content = gitwork.tree_of(tree)
        known = {fix: outcome for fix in fixes if (outcome := self._recall(content, fix, in_short))}
        todo = [fix for fix in fixes if fix not in known]
        try:
            known |= contracts.run(
                self.folder, todo, tree, self.python, jobs=jobs, stop_at_first_failure=in_short, output=output
            )
        except UserError as e:
            raise Broken(f"{e.message}; the contracts cannot run there, so nothing is known of any fix") from None
        if empty := [fix for fix in fixes if not known[fix].ran]:
            names = ", ".join(map(contracts.contract_file, empty))
            raise Broken(f"no test of {names} ran there, so nothing is known of {', '.join(empty)}: mend the contract")
        for fix in todo:
            # Where nothing failed, nothing was cut short.
            path = self._place(content, fix, in_short and known[fix].failed > 0)
            files.write_record(path, known[fix])
        return {fix: known[fix] for fix in fixes}

    def _recall(self, content: str, fix: str, in_short: bool) -> Outcome | None:
        for short in (False, True)[: 1 + in_short]:
            try:
                return None if self.fresh else Outcome(**json.loads(self._place(content, fix, short).read_text()))
            except (OSError, ValueError, TypeError):
                continue
        return None

    def _place(self, content: str, fix: str, in_short: bool) -> Path:
        own = (self.folder / contracts.contract_file(fix)).read_bytes()
        digest = hashlib.sha256(self._shared + own).hexdigest()[:40]
        return self.memory / content / f"{fix}-{digest}{'-short' if in_short else ''}.json"

    @cached_property
    def _shared(self) -> bytes:
        digest = hashlib.sha256()
        for path in sorted(self.folder.rglob("*.py")):
            if path.parent != self.folder or not path.name.startswith("test_"):
                digest.update(f"{path.relative_to(self.folder)}\0".encode() + path.read_bytes())
        told = subprocess.run([self.python, "-c", IDENTITY], capture_output=True, check=False)
        return digest.digest() + told.stdout
