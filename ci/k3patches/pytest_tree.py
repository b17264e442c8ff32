"""The pytest plugin that adds the contracts' options.

It is registered when the package is installed, not from tests/contracts/conftest.py: pytest takes
the value of an option that it does not know yet for a folder of tests, and would load the conftest
of the vLLM tree that is to be tested.
"""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path

import pytest

from k3patches import bytecode, garbage
from k3patches.skips import NOT_RUN


class FirstFailures:
    """Skips what follows the first failure in a file."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(_file(report.nodeid))

    # Before fixtures are made; leaving the test out altogether would leave the previous one's standing.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if _file(item.nodeid) in self.failed:
            pytest.skip(NOT_RUN)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tree",
        type=Path,
        default=None,
        metavar="PATH",
        help="contracts: the unpacked vLLM source tree to test (default: the patched tree of the default base)",
    )
    parser.addoption(
        "--first-failure",
        action="store_true",
        help="contracts: leave a file at its first failure and go on with the next (with xdist: --dist loadfile)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--first-failure"):
        config.pluginmanager.register(FirstFailures(), "k3-first-failures")
    if config.getoption("--tree"):
        # vLLM reads those of every installed package anew for each configuration, 10 ms that nothing has changed in.
        vars(metadata)["entry_points"] = functools.cache(metadata.entry_points)
        garbage.collect_seldom()
        bytecode.install(config.getoption("--tree").resolve())


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--tree"):
        # vLLM collects garbage after each load, among all that importing it has left.
        garbage.set_aside()


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("--tree"):
        garbage.set_aside()


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
