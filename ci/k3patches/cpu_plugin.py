"""A pytest plugin that lets upstream's conftest clean up on a machine without an accelerator."""

from __future__ import annotations

import torch


def pytest_configure() -> None:
    # Upstream's fixtures empty the accelerator's cache after every test, which torch refuses where there is none.
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None
