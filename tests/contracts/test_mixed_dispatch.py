"""mixed-dispatch: a mixed ModelOpt checkpoint's FP8_PB_WO layers are loaded as FP8_PB_WO, or refused by name.

A user whose config lists a linear layer as FP8_PB_WO gets that layer with E4M3 weights and FP32 block scales:
whichever of the two config files says so, under every prefix that the loader meets, in upper or lower case, and
for a merged layer when all its shards are listed. What the config excludes stays in the model's dtype, routed
experts keep their own method, and a merged layer whose shards disagree is an error that names the layer, the
shards and the algorithms: nothing is cast in silence. A config that stock understands is understood as on stock, and
as fast.

What is refused, which checkpoint meets it, and why stock is wrong there:

- A merged layer of two algorithms: q_proj FP8 and k_proj NVFP4. Stock refuses it too.
- A merged layer of which a shard is excluded, or listed as unquantized, and another is quantized: an in_proj_qkvgfab
  whose b_proj was kept in BF16. Stock takes the others' algorithm for all, and casts the BF16 numbers into FP8 under
  a scale that was never loaded.
- An unquantized tensor for a shard that is neither listed nor excluded, of an FP8 or MXFP8 layer: the same checkpoint
  with an incomplete config. Refused when the tensor arrives: before that it may be absent. For FP8_PB_WO layers,
  test_block_fp8_load_check.py has the same.
- A linear layer or routed experts of an algorithm that has no method (on 0.27.1 FP8_PER_CHANNEL_PER_TOKEN, anywhere a
  future one): stock builds the layer unquantized, so that codes become numbers without a scale.
"""

from __future__ import annotations

import json
import logging
import sys
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
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.quantization import modelopt
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
def test_a_quantized_shard_that_is_not_listed_is_served(config: VllmConfig, layer: str, missing: str) -> None:
    listed = {f"language_model.model.{shard}": ALGORITHM for shard in MERGED[layer] if shard != missing}
    built = merged(config, quantization_config(listed), f"language_model.model.{layer}", len(MERGED[layer]))
    rows = []
    for index in range(len(MERGED[layer])):
        weight, scale = block_quantized(128, COLS, torch.Generator().manual_seed(index))
        built.load("weight", weight, index)
        built.load("weight_scale", scale, index)
        rows.append(dequantize(weight, scale))
    built.finish()
    x = tokens(3, COLS)
    assert_columns(built(x), x @ torch.cat(rows).T, layer)


def qkv(config: VllmConfig, quant: Any, prefix: str) -> modules.Linear:
    """An attention's merged projection: one head of 128 for each of q, k and v."""
    return modules.linear(config, QKVParallelLinear, quant, COLS, 128, 1, prefix=prefix)


@pytest.mark.parametrize("listed", [("q_proj",), ("q_proj", "k_proj")])
@pytest.mark.parametrize("algorithm", [ALGORITHM, "FP8", "MXFP8"])
def test_shards_that_no_checkpoint_holds_are_absent(
    config: VllmConfig, algorithm: str, listed: tuple[str, ...]
) -> None:
    # Attention that shares its keys and values with another layer has only q_proj.
    quantization = quantization_config({f"model.{ATTENTION}{name}": algorithm for name in listed})
    built = qkv(config, modules.mixed_config(quantization), f"model.{ATTENTION}qkv_proj")
    assert built.layer.weight.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("shard", ["k", "v"])
@pytest.mark.parametrize("algorithm", ["FP8", "MXFP8"])
def test_an_unquantized_shard_of_another_format_is_refused(config: VllmConfig, algorithm: str, shard: str) -> None:
    name = f"model.{ATTENTION}qkv_proj"
    quant = modules.mixed_config(quantization_config({f"model.{ATTENTION}q_proj": algorithm}))
    built = qkv(config, quant, name)
    parameter = built.layer.weight
    with torch.no_grad():
        parameter.weight_loader(parameter, torch.zeros(128, COLS).to(torch.float8_e4m3fn), "q")
        with refuses() as refused:
            parameter.weight_loader(parameter, torch.ones(128, COLS, dtype=modules.MODEL_DTYPE), shard)
    assert_named(refused.value, name)


def test_a_layer_built_without_a_shard_of_its_class_is_dispatched(config: VllmConfig) -> None:
    # The class's mapping ends with an indexer's projection that this layer, or a config, does without.
    listed = {f"model.{ATTENTION}{name}_proj": ALGORITHM for name in "qkv"}
    quant = modules.mixed_config(quantization_config(listed, ignore=("*indexer*",)))
    quant.packed_modules_mapping["qkv_proj"] = ["q_proj", "k_proj", "v_proj", "indexer.index_qk_proj"]
    assert is_block_fp8(qkv(config, quant, f"model.{ATTENTION}qkv_proj").layer)


def test_a_model_that_maps_a_merged_layer_to_itself_is_dispatched(config: VllmConfig) -> None:
    listed = {f"model.{ATTENTION}{name}_proj": ALGORITHM for name in "qkv"}
    quant = modules.mixed_config(quantization_config(listed))
    quant.packed_modules_mapping["qkv_proj"] = ["qkv_proj"]
    assert is_block_fp8(qkv(config, quant, f"model.{ATTENTION}qkv_proj").layer)
    excluded = modules.mixed_config(quantization_config(listed, ignore=tuple(listed)))
    excluded.packed_modules_mapping["qkv_proj"] = ["qkv_proj"]
    assert qkv(config, excluded, f"model.{ATTENTION}qkv_proj").layer.weight.dtype == modules.MODEL_DTYPE


@pytest.mark.parametrize("word", ["UNQUANTIZED", "NONE", "none"])
def test_a_layer_listed_as_unquantized_keeps_the_model_dtype(config: VllmConfig, word: str) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    listed = {f"model.{ATTENTION}{name}": word for name in names} | {"model.layers.4.self_attn.o_proj": ALGORITHM}
    quantization = quantization_config(listed | {"model.layers.3.mlp.experts.0.w1": word})
    assert column(config, quantization, f"model.{ATTENTION}o_proj").layer.weight.dtype == modules.MODEL_DTYPE
    quant = modules.mixed_config(quantization)
    assert qkv(config, quant, f"model.{ATTENTION}qkv_proj").layer.weight.dtype == modules.MODEL_DTYPE
    assert compat.routed_experts_method(quant, "model.layers.3.mlp.experts") is None


@pytest.mark.parametrize("word", ["UNQUANTIZED", "NONE"])
@pytest.mark.parametrize(("layer", "odd"), ONE_SHARD_OFF)
def test_a_merged_layer_with_a_shard_listed_as_unquantized_is_refused(
    config: VllmConfig, layer: str, odd: str, word: str
) -> None:
    listed = {f"language_model.model.{shard}": ALGORITHM for shard in MERGED[layer]}
    listed[f"language_model.model.{odd}"] = word
    with refuses() as refused:
        merged(config, quantization_config(listed), f"language_model.model.{layer}", len(MERGED[layer]))
    assert_named(refused.value, layer, odd.rpartition(".")[2], ALGORITHM)


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


@pytest.mark.parametrize("algorithm", [ALGORITHM, "FP8", "NVFP4", "MXFP8"])
@pytest.mark.parametrize("beside", ["shared_experts.gate_proj", "shared_expert.up_proj", "gate", "fc1_latent_proj"])
def test_what_stands_beside_routed_experts_does_not_decide_for_them(
    config: VllmConfig, beside: str, algorithm: str
) -> None:
    listed = quantization_config({f"model.layers.3.mlp.{beside}": algorithm})
    assert compat.routed_experts_method(modules.mixed_config(listed), "model.layers.3.mlp.experts") is None


@pytest.mark.parametrize("names", [("gate_proj", "up_proj"), ("shared_experts.up_proj", "experts.7.up_proj")])
def test_experts_listed_under_their_parent_or_after_others_are_found(
    config: VllmConfig, names: tuple[str, ...]
) -> None:
    first, last = (f"model.layers.3.moe.{name}" for name in names)
    listed = quantization_config({first: "NVFP4" if "shared" not in first else "FP8", last: "NVFP4"})
    method = compat.routed_experts_method(modules.mixed_config(listed), "model.layers.3.moe.experts")
    assert method == compat.EXPERT_METHODS["NVFP4"]


def test_lists_that_are_assigned_later_count(config: VllmConfig) -> None:
    # As an MTP draft does that has layer numbers of its own.
    quant = modules.mixed_config(quantization_config({"model.layers.0.mlp.experts.0.w1": "NVFP4"}, ignore=("*.9.*",)))
    assert compat.routed_experts_method(quant, "model.layers.5.mlp.experts") is None
    assert quant.is_layer_excluded("model.layers.9.mlp.up_proj")
    quant.quantized_layers = {"model.layers.5.mlp.experts.0.w1": {"quant_algo": "MXFP8"}}
    quant.exclude_modules = ["*.8.*"]
    method = compat.routed_experts_method(quant, "model.layers.5.mlp.experts")
    assert method == compat.EXPERT_METHODS["MXFP8"]
    assert compat.routed_experts_method(quant, "model.layers.0.mlp.experts") is None
    assert not quant.is_layer_excluded("model.layers.9.mlp.up_proj")
    quant.quantized_layers["model.layers.6.mlp.experts.0.w1"] = {"quant_algo": "NVFP4"}
    quant.exclude_modules.append("*.9.*")
    method = compat.routed_experts_method(quant, "model.layers.6.mlp.experts")
    assert method == compat.EXPERT_METHODS["NVFP4"]
    assert quant.is_layer_excluded("model.layers.9.mlp.up_proj")


NAMES = (
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.o_proj",
    "language_model.model.layers.1.mlp.down_proj",
    "model.layers.1.mlp.experts",
    "model.layers.1.mlp.shared_experts.down_proj",
    "vision_tower.blocks.1.attn.proj",
    "model.visual.layers.1.attn.proj",
    "lm_head",
)
PATTERNS = (
    "*",
    "",
    "lm_head",
    "*lm_head",
    "model.layers.1",
    "model.layers.1.*",
    "layers.1.",
    "*.self_attn.*",
    "*self_attn.[qk]_proj",
    "*self_attn.[!qk]_proj",
    "model.layers.?.*_proj",
    "model.*.1.*.q*",
    "*proj",
    "model.layers.1.mlp.experts.0.w1",
    "model.layers.1.mlp.experts*",
    "*.shared_experts.*",
    "vision_tower*",
    "model.visual",
    "self_attn[",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exclusion_patterns_mean_what_they_mean_elsewhere(config: VllmConfig, pattern: str) -> None:
    quantization = quantization_config({"model.layers.0.mlp.up_proj": "FP8"}, ignore=(pattern, "*.nowhere"))
    quant = modules.mixed_config(quantization)
    for name in NAMES:
        stock = modelopt.ModelOptQuantConfigBase.is_layer_excluded(quant, name)
        # A name of the text model may also be excluded where the text model stands elsewhere.
        elsewhere = name.removeprefix("language_model.")
        same = elsewhere == name or not quant.is_layer_excluded(elsewhere)
        assert quant.is_layer_excluded(name) == stock or (not stock and not same), (name, pattern)


@pytest.mark.parametrize("pattern", ["tower.blocks.{}.proj", "*.blocks.{}.proj", "tower.blocks.{}.*", "model.*.t{}.*"])
def test_choosing_the_methods_tests_no_more_patterns_than_stock(config: VllmConfig, pattern: str) -> None:
    names = [f"language_model.model.layers.{block}.self_attn.qkv_proj" for block in range(40)]
    ignore = tuple(pattern.format(1000 + index) for index in range(1000))
    listed = {name.replace("qkv_proj", shard): "FP8" for name in names for shard in ("q_proj", "k_proj", "v_proj")}
    quant = modules.mixed_config(quantization_config(listed, ignore=ignore))
    layer = torch.nn.Identity()

    def calls(work: Callable[[], object]) -> int:
        """How many functions ``work`` calls: time, without the machine's."""
        number = 0

        def count(_frame: object, event: str, _function: object) -> None:
            nonlocal number
            number += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            work()
        finally:
            sys.setprofile(None)
        return number

    def stock() -> None:
        for name in names:
            modelopt.ModelOptQuantConfigBase.is_layer_excluded(quant, name)

    stock()  # compiles the patterns
    # A method costs some calls besides; patterns that are tested for each shard in each form cost eight times as many.
    assert calls(lambda: [quant.get_quant_method(layer, name) for name in names]) < 2 * calls(stock)


def test_a_checkpoint_without_such_layers_is_not_called_one(config: VllmConfig) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(modelopt.__name__)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        modules.mixed_config(quantization_config({"model.layers.0.mlp.up_proj": "FP8"}))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert not [message for message in seen if ALGORITHM in message]


def test_every_linear_algorithm_resolves_for_a_config_that_knows_no_model(config: VllmConfig) -> None:
    if not hasattr(modelopt, "resolve"):
        pytest.skip("absent: this release has a method class for each algorithm")

    class Bare:
        group_size = 16

    for algorithm in modelopt.LINEAR_ALGOS:
        spec, _, _ = modelopt.resolve(algorithm, Bare(), "layer")
        assert spec.weight is not None, algorithm


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
