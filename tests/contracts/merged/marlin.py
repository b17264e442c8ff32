"""vLLM's own Marlin kernel for block FP8, on CPU: its real preparation, with float64 in place of its CUDA operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from vllm import _custom_ops
from vllm.model_executor.kernels.linear import MarlinFP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp8

# Marlin keeps scales in the model's dtype, here BF16, each rounded once.
ROUNDING = 2.0**-8


class MarlinKernel(MarlinFP8ScaledMMLinearKernel):
    """As it is chosen for block scales below compute capability 8.9."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.block_quant, self.size_k_first, self.marlin_input_dtype = True, False, None


def _repack(*, b_q_weight: torch.Tensor, size_k: int, size_n: int, **_: Any) -> torch.Tensor:
    """The shape of a repacked weight, and the numbers where they were: [k / 4, n] words of four rows each."""
    assert tuple(b_q_weight.shape) == (size_k // 4, size_n)
    assert size_n % 64 == 0
    assert size_k % 64 == 0
    return b_q_weight.reshape(size_k // 16, size_n * 4)


def _unpermuted(permuted: torch.Tensor, permute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    places = permute(torch.arange(permuted.numel()).view(permuted.shape)).flatten()
    out = torch.empty_like(permuted).flatten()
    out[places] = permuted.flatten()
    return out.view(permuted.shape)


def _gemm(
    *, a: torch.Tensor, b_q_weight: torch.Tensor, b_bias: torch.Tensor | None, b_scales: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """What Marlin computes of operands that are laid out as its preparation does."""
    rows, cols = kwargs["size_n"], kwargs["size_k"]
    weight = b_q_weight.reshape(cols // 4, rows).T.contiguous().view(torch.float8_e4m3fn).double()
    group = cols // len(b_scales)
    scales = _unpermuted(b_scales, lambda s: marlin_utils.marlin_permute_scales(s, cols, rows, group))
    exponent = {torch.bfloat16: 120, torch.float16: 8}[scales.dtype]
    matrix = weight * torch.ldexp(scales.double(), torch.tensor(-exponent)).T.repeat_interleave(group, 1)
    out = a.double() @ matrix.T
    if b_bias is not None:
        out = out + _unpermuted(b_bias, marlin_utils.marlin_permute_bias).double()
    return out.to(a.dtype)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """While this holds, Marlin's operators are float64."""

    def workspace(device: torch.device, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32)

    with contextlib.ExitStack() as stack:
        for holder, name, stand_in in (
            (_custom_ops, "gptq_marlin_repack", _repack),
            (_custom_ops, "marlin_gemm", _gemm),
            (torch.ops.vllm, "marlin_gemm", _gemm),
            (marlin_utils_fp8, "marlin_make_workspace_new", workspace),
        ):
            stack.enter_context(mock.patch.object(holder, name, stand_in, create=True))
        yield


def reads(scale: str) -> bool:
    """Whether this release's kernel finds scales by the name that their format gives them."""
    return scale == "weight_scale_inv" or hasattr(MarlinFP8ScaledMMLinearKernel, "_block_scale_name")


MARLIN: dict[str, Callable[..., Any]] = {"init_fp8_linear_kernel": MarlinKernel}
