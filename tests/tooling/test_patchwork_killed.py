"""Edits and their writing that are killed at any moment: the series is whole, and the next run comes to the same."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from miniature import COMMITS, PATCHES, SOURCE, Mini, Run, git, message, require_error, require_ok
from patchwork import NOTHING, PERSON, WRITTEN, carried, edit_dir, opened, quickly, replace, written
from test_killed import COUNT
from test_patchwork import require, require_closed

PRELUDE = f"sys.path.insert(0, {str(Path(__file__).parent)!r}); import patchwork; patchwork.install()\n"
MOMENTS = 4
TOO = message(COMMITS[0]).replace("now adds 100.", "now adds 100; gamma.py too.")


@pytest.fixture(autouse=True)
def ran(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    yield from quickly(mini, monkeypatch)


def outside(mini: Mini, at: int, *arguments: str) -> tuple[int, int]:
    """Run in a process of its own, which is killed at its moment ``at``; its code, and how many moments it had."""
    quiet = {"PYTHONDONTWRITEBYTECODE": "1"}
    told = mini.outside(*arguments, prelude=PRELUDE + COUNT.format(at=at), env=quiet)
    events = told.err.rpartition("events ")[2].strip()
    return told.code, int(events) if events.isdigit() else 0


def at(moment: int, events: int) -> int:
    return 1 + moment * (events - 1) // (MOMENTS - 1)


def edit(mini: Mini, old: str = "x + 98", new: str = "98 + x") -> None:
    replace(opened(mini) / "vllm" / "gamma.py", old, new)
    git(opened(mini), "commit", "-q", "-a", "--amend", "-m", TOO)


def killed(mini: Mini, before: dict[str, bytes], *arguments: str) -> Iterator[dict[str, bytes]]:
    """Do what writes the series once to its end, and then, from the same start, kill it at each moment.

    Yields what the series is when nobody kills it, each time as the killed process left things.
    """
    kept = shutil.copytree(edit_dir(mini), mini.root / "kept", symlinks=True)
    code, events = outside(mini, -1, *arguments)
    after = written(mini)
    assert code == WRITTEN
    assert after != before
    for moment in range(MOMENTS):
        shutil.rmtree(edit_dir(mini), ignore_errors=True)
        shutil.copytree(kept, edit_dir(mini), symlinks=True)
        for name in PATCHES:
            (mini.series_dir / name).write_bytes(before[f"patches/v0.27.1/{name}"])
        code, _ = outside(mini, at(moment, events), *arguments)
        assert code == -signal.SIGKILL or moment == MOMENTS - 1
        # Between the old folder's going and the new one's coming there is none; the next command puts it there.
        assert written(mini) in (before, after) or not mini.series_dir.exists()
        yield after


def test_an_opening_that_is_killed(mini: Mini, run: Run) -> None:
    before = written(mini)
    require_ok(run("edit", "0001"))
    require_ok(run("edit", "--abort"))
    _, events = outside(mini, -1, "edit", "0002")
    require_ok(run("edit", "--abort"))
    for moment in range(MOMENTS):
        code, _ = outside(mini, at(moment, events), "edit", "0002")
        assert code == -signal.SIGKILL or moment == MOMENTS - 1
        if (edit_dir(mini) / "edit.json").exists():
            require_error(run("edit", "0001"), "holds an edit")
            assert git(opened(mini), "status", "--porcelain") == ""
        else:
            require_ok(run("edit", "0002"))
        require(run("write-back"), NOTHING)
        assert written(mini) == before
        require_closed(mini)


def test_a_writing_that_is_killed(mini: Mini, run: Run) -> None:
    """The later patches merge by themselves."""
    before = written(mini)
    require_ok(run("edit", "0001"))
    edit(mini, "\n\ndef a", "\n\n# one\n\n\ndef a")
    for after in killed(mini, before, "write-back"):
        if edit_dir(mini).exists():
            assert run("write-back").code in (WRITTEN, NOTHING)
        else:
            require_error(run("write-back"), "no edit")
        assert written(mini) == after
        require_closed(mini)


def test_a_writing_that_is_killed_after_somebody_resolved_a_conflict(mini: Mini, run: Run) -> None:
    """What they did is in the tree that waits, or in the series; never nowhere."""
    before = written(mini)
    require_ok(run("edit", "0001"))
    edit(mini)
    require(run("write-back"), PERSON)
    (carried(mini) / "vllm" / "gamma.py").write_text(SOURCE["vllm/gamma.py"].replace("x + 98", "x - 98"))
    for after in killed(mini, before, "write-back", "--continue"):
        if (edit_dir(mini) / "carry" / "carry.json").exists():
            assert run("write-back", "--continue").code in (WRITTEN, NOTHING)
        elif edit_dir(mini).exists():
            # It was written, and only the edit's end is left.
            assert written(mini) == after
            require_ok(run("edit", "--abort"))
        else:
            require_error(run("write-back"), "no edit")
        assert written(mini) == after
        require_closed(mini)
