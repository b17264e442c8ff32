"""What a step must store, from float64 and the roundings that the format of each value implies."""

from __future__ import annotations

import torch

from .cases import Step

# Relative error that FP32 arithmetic may have before a value is rounded to what is stored.
FP32_ERROR = 2.0**-20


def candidates(step: Step, layer: int, cache: str, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits [tokens, entry] that float64 gives, rounded from a shade below and from a shade above.

    They differ only where a value is so close to a tie that FP32 can fall on either side of it.
    """
    kv = step.projected[:, layer].double()
    latent, rotary = kv[:, : step.kv_lora], kv[:, step.kv_lora :]
    mean = latent.square().mean(-1, keepdim=True)
    normed = latent * (mean + step.epsilon).rsqrt() * step.norm_weights[layer].double()
    cos, sin = step.cos_sin[step.positions.long()].double().chunk(2, -1)
    even, odd = rotary[:, ::2], rotary[:, 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    # A sum's error is relative to its terms.
    terms = torch.stack([(even * cos).abs() + (odd * sin).abs(), (odd * cos).abs() + (even * sin).abs()], -1)
    exact = torch.cat([normed, turned], -1)
    error = torch.cat([normed.abs(), terms.flatten(-2)], -1) * FP32_ERROR
    low, high = (stored(exact + sign * error, cache, scale) for sign in (-1, 1))
    return low, high


def stored(value: torch.Tensor, cache: str, scale: float) -> torch.Tensor:
    """Bits of a value in the cache: of its BF16, or of that BF16 divided by the scale, as E4M3."""
    rounded = value.float().bfloat16()
    if cache == "auto":
        return rounded.view(torch.int16)
    # The quotient of two FP32 numbers, rounded once.
    quotient = rounded.float() / torch.tensor(scale, dtype=torch.float32)
    return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
