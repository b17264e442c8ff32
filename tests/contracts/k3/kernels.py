"""float64 kernels that stand where vLLM's CUDA block-FP8 and MXFP8 linear kernels stand.

They take what those take: E4M3 rows in multiples of 128 and one FP32 scale a block. Nothing here repairs an
operand: what a CUDA kernel would read out of place is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .checkpoint import BLOCK


@dataclass
class PostLoad:
    """What a kernel's post-load step was given."""

    layer: torch.nn.Module
    weight: tuple[int, ...]
    scale: tuple[int, ...]


@dataclass
class Call:
    """One call of a kernel: the input as the kernel received it, and what it returned."""

    layer: torch.nn.Module
    x: torch.Tensor
    out: torch.Tensor


@dataclass
class Log:
    """What all kernels of one build were asked to do, in order."""

    post_loads: list[PostLoad] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def post_loads_of(self, layer: torch.nn.Module) -> list[PostLoad]:
        return [seen for seen in self.post_loads if seen.layer is layer]

    def calls_of(self, layer: torch.nn.Module) -> list[Call]:
        return [call for call in self.calls if call.layer is layer]


class _Kernel:
    """What vLLM asks of every linear kernel, noted down; the post-load step changes nothing."""

    supports_pre_processed_weights = False

    def __init__(self, log: Log) -> None:
        self.log = log

    def input_quant_key(self) -> None:
        """The kernel quantizes its own input."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.log.post_loads.append(PostLoad(layer, tuple(layer.weight.shape), tuple(layer.weight_scale.shape)))


class BlockKernel(_Kernel):
    """Reads weight and scales as loaded; its post-load step changes nothing (CUTLASS and Triton on Hopper)."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., cols] times the layer's matrix, transposed: [..., rows] in float64 (float32 for 16-bit input)."""
        compute = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight, scale = self.operands(layer)
        rows, cols = weight.shape
        if rows % BLOCK or cols % BLOCK or scale.dtype != torch.float32:
            raise RuntimeError(f"block-FP8 kernel: weight {tuple(weight.shape)}, scale {scale.dtype}")
        if tuple(scale.shape) != (rows // BLOCK, cols // BLOCK):
            raise RuntimeError(f"block-FP8 kernel: {tuple(scale.shape)} scales for weight {tuple(weight.shape)}")
        tiles = weight.to(compute).view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
        matrix = (tiles * scale.to(compute)[:, None, :, None]).view(rows, cols)
        out = x.to(compute) @ matrix.T
        if bias is not None:
            out = out + bias
        self.log.calls.append(Call(layer, x, out))
        return out

    def operands(self, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """(E4M3 [rows, cols], FP32 [rows/128, cols/128]) as this kernel keeps them."""
        return layer.weight, layer.weight_scale


class OpaqueKernel(BlockKernel):
    """Moves weight and scales into a layout that only it can read, as DeepGEMM does on Blackwell.

    The numbers stay the same. Without its post-load step, or after two of them, it can't run.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        weight, scale = layer.weight.data, layer.weight_scale.data
        if weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32 or scale.dim() != 2:
            raise RuntimeError(f"post-load step given {weight.dtype} weight, {scale.dtype} scales of {scale.dim()}-D")
        weight, scale = self.transform(weight, scale)
        self._replace(layer, "weight", weight.view(torch.uint8).T.contiguous())
        self._replace(layer, "weight_scale", scale.view(torch.int32).T.contiguous())

    def operands(self, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        if layer.weight.dtype != torch.uint8 or layer.weight_scale.dtype != torch.int32:
            raise RuntimeError("the kernel's post-load step has not run")
        return (
            layer.weight.data.T.contiguous().view(torch.float8_e4m3fn),
            layer.weight_scale.data.T.contiguous().view(torch.float32),
        )

    def transform(self, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The operands' values after the step: here unchanged."""
        return weight.contiguous(), scale.contiguous()

    @staticmethod
    def _replace(layer: torch.nn.Module, name: str, data: torch.Tensor) -> None:
        setattr(layer, name, torch.nn.Parameter(data, requires_grad=False))


class RequantizingKernel(OpaqueKernel):
    """Also rounds every scale up to a power of two and the weight with it: UE8M0, which loses bits."""

    def transform(self, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = torch.exp2(torch.ceil(torch.log2(scale)))
        blocks = (scale / rounded).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return (weight.float() * blocks).to(torch.float8_e4m3fn), rounded


class Mxfp8Kernel(_Kernel):
    """E4M3 rows with one power-of-two scale (E8M0 byte) for every 32 columns. Takes 16-bit inputs only."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scale = torch.exp2(layer.weight_scale.float() - 127).repeat_interleave(32, 1)
        out = x.float() @ (layer.weight.float() * scale).T
        self.log.calls.append(Call(layer, x, out))
        return out if bias is None else out + bias


class TraceableKernel(BlockKernel):
    """The same arithmetic with no log, for torch.compile: nothing but tensor operations in `apply_weights`."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, cols = layer.weight.shape
        tiles = layer.weight.float().view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
        matrix = (tiles * layer.weight_scale[:, None, :, None]).view(rows, cols)
        out = (x.float() @ matrix.T).to(x.dtype)
        return out if bias is None else out + bias


def factory(kind: type, log: Log) -> Any:
    """A stand-in for vLLM's kernel chooser: any arguments, always a kernel of this kind."""
    return lambda *args, **kwargs: kind(log)
