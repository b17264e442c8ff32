"""fused-padding: merged FP8_PB_WO projections of any width load and compute right, and cost nothing to read.

Block-FP8 kernels want whole blocks of 128 rows. K3 merges what is not: KDA's q, k, v, g, f_a and b, MLA's 1536 + 576.
Every shard stands under its own scales at every tensor-parallel size; what pads it is zero under finite scales, after
loading and after reloading; the caller sees the logical columns, as a view of the kernel's output, and nothing that
breaks torch.compile. A checkpoint that lacks a tensor, or whose scales have the wrong shape, are NaN, zero or negative,
is refused by name. On GPUs without FP8 the layers run on Marlin, which takes rows without padding.

What is refused, by name, and why stock is wrong there:
- what test_block_fp8_post_load.py lists;
- an unquantized tensor for a matrix that a mixed config neither lists nor excludes, beside FP8_PB_WO ones: stock casts
  it to E4M3 under a scale that was never loaded;
- under tensor parallelism, a tensor that is fused on disk and has a matrix that ends inside a block: stock gives a rank
  the scales of other rows. On one rank it is served, as stock serves those whose matrices take as many blocks apart as
  fused from 0.29.0 on;
- a reload of such a tensor over matrices that were apart, or over dummy values, and the reverse: the kernel's output
  has other columns then, and captured graphs would go on to read the old ones. Stock multiplies matrices apart by wrong
  scales. Over dummy values it is right where it serves the tensor at all: the one refusal that costs something.

Ranks past the first can't load KDA's b_proj without shared-beta-scale, whose contract has the KDA layer on every rank.
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
from k3.checkpoint import BLOCK, Checkpoint, Geometry, block_quantized, quantization_config
from k3.damage import SCALES, damaged_scale
from k3.errors import assert_named, refuses
from k3.properties import examples
from k3.reference import Oracle, assert_columns, dequantize, share, tokens
from k3.sweep import Sweep
from merged import marlin
from safetensors import safe_open
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config

pytest_plugins = ("k3.fixtures",)

KDA, MLA, MTP = Geometry.kda_layer, Geometry.mla_layer, Geometry.mtp_layer
COLS = 256
MLA_WIDTHS = (1536, 576)


def merged(config: VllmConfig, widths: tuple[int, ...], kernel: type = kernels.BlockKernel) -> modules.Linear:
    """A replicated merged projection of these shards, unloaded."""
    return modules.linear(
        config,
        MergedColumnParallelLinear,
        modules.block_fp8_config(),
        COLS,
        list(widths),
        kernel=kernel,
        disable_tp=True,
        prefix="language_model.model.layers.1.self_attn.fused_qkv_a_proj",
    )


def shards(widths: tuple[int, ...], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One random FP8_PB_WO matrix a shard."""
    generator = torch.Generator().manual_seed(seed)
    return [block_quantized(width, COLS, generator) for width in widths]


def loads(held: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[str, torch.Tensor, int | None]]:
    """The same as (parameter, tensor, shard)."""
    return [
        (name, tensor, shard)
        for shard, (weight, scale) in enumerate(held)
        for name, tensor in (("weight", weight), ("weight_scale", scale))
    ]


def loaded(config: VllmConfig, widths: tuple[int, ...], kernel: type = kernels.BlockKernel) -> modules.Linear:
    """The merged projection with its first checkpoint in it."""
    built = merged(config, widths, kernel)
    for load in loads(shards(widths, 1)):
        built.load(*load)
    built.finish()
    return built


def assert_padding_is_inert(built: modules.Linear, logical: int) -> None:
    """Of what the kernel last computed, `logical` columns carry numbers and the rest is exactly zero."""
    out = built.log.calls_of(built.layer)[-1].out
    assert out.shape[-1] % BLOCK == 0
    assert torch.isfinite(out).all()
    assert int((out != 0).any(0).sum()) == logical
    assert torch.isfinite(built.layer.weight_scale).all()
    assert torch.isfinite(built.layer.weight.float()).all()


MERGED_OF_K3 = {
    "self_attn.in_proj_qkvgfab": compat.KDA_MERGED,
    "self_attn.fused_qkv_a_proj": compat.MLA_MERGED,
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}
if compat.merges_mla_gate():
    MERGED_OF_K3["self_attn.fused_qkv_a_g_proj"] = (*compat.MLA_MERGED, "g_proj")


@pytest.mark.parametrize(
    ("layer", "unquantized"), [(layer, name) for layer, names in MERGED_OF_K3.items() for name in names]
)
def test_an_unquantized_matrix_that_the_config_does_not_list_is_refused(
    config: VllmConfig, layer: str, unquantized: str
) -> None:
    prefix, names = f"language_model.model.layers.3.{layer}", MERGED_OF_K3[layer]
    parent = prefix.rpartition(".")[0]
    listed = quantization_config({f"{parent}.{name}": "FP8_PB_WO" for name in names if name != unquantized})
    with refuses() as refused:
        quant = modules.mixed_config(listed)
        built = modules.linear(config, MergedColumnParallelLinear, quant, COLS, [BLOCK] * len(names), prefix=prefix)
        for index, (weight, scale) in enumerate(shards((BLOCK,) * len(names), 1)):
            if names[index] == unquantized:
                built.load("weight", torch.ones(BLOCK, COLS, dtype=modules.MODEL_DTYPE), index)
            else:
                built.load("weight", weight, index)
                built.load("weight_scale", scale, index)
        built.finish()
    assert_named(refused.value, unquantized)


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


def test_mla_reads_the_kernels_output_in_place(config: VllmConfig, first: Checkpoint) -> None:
    model = modules.build(config, size=8)
    model.load(first.weights())
    attention = model.attention(MLA)
    with torch.no_grad():
        out = compat.mla_outputs(attention, tokens(4, first.geometry.hidden), tokens(4, 12288 // 8))
    for name in ("q_a_proj", "g_proj"):
        kernel = model.log.calls_of(compat.input_projection(attention, name))[-1].out
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


@pytest.mark.parametrize("missing", ["gate_proj.weight", "up_proj.weight_scale"])
def test_shards_are_named_as_the_model_maps_them(config: VllmConfig, missing: str) -> None:
    """vLLM's loader gives a model's mapping to the finished config of a mixed checkpoint, where the model does not."""
    names, mlp = ("gate_proj", "up_proj"), "model.layers.0.mlp."
    mixed = get_quantization_config("modelopt_mixed")
    quant = mixed.from_config(quantization_config(dict.fromkeys((mlp + name for name in names), "FP8_PB_WO")))
    quant.packed_modules_mapping = {"gate_up_proj": list(names)}
    prefix = mlp + "gate_up_proj"
    built = modules.linear(config, MergedColumnParallelLinear, quant, COLS, [100, 200], disable_tp=True, prefix=prefix)
    for name, tensor, shard in loads(shards((100, 200), 1)):
        if f"{names[shard]}.{name}" != missing:
            built.load(name, tensor, shard)
    with refuses() as refused:
        built.finish()
    assert_named(refused.value, mlp + missing)


# A projection that stands alone, and shards of both merged ones: name -> (layer, shard's place, merged layer).
FAULTY = {
    "q_b_proj": (MLA, None, "q_b_proj"),
    "o_proj": (KDA, None, "o_proj"),
    "v_proj": (KDA, 2, "in_proj_qkvgfab"),
    "f_a_proj": (KDA, 4, "in_proj_qkvgfab"),
    "kv_a_proj_with_mqa": (MLA, 1, "fused_qkv_a"),
}


def assert_shard_named(error: BaseException, projection: str, parameter: str) -> None:
    """The error names the layer, the parameter, and of a merged layer also which shard."""
    layer, place, layer_name = FAULTY[projection]
    assert_named(error, (f"layers.{layer}.self_attn.{projection}", f"layers.{layer}.self_attn.{layer_name}"), parameter)
    if place is not None:
        assert_named(error, (projection, f"shard {place}", f"shard_id={place}", f"shard id {place}"))


@pytest.mark.parametrize("damage", SCALES)
@pytest.mark.parametrize("projection", FAULTY)
def test_a_damaged_scale_is_refused(config: VllmConfig, first: Checkpoint, projection: str, damage: str) -> None:
    layer = FAULTY[projection][0]
    name = f"{first.module(layer, projection)}.weight_scale"
    model = modules.build(config, size=8)
    with refuses() as refused:
        model.load(first.weights({name: damaged_scale(first.tensors[name], damage)}))
    assert_shard_named(refused.value, projection, "weight_scale")


@pytest.mark.parametrize("damage", ["NaN", "negative"])
@pytest.mark.parametrize("projection", ["q_b_proj", "v_proj"])
def test_a_damaged_scale_is_refused_when_reloading(
    config: VllmConfig, first: Checkpoint, second: Checkpoint, projection: str, damage: str
) -> None:
    name = f"{first.module(FAULTY[projection][0], projection)}.weight_scale"
    model = modules.build(config, size=8)
    model.load(first.weights())
    with refuses() as refused:
        model.reload(second.weights({name: damaged_scale(second.tensors[name], damage)}))
    assert_shard_named(refused.value, projection, "weight_scale")


@pytest.mark.parametrize("projection", FAULTY)
def test_a_missing_weight_is_refused(config: VllmConfig, first: Checkpoint, projection: str) -> None:
    layer = FAULTY[projection][0]
    model = modules.build(config, size=8)
    with refuses() as refused:
        model.load(first.weights({f"{first.module(layer, projection)}.weight": None}))
    assert_shard_named(refused.value, projection, "weight")


def test_a_layer_that_was_never_loaded_is_refused(config: VllmConfig) -> None:
    built = merged(config, MLA_WIDTHS)
    with refuses() as refused:
        built.finish()
    assert_named(refused.value, "layers.1.self_attn.fused_qkv_a_proj", "weight")


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
