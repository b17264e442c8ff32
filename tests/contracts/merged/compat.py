"""The one place that knows where vLLM's releases choose linear kernels, and what a machine without a GPU lacks."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from dspark import kernels
from dspark.formats import NVFP4_GROUP, e2m1
from vllm.model_executor.layers.linear import MergedColumnParallelLinear as MergedColumnParallelLinear
from vllm.model_executor.layers.linear import QKVParallelLinear as QKVParallelLinear

QUANTIZATION = "vllm.model_executor.layers.quantization"
LINEAR_METHODS = (
    "modelopt",
    "fp8",
    "compressed_tensors.schemes.compressed_tensors_w8a8_fp8",
    "compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",
    "quark.schemes.quark_nvfp4",
)
CHOOSERS: Mapping[str, Callable[..., Any]] = {
    "init_fp8_linear_kernel": kernels.fp8,
    "init_nvfp4_linear_kernel": kernels.nvfp4,
    "init_mxfp8_linear_kernel": kernels.mxfp8,
}
TRANSFORM = f"{QUANTIZATION}.compressed_tensors.transform"


def _rotate(x: torch.Tensor, rotation: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """QuTLASS's fusedQuantizeNv without rounding: values that stand for scale times the rotated input."""
    groups = x.double().unflatten(-1, (-1, len(rotation))) @ rotation.double()
    return groups.flatten(-2) * scale.double(), torch.ones(1)


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, _: Any, scale: torch.Tensor, alpha: torch.Tensor, *__: Any, **___: Any
) -> torch.Tensor:
    """FlashInfer's FP4 GEMM on such values."""
    return x @ (e2m1(weight) * scale.double().repeat_interleave(NVFP4_GROUP, 1)).T * alpha.double()


@contextlib.contextmanager
def qutlass() -> Iterator[None]:
    """While this holds, rotated NVFP4 layers are run as on a Blackwell GPU, by QuTLASS and FlashInfer."""
    importlib.import_module(f"{QUANTIZATION}.compressed_tensors.compressed_tensors")  # which imports the others
    linear = importlib.import_module(f"{TRANSFORM}.linear")
    module = importlib.import_module(f"{TRANSFORM}.schemes.linear_qutlass_nvfp4")
    # vLLM keeps the addresses of the rotations that it has normalized; another test's are free again.
    importlib.import_module(f"{TRANSFORM}.module").HadamardTransform.scaled_data_ptrs.clear()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(linear, "current_platform", mock.Mock(has_device_capability=lambda _: True)))
        enter(mock.patch.object(module, "fusedQuantizeNv", _rotate))
        enter(mock.patch.object(module, "to_blocked", lambda scales, backend: scales))
        enter(mock.patch.object(module, "flashinfer_scaled_fp4_mm", _multiply))
        enter(mock.patch.object(module.QutlassNvFP4LinearMethod, "_get_flashinfer_gemm_backend", return_value=""))
        yield


@contextlib.contextmanager
def without_gpu(others: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While this holds, linear methods get float64 kernels, `others` before those above, and no cache is emptied."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(torch.accelerator, "empty_cache"))
        for name in LINEAR_METHODS:
            module = importlib.import_module(f"{QUANTIZATION}.{name}")
            for chooser, stand_in in {**CHOOSERS, **others}.items():
                if hasattr(module, chooser):
                    enter(mock.patch.object(module, chooser, stand_in))
        yield
