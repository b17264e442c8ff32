"""Runs of pytest that are forked: as much a process of its own as one that was started, without the imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from k3patches import contracts
from k3patches.errors import UserError
from k3patches.zygote import Zygote, zygotes

CONTRACTS = Path(__file__).resolve().parents[1] / "contracts"


@pytest.fixture
def zygote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygote]:
    monkeypatch.chdir(tmp_path)
    made = Zygote(sys.executable, ["colorsys", "no_such_module"], os.environ | {"MARK": "zygote"})
    yield made
    made.close()


def test_file(folder: Path, name: str, code: str) -> Path:
    path = folder / f"test_{name}.py"
    path.write_text("def test_it():\n" + textwrap.indent(textwrap.dedent(code), "    "))
    return path


test_file.__test__ = False  # type: ignore[attr-defined]


def run(zygote: Zygote, path: Path) -> tuple[int, str]:
    """The exit status, and what was printed."""
    output = path.with_suffix(".log")
    status = zygote.pytest(["-q", "-s", "-p", "no:cacheprovider", str(path)], output)
    return status, output.read_text()


def test_modules_are_there_and_nothing_of_a_run_reaches_the_next(zygote: Zygote, tmp_path: Path) -> None:
    look = """
        import json, os, sys, warnings
        print("SEEN", json.dumps([os.environ.get(name) for name in ("MARK", "LEFT")] + [
            "colorsys" in sys.modules, hasattr(sys, "left"), "left" in sys.path, os.getcwd(), sys.stdin.read()]))
        os.environ["LEFT"] = "x"; os.environ["MARK"] = "y"; sys.left = 1; sys.path.append("left"); os.chdir("/")
    """
    path = test_file(tmp_path, "look", look)
    for _ in range(2):
        status, text = run(zygote, path)
        assert status == 0
        seen = json.loads(text.split("SEEN ")[1].splitlines()[0])
        assert seen == ["zygote", None, True, False, False, str(tmp_path), ""]


def test_a_tree_comes_first_for_the_run_and_what_it_starts(zygote: Zygote, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "only_there.py").touch()
    code = """
        import os, subprocess, sys
        import only_there
        assert os.getcwd() == os.path.dirname(only_there.__file__)
        subprocess.run([sys.executable, "-c", "import only_there"], cwd="/", check=True)
    """
    path = test_file(tmp_path, "imports", code)
    assert zygote.pytest([str(path)], tmp_path / "log", tree) == 0, (tmp_path / "log").read_text()
    assert zygote.pytest([str(path)], tmp_path / "log") == 1


def test_the_statuses_are_those_of_pytest(zygote: Zygote, tmp_path: Path) -> None:
    failing, text = run(zygote, test_file(tmp_path, "fails", "assert 'a reason' == ''"))
    assert (failing, "a reason" in text) == (1, True)
    assert run(zygote, test_file(tmp_path, "passes", "pass"))[0] == 0
    assert run(zygote, tmp_path / "test_nowhere.py")[0] == 4


def test_a_run_that_is_killed_is_an_error_of_that_run_alone(zygote: Zygote, tmp_path: Path) -> None:
    killed = test_file(tmp_path, "killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert run(zygote, killed)[0] == -signal.SIGKILL
    assert run(zygote, test_file(tmp_path, "left", "import os; os._exit(77)"))[0] == 77
    assert run(zygote, test_file(tmp_path, "passes", "pass"))[0] == 0


def test_a_killed_run_decides_no_contract(zygote: Zygote, tmp_path: Path) -> None:
    test_file(tmp_path, "a_fix", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(UserError, match="the contracts did not run"):
        contracts.run(tmp_path, ["a-fix"], tmp_path, sys.executable, pytest=zygote.pytest)


def test_what_is_done_at_exit_is_done(zygote: Zygote, tmp_path: Path) -> None:
    code = "import atexit, pathlib; atexit.register(pathlib.Path('done').write_text, 'x')"
    assert run(zygote, test_file(tmp_path, "leaves", code))[0] == 0
    assert (tmp_path / "done").read_text() == "x"


def test_an_interrupt_ends_the_run_and_not_the_zygote(zygote: Zygote, tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getppid(), signal.SIGINT); signal.raise_signal(signal.SIGINT)"
    assert run(zygote, test_file(tmp_path, "interrupted", code))[0] == pytest.ExitCode.INTERRUPTED
    assert run(zygote, test_file(tmp_path, "passes", "pass"))[0] == 0


def test_a_zygote_that_is_gone_is_an_error(zygote: Zygote, tmp_path: Path) -> None:
    zygote.process.kill()
    with pytest.raises(UserError, match="has ended"):
        run(zygote, test_file(tmp_path, "passes", "pass"))


def test_a_module_that_starts_a_thread_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threads.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]) if "PYTHONPATH" in os.environ else str(tmp_path)
    made = Zygote(sys.executable, ["threads"], os.environ | {"PYTHONPATH": path})
    with pytest.raises(UserError, match="has ended"):
        made.pytest([], tmp_path / "log")
    made.close()
    assert "a fork would lose the threads that one of these modules starts: threads" in capfd.readouterr().err


def test_as_many_at_a_time_as_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Each waits for the other to begin.
    code = """
        import pathlib, time
        pathlib.Path("{}").touch()
        while not pathlib.Path("{}").exists():
            time.sleep(0.01)
    """
    paths = [test_file(tmp_path, a, code.format(a, b)) for a, b in ("xy", "yx")]
    with zygotes(2, sys.executable, [], os.environ) as start, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda path: start([str(path)], path.with_suffix(".log")), paths)) == [0, 0]


def test_the_contracts_modules_are_all_there_and_none_is_vllms() -> None:
    """They start no thread, torch computes in one, and the trees are yet to be imported."""
    code = """
        import importlib, os, sys
        for module in sys.argv[1:]:
            importlib.import_module(module)
        import torch
        assert torch.get_num_threads() == 1
        assert len(os.listdir("/proc/self/task")) == 1
        assert "vllm" not in sys.modules
    """
    modules = contracts.third_party(CONTRACTS)
    assert "torch" in modules
    command = [sys.executable, "-c", textwrap.dedent(code), *modules]
    subprocess.run(command, env=os.environ | contracts.ENVIRONMENT, check=True)
