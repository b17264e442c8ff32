"""What is in it?  status on wheels and on environments, whole, stock and tampered with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import Content, digest, rewrite
from k3patches.cli import _this_arch
from miniature import BUILT, INFO, OFFICIAL, PATCHES, RELEASE, VERSION, Mini, Result, Run, in_process, require_error

JSON = f"{INFO}/k3-patches.json"
RECORD = f"{INFO}/RECORD"
WHOLE, STOCK, TAMPERED, ABSENT = 0, 3, 4, 5


def states(result: Result) -> dict[str, str]:
    return {row["fix"]: row["state"] for row in json.loads(result.out)["rows"]}


def test_a_whole_wheel(built: Mini, run: Run) -> None:
    result = run("status", built.wheel())
    assert result.code == WHOLE
    for word in (VERSION, "alpha-fix", PATCHES[1], "Pending [not yet submitted]", "every file is what was built"):
        assert word in result.out


def test_json(built: Mini, run: Run) -> None:
    result = run("status", "--json", built.wheel())
    assert result.code == WHOLE
    status = json.loads(result.out)
    assert (status["version"], status["verdict"], status["damaged"]) == (VERSION, "whole", [])
    assert status["rows"][1] == {
        "fix": "beta-fix",
        "patch": PATCHES[1],
        "upstream_status": "Pending [not yet submitted]",
        "state": "ok",
    }


def test_a_stock_wheel(built: Mini, run: Run) -> None:
    result = run("status", built.files / OFFICIAL["aarch64"])
    assert result.code == STOCK
    assert "stock" in result.out
    assert json.loads(run("status", "--json", built.files / OFFICIAL["aarch64"]).out)["verdict"] == "stock"


@pytest.mark.parametrize(
    ("changes", "record", "damaged", "state"),
    [
        ({"vllm/alpha.py": b"# other\n"}, False, "vllm/alpha.py: changed", "changed"),
        ({"vllm/alpha.py": b"# other\n"}, True, "vllm/alpha.py: changed", "changed"),
        ({"vllm/alpha.py": None}, True, "vllm/alpha.py: missing", "missing"),
        ({"vllm/kept.py": b"# other\n"}, False, "vllm/kept.py: changed", "ok"),
        ({"vllm/kept.py": None}, False, "vllm/kept.py: missing", "ok"),
        ({"vllm/more.py": b"# more\n"}, False, "vllm/more.py: not in RECORD", "ok"),
        ({JSON: lambda c: c.replace(b"0.27.1+k3.7", b"0.27.1+k3.8")}, True, "k3-patches.json: says version", "ok"),
        ({JSON: lambda c: c.replace(b"Pending", b"Backport")}, False, "k3-patches.json: changed", "ok"),
        ({RECORD: lambda c: c.replace(b"kept.py,sha256=", b"kept.py,sha256=A")}, True, "vllm/kept.py: changed", "ok"),
    ],
)
def test_a_wheel_that_was_tampered_with(
    built: Mini, run: Run, changes: dict[str, Content], record: bool, damaged: str, state: str
) -> None:
    path = rewrite(built.wheel(), changes, record=record)
    result = run("status", "--json", path)
    assert result.code == TAMPERED
    assert any(d.removeprefix(f"{INFO}/").startswith(damaged) for d in json.loads(result.out)["damaged"])
    assert states(result)["alpha-fix"] == state
    assert run("status", path).code == TAMPERED


def test_a_deleted_file_that_is_back(built: Mini, run: Run) -> None:
    result = run("status", "--json", rewrite(built.wheel(), {"vllm/gone.py": b"# again\n"}))
    assert result.code == TAMPERED
    assert states(result) == {"alpha-fix": "ok", "beta-fix": "should not be there", "gamma-fix": "ok"}


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{}", b'{"schema": 9}', b"null", b"[" * 100000])
def test_a_manifest_that_is_none(built: Mini, run: Run, content: bytes) -> None:
    result = run("status", rewrite(built.wheel(), {JSON: content}))
    assert (result.code, result.err) == (TAMPERED, "")
    assert "k3-patches.json" in result.out


@pytest.mark.parametrize("field", ["contract", "files", "name"])
def test_a_manifest_with_a_wrong_type_inside(built: Mini, run: Run, field: str) -> None:
    def change(content: bytes) -> bytes:
        data = json.loads(content)
        data["patches"][0][field] = 5
        return json.dumps(data).encode()

    assert run("status", rewrite(built.wheel(), {JSON: change})).code == TAMPERED


def test_files_that_are_no_wheel_of_vllm(built: Mini, run: Run, tmp_path: Path) -> None:
    require_error(run("status", "nowhere.whl"), "nowhere.whl is not there")
    (tmp_path / BUILT["x86_64"]).write_bytes(b"<html>")
    require_error(run("status", tmp_path / BUILT["x86_64"]), "no intact wheel")
    other = tmp_path / "torch-2.13.0-py3-none-any.whl"
    shutil.copy2(built.wheel(), other)
    assert run("status", other).code == ABSENT


# Environments


def install(python: Path, wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-deps", "--no-index"]
    subprocess.run([*command, "--force-reinstall", str(wheel)], check=True)


@pytest.fixture(scope="session")
def environment(pattern: Mini, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the patched wheel installed over stock, as a user does it."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root / "venv", with_pip=False, symlinks=True)
    python = root / "venv" / "bin" / "python"
    mini = Mini(shutil.copytree(pattern.root, root / "project", symlinks=True))
    arch = _this_arch()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in mini.environment().items():
            patch.setenv(name, value)
        run = in_process(mini, patch)
        assert run("status", "--python", python).code == ABSENT
        install(python, mini.files / OFFICIAL[arch])
        assert run("status", "--python", python).code == STOCK
        assert run("build", "--arch", arch).code == 0
    install(python, mini.wheel(arch))
    return root / "venv"


@pytest.fixture
def site(environment: Path, mini: Mini) -> Path:
    """The site-packages of a fresh copy of the environment, at venv/ in the miniature, where the test stands."""
    shutil.copytree(environment, mini.root / "venv", symlinks=True)
    return next((mini.root / "venv" / "lib").glob("python*/site-packages"))


PYTHON = "venv/bin/python"


@pytest.mark.usefixtures("site")
def test_a_whole_environment(mini: Mini, run: Run) -> None:
    done = subprocess.run(
        [mini.root / PYTHON, "-c", "import vllm; print(vllm.__version__)"],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == VERSION
    for python in (PYTHON, str(mini.root / PYTHON)):
        result = run("status", "--json", "--python", python)
        assert result.code == WHOLE, result.out + result.err
        assert states(result) == {"alpha-fix": "ok", "beta-fix": "ok", "gamma-fix": "ok"}
        assert str(mini.root / "venv") in json.loads(result.out)["where"]


def test_compiled_caches_and_a_folder_called_vllm_do_not_matter(mini: Mini, run: Run, site: Path) -> None:
    (site / "vllm" / "__pycache__").mkdir(exist_ok=True)
    (site / "vllm" / "__pycache__" / "kept.cpython-311.pyc").write_bytes(b"x")
    (mini.root / "vllm").mkdir()
    (mini.root / "vllm" / "__init__.py").write_text("raise SystemExit")
    assert run("status", "--python", PYTHON).code == WHOLE


def edit_record_as_well(site: Path) -> None:
    (site / "vllm" / "gamma.py").write_text("# other\n")
    path = site / RECORD
    rows = [line for line in path.read_text().splitlines() if not line.startswith("vllm/gamma.py,")]
    path.write_text("\n".join([*rows, f"vllm/gamma.py,{digest(b'# other' + bytes([10]))},8"]) + "\n")


def remove_from_record_as_well(site: Path) -> None:
    (site / "vllm" / "gamma.py").unlink()
    path = site / RECORD
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines() if "gamma.py" not in line))


@pytest.mark.parametrize(
    ("tamper", "damaged", "fixes"),
    [
        (lambda s: (s / "vllm/gamma.py").write_text("#\n"), "vllm/gamma.py: changed", {"gamma-fix": "changed"}),
        (lambda s: (s / "vllm/gamma.py").unlink(), "vllm/gamma.py: missing", {"gamma-fix": "missing"}),
        (edit_record_as_well, "vllm/gamma.py: changed", {"gamma-fix": "changed"}),
        (remove_from_record_as_well, "vllm/gamma.py: missing", {"gamma-fix": "missing"}),
        (
            lambda s: (s / "vllm/gone.py").write_text("#\n"),
            "vllm/gone.py: should not",
            {"beta-fix": "should not be there"},
        ),
        (lambda s: (s / "vllm/kept.py").write_text("#\n"), "vllm/kept.py: changed", {}),
        (lambda s: (s / "vllm/_C.abi3.so").unlink(), "vllm/_C.abi3.so: missing", {}),
        (lambda s: (s / RECORD).unlink(), "RECORD: missing", {}),
        (lambda s: (s / RECORD).write_bytes(b"\xff\xfe"), "RECORD: missing or unreadable", {}),
    ],
)
def test_an_environment_that_was_tampered_with(
    run: Run, site: Path, tamper: Callable[[Path], object], damaged: str, fixes: dict[str, str]
) -> None:
    tamper(site)
    result = run("status", "--json", "--python", PYTHON)
    assert result.code == TAMPERED, result.err
    assert [d for d in json.loads(result.out)["damaged"] if d.startswith(damaged)]
    assert states(result) == {"alpha-fix": "ok", "beta-fix": "ok", "gamma-fix": "ok"} | fixes


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{"])
def test_an_environment_whose_manifest_is_none(run: Run, site: Path, content: bytes) -> None:
    (site / JSON).write_bytes(content)
    assert run("status", "--python", PYTHON).code == TAMPERED


def test_installing_stock_over_it_is_stock_again(mini: Mini, run: Run, site: Path) -> None:
    install(mini.root / PYTHON, mini.files / OFFICIAL[_this_arch()])
    assert run("status", "--python", PYTHON).code == STOCK
    assert not (site / JSON).exists()
    assert (site / f"vllm-{RELEASE}.dist-info").is_dir()
    assert (site / "vllm" / "gone.py").is_file()


def test_an_interpreter_that_is_none(mini: Mini, run: Run) -> None:
    require_error(run("status", "--python", "venv/bin/nothing"), "venv/bin/nothing", "Python interpreter")
    require_error(run("status", "--python", "/bin/false"), "/bin/false", "Python interpreter")


def test_without_a_checkout(built: Mini, tmp_path: Path) -> None:
    package = shutil.copytree(built.root / "ci", tmp_path / "elsewhere" / "ci")
    code = "from k3patches.cli import main; main()"
    command = [sys.executable, "-c", code, "status", str(built.wheel())]
    env = built.environment() | {"PYTHONPATH": str(package)}
    assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True).returncode == WHOLE
    done = subprocess.run([*command[:3], "apply"], cwd=tmp_path, env=env, capture_output=True, text=True)
    require_error(Result(done.returncode, done.stdout, done.stderr), "checkout", "status works anywhere")
