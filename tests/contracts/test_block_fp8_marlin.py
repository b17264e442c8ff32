"""block-fp8-marlin: FP8_PB_WO layers run on GPUs without FP8.

Below compute capability 8.9 vLLM chooses Marlin for them, which asks the layer for the dtype to run in and for its
width. Layers of any widths load, reload and compute the checkpoint's matrix there, up to the rounding of Marlin's
scales, and their width stays their outputs', for LoRA and for a bias.

Nothing is refused.
"""

from __future__ import annotations

import pytest
import torch
from k3.reference import dequantize
from k3.shards import COLS, MLA_WIDTHS, loaded, loads, shards
from merged import marlin
from vllm.config import VllmConfig

pytest_plugins = ("k3.fixtures",)


@pytest.mark.parametrize("widths", [MLA_WIDTHS, (256, 128), (100, 200), (96,)])
def test_marlin(config: VllmConfig, widths: tuple[int, ...]) -> None:
    """vLLM's own kernel for GPUs without FP8, below compute capability 8.9: it keeps scales by row, in BF16."""
    with marlin.on_cpu():
        built = loaded(config, widths, marlin.MarlinKernel)
        for seed in (1, 2, 3):
            held = shards(widths, seed)
            if seed > 1:
                built.reload(*loads(held))
            matrix = torch.cat([dequantize(*part) for part in held])
            off = (built(torch.eye(COLS, dtype=torch.float64)).T - matrix).abs()
            assert bool((off <= marlin.ROUNDING * matrix.abs()).all())
    assert built.layer.output_size_per_partition == sum(widths)
