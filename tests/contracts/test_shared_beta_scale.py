"""shared-beta-scale: ranks whose rows lie under one block of scales load that block's scale.

K3's b_proj has 96 rows, all under one row of blocks: at tensor-parallel size 8 a rank has 12 of them. Every rank
computes with the block that its rows are in, for any projection and at every size. Where a rank's rows reach from
the middle of one block into another, the layer is right or refused by name: never wrong.

What is refused, by name: ranks whose columns fill no whole blocks (a size at which no kernel can run the layer; stock
refuses them too), and before 0.30.0 FP8_PB_WO heads with embeddings that were added to the checkpoint's, which have no
scales. From 0.30.0 on, all FP8_PB_WO heads end in stock's own assertion about the rows of their scales.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from k3 import compat, modules
from k3.checkpoint import BLOCK, Checkpoint, Geometry, block_quantized
from k3.damage import damaged_scale
from k3.errors import REFUSALS, assert_named, refuses
from k3.properties import examples
from k3.reference import Oracle, assert_columns, dequantize, share, tokens
from k3.sweep import Sweep
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ColumnParallelLinear

pytest_plugins = ("k3.fixtures",)

KDA, MLA = Geometry.kda_layer, Geometry.mla_layer
COLS = 256
PREFIX = "language_model.model.layers.0.self_attn.b_proj"


@pytest.mark.parametrize("size", modules.TP_SIZES)
def test_beta_is_right_on_every_rank(sweep: Sweep, size: int) -> None:
    assert not sweep.wrong(size, KDA, ("b_proj",))


@pytest.mark.parametrize("size", modules.TP_SIZES)
def test_the_kda_layer_is_right_on_every_rank(sweep: Sweep, size: int) -> None:
    assert not sweep.wrong(size, KDA, tuple(sweep.geometry.kda()))


def run_rank(config: VllmConfig, rows: int, size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(actual, expected) output of one rank of a projection of `rows` rows in all; raises what loading raises."""
    weight, scale = block_quantized(rows, COLS, torch.Generator().manual_seed(rows))
    quant = modules.block_fp8_config()
    built = modules.linear(config, ColumnParallelLinear, quant, COLS, rows, size=size, rank=rank, prefix=PREFIX)
    built.load("weight", weight)
    built.load("weight_scale", scale)
    built.finish()
    x = tokens(2, COLS)
    return built(x), x @ dequantize(weight, scale)[share(rows, size, rank)].T


def expressible(rows: int, size: int, rank: int) -> bool:
    """Whether a rank's rows begin at a block or lie within one: a kernel can hold them as they are."""
    part = share(rows, size, rank)
    return part.start % BLOCK == 0 or part.start // BLOCK == (part.stop - 1) // BLOCK


def right_or_refused(run: Callable[[], tuple[torch.Tensor, torch.Tensor]], layer: str, what: str) -> None:
    """`run` gives (actual, expected) columns, which agree, or raises an error that names the layer."""
    try:
        actual, expected = run()
    except REFUSALS as error:
        refusal: BaseException = error
    else:
        assert_columns(actual, expected, what)
        return
    assert_named(refusal, layer)


def test_rows_under_one_block_are_right_on_any_rank(config: VllmConfig) -> None:
    @examples(60)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        # The rows of a rank divide a block: whole blocks, all shared alike, or one block that is not full.
        each = data.draw(st.sampled_from([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]), label="rows of a rank")
        most = 3 * (BLOCK // each) if BLOCK % each == 0 else BLOCK // each
        size = data.draw(st.integers(1, most), label="ranks")
        rank = data.draw(st.integers(0, size - 1), label="rank")
        assert expressible(each * size, size, rank)
        assert_columns(*run_rank(config, each * size, size, rank), f"{each} rows on rank {rank} of {size}")

    holds()


def test_any_share_of_any_projection_is_right_or_refused(config: VllmConfig) -> None:
    @examples(80)
    @given(st.integers(1, 400), st.integers(1, 8), st.data())
    def holds(each: int, size: int, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, size - 1), label="rank")
        what = f"{each} rows on rank {rank} of {size}"
        if expressible(each * size, size, rank):
            assert_columns(*run_rank(config, each * size, size, rank), what)
        else:
            right_or_refused(lambda: run_rank(config, each * size, size, rank), PREFIX, what)

    holds()


@pytest.mark.parametrize("size", [32, 96])
def test_mla_queries_that_straddle_blocks_are_right_or_refused(
    configure: Callable[[Checkpoint], VllmConfig], first: Checkpoint, oracle: Oracle, size: int
) -> None:
    # q_b_proj has 192 rows a head: 576 on each of 32 ranks, 192 on each of 96; odd ranks begin inside a block.
    checkpoint, x = first.only(first.module(MLA, "q_b_proj")), tokens(2, first.geometry.q_lora)
    expected = oracle.output(MLA, "q_b_proj", x)

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = modules.build(configure(checkpoint), size=size, rank=rank)
        model.load(checkpoint.weights())
        with torch.no_grad():
            actual = model.attention(MLA).q_b_proj(x)[0]
        return actual, expected[:, share(expected.shape[1], size, rank)]

    for rank in (0, 1, 2, size - 1):
        right_or_refused(partial(run, rank), "layers.1.self_attn.q_b_proj", f"rank {rank} of {size}")


@pytest.mark.parametrize("rank", [0, 7])
def test_beta_is_right_again_after_reloading(
    config: VllmConfig, first: Checkpoint, second: Checkpoint, rank: int
) -> None:
    model, x = modules.build(config, size=8, rank=rank), tokens(3, first.geometry.hidden)
    model.load(first.weights())
    model.reload(second.weights())
    with torch.no_grad():
        out = compat.kda_outputs(model.attention(KDA), x, tokens(3, 12288 // 8))
    assert_columns(out["b_proj"], Oracle(second).output(KDA, "b_proj", x)[:, share(96, 8, rank)], "b_proj")


@pytest.mark.parametrize("damage", ["missing", "a block of rows too many", "NaN", "zero", "negative"])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_damaged_beta_scale_is_refused_on_every_rank(
    config: VllmConfig, first: Checkpoint, rank: int, damage: str
) -> None:
    name = f"{first.module(KDA, 'b_proj')}.weight_scale"
    model = modules.build(config, size=8, rank=rank)
    with refuses() as refused:
        model.load(first.weights({name: damaged_scale(first.tensors[name], damage)}))
    assert_named(refused.value, ("in_proj_qkvgfab", "b_proj"), ("b_proj", "shard 5", "shard_id=5", "shard id 5"))
    assert_named(refused.value, "layers.0.self_attn", "weight_scale")


def test_one_scale_for_each_rank_is_refused(config: VllmConfig, first: Checkpoint) -> None:
    # As many rows of blocks as there are ranks: sharding them as if they were rows would fit.
    name = f"{first.module(KDA, 'b_proj')}.weight_scale"
    model = modules.build(config, size=8, rank=5)
    with refuses() as refused:
        model.load(first.weights({name: first.tensors[name].repeat(8, 1, 1, 1)}))
    assert_named(refused.value, "layers.0.self_attn", "weight_scale")
