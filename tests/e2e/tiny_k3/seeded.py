"""Random tensors that depend on a seed and a name alone: the same bytes on every machine, in any order.

PCG64's raw stream is fixed by its definition, and everything after it is exact or rounded once, so that no vector
unit's logarithm and no library's version decides a bit. Values are uniform, with variance 1.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

# Gains between 1/4 and 4, as literals: a power computed by a library could be rounded differently elsewhere.
GAINS = (0.25, 0.34375, 0.5, 0.6875, 1.0, 1.375, 2.0, 2.75, 4.0)


def raw(seed: int, name: str, count: int) -> np.ndarray:
    """`count` random 16-bit integers of either sign."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    state = np.random.PCG64(np.random.SeedSequence(list(digest)))
    return state.random_raw(-(-count // 4)).astype("<u8").view("<i2")[:count]


def noise(seed: int, name: str, *shape: int) -> torch.Tensor:
    """FP32 values of mean 0 and variance 1."""
    whole = raw(seed, name, math.prod(shape)).astype(np.float32) + np.float32(0.5)
    return torch.from_numpy(whole * np.float32(math.sqrt(3) / 32768)).view(shape)


def gains(seed: int, name: str, *shape: int) -> torch.Tensor:
    """FP32 factors between 1/4 and 4, their logarithms spread evenly."""
    table = torch.tensor(GAINS)
    chosen = raw(seed, name, math.prod(shape)).astype(np.int64) % len(GAINS)
    return table[torch.from_numpy(chosen)].view(shape)


def permutation(seed: int, name: str, count: int) -> torch.Tensor:
    """One cycle through 0 .. count - 1: whichever token one starts with, none comes twice before all have come."""
    order = np.argsort(raw(seed, name, 4 * count).view("<u8"), kind="stable")
    following = np.empty(count, dtype=np.int64)
    following[order] = np.roll(order, -1)
    return torch.from_numpy(following)


# The mean square of a gain, by which matrices with gains are brought back to the size that was asked for.
GAIN_SQUARE = sum(gain * gain for gain in GAINS) / len(GAINS)


def matrix(seed: int, name: str, rows: int, cols: int, size: float, block: tuple[int, int] | None) -> torch.Tensor:
    """FP32 [rows, cols] that maps inputs of variance 1 to outputs of variance size**2.

    block: the shape of the blocks that have a gain of their own between 1/4 and 4, so that a scale in the wrong place
    shows. The gains change how outputs are spread over rows, not their mean square.
    """
    values = noise(seed, name, rows, cols)
    if block is None:
        return values * (size / math.sqrt(cols))
    counts = -(-rows // block[0]), -(-cols // block[1])
    spread = gains(seed, f"{name}/gains", *counts)
    spread = spread.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]
    return values * spread * (size / math.sqrt(cols * GAIN_SQUARE))
