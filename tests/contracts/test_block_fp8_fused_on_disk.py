"""block-fp8-fused-on-disk: a tensor that the checkpoint holds fused stands under its own scales.

Some checkpoints hold one tensor where vLLM expects a matrix for each shard of a merged FP8_PB_WO layer. Its blocks are
counted from its own first row, wherever one matrix ends and the next begins: inside a block, too. The layer computes
what the fused tensor says, after loading and reloading, of whole layers, of attention's q, k and v, and of some shards.

What is refused, by name, and why stock is wrong there:
- under tensor parallelism, a tensor that is fused on disk and has a matrix that ends inside a block: stock gives a rank
  the scales of other rows. On one rank it is served, as stock serves those whose matrices take as many blocks apart as
  fused from 0.29.0 on;
- a reload of such a tensor over matrices that were apart, or over dummy values, and the reverse: the kernel's output
  has other columns then, and captured graphs would go on to read the old ones. Stock multiplies matrices apart by wrong
  scales. Over dummy values it is right where it serves the tensor at all: the one refusal that costs something.
"""

from __future__ import annotations

import pytest
import torch
from k3 import kernels, modules
from k3.errors import assert_named, refuses
from k3.reference import assert_columns, dequantize, tokens
from k3.shards import COLS, loads, merged, shards
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

pytest_plugins = ("k3.fixtures",)


@pytest.mark.parametrize("kernel", [kernels.BlockKernel, kernels.OpaqueKernel])
@pytest.mark.parametrize("widths", [(100, 100), (100, 156), (128, 72), (300, 20, 64)])
def test_matrices_that_are_fused_on_disk(config: VllmConfig, widths: tuple[int, ...], kernel: type) -> None:
    """Blocks of a fused tensor are counted from its own first row, wherever one matrix ends and the next begins."""
    built, x = merged(config, widths, kernel), tokens(3, COLS)
    for seed in (1, 2, 3):
        ((weight, scale),) = shards((sum(widths),), seed)
        if seed == 1:
            built.load("weight", weight)
            built.load("weight_scale", scale)
            built.finish()
        else:
            built.reload(("weight", weight, None), ("weight_scale", scale, None))
        assert_columns(built(x), x @ dequantize(weight, scale).T, f"{widths}, load {seed}")
        if kernel is kernels.BlockKernel:
            assert torch.isfinite(built.layer.weight_scale).all()


def test_a_qkv_projection_that_is_fused_on_disk(config: VllmConfig) -> None:
    quant, name = modules.block_fp8_config(), "model.layers.0.self_attn.qkv_proj"
    built, x = modules.linear(config, QKVParallelLinear, quant, COLS, 96, 3, 1, prefix=name), tokens(3, COLS)
    for seed in (1, 2):
        ((weight, scale),) = shards((5 * 96,), seed)
        if seed == 1:
            built.load("weight_scale", scale)
            built.load("weight", weight)
            built.finish()
        else:
            built.reload(("weight_scale", scale, None), ("weight", weight, None))
        assert_columns(built(x), x @ dequantize(weight, scale).T, f"load {seed}")


def test_some_matrices_that_are_fused_on_disk(config: VllmConfig) -> None:
    built, x = merged(config, (128, 100, 60)), tokens(3, COLS)
    for seed in (1, 2):
        alone, fused = shards((128, 160), seed)
        held = [
            (name, tensor, shard)
            for shard, matrix in ((0, alone), ((1, 2), fused))
            for name, tensor in zip(("weight", "weight_scale"), matrix, strict=True)
        ]
        if seed == 1:
            for load in held:
                built.load(*load)
            built.finish()
        else:
            built.reload(*held)
        assert_columns(built(x), torch.cat([x @ dequantize(*part).T for part in (alone, fused)], -1), f"load {seed}")


@pytest.mark.parametrize("fused_first", [True, False])
def test_a_tensor_fused_on_disk_over_matrices_apart(config: VllmConfig, fused_first: bool) -> None:
    """Right, or refused by name: never the columns of the one read as those of the other."""
    widths, x = (100, 156), tokens(3, COLS)
    ((weight, scale),) = shards((sum(widths),), 1)
    fused, apart = [("weight", weight, None), ("weight_scale", scale, None)], loads(shards(widths, 2))
    expected = {
        True: x @ dequantize(weight, scale).T,
        False: torch.cat([x @ dequantize(*matrix).T for matrix in shards(widths, 2)], -1),
    }
    built = merged(config, widths)
    for load in fused if fused_first else apart:
        built.load(*load)
    built.finish()
    assert_columns(built(x), expected[fused_first], "first")
    try:
        built.reload(*(apart if fused_first else fused))
    except ValueError as error:
        assert_named(error, "layers.1.self_attn.fused_qkv_a_proj")
    else:
        assert_columns(built(x), expected[not fused_first], "second")


def test_tensor_parallelism_would_cut_a_fused_tensor_inside_a_block(config: VllmConfig) -> None:
    quant, prefix = modules.block_fp8_config(), "model.layers.0.mlp.gate_up_proj"
    with refuses() as refused:
        built = modules.linear(config, MergedColumnParallelLinear, quant, COLS, [200, 200], size=2, prefix=prefix)
        ((weight, scale),) = shards((400,), 1)
        built.load("weight", weight)
        built.load("weight_scale", scale)
        built.finish()
    assert_named(refused.value, prefix)
