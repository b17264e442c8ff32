"""dspark-fused-kv: one projection fills the context latents of all draft layers, with the numbers of each alone.

`context_kv_proj` is a merged projection with one shard a draft layer, of the draft's own quantization, replicated
on every rank. Each layer's kv_a_proj_with_mqa reaches it under its shard id as a view of the tensor that the layer
itself loads. Precomputing runs one product of that many rows, never the queries', and what stands in each layer's
KV cache at its slots is what that layer's own projection, norm and RoPE would have put there, also after weights
were reloaded. Nothing made for it stays resident: no second weight, no buffer of positions.

Refusals: layers of different widths or epsilon, and the KV rows of a layer that the drafter does not have (see
dspark-load-check).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dspark import compat, formats
from dspark.checkpoint import KV, Drafter, Geometry
from dspark.checks import BLOCKS, arrange, assert_caches, assert_right
from dspark.formats import Format
from dspark.modules import BLOCK_SIZE, EMPTY, Load, Loaded, Slots
from dspark.reference import context_latents
from dspark.trace import held_tensors
from hypothesis import given
from hypothesis import strategies as st
from k3.properties import examples

pytest_plugins = ("dspark.fixtures",)

LAYERS = (1, 2, 3, 4, 5)
SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale")


@pytest.fixture(scope="module")
def drafters() -> dict[int, Drafter]:
    return {layers: Drafter.random(Geometry(layers=layers), seed=layers) for layers in LAYERS}


@pytest.fixture(scope="module")
def loaded(load: Load, drafters: dict[int, Drafter]) -> dict[int, Loaded]:
    """BF16 drafters of every depth, with caches."""
    made = {layers: load(drafter) for layers, drafter in drafters.items()}
    for drafter in made.values():
        drafter.allocate(BLOCKS)
    return made


@pytest.fixture(scope="module")
def five(loaded: dict[int, Loaded]) -> Loaded:
    return loaded[5]


@pytest.mark.parametrize("layers", LAYERS)
def test_one_merged_projection_is_made_for_all_layers(load: Load, drafters: dict[int, Drafter], layers: int) -> None:
    with compat.recorded_projections() as made:
        drafter = load(drafters[layers])
    assert len(made) == 1
    arguments = made[0]
    assert arguments["input_size"] == 256
    assert list(arguments["output_sizes"]) == [576] * layers
    assert arguments["bias"] is False
    assert arguments["return_bias"] is False
    assert arguments["disable_tp"] is True
    assert arguments["quant_config"] is None
    assert arguments["prefix"] == f"{drafter.layers[0].self_attn.layer_name}.fused_qkv_a_proj"
    assert drafter.fused.tp_size == 1


def test_the_projection_takes_the_drafts_quantization(load: Load) -> None:
    with compat.recorded_projections() as made:
        drafter = load(Drafter.random(Geometry(), 1, formats.FP8_CHANNEL))
    assert made[0]["quant_config"] is not None
    assert type(drafter.fused.quant_method) is type(drafter.layers[0].self_attn.fused_qkv_a_proj.quant_method)


def test_the_projection_of_a_drafter_with_nothing_else_in_it() -> None:
    config = SimpleNamespace(
        target_hidden_size=16,
        num_target_layers=2,
        hidden_size=8,
        kv_lora_rank=3,
        qk_rope_head_dim=1,
        rms_norm_eps=1e-6,
        num_hidden_layers=1,
        vocab_size=128,
        draft_vocab_size=128,
        markov_rank=4,
    )
    with compat.bare_drafter(config) as (_, calls):
        assert calls == [
            (
                (8, [4]),
                {
                    "bias": False,
                    "return_bias": False,
                    "quant_config": None,
                    "prefix": "model.layers.0.self_attn.fused_qkv_a_proj",
                    "disable_tp": True,
                },
            )
        ]


def test_a_packed_weight_of_one_layer_and_a_scale_of_another_are_loaded_twice_from_one_storage() -> None:
    weights = [
        (f"layers.0.self_attn.{KV}.weight_packed", torch.arange(4)),
        (f"layers.1.self_attn.{KV}.weight_scale", torch.tensor(0.5)),
    ]
    mapped = compat.duplicated(weights, 2)
    assert [name for name, _ in mapped] == [
        "model.layers.0.self_attn.fused_qkv_a_proj.weight_packed",
        "model.context_kv_proj.weight_packed",
        "model.layers.1.self_attn.fused_qkv_a_proj.weight_scale",
        "model.context_kv_proj.weight_scale",
    ]
    assert [tensor.shard_id for _, tensor in mapped] == [1, 0, 1, 1]
    assert mapped[0][1].data_ptr() == mapped[1][1].data_ptr() == weights[0][1].data_ptr()
    assert mapped[2][1].data_ptr() == mapped[3][1].data_ptr() == weights[1][1].data_ptr()


@examples(50)
@given(
    layers=st.integers(1, 12),
    tensors=st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from((KV, "q_a_proj", "o_proj")), st.sampled_from(SUFFIXES)),
        unique=True,
        max_size=12,
    ),
)
def test_every_latent_tensor_and_no_other_is_duplicated_in_order(
    layers: int, tensors: list[tuple[int, str, str]]
) -> None:
    tensors = [(layer, module, suffix) for layer, module, suffix in tensors if layer < layers]
    weights = [
        (f"layers.{layer}.self_attn.{module}.{suffix}", torch.zeros(2))  # a fresh tensor each: shard ids stick to them
        for layer, module, suffix in tensors
    ]
    expected: list[tuple[str, int, Any]] = []
    for (layer, module, suffix), (_, tensor) in zip(tensors, weights, strict=True):
        runtime = module if module == "o_proj" else "fused_qkv_a_proj"
        shard = {"q_a_proj": 0, KV: 1}.get(module)
        expected.append((f"model.layers.{layer}.self_attn.{runtime}.{suffix}", tensor.data_ptr(), shard))
        if module == KV:
            expected.append((f"model.context_kv_proj.{suffix}", tensor.data_ptr(), layer))
    mapped = compat.duplicated(iter(weights), layers)
    assert [(name, tensor.data_ptr(), getattr(tensor, "shard_id", None)) for name, tensor in mapped] == expected


@pytest.mark.parametrize("layers", LAYERS)
def test_latents_are_those_of_the_layers_own_projections(
    loaded: dict[int, Loaded], drafters: dict[int, Drafter], layers: int
) -> None:
    @examples(12)
    @given(tokens=st.integers(1, BLOCKS * BLOCK_SIZE), seed=st.integers(0, 2**32))
    def holds(tokens: int, seed: int) -> None:
        assert_right(loaded[layers], drafters[layers], tokens, seed)

    holds()


def test_positions_may_be_of_32_bits(five: Loaded, drafters: dict[int, Drafter]) -> None:
    x, positions, slots = arrange(6, seed=2)
    five.clear()
    five.precompute(x, positions.int(), slots)
    assert_caches(five, drafters[5], x, positions, slots)


def test_a_drafter_without_a_checkpoint_runs(load: Load, drafters: dict[int, Drafter]) -> None:
    # --load-format dummy loads nothing: what a load would have prepared is prepared by the first run.
    drafter = load(drafters[2], load_format="dummy")
    drafter.allocate(BLOCKS)
    x, positions, slots = arrange(6, seed=2)
    drafter.precompute(x, positions, slots)
    for cache in drafter.caches:
        assert torch.equal((cache != EMPTY).any(-1).flatten().nonzero().flatten(), slots.sort().values)


def mappings(slots: torch.Tensor, other: list[torch.Tensor]) -> dict[str, Slots]:
    """The forms in which a caller may say where five layers' latents go."""
    padded = slots.clone()
    padded[::3] = -1
    return {
        "one for all": slots,
        "the same one listed": [slots] * 5,
        "equal ones listed": [slots.clone() for _ in range(5)],
        "one a layer": other,
        "none for some layers": [other[0], None, other[2], None, other[4]],
        "none for any layer": [None] * 5,
        "none": None,
        "padded, one for all": padded,
        "padded, one a layer": [torch.where(padded < 0, padded, each) for each in other],
        "padding alone": torch.full_like(slots, -1),
    }


@pytest.mark.parametrize("form", mappings(torch.arange(3), [torch.arange(3)] * 5))
def test_latents_go_to_the_slots_of_each_layers_mapping(five: Loaded, drafters: dict[int, Drafter], form: str) -> None:
    x, positions, slots = arrange(11, seed=3)
    slots = mappings(slots, [arrange(11, seed=20 + layer)[2] for layer in range(5)])[form]
    five.clear()
    five.precompute(x, positions, slots)
    assert_caches(five, drafters[5], x, positions, slots)


def test_caches_may_differ_in_block_size(load: Load, drafters: dict[int, Drafter]) -> None:
    drafter = load(drafters[3])
    drafter.allocate(BLOCKS, sizes=(BLOCK_SIZE, 2 * BLOCK_SIZE))
    assert_right(drafter, drafters[3], 9, seed=4)


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (8, 0), (8, 5)])
def test_every_rank_holds_all_latents(load: Load, drafters: dict[int, Drafter], size: int, rank: int) -> None:
    drafter = load(drafters[3], size=size, rank=rank)
    drafter.allocate(BLOCKS)
    assert_right(drafter, drafters[3], 7, seed=6)


@pytest.mark.parametrize("form", [formats.BF16, formats.FP8_CHANNEL, formats.MXFP8], ids=str)
def test_a_reloaded_drafter_computes_the_new_values(load: Load, form: Format) -> None:
    drafter = load(Drafter.random(Geometry(), 1, form))
    drafter.allocate(BLOCKS)
    assert_right(drafter, Drafter.random(Geometry(), 1, form), 5, seed=7)
    for seed in (2, 3):
        changed = Drafter.random(Geometry(), seed, form)
        drafter.reload(changed)
        assert_right(drafter, changed, 5, seed=7)


def test_latents_are_stored_under_the_scale_that_their_layer_has_now(load: Load, drafters: dict[int, Drafter]) -> None:
    # A reload brings new scales of FP8 caches, which attention reads by from then on.
    def built(model: torch.nn.Module) -> None:
        for layer in model.model.layers:
            layer.self_attn.kv_cache_dtype = "fp8"

    drafter = load(drafters[3], built=built)
    drafter.allocate(BLOCKS, dtype=torch.uint8)
    x, positions, slots = arrange(9, seed=6)
    latents = context_latents(drafters[3], x, positions)
    for factor in (0.25, 0.6):
        scales = [factor * (layer + 1) for layer in range(3)]
        for layer, scale in zip(drafter.layers, scales, strict=True):
            layer.self_attn._k_scale.fill_(scale)
        drafter.precompute(x, positions, slots)
        for layer, scale in enumerate(scales):
            stored = drafter.caches[layer].flatten(0, 1)[slots].view(torch.float8_e4m3fn).double() * scale
            error = formats.E4M3_RELATIVE * latents[layer].abs() + formats.E4M3_ABSOLUTE * scale
            assert bool(((stored - latents[layer]).abs() <= 1.001 * error).all()), f"layer {layer} under {scale}"


def test_metadata_is_built_once_a_load_and_not_in_every_step(load: Load, drafters: dict[int, Drafter]) -> None:
    x, positions, slots = arrange(4, seed=8)
    with compat.metadata_builds() as builds:
        drafter = load(drafters[2])
        drafter.allocate(BLOCKS)
        for _ in range(3):
            drafter.precompute(x, positions, slots)
        assert builds.call_count == 1
        drafter.reload(Drafter.random(Geometry(layers=2), seed=9))
        drafter.precompute(x, positions, slots)
        after = builds.call_count
        for _ in range(3):
            drafter.precompute(x, positions, slots)
        assert builds.call_count == after


@pytest.mark.parametrize("form", [formats.BF16, formats.FP8_CHANNEL, formats.NVFP4], ids=str)
def test_one_product_computes_the_latents_and_no_queries(load: Load, form: Format) -> None:
    geometry = Geometry(layers=5)
    drafter = load(Drafter.random(geometry, 1, form))
    drafter.allocate(BLOCKS)
    x, positions, slots = arrange(6, seed=9)
    drafter.precompute(x, positions, slots)
    products = drafter.trace(x, positions, slots).products
    assert [(product.rows, product.inner, product.columns) for product in products] == [(6, 256, 5 * 576)]


@pytest.mark.parametrize("form", ["one for all", "one a layer", "none"])
def test_a_second_run_reads_nothing_back_to_the_host(five: Loaded, form: str) -> None:
    x, positions, slots = arrange(6, seed=10)
    slots = mappings(slots, [slots.clone() for _ in range(5)])[form]
    five.precompute(x, positions, slots)
    seen = five.trace(x, positions, slots)
    assert seen.names
    assert not seen.host_reads


def test_the_workspace_never_grows_after_the_first_run(
    load: Load, drafters: dict[int, Drafter], workspace: Any
) -> None:
    drafter = load(drafters[5])
    drafter.allocate(blocks=drafter.max_tokens // BLOCK_SIZE)
    x, positions, slots = arrange(2, seed=11)
    drafter.precompute(x, positions, slots)
    workspace.lock()
    x, positions, slots = arrange(drafter.max_tokens, seed=12, blocks=drafter.max_tokens // BLOCK_SIZE)
    drafter.clear()
    drafter.precompute(x, positions, slots)
    assert_caches(drafter, drafters[5], x, positions, slots)


@pytest.mark.parametrize("form", [formats.BF16, formats.FP8_CHANNEL], ids=str)
def test_nothing_stays_resident_besides_the_projection(load: Load, form: Format) -> None:
    geometry = Geometry(layers=5)
    drafter = load(Drafter.random(geometry, 1, form))
    drafter.allocate(BLOCKS)
    drafter.precompute(*arrange(6, seed=13))
    known = {tensor.untyped_storage().data_ptr() for tensor in (*drafter.model.parameters(), *drafter.caches)}
    held = {
        name: tensor
        for name, tensor in held_tensors(drafter.model).items()
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in known
    }
    standing = [name for name, tensor in held.items() if not tensor.is_floating_point() and tensor.numel() >= 1024]
    assert not standing, "a buffer of positions stands"
    weights = [name for name, tensor in held.items() if tensor.numel() >= geometry.latent * geometry.hidden]
    assert not weights, "a weight was made by hand"
    rows = drafter.fused.weight.numel() // geometry.hidden
    assert rows == 5 * geometry.latent
