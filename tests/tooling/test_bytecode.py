"""Byte code outside of the trees: never that of another source, and shared by those of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from k3patches import contracts
from k3patches.contracts import Outcome
from miniature import Mini

CODE = """\
import inspect, sys
from pathlib import Path
from k3patches import bytecode
sys.dont_write_bytecode = True
tree, store = Path(sys.argv[1]), Path(sys.argv[2])
bytecode.install(tree, store)
sys.path.insert(0, str(tree))
import package.module
assert sys.dont_write_bytecode
print(package.module.value(), inspect.getsourcefile(package.module.value))
"""


def tree(folder: Path, value: int) -> Path:
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").touch()
    write(folder, value)
    return folder


def write(folder: Path, value: int) -> None:
    """Always of one size and of one date."""
    path = folder / "package" / "module.py"
    path.write_text(f"def value():\n    return {value}\n")
    os.utime(path, (1_700_000_000, 1_700_000_000))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def value(folder: Path, store: Path, *options: str) -> int:
    command = [sys.executable, *options, "-c", CODE, str(folder), str(store)]
    printed, path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert path == str(folder / "package" / "module.py")
    assert {p.name for p in folder.rglob("*")} == {"package", "__init__.py", "module.py"}
    return int(printed)


def test_a_source_of_the_same_size_and_date_is_compiled_anew(tmp_path: Path, store: Path) -> None:
    folder = tree(tmp_path / "tree", 1)
    assert value(folder, store) == 1
    write(folder, 2)
    assert value(folder, store) == 2
    write(folder, 1)
    assert value(folder, store) == 1
    # Those of __init__.py, of 1 and of 2.
    assert len(list(store.iterdir())) == 3


def test_trees_share_it_and_functions_know_their_own(tmp_path: Path, store: Path) -> None:
    one, other = tree(tmp_path / "one", 1), tree(tmp_path / "other", 1)
    assert value(one, store) == 1
    written = {p: p.stat().st_mtime_ns for p in store.iterdir()}
    assert len(written) == 2
    assert value(other, store) == 1
    assert {p: p.stat().st_mtime_ns for p in store.iterdir()} == written


def test_it_is_used(tmp_path: Path, store: Path) -> None:
    one, other = tree(tmp_path / "one", 1), tree(tmp_path / "other", 2)
    assert value(one, store) == 1
    (ones,) = (p for p in store.iterdir() if b"value" in p.read_bytes())
    assert value(other, store) == 2
    (others,) = (p for p in store.iterdir() if b"value" in p.read_bytes() and p != ones)
    others.write_bytes(ones.read_bytes())
    assert value(other, store) == 1


def test_interpreters_that_compile_otherwise_have_their_own(tmp_path: Path, store: Path) -> None:
    folder = tree(tmp_path / "tree", 1)
    assert value(folder, store) == value(folder, store, "-O") == 1
    assert len(list(store.iterdir())) == 4


@pytest.mark.parametrize("content", [b"", b"short", bytes(16)])
def test_what_is_no_byte_code_is_compiled_anew(tmp_path: Path, store: Path, content: bytes) -> None:
    folder = tree(tmp_path / "tree", 1)
    assert value(folder, store) == 1
    for path in store.iterdir():
        path.write_bytes(content)
    assert value(folder, store) == 1
    assert all(len(path.read_bytes()) > 16 for path in store.iterdir())


CONTRACT = """\
import sys


def test_it(request):
    sys.path.insert(0, str(request.config.getoption("--tree")))
    from package.module import value
    assert value() == 1
"""


def test_a_contract_gets_what_the_tree_holds_now(mini: Mini, tmp_path: Path) -> None:
    folder = tree(tmp_path / "tree", 1)
    (mini.root / "tests" / "contracts" / "test_a_fix.py").write_text(CONTRACT)

    def run() -> Outcome:
        return contracts.run(mini.root / "tests" / "contracts", ["a-fix"], folder, sys.executable)["a-fix"]

    assert run() == Outcome(passed=1)
    assert len(list((mini.build / "bytecode").iterdir())) == 2
    write(folder, 2)
    assert run() == Outcome(failed=1)
    write(folder, 1)
    assert run() == Outcome(passed=1)
    assert not list(folder.rglob("__pycache__"))
