"""A pytest plugin that lets upstream's conftest clean up on a machine without an accelerator, and fast."""

from __future__ import annotations

import gc

import pytest
import torch

from k3patches import bytecode, garbage


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # Upstream's conftest imports vLLM.
    bytecode.install(early_config.rootpath)


def pytest_configure() -> None:
    # Upstream's fixtures empty the accelerator's caches after every test, which torch refuses where there is none.
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None
        torch.accelerator.empty_host_cache = lambda: None


def pytest_collection_finish() -> None:
    # They also collect garbage after every test, half a second each time among all that the imports left: that is
    # set apart, and stays so although they unfreeze what was frozen.
    gc.collect()
    garbage.set_aside()
    gc.unfreeze = lambda: None


def pytest_unconfigure() -> None:
    garbage.set_aside()
