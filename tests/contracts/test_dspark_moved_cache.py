"""dspark-moved-cache: latents go into the KV caches that the layers hold now.

vLLM may allocate the draft layers' caches anew, for instance after it measured with small ones or woke from sleep.
Addresses that the drafter noted before must not be written to again.

Refusals: none on any base.
"""

from __future__ import annotations

import pytest
import torch
from dspark.checkpoint import Drafter, Geometry
from dspark.checks import BLOCKS, assert_right
from dspark.modules import BLOCK_SIZE, EMPTY, Load

pytest_plugins = ("dspark.fixtures",)


@pytest.mark.parametrize("sizes", [(BLOCK_SIZE,), (2 * BLOCK_SIZE,), (BLOCK_SIZE, 2 * BLOCK_SIZE)])
def test_caches_allocated_anew_are_the_ones_written(load: Load, sizes: tuple[int, ...]) -> None:
    whole = Drafter.random(Geometry(layers=2), seed=1)
    drafter = load(whole)
    drafter.allocate(BLOCKS)
    assert_right(drafter, whole, 9, seed=4)
    before = drafter.caches
    for cache in before:
        cache.fill_(EMPTY)
    drafter.allocate(BLOCKS, sizes)
    assert {cache.data_ptr() for cache in before}.isdisjoint(cache.data_ptr() for cache in drafter.caches)
    drafter.known += before
    assert_right(drafter, whole, 9, seed=5)
    assert all(torch.equal(cache, torch.full_like(cache, EMPTY)) for cache in before)
