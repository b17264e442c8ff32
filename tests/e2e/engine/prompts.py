"""The fixed prompt set: token ids drawn once from a seed."""

from __future__ import annotations

import random

LENGTHS = (1, 2, 5, 17, 63, 64, 65, 130, 257, 400, 700, 1500)
GENERATED = 48


def prompts(vocabulary: int, *, reserved: int, seed: int = 7) -> list[list[int]]:
    """A prompt of each length; ids below ``reserved`` (special tokens) are left out."""
    draw = random.Random(seed)
    return [[draw.randrange(reserved, vocabulary) for _ in range(length)] for length in LENGTHS]


def many(count: int, length: int, vocabulary: int, *, reserved: int, seed: int) -> list[list[int]]:
    """``count`` different prompts of one length, for loads and timings."""
    draw = random.Random(seed)
    return [[draw.randrange(reserved, vocabulary) for _ in range(length)] for _ in range(count)]
