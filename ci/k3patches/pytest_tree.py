"""The pytest plugin that adds ``--tree``.

It is registered when the package is installed, not from tests/contracts/conftest.py: pytest takes
the value of an option that it does not know yet for a folder of tests, and would load the conftest
of the vLLM tree that is to be tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tree",
        type=Path,
        default=None,
        metavar="PATH",
        help="contracts: the unpacked vLLM source tree to test (default: the patched tree of the default base)",
    )
