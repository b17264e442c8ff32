"""Run the same test files on two sides, pristine and patched, and say what passes on the one and not on the other.

A side's files are run by a few processes, one after another.  Each writes down its steps as it goes
(:mod:`.reporter`): where one crashes, or makes no step for too long and is ended, the next goes on behind the test
at which that happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

REPORTER = "k3patches.upstream.reporter"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
CRASHED, HUNG, NOT_RUN = "crashed", "hung", "not run"
# pytest without the working folder before all else on Python's path.
PYTEST = "import sys; del sys.path[0]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
# Nobody listens there.
NOWHERE = "http://127.0.0.1:9"
# How many tests of a file may crash or hang before the rest of it is left.
TRIES = 2
# How often a process is looked after.
STEP_S = 0.2


@dataclass(frozen=True)
class Side:
    """One of the two: ``tests`` is the folder that holds tests/, ``path`` what is searched for modules before it."""

    name: str
    tests: Path
    python: str
    path: Sequence[Path] = ()


@dataclass(frozen=True)
class Limits:
    """``step_s`` without a step end a process; ``end`` (of the monotonic clock) ends all; ``memory`` is in GiB.

    A file gets ``file_s`` of the processor: without a GPU, some would take hours with sizes that are made for one.
    """

    step_s: float
    file_s: float = 0
    end: float = float("inf")
    memory: int = 0


@dataclass(frozen=True)
class Result:
    """How a test went, and the first line of what was wrong."""

    outcome: str
    error: str = ""


@dataclass
class Outcomes:
    """What is known of a side: ``tests`` by node id, ``broken`` the files that could not be collected, ``cut`` those
    that time ended."""

    tests: dict[str, Result] = field(default_factory=dict)
    broken: dict[str, Result] = field(default_factory=dict)
    collected: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)

    def update(self, other: Outcomes) -> None:
        self.tests.update(other.tests)
        self.broken.update(other.broken)
        self.collected |= other.collected
        self.cut |= other.cut

    def counts(self) -> dict[str, int]:
        """How many tests went how; a file that could not be collected counts as one that failed or was skipped."""
        counter = Counter(r.outcome for r in [*self.tests.values(), *self.broken.values()])
        return {outcome: counter[outcome] for outcome in (PASSED, FAILED, SKIPPED, CRASHED, HUNG)}

    def of(self, test: str) -> Result:
        """How a test went, also where its file was not collected or has no such test."""
        file = file_of(test)
        return self.tests.get(test) or self.broken.get(file) or Result(NOT_RUN, f"{file} has no such test")


@dataclass(frozen=True)
class Runner:
    """``work`` keeps logs and steps: what is done there already is not done again.

    ``plugins`` are further pytest plugins, ``env`` what the environment must have.
    """

    work: Path
    limits: Limits
    jobs: int
    chunk: int
    plugins: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = print

    def run(self, sides: Sequence[Side], chosen: Sequence[str]) -> list[Outcomes]:
        """Run files, or of these the tests that are named, on both sides, several processes at a time.

        The second side only runs what passes on the first: no other test has anything to lose.
        """
        results = [Outcomes() for _ in sides]
        pieces: queue.SimpleQueue[tuple[int, Sequence[str]]] = queue.SimpleQueue()
        # One after the other's neighbour, so that no piece gets all the files of a folder that take long.
        total = -(-len(chosen) // self.chunk)
        for at in range(total):
            pieces.put((at, chosen[at::total]))
        lock, broken = threading.Lock(), []

        def work() -> None:
            try:
                while True:
                    at, piece = pieces.get_nowait()
                    for side, known in zip(sides, results, strict=True):
                        start = time.monotonic()
                        outcomes = self._piece(side, piece, f"{side.name}-{at:03}")
                        counts = ", ".join(f"{n} {word}" for word, n in outcomes.counts().items() if n) or "nothing ran"
                        with lock:
                            known.update(outcomes)
                            self.say(f"  {at + 1}/{total} {side.name}, {time.monotonic() - start:.0f} s: {counts}")
                        piece = [test for test, r in outcomes.tests.items() if r.outcome == PASSED]
            except queue.Empty:
                pass
            except BaseException as e:
                broken.append(e)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if broken:
            raise broken[0]
        return results

    def _piece(self, side: Side, chosen: Sequence[str], name: str) -> Outcomes:
        """Run ``chosen``, files or tests of them, in as many processes as it takes."""
        self.work.mkdir(parents=True, exist_ok=True)
        steps, log = self.work / f"{name}.steps", self.work / f"{name}.log"
        files = list(dict.fromkeys(file_of(test) for test in chosen))
        files = [file for file in files if (side.tests / file).is_file()]
        options = [f"--steps={steps}"]
        if any("::" in test for test in chosen):
            only = self.work / f"{name}.only"
            only.write_text(json.dumps(list(chosen)))
            options.append(f"--only={only}")
        ended, done = self.work / f"{name}.ended", self.work / f"{name}.done"
        crashes = _results(ended)
        groups = [] if done.is_file() else [files]
        while groups:
            group = [file for file in groups.pop() if file not in crashes]
            if not group:
                continue
            end = self._process(side, [*options, *group], steps, log)
            outcomes, last = read_steps(steps, crashes)
            if end is None:
                outcomes.cut.update(files)
                return outcomes
            if not last and end.outcome == PASSED:
                continue
            if not last and len(group) > 1:
                # It did not come so far, for a conftest.py perhaps that only some of the files have.
                groups += [[file] for file in group]
                continue
            # The test, or the file in collection, at which it happened is left out then.
            crashes[last or group[0]] = (
                Result(CRASHED, f"ended in it, see {log.name}") if end.outcome == PASSED else end
            )
            ended.write_text(json.dumps({at: [r.outcome, r.error] for at, r in crashes.items()}))
            often = Counter(file_of(at) for at in crashes)
            groups.append([file for file in group if often[file] < TRIES])
        done.touch()
        return read_steps(steps, crashes)[0]

    def _process(self, side: Side, arguments: Sequence[str], steps: Path, log: Path) -> Result | None:
        """Run pytest once; how it ended where it was not by itself, or ``None`` where there is no more time."""
        if time.monotonic() >= self.limits.end:
            return None
        command = [side.python, "-c", PYTEST, "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        for plugin in (REPORTER, *self.plugins):
            command += ["-p", plugin]
        command += ["--memory", str(self.limits.memory), "--file-seconds", str(self.limits.file_s)]
        # Named, since pytest would take what it finds above the files, this project's own for one.
        ini = side.tests / "pyproject.toml"
        command += ["-c", str(ini) if ini.is_file() else os.devnull]
        # Upstream's way, to put its root before all else, would hide what the side's path has first.
        command += ["--rootdir", str(side.tests), "--import-mode=append", "--tb=native", *arguments]
        with log.open("ab") as out:
            # A session of its own, so that what tests start ends with it.
            process = subprocess.Popen(
                command,
                cwd=side.tests,
                env=self._environment(side),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                return self._watch(process, steps, log)
            finally:
                _end(process)

    def _watch(self, process: subprocess.Popen[bytes], steps: Path, log: Path) -> Result | None:
        size, since = -1, time.monotonic()
        while process.poll() is None:
            now, seen = time.monotonic(), steps.stat().st_size if steps.is_file() else 0
            if seen != size:
                size, since = seen, now
            if now >= self.limits.end:
                return None
            if now - since > self.limits.step_s:
                return Result(HUNG, f"no end after {self.limits.step_s:.0f} s")
            time.sleep(STEP_S)
        code = process.returncode
        # pytest's own words for what it has run: all passed, some failed, none left to run.
        if code in (0, 1, 5):
            return Result(PASSED)
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Result(CRASHED, f"the interpreter ended by {reason}, see {log.name}")

    def _environment(self, side: Side) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and "proxy" not in k.lower()}
        path = [*side.path, side.tests, Path(__file__).resolve().parents[2]]
        scratch = self.work / "home"
        offline = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            # What somebody has downloaded there must not decide what runs.
            "HF_HOME": str(scratch / "huggingface"),
            "VLLM_CACHE_ROOT": str(scratch / "vllm"),
            "VLLM_NO_USAGE_STATS": "1",
            "no_proxy": "localhost,127.0.0.1,::1",
            **{f"{scheme}_proxy": NOWHERE for scheme in ("http", "https", "all")},
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        own = {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
        return inherited | offline | own | dict(self.env)


@dataclass(frozen=True)
class Turned:
    """A test that passes on the pristine side, and on the patched one ended in ``patched``."""

    test: str
    patched: Result


@dataclass(frozen=True)
class Comparison:
    """``turned`` passed on the pristine side alone; ``unsteady`` did not do so again; ``gone`` are taken out."""

    pristine: Outcomes
    patched: Outcomes
    turned: Sequence[Turned]
    unsteady: Sequence[str]
    gone: Sequence[str]


def summary(title: str, comparison: Comparison) -> list[str]:
    """The counts of both sides, and each test that turned."""
    lines = [
        f"{title}, {side}: {', '.join(f'{n} {word}' for word, n in outcomes.counts().items() if n) or 'nothing ran'}"
        for side, outcomes in (("pristine", comparison.pristine), ("patched, what passes there", comparison.patched))
    ]
    lines += [f"  turned: {t.test}\n    {t.patched.outcome}: {t.patched.error}" for t in comparison.turned]
    lines += [f"  does not turn when it is run again: {test}" for test in comparison.unsteady]
    lines += [f"  taken out by a patch: {test}" for test in comparison.gone]
    return lines


def compare(
    runner: Runner, pristine: Side, patched: Side, files: Sequence[str], changed: Iterable[str] = ()
) -> Comparison:
    """Run ``files`` on both sides; what seems to have turned is run once more by itself before it counts.

    Of the ``changed`` files, tests that the patched side no longer has were taken out on purpose.
    """
    before, after = runner.run((pristine, patched), files)
    suspects = _suspects(before, after)
    own = set(changed)
    gone = [t for t in suspects if file_of(t) in own and t not in after.tests and file_of(t) in after.collected]
    suspects = [t for t in suspects if t not in set(gone)]
    turned, unsteady = [], []
    if suspects:
        runner.say(f"  once more: {len(suspects)} that passed on the {pristine.name} side alone")
        by_file: dict[str, list[str]] = {}
        for test in suspects:
            by_file.setdefault(file_of(test), []).append(test)
        for at, tests in enumerate(by_file.values()):
            again = replace(runner, work=runner.work / f"again-{at:03}", jobs=1, chunk=len(tests))
            first, second = again.run((pristine, patched), tests)
            for test in tests:
                if first.of(test).outcome == PASSED and second.of(test).outcome != PASSED:
                    turned.append(Turned(test, second.of(test)))
                else:
                    unsteady.append(test)
    return Comparison(before, after, turned, unsteady, gone)


def _suspects(before: Outcomes, after: Outcomes) -> list[str]:
    """What passed before and not after, where time did not end the run before."""
    return [
        test
        for test, result in before.tests.items()
        if result.outcome == PASSED and after.of(test).outcome != PASSED
        if test in after.tests or file_of(test) not in after.cut
    ]


def entries(path: Path) -> list[dict[str, Any]]:
    """What was written into ``path``; a line that a kill cut off is none."""
    steps = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            steps.append(json.loads(line))
        except ValueError:
            continue
    return steps


def read_steps(path: Path, crashes: Mapping[str, Result]) -> tuple[Outcomes, str]:
    """What a file of steps says, with the ``crashes`` that ended its processes, and what it last began."""
    outcomes, last = Outcomes(), ""
    for entry in entries(path):
        event, at = entry["event"], entry["id"]
        last = at if event in ("collect", "start") else ""
        if event == "end":
            outcomes.tests[at] = Result(entry["outcome"], entry["error"])
        elif event == "broken":
            outcomes.broken[file_of(at)] = Result(entry["outcome"], entry["error"])
        elif event == "collected" and at.endswith(".py"):
            outcomes.collected.add(at)
    for at, result in crashes.items():
        (outcomes.tests if "::" in at else outcomes.broken)[at] = result
    return outcomes, last


def _results(path: Path) -> dict[str, Result]:
    return {at: Result(*fields) for at, fields in json.loads(path.read_text()).items()} if path.is_file() else {}


def file_of(test: str) -> str:
    """The file of a node id."""
    return test.partition("::")[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, and what it started and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
