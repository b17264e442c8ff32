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
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter

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


def _nothing() -> None:
    """Thousands of these are needed, and each Mock would be a class of its own."""


@contextlib.contextmanager
def without_gpu(others: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While this holds, linear methods get float64 kernels, `others` before those above, and no cache is emptied."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(torch.accelerator, "empty_cache", _nothing))
        for name in LINEAR_METHODS:
            module = importlib.import_module(f"{QUANTIZATION}.{name}")
            for chooser, stand_in in {**CHOOSERS, **others}.items():
                if hasattr(module, chooser):
                    enter(mock.patch.object(module, chooser, stand_in))
        yield


def has_weight_cache() -> bool:
    """Whether this release can load weights as kernels read them."""
    return hasattr(importlib.import_module("vllm.model_executor.utils"), "weights_already_processed")


def weights_already_processed() -> contextlib.AbstractContextManager[None]:
    """What vLLM's loader of such weights says while it works."""
    return importlib.import_module("vllm.model_executor.utils").weights_already_processed()


@contextlib.contextmanager
def own_create_weights(scale: str) -> Iterator[None]:
    """While this holds, methods for block FP8 create plain weights, as a subclass might that overrides the step."""

    def create_weights(
        self: Any,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
        **_: Any,
    ) -> None:
        rows, cols = sum(output_partition_sizes), input_size_per_partition
        layer.logical_widths, layer.output_size_per_partition = output_partition_sizes, rows
        layer.input_size_per_partition, layer.orig_dtype = cols, params_dtype
        layer.weight_block_size = [128, 128]
        common = {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader}
        weight = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
        layer.register_parameter("weight", ModelWeightParameter(data=weight, **common))
        scales = torch.empty(-(-rows // 128), -(-cols // 128), dtype=torch.float32)
        layer.register_parameter(scale, BlockQuantScaleParameter(data=scales, **common))
        self.fp8_linear = kernels.BlockKernel()

    with contextlib.ExitStack() as stack:
        for module, method in (
            ("fp8", "Fp8LinearMethod"),
            ("compressed_tensors.schemes.compressed_tensors_w8a8_fp8", "CompressedTensorsW8A8Fp8"),
        ):
            kind = getattr(importlib.import_module(f"{QUANTIZATION}.{module}"), method)
            stack.enter_context(mock.patch.object(kind, "create_weights", create_weights))
        yield
