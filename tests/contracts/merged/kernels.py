"""float64 kernels that show more of a layer than its matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dspark.kernels import BlockKernel, Nvfp4Kernel


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


CLAMPING: dict[str, Callable[..., Any]] = {"init_nvfp4_linear_kernel": lambda *_, **__: ClampingNvfp4Kernel()}
STRICT_BLOCKS: dict[str, Callable[..., Any]] = {"init_fp8_linear_kernel": lambda *_, **__: StrictBlockKernel()}
