"""The real thing: today's series on the pinned release, installed as a user would install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from k3patches import provenance, verify

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
RELEASE = VERSION.split("+")[0]
FIX = "situ-output-scale"


def run(*command: str | Path, code: int = 0, **variables: str) -> str:
    """Run a command in the checkout, expect its exit code, and return its standard output."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel in dist/ if it is today's series', else a new one."""
    found = ROOT / "dist" / f"vllm-{VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl"
    run("./build.sh", "apply")
    checked = subprocess.run(["./build.sh", "verify", found, "--arch", "x86_64"], cwd=ROOT, check=False)
    if checked.returncode == 0:
        # One of an older commit, with the same series, has other bytes: it says which commit built it.
        built_by = verify.manifest_of(found).provenance
        if built_by == provenance.here(ROOT, built_by.epoch):
            return found
    return Path(run("./build.sh", "--arch", "x86_64").strip())


@pytest.fixture(scope="module")
def stock_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with stock vLLM; its interpreter. torch and the requirements are this environment's own."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    # addsitedir, since a plain path would not honour the .pth files of what is installed there as editable.
    (site_of(python) / "requirements.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    official = run("./build.sh", "fetch", "--arch", "x86_64").splitlines()[-1]
    install(python, Path(official))
    return python


def install(python: Path, wheel: Path) -> None:
    run(python, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile", wheel)


def site_of(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def version(python: Path) -> str:
    return run(python, "-c", "import vllm; print(vllm.__version__)", VLLM_LOGGING_LEVEL="ERROR").splitlines()[-1]


def contract(python: Path, code: int) -> str:
    file = f"tests/contracts/test_{FIX.replace('-', '_')}.py"
    return run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "--tree", site_of(python), code=code)


def test_installing_over_stock_changes_version_status_and_behaviour(stock_environment: Path, wheel: Path) -> None:
    python = stock_environment
    assert version(python) == RELEASE
    assert json.loads(run("./build.sh", "status", "--json", "--python", python, code=3))["verdict"] == "stock"
    assert " failed" in contract(python, code=1)

    install(python, wheel)

    assert version(python) == VERSION
    status = json.loads(run("./build.sh", "status", "--json", "--python", python))
    assert FIX in [row["fix"] for row in status["rows"]]
    assert {row["state"] for row in status["rows"]} == {"ok"}
    assert " failed" not in contract(python, code=0)


def test_the_same_checkout_gives_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    again = Path(run("./build.sh", "--arch", "x86_64", "--out", tmp_path, TZ="Asia/Tokyo", LC_ALL="C").strip())
    assert again.read_bytes() == wheel.read_bytes()


def test_source_build_for_no_device(tmp_path: Path) -> None:
    """vLLM's own setup.py on the patched tree; ``empty`` is the target that needs no compiler for a device."""
    built = Path(
        run(
            *("./build.sh", "wheel", "--from-source", "--no-isolation", "--python", sys.executable, "--out", tmp_path),
            VLLM_TARGET_DEVICE="empty",
        ).strip()
    )
    assert built.name.startswith(f"vllm-{VERSION}.empty-")
    status = json.loads(run("./build.sh", "status", "--json", built))
    assert FIX in [row["fix"] for row in status["rows"]]
