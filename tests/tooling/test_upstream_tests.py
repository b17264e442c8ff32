"""Upstream's own tests on both sides: which are chosen, what turns, and what a crash or a hang leaves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from k3patches.errors import UserError
from k3patches.project import Project
from k3patches.upstream import command, results, select, sides
from miniature import RELEASE, ROOT, SDIST, SOURCE, SPDX, Mini, Run, require_error, require_ok, sdist_bytes

IMPORT = "from vllm.alpha import a, c\n\n"
HOLDS = f"{SPDX}{IMPORT}\ndef test_holds():\n    assert a(1) == 98\n"
TURNS = HOLDS + '\n\ndef test_turns():\n    assert c(1) == 100, "the series adds one"\n'
# Passes the first time that it is run, on each side.
UNSTEADY = (
    f"{SPDX}import pathlib\n\n{IMPORT}\ndef test_unsteady():\n"
    '    once = pathlib.Path(__file__).with_suffix(".once")\n'
    "    assert c(1) == 100 or once.exists()\n\n\ndef test_after():\n"
    '    pathlib.Path(__file__).with_suffix(".once").touch()\n'
)
GONE = f"{SPDX}import vllm.gone\n\n\ndef test_gone():\n    assert vllm.gone.GONE\n"
CRASH = f"{SPDX}import os, signal\n\n{IMPORT}\ndef test_before():\n    assert a(1)\n\n\ndef test_crash():\n"
CRASH += "    os.kill(os.getpid(), signal.SIGSEGV)\n\n\ndef test_behind():\n    assert a(1)\n"
CRASH_WHEN_READ = f"{SPDX}import os\n\n{IMPORT}os._exit(0)\n"
HANG = (
    f"{SPDX}import time\n\n{IMPORT}\ndef test_hang():\n    time.sleep(1000)\n\n\ndef test_behind():\n    assert a(1)\n"
)
LONG = f"{SPDX}import time\n\n{IMPORT}\ndef test_long():\n    end = time.process_time() + 1\n"
LONG += "    while time.process_time() < end:\n        pass\n\n\ndef test_left():\n    assert a(1)\n"
PLACE = Path("patches") / results.FILE


@pytest.fixture
def upstream(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """The miniature; its tests need no torch."""
    monkeypatch.setattr(command, "PLUGINS", ())
    return mini


def add(mini: Mini, **tests: str) -> None:
    """Give the release these tests, named after their file."""
    files = {f"tests/{name.replace('__', '/')}.py": text for name, text in tests.items()}
    mini.replace(SDIST, sdist_bytes({**SOURCE, **files}))


def entry(mini: Mini) -> results.Entry:
    return results.read(mini.root / PLACE)[RELEASE]


def test_chosen_are_those_that_import_or_name_what_changes(upstream: Mini, run: Run) -> None:
    chosen = {
        "test_import": "import vllm.alpha\n",
        "test_from": "from vllm.alpha import a\n",
        "test_module": "def test():\n    from vllm import gamma\n",
        "test_name": 'TARGET = "vllm.gamma.b"\n',
        "test_path": 'TARGET = "vllm/gamma.py"\n',
        "deep__test_import": "import vllm.alpha as it\n",
    }
    others = {
        "test_other": "from vllm.kept import x\n",
        "test_like": 'TARGET = "vllm.gammas.b", "xvllm.gamma", "my.vllm.gamma"\n',
        "test_comment": "# vllm.gamma, from vllm import gamma\n",
        "test_same_name": "from vllm.kept import gamma as alpha\n",
        "helper": "import vllm.alpha\n",
    }
    add(upstream, **chosen, **others)
    told = require_ok(run("upstream-tests", "--base", RELEASE, "--list")).out.split()
    # What the patches add, tests/test_alpha.py for one, is not among them.
    assert told == sorted(f"tests/{name.replace('__', '/')}.py" for name in chosen)


def test_a_test_that_a_patch_changes_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_any.py").write_text("")
    assert select.tests(tmp_path, ["tests/test_any.py", "vllm/alpha.py"]) == ["tests/test_any.py"]
    assert select.tests(tmp_path, ["vllm/alpha.py"]) == []


def test_what_a_package_holds_is_its_own(tmp_path: Path) -> None:
    assert select.modules(["vllm/a/__init__.py", "vllm/a/b.py", "vllm/c.json", "tests/d.py"]) == {"vllm.a", "vllm.a.b"}


def test_a_test_that_turns_is_found(upstream: Mini, run: Run) -> None:
    add(upstream, test_alpha_too=TURNS)
    told = run("upstream-tests", "--base", RELEASE)
    require_error(told, "1 of upstream's tests", f"{RELEASE}: tests/test_alpha_too.py::test_turns")
    assert "pristine: 2 passed" in told.out
    assert "1 passed, 1 failed" in told.out
    assert "AssertionError: the series adds one" in told.out
    assert entry(upstream).turned == {
        "tests/test_alpha_too.py::test_turns": "failed: AssertionError: the series adds one"
    }


def test_a_module_that_goes_takes_its_tests_along(upstream: Mini, run: Run) -> None:
    add(upstream, test_it=GONE, test_alpha_too=HOLDS)
    require_error(run("upstream-tests"), "tests/test_it.py::test_gone")
    assert "vllm.gone" in entry(upstream).turned["tests/test_it.py::test_gone"]


def test_what_fails_on_both_sides_did_not_turn(upstream: Mini, run: Run) -> None:
    failing = f"{SPDX}import torchless\n\n{IMPORT}"
    skipped = f"{SPDX}import pytest\n\n{IMPORT}pytest.skip('no GPU', allow_module_level=True)\n"
    add(upstream, test_alpha_too=HOLDS + "\n\ndef test_no():\n    assert a(1) == 0\n", test_b=failing, test_c=skipped)
    told = require_ok(run("upstream-tests"))
    assert "pristine: 1 passed, 2 failed, 1 skipped" in told.out
    assert entry(upstream).patched == dict.fromkeys(entry(upstream).patched, 0) | {"passed": 1}


def test_what_does_not_turn_again_did_not_turn(upstream: Mini, run: Run) -> None:
    add(upstream, test_alpha_too=UNSTEADY)
    told = require_ok(run("upstream-tests"))
    assert "does not turn when it is run again: tests/test_alpha_too.py::test_unsteady" in told.out


def test_a_crash_ends_only_its_test(upstream: Mini, run: Run) -> None:
    add(upstream, test_a=CRASH, test_b=HOLDS, test_c=CRASH_WHEN_READ)
    told = require_ok(run("upstream-tests"))
    assert "pristine: 3 passed, 2 crashed" in told.out


def test_a_crash_on_the_patched_side_turns(upstream: Mini, run: Run) -> None:
    text = f"{SPDX}import os\n\n{IMPORT}\ndef test_it():\n    if c(1) != 100:\n        os.abort()\n"
    add(upstream, test_a=text)
    require_error(run("upstream-tests"), "tests/test_a.py::test_it")
    assert "SIGABRT" in entry(upstream).turned["tests/test_a.py::test_it"]


def test_a_hang_ends_only_its_test(upstream: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "STEP_S", 8)
    add(upstream, test_a=HANG, test_b=HOLDS)
    told = require_ok(run("upstream-tests"))
    assert "pristine: 2 passed, 1 hung" in told.out


def test_a_conftest_that_breaks_takes_only_its_folder_along(upstream: Mini, run: Run) -> None:
    add(upstream, deep__conftest="import torchless\n", deep__test_a=HOLDS, test_b=HOLDS)
    told = require_ok(run("upstream-tests"))
    assert "pristine: 1 passed, 1 crashed" in told.out


def test_a_file_that_takes_too_long_is_left(upstream: Mini, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FILE_S", 0.5)
    add(upstream, test_a=LONG)
    told = require_ok(run("upstream-tests"))
    assert "pristine: 1 passed, 1 skipped" in told.out
    assert "patched, what passes there: 1 passed" in told.out


def test_there_is_no_network(upstream: Mini, run: Run) -> None:
    text = (
        f"{SPDX}import os, urllib.request\n\n{IMPORT}\ndef test_it():\n    assert os.environ['HF_HUB_OFFLINE'] == '1'\n"
    )
    text += "    assert set(urllib.request.getproxies().values()) >= {'http://127.0.0.1:9'}\n"
    add(upstream, test_a=text)
    require_ok(run("upstream-tests"))
    assert entry(upstream).pristine["passed"] == 1


def test_results_that_are_old_are_told(upstream: Mini, run: Run) -> None:
    require_error(run("upstream-tests", "--current"), "is not there", "ci/upstream-tests.sh")
    add(upstream, test_alpha_too=HOLDS)
    require_ok(run("upstream-tests"))
    require_ok(run("upstream-tests", "--current"))
    path = upstream.series_dir / "0003-gamma-fix.patch"
    path.write_text(path.read_text().replace("Users saw numbers", "Users saw some numbers"))
    require_error(run("upstream-tests", "--current"), "not of today", "its series changed since")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"bases": []}',
        '{"bases": {"0.27.1": {}}}',
        '{"bases": {"0.27.1": {"more": 1}}}',
    ],
)
def test_results_that_are_none(upstream: Mini, run: Run, content: str) -> None:
    (upstream.root / PLACE).write_text(content)
    require_error(run("upstream-tests", "--current"), "holds no such results", "ci/upstream-tests.sh")


def test_counts_are_whole_numbers_of_known_outcomes(upstream: Mini, run: Run) -> None:
    add(upstream, test_alpha_too=HOLDS)
    require_ok(run("upstream-tests"))
    whole = json.loads((upstream.root / PLACE).read_text())
    for change in ({"files": -1}, {"pristine": {"passed": 1}}, {"patched": {"passed": True}}, {"turned": {"t": 1}}):
        told = {"bases": {RELEASE: whole["bases"][RELEASE] | change}}
        (upstream.root / PLACE).write_text(json.dumps(told))
        with pytest.raises(UserError, match="holds no such results"):
            results.read(upstream.root / PLACE)


def test_a_turned_test_keeps_a_revision_back(upstream: Mini, run: Run) -> None:
    add(upstream, test_alpha_too=TURNS)
    require_error(run("upstream-tests"), "test_turns")
    with pytest.raises(UserError, match=r"a test of upstream's .* test_turns|test_turns"):
        results.require(Project(upstream.root), [RELEASE])


def test_two_wishes(upstream: Mini, run: Run) -> None:
    require_error(run("upstream-tests", "--list", "--current"), "give one of them")
    require_error(run("upstream-tests", "--base", "0.1.0"), "no series for vLLM 0.1.0")


def test_beside_an_installed_vllm(tmp_path: Path) -> None:
    """The script for a GPU: two installed vLLM, the tests in folders without them."""
    for name, c in (("stock", "x + 99"), ("patched", "x + 100")):
        package = tmp_path / name / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f'__version__ = "{name}"\n')
        (package / "alpha.py").write_text(SOURCE["vllm/alpha.py"].replace("x + 99", c))
    (tmp_path / "sdist" / "tests").mkdir(parents=True)
    (tmp_path / "sdist" / "vllm").mkdir()
    (tmp_path / "sdist" / "vllm" / "__init__.py").write_text("raise ImportError('this is the source')\n")
    (tmp_path / "sdist" / "tests" / "__init__.py").write_text("")
    (tmp_path / "sdist" / "tests" / "utils.py").write_text("NUMBER = 100\n")
    (tmp_path / "sdist" / "tests" / "test_a.py").write_text(f"from tests.utils import NUMBER\n{TURNS}")
    (tmp_path / "files.txt").write_text("tests/test_a.py\n")
    torch = tmp_path / "stock" / "torch.py"
    torch.write_text("__version__ = '2'\nclass cuda:\n    is_available = staticmethod(lambda: False)\n")
    shutil.copy2(torch, tmp_path / "patched")
    script = [sys.executable, str(ROOT / "tests" / "gpu" / "upstream.py"), "--jobs", "1"]
    for option, value in (
        ("--stock", "stock"),
        ("--patched", "patched"),
        ("--tests", "sdist/tests"),
        ("--files", "files.txt"),
        ("--out", "out.json"),
        ("--work", "work"),
    ):
        script += [option, value]
    cut = subprocess.run([*script, "--budget", "0.01"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert cut.returncode == 3, cut.stderr
    assert json.loads((tmp_path / "out.json").read_text())["not_done"] == ["tests/test_a.py"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert list(told["turned"]) == ["tests/test_a.py::test_turns"]
    assert (told["pristine"]["passed"], told["not_done"]) == (2, [])
    assert (told["ran_on"]["pristine"]["vllm"], told["ran_on"]["patched"]["vllm"]) == ("stock", "patched")


def test_the_core_needs_nothing_but_python_and_pytest() -> None:
    folder = ROOT / "ci" / "k3patches" / "upstream"
    code = f"import sys; sys.path.insert(0, {str(folder.parents[1])!r}); from k3patches.upstream import sides, select\n"
    code += "known = {*sys.stdlib_module_names, 'k3patches', '__main__'}\n"
    code += "print({n.partition('.')[0] for n in sys.modules} - known)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert sides.file_of("tests/a.py::b[c::d]") == "tests/a.py"
