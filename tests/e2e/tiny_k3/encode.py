"""Quantize a BF16 matrix into ModelOpt's FP8_PB_WO and NVFP4, from the formats' definitions.

The other direction, with which every form is checked, is the contracts': `k3.reference.dequantize` and
`dspark.formats`.
"""

from __future__ import annotations

import math

import torch

from .contracts import BLOCK, NVFP4_GROUP

E4M3_MAX, E2M1_MAX = 448.0, 6.0
# Halfway between neighbouring magnitudes of E2M1, the first between codes 0 and 1.
E2M1_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def fp8_pb_wo(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [rows, cols] and FP32 [ceil(rows / 128), 1, ceil(cols / 128), 1]: a block's largest element becomes 448."""
    rows, cols = matrix.shape
    tall, wide = -rows % BLOCK, -cols % BLOCK
    padded = torch.nn.functional.pad(matrix.float(), (0, wide, 0, tall))
    tiles = padded.view((rows + tall) // BLOCK, BLOCK, (cols + wide) // BLOCK, BLOCK)
    scale = tiles.abs().amax((1, 3), keepdim=True) / E4M3_MAX
    if not bool((scale > 0).all()):
        raise ValueError("a block of zeros has no FP8_PB_WO scale")
    codes = (tiles / scale).to(torch.float8_e4m3fn).view(padded.shape)[:rows, :cols]
    return codes.contiguous(), scale.contiguous()


def global_scale(*matrices: torch.Tensor) -> float:
    """NVFP4's second scale for matrices that one kernel merges: the smallest power of two under which none overflows.

    The published checkpoint's are powers of two as well. Under one, an element has at most six significant bits, so
    that BF16 holds it exactly.
    """
    largest = max(float(matrix.abs().max()) for matrix in matrices)
    mantissa, exponent = math.frexp(largest / (E4M3_MAX * E2M1_MAX))
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def nvfp4(matrix: torch.Tensor, second: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed E2M1 [rows, cols / 2], low nibble first, and E4M3 group scales [rows, cols / 16] under `second`."""
    rows, cols = matrix.shape
    groups = matrix.float().view(rows, cols // NVFP4_GROUP, NVFP4_GROUP)
    scale = (groups.abs().amax(-1) / (E2M1_MAX * second)).to(torch.float8_e4m3fn)
    if not bool((scale.float() > 0).all()):
        raise ValueError("a group of zeros has no NVFP4 scale")
    codes = e2m1_codes(groups / (scale.float() * second)[..., None]).view(rows, cols)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 code of each value, ties to the even code, too large ones to 6."""
    size = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for lower, middle in enumerate(E2M1_BETWEEN):
        codes += (size >= middle if lower % 2 else size > middle).to(torch.uint8)
    return codes | (values < 0).to(torch.uint8) << 3
