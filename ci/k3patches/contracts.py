"""Run the contracts on the pristine and on the patched tree and say which state each fix is in."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from k3patches.errors import UserError
from k3patches.skips import ABSENT, NOT_RUN

# pytest runs at a time; each takes about 2 GiB.
PARALLEL = 2
# Has glibc keep what tensors free; to give every one back and get it anew takes a fifth of the time.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
# Also what the contracts' conftest sets, for what is read at the start and at imports.
ENVIRONMENT = MALLOC | {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# Runs pytest with arguments, has a file take what it prints, and gives the exit status.
Pytest = Callable[[Sequence[str], Path], int]


class State(str, enum.Enum):
    """A fix's state on a base."""

    NATIVE = "native"
    PATCHED = "patched"
    ABSENT = "absent"
    BROKEN = "broken"


@dataclass(frozen=True)
class Outcome:
    """How one tree does in one contract; ``skipped`` counts tests that did not run for another reason than absence.

    ``not_run`` counts those after the first failure, where that was to end it: the other counts are lower bounds then.
    """

    passed: int = 0
    failed: int = 0
    absent: int = 0
    skipped: int = 0
    not_run: int = 0

    @property
    def ran(self) -> bool:
        """Whether there was any test; a contract without one says nothing, not even that it does not hold."""
        return self != Outcome()

    @property
    def holds(self) -> bool:
        return self.passed > 0 and self.failed == 0 and self.skipped == 0

    @property
    def is_absent(self) -> bool:
        return self.absent > 0 and self.passed + self.failed + self.skipped == 0

    def __str__(self) -> str:
        told = [f"{n} {word.replace('_', ' ')}" for word, n in asdict(self).items() if n]
        return ("at least " if self.not_run else "") + (", ".join(told) or "nothing ran")


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    fix: str
    pristine: Outcome
    patched: Outcome

    @property
    def state(self) -> State:
        if not self.pristine.ran:
            return State.BROKEN
        if self.patched.is_absent:
            return State.ABSENT
        if not self.patched.holds:
            return State.BROKEN
        return State.NATIVE if self.pristine.holds else State.PATCHED


def fixes(folder: Path) -> list[str]:
    """Ids of all fixes that have a contract."""
    return sorted(p.stem.removeprefix("test_").replace("_", "-") for p in folder.glob("test_*.py"))


def contract_file(fix: str) -> str:
    """The name of a fix's contract."""
    return f"test_{fix.replace('-', '_')}.py"


def digest(folder: Path) -> str:
    """A checksum of all contracts and of the code that they share."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return found.hexdigest()


def compare(folder: Path, chosen: Sequence[str], pristine: Path, patched: Path, python: str) -> list[Verdict]:
    """Run the contracts of the ``chosen`` fixes on both trees, side by side."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        before, after = pool.map(lambda tree: run(folder, chosen, tree, python), (pristine, patched))
    return [Verdict(fix, before[fix], after[fix]) for fix in chosen]


def run(
    folder: Path,
    chosen: Sequence[str],
    tree: Path,
    python: str,
    *,
    jobs: int = 1,
    stop_at_first_failure: bool = False,
    output: Path | None = None,
    pytest: Pytest | None = None,
) -> dict[str, Outcome]:
    """Run the contracts of the ``chosen`` fixes on one tree, in ``jobs`` processes of their own.

    ``stop_at_first_failure`` ends each contract there, which is enough to know that it does not hold.
    What pytest prints goes to ``output``.  ``pytest`` runs it otherwise than by starting ``python``.
    """
    files = {fix: folder / contract_file(fix) for fix in chosen}
    for fix, file in files.items():
        if not file.is_file():
            raise UserError(f"no contract {file.name} for {fix}: the known fixes are {', '.join(fixes(folder))}")
    if not files:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        log, output = Path(scratch) / "log", output or Path(scratch) / "output"
        # No contract asks for caplog; without one, each test would go through all loggers six times for nothing.
        command = ["-q", "-p", "no:cacheprovider", "-p", "no:logging", f"--report-log={log}", "--tree", str(tree)]
        # Tests are told apart by their file's name below it. Hundreds fail on a pristine tree, and pytest's own
        # tracebacks, for which it parses all of a file for each line, would take a fifth of the time.
        # A contract that cannot be imported is a failure of that one alone.
        command += [f"--rootdir={folder}", "--tb=native", "--continue-on-collection-errors"]
        command += ["--first-failure"] if stop_at_first_failure else []
        # A single one is quicker without a process to hand it out.
        jobs = min(jobs, len(files))
        command += ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
        status = (pytest or process(python))([*command, *map(str, files.values())], output.resolve())
        # 0: all passed, 1: some failed, 2: some could not be collected, 5: there were none; else pytest could not work.
        if status not in (0, 1, 2, 5) or not log.is_file():
            raise UserError(f"the contracts did not run on {tree}:\n{output.read_text(errors='replace')[-4000:]}")
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    counts: dict[str, Counter[str]] = {file.name: Counter() for file in files.values()}
    for entry in entries:
        name = Path(entry.get("nodeid", "").partition("::")[0]).name
        if (kind := _kind(entry)) and name in counts:
            counts[name][kind] += 1
    return {fix: Outcome(**counts[file.name]) for fix, file in files.items()}


def process(python: str) -> Pytest:
    """Runs of pytest as processes of ``python``."""

    def pytest(arguments: Sequence[str], output: Path) -> int:
        with output.open("w") as out:
            command = [python, "-m", "pytest", *arguments]
            return subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=out, stderr=out, check=False).returncode

    return pytest


def third_party(folder: Path) -> list[str]:
    """The modules that are worth importing once for all runs of the contracts in ``folder``."""
    path = folder / "third-party.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [line for line in lines if line and not line.startswith("#")]


def failures(output: Path, fix: str, limit: int = 5) -> list[str]:
    """The first lines with which pytest, in ``output``, closes on the failures of a fix's contract."""
    lines = output.read_text(errors="replace").splitlines() if output.is_file() else []
    name = contract_file(fix)
    return [line for line in lines if line.startswith(("FAILED ", "ERROR ")) and name in line][:limit]


def to_json(verdicts: Sequence[Verdict]) -> str:
    return json.dumps([asdict(v) | {"state": v.state.value} for v in verdicts], indent=1)


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the table for a person."""
    table = Table("fix", "pristine", "patched", "state")
    for v in verdicts:
        table.add_row(v.fix, str(v.pristine), str(v.patched), v.state.value)
    console.print(table)


def _kind(entry: dict[str, object]) -> str | None:
    if entry.get("$report_type") == "CollectReport":
        return {"failed": "failed", "skipped": _skip(entry)}.get(str(entry["outcome"]))
    if entry.get("$report_type") != "TestReport":
        return None
    outcome, when = entry["outcome"], entry["when"]
    if outcome == "failed":
        return "failed"
    if outcome == "skipped":
        return _skip(entry)
    return "passed" if when == "call" else None


def _skip(entry: dict[str, object]) -> str:
    # pytest writes (file, line, "Skipped: reason").
    reason = str(entry["longrepr"][-1]) if isinstance(entry.get("longrepr"), list) else ""  # type: ignore[index]
    reason = reason.removeprefix("Skipped: ")
    return "not_run" if reason == NOT_RUN else "absent" if reason.startswith(ABSENT) else "skipped"
