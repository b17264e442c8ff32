"""The tooling is for every Python from 3.10 on: what can be told of one that is not installed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from k3patches import base
from miniature import ROOT

OLDEST = "3.10"
TOOLS = Path(sys.executable).parent


def vermin(*paths: Path) -> subprocess.CompletedProcess[str]:
    """vermin, which knows since when Python has a module, a function or a piece of syntax."""
    # It takes the value of a dict's item for a str, as Python 2 had it.
    command = [TOOLS / "vermin", f"-t={OLDEST}-", "--no-tips", "--violations", "--exclude", "str.decode", *paths]
    return subprocess.run(command, capture_output=True, text=True)


def test_all_places_name_the_same_oldest_python() -> None:
    project = base.tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == f">={OLDEST}"
    assert project["tool"]["ruff"]["target-version"] == f"py{OLDEST.replace('.', '')}"
    assert f"needs Python {OLDEST} or newer" in (ROOT / "README.md").read_text()
    assert f"({OLDEST.replace('.', ', ')})" in (ROOT / "ci" / "env.sh").read_text()


def test_nothing_is_used_that_the_oldest_lacks() -> None:
    done = vermin(ROOT / "ci")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Minimum required versions: {OLDEST}" in done.stdout
    assert "could not be combined" not in done.stdout


@pytest.mark.parametrize("line", ["import tomllib\n", "from datetime import UTC\n", "type Name = str\n"])
def test_what_is_newer_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "new.py").write_text(line)
    assert vermin(tmp_path / "new.py").returncode != 0


@pytest.mark.parametrize("version", [OLDEST, "3.13"])
def test_the_types_hold(version: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--python-version", version, "--cache-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
