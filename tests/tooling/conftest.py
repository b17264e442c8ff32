"""What the tests of the tooling share: a miniature project, fresh for each test, and a package index."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

from miniature import Mini, Run, create, in_process, require_ok
from package_index import PackageIndex


@pytest.fixture(scope="session")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Mini:
    """A miniature that others are copied from; nothing was built in it."""
    return create(tmp_path_factory.mktemp("pattern") / "project")


@pytest.fixture(scope="session")
def built_pattern(pattern: Mini, tmp_path_factory: pytest.TempPathFactory) -> Mini:
    """The same with everything built."""
    mini = Mini(shutil.copytree(pattern.root, tmp_path_factory.mktemp("built") / "project", symlinks=True))
    with pytest.MonkeyPatch.context() as patch:
        _environment(mini, patch)
        require_ok(in_process(mini, patch)("build", "--arch", "x86_64"))
    return mini


@pytest.fixture
def mini(pattern: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """A fresh miniature: the cache is warm, and no index answers."""
    return _copy(pattern, tmp_path, monkeypatch)


@pytest.fixture
def built(built_pattern: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """A fresh miniature in which the default wheel was built."""
    return _copy(built_pattern, tmp_path, monkeypatch)


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line on the test's miniature, in this process."""
    name = "built" if "built" in request.fixturenames else "mini"
    return in_process(request.getfixturevalue(name), monkeypatch)


@pytest.fixture
def index(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """A package index on this machine that serves the miniature's files, and that pip is configured for."""
    with PackageIndex(mini.files) as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        # Waiting longer from try to try is not what these tests are about.
        monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
        yield server


def _copy(pattern: Mini, folder: Path, patch: pytest.MonkeyPatch) -> Mini:
    mini = Mini(shutil.copytree(pattern.root, folder / "project", symlinks=True))
    _environment(mini, patch)
    return mini


def _environment(mini: Mini, patch: pytest.MonkeyPatch) -> None:
    wanted = mini.environment()
    for name in set(os.environ).difference(wanted):
        patch.delenv(name)
    for name, value in wanted.items():
        patch.setenv(name, value)
    patch.chdir(mini.root)
