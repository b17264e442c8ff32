"""Session fixtures: what is slow to make is made once."""

from __future__ import annotations

import pytest

from .layers import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("merged"))
