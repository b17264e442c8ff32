"""float64 kernels that show more of a layer than its matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from dspark.formats import NVFP4_GROUP, e2m1
from dspark.kernels import BlockKernel, Nvfp4Kernel
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4


class ClampingNvfp4Kernel(Nvfp4Kernel):
    """Holds the inputs that E4M3 group scales of E2M1 numbers can stand for under the inputs' global scale."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        largest = 6 * 448 / layer.input_global_scale_inv.double()
        return super().apply_weights(layer, torch.minimum(torch.maximum(x, -largest), largest), bias)


class StrictBlockKernel(BlockKernel):
    """Refuses what isn't a number, in padding too."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scale = layer.weight_scale_inv if hasattr(layer, "weight_scale_inv") else layer.weight_scale
        if not (layer.weight.double().isfinite().all() and scale.double().isfinite().all()):
            raise RuntimeError("not a number")
        return super().apply_weights(layer, x, bias)


class MarlinNvfp4Kernel(Nvfp4Kernel):
    """vLLM's own preparation of a layer for Marlin, and a float64 product with what its tensors mean then.

    The order of the packed weight alone is the stand-in's: repacking is a permutation that CUDA does.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        with (
            mock.patch.object(marlin_utils_fp4.ops, "gptq_marlin_repack", lambda b_q_weight, **_: b_q_weight),
            mock.patch.object(marlin_utils_fp4, "marlin_make_workspace_new", create=True, return_value=None),
        ):
            marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = layer.output_size_per_partition
        if bias is not None:
            order = marlin_utils.marlin_permute_bias(torch.arange(layer.weight.shape[1]))
            bias = torch.zeros_like(bias).index_copy_(0, order, bias.detach())[:rows]
        return super().apply_weights(layer, x, bias)

    def matrix(self, layer: torch.nn.Module, cols: int) -> torch.Tensor:
        packed = layer.weight.T.contiguous().view(torch.uint8)
        rows, padded_cols = packed.shape[0], packed.shape[1] * 2
        groups = padded_cols // NVFP4_GROUP
        order = marlin_utils.marlin_permute_scales(
            torch.arange(groups * rows).view(groups, rows), padded_cols, rows, NVFP4_GROUP
        )
        # S0E5M3 is an FP16 number of which the sign is gone and 7 bits of its mantissa.
        scales = (layer.weight_scale.view(torch.uint8).to(torch.int16) << 7).view(torch.float16).double() / 2**7
        scales = scales.view(-1, 4)[:, [0, 2, 1, 3]].flatten()
        scales = torch.zeros_like(scales).index_copy_(0, order.flatten(), scales).view(groups, rows).T
        one = marlin_utils_fp4.nvfp4_marlin_process_global_scale(torch.ones(()), layer.params_dtype)
        scale = layer.weight_global_scale.double() / one.double()
        matrix = e2m1(packed) * scales.repeat_interleave(NVFP4_GROUP, 1) * scale
        return matrix[: layer.output_size_per_partition, :cols]


CLAMPING: dict[str, Callable[..., Any]] = {"init_nvfp4_linear_kernel": lambda *_, **__: ClampingNvfp4Kernel()}
MARLIN: dict[str, Callable[..., Any]] = {"init_nvfp4_linear_kernel": lambda *_, **__: MarlinNvfp4Kernel()}
STRICT_BLOCKS: dict[str, Callable[..., Any]] = {"init_fp8_linear_kernel": lambda *_, **__: StrictBlockKernel()}
