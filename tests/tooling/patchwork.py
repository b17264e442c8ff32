"""What the tests of edits share: an open edit of the miniature, and contracts and tests that take no time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from k3patches import contracts, patchtests
from miniature import RELEASE, SOURCE, Mini, git
from rebasing import CONTRACTS, run_contracts, write_contracts

WRITTEN, ERROR, NOTHING, PERSON = 0, 1, 3, 4
ALPHA = SOURCE["vllm/alpha.py"].replace("x + 99", "x + 100")


def quickly(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """What a fixture yields from: the names of the patches whose own tests were run, which fail where they say so."""
    write_contracts(mini, CONTRACTS)
    ran: list[list[str]] = []

    def own_tests(patches: list[object], tree: Path, python: str, jobs: str, output: object) -> bool:
        ran.append([p.name for p in patches])  # type: ignore[attr-defined]
        return not any("assert False" in path.read_text() for path in tree.glob("tests/test_*.py"))

    monkeypatch.setattr(contracts, "run", run_contracts)
    monkeypatch.setattr(patchtests, "run", own_tests)
    yield ran


def install() -> None:
    """The same for a process of its own."""
    contracts.run = run_contracts
    patchtests.run = lambda *arguments, **named: True


def edit_dir(mini: Mini) -> Path:
    return mini.build / "edit" / f"v{RELEASE}"


def opened(mini: Mini) -> Path:
    return edit_dir(mini) / "tree"


def carried(mini: Mini) -> Path:
    return edit_dir(mini) / "carry" / "tree"


def written(mini: Mini) -> dict[str, bytes]:
    """All of patches/ and of the contracts, by path."""
    folders = (mini.root / "patches", mini.root / "tests" / "contracts")
    return {str(p.relative_to(mini.root)): p.read_bytes() for f in folders for p in f.rglob("*") if p.is_file()}


def amend(tree: Path, path: str, old: str, new: str) -> None:
    """Change a file, and make that part of the last commit."""
    replace(tree / path, old, new)
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "--amend", "--no-edit")


def replace(path: Path, old: str, new: str) -> None:
    """Change the first ``old`` in a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
