"""The oracle: what a drafter's context latents must be, in float64, as five projections apart would compute them."""

from __future__ import annotations

import torch

from .checkpoint import Drafter


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.double()


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate neighbouring pairs of the last dimension (GPT-J's order) by position * theta^(-2i / width)."""
    width = x.shape[-1]
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = positions.double()[:, None] * frequency
    even, odd = x.double()[..., 0::2], x.double()[..., 1::2]
    turned = even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()
    return torch.stack(turned, -1).flatten(-2)


def context_latents(drafter: Drafter, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[layers, tokens, kv_lora + rope]: each layer's own projection, its norm on the latent, RoPE on the rest."""
    geometry, rows = drafter.geometry, []
    for layer in range(geometry.layers):
        projected = x.double() @ drafter.kv_matrix(layer).T
        latent, rotary = projected.split([geometry.kv_lora, geometry.rope], -1)
        weight = drafter.tensors[f"layers.{layer}.self_attn.kv_a_layernorm.weight"]
        normed = rms_norm(latent, weight, geometry.epsilon)
        rows.append(torch.cat([normed, rope(rotary, positions, geometry.theta)], -1))
    return torch.stack(rows)


def expected_cache(empty: torch.Tensor, entries: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """A cache [blocks, block, width] after entries [tokens, width] went to their slots; a slot of -1 is nobody's."""
    cache = empty.clone()
    if slots is not None:
        kept = slots >= 0
        cache.view(-1, cache.shape[-1])[slots[kept]] = entries[kept].to(cache.dtype)
    return cache


def inputs(tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    """Context states [tokens, width] in float64, each value exact in BF16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width, generator=generator).bfloat16().double()
