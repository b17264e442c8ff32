"""Session fixtures: what is slow to make is made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.config import VllmConfig

from . import compat, modules
from .checkpoint import Checkpoint, Geometry
from .reference import Oracle
from .sweep import Sweep


@pytest.fixture(scope="session")
def first() -> Checkpoint:
    """A whole checkpoint with an MTP layer."""
    return Checkpoint.random(Geometry(), seed=1, mtp=True)


@pytest.fixture(scope="session")
def second() -> Checkpoint:
    """The same names and shapes, other values."""
    return Checkpoint.random(Geometry(), seed=2, mtp=True)


@pytest.fixture(scope="session")
def oracle(first: Checkpoint) -> Oracle:
    return Oracle(first)


@pytest.fixture(scope="session")
def folder(first: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`first` on disk, as a user has it."""
    return first.save(tmp_path_factory.mktemp("kimi-k3"))


@pytest.fixture(scope="session")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Checkpoint], VllmConfig]:
    """vLLM's configuration of a checkpoint, made once for each, with a process group ready."""
    compat.inspect_models_in_process()
    made: dict[int, tuple[Checkpoint, VllmConfig]] = {}  # with its checkpoint, or the id could be another's

    def make(checkpoint: Checkpoint) -> VllmConfig:
        if id(checkpoint) not in made:
            config = modules.vllm_config(checkpoint.save_config(tmp_path_factory.mktemp("config")))
            compat.start_distributed(config)
            made[id(checkpoint)] = checkpoint, config
        return made[id(checkpoint)][1]

    return make


@pytest.fixture(scope="session")
def config(configure: Callable[[Checkpoint], VllmConfig], first: Checkpoint) -> VllmConfig:
    """vLLM's configuration of `first`."""
    return configure(first)


@pytest.fixture(scope="session")
def sweep(configure: Callable[[Checkpoint], VllmConfig], oracle: Oracle) -> Sweep:
    return Sweep(configure, oracle)
