"""Run the contracts against one unpacked vLLM tree, on CPU.

    pytest tests/contracts --tree build/v0.27.1/patched

The tree is imported in place: nothing is installed and nothing compiled.  One
process can import one vLLM only, so each tree needs its own pytest run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TREE = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    try:
        chosen = config.getoption("--tree")
    except ValueError:
        raise pytest.UsageError("the contracts need pytest's option --tree: pip install --no-deps -e .") from None
    tree = (chosen or _default_tree()).resolve()
    if not (tree / "vllm" / "__init__.py").is_file():
        raise pytest.UsageError(f"{tree} holds no vLLM source tree: run ./build.sh apply, or name one with --tree")
    if "vllm" in sys.modules:
        raise pytest.UsageError("vllm was imported before --tree could choose which: run the contracts on their own")
    # What a GPU-less import needs, and what keeps one run from depending on the user's settings.
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The tensors are small, and threads that wait for each other take four times the CPU time where runs share cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Byte code left in the tree would be taken for part of it.
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree))
    config.stash[TREE] = tree


def _default_tree() -> Path:
    release = (ROOT / "VERSION").read_text().split("+")[0].strip()
    return ROOT / "build" / f"v{release}" / "patched"


def pytest_report_header(config: pytest.Config) -> str:
    return f"vLLM tree: {config.stash[TREE]}"


@pytest.fixture(scope="session")
def tree(request: pytest.FixtureRequest) -> Path:
    """The vLLM source tree under test."""
    return request.config.stash[TREE]


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Start each test with torch's own default dtype: vLLM sets another for a while, also where a load then fails."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float32)
