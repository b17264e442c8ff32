"""block-fp8-post-load: the chosen block-FP8 kernel prepares its own operands, once for each load.

A kernel may move weight and scales into a layout of its own after loading, as DeepGEMM does on Blackwell. Its
post-load step runs once after each load, when the scales stand in two dimensions [rows / 128, cols / 128], and
again when weights are reloaded; what the layer then computes is the checkpoint's matrix. The contract holds for
every kind of linear layer and needs no mixed config: these layers belong to a checkpoint that is FP8_PB_WO
throughout, with whole blocks.

A projection whose k and v the checkpoint does not hold loads, as where a layer reads the KV cache of another; so does
one with weight loaders of its own, one that was filled with dummy weights first, a head that is tied to an embedding,
and a block of zeros under a scale of zero.

What is refused, by name, and why stock is wrong there:
- a matrix of which the checkpoint has the weight and not the scales, or the scales and not the weight, and one that it
  lacks altogether, unless these are k and v (a file that is missing or cut short): stock multiplies by
  uninitialized memory or under the sentinel -3.4e38;
- a scale that is NaN, infinite, negative, or zero over numbers that are not (a damaged file, a failed calibration):
  stock multiplies by it;
- a tensor of another shape or dtype than the layer's (a checkpoint of another model size, or a BF16 matrix that the
  config lists as FP8_PB_WO): stock cuts it to size or casts it to E4M3 under scales that are not its own;
- columns that fill no whole blocks: stock refuses them too, no kernel has half a block of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from k3 import kernels, modules
from k3.checkpoint import BLOCK, block_quantized
from k3.errors import assert_named, refuses
from k3.reference import assert_columns, dequantize, share, tokens
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    MinimaxM3QKVParallelLinearWithIndexer,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

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


QKV = "model.layers.3.self_attn.qkv_proj"
HEADS, KV_HEADS = 4, 2
Held = dict[str, tuple[torch.Tensor, torch.Tensor]]


def qkv(config: VllmConfig, kernel: type, size: int) -> modules.Linear:
    """An attention's merged projection, on the last of `size` ranks."""
    quant = modules.block_fp8_config()
    quant.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    args = COLS, BLOCK, HEADS, KV_HEADS
    return modules.linear(config, QKVParallelLinear, quant, *args, size=size, rank=size - 1, kernel=kernel, prefix=QKV)


def heads(seed: int, **rows: int) -> Held:
    """One random matrix for each of these numbers of heads."""
    generator = torch.Generator().manual_seed(seed)
    return {name: block_quantized(BLOCK * count, COLS, generator) for name, count in rows.items()}


def shard_loads(held: Held, *without: tuple[str, str]) -> list[tuple[str, torch.Tensor, str]]:
    """The same as (parameter, tensor, shard)."""
    return [
        (name, tensor, shard)
        for shard, matrix in held.items()
        for name, tensor in zip(("weight", "weight_scale"), matrix, strict=True)
        if (shard, name) not in without
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_layer_that_reads_anothers_kv_needs_no_k_and_v(config: VllmConfig, kernel: type, size: int) -> None:
    """As the last layers of Gemma-3n and Gemma-4 E2B and E4B: what is in no file is read by nobody."""
    built = qkv(config, kernel, size)
    x, rows = tokens(3, COLS), HEADS * BLOCK // size
    for seed in (1, 2):
        held = heads(seed, q=HEADS)
        if seed == 1:
            for load in shard_loads(held):
                built.load(*load)
            built.finish()
        else:
            built.reload(*shard_loads(held))
        out = built(x)
        assert_columns(out[:, :rows], x @ dequantize(*held["q"])[-rows:].T, "q")
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("without", [("q", "weight_scale"), ("k", "weight_scale"), ("v", "weight_scale")])
def test_a_matrix_without_its_scales_is_refused(config: VllmConfig, kernel: type, without: tuple[str, str]) -> None:
    built = qkv(config, kernel, 1)
    held = heads(1, q=HEADS, k=KV_HEADS, v=KV_HEADS)
    with refuses() as refused:
        for load in shard_loads(held, without):
            built.load(*load)
        built.finish()
    assert_named(refused.value, QKV.removesuffix("qkv_proj") + without[0] + "_proj.weight_scale")


@pytest.mark.parametrize("size", [1, 2])
def test_layers_with_weight_loaders_of_their_own(config: VllmConfig, kernel: type, size: int) -> None:
    """MiniMax-M3's projection has an indexer beside q, k and v."""
    rank = size - 1
    make, args = MinimaxM3QKVParallelLinearWithIndexer, (COLS, BLOCK, HEADS, KV_HEADS, KV_HEADS, BLOCK)
    built = modules.linear(
        config, make, modules.block_fp8_config(), *args, size=size, rank=rank, kernel=kernel, prefix=QKV
    )
    held = heads(1, q=HEADS, k=KV_HEADS, v=KV_HEADS, index_q=KV_HEADS, index_k=1)
    for load in shard_loads(held):
        built.load(*load)
    built.finish()
    x = tokens(3, COLS)
    full = {name: dequantize(*matrix) for name, matrix in held.items()}
    mine = [full[name][share(len(full[name]), size, rank)] for name in ("q", "k", "v", "index_q")]
    assert_columns(built(x), torch.cat([x @ matrix.T for matrix in (*mine, full["index_k"])], -1), "qkv")


def test_dummy_weights_first_and_real_ones_later(config: VllmConfig, kind: str, kernel: type) -> None:
    """The dummy loader may fill one model beside another that is loaded, as a draft's draft_load_config says."""
    built = build(config, kind, kernel)
    for parameter in built.layer.parameters():
        initialize_single_dummy_weight(parameter)
    built.finish()
    held = matrices(kind, 2)
    built.reload(*loads(kind, held))
    assert_computes(built, kind, held)


@pytest.mark.parametrize("scale", [0.0, -0.0])
def test_zeros_under_a_scale_of_zero_are_zeros(config: VllmConfig, kind: str, kernel: type, scale: float) -> None:
    """So do quantizers write them that divide a block by its largest number."""
    built, held = build(config, kind, kernel), matrices(kind, 1)
    for weight, scales in held:
        weight[-BLOCK:, :BLOCK] = 0
        scales[-1, 0, 0, 0] = scale
    for load in loads(kind, held):
        built.load(*load)
    built.finish()
    assert_computes(built, kind, held)
    assert torch.isfinite(built(tokens(3, COLS // 2 if kind == "row" else COLS))).all()


def test_a_head_that_is_tied_to_the_embedding(config: VllmConfig, kernel: type) -> None:
    """Such a head has the embedding's weight, which is in no block-FP8 format, and no scales."""
    head = modules.linear(config, ParallelLMHead, modules.block_fp8_config(), ROWS, COLS, kernel=kernel)
    embedding = modules.linear(config, lambda *a, bias, **k: VocabParallelEmbedding(*a, **k), None, ROWS, COLS)
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1))
    embedding.load("weight", weight)
    head.layer = head.layer.tie_weights(embedding.layer)
    head.finish()
    x = tokens(3, COLS).bfloat16()
    out = head.layer.quant_method.apply(head.layer, x)
    torch.testing.assert_close(out, x @ weight.bfloat16().T, rtol=2e-2, atol=2e-1)


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
