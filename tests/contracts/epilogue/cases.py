"""The steps that the contract looks at, and the file that the other process tells them in.

Nothing of vLLM is in here: it is imported on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

LAYERS, BLOCKS, BLOCK_SIZE, TOKENS = 3, 4, 16, 11
SCALES = (0.0237, 1.0, 0.31)
UNTOUCHED = 0x5A  # every byte of a cache that nobody wrote


@dataclass(frozen=True)
class Case:
    """One step: the caches' format and where their layers' latents go."""

    cache: str  # as --kv-cache-dtype: auto or fp8
    mapping: str
    index: torch.dtype = torch.int64
    block_sizes: tuple[int, ...] = (BLOCK_SIZE,)

    @property
    def name(self) -> str:
        extra = "" if self.index == torch.int64 else f", {self.index}"
        return f"{self.cache}, {self.mapping}{extra}" + (", unlike blocks" if len(self.block_sizes) > 1 else "")

    def slots(self) -> list[torch.Tensor | None]:
        """Each layer's slot mapping."""
        generator = torch.Generator().manual_seed(5)
        each = [torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:TOKENS] for _ in range(LAYERS)]
        if self.mapping == "one for all":
            each = [each[0]] * LAYERS
        if self.mapping == "padded":
            for slots in each:
                slots[2::3] = -1
        mapped: list[torch.Tensor | None] = [slots.to(self.index) for slots in each]
        if self.mapping == "none for one layer":
            mapped[1] = None
        return mapped


CASES = (
    *(
        Case(cache, mapping)
        for cache in ("auto", "fp8")
        for mapping in ("one for all", "one a layer", "padded", "none for one layer")
    ),
    Case("fp8", "one a layer", torch.int32),
)
UNLIKE = Case("auto", "one a layer", block_sizes=(BLOCK_SIZE, 2 * BLOCK_SIZE))


@dataclass
class Step:
    """What one step was given, did and left."""

    projected: torch.Tensor  # [tokens, layers, kv_lora + rope]
    norm_weights: torch.Tensor
    epsilon: float
    positions: torch.Tensor
    cos_sin: torch.Tensor
    kv_lora: int
    caches: list[torch.Tensor] = field(default_factory=list)  # bytes [blocks, block size, entry]
    launches: list[str] = field(default_factory=list)
    allocations: list[str] = field(default_factory=list)
