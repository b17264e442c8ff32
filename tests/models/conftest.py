"""Which releases are compared, and where their trees are."""

from __future__ import annotations

import pytest

RELEASES = ("0.27.1", "0.33.0")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("models")
    group.addoption("--bases", default=",".join(RELEASES), help="releases, by commas, or all that have a series")
    group.addoption("--patched", default="build/v{}/patched", help="where patched trees are, {} for the release")
    group.addoption("--pristine", default=None, help="where the release's trees are; else from the patched tree's tag")
    group.addoption("--thorough", action="store_true", help="every way of loading on every rank: ten minutes a base")
