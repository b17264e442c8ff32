"""block-fp8-load-check: an FP8_PB_WO layer that the checkpoint does not fill is refused by name.

vLLM's loaders copy what fits, and count a merged layer as loaded with one of its shards. Under block scales that is a
wrong matrix and no error. So a layer knows which tensors it is made of: the user is told which of them is missing, has
another shape or dtype, or holds scales that are none, by the checkpoint's name, at the first load and at a reload.

What is refused, by name, and why stock is wrong there:
- what test_block_fp8_post_load.py lists;
- an unquantized tensor for a matrix that a mixed config neither lists nor excludes, beside FP8_PB_WO ones: stock casts
  it to E4M3 under a scale that was never loaded.
"""

from __future__ import annotations

import pytest
import torch
from k3 import compat, modules
from k3.checkpoint import BLOCK, Checkpoint, Geometry, quantization_config
from k3.damage import SCALES, damaged_scale
from k3.errors import assert_named, refuses
from k3.shards import COLS, MLA_WIDTHS, loads, merged, shards
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config

pytest_plugins = ("k3.fixtures",)

KDA, MLA = Geometry.kda_layer, Geometry.mla_layer

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
