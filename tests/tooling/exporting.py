"""A miniature whose patches can be exported in no time: what would be run of vLLM is one expression."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from k3patches import contracts
from k3patches.pr import desk, runs
from k3patches.pr.runs import Tests
from k3patches.refresh import refresh
from miniature import COMMITS, RELEASE, SOURCE, Commit, Mini, git, git_tree, write_files
from rebasing import CONTRACTS, run_contracts, write_contracts

PERSON, NOT_RUN, NOTHING = 4, 6, 3
ALPHA, GAMMA = SOURCE["vllm/alpha.py"], SOURCE["vllm/gamma.py"]
TEMPLATE = """\
PLEASE FILL IN THE DESCRIPTION

## Purpose

## Test Plan

## Test Result

---
<details>
<summary> Checklist </summary>

- [ ] The purpose.
</details>
"""
# Another patch of the file that alpha-fix changes: a test imports its module, and it changes another function.
DELTA = Commit(
    "delta-fix",
    "[Bugfix] Add the right number to the far end of alpha",
    "The function o of alpha.py added 111, and what was wanted is 1.\n\nUsers saw it.\n\nalpha.py now adds 1.",
    {
        "vllm/alpha.py": COMMITS[0].files["vllm/alpha.py"].replace("x + 111", "x + 1"),  # type: ignore[union-attr]
        "tests/test_delta.py": (COMMITS[0].files["tests/test_alpha.py"] or "").replace("alpha", "delta"),
    },
)
ALL_CONTRACTS = CONTRACTS | {"delta-fix": 'call("alpha", name="o") == 2'}


def quickly(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contracts and patches' tests of one expression: a patch's tests pass where its contract holds."""
    write_contracts(mini, {fix: f"# {fix}: what is promised.\n{text}" for fix, text in CONTRACTS.items()})
    monkeypatch.setattr(contracts, "run", run_contracts)
    monkeypatch.setattr(desk, "interpreter", lambda python: {"python": "3.11.7", "torch": "2.13.0"})
    monkeypatch.setattr(runs, "_tests", run_tests)


def run_tests(files: Sequence[str], tree: Path, python: str, output: Path) -> Tests:
    """Stands in for ``runs._tests``."""
    output.write_text("ran\n")
    there = [tree / file for file in files]
    if not all(path.is_file() for path in there) or any("cannot pass" in path.read_text() for path in there):
        return Tests(failed=len(files))
    names = [path.stem.removeprefix("test_") for path in there]
    fixes = [f"{name}-fix" for name in names if f"{name}-fix" in ALL_CONTRACTS]
    held = run_contracts(_folder, fixes, tree, python) if fixes else {}
    failed = sum(not outcome.holds for outcome in held.values())
    return Tests(passed=len(files) - failed, failed=failed)


_folder = Path()


def use(mini: Mini) -> None:
    """Say whose contracts decide on the patches' tests."""
    global _folder
    _folder = mini.root / "tests" / "contracts"


def with_series(mini: Mini, commits: tuple[Commit, ...]) -> None:
    """Give the miniature these commits as its series."""
    tree = mini.root / "other-upstream"
    shutil.rmtree(tree, ignore_errors=True)
    git_tree(tree, commits)
    refresh(tree, mini.series_dir)
    fixes = [commit.fix for commit in commits]
    write_contracts(mini, {fix: f"# {fix}: what is promised.\n{ALL_CONTRACTS[fix]}" for fix in fixes})


def clone(mini: Mini, files: dict[str, str | None] | None = None) -> Path:
    """Somebody's clone of upstream: the release with its template, and ``files`` changed since, on main."""
    folder = mini.root / "clone"
    folder.mkdir()
    write_files(folder, SOURCE | {".github/PULL_REQUEST_TEMPLATE.md": TEMPLATE})
    git(folder, "init", "-q", ".")
    git(folder, "add", "-A", "-f", ".")
    git(folder, "commit", "-q", "-m", "upstream")
    git(folder, "tag", "then")
    if files:
        write_files(folder, files)
        git(folder, "add", "-A", "-f", ".")
        git(folder, "commit", "-q", "-m", "upstream goes on")
    # What its owner is at must stay as it is.
    git(folder, "checkout", "-q", "-b", "mine")
    (folder / "vllm" / "kept.py").write_text("mine\n")
    return folder


def result(mini: Mini, name: str, upstream: str = f"v{RELEASE}") -> Path:
    return mini.build / "pr" / upstream / name


def tree(mini: Mini, name: str) -> Path:
    return result(mini, name) / "tree"


def record(mini: Mini, name: str, upstream: str = f"v{RELEASE}") -> dict[str, Any]:
    told: dict[str, Any] = json.loads((result(mini, name, upstream) / "export.json").read_text())
    return told


def series(mini: Mini) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in mini.series_dir.iterdir()}
