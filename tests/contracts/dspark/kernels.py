"""float64 kernels that stand where vLLM's CUDA linear kernels stand, one for each family of formats.

They multiply by the matrix that the layer's operands mean after loading. Activations are not rounded, so that what
a layer computes shows its matrix; what a CUDA kernel would read out of place is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from .formats import MXFP8_GROUP, NVFP4_GROUP, blocks, e2m1, under_blocks


class Kernel:
    """What the linear methods ask of any kernel."""

    supports_pre_processed_weights = False

    def input_quant_key(self) -> None:
        """The kernel quantizes its own input."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Operands stay as the method left them."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x.double() @ self.matrix(layer, x.shape[-1]).T
        if bias is not None:
            out = out + bias
        return out if x.dtype == torch.float64 else out.to(x.dtype)

    def matrix(self, layer: torch.nn.Module, cols: int) -> torch.Tensor:
        """float64 [rows, cols] of a layer's operands."""
        raise NotImplementedError


def _rows_first(weight: torch.Tensor, cols: int) -> torch.Tensor:
    """[rows, cols] of a weight that a method may have transposed."""
    return weight if weight.shape[1] == cols else weight.T


class ScaledKernel(Kernel):
    """E4M3 under one scale a tensor or one a row."""

    def matrix(self, layer: torch.nn.Module, cols: int) -> torch.Tensor:
        weight, scale = _rows_first(layer.weight, cols).double(), layer.weight_scale.double().flatten()
        if scale.numel() not in (1, weight.shape[0]):
            raise RuntimeError(f"FP8 kernel: {scale.numel()} scales for weight {tuple(weight.shape)}")
        return weight * (scale if scale.numel() == 1 else scale[:, None])


class BlockKernel(Kernel):
    """E4M3 under one scale for each block of 128 x 128, the last of which may be partial."""

    def matrix(self, layer: torch.nn.Module, cols: int) -> torch.Tensor:
        scale = layer.weight_scale_inv if hasattr(layer, "weight_scale_inv") else layer.weight_scale
        if layer.weight.shape[1] != cols or tuple(scale.shape) != blocks(*layer.weight.shape):
            raise RuntimeError(f"block-FP8 kernel: {tuple(scale.shape)} scales for {tuple(layer.weight.shape)}")
        return under_blocks(layer.weight, scale)


class Nvfp4Kernel(Kernel):
    """Packed E2M1 under E4M3 group scales and one FP32 scale; with FP4 activations that scale is part of alpha."""

    def matrix(self, layer: torch.nn.Module, cols: int) -> torch.Tensor:
        if layer.weight.shape[1] * 2 != cols:
            raise RuntimeError(f"NVFP4 kernel: weight {tuple(layer.weight.shape)} for {cols} columns")
        if hasattr(layer, "alpha"):
            scale = layer.alpha.double() * layer.input_global_scale_inv.double()
        else:
            scale = layer.weight_global_scale.double()
        if scale.numel() != 1:
            raise RuntimeError(f"NVFP4 kernel: {scale.numel()} global scales")
        return e2m1(layer.weight) * layer.weight_scale.double().repeat_interleave(NVFP4_GROUP, 1) * scale.flatten()


class Mxfp8Kernel(Kernel):
    """E4M3 under one power of two (E8M0 byte) for every 32 columns."""

    def matrix(self, layer: torch.nn.Module, cols: int) -> torch.Tensor:
        scale = torch.exp2(layer.weight_scale.double() - 127)
        return layer.weight.double() * scale.repeat_interleave(MXFP8_GROUP, 1)


def fp8(*_: Any, weight_quant_key: Any, **__: Any) -> Kernel:
    """Stands for vLLM's choice of an FP8 kernel."""
    shape = weight_quant_key.scale.group_shape
    return BlockKernel() if shape.row > 1 and shape.col > 1 else ScaledKernel()


def nvfp4(*_: Any, **__: Any) -> Kernel:
    """Stands for vLLM's choice of an NVFP4 kernel."""
    return Nvfp4Kernel()


def mxfp8(*_: Any, **__: Any) -> Kernel:
    """Stands for vLLM's choice of an MXFP8 kernel."""
    return Mxfp8Kernel()
