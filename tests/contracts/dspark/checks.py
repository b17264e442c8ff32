"""Compare what a drafter wrote into its KV caches with the oracle."""

from __future__ import annotations

import torch

from .checkpoint import Drafter, Geometry
from .modules import BLOCK_SIZE, EMPTY, Loaded, Slots
from .reference import context_latents, expected_cache, inputs

BLOCKS = 8
# FP32 tables turn position * frequency into an angle with 2**-24 of it lost, at position 1023 some 1e-4.
LATENT, ROTARY = 1e-5, 5e-4


def arrange(
    tokens: int, seed: int, blocks: int = BLOCKS, width: int = Geometry.hidden
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(context states, positions up to the last one, distinct slots) of some tokens."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 1024, (tokens,), generator=generator)
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=generator)[:tokens]
    return inputs(tokens, width, seed), positions, slots


def of_layer(slots: Slots, layer: int) -> torch.Tensor | None:
    return slots[layer] if isinstance(slots, list) else slots


def assert_caches(loaded: Loaded, drafter: Drafter, x: torch.Tensor, positions: torch.Tensor, slots: Slots) -> None:
    """Every layer's cache holds its latents at its slots, and nothing anywhere else."""
    latents, width = context_latents(drafter, x, positions), drafter.geometry.kv_lora
    for layer, cache in enumerate(loaded.caches):
        expected = expected_cache(torch.full_like(cache, EMPTY), latents[layer], of_layer(slots, layer))
        written = (expected != EMPTY).any(-1)
        assert torch.equal(cache[~written], expected[~written]), f"layer {layer}: a slot that is nobody's was written"
        for part, bound in ((slice(None, width), LATENT), (slice(width, None), ROTARY)):
            wanted = expected[written][:, part]
            error = (cache[written][:, part] - wanted).abs().amax(-1) / wanted.abs().amax(-1)
            assert bool((error < bound).all()), f"layer {layer}: {part} is off by {error.max():.3g}"


def assert_right(loaded: Loaded, drafter: Drafter, tokens: int, seed: int) -> None:
    """One run with one mapping for all layers puts the right numbers into every cache."""
    x, positions, slots = arrange(tokens, seed, width=drafter.geometry.hidden)
    loaded.clear()
    loaded.precompute(x, positions, slots)
    assert_caches(loaded, drafter, x, positions, slots)
