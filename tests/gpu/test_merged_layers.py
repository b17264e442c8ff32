"""nvfp4-merged-scales, block-fp8-merged-shards and layerwise-reload-storage with the real kernels against float64.

    pytest tests/gpu/test_merged_layers.py

Runs on the vLLM that is installed, which chooses the kernels.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NVFP4: tuple[Any, ...] = ()
BLOCK_FP8: tuple[Any, ...] = ()
NVFP4_SHAPES: tuple[Any, ...] = ()
ODD_SHAPES: tuple[Any, ...] = ()
BLOCK_SHAPES: tuple[Any, ...] = ()
if torch.cuda.is_available():
    import merged_linear

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contracts"))
    from merged.formats import BLOCK_FP8, NVFP4
    from merged.layers import Checkpoint, merged, qkv

    NVFP4_SHAPES = merged(512, 256, cols=1024), merged(256, 512, 128, cols=1024), qkv(128, 4, 2, cols=1024)
    # Rows that Marlin pads, and the bias with them.
    ODD_SHAPES = (merged(96, 48, 32, cols=1024),)
    BLOCK_SHAPES = (
        merged(1536, 576, cols=1024, unsharded=True),
        merged(64, 200, 128, cols=1024, unsharded=True),
        qkv(64, 3, 1, cols=1024, unsharded=True),
    )

APART = (5.3, 0.171, 1.0)
TOKENS = 129


def allowed(form: Any) -> float:
    """The relative error that roundings explain: BF16 ones of weights and results, and those of quantized inputs."""
    if form in BLOCK_FP8:
        # E4M3: at most 1/16 of each value, 1/16/sqrt(3) rms; twice where DeepGEMM requantizes the weight too.
        return 1 / 16 / 3**0.5 * 2**0.5
    if torch.cuda.get_device_capability()[0] < 10:
        return 2**-7  # no kernel before Blackwell quantizes inputs to E2M1
    return 0.15  # E2M1 under E4M3 group scales: at most 1/4 of each value


def assert_right(layer: Any, checkpoint: Any) -> None:
    """Each matrix's outputs, so that none hides behind a larger one."""
    x = torch.randn(TOKENS, layer.shape.cols, device="cuda").bfloat16()
    outputs = layer(x).double()
    if checkpoint.biases is not None:
        bias = torch.cat(checkpoint.biases).cuda()
        assert torch.equal(layer(torch.zeros_like(x)), bias.expand(TOKENS, -1)), "not the checkpoint's bias"
        outputs -= bias.double()
    with torch.device("cpu"):
        matrices = [matrix.cuda() for matrix in checkpoint.read()]
    for index, (got, matrix) in enumerate(
        zip(outputs.split([len(matrix) for matrix in matrices], 1), matrices, strict=True)
    ):
        want = x.double() @ matrix.T
        error = float((got - want).norm() / want.norm())
        assert error < allowed(checkpoint.form), f"matrix {index}: {error:.3g}"
        rows = (got - want).norm(dim=0) / want.norm(dim=0)
        assert float(rows.max()) < 3 * allowed(checkpoint.form), f"row {int(rows.argmax())} of matrix {index}"


def made(form: Any, shape: Any, seed: int, scales: tuple[float, ...] = APART, bias: bool = False) -> Any:
    with torch.device("cpu"):
        return Checkpoint.random(form, shape, seed, scales[: len(shape.rows)] if form in NVFP4 else (), bias)


CASES = [(form, shape) for form in NVFP4 for shape in NVFP4_SHAPES] + [
    (form, shape) for form in BLOCK_FP8 for shape in BLOCK_SHAPES
]


@pytest.mark.parametrize(("form", "shape"), CASES, ids=str)
def test_each_matrix_has_its_own_scales(form: Any, shape: Any) -> None:
    checkpoint = made(form, shape, 1)
    with merged_linear.loaded(checkpoint, shape) as layer:
        assert_right(layer, checkpoint)


@pytest.mark.parametrize(("form", "shape"), CASES, ids=str)
def test_a_reload_brings_the_new_matrices_to_where_the_old_ones_were(form: Any, shape: Any) -> None:
    with merged_linear.loaded(made(form, shape, 1), shape) as layer:
        x = torch.randn(16, shape.cols, device="cuda").bfloat16()
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(x)
        where = {name: parameter.data_ptr() for name, parameter in layer.module.named_parameters()}
        held = torch.cuda.memory_allocated()
        checkpoint = made(form, shape, 2, APART[1:] + APART[:1])
        layer.reload(checkpoint)
        assert {name: parameter.data_ptr() for name, parameter in layer.module.named_parameters()} == where
        assert_right(layer, checkpoint)
        graph.replay()
        torch.testing.assert_close(captured, layer(x), rtol=0, atol=0)
        gc.collect()
        assert torch.cuda.memory_allocated() - held < sum(p.numel() for p in layer.module.parameters())


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.5, 0.25, 1.0), APART], ids=str)
@pytest.mark.parametrize(
    ("form", "shape"), [(form, shape) for form in NVFP4 for shape in NVFP4_SHAPES + ODD_SHAPES], ids=str
)
def test_a_bias_is_added_in_the_checkpoints_order(form: Any, shape: Any, scales: tuple[float, ...]) -> None:
    checkpoint = made(form, shape, 1, scales, bias=True)
    with merged_linear.loaded(checkpoint, shape) as layer:
        assert_right(layer, checkpoint)


@pytest.mark.parametrize("scales", [(0.5, 0.5, 0.5), (0.5, 0.25, 1.0)], ids=str)
@pytest.mark.parametrize(("form", "shape"), [(form, shape) for form in NVFP4 for shape in NVFP4_SHAPES], ids=str)
def test_real_weights_after_dummy_ones_are_right_in_the_captured_graph(
    form: Any, shape: Any, scales: tuple[float, ...]
) -> None:
    with merged_linear.built(form, shape) as layer:
        layer.load_dummy()
        x = torch.randn(16, shape.cols, device="cuda").bfloat16()
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(x)
        checkpoint = made(form, shape, 2, scales)
        layer.reload(checkpoint)
        assert_right(layer, checkpoint)
        graph.replay()
        torch.testing.assert_close(captured, layer(x), rtol=0, atol=0)
