"""Session fixtures: targets and a loader, made once."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from k3 import checkpoint as k3_checkpoint
from k3 import compat as k3_compat

from . import compat, modules
from .checkpoint import Drafter


def _target(folder: Path, quantized: bool) -> modules.Target:
    geometry = k3_checkpoint.Geometry(vocab=256, heads=8, q_lora=256)
    text = geometry.text_config()
    if quantized:
        names = (k3_checkpoint.Checkpoint.module(geometry.mla_layer, name) for name in geometry.mla())
        text["quantization_config"] = k3_checkpoint.quantization_config(
            dict.fromkeys(names, k3_checkpoint.ALGORITHM), ("lm_head",)
        )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(text))
    k3_compat.inspect_models_in_process()
    config = modules.target_config(folder)
    gc.freeze()  # vLLM collects garbage for each load; what importing it made is none
    k3_compat.start_distributed(config)
    return modules.Target(config)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> modules.Target:
    """A target in BF16."""
    return _target(tmp_path_factory.mktemp("target") / "bf16", quantized=False)


@pytest.fixture(scope="session")
def quantized_target(tmp_path_factory: pytest.TempPathFactory) -> modules.Target:
    """A target that ModelOpt quantized layer by layer."""
    return _target(tmp_path_factory.mktemp("target") / "mixed", quantized=True)


@pytest.fixture(scope="session")
def load(target: modules.Target, tmp_path_factory: pytest.TempPathFactory) -> modules.Load:
    """Load a drafter beside the BF16 target, or another; arguments as for modules.load."""
    folder, number = tmp_path_factory.mktemp("drafters"), count()

    def make(drafter: Drafter, beside: modules.Target | None = None, **kwargs: Any) -> modules.Loaded:
        return modules.load(drafter, folder / str(next(number)), beside or target, **kwargs)

    return make


@pytest.fixture(autouse=True)
def workspace() -> Iterator[Any]:
    """The workspace manager that the model runner would have made."""
    with compat.workspace_manager() as manager:
        yield manager
