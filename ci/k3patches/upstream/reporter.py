"""A pytest plugin that writes down each step as it happens, so that what a crash or a hang ended is known.

One JSON object a line; what an earlier process wrote into the same file has been done and is left out.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from k3patches.upstream.sides import entries, file_of

LONGEST = 300
PR_SET_PDEATHSIG = 1


class Reporter:
    """Writes into ``path``; ``only`` are the tests to run, or all, and a file gets ``seconds`` of the processor."""

    def __init__(self, path: Path, only: frozenset[str] | None, seconds: float) -> None:
        self.only, self.seconds = only, seconds
        self.spent: dict[str, float] = {}
        self.began = 0.0
        self.done = {entry["id"] for entry in entries(path) if entry["event"] in ("start", "end")}
        self.file = path.open("a", encoding="utf-8", buffering=1)
        self.outcome, self.error = "passed", ""

    def write(self, **entry: object) -> None:
        self.file.write(json.dumps(entry) + "\n")

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        if isinstance(collector, pytest.Module):
            self.write(event="collect", id=collector.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(event="broken", id=report.nodeid, outcome="failed", error=reason(report.longrepr))
        elif report.skipped:
            self.write(event="broken", id=report.nodeid, outcome="skipped", error=reason(report.longrepr))
        else:
            self.write(event="collected", id=report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [i for i in items if i.nodeid not in self.done and (self.only is None or i.nodeid in self.only)]
        config.hook.pytest_deselected(items=[i for i in items if i not in set(chosen)])
        items[:] = chosen

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.error, self.began = "passed", "", time.process_time()
        self.write(event="start", id=nodeid)

    # Before fixtures are made.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.seconds and self.spent.get(file_of(item.nodeid), 0) > self.seconds:
            pytest.skip("its file took too long")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A teardown that fails after a test that passed is a failure, and one that is skipped none.
        if report.failed or (report.skipped and self.outcome == "passed"):
            self.outcome, self.error = report.outcome, reason(report.longrepr)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        file = file_of(nodeid)
        self.spent[file] = self.spent.get(file, 0) + time.process_time() - self.began
        self.write(event="end", id=nodeid, outcome=self.outcome, error=self.error)


def reason(longrepr: Any) -> str:
    """The first line of the error, or why it was skipped."""
    if isinstance(longrepr, tuple):
        return str(longrepr[-1]).partition("\n")[0][:LONGEST]
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).partition("\n")[0][:LONGEST]
    lines = [line.strip() for line in str(longrepr).splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[-1][:LONGEST]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--steps", type=Path, help="file for one JSON object a step")
    parser.addoption("--only", type=Path, help="file with a JSON list of the tests to run")
    parser.addoption("--memory", type=int, default=0, help="GiB that the process may have")
    parser.addoption("--file-seconds", type=float, default=0, help="of the processor, after which a file is left")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--steps") and sys.platform == "linux":
        # Whoever is killed that started this must not leave it behind.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if memory := config.getoption("--memory"):
        resource.setrlimit(resource.RLIMIT_DATA, (memory << 30,) * 2)
    if path := config.getoption("--steps"):
        only = config.getoption("--only")
        chosen = frozenset(json.loads(only.read_text())) if only else None
        config.pluginmanager.register(Reporter(path, chosen, config.getoption("--file-seconds")), "k3-steps")
