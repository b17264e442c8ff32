"""Run what the status follows from on all bases: a list of tasks, done by a few processes at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from k3patches import contracts, patchtests, tree
from k3patches.base import Base
from k3patches.contracts import Outcome, Verdict
from k3patches.errors import UserError
from k3patches.git import git
from k3patches.project import Project
from k3patches.series import Patch
from k3patches.source import Source
from k3patches.status import Column, Inputs, Table, by_fix, findings
from k3patches.zygote import Pytest, zygotes

RAN_ON = """\
import importlib.metadata, json, platform, pytest
print(json.dumps({"python": platform.python_version(), "torch": importlib.metadata.version("torch")}))
"""


@dataclass(frozen=True)
class Subject:
    """One base with all that a run of it needs."""

    base: Base
    patches: Sequence[Patch]
    source: Source


@dataclass(frozen=True)
class Task:
    """One piece of work; ``do`` says in a few words how it went."""

    name: str
    do: Callable[[], str]


@dataclass
class Run:
    """A run over some bases with ``python``, ``jobs`` tasks at a time; ``wrong`` collects what must not be shipped."""

    project: Project
    folder: Path
    python: str
    jobs: int
    fixes: Sequence[str] = ()
    outcomes: dict[tuple[str, str], dict[str, Outcome]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def table(self, subjects: Sequence[Subject], thorough: bool) -> Table:
        """Measure, and collect in ``wrong`` what does not hold.

        ``thorough`` also runs each patch's contracts on the series up to that patch, and the patches' own tests.
        """
        ran_on = interpreter(self.python)
        self.fixes = contracts.fixes(self.folder)
        if not self.fixes:
            raise UserError(f"{self.folder} has no contract, test_FIX.py: this is no whole checkout")
        self._do([task for s in subjects for task in self._trees(s)], "trees")
        modules = contracts.third_party(self.folder)
        with zygotes(self.jobs, self.python, modules, os.environ | contracts.ENVIRONMENT) as pytest:
            # The long ones first, so that no process is left alone with one at the end.
            tasks = [self._prefixes(s, pytest) for s in subjects if thorough]
            tasks += [self._contracts(s, name, pytest) for s in subjects for name in ("patched", "pristine")]
            tasks += [self._patch_tests(s, pytest) for s in subjects if thorough]
            self._do(tasks, "contracts")
        return Table(self.project.revision, ran_on, {s.base.release: self._column(s) for s in subjects})

    def _column(self, subject: Subject) -> Column:
        release = subject.base.release
        before, after = (self.outcomes[release, name] for name in ("pristine", "patched"))
        column = Column(
            Inputs.of(subject.base, subject.patches, self.folder),
            [Verdict(fix, before[fix], after[fix]) for fix in self.fixes],
            by_fix(subject.patches),
        )
        self.wrong += [f"vLLM {release}: {what}" for what in findings(column.verdicts, subject.base, subject.patches)]
        return column

    def _trees(self, subject: Subject) -> Iterator[Task]:
        base = subject.base
        for name, patches in (("pristine", []), ("patched", list(subject.patches))):

            def make(name: str = name, patches: list[Patch] = patches) -> str:
                where = self.project.build_dir(base.release) / name
                where.parent.mkdir(parents=True, exist_ok=True)
                tree.apply(base, subject.source, patches, where)
                return f"{len(patches)} patches" if patches else "as released"

            yield Task(f"{base.release} {name} tree", make)

    def _contracts(self, subject: Subject, name: str, pytest: Pytest) -> Task:
        release = subject.base.release

        def do() -> str:
            where = self.project.build_dir(release)
            output = where / f"contracts-{name}.log"
            found = contracts.run(self.folder, self.fixes, where / name, self.python, output=output, pytest=pytest)
            self.outcomes[release, name] = found
            return f"{sum(o.holds for o in found.values())} of {len(found)} hold"

        return Task(f"{release} {name}", do)

    def _prefixes(self, subject: Subject, pytest: Pytest) -> Task:
        release = subject.base.release

        def do() -> str:
            where = self.project.build_dir(release)
            lines = [""]
            for patch, made in zip(subject.patches, prefixes(where / "patched", where / "prefix"), strict=False):
                found = contracts.run(self.folder, patch.contracts, made, self.python, pytest=pytest)
                failed = [f"{fix} ({outcome})" for fix, outcome in found.items() if not outcome.holds]
                self.wrong += [f"vLLM {release}: up to {patch.name}, {each} does not hold" for each in failed]
                lines.append(f"{patch.number}: " + "; ".join(f"{fix}: {outcome}" for fix, outcome in found.items()))
            return "\n      ".join(lines)

        return Task(f"{release}, each patch on those before it", do)

    def _patch_tests(self, subject: Subject, pytest: Pytest) -> Task:
        release = subject.base.release

        def do() -> str:
            where = self.project.build_dir(release)
            output = where / "patch-tests.log"
            output.write_text("")
            ok = patchtests.forked(subject.patches, where / "patched", pytest, output)
            told = output.read_text(errors="replace").strip().splitlines()
            if not ok:
                self.wrong.append(f"vLLM {release}: tests that the patches carry fail, see {output}")
                return "\n".join(["failed", *told[-40:]])
            summary = [line for line in told if " passed" in line and " in " in line]
            return summary[-1].strip("= ") if summary else "the series carries none"

        return Task(f"{release} patches' own tests", do)

    def _do(self, tasks: Sequence[Task], title: str) -> None:
        console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        with progress, ThreadPoolExecutor(self.jobs) as pool:
            bar = progress.add_task(title, total=len(tasks))
            running = [pool.submit(_timed, task) for task in tasks]
            try:
                for number, done in enumerate(as_completed(running), 1):
                    progress.advance(bar)
                    console.print(f"  {number}/{len(tasks)} {done.result()}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def details(self, table: Table) -> list[str]:
        """The first failures of what is broken, as pytest names them."""
        found = []
        for release, column in table.columns.items():
            output = self.project.build_dir(release) / "contracts-patched.log"
            for v in column.verdicts:
                if v.state is contracts.State.BROKEN:
                    found += [*contracts.failures(output, v.fix), f"  all of it is in {output}"]
        return found


def interpreter(python: str) -> dict[str, str]:
    """The versions of Python and torch that ``python`` has."""
    try:
        done = subprocess.run([python, "-c", RAN_ON], capture_output=True, text=True, check=False)
    except OSError as e:
        raise UserError(f"{python} does not start ({e.strerror}): name another interpreter with --python") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{python} cannot run contracts ({last}): use ci/status.sh, or name another with --python")
    return dict(json.loads(done.stdout))


def prefixes(patched: Path, folder: Path) -> Iterator[Path]:
    """In ``folder``, the tree of ``patched`` up to each of its patches in turn, the last but one at the end."""
    commits = git("rev-list", "--reverse", f"{tree.PRISTINE_TAG}..HEAD", cwd=patched).split()
    # A killed run may have left one.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        git("clone", "-q", "--shared", "--no-checkout", patched.resolve(), ".", cwd=folder)
        for commit in commits[:-1]:
            git("checkout", "-q", commit, cwd=folder)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _timed(task: Task) -> str:
    start = time.monotonic()
    told = task.do()
    return f"{task.name}: {told} [{time.monotonic() - start:.0f} s]"
