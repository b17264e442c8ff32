"""nvfp4-merged-scales: every matrix of a merged NVFP4 layer is multiplied under its own global scale.

Kernels run a merged layer under one global scale, and checkpoints may have one for each matrix: in every NVFP4 format
that vLLM loads, on every rank, with a bias and after reloading, the layer is the checkpoint's matrices, and its inputs
have the room that the widest calibration gave them. A global scale that is missing, zero or not finite is refused by
the layer's name and its own.
"""

from __future__ import annotations

import pytest
import torch
from dspark import formats
from dspark.formats import Format
from k3.errors import REFUSALS, assert_named, refuses
from merged import compat, kernels
from merged.formats import CT_NVFP4_ROTATED, NVFP4, global_scale, input_scale, stored
from merged.layers import PREFIX, SIZES, Bench, Checkpoint, Layer, Shape, merged, qkv

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


@pytest.mark.parametrize("form", [form for form in NVFP4 if input_scale(form)], ids=str)
@pytest.mark.parametrize("widest", [0, 1, 2])
def test_inputs_have_the_room_of_the_widest_calibration(bench: Bench, form: Format, widest: int) -> None:
    # 6 * 448 times the global scale is the largest input that E4M3 group scales of E2M1 numbers can stand for.
    shape, name = merged(64, 64, 64), input_scale(form)
    assert name is not None
    checkpoint = Checkpoint.random(form, shape, 1)
    for index in range(3):
        scale = 0.02 if index == widest else 0.003
        checkpoint = checkpoint.changed(index, **{name: stored(form, scale, checkpoint.matrices[index][name])})
    layer = bench.load(checkpoint, shape, kernels=kernels.CLAMPING)
    x = torch.zeros(2, shape.cols, dtype=torch.float64)
    x[0, 3], x[1, 40] = 0.019 * 2688, -0.019 * 2688
    expected = x @ torch.cat(checkpoint.read()).T
    assert bool(((layer(x) - expected).abs() <= formats.ALGEBRA * expected.abs()).all())


@every_format
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("value", [None, 0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [merged(64, 64, 64), qkv(32, 4, 2)], ids=str)
def test_a_global_scale_that_is_none_is_named(
    bench: Bench, form: Format, shape: Shape, index: int, value: float | None
) -> None:
    whole, name = Checkpoint.random(form, shape, 1, APART[0]), global_scale(form)
    bad = None if value is None else torch.full_like(whole.matrices[index][name], value)
    layer = bench.build(form, shape)
    with refuses() as refused:
        layer.load(whole.changed(index, **{name: bad}))
    assert_named(refused.value, name, PREFIX + shape.name)


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


@every_format
def test_scales_that_part_on_a_reload_are_right_or_refused(bench: Bench, form: Format) -> None:
    # The first load may have left the layer without what differing scales need.
    shape = merged(64, 192)
    layer = bench.load(Checkpoint.random(form, shape, 1, (0.7, 0.7)), shape)
    checkpoint = Checkpoint.random(form, shape, 2, (0.7, 0.1))
    try:
        layer.reload(checkpoint)
    except REFUSALS as error:
        assert_named(error, PREFIX + shape.name)
        assert_named(error, "scale")
    else:
        assert_right(layer, checkpoint, 0.7)
