"""fused-padding: merged FP8_PB_WO projections of any width load and compute right, and cost nothing to read.

Block-FP8 kernels want whole blocks of 128 rows. K3 merges what is not: KDA's q, k, v, g, f_a and b, MLA's 1536 + 576.
Every shard stands under its own scales at every tensor-parallel size; what pads it is zero under finite scales, after
loading and after reloading; the caller sees the logical columns, where padding is at the end as a view of the kernel's
output, and nothing that breaks torch.compile.

Nothing is refused here. What a checkpoint must hold, test_block_fp8_load_check.py says, and of tensors that are fused
on disk test_block_fp8_fused_on_disk.py. Ranks past the first can't load KDA's b_proj without shared-beta-scale, whose
contract has the KDA layer on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from k3 import compat, kernels, modules
from k3.checkpoint import BLOCK, Checkpoint, Geometry
from k3.properties import examples
from k3.reference import Oracle, assert_columns, dequantize, share, tokens
from k3.shards import COLS, MLA_WIDTHS, loaded, loads, shards
from k3.sweep import Sweep
from safetensors import safe_open
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ColumnParallelLinear

pytest_plugins = ("k3.fixtures",)

KDA, MLA, MTP = Geometry.kda_layer, Geometry.mla_layer, Geometry.mtp_layer


def assert_padding_is_inert(built: modules.Linear, logical: int) -> None:
    """Of what the kernel last computed, `logical` columns carry numbers and the rest is exactly zero."""
    out = built.log.calls_of(built.layer)[-1].out
    assert out.shape[-1] % BLOCK == 0
    assert torch.isfinite(out).all()
    assert int((out != 0).any(0).sum()) == logical
    assert torch.isfinite(built.layer.weight_scale).all()
    assert torch.isfinite(built.layer.weight.float()).all()


@pytest.mark.parametrize("size", modules.TP_SIZES)
def test_kda_is_right_on_the_first_rank(sweep: Sweep, size: int) -> None:
    assert not sweep.wrong(size, KDA, tuple(sweep.geometry.kda()), ranks=range(1))


@pytest.mark.parametrize("size", modules.TP_SIZES)
def test_mla_is_right_on_every_rank(sweep: Sweep, size: int) -> None:
    assert not sweep.wrong(size, MLA, tuple(sweep.geometry.mla()))


def test_the_mtp_layer_is_right(
    configure: Callable[[Checkpoint], VllmConfig], first: Checkpoint, oracle: Oracle
) -> None:
    size, rank, geometry = 8, 5, first.geometry
    model = modules.build(configure(first), size=size, rank=rank, part="mtp")
    model.load(first.tensors.items())
    x, core = tokens(3, geometry.hidden), tokens(3, geometry.heads * geometry.v_dim)
    part = share(core.shape[1], size, rank)
    with torch.no_grad():
        out = compat.mla_outputs(model.attention(MTP), x, core[:, part])
    q_a = oracle.output(MTP, "q_a_proj", x)
    assert_columns(out["q_a_proj"], q_a, "q_a_proj")
    assert_columns(out["kv_a_proj_with_mqa"], oracle.output(MTP, "kv_a_proj_with_mqa", x), "kv_a_proj_with_mqa")
    for name, given_x in (("g_proj", x), ("q_b_proj", q_a)):
        expected = oracle.output(MTP, name, given_x)
        assert_columns(out[name], expected[:, share(expected.shape[1], size, rank)], name)
    assert_columns(out["o_proj"], oracle.partial(MTP, "o_proj", core, part), "o_proj")


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (8, 0)])
def test_amds_model_is_right(
    configure: Callable[[Checkpoint], VllmConfig], first: Checkpoint, oracle: Oracle, size: int, rank: int
) -> None:
    config = configure(replace(first))  # one that no other model has told of its merged layers
    model, x = modules.build(config, size=size, rank=rank, part="amd"), tokens(3, first.geometry.hidden)
    model.load(first.weights())
    for layer, names in ((KDA, compat.KDA_MERGED), (MLA, (*compat.MLA_MERGED, "g_proj"))):
        with torch.no_grad():
            out = compat.merged_outputs(model.attention(layer), x)
        for name in names:
            expected = oracle.output(layer, name, x)
            if name not in ("f_a_proj", *compat.MLA_MERGED):
                expected = expected[:, share(expected.shape[1], size, rank)]
            assert_columns(out[name], expected, name)


def test_a_whole_checkpoint_loads_from_disk(config: VllmConfig, folder: Path, oracle: Oracle) -> None:
    model = modules.build(config)
    with safe_open(folder / "model.safetensors", "pt") as file:
        model.load((name.removeprefix("language_model."), file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    x, core = tokens(2, oracle.checkpoint.geometry.hidden), tokens(2, 12288)
    with torch.no_grad():
        kda = compat.kda_outputs(model.attention(KDA), x, core)
        mla = compat.mla_outputs(model.attention(MLA), x, core)
    for name in ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj"):
        assert_columns(kda[name], oracle.output(KDA, name, x), name)
    for name in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"):
        assert_columns(mla[name], oracle.output(MLA, name, x), name)


def test_every_shard_begins_under_its_own_scales(config: VllmConfig) -> None:
    @examples(40)
    @given(st.lists(st.integers(1, 400), min_size=1, max_size=5).map(tuple))
    def holds(widths: tuple[int, ...]) -> None:
        built = loaded(config, widths)
        x = tokens(2, COLS)
        expected = torch.cat([x @ dequantize(*matrix).T for matrix in shards(widths, 1)], -1)
        assert_columns(built(x), expected, str(widths))

    holds()


def test_a_projection_alone_may_have_any_width(config: VllmConfig) -> None:
    @examples(20)
    @given(st.integers(1, 400))
    def holds(width: int) -> None:
        quant = modules.block_fp8_config()
        built = modules.linear(
            config, ColumnParallelLinear, quant, COLS, width, prefix="model.layers.0.self_attn.b_proj"
        )
        ((weight, scale),) = shards((width,), 4)
        built.load("weight", weight)
        built.load("weight_scale", scale)
        built.finish()
        x = tokens(2, COLS)
        assert_columns(built(x), x @ dequantize(weight, scale).T, str(width))

    holds()


@pytest.mark.parametrize("widths", [MLA_WIDTHS, (384, 128, 96), (100, 200), (12,)])
def test_padding_is_inert_after_loading_and_reloading(config: VllmConfig, widths: tuple[int, ...]) -> None:
    built, x = loaded(config, widths), tokens(4, COLS)
    assert built(x).shape == (4, sum(widths))
    assert_padding_is_inert(built, sum(widths))
    for seed in (2, 3):
        held = shards(widths, seed)
        built.reload(*loads(held))
        expected = torch.cat([x @ dequantize(*matrix).T for matrix in held], -1)
        assert_columns(built(x), expected, f"reload {seed}")
        assert_padding_is_inert(built, sum(widths))


def test_the_opaque_kernel_pads_too(config: VllmConfig) -> None:
    built, x = loaded(config, MLA_WIDTHS, kernels.OpaqueKernel), tokens(4, COLS)
    for seed in (1, 2):
        held = shards(MLA_WIDTHS, seed)
        if seed != 1:
            built.reload(*loads(held))
        assert_columns(built(x), torch.cat([x @ dequantize(*matrix).T for matrix in held], -1), "fused_qkv_a_proj")


def test_a_reloaded_model_computes_the_new_values(config: VllmConfig, first: Checkpoint, second: Checkpoint) -> None:
    model, after = modules.build(config, size=8), Oracle(second)
    model.load(first.weights())
    model.reload(second.weights())
    x, part = tokens(3, first.geometry.hidden), share(12288, 8, 0)
    core = tokens(3, 12288)[:, part]
    with torch.no_grad():
        kda = compat.kda_outputs(model.attention(KDA), x, core)
        mla = compat.mla_outputs(model.attention(MLA), x, core)
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        assert_columns(kda[name], after.output(KDA, name, x)[:, part], name)
    assert_columns(kda["b_proj"], after.output(KDA, "b_proj", x)[:, :12], "b_proj")
    assert_columns(mla["g_proj"], after.output(MLA, "g_proj", x)[:, part], "g_proj")
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        assert_columns(mla[name], after.output(MLA, name, x), name)


def test_a_padded_tail_is_cut_by_a_view(config: VllmConfig) -> None:
    built = loaded(config, MLA_WIDTHS)
    out = built(tokens(4, COLS))
    kernel = built.log.calls_of(built.layer)[-1].out
    assert out.shape[-1] == sum(MLA_WIDTHS) < kernel.shape[-1]
    assert out.untyped_storage().data_ptr() == kernel.untyped_storage().data_ptr()


def test_kda_reads_the_kernels_output_in_place(config: VllmConfig, first: Checkpoint) -> None:
    model = modules.build(config, size=8)
    model.load(first.weights())
    attention = model.attention(KDA)
    x = tokens(4, first.geometry.hidden)
    with torch.no_grad():
        out = compat.kda_outputs(attention, x, tokens(4, 12288 // 8))
    kernel = model.log.calls_of(compat.input_projection(attention, "q_proj"))[-1].out
    for name in ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj"):
        assert out[name].untyped_storage().data_ptr() == kernel.untyped_storage().data_ptr(), name


@pytest.mark.parametrize("widths", [MLA_WIDTHS, (384, 128, 96)])
def test_a_padded_layer_compiles_into_one_graph(config: VllmConfig, widths: tuple[int, ...]) -> None:
    built = loaded(config, widths, kernels.TraceableKernel)
    compiled = torch.compile(built.layer.quant_method.apply, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        for count in (1, 3, 8):
            x = tokens(count, COLS).to(modules.MODEL_DTYPE)
            eager = built.layer.quant_method.apply(built.layer, x)
            assert eager.shape == (count, sum(widths))
            assert torch.equal(compiled(built.layer, x), eager)
