"""nvfp4-merged-scales: every matrix of a merged NVFP4 layer is multiplied under its own global scale.

Kernels run a merged layer under one global scale, and checkpoints may have one for each matrix: in every NVFP4 format
that vLLM loads, on every rank, with a bias and after reloading, the layer is the checkpoint's matrices. Matrices that
the checkpoint lacks have no say, and no more has a matrix of zeros; FP16 results that are finite stay finite. Scales
that group scales can take up exactly cost nothing.

A layer keeps the operations that it was first loaded with, which CUDA graphs have captured: one that had dummy weights
or a common scale may round group scales where a later checkpoint's scales differ.

It refuses nothing: see test_nvfp4_absent_scales.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dspark import formats
from dspark.formats import Format
from k3.checkpoint import Geometry
from merged import compat, kernels
from merged.formats import CT_NVFP4_ROTATED, NVFP4
from merged.kda import Kda
from merged.layers import SIZES, Bench, Checkpoint, Layer, Shape, fill, merged, only, qkv

pytest_plugins = ("merged.fixtures",)

every_format = pytest.mark.parametrize("form", NVFP4, ids=str)
# No ratio is a power of two, and both directions of a scale are larger than what E4M3 group scales could take up.
APART = ((1.0, 5.3, 0.171), (5.3, 0.171, 1.0), (0.171, 1.0, 5.3), (2.0, 2.0, 0.0031))
SHAPES = (
    merged(64, 64),
    merged(192, 64),
    merged(64, 128, 192),
    merged(48, 16, unsharded=True),
    qkv(16, 8, 4),
    qkv(32, 4, 2),
    qkv(64, 4, 1),
)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def ranks(shape: Shape) -> list[tuple[int, int]]:
    return [(size, rank) for size in SIZES for rank in range(size)]


def assert_right(layer: Layer, checkpoint: Checkpoint, largest: float) -> None:
    """The layer multiplies by the checkpoint's matrices.

    Group scales may be rounded once, to bring a matrix under another's global scale, and nothing is further off.
    """
    expected = layer.shape.share(checkpoint.read(), layer.size, layer.rank)
    error = (layer.matrix() - expected).abs()
    assert error.shape == expected.shape
    assert bool((error <= checkpoint.form.tolerance(expected, largest)).all()), (
        f"rank {layer.rank} of {layer.size}: off by {float((error / expected.abs().amax()).max()):.3g} "
        "of the largest element"
    )


@every_format
@every_shape
def test_matrices_with_scales_of_their_own(bench: Bench, form: Format, shape: Shape) -> None:
    for scales in APART:
        scales = scales[: len(shape.rows)]
        checkpoint = Checkpoint.random(form, shape, 1, scales)
        for size, rank in ranks(shape):
            assert_right(bench.load(checkpoint, shape, size, rank), checkpoint, max(scales))


@every_format
@every_shape
def test_matrices_under_a_common_scale_are_exact(bench: Bench, form: Format, shape: Shape) -> None:
    checkpoint = Checkpoint.random(form, shape, 1, (0.37,) * len(shape.rows))
    for size, rank in ranks(shape):
        layer = bench.load(checkpoint, shape, size, rank)
        expected = shape.share(checkpoint.read(), size, rank)
        assert bool(((layer.matrix() - expected).abs() <= formats.ALGEBRA * expected.abs()).all())


@pytest.mark.parametrize("scales", [(0.37, 0.37, 0.37), *APART])
@pytest.mark.parametrize("shape", [merged(64, 192), merged(64, 128, 192), qkv(32, 4, 2)], ids=str)
def test_matrices_of_rotated_inputs(bench: Bench, shape: Shape, scales: tuple[float, ...]) -> None:
    scales = scales[: len(shape.rows)]
    checkpoint = Checkpoint.random(CT_NVFP4_ROTATED, shape, 1, scales)
    with compat.qutlass():
        assert_right(bench.load(checkpoint, shape), checkpoint, max(scales))


@every_format
@pytest.mark.parametrize("shape", [merged(64, 192), qkv(32, 4, 2)], ids=str)
@pytest.mark.parametrize("scales", [(0.37, 0.37, 0.37), *APART[:2]])
def test_a_bias_is_added_as_it_is(bench: Bench, form: Format, shape: Shape, scales: tuple[float, ...]) -> None:
    scales = scales[: len(shape.rows)]
    checkpoint = Checkpoint.random(form, shape, 1, scales, bias=True)
    layer = bench.load(checkpoint, shape)
    assert checkpoint.biases is not None
    zero = layer(torch.zeros(3, shape.cols, dtype=torch.float64))
    assert torch.equal(zero, torch.cat(checkpoint.biases).double().expand(zero.shape))
    x = torch.randn(3, shape.cols, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    matrix = torch.cat(checkpoint.read())
    off = (layer(x) - zero - x @ matrix.T).abs()
    assert bool((off <= x.abs() @ form.tolerance(matrix, max(scales)).T).all())


@every_format
@pytest.mark.parametrize("shape", [merged(64, 192), qkv(32, 4, 2)], ids=str)
def test_a_reloaded_layer_has_the_new_matrices(bench: Bench, form: Format, shape: Shape) -> None:
    count = len(shape.rows)
    layer = bench.load(Checkpoint.random(form, shape, 1, APART[0][:count]), shape)
    # Another matrix has the largest scale, then none has, then another again.
    for seed, scales in enumerate([APART[1], (0.7,) * 3, APART[2]]):
        checkpoint = Checkpoint.random(form, shape, seed + 2, scales[:count])
        layer.reload(checkpoint)
        assert_right(layer, checkpoint, max(scales[:count]))


# What a layer was loaded with before: vLLM's dummy weights, or a checkpoint under such scales.
BEFORE = {"dummy": None, "common": (0.7,) * 3, "folded": (0.5, 2.0, 0.125), "apart": APART[0]}


def loaded_before(bench: Bench, form: Format, shape: Shape, before: str, **kwargs: Any) -> Layer:
    scales = BEFORE[before]
    if scales is None:
        return bench.build(form, shape, **kwargs).load_dummy()
    bias = kwargs.pop("bias", False)
    checkpoint = Checkpoint.random(form, shape, 1, scales[: len(shape.rows)], bias)
    return bench.load(checkpoint, shape, **kwargs)


@every_format
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("scales", [(0.7, 0.7, 0.7), (0.7, 0.1, 3.3), (0.25, 4.0, 1.0)], ids=str)
@pytest.mark.parametrize("shape", [merged(64, 192), qkv(32, 4, 2)], ids=str)
def test_whatever_was_loaded_before(
    bench: Bench, form: Format, shape: Shape, before: str, scales: tuple[float, ...]
) -> None:
    # Reinforcement learning starts with dummy weights, and captures CUDA graphs of them.
    layer = loaded_before(bench, form, shape, before)
    tensors, launched = layer.tensors(), layer.kernels_launched()
    scales = scales[: len(shape.rows)]
    for seed in (2, 3):
        checkpoint = Checkpoint.random(form, shape, seed, scales)
        layer.reload(checkpoint)
        assert_right(layer, checkpoint, max(scales))
    assert layer.tensors() == tensors
    assert layer.kernels_launched() == launched


@every_format
@pytest.mark.parametrize("before", ["dummy", "folded"])
def test_what_costs_nothing_under_a_common_scale_costs_nothing(bench: Bench, form: Format, before: str) -> None:
    # Group scales take up powers of two exactly, as long as there is room.
    shape = merged(64, 192)
    common = bench.load(Checkpoint.random(form, shape, 1, (0.7, 0.7)), shape)
    layer = loaded_before(bench, form, shape, before)
    assert layer.kernels_launched() == common.kernels_launched()
    assert layer.tensors().keys() == common.tensors().keys()


@every_format
@pytest.mark.parametrize("scales", [(0.5, 2.0, 0.125), (1 / 64, 1.0, 1 / 64), (0.37, 0.74, 0.185)], ids=str)
@pytest.mark.parametrize("shape", [merged(64, 64, 64), qkv(32, 4, 2)], ids=str)
def test_powers_of_two_apart_are_exact(bench: Bench, form: Format, shape: Shape, scales: tuple[float, ...]) -> None:
    checkpoint = Checkpoint.random(form, shape, 1, scales)
    layer = bench.load(checkpoint, shape)
    expected = torch.cat(checkpoint.read())
    assert bool(((layer.matrix() - expected).abs() <= formats.ALGEBRA * expected.abs()).all())


@every_format
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.5, 0.25, 0.5), (5.3, 0.171, 1.0)], ids=str)
@pytest.mark.parametrize("shape", [merged(64, 192), merged(48, 24, 16), qkv(16, 3, 1)], ids=str)
def test_marlin_adds_the_bias_in_the_checkpoints_order(
    bench: Bench, form: Format, shape: Shape, scales: tuple[float, ...]
) -> None:
    """Marlin's preparation permutes a layer's bias, and pads it to whole tiles."""
    scales = scales[: len(shape.rows)]
    checkpoint = Checkpoint.random(form, shape, 1, scales, bias=True)
    layer = bench.load(checkpoint, shape, kernels=kernels.MARLIN)
    for seed in (2, 3):
        assert checkpoint.biases is not None
        bias = torch.cat(checkpoint.biases).double()
        zero = layer(torch.zeros(3, shape.cols, dtype=torch.float64))
        assert torch.equal(zero, bias.expand(zero.shape))
        expected = torch.cat(checkpoint.read())
        error = (layer.matrix() - bias[:, None] - expected).abs()
        # Sums with the bias are rounded where the bias is added to FP32.
        assert bool((error <= form.tolerance(expected, max(scales)) + 1e-6 * expected.abs().amax()).all())
        checkpoint = Checkpoint.random(form, shape, seed, scales[::-1], bias=True)
        # Where Marlin has put another in its place, releases differ in whether it can be reloaded.
        if not hasattr(layer.module.bias, "weight_loader") or layer.module.bias.shape != bias.shape:
            return
        layer.reload(checkpoint)


@every_format
@pytest.mark.parametrize(
    ("shape", "present"), [(merged(64, 64, 32), (0, 1)), (merged(64, 64, 32), (1, 2)), (qkv(32, 4, 2), (1, 2))], ids=str
)
def test_absent_matrices_are_nobodys_largest(
    bench: Bench, form: Format, shape: Shape, present: tuple[int, ...]
) -> None:
    layer = bench.build(form, shape)
    fill(layer, 1e30)
    rows = torch.arange(sum(shape.rows)).split(shape.rows)
    for seed, scales in enumerate([APART[0], APART[1]]):
        checkpoint = only(Checkpoint.random(form, shape, seed, scales), *present)
        (layer.reload if seed else layer.load)(checkpoint)
        expected = torch.cat([form.read(checkpoint.matrices[i]) for i in present])
        error = (layer.matrix()[torch.cat([rows[i] for i in present])] - expected).abs()
        assert bool((error <= form.tolerance(expected, max(scales[i] for i in present))).all())


@every_format
@pytest.mark.parametrize("fused", [(0, 1, 2)], ids=str)
def test_a_matrix_fused_on_disk_has_one_scale(bench: Bench, form: Format, fused: tuple[int, ...]) -> None:
    """Phi's checkpoints hold qkv_proj and gate_up_proj as one matrix under one scale."""
    shape = qkv(32, 4, 2)
    whole = Checkpoint.random(form, Shape("qkv_proj", (sum(shape.rows),), shape.cols), 1, (0.37,))
    layer = bench.build(form, shape)
    layer.load_fused(whole)
    expected = torch.cat(whole.read())
    assert bool(((layer.matrix() - expected).abs() <= formats.ALGEBRA * expected.abs()).all())


@every_format
@pytest.mark.parametrize("zeros", [0, 1])
def test_a_matrix_of_zeros_has_no_say(bench: Bench, form: Format, zeros: int) -> None:
    """compressed-tensors writes the divisor 1.0 for it, where others have thousands: in FP16 nothing may overflow."""
    shape = merged(64, 64)
    scales = (1.0, 1 / 4096 / 1.3) if zeros == 0 else (1 / 4096 / 1.3, 1.0)
    checkpoint = Checkpoint.random(form, shape, 1, scales)
    packed = next(name for name, tensor in checkpoint.matrices[0].items() if tensor.dtype == torch.uint8)
    checkpoint = checkpoint.changed(zeros, **{packed: torch.zeros_like(checkpoint.matrices[zeros][packed])})
    assert_finite_in_fp16(bench, checkpoint, shape)


@every_format
@pytest.mark.parametrize("scales", [(1 / 4096, 1 / 5300), (1 / 300, 1 / 70000), (1 / 60000, 1 / 500)], ids=str)
def test_what_fp16_can_hold_stays_finite(bench: Bench, form: Format, scales: tuple[float, ...]) -> None:
    shape = merged(64, 64)
    for low in (None, 2.0**-6, 2.0**-8):
        checkpoint = Checkpoint.random(form, shape, 1, scales)
        if low is not None:  # one group scale that leaves no room below
            for index in (0, 1):
                groups = checkpoint.matrices[index]["weight_scale"].clone()
                groups[0, 0] = low
                checkpoint = checkpoint.changed(index, weight_scale=groups)
        # The smallest results may lose what the scales differ by beyond the group scales' room, from 1 down to 2**-6.
        room = 64 if low is None else 1
        assert_finite_in_fp16(bench, checkpoint, shape, max(1.0, max(scales) / min(scales) / room))


def assert_finite_in_fp16(bench: Bench, checkpoint: Checkpoint, shape: Shape, coarser: float = 1.0) -> None:
    """Every output that FP16 can hold is as right as an FP16 number can be, and two roundings."""
    layer = bench.load(checkpoint, shape)
    matrices = checkpoint.read()
    x = torch.randn(16, shape.cols, generator=torch.Generator().manual_seed(3))
    for matrix, columns in zip(matrices, torch.arange(sum(shape.rows)).split(shape.rows), strict=True):
        if not bool(matrix.any()):
            assert not bool(layer(x.half())[:, columns].any())
            continue
        # As large as FP16 can hold, and as small as it can resolve.
        for peak in (60000, 1.0, 2.0**-10):
            factor = min(peak / float((x.double() @ matrix.T).abs().amax()), 30000 / float(x.abs().amax()))
            given = (x * factor).half()
            expected = given.double() @ matrix.T
            assert float(expected.abs().amax()) < 65504
            got = layer(given)[:, columns].double()
            assert bool(got.isfinite().all())
            assert bool(((got - expected).abs() <= 2**-10 * expected.abs() + 2**-23 * coarser).all())


@pytest.mark.parametrize("form", [formats.NVFP4, formats.CT_NVFP4], ids=str)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_k3s_kda_projections_have_scales_of_their_own(tmp_path: Path, form: Format, size: int) -> None:
    Kda(tmp_path / "k3", Geometry(), form, size, (0.011, 0.5, 0.002, 0.04, 0.3, 0.011)).assert_projects()
