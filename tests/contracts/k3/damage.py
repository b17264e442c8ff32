"""Checkpoints with one thing wrong, of the kinds that loading must refuse."""

from __future__ import annotations

import torch

VALUES = {"NaN": torch.nan, "infinite": torch.inf, "zero": 0.0, "negative": -0.5}
SHAPES = ("a block of rows too many", "a block of rows too few", "a block of columns too many")
SCALES = ("missing", *SHAPES, *VALUES)


def damaged_scale(scale: torch.Tensor, damage: str) -> torch.Tensor | None:
    """FP8_PB_WO scales [rows / 128, 1, cols / 128, 1] with this damage, values in the first block; None if missing."""
    if damage == "missing":
        return None
    if damage == "a block of rows too many":
        return torch.cat([scale, scale[:1]])
    if damage == "a block of rows too few":
        return scale[:-1].contiguous()
    if damage == "a block of columns too many":
        return torch.cat([scale, scale[:, :, :1]], 2)
    changed = scale.clone()
    changed[0, 0, 0, 0] = VALUES[damage]
    return changed
