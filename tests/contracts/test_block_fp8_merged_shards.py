"""block-fp8-merged-shards: every matrix of a merged block-FP8 layer stands under its own scales, wherever it ends.

A matrix need not fill its last block of 128 rows, and the next one's first block is its own nevertheless. In DeepSeek's
FP8 format and in compressed-tensors', a layer that every rank has whole is the checkpoint's matrices, with a bias and
after reloading; what it pads is no part of its output. Layers whose matrices fill their blocks are as right as they
were, sharded or not. A tensor that is missing, has another shape, or is a scale that is none, is refused by name.

The layer's width and bias stay its own on every kernel, Marlin included, and methods that create the weights
themselves keep working. Layers that tensor parallelism cuts inside a block are no part of this.

What is refused, by name, and why stock is wrong there. All of it concerns layers with a matrix that ends inside a
block before another begins, which stock refuses (compressed-tensors) or multiplies under the scales of other rows:
- a matrix without weight or scales, unless k and v are both absent, which are zero (a file that is missing or cut
  short): stock multiplies by uninitialized memory;
- a scale that is NaN, infinite, negative, or zero over numbers that are not (a damaged file): stock multiplies by it;
- a tensor of another shape (a checkpoint of another model size): stock cuts it to size;
- what test_block_fp8_fused_on_disk.py says of tensors that are fused on disk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from dspark import formats
from dspark.formats import BLOCK, Format, Tensors
from hypothesis import given
from hypothesis import strategies as st
from k3.errors import assert_named, refuses
from k3.properties import examples
from merged import compat, kernels, marlin
from merged.formats import BLOCK_FP8, block_scale
from merged.layers import PREFIX, SIZES, Bench, Checkpoint, Layer, Shape, merged, qkv

pytest_plugins = ("merged.fixtures",)

every_format = pytest.mark.parametrize("form", BLOCK_FP8, ids=str)
PARTIAL = (
    merged(192, 64, unsharded=True),
    merged(576, 576, unsharded=True),
    merged(1536, 576, unsharded=True),
    merged(64, 200, 128, unsharded=True),
    merged(1, 1, 1, unsharded=True),
    merged(576, 576, 576, cols=128, unsharded=True),
    qkv(64, 3, 1, unsharded=True),
    qkv(96, 5, 3, unsharded=True),
)
WHOLE = (
    merged(128, 256),
    merged(512, 512),
    merged(512, 512, 1024, cols=128),
    qkv(128, 4, 4),
    qkv(128, 8, 2),
    qkv(128, 4, 1),
    merged(128, 192, unsharded=True),
)


def assert_right(layer: Layer, checkpoint: Checkpoint) -> None:
    """Every element by which the layer multiplies is the checkpoint's."""
    actual, expected = layer.matrix(), layer.shape.share(checkpoint.read(), layer.size, layer.rank)
    assert actual.shape == expected.shape
    wrong = ~((actual - expected).abs() <= formats.ALGEBRA * expected.abs())
    assert not wrong.any(), (
        f"rank {layer.rank} of {layer.size}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, "
        f"the first in row {int(wrong.any(1).nonzero()[0])}"
    )


@every_format
@pytest.mark.parametrize("shape", PARTIAL, ids=str)
def test_matrices_that_end_inside_a_block(bench: Bench, form: Format, shape: Shape) -> None:
    checkpoint = Checkpoint.random(form, shape, 1)
    for size in SIZES:
        for rank in {0, size - 1}:
            assert_right(bench.load(checkpoint, shape, size, rank), checkpoint)


@every_format
@pytest.mark.parametrize("shape", WHOLE, ids=str)
def test_matrices_of_whole_blocks(bench: Bench, form: Format, shape: Shape) -> None:
    checkpoint = Checkpoint.random(form, shape, 1)
    for size in SIZES:
        cut = not shape.unsharded and any(rows % (size * BLOCK) for rows in shape.rows)
        if cut and not (shape.heads and shape.heads[1] % size == 0):
            continue  # inside a block
        for rank in range(size):
            assert_right(bench.load(checkpoint, shape, size, rank), checkpoint)


FUSED = (PARTIAL[0], PARTIAL[3], merged(100, 100, unsharded=True), merged(100, 156), qkv(96, 3, 1), qkv(64, 3, 1))


@every_format
@pytest.mark.parametrize("shape", FUSED, ids=str)
def test_matrices_that_are_fused_on_disk(bench: Bench, form: Format, shape: Shape) -> None:
    """Blocks of a fused tensor are counted from its own first row, wherever one matrix ends and the next begins."""
    checkpoint = Checkpoint.random(form, shape.fused(), 1)
    layer = bench.load(checkpoint, shape)
    assert_right(layer, checkpoint)
    for seed in (2, 3):
        checkpoint = Checkpoint.random(form, shape.fused(), seed)
        layer.reload(checkpoint)
        assert_right(layer, checkpoint)


@every_format
@examples(25)
@given(rows=st.lists(st.integers(1, 300), min_size=2, max_size=3), blocks=st.integers(1, 3), seed=st.integers(0, 9))
def test_any_sizes(bench: Bench, form: Format, rows: list[int], blocks: int, seed: int) -> None:
    shape = merged(*rows, cols=blocks * BLOCK, unsharded=True)
    checkpoint = Checkpoint.random(form, shape, seed)
    assert_right(bench.load(checkpoint, shape), checkpoint)


@pytest.mark.parametrize("shape", PARTIAL[:4], ids=str)
def test_scales_that_are_powers_of_two(bench: Bench, shape: Shape) -> None:
    """DeepSeek's format with E8M0 scales."""

    def write(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
        tensors = formats.FP8_DEEPSEEK.write(rows, cols, scale, generator)
        exponents = tensors["weight_scale_inv"].log2().floor()
        return {**tensors, "weight_scale_inv": exponents.exp2().to(torch.float8_e8m0fnu)}

    form = replace(formats.FP8_DEEPSEEK, name="FP8 block, E8M0", write=write)
    bench.config(form).quant_config.is_scale_e8m0 = True
    checkpoint = Checkpoint.random(form, shape, 1)
    assert_right(bench.load(checkpoint, shape), checkpoint)


@every_format
@pytest.mark.parametrize("shape", [*PARTIAL[:1], *PARTIAL[3:4], *PARTIAL[6:7], *WHOLE[:1]], ids=str)
def test_a_bias_belongs_to_the_layers_rows(bench: Bench, form: Format, shape: Shape) -> None:
    checkpoint = Checkpoint.random(form, shape, 1, bias=True)
    layer = bench.load(checkpoint, shape)
    assert checkpoint.biases is not None
    bias = torch.cat(checkpoint.biases).double()
    zero = layer(torch.zeros(3, shape.cols, dtype=torch.float64))
    assert torch.equal(zero, bias.expand(3, -1))
    x = torch.randn(3, shape.cols, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    matrix = torch.cat(checkpoint.read())
    off = (layer(x) - bias - x @ matrix.T).abs()
    assert bool((off <= formats.ALGEBRA * (x.abs() @ matrix.abs().T + bias.abs())).all())


@every_format
@pytest.mark.parametrize("shape", PARTIAL, ids=str)
def test_a_kernel_reads_finite_numbers_only(bench: Bench, form: Format, shape: Shape) -> None:
    """In padding too, under finite scales."""
    checkpoint = Checkpoint.random(form, shape, 1)
    layer = bench.load(checkpoint, shape, kernels=kernels.STRICT_BLOCKS)
    assert_right(layer, checkpoint)


@every_format
@pytest.mark.parametrize("shape", [*PARTIAL, WHOLE[0]], ids=str)
def test_the_layers_width_is_its_outputs(bench: Bench, form: Format, shape: Shape) -> None:
    """LoRA, among others, takes it from the layer, before and after loading."""
    checkpoint = Checkpoint.random(form, shape, 1)
    layer = bench.build(form, shape)
    for load in (lambda: None, lambda: layer.load(checkpoint), lambda: layer.reload(checkpoint)):
        load()
        assert layer.module.output_size_per_partition == sum(shape.rows)
        assert sum(layer.module.logical_widths) == sum(shape.rows)


def assert_right_on_marlin(layer: Layer, checkpoint: Checkpoint) -> None:
    shape, matrix = layer.shape, torch.cat(checkpoint.read())
    bias = torch.cat(checkpoint.biases).double() if checkpoint.biases else torch.zeros(len(matrix))
    assert layer.module.output_size_per_partition == len(matrix)
    assert torch.equal(layer(torch.zeros(3, shape.cols, dtype=torch.float64)), bias.double().expand(3, -1))
    off = (layer(torch.eye(shape.cols, dtype=torch.float64)).T - bias[:, None] - matrix).abs()
    assert bool((off <= marlin.ROUNDING * matrix.abs() + 1e-12 * bias.abs()[:, None]).all())


@every_format
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [*PARTIAL, WHOLE[0]], ids=str)
def test_marlin(bench: Bench, form: Format, shape: Shape, bias: bool) -> None:
    """Its preparation permutes the layer's bias, and both it and the kernel take the layer's width from the layer."""
    if not marlin.reads(block_scale(form)):
        pytest.skip("absent: this release's Marlin kernel looks for scales by another name")
    checkpoint = Checkpoint.random(form, shape, 1, bias=bias)
    with marlin.on_cpu():
        layer = bench.load(checkpoint, shape, kernels=marlin.MARLIN)
        assert_right_on_marlin(layer, checkpoint)
        for seed in () if bias else (2, 3):
            checkpoint = Checkpoint.random(form, shape, seed)
            layer.reload(checkpoint)
            assert_right_on_marlin(layer, checkpoint)


def marlin_needs_a_workspace() -> bool:
    """Whether Marlin reads one that its post-load step leaves beside the parameters, as up to 0.30.0."""
    from vllm.model_executor.kernels.linear.scaled_mm.marlin import MarlinFP8ScaledMMLinearKernel

    return "layer.workspace" in inspect.getsource(MarlinFP8ScaledMMLinearKernel.apply_weights)


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused on disk"])
@pytest.mark.parametrize("kind", [kernels.STRICT_BLOCKS, marlin.MARLIN], ids=["blocks", "Marlin"])
def test_weights_that_were_stored_as_the_kernel_reads_them(
    bench: Bench, kind: dict[str, Callable[..., Any]], fused: bool
) -> None:
    """A cache of processed weights: their own step is not run again."""
    if not compat.has_weight_cache():
        pytest.skip("absent: this release has none")
    if kind is marlin.MARLIN and marlin_needs_a_workspace():
        pytest.skip("absent: this release's Marlin kernel cannot run from the cache, which has no workspace for it")
    shape = PARTIAL[3]
    checkpoint = Checkpoint.random(formats.FP8_DEEPSEEK, shape.fused() if fused else shape, 1, bias=True)
    with marlin.on_cpu():
        written = bench.load(checkpoint, shape, kernels=kind)
        read = bench.build(formats.FP8_DEEPSEEK, shape, bias=True, kernels=kind)
        read.load_processed(dict(written.module.named_parameters()))
        x = torch.eye(shape.cols, dtype=torch.float64)
        assert torch.equal(read(x), written(x))
    assert read.module.output_size_per_partition == sum(shape.rows)


@every_format
@pytest.mark.parametrize("shape", [WHOLE[0], WHOLE[3]], ids=str)
def test_methods_that_create_the_weights_themselves(bench: Bench, form: Format, shape: Shape) -> None:
    """As those of plugins do that subclass vLLM's."""
    checkpoint = Checkpoint.random(form, shape, 1)
    with compat.own_create_weights(block_scale(form)):
        layer = bench.build(form, shape)
    layer.load(checkpoint)
    assert_right(layer, checkpoint)


@every_format
@pytest.mark.parametrize("shape", [PARTIAL[0], PARTIAL[3], PARTIAL[6]], ids=str)
def test_a_reloaded_layer_has_the_new_matrices(bench: Bench, form: Format, shape: Shape) -> None:
    layer = bench.load(Checkpoint.random(form, shape, 1), shape)
    for seed in (2, 3):
        checkpoint = Checkpoint.random(form, shape, seed)
        layer.reload(checkpoint)
        assert_right(layer, checkpoint)


@every_format
@pytest.mark.parametrize("kind", ["weight", "scale"])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("shape", [PARTIAL[3], PARTIAL[6]], ids=str)
def test_a_missing_tensor_is_named(bench: Bench, form: Format, shape: Shape, index: int, kind: str) -> None:
    name = "weight" if kind == "weight" else block_scale(form)
    whole = Checkpoint.random(form, shape, 1)
    layer = bench.build(form, shape)
    with refuses() as refused:
        layer.load(whole.changed(index, **{name: None}))
    assert_named(refused.value, name)
    assert_named(refused.value, PREFIX + shape.name)


@every_format
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_scale_that_is_none_is_named(bench: Bench, form: Format, index: int, value: float) -> None:
    shape, name = PARTIAL[3], block_scale(form)
    whole = Checkpoint.random(form, shape, 1)
    scale = whole.matrices[index][name].clone()
    scale[-1, 1] = value
    layer = bench.build(form, shape)
    with refuses() as refused:
        layer.load(whole.changed(index, **{name: scale}))
    assert_named(refused.value, name)
    assert_named(refused.value, PREFIX + shape.name)


@every_format
@pytest.mark.parametrize("kind", ["weight", "scale"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_tensor_of_another_shape_is_named(bench: Bench, form: Format, index: int, kind: str) -> None:
    shape, name = PARTIAL[3], "weight" if kind == "weight" else block_scale(form)
    whole = Checkpoint.random(form, shape, 1)
    tensor = whole.matrices[index][name]
    layer = bench.build(form, shape)
    with refuses() as refused:
        layer.load(whole.changed(index, **{name: torch.cat([tensor, tensor])}))
    assert_named(refused.value, name)
    assert_named(refused.value, PREFIX + shape.name)
