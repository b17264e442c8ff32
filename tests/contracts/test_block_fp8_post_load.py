"""block-fp8-post-load: the chosen block-FP8 kernel prepares its own operands, once for each load.

A kernel may move weight and scales into a layout of its own after loading, as DeepGEMM does on Blackwell. Its
post-load step runs once after each load, when the scales stand in two dimensions [rows / 128, cols / 128], and
again when weights are reloaded; what the layer then computes is the checkpoint's matrix. The contract holds for
every kind of linear layer and needs no mixed config: these layers belong to a checkpoint that is FP8_PB_WO
throughout, with whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from k3 import kernels, modules
from k3.checkpoint import BLOCK, block_quantized
from k3.reference import assert_columns, dequantize, share, tokens
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

pytest_plugins = ("k3.fixtures",)

ROWS, COLS, SHARDS = 1024, 512, 2
SIZE, RANK = 2, 1
Built = Callable[..., modules.Linear]


@pytest.fixture(params=["column", "row", "merged", "replicated"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[kernels.BlockKernel, kernels.OpaqueKernel])
def kernel(request: pytest.FixtureRequest) -> type:
    return request.param


def build(config: VllmConfig, kind: str, kernel: type) -> modules.Linear:
    """One linear layer on the second of two ranks."""
    make, arguments = {
        "column": (ColumnParallelLinear, (COLS, ROWS)),
        "row": (RowParallelLinear, (COLS, ROWS)),
        "merged": (MergedColumnParallelLinear, (COLS, [ROWS // SHARDS] * SHARDS)),
        "replicated": (ReplicatedLinear, (COLS, ROWS)),
    }[kind]
    reduced = {"reduce_results": False} if kind == "row" else {}
    quant = modules.block_fp8_config()
    built = modules.linear(config, make, quant, *arguments, size=SIZE, rank=RANK, kernel=kernel, **reduced)
    built.layer.prefix = kind
    return built


def matrices(kind: str, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the checkpoint holds for the layer: one matrix, or one for each shard."""
    generator = torch.Generator().manual_seed(seed)
    count = SHARDS if kind == "merged" else 1
    return [block_quantized(ROWS // count, COLS, generator) for _ in range(count)]


def loads(kind: str, held: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[str, torch.Tensor, int | None]]:
    """The same as (parameter, tensor, shard)."""
    return [
        (name, tensor, shard if kind == "merged" else None)
        for shard, (weight, scale) in enumerate(held)
        for name, tensor in (("weight", weight), ("weight_scale", scale))
    ]


def assert_computes(built: modules.Linear, kind: str, held: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """The layer's output is this rank's part of x @ W^T."""
    full = [dequantize(*matrix) for matrix in held]
    x = tokens(3, COLS)
    if kind == "row":
        part = share(COLS, SIZE, RANK)
        x, full = x[:, part].contiguous(), [full[0][:, part]]
    elif kind != "replicated":
        full = [matrix[share(matrix.shape[0], SIZE, RANK)] for matrix in full]
    assert_columns(built(x), torch.cat([x @ matrix.T for matrix in full], -1), kind)


def test_the_kernels_step_runs_once_on_two_dimensional_scales(config: VllmConfig, kind: str, kernel: type) -> None:
    built = build(config, kind, kernel)
    for load in loads(kind, matrices(kind, 1)):
        built.load(*load)
    built.finish()
    seen = built.log.post_loads_of(built.layer)
    assert len(seen) == 1
    rows, cols = seen[0].weight
    assert seen[0].scale == (rows // BLOCK, cols // BLOCK)


def test_the_layer_computes_what_the_kernel_prepared(config: VllmConfig, kind: str, kernel: type) -> None:
    built, held = build(config, kind, kernel), matrices(kind, 1)
    for load in loads(kind, held):
        built.load(*load)
    built.finish()
    assert_computes(built, kind, held)
    assert len(built.log.post_loads_of(built.layer)) == 1


def test_the_step_runs_again_when_weights_are_reloaded(config: VllmConfig, kind: str, kernel: type) -> None:
    built = build(config, kind, kernel)
    for load in loads(kind, matrices(kind, 1)):
        built.load(*load)
    built.finish()
    for times, seed in ((2, 2), (3, 3)):
        held = matrices(kind, seed)
        built.reload(*loads(kind, held))
        assert len(built.log.post_loads_of(built.layer)) == times
        assert_computes(built, kind, held)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_dummy_weights_are_no_fault_whatever_the_target_loads(
    config: VllmConfig, kind: str, kernel: type, load_format: str
) -> None:
    # draft_load_config={"load_format": "dummy"}: what is configured while the draft is built is how the target loads.
    beside = replace(config, load_config=LoadConfig(load_format=load_format))
    built = build(beside, kind, kernel)
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(built.layer, beside.model_config)
    built.finish()
    assert bool(built(tokens(3, COLS // SIZE if kind == "row" else COLS)).isfinite().all())
