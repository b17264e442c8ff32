"""mixed-dispatch: a mixed ModelOpt checkpoint's FP8_PB_WO layers are loaded as FP8_PB_WO, or refused by name.

A user whose config lists a linear layer as FP8_PB_WO gets that layer with E4M3 weights and FP32 block scales:
whichever of the two config files says so, under every prefix that the loader meets, in upper or lower case, and
for a merged layer when all its shards are listed. What the config excludes stays in the model's dtype, routed
experts keep their own method, and a merged layer whose shards disagree is an error that names the layer, the
shards and the algorithms: nothing is cast in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from k3 import compat, modules
from k3.checkpoint import ALGORITHM, Checkpoint, Geometry, block_quantized, hf_quant_config, quantization_config
from k3.errors import assert_named, refuses
from k3.reference import assert_columns, dequantize, tokens
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

pytest_plugins = ("k3.fixtures",)

FORMS = ("model.", "language_model.model.", "model.language_model.")
ATTENTION = "layers.3.self_attn."
ROWS, COLS = 384, 256
MERGED = {
    f"{ATTENTION}in_proj_qkvgfab": tuple(f"{ATTENTION}{name}" for name in compat.KDA_MERGED),
    f"{ATTENTION}fused_qkv_a_proj": tuple(f"{ATTENTION}{name}" for name in compat.MLA_MERGED),
    "layers.3.mlp.gate_up_proj": ("layers.3.mlp.gate_proj", "layers.3.mlp.up_proj"),
}
AMD_MERGED = dict(MERGED)
if compat.merges_mla_gate():
    MERGED[f"{ATTENTION}fused_qkv_a_g_proj"] = tuple(f"{ATTENTION}{name}" for name in (*compat.MLA_MERGED, "g_proj"))
ONE_SHARD_OFF = [(merged, shard) for merged, shards in MERGED.items() for shard in shards]


def column(config: VllmConfig, quantization: dict, prefix: str) -> modules.Linear:
    """A projection of its own under this name."""
    quant = modules.mixed_config(quantization)
    return modules.linear(config, ColumnParallelLinear, quant, COLS, ROWS, prefix=prefix)


def merged(config: VllmConfig, quantization: dict, prefix: str, shards: int) -> modules.Linear:
    """A merged projection under this name; its shards are whole blocks, which is all that dispatch needs."""
    quant = modules.mixed_config(quantization)
    return modules.linear(config, MergedColumnParallelLinear, quant, COLS, [128] * shards, prefix=prefix)


def is_block_fp8(layer: torch.nn.Module) -> bool:
    """Whether the layer holds what an FP8_PB_WO checkpoint stores."""
    scale = getattr(layer, "weight_scale", None)
    return layer.weight.dtype == torch.float8_e4m3fn and scale is not None and scale.dtype == torch.float32


@pytest.mark.parametrize("module_form", FORMS)
@pytest.mark.parametrize("config_form", FORMS)
def test_a_listed_layer_is_block_fp8_under_every_prefix(config: VllmConfig, config_form: str, module_form: str) -> None:
    name = f"{ATTENTION}q_b_proj"
    listed = quantization_config({f"{config_form}{name}": ALGORITHM})
    assert is_block_fp8(column(config, listed, f"{module_form}{name}").layer)


@pytest.mark.parametrize("listed", ["lm_head", "language_model.lm_head"])
@pytest.mark.parametrize("prefix", ["lm_head", "language_model.lm_head"])
def test_a_listed_lm_head_is_block_fp8(config: VllmConfig, listed: str, prefix: str) -> None:
    quant = modules.mixed_config(quantization_config({listed: ALGORITHM}))
    assert is_block_fp8(modules.linear(config, ParallelLMHead, quant, 512, COLS, prefix=prefix).layer)


def test_a_listed_layer_computes_with_its_blocks(config: VllmConfig) -> None:
    name = f"language_model.model.{ATTENTION}q_b_proj"
    built = column(config, quantization_config({name: ALGORITHM}), name)
    weight, scale = block_quantized(ROWS, COLS, torch.Generator().manual_seed(0))
    built.load("weight", weight)
    built.load("weight_scale", scale)
    built.finish()
    x = tokens(3, COLS)
    assert_columns(built(x), x @ dequantize(weight, scale).T, name)


@pytest.mark.parametrize("algorithm", ["fp8_pb_wo", "Fp8_Pb_Wo"])
def test_algorithm_names_may_be_lower_case(config: VllmConfig, algorithm: str) -> None:
    name = f"language_model.model.{ATTENTION}q_b_proj"
    assert is_block_fp8(column(config, quantization_config({name: algorithm}), name).layer)


@pytest.mark.parametrize("module_form", FORMS)
@pytest.mark.parametrize("layer", MERGED)
def test_a_merged_layer_with_every_shard_listed_is_block_fp8(config: VllmConfig, layer: str, module_form: str) -> None:
    listed = {f"language_model.model.{shard}": ALGORITHM for shard in MERGED[layer]}
    built = merged(config, quantization_config(listed), f"{module_form}{layer}", len(MERGED[layer]))
    assert is_block_fp8(built.layer)


def test_attention_whose_values_are_its_keys_needs_no_v_proj(config: VllmConfig) -> None:
    names = ("q_proj", "k_proj")
    listed = quantization_config({f"model.{ATTENTION}{name}": ALGORITHM for name in names})
    assert is_block_fp8(merged(config, listed, f"model.{ATTENTION}qkv_proj", 3).layer)


@pytest.mark.parametrize("layer", AMD_MERGED)
def test_a_merged_layer_of_amds_model_is_block_fp8(config: VllmConfig, layer: str) -> None:
    # ROCm takes mixed ModelOpt checkpoints too, and has a model of its own.
    listed = {f"language_model.model.{shard}": ALGORITHM for shard in MERGED[layer]}
    quant = modules.mixed_config(quantization_config(listed), platform="amd")
    sizes = [128] * len(listed)
    built = modules.linear(
        config, MergedColumnParallelLinear, quant, COLS, sizes, prefix=f"language_model.model.{layer}"
    )
    assert is_block_fp8(built.layer)


@pytest.mark.parametrize(("layer", "missing"), ONE_SHARD_OFF)
def test_a_merged_layer_with_a_shard_not_listed_is_refused(config: VllmConfig, layer: str, missing: str) -> None:
    listed = {f"language_model.model.{shard}": ALGORITHM for shard in MERGED[layer] if shard != missing}
    with refuses() as refused:
        merged(config, quantization_config(listed), f"language_model.model.{layer}", len(MERGED[layer]))
    assert_named(refused.value, layer, missing.rpartition(".")[2], ALGORITHM)


@pytest.mark.parametrize("other", ["NVFP4", "MXFP8", "FP8"])
@pytest.mark.parametrize(("layer", "odd"), ONE_SHARD_OFF)
def test_a_merged_layer_of_two_algorithms_is_refused(config: VllmConfig, layer: str, odd: str, other: str) -> None:
    listed = {f"language_model.model.{shard}": ALGORITHM for shard in MERGED[layer]}
    listed[f"language_model.model.{odd}"] = other
    with refuses() as refused:
        merged(config, quantization_config(listed), f"language_model.model.{layer}", len(MERGED[layer]))
    assert_named(refused.value, layer, odd.rpartition(".")[2], ALGORITHM, other)


@pytest.mark.parametrize(("layer", "excluded"), ONE_SHARD_OFF)
def test_a_merged_layer_with_a_shard_excluded_is_refused(config: VllmConfig, layer: str, excluded: str) -> None:
    listed = {f"language_model.model.{shard}": ALGORITHM for shard in MERGED[layer]}
    quantization = quantization_config(listed, ignore=(f"language_model.model.{excluded}",))
    with refuses() as refused:
        merged(config, quantization, f"language_model.model.{layer}", len(MERGED[layer]))
    assert_named(refused.value, layer.rpartition(".")[2])


@pytest.mark.parametrize(
    "pattern",
    ["language_model.model.layers.3.self_attn*", "*q_b_proj", "language_model.model.layers.3.self_attn.q_b_proj"],
)
def test_an_excluded_layer_keeps_the_model_dtype(config: VllmConfig, pattern: str) -> None:
    name = f"language_model.model.{ATTENTION}q_b_proj"
    elsewhere = "language_model.model.layers.4.self_attn.q_b_proj"
    quantization = quantization_config({name: ALGORITHM, elsewhere: ALGORITHM}, ignore=(pattern,))
    assert column(config, quantization, name).layer.weight.dtype == modules.MODEL_DTYPE


def test_an_excluded_merged_layer_keeps_the_model_dtype(config: VllmConfig) -> None:
    layer = f"{ATTENTION}in_proj_qkvgfab"
    listed = {f"language_model.model.{shard}": ALGORITHM for shard in MERGED[layer]}
    quantization = quantization_config(listed, ignore=tuple(listed))
    built = merged(config, quantization, f"language_model.model.{layer}", len(MERGED[layer]))
    assert built.layer.weight.dtype == modules.MODEL_DTYPE


def test_a_layer_not_listed_keeps_the_model_dtype(config: VllmConfig) -> None:
    listed = quantization_config({"language_model.model.layers.4.self_attn.q_b_proj": ALGORITHM})
    built = column(config, listed, f"language_model.model.{ATTENTION}q_b_proj")
    assert built.layer.weight.dtype == modules.MODEL_DTYPE


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "MXFP8", "FP8"])
def test_routed_experts_go_where_they_went(config: VllmConfig, algorithm: str) -> None:
    moe = "language_model.model.layers.3.block_sparse_moe"
    listed = {f"language_model.model.{ATTENTION}q_b_proj": ALGORITHM, f"{moe}.experts.0.w1": algorithm}
    method = compat.routed_experts_method(modules.mixed_config(quantization_config(listed)), f"{moe}.experts")
    assert method == compat.EXPERT_METHODS[algorithm]


def test_routed_experts_of_an_unknown_algorithm_are_refused(config: VllmConfig) -> None:
    experts = "language_model.model.layers.3.block_sparse_moe.experts"
    listed = {f"language_model.model.{ATTENTION}q_b_proj": ALGORITHM, f"{experts}.0.w1": "FP4_FUTURE"}
    with refuses() as refused:
        compat.routed_experts_method(modules.mixed_config(quantization_config(listed)), experts)
    assert_named(refused.value, experts, "FP4_FUTURE")


def test_attention_does_not_decide_for_routed_experts(config: VllmConfig) -> None:
    listed = quantization_config({f"language_model.model.{ATTENTION}q_b_proj": ALGORITHM})
    experts = "language_model.model.layers.3.block_sparse_moe.experts"
    assert compat.routed_experts_method(modules.mixed_config(listed), experts) is None


@pytest.mark.parametrize("files", ["config.json", "hf_quant_config.json", "both"])
@pytest.mark.parametrize("asked", [None, "modelopt_mixed"])
def test_either_config_file_is_read(
    config: VllmConfig, first: Checkpoint, tmp_path: Path, files: str, asked: str | None
) -> None:
    name = f"language_model.model.{ATTENTION}q_b_proj"
    text = first.geometry.text_config()
    if files != "hf_quant_config.json":
        text["quantization_config"] = quantization_config({name: ALGORITHM})
    if files != "config.json":
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(hf_quant_config({name: ALGORITHM})))
    (tmp_path / "config.json").write_text(json.dumps(text))
    read = modules.vllm_config(tmp_path, quantization=asked)
    built = modules.linear(read, ColumnParallelLinear, read.quant_config, COLS, ROWS, prefix=name)
    assert is_block_fp8(built.layer)


@pytest.mark.parametrize("part", ["target", "mtp"])
def test_every_listed_projection_of_the_models_is_block_fp8(
    configure: Callable[[Checkpoint], VllmConfig], first: Checkpoint, part: str
) -> None:
    # Projections that stand alone, of whole blocks: what the merged ones need besides is fused-padding's.
    layers = {"target": (Geometry.kda_layer, Geometry.mla_layer), "mtp": (Geometry.mtp_layer,)}[part]
    alone = [
        first.module(layer, name)
        for layer in layers
        for name in ("f_b_proj", "q_b_proj", "kv_b_proj", "o_proj")
        if first.module(layer, name) in first.quantized
    ]
    listed = first.only(*alone)
    model = modules.build(configure(listed), part=part)
    for name in alone:
        layer, projection = int(name.split(".")[3]), name.rpartition(".")[2]
        assert is_block_fp8(getattr(model.attention(layer), projection)), name


def test_kimi_linear_whose_input_projection_has_no_gate_is_dispatched_too(tmp_path: Path, config: VllmConfig) -> None:
    # The same classes serve Kimi-Linear, which merges five shards under the same name: none is missing there.
    shards = [Checkpoint.module(0, name) for name in ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj")]
    text: dict[str, Any] = Geometry(heads=128).text_config() | {"num_hidden_layers": 1}
    text["linear_attn_config"] |= {"use_full_rank_gate": False, "kda_layers": [1], "full_attn_layers": []}
    text["quantization_config"] = quantization_config(dict.fromkeys(shards, ALGORITHM))
    (tmp_path / "config.json").write_text(json.dumps(text))
    model = modules.build(modules.vllm_config(tmp_path))
    assert is_block_fp8(model.module.model.layers[0].self_attn.in_proj_qkvgfab)
