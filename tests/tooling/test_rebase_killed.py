"""Rebases that are killed at any moment: the next run comes to the same, and nobody's work is lost."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from miniature import SOURCE, Mini, Run
from rebasing import JsonIndex, later, quickly
from test_killed import COUNT
from test_rebase import CONFLICT, NOTHING, PERSON, REBASED, RESOLVED, SHIFTED, edited, require, work, written

PRELUDE = f"sys.path.insert(0, {str(Path(__file__).parent)!r}); import rebasing; rebasing.install()\n"
MOMENTS = 8
# More than one thing differs, so that there is something to merge, to drop and to resolve.
CHANGED = CONFLICT | {"vllm/gamma.py": SOURCE["vllm/gamma.py"].replace("\n\ndef a", "\n\n# one\n\n\ndef a", 1)}


@pytest.fixture(autouse=True)
def quick(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> Iterator[JsonIndex]:
    yield from quickly(mini, monkeypatch)


def outside(mini: Mini, index: JsonIndex, at: int, *arguments: str) -> tuple[int, int]:
    """Run in a process of its own, which is killed at its moment ``at``; its code, and how many moments it had."""
    # Byte code that the first run leaves would make its number of moments another than the next ones'.
    quiet = {"PIP_INDEX_URL": index.url, "PYTHONDONTWRITEBYTECODE": "1"}
    told = mini.outside("rebase", *arguments, prelude=PRELUDE + COUNT.format(at=at), env=quiet)
    events = told.err.rpartition("events ")[2].strip()
    return told.code, int(events) if events.isdigit() else 0


def test_a_rebase_that_is_killed(mini: Mini, run: Run, quick: JsonIndex) -> None:
    later(mini, "0.28.0", SHIFTED)
    before = written(mini)
    require(run("rebase", "0.28.0"), REBASED)
    after = written(mini)
    events = 0
    for moment in range(-1, MOMENTS):
        shutil.rmtree(mini.root / "patches" / "v0.28.0")
        shutil.rmtree(mini.build / "rebase")
        if moment < 0:
            # How many moments there are, once all that stays between runs is there.
            code, events = outside(mini, quick, -1, "0.28.0")
            assert (code, written(mini)) == (REBASED, after)
            continue
        code, _ = outside(mini, quick, 1 + moment * (events - 1) // (MOMENTS - 1), "0.28.0")
        # How many folders of git objects are removed at the end depends on the commits' ids.
        assert code == -signal.SIGKILL or moment == MOMENTS - 1
        assert written(mini) in (before, after)
        assert run("rebase", "0.28.0").code in (REBASED, NOTHING)
        assert written(mini) == after
        assert sorted(p.name for p in work(mini).iterdir()) == ["report.json", "report.md"]
        assert [p for p in mini.leftovers() if "rebase" not in p.parts] == []


def test_a_rebase_that_is_killed_after_somebody_edited_it(mini: Mini, run: Run, quick: JsonIndex) -> None:
    """What they did is in the tree, or in the series with its resolution; never nowhere."""
    later(mini, "0.28.0", CHANGED)
    before = written(mini)
    require(run("rebase", "0.28.0"), PERSON)
    (edited(mini) / "vllm" / "alpha.py").write_text(RESOLVED)
    kept = shutil.copytree(work(mini), mini.root / "kept", symlinks=True)
    require(run("rebase", "0.28.0", "--continue"), REBASED)
    after = written(mini)
    events = 0
    for moment in range(-1, MOMENTS):
        for release in (mini.root / "patches" / "v0.28.0", mini.root / "patches" / "resolutions", work(mini)):
            shutil.rmtree(release)
        shutil.copytree(kept, work(mini), symlinks=True)
        if moment < 0:
            code, events = outside(mini, quick, -1, "0.28.0", "--continue")
            assert (code, written(mini)) == (REBASED, after)
            continue
        code, _ = outside(mini, quick, 1 + moment * (events - 1) // (MOMENTS - 1), "0.28.0", "--continue")
        # How many folders of git objects are removed at the end depends on the commits' ids.
        assert code == -signal.SIGKILL or moment == MOMENTS - 1
        found = written(mini)
        assert set(found) - set(before) <= set(after)
        # Resolutions come first, each folder as a whole.
        assert found in (before, after) or "resolutions/v0.28.0/alpha-fix.patch" in found
        plain = run("rebase", "0.28.0")
        if plain.code == PERSON:
            require(plain, PERSON, "--continue", "--abort")
            assert run("rebase", "0.28.0", "--continue").code in (REBASED, NOTHING)
        assert written(mini) == after
        assert [p for p in mini.leftovers() if "rebase" not in p.parts] == []


def test_the_replay(mini: Mini, run: Run) -> None:
    later(mini, "0.28.0", CHANGED)
    later(mini, "0.29.0", SHIFTED)
    require(run("rebase", "0.28.0"), PERSON)
    (edited(mini) / "vllm" / "alpha.py").write_text(RESOLVED)
    require(run("rebase", "--continue"), REBASED)
    code = run("rebase", "0.29.0").code
    if code == PERSON:
        (edited(mini, "v0.29.0") / "vllm" / "alpha.py").write_text(
            SHIFTED["vllm/alpha.py"].replace("x + 99", "100 + x")
        )
        require(run("rebase", "--continue"), REBASED)
    before = written(mini)
    told = run("replay", "--python", sys.executable)
    assert told.code == 0, told.err
    assert [line.split(",")[0] for line in told.out.splitlines()[:2]] == [
        "0.28.0: as committed",
        "0.29.0: as committed",
    ]
    assert told.out.splitlines()[2].startswith("2 releases in ")
    assert written(mini) == before
    assert not (mini.build / "replay").exists()
    path = mini.root / "patches" / "v0.29.0" / "0003-gamma-fix.patch"
    path.write_text(path.read_text().replace("Users saw", "People saw"))
    told = run("replay", "--python", sys.executable)
    assert told.code == 1
    assert "0.29.0: 1 files differ" in told.out
    assert "  patches/v0.29.0/0003-gamma-fix.patch" in told.out
    assert "--record" in told.err
