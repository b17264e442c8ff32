"""mla-absorption: the weights that MLA's decode absorbs are the checkpoint's, whatever the kernel keeps.

Decode multiplies by W_UK_T [heads, nope, kv_lora] and W_UV [heads, kv_lora, v], which are kv_b_proj's matrix in
the model's dtype. They are exact to that dtype's rounding also when the kernel's post-load step has made weight and
scales unreadable, or has rounded them to its own format, and they follow a reload. No second full copy of kv_b_proj
stays behind. Nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from k3 import compat, kernels, modules
from k3.checkpoint import Checkpoint, Geometry
from k3.reference import Oracle, assert_columns, share, tokens
from vllm.config import VllmConfig

pytest_plugins = ("k3.fixtures",)

MLA = Geometry.mla_layer
# 8-bit significands: half a unit in the last place is at most 2**-8 of the value; float32 arithmetic adds a little.
ROUNDING = 2.0**-8 * 1.001
KERNELS = {
    "reads what was loaded": kernels.BlockKernel,
    "opaque": kernels.OpaqueKernel,
    "requantizes": kernels.RequantizingKernel,
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> type:
    return KERNELS[request.param]


@pytest.fixture(scope="module")
def kv_b_only(first: Checkpoint) -> Checkpoint:
    """kv_b_proj quantized alone: what other projections need besides is other fixes'."""
    return first.only(first.module(MLA, "kv_b_proj"))


def assert_absorbed(mla: torch.nn.Module, oracle: Oracle, size: int, rank: int) -> None:
    """W_UK_T and W_UV of this rank are the oracle's kv_b_proj, rounded once."""
    geometry = oracle.checkpoint.geometry
    matrix = oracle.matrix(MLA, "kv_b_proj")
    heads = matrix[share(matrix.shape[0], size, rank)].view(
        geometry.heads // size, geometry.nope + geometry.v_dim, geometry.kv_lora
    )
    keys, values = heads.split([geometry.nope, geometry.v_dim], dim=1)
    for name, actual, expected in (("W_UK_T", mla.W_UK_T, keys), ("W_UV", mla.W_UV, values.transpose(1, 2))):
        assert actual.dtype == modules.MODEL_DTYPE
        assert actual.shape == expected.shape, name
        error = (actual.double() - expected).abs()
        wrong = ~(error <= ROUNDING * expected.abs() + 1e-30)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} values are not the checkpoint's"


@pytest.mark.parametrize(("size", "rank"), [(8, 0), (12, 5), *((size, size - 1) for size in modules.TP_SIZES)])
def test_absorbed_weights_are_the_checkpoints(
    configure: Callable[[Checkpoint], VllmConfig],
    kv_b_only: Checkpoint,
    oracle: Oracle,
    kernel: type,
    size: int,
    rank: int,
) -> None:
    model = modules.build(configure(kv_b_only), size=size, rank=rank, kernel=kernel)
    model.load(kv_b_only.weights())
    assert_absorbed(model.attention(MLA), oracle, size, rank)


def test_absorbed_weights_follow_a_reload(
    configure: Callable[[Checkpoint], VllmConfig], kv_b_only: Checkpoint, second: Checkpoint, kernel: type
) -> None:
    model = modules.build(configure(kv_b_only), size=8, rank=3, kernel=kernel)
    model.load(kv_b_only.weights())
    mla = model.attention(MLA)
    # A captured CUDA graph reads from where these were.
    names = ("W_UK_T", "W_UV", "_q_scale_inv", "_k_scale_inv")
    addresses = [getattr(mla, name).data_ptr() for name in names]
    model.reload(second.only(second.module(MLA, "kv_b_proj")).weights())
    mla = model.attention(MLA)
    assert_absorbed(mla, Oracle(second), 8, 3)
    assert [getattr(mla, name).data_ptr() for name in names] == addresses


def test_absorbed_weights_outlive_a_reload_of_other_layers(
    configure: Callable[[Checkpoint], VllmConfig], kv_b_only: Checkpoint, oracle: Oracle, kernel: type
) -> None:
    model = modules.build(configure(kv_b_only), size=8, rank=3, kernel=kernel)
    model.load(kv_b_only.weights())
    name = kv_b_only.module(MLA, "kv_b_proj")
    model.reload(kv_b_only.weights({f"{name}.weight": None, f"{name}.weight_scale": None}))
    assert_absorbed(model.attention(MLA), oracle, 8, 3)


def test_the_projection_itself_still_computes(
    configure: Callable[[Checkpoint], VllmConfig], kv_b_only: Checkpoint, oracle: Oracle
) -> None:
    model = modules.build(configure(kv_b_only), size=8, rank=3, kernel=kernels.OpaqueKernel)
    model.load(kv_b_only.weights())
    latent = tokens(3, kv_b_only.geometry.kv_lora)
    expected = oracle.output(MLA, "kv_b_proj", latent)
    with torch.no_grad():
        actual = model.attention(MLA).kv_b_proj(latent)[0]
    assert_columns(actual, expected[:, share(expected.shape[1], 8, 3)], "kv_b_proj")


def held_tensors(*owners: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in these objects' attributes, by attribute name; lists and dictionaries are looked into."""
    for owner in owners:
        found = dict(vars(owner))
        for table in ("_parameters", "_buffers"):
            found |= found.pop(table, {})
        for name, value in found.items():
            inside = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            yield from ((name, tensor) for tensor in inside if isinstance(tensor, torch.Tensor))


def test_no_second_copy_of_kv_b_stays(
    configure: Callable[[Checkpoint], VllmConfig], kv_b_only: Checkpoint, second: Checkpoint, kernel: type
) -> None:
    model = modules.build(configure(kv_b_only), size=8, rank=3, kernel=kernel)
    model.load(kv_b_only.weights())
    for _ in range(2):
        mla = model.attention(MLA)
        projection = mla.kv_b_proj
        elements = mla.num_local_heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
        absorbed = {"W_UK_T", "W_UV"}
        large = {
            tensor.untyped_storage().data_ptr(): name
            for name, tensor in held_tensors(mla, projection, projection.quant_method)
            if tensor.untyped_storage().nbytes() >= elements and name not in absorbed
        }
        assert list(large.values()) == ["weight"]
        model.reload(second.only(second.module(MLA, "kv_b_proj")).weights())


def test_no_copy_waits_for_attention_that_packs_kv_b_itself(
    configure: Callable[[Checkpoint], VllmConfig], first: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With AMX, the attention implementation reads kv_b_proj; the layer that all models share only frees the weight.
    monkeypatch.setattr(compat.MlaImpl, "uses_amx_bmm", True, raising=False)
    kv_b_only = first.only(first.module(MLA, "kv_b_proj"))
    model = modules.build(configure(kv_b_only), size=8, rank=3, part="amd")
    model.load(kv_b_only.weights())
    projection = model.attention(MLA).kv_b_proj
    elements = projection.output_size_per_partition * kv_b_only.geometry.kv_lora
    held = {name for name, tensor in held_tensors(projection) if tensor.untyped_storage().nbytes() >= elements}
    assert held <= {"weight"}
