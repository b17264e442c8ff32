"""nvfp4-absent-scales: a merged NVFP4 layer's global scales are those of the matrices that its checkpoint holds.

Matrices may be missing for good reason: layers that share another's keys and values (Gemma-3n, Gemma-4), shards of no
width, columns that align K3's projection. Memory holds anything where they would be, and none of it gets into the
layer's scales, those of its weights and of its inputs: the other matrices are the checkpoint's, on the first load and
after a reload. Inputs have the room that the widest calibration gave them.

What is refused, by the layer's name and its own:

- A global scale that is missing, zero or not finite, of a matrix that the checkpoint holds and that is not all zeros: a
  truncated or badly converted checkpoint, or names that do not map. Stock multiplies by what memory held, or makes the
  layer's outputs NaN, infinite or zero.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dspark import formats
from dspark.formats import Format
from k3.checkpoint import Geometry
from k3.errors import assert_named, refuses
from merged import kernels
from merged.formats import NVFP4, global_scale, input_scale, stored
from merged.kda import Kda
from merged.layers import PREFIX, Bench, Checkpoint, Layer, Shape, fill, merged, only, qkv

pytest_plugins = ("merged.fixtures",)

every_format = pytest.mark.parametrize("form", NVFP4, ids=str)


def assert_exact(layer: Layer, present: tuple[int, ...], checkpoint: Checkpoint) -> None:
    """The rows of the ``present`` matrices, which have one scale, are the checkpoint's."""
    rows = torch.arange(sum(layer.shape.rows)).split(layer.shape.rows)
    expected = torch.cat([checkpoint.form.read(checkpoint.matrices[i]) for i in present])
    error = (layer.matrix()[torch.cat([rows[i] for i in present])] - expected).abs()
    assert bool((error <= formats.ALGEBRA * expected.abs()).all())


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
    whole, name = Checkpoint.random(form, shape, 1), global_scale(form)
    bad = None if value is None else torch.full_like(whole.matrices[index][name], value)
    layer = bench.build(form, shape)
    with refuses() as refused:
        layer.load(whole.changed(index, **{name: bad}))
    assert_named(refused.value, name, PREFIX + shape.name)


@every_format
@pytest.mark.parametrize("memory", [float("nan"), 1e30, 0.0])
@pytest.mark.parametrize(
    ("shape", "present"), [(qkv(32, 4, 2), (0,)), (merged(64, 64, 32), (0, 1)), (merged(64, 64, 32), (2,))], ids=str
)
def test_absent_matrices_have_no_say(
    bench: Bench, form: Format, shape: Shape, present: tuple[int, ...], memory: float
) -> None:
    layer = bench.build(form, shape)
    fill(layer, memory)
    for seed in (1, 2, 3):
        checkpoint = only(Checkpoint.random(form, shape, seed, (0.37,) * 3), *present)
        (layer.load if seed == 1 else layer.reload)(checkpoint)
        assert_exact(layer, present, checkpoint)
        if input_scale(form):
            assert float(layer.module.input_global_scale_inv) == 4.0


@every_format
@pytest.mark.parametrize("memory", [float("nan"), 1e30])
def test_shards_of_no_width_have_no_say(bench: Bench, form: Format, memory: float) -> None:
    """Cross attention may build a projection of keys and values alone, as one of no query heads."""
    shape = qkv(32, 0, 2)
    checkpoint = only(Checkpoint.random(form, replace(shape, rows=(16, 64, 64)), 1, (5.3, 0.37, 0.37)), 1, 2)
    layer = bench.build(form, shape)
    fill(layer, memory)
    layer.load(checkpoint)
    assert_exact(layer, (1, 2), checkpoint)


@every_format
def test_a_reload_without_a_global_scale_is_named(bench: Bench, form: Format) -> None:
    shape, name = merged(64, 192), global_scale(form)
    whole = Checkpoint.random(form, shape, 1, (0.7, 0.7))
    layer = bench.load(whole, shape)
    layer.reload(whole)
    with refuses() as refused:
        layer.reload(whole.changed(1, **{name: None}))
    assert_named(refused.value, name, PREFIX + shape.name)


@pytest.mark.parametrize("form", [formats.NVFP4, formats.CT_NVFP4], ids=str)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_k3s_kda_projection_ends_in_columns_that_no_checkpoint_has(tmp_path: Path, form: Format, size: int) -> None:
    """They align the projection of q, k, v, g, f_a and b at these sizes."""
    Kda(tmp_path / "k3", Geometry(), form, size, (0.011,) * 6).assert_projects()
