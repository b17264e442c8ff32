"""What is measured of a branch: its format, its contracts and its own tests, each also without the patch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from k3patches import contracts, lint, patchtests
from k3patches.contracts import Outcome
from k3patches.errors import UserError
from k3patches.git import git
from k3patches.pr import hooks
from k3patches.rebase import gitwork
from k3patches.rebase.bench import Bench
from k3patches.series import Patch

DESELECTED = re.compile(r"(\d+) deselected")


@dataclass(frozen=True)
class Tests:
    """How a patch's own tests did: counts, and whether some module could not even be imported."""

    __test__ = False

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    not_importable: int = 0
    deselected: int = 0

    @property
    def ok(self) -> bool:
        return self.passed + self.deselected > 0 and not self.failed and not self.not_importable

    def __str__(self) -> str:
        words = {"not_importable": "modules cannot be imported", "deselected": "for a GPU not run"}
        if self.not_importable == 1:
            words["not_importable"] = "module cannot be imported"
        told = [f"{n} {words.get(word, word)}" for word, n in asdict(self).items() if n]
        return ", ".join(told) or "none ran"


@dataclass
class Results:
    """``without`` says why nothing was run, where that is so; ``ran_on`` are the interpreter's and torch's versions.

    ``contracts`` and ``tests`` are pairs: upstream without the patch, and with it.  ``hooks`` is what upstream's own
    scripts find, which a person has to see to before upstream's CI is content.
    """

    without: str = ""
    ran_on: dict[str, str] = field(default_factory=dict)
    contracts: dict[str, tuple[Outcome, Outcome]] = field(default_factory=dict)
    test_files: list[str] = field(default_factory=list)
    tests: tuple[Tests, Tests] = (Tests(), Tests())
    unformatted: list[str] | None = None
    hooks: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """What keeps the branch from being a pull request, in words."""
        found = [
            f"its contract {fix} does not hold there ({after})"
            for fix, (_, after) in self.contracts.items()
            if not after.holds
        ]
        if self.test_files and not self.tests[1].ok and not self.without:
            found.append(f"its own tests fail ({self.tests[1]})")
        return found + [f"it is not formatted as upstream wants it ({each})" for each in self.unformatted or []]

    @property
    def native(self) -> list[str]:
        """Fixes that hold without the patch."""
        return [fix for fix, (before, _) in self.contracts.items() if before.holds]


def measure(
    patch: Patch, before: Path, after: Path, bench: Bench, logs: Path, ran_on: dict[str, str], without: str
) -> Results:
    """Run everything on the clean git work trees ``after`` and ``before``, which is it without the patch.

    Both see each other's commits, and ``before`` is left with the patch's tests laid over it.  Where ``without`` gives
    a reason, only the format is looked at.
    """
    results = Results(without, ran_on, test_files=patchtests.files([patch], after))
    results.unformatted = unformatted(patch, after)
    if without:
        return results
    results.hooks = list(hooks.findings(after, [f for f in patch.files if (after / f).is_file()], bench.python))
    fixes = patch.contracts
    logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(contracts.PARALLEL) as pool:
        sides = [(before, "without"), (after, "with")]
        found = list(pool.map(lambda side: bench.run(side[0], fixes, logs / f"contracts-{side[1]}.log"), sides))
        results.contracts = {fix: (found[0][fix], found[1][fix]) for fix in fixes}
        if results.test_files:
            tests = [f for f in patch.files if f.startswith("tests/") and (after / f).is_file()]
            git("checkout", "-q", gitwork.head(after), "--", *tests, cwd=before)
            first, second = pool.map(
                lambda side: _tests(results.test_files, side[0], bench.python, logs / f"tests-{side[1]}.log"), sides
            )
            results.tests = first, second
    return results


def unformatted(patch: Patch, tree: Path) -> list[str] | None:
    """What ruff says against the files of the patch; ``None`` where it is not installed."""
    try:
        return list(lint.unformatted(tree, [f for f in patch.files if f.endswith(".py") and (tree / f).is_file()]))
    except lint.Skipped:
        return None


def _tests(files: Sequence[str], tree: Path, python: str, output: Path) -> Tests:
    """Run the test modules ``files`` in ``tree``; one that cannot be imported stops no other."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        command, env = patchtests.command(python, tree)
        command += ["--continue-on-collection-errors", f"--report-log={log}", *files]
        with output.open("w") as out:
            subprocess.run(command, cwd=tree, env=os.environ | env, stdout=out, stderr=out, check=False)
        entries = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    if not entries:
        raise UserError(f"the patch's tests did not run on {tree}:\n{output.read_text(errors='replace')[-2000:]}")
    counts: Counter[str] = Counter()
    failed = set()
    for entry in entries:
        kind, outcome = entry.get("$report_type"), entry.get("outcome")
        if kind == "CollectReport" and outcome == "failed":
            counts["not_importable"] += 1
        elif kind == "CollectReport" and outcome == "skipped":
            counts["skipped"] += 1
        elif kind == "TestReport" and outcome == "failed":
            failed.add(entry["nodeid"])
        elif kind == "TestReport" and (outcome == "skipped" or entry["when"] == "call"):
            counts[outcome] += 1
    closing = output.read_text(errors="replace").strip().splitlines()[-1:]
    if closing and (match := DESELECTED.search(closing[0])):
        counts["deselected"] = int(match[1])
    return Tests(**counts | {"failed": len(failed)})
