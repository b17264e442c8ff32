"""The oracle: what an FP8_PB_WO projection must compute, in float64, from the format's definition alone."""

from __future__ import annotations

import torch

from .checkpoint import BLOCK, Checkpoint


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [rows, cols] of an E4M3 weight under scales [ceil(rows/128), 1, ceil(cols/128), 1]."""
    rows, cols = weight.shape
    blocks = scale[:, 0, :, 0].double()
    spread = blocks.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return weight.double() * spread


def share(total: int, size: int, rank: int) -> slice:
    """The part of `total` rows or columns that belongs to one of `size` ranks."""
    each, rest = divmod(total, size)
    if rest:
        raise ValueError(f"{total} can't be shared by {size} ranks")
    return slice(rank * each, (rank + 1) * each)


def tokens(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Inputs [count, width] in float64, each value exact in BF16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).bfloat16().double()


class Oracle:
    """Full, unsharded outputs of a checkpoint's projections for one input, kept while the tests run."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._outputs: dict[tuple[int, str, int], torch.Tensor] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._last: tuple[tuple[int, str], torch.Tensor] | None = None

    def matrix(self, layer: int, projection: str) -> torch.Tensor:
        """float64 [rows, cols] of one projection; the last one is remembered, all would take gigabytes."""
        key = (layer, projection)
        if self._last is None or self._last[0] != key:
            self._last = key, dequantize(*self.checkpoint.matrix(layer, projection))
        return self._last[1]

    def partial(self, layer: int, projection: str, x: torch.Tensor, part: slice) -> torch.Tensor:
        """What a rank that holds the columns `part` adds to x @ W^T, in float64: [tokens, rows]."""
        weight, scale = self.checkpoint.matrix(layer, projection)
        blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
        within = slice(part.start - blocks.start * BLOCK, part.stop - blocks.start * BLOCK)
        columns = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        return x[:, part] @ dequantize(weight[:, columns], scale[:, :, blocks])[:, within].T

    def output(self, layer: int, projection: str, x: torch.Tensor) -> torch.Tensor:
        """x @ W^T in float64: [tokens, rows]; remembered by the identity of x."""
        key = (layer, projection, id(x))
        if key not in self._outputs:
            self._inputs[id(x)] = x  # keeps the id from being given to another tensor
            self._outputs[key] = x @ self.matrix(layer, projection).T
        return self._outputs[key]


def assert_columns(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare outputs [tokens, columns] column by column; a column is right when its error is float64's own."""
    assert tuple(actual.shape) == tuple(expected.shape), f"{what}: {tuple(actual.shape)}, not {tuple(expected.shape)}"
    size = expected.abs().amax(0).clamp(min=torch.finfo(torch.float64).tiny)
    # The order of summation differs; cancellation within a column is bounded by the largest of its tokens.
    error = (actual.double() - expected).abs().amax(0) / size
    wrong = (~(error < 1e-9)).nonzero().flatten()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {expected.shape[1]} columns are wrong, the first is {int(wrong[0])}, "
        f"largest relative error {float(error.max()):.3g}"
    )
