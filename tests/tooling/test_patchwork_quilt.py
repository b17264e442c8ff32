"""quilt's own commands on an edit, and the canonical patches that come back from what it writes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from miniature import COMMITS, PATCHES, SOURCE, SPDX, Mini, Run, require_error, require_ok
from patchwork import NOTHING, WRITTEN, opened, quickly, replace, written
from rebasing import CONTRACTS, write_contracts
from test_patchwork import mail, names, require, require_closed

pytestmark = pytest.mark.skipif(not shutil.which("quilt"), reason="quilt is not installed")


@pytest.fixture(autouse=True)
def ran(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    yield from quickly(mini, monkeypatch)


def quilt(tree: Path, *args: str, given: str = "") -> str:
    """quilt as a person has it, with its defaults."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("QUILT")}
    command = ["quilt", "--quiltrc=-", *args]
    return subprocess.run(command, cwd=tree, env=env, input=given, check=True, capture_output=True, text=True).stdout


def test_a_series_that_quilt_wrote_anew_is_the_same(mini: Mini, run: Run) -> None:
    """quilt's form differs (no diffstat, other headers of files), and nothing of that comes back."""
    before = written(mini)
    told = require_ok(run("edit", "--quilt"))
    tree = opened(mini)
    assert told.out == f"{tree}\n"
    for name in PATCHES:
        quilt(tree, "push")
        quilt(tree, "refresh")
        assert (tree / "patches" / name).read_bytes() != before[f"patches/v0.27.1/{name}"]
    quilt(tree, "pop", "-a")
    quilt(tree, "push", "-a")
    assert (tree / "vllm" / "gamma.py").read_text() == SOURCE["vllm/gamma.py"].replace("x + 98", "x - 98")
    require(run("write-back"), NOTHING)
    assert written(mini) == before
    require_closed(mini)


@pytest.mark.parametrize("popped", [True, False])
def test_a_patch_edited_with_quilt(mini: Mini, run: Run, ran: list[list[str]], popped: bool) -> None:
    before = written(mini)
    require_ok(run("edit", "--quilt"))
    tree = opened(mini)
    quilt(tree, "push", PATCHES[0])
    quilt(tree, "add", "vllm/kept.py")
    replace(tree / "vllm" / "alpha.py", "x + 100", "100 + x")
    quilt(tree, "refresh")
    quilt(tree, "pop" if popped else "push", "-a")
    told = require(run("write-back"), WRITTEN, f"{PATCHES[0]}: the edit")
    assert told.out.count("\n") == 1
    changed = {n for n, data in written(mini).items() if data != before.get(n)}
    assert changed == {f"patches/v0.27.1/{PATCHES[0]}"}
    assert ran == [[PATCHES[0]]]
    # Message, trailers, author and date are what they were.
    head, old = mail(mini, PATCHES[0]), before[f"patches/v0.27.1/{PATCHES[0]}"].decode()
    assert head.partition("\n---\n")[0] == old.partition("\n---\n")[0]
    require_ok(run("lint"))


def test_a_new_patch_needs_a_mails_head(mini: Mini, run: Run) -> None:
    write_contracts(mini, CONTRACTS | {"delta-fix": 'there("delta")'})
    before = written(mini)
    require_ok(run("edit", "--quilt"))
    tree = opened(mini)
    quilt(tree, "push", "-a")
    quilt(tree, "new", "0004-delta-fix.patch")
    quilt(tree, "add", "vllm/delta.py", "tests/test_delta.py")
    (tree / "vllm" / "delta.py").write_text(SPDX + "\nDELTA = True\n")
    (tree / "tests" / "test_delta.py").write_text(SPDX + "\n\ndef test_delta():\n    assert True\n")
    require_error(run("write-back"), "0004-delta-fix.patch", "quilt header -e")
    quilt(tree, "refresh")
    require_error(run("write-back"), "0004-delta-fix.patch is no mail", "quilt header -e")
    assert written(mini) == before
    head = mail(mini, PATCHES[2]).partition("\n---\n")[0]
    head = head.replace("gamma-fix", "delta-fix").replace("gamma", "delta")
    quilt(tree, "header", "-r", given=head + "\n")
    require(run("write-back"), WRITTEN, "0004-delta-fix.patch: new")
    assert names(mini)[-1] == "0004-delta-fix.patch"
    require_ok(run("lint"))


def test_changes_that_no_patch_has_are_not_lost(mini: Mini, run: Run) -> None:
    before = written(mini)
    require_ok(run("edit", "--quilt"))
    tree = opened(mini)
    quilt(tree, "push", "-a")
    replace(tree / "vllm" / "gamma.py", "x - 98", "-98 + x")
    require_error(run("write-back"), "vllm/gamma.py has changes that no patch has", "quilt refresh")
    require_error(run("write-back", "--amend"), "quilt refresh")
    quilt(tree, "refresh")
    (tree / "vllm" / "more.py").write_text("# work\n")
    require_error(run("write-back"), "vllm/more.py has changes that no patch has")
    assert written(mini) == before
    (tree / "vllm" / "more.py").unlink()
    require(run("write-back"), WRITTEN, f"{PATCHES[2]}: the edit")


def test_patches_that_do_not_fit_each_other_are_told(mini: Mini, run: Run) -> None:
    require_ok(run("edit", "--quilt"))
    tree = opened(mini)
    quilt(tree, "push")
    quilt(tree, "add", "vllm/gamma.py")
    replace(tree / "vllm" / "gamma.py", "x + 98", "98 + x")
    quilt(tree, "refresh")
    require_error(run("write-back"), PATCHES[2], "quilt refresh what does not fit")
    quilt(tree, "push")
    quilt(tree, "pop", "-a")
    quilt(tree, "delete", PATCHES[2])
    require_error(run("write-back"), "nothing is written")
    assert names(mini) == list(PATCHES)
    assert COMMITS[2].subject in mail(mini, PATCHES[2])
