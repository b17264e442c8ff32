"""Builds that are killed at any moment, and builds that run at once: dist/ only ever has whole wheels."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from miniature import BUILT, HASHED, OFFICIAL, SDIST, Mini, Run, require_ok
from package_index import PackageIndex

BUILD = ("build", "--arch", "x86_64")
# What every build does to the file system and to other programs, in order, seen through Python's audit events.
COUNT = """
import os, signal, sys
seen = 0
def watch(event, arguments):
    global seen
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "subprocess.Popen"):
        seen += 1
        if seen == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
import atexit
atexit.register(lambda: print("events", seen, file=sys.stderr))
"""
MOMENTS = 10
TELL_LOCKS = """
import filelock, sys
acquire = filelock.FileLock.acquire
def tell(self, *args, **kwargs):
    print("locking", self.lock_file, file=sys.stderr, flush=True)
    return acquire(self, *args, **kwargs)
filelock.FileLock.acquire = tell
"""


@pytest.fixture(scope="session")
def events(pattern: Mini, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many moments there are at which a build can be killed."""
    mini = Mini(shutil.copytree(pattern.root, tmp_path_factory.mktemp("counted") / "project", symlinks=True))
    told = require_ok(mini.outside(*BUILD, prelude=COUNT.format(at=-1))).err
    return int(told.split("events ")[1])


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_build_that_is_killed(mini: Mini, run: Run, built_pattern: Mini, events: int, moment: int) -> None:
    assert events > 60
    older = mini.dist / "vllm-0.27.1+k3.6-cp38-abi3-manylinux_2_28_x86_64.whl"
    mini.dist.mkdir()
    older.write_bytes(b"old")
    killed = mini.outside(*BUILD, prelude=COUNT.format(at=1 + moment * (events - 1) // (MOMENTS - 1)))
    assert killed.code == -signal.SIGKILL
    whole = built_pattern.wheel().read_bytes()
    for path in mini.dist.glob("[!.]*.whl"):
        assert path.read_bytes() == (b"old" if path == older else whole)
    require_ok(run(*BUILD))
    assert mini.wheel().read_bytes() == whole
    assert sorted(p.name for p in mini.dist.iterdir()) == [older.name, BUILT["x86_64"], HASHED["x86_64"]]
    assert mini.leftovers() == []


def test_a_build_killed_on_the_way_from_one_series_to_another(built: Mini, run: Run) -> None:
    """The tree of before stays until the new one is whole, also when the series goes back to what it was."""
    for moment in range(20, 100, 10):  # how much happens before depends on the Python
        killed = built.outside("apply", "--until", "0001", prelude=COUNT.format(at=moment))
        assert killed.code == -signal.SIGKILL
        if built.leftovers():
            break
    assert built.leftovers()
    before = built.tree.stat().st_ino
    require_ok(run("apply"))
    assert built.tree.stat().st_ino == before
    assert built.leftovers() == []


def test_a_build_that_is_killed_while_it_downloads(mini: Mini, run: Run, index: PackageIndex) -> None:
    mini.cold()
    index.plans[SDIST] = ["stall", "well"]
    process = mini.process(*BUILD, env={"PIP_INDEX_URL": index.url})
    assert index.stalled.wait(60)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (mini.cache / SDIST).exists()
    require_ok(run(*BUILD))
    assert (mini.cache / SDIST).read_bytes() == (mini.files / SDIST).read_bytes()
    assert mini.leftovers() == []


def test_a_build_that_is_interrupted_from_the_keyboard(mini: Mini, run: Run, index: PackageIndex) -> None:
    mini.cold()
    index.plans[OFFICIAL["x86_64"]] = ["stall", "well"]
    # A job in the background of a script, as CI may be one, inherits that the keyboard is ignored.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    process = mini.process(*BUILD, prelude=heed, env={"PIP_INDEX_URL": index.url})
    assert index.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.splitlines()[-1] == "Aborted!"
    assert "Traceback" not in err
    assert mini.leftovers() == []


def test_two_builds_at_once(mini: Mini, built_pattern: Mini, index: PackageIndex) -> None:
    mini.cold()
    index.plans[SDIST] = ["stall", "well"]
    first = mini.process(*BUILD, env={"PIP_INDEX_URL": index.url})
    assert index.stalled.wait(60)
    second = mini.process(*BUILD, env={"PIP_INDEX_URL": index.url})
    assert second.stderr is not None
    assert second.stderr.readline() == f"another build holds {mini.build}, waiting for it\n"
    assert first.poll() is None
    index.go_on.set()
    outputs = [process.communicate(timeout=100) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert [out for out, _ in outputs] == [f"{mini.wheel()}\n"] * 2
    assert mini.wheel().read_bytes() == built_pattern.wheel().read_bytes()
    assert sorted(p.name for p in mini.dist.iterdir()) == [BUILT["x86_64"], HASHED["x86_64"]]
    assert mini.leftovers() == []


def test_two_checkouts_share_a_cache(mini: Mini, index: PackageIndex, tmp_path: Path) -> None:
    """The second waits for the first one's download and makes none of its own."""
    other = Mini(shutil.copytree(mini.root, tmp_path / "other", symlinks=True))
    mini.cold()
    index.plans[SDIST] = ["stall", "well"]
    env = {"PIP_INDEX_URL": index.url, "XDG_CACHE_HOME": str(mini.root / "cache")}
    first = mini.process("fetch", "--arch", "x86_64", env=env)
    assert index.stalled.wait(60)
    second = other.process("fetch", "--arch", "x86_64", prelude=TELL_LOCKS, env=env)
    assert second.stderr is not None
    while (line := second.stderr.readline()) and SDIST not in line:
        pass
    assert line == f"locking {mini.cache / f'.{SDIST}.lock'}\n"
    # The stalled download fails, and is tried again by the process that began it.
    index.go_on.set()
    for process in (first, second):
        process.communicate(timeout=100)
        assert process.returncode == 0
    assert index.asked.count(f"/files/{SDIST}") == 2
    assert index.asked.count(f"/files/{OFFICIAL['x86_64']}") == 1
