"""dspark-load-check: a draft checkpoint that doesn't hold what the drafter is made of is refused by name.

A merged projection counts as loaded with one of its shards, so that a layer's latent rows, or their scale, could
stay as they were allocated. Whatever is missing, called otherwise, of another shape, or one layer too many stops
the load with an error that lists it, in every format and also when weights are reloaded. Drafters whose layers
differ in the norm's epsilon or in widths are refused. What belongs to the target or to training alone is no fault.

Refusals, on all bases, of K3 drafters alone; no other drafter's loading is touched:
- a tensor of the drafter's layers that a whole checkpoint lacks: stock leaves those rows, or their scale, as memory
  was, since a merged layer counts as loaded with one of its shards. The chunks of a weight transfer and updates in
  place of a drafter that any loader has loaded (dummy, sharded, serialized) are no whole checkpoints;
- a tensor that no module takes (another name, a layer too many, a bias that is not zero): stock drops biases and
  other layers' latent rows in silence, and stops at the rest. What the target shares, what training alone needs,
  scales of the KV cache and what the quantization config discards are none;
- a matrix or scale of another shape: of too many rows stock takes the first;
- a weight in a byte for a 16-bit parameter or the other way round, and E8M0 for bytes: a copy converts it. Signed
  bytes for unsigned ones, and scales in a byte for wider parameters, keep what they mean and are loaded;
- layers that differ in the norm's epsilon or in widths, which no config can ask for: one projection serves them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from dspark import formats
from dspark.checkpoint import KV, Drafter, Geometry
from dspark.checks import BLOCKS, arrange, assert_right
from dspark.formats import Format
from dspark.modules import Load
from k3.errors import assert_named, refuses

pytest_plugins = ("dspark.fixtures",)

# Formats that block alignment keeps from loading at all are dspark-quantized-drafter's, faults included.
CHECKED = (
    formats.BF16,
    formats.FP8_PB_WO,
    formats.FP8,
    formats.NVFP4,
    formats.MXFP8,
    formats.CT_CHANNEL,
    formats.CT_NVFP4,
)
SOME = (formats.BF16, formats.FP8_PB_WO, formats.CT_CHANNEL, formats.CT_NVFP4)
GEOMETRY = Geometry(layers=2, heads=2, hidden=128, q_lora=128)
TENSORS = [
    pytest.param(form, suffix, id=f"{form}-{suffix}")
    for form in CHECKED
    for suffix in form.write(128, 128, 1.0, torch.Generator())
]


@pytest.fixture(scope="module")
def drafters() -> dict[str, Drafter]:
    """A right checkpoint in each format."""
    return {str(form): Drafter.random(GEOMETRY, 1, form) for form in CHECKED}


def kv(layer: int, suffix: str = "weight") -> str:
    return f"{Drafter.kv_name(layer)}.{suffix}"


@pytest.mark.parametrize("form", CHECKED, ids=str)
def test_a_whole_checkpoint_is_loaded(load: Load, drafters: dict[str, Drafter], form: Format) -> None:
    drafter = load(drafters[str(form)])
    drafter.allocate(BLOCKS)
    assert_right(drafter, drafters[str(form)], 5, seed=1)


@pytest.mark.parametrize(("form", "suffix"), TENSORS)
def test_a_missing_latent_tensor_is_named(load: Load, drafters: dict[str, Drafter], form: Format, suffix: str) -> None:
    with refuses() as refused:
        load(drafters[str(form)].changed({kv(1, suffix): None}))
    assert_named(refused.value, kv(1, suffix))


@pytest.mark.parametrize("form", [formats.BF16, formats.NVFP4], ids=str)
def test_everything_that_is_missing_is_listed(load: Load, drafters: dict[str, Drafter], form: Format) -> None:
    whole = drafters[str(form)]
    missing = [
        *(f"{Drafter.kv_name(1)}.{suffix}" for suffix in whole.kv_tensors(1)),
        kv(0),
        "layers.0.self_attn.kv_a_layernorm.weight",
    ]
    with refuses() as refused:
        load(whole.changed(dict.fromkeys(missing)))
    assert_named(refused.value, *missing)


@pytest.mark.parametrize("form", [formats.BF16, formats.CT_CHANNEL], ids=str)
def test_a_checkpoint_shallower_than_its_config_is_refused(
    load: Load, drafters: dict[str, Drafter], form: Format
) -> None:
    whole = drafters[str(form)]
    deeper = replace(whole, geometry=replace(GEOMETRY, layers=3))
    with refuses() as refused:
        load(deeper)
    assert_named(refused.value, *(f"{Drafter.kv_name(2)}.{suffix}" for suffix in whole.kv_tensors(0)))


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.self_attn.kv_a_proj.weight",
        f"layers.1.self_attn.{KV}.kernel",
        f"layers.1.attention.{KV}.weight",
        f"layers.01.self_attn.{KV}.weight",
        f"decoder.1.self_attn.{KV}.weight",
    ],
)
@pytest.mark.parametrize("form", [formats.BF16, formats.FP8_PB_WO, formats.CT_CHANNEL], ids=str)
def test_a_tensor_under_another_name_is_missed_under_its_own(
    load: Load, drafters: dict[str, Drafter], form: Format, name: str
) -> None:
    whole = drafters[str(form)]
    with refuses() as refused:
        load(whole.changed({kv(1): None, name: whole.tensors[kv(1)]}))
    assert_named(refused.value, kv(1))


@pytest.mark.parametrize("what", ["all of it", "its latent rows"])
@pytest.mark.parametrize("form", [formats.BF16, formats.FP8_PB_WO, formats.CT_CHANNEL], ids=str)
def test_a_layer_too_many_is_named(load: Load, drafters: dict[str, Drafter], form: Format, what: str) -> None:
    whole = drafters[str(form)]
    start = "layers.0." if what == "all of it" else f"{Drafter.kv_name(0)}."
    extra = {
        name.replace("layers.0.", "layers.2.", 1): tensor.clone()
        for name, tensor in whole.tensors.items()
        if name.startswith(start)
    }
    with refuses() as refused:
        load(whole.changed(extra))
    assert_named(refused.value, "layers.2")


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "too few rows": lambda tensor: tensor[: tensor.shape[0] - tensor.shape[0] // 4],
    "too many rows": lambda tensor: torch.cat([tensor, tensor[:64]]),
    "too few columns": lambda tensor: tensor[:, : tensor.shape[1] // 2],
    "too many columns": lambda tensor: torch.cat([tensor, tensor], 1),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", SOME, ids=str)
def test_rows_of_another_shape_are_named(load: Load, drafters: dict[str, Drafter], form: Format, shape: str) -> None:
    whole = drafters[str(form)]
    name = kv(1, "weight_packed" if kv(1, "weight_packed") in whole.tensors else "weight")
    with refuses() as refused:
        load(whole.changed({name: SHAPES[shape](whole.tensors[name]).contiguous()}))
    assert_named(refused.value, name)


@pytest.mark.parametrize("form", SOME[1:], ids=str)
@pytest.mark.parametrize("rows", ["too few rows", "too many rows"])
def test_scales_of_another_shape_are_named(load: Load, drafters: dict[str, Drafter], form: Format, rows: str) -> None:
    whole = drafters[str(form)]
    name = kv(1, "weight_scale")
    with refuses() as refused:
        load(whole.changed({name: SHAPES[rows](whole.tensors[name]).contiguous()}))
    assert_named(refused.value, name)


@pytest.mark.parametrize("form", [formats.BF16, formats.FP8_CHANNEL, formats.NVFP4], ids=str)
def test_a_reload_that_lacks_one_layers_rows_is_refused(load: Load, form: Format) -> None:
    drafter = load(Drafter.random(GEOMETRY, 1, form))
    with refuses() as refused:
        drafter.reload(Drafter.random(GEOMETRY, 2, form).changed({kv(1): None}))
    assert_named(refused.value, kv(1))


@pytest.mark.parametrize("form", [formats.BF16, formats.FP8_CHANNEL, formats.NVFP4], ids=str)
def test_a_transfer_brings_a_drafter_tensor_by_tensor(load: Load, form: Format) -> None:
    # None of its calls is a checkpoint. What is one still has to be whole, before and after.
    whole = Drafter.random(GEOMETRY, 2, form)
    with refuses() as refused:
        load(whole.changed({kv(1): None}))
    assert_named(refused.value, kv(1))
    drafter = load(Drafter.random(GEOMETRY, 1, form))
    drafter.transfer(whole)
    drafter.allocate(BLOCKS)
    assert_right(drafter, whole, 5, seed=1)
    with refuses() as refused:
        drafter.reload(whole.changed({kv(1): None}))
    assert_named(refused.value, kv(1))


@pytest.mark.parametrize("form", [*SOME, formats.FP8_CHANNEL, formats.NVFP4], ids=str)
def test_dummy_weights_first_real_ones_later(load: Load, drafters: dict[str, Drafter], form: Format) -> None:
    # The usual start of reinforcement learning.
    whole = drafters[str(form)] if str(form) in drafters else Drafter.random(GEOMETRY, 1, form)
    drafter = load(whole, load_format="dummy")
    drafter.reload(whole)
    drafter.allocate(BLOCKS)
    assert_right(drafter, whole, 5, seed=1)


@pytest.mark.parametrize("first", ["dummy", "auto"])
def test_what_was_loaded_by_any_loader_is_updated_tensor_by_tensor(
    load: Load, drafters: dict[str, Drafter], first: str
) -> None:
    # Loaders without names (dummy, sharded states, serialized tensors) have loaded all of it as well.
    drafter = load(drafters[str(formats.BF16)], load_format=first)
    whole = Drafter.random(GEOMETRY, 2, formats.BF16)
    drafter.update(whole)
    drafter.allocate(BLOCKS)
    assert_right(drafter, whole, 5, seed=1)


def test_a_scale_may_be_stored_in_a_byte(load: Load, drafters: dict[str, Drafter]) -> None:
    # A power of two is the same number in E8M0, from which a copy converts it.
    whole = drafters[str(formats.CT_CHANNEL)]
    scales = {
        name: torch.exp2(tensor.log2().round())
        for name, tensor in whole.tensors.items()
        if name.endswith(".weight_scale")
    }
    whole = whole.changed(scales)
    drafter = load(whole.changed({name: scale.to(torch.float8_e8m0fnu) for name, scale in scales.items()}))
    drafter.allocate(BLOCKS)
    assert_right(drafter, whole, 5, seed=1)


@pytest.mark.parametrize("form", [formats.NVFP4, formats.CT_NVFP4], ids=str)
def test_packed_bytes_may_be_signed(load: Load, drafters: dict[str, Drafter], form: Format) -> None:
    whole = drafters[str(form)]
    packed = {name: tensor.view(torch.int8) for name, tensor in whole.tensors.items() if tensor.dtype == torch.uint8}
    assert packed
    drafter = load(whole.changed(packed))
    drafter.allocate(BLOCKS)
    assert_right(drafter, whole, 5, seed=1)


@pytest.mark.parametrize("shape", ["too few rows", "too many rows"])
def test_what_a_transfer_brings_is_of_the_right_shape(load: Load, drafters: dict[str, Drafter], shape: str) -> None:
    whole = drafters[str(formats.BF16)]
    drafter = load(whole)
    with refuses() as refused:
        drafter.transfer(whole.changed({kv(1): SHAPES[shape](whole.tensors[kv(1)]).contiguous()}))
    assert_named(refused.value, kv(1))


def differ(attribute: str, value: float) -> Callable[[torch.nn.Module], None]:
    """Let the second draft layer have another value of `attribute`."""

    def change(model: torch.nn.Module) -> None:
        attention = model.model.layers[1].self_attn
        owner = attention.kv_a_layernorm if attribute == "variance_epsilon" else attention
        assert hasattr(owner, attribute)
        setattr(owner, attribute, value)

    return change


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("variance_epsilon", 1e-3), ("kv_lora_rank", 448), ("qk_rope_head_dim", 128), ("q_lora_rank", 256)],
)
@pytest.mark.parametrize("form", [formats.BF16, formats.FP8_CHANNEL], ids=str)
def test_layers_that_differ_are_refused(load: Load, form: Format, attribute: str, value: float) -> None:
    whole = Drafter.random(GEOMETRY, 1, form)

    def run(built: Callable[[torch.nn.Module], None]) -> None:
        drafter = load(whole, built=built)
        drafter.allocate(BLOCKS)
        drafter.precompute(*arrange(3, seed=1, width=GEOMETRY.hidden))

    alike = {
        "variance_epsilon": GEOMETRY.epsilon,
        "kv_lora_rank": GEOMETRY.kv_lora,
        "qk_rope_head_dim": GEOMETRY.rope,
        "q_lora_rank": GEOMETRY.q_lora,
    }
    run(differ(attribute, alike[attribute]))
    with refuses():
        run(differ(attribute, value))


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight",
        "lm_head.weight",
        "confidence_head.proj.weight",
        "layers.0.self_attn.rotary_emb.inv_freq",
    ],
)
def test_what_a_drafter_does_not_use_is_no_fault(load: Load, drafters: dict[str, Drafter], name: str) -> None:
    whole = drafters[str(formats.BF16)]
    drafter = load(whole.changed({name: torch.ones(4)}))
    drafter.allocate(BLOCKS)
    assert_right(drafter, whole, 5, seed=1)


def test_an_activation_order_that_vllm_discards_is_no_fault(load: Load, drafters: dict[str, Drafter]) -> None:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    if not hasattr(QuantizationConfig, "get_checkpoint_weight_mapper"):
        return  # there an unknown tensor like any other
    whole = drafters[str(formats.CT_CHANNEL)]
    drafter = load(whole.changed({kv(1, "g_idx"): torch.zeros(GEOMETRY.hidden, dtype=torch.int32)}))
    drafter.allocate(BLOCKS)
    assert_right(drafter, whole, 5, seed=1)


def test_a_confidence_head_is_read_by_a_drafter_that_has_one(load: Load) -> None:
    whole = Drafter.random(replace(GEOMETRY, confidence=True), 1)
    names = [name for name in whole.tensors if name.startswith("confidence_head.")]
    head = getattr(load(whole).model.model, "confidence_head", None)
    if head is None:  # to other releases its tensors are training's, and no fault
        return
    for name in names:
        assert torch.equal(head.get_parameter(name.removeprefix("confidence_head.")), whole.tensors[name])
        with refuses() as refused:
            load(whole.changed({name: None}))
        assert_named(refused.value, name)
