"""dspark-quantized-drafter: the fused projection multiplies by the matrices that the drafter's checkpoint holds.

In every format that vLLM offers a linear layer, each layer's rows of context_kv_proj are those of its own
kv_a_proj_with_mqa: where blocks of 128 don't divide the 576 rows of a layer, where every layer has a global scale of
its own, and after reloading. A config that speaks of single modules numbers draft layers from 0 and is understood
so, whatever the target's layers are numbered; it is the drafter's own beside a target of any quantization. Layers
that the config quantizes in different ways are refused by name, or right.

Refusals, on all bases, of K3 drafters alone:
- layers whose KV projections are quantized otherwise than the first layer's: stock never matches the checkpoint's
  names of single layers, and reads all of them by one format;
- an activation order (or another tensor of a whole layer) that differs between layers: the projection of all layers
  has one, and stock's is the last one's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from dspark import formats
from dspark.checkpoint import KV, Drafter, Geometry
from dspark.checks import BLOCKS, assert_right
from dspark.formats import Format
from dspark.modules import Load, Loaded, Target
from k3.errors import REFUSALS, assert_named, refuses

pytest_plugins = ("dspark.fixtures",)

GEOMETRY = Geometry(heads=2)
BLOCKED = (formats.FP8_PB_WO, formats.CT_BLOCK, formats.FP8_DEEPSEEK)
ONE_SCALE = [form for form in formats.QUANTIZED if form.under_one]
MIXED = [form for form in formats.QUANTIZED if form.algorithm]
DOWN = ("self_attn.q_a_proj", f"self_attn.{KV}")
# No ratio is a power of two, and both directions of a scale are larger than what E4M3 group scales could take up.
APART = (1.0, 5.3, 0.171)


def modules(layers: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    return [f"layers.{layer}.{name}" for layer in layers for name in names]


def layerwise(forms: Mapping[str, Format], quantization: dict[str, Any] | None = None) -> Drafter:
    """A drafter in BF16 except for some modules, whose algorithms config.json lists."""
    listed = {name: form.algorithm for name, form in forms.items() if form.algorithm is not None}
    config = quantization if quantization is not None else formats.mixed(listed)
    return Drafter.random(GEOMETRY, 1, formats=forms, quantization=config)


def assert_matrix(loaded: Loaded, drafter: Drafter, bound: float = formats.ALGEBRA) -> None:
    """Every element of the fused projection is the checkpoint's."""
    actual = loaded.matrix()
    for layer in range(drafter.geometry.layers):
        expected = drafter.kv_matrix(layer)
        wrong = ~((actual[layer] - expected).abs() <= bound * expected.abs())
        assert not wrong.any(), (
            f"layer {layer}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, "
            f"the first in row {int(wrong.any(1).nonzero()[0])}"
        )


@pytest.mark.parametrize("form", formats.FORMATS, ids=str)
def test_each_layers_rows_are_its_own_matrix(load: Load, form: Format) -> None:
    drafter = Drafter.random(GEOMETRY, 1, form)
    loaded = load(drafter)
    assert_matrix(loaded, drafter)
    loaded.allocate(BLOCKS)
    assert_right(loaded, drafter, 7, seed=2)


@pytest.mark.parametrize("form", BLOCKED, ids=str)
def test_a_missing_latent_tensor_is_named(load: Load, form: Format) -> None:
    # What dspark-load-check promises of other formats; these load with this fix only.
    whole = Drafter.random(GEOMETRY, 1, form)
    for suffix in whole.kv_tensors(1):
        name = f"{Drafter.kv_name(1)}.{suffix}"
        with refuses() as refused:
            load(whole.changed({name: None}))
        assert_named(refused.value, name)


@pytest.mark.parametrize("form", BLOCKED, ids=str)
def test_every_layer_begins_at_a_block_of_its_own(load: Load, form: Format) -> None:
    # Every block of rows is 2**12 apart from the next, also across layers: 5 blocks a layer, the last one half.
    drafter = Drafter.random(GEOMETRY, 1, form)
    changes = {}
    for layer in range(GEOMETRY.layers):
        (name,) = (name for name in drafter.tensors if name.startswith(f"{Drafter.kv_name(layer)}.weight_scale"))
        scale = drafter.tensors[name]
        odd = (torch.arange(scale.shape[0]) + layer * scale.shape[0]) % 2
        powers = torch.exp2(-12.0 * odd).view(-1, *[1] * (scale.dim() - 1))
        changes[name] = (powers * 1.375).expand(scale.shape).contiguous()
    drafter = drafter.changed(changes)
    loaded = load(drafter)
    assert_matrix(loaded, drafter)
    loaded.allocate(BLOCKS)
    assert_right(loaded, drafter, 7, seed=2)


@pytest.mark.parametrize("form", ONE_SCALE, ids=str)
def test_layers_with_scales_of_their_own_keep_their_values(load: Load, form: Format) -> None:
    # What has one scale may be brought under another by rounding once, and no further off.
    drafter = Drafter.random(GEOMETRY, 1, form, spread=APART)
    actual = load(drafter).matrix()
    for layer in range(GEOMETRY.layers):
        expected = drafter.kv_matrix(layer)
        error = (actual[layer] - expected).abs()
        assert bool((error <= form.tolerance(expected, drafter.largest_scale)).all()), (
            f"layer {layer}: off by {float((error / expected.abs().amax()).max()):.3g} of the largest element"
        )


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("form", [form for form in ONE_SCALE if "NVFP4" in str(form)], ids=str)
def test_a_global_scale_that_is_none_is_named(load: Load, target: Target, form: Format, value: float) -> None:
    # The fused rows run under one of the layers' scales: a scale of 0 or NaN would spoil its own rows, or all.
    whole = Drafter.random(GEOMETRY, 1, form)
    (suffix,) = {"weight_scale_2", "weight_global_scale"} & whole.kv_tensors(1).keys()
    name = f"{Drafter.kv_name(1)}.{suffix}"
    with refuses() as refused:
        load(whole.changed({name: torch.full_like(whole.tensors[name], value)}))
    assert_named(refused.value, suffix, ("layers.1.", f"layers.{1 + target.layers}.", "context_kv_proj"))
    assert_named(refused.value, ("context_kv_proj", KV, "fused_qkv_a_proj"))


@pytest.mark.parametrize("form", [formats.FP8_PB_WO, formats.NVFP4, formats.CT_BLOCK, formats.CT_NVFP4], ids=str)
def test_a_reloaded_drafter_has_the_new_matrix(load: Load, form: Format) -> None:
    loaded = load(Drafter.random(GEOMETRY, 1, form))
    for seed in (2, 3):
        changed = Drafter.random(GEOMETRY, seed, form)
        loaded.reload(changed)
        assert_matrix(loaded, changed)


@pytest.mark.parametrize("form", MIXED, ids=str)
def test_single_modules_are_numbered_from_the_first_draft_layer(load: Load, form: Format) -> None:
    # The target has two layers: a draft layer's runtime number is another one's number in the checkpoint.
    forms = dict.fromkeys(modules((0, 1, 2), DOWN), form)
    forms |= dict.fromkeys(modules((2,), ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")), formats.MXFP8)
    drafter = layerwise(forms)
    loaded = load(drafter)
    assert_matrix(loaded, drafter)
    plain = [layer.self_attn.o_proj.weight.dtype == torch.bfloat16 for layer in loaded.layers]
    assert plain == [True, True, False]
    plain = [layer.mlp.gate_up_proj.weight.dtype == torch.bfloat16 for layer in loaded.layers]
    assert plain == [True, True, False]


EXCLUDED = modules((1,), ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
EXCLUSIONS = {
    "ModelOpt, a tree": {**formats.modelopt("FP8_PER_CHANNEL_PER_TOKEN")(), "ignore": ["layers.1.mlp*"]},
    "ModelOpt, by name": {**formats.modelopt("FP8_PER_CHANNEL_PER_TOKEN")(), "ignore": EXCLUDED},
    "compressed-tensors, by name": {**(formats.CT_CHANNEL.announce() or {}), "ignore": EXCLUDED},
    "compressed-tensors, a pattern": {
        **(formats.CT_CHANNEL.announce() or {}),
        "ignore": [r"re:.*layers\.1\.mlp\..*"],
    },
}


@pytest.mark.parametrize("how", EXCLUSIONS)
def test_exclusions_are_numbered_from_the_first_draft_layer(load: Load, how: str) -> None:
    form = formats.FP8_CHANNEL if how.startswith("ModelOpt") else formats.CT_CHANNEL
    forms = dict.fromkeys(EXCLUDED, formats.BF16)
    drafter = Drafter.random(GEOMETRY, 1, form, formats=forms, quantization=EXCLUSIONS[how])
    loaded = load(drafter)
    assert_matrix(loaded, drafter)
    plain = [layer.mlp.down_proj.weight.dtype == torch.bfloat16 for layer in loaded.layers]
    assert plain == [False, True, False]


def by_name() -> dict[str, Any]:
    """A compressed-tensors config that names what it quantizes, module by module."""
    announced = formats.CT_CHANNEL.announce()
    assert announced is not None
    group = announced["config_groups"]["group_0"]
    return formats.compressed_tensors(
        announced["format"], group["weights"], group["input_activations"], tuple(modules((0, 1, 2), DOWN))
    )


def test_targets_are_numbered_from_the_first_draft_layer(load: Load) -> None:
    drafter = layerwise(dict.fromkeys(modules((0, 1, 2), DOWN), formats.CT_CHANNEL), by_name())
    assert_matrix(load(drafter), drafter)


def odd_one(layer: int, form: Format) -> Drafter:
    """A mixed checkpoint of which one layer's latent projection is stored in a format of its own."""
    forms = dict.fromkeys(modules((0, 1, 2), DOWN), formats.FP8_PB_WO)
    return layerwise(forms | dict.fromkeys(modules((layer,), DOWN), form))


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("form", [formats.BF16, formats.MXFP8, formats.FP8, formats.NVFP4], ids=str)
def test_layers_quantized_in_different_ways_are_refused_by_name_or_right(
    load: Load, target: Target, form: Format, layer: int
) -> None:
    drafter = odd_one(layer, form)
    try:
        loaded = load(drafter)
    except REFUSALS as error:
        names = {f"layers.{number}." for number in (layer, layer + target.layers)}
        if layer == 0:  # any of the others differs as much
            names |= {f"layers.{number}." for number in range(1, 3 + target.layers)}
        assert_named(error, tuple(names))
        assert_named(error, ("context_kv_proj", KV, "fused_qkv_a_proj"))
    else:
        assert_matrix(loaded, drafter)


def quantized_drafts() -> dict[str, Drafter]:
    """Drafters whose configs need every kind of name matching."""
    return {
        "ModelOpt throughout": Drafter.random(GEOMETRY, 1, formats.FP8_CHANNEL),
        "ModelOpt by module": layerwise(dict.fromkeys(modules((0, 1, 2), DOWN), formats.MXFP8)),
        "ModelOpt by module, as the target": layerwise(dict.fromkeys(modules((0, 1, 2), DOWN), formats.FP8_PB_WO)),
        "compressed-tensors throughout": Drafter.random(GEOMETRY, 1, formats.CT_NVFP4),
        "compressed-tensors by module": layerwise(
            dict.fromkeys(modules((0, 1, 2), DOWN), formats.CT_CHANNEL), by_name()
        ),
        "BF16": Drafter.random(GEOMETRY, 1),
    }


@pytest.mark.parametrize("draft", quantized_drafts())
def test_beside_a_quantized_target_the_drafters_own_config_holds(
    load: Load, quantized_target: Target, draft: str
) -> None:
    drafter = quantized_drafts()[draft]
    before = copy.deepcopy(vars(quantized_target.config.quant_config))
    loaded = load(drafter, quantized_target)
    assert_matrix(loaded, drafter)
    after = vars(quantized_target.config.quant_config)
    assert after["quantized_layers"] == before["quantized_layers"]
    assert after["exclude_modules"] == before["exclude_modules"]


def test_a_bf16_drafter_beside_a_quantized_target_stays_bf16(load: Load, quantized_target: Target) -> None:
    loaded = load(Drafter.random(GEOMETRY, 1), quantized_target)
    assert loaded.fused.weight.dtype == torch.bfloat16
    others = {name for name, parameter in loaded.model.model.layers.named_parameters() if parameter.dtype.itemsize < 2}
    assert not others
    loaded.allocate(BLOCKS)
    assert_right(loaded, Drafter.random(GEOMETRY, 1), 7, seed=2)
