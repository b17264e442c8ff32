"""What a machine without a GPU lacks when any of the zoo's models is built and loaded, on any release."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from dspark import kernels, ops
from k3 import compat as k3_compat
from merged import compat as merged_compat


class ScaledKernel(kernels.ScaledKernel):
    """Knows a square weight that a method has transposed by its strides."""

    def matrix(self, layer: torch.nn.Module, cols: int) -> torch.Tensor:
        matrix = super().matrix(layer, cols)
        square = layer.weight.shape[0] == layer.weight.shape[1]
        return matrix.T if square and layer.weight.stride(1) != 1 and layer.weight_scale.numel() == 1 else matrix


def fp8(*_: Any, weight_quant_key: Any, **__: Any) -> kernels.Kernel:
    """Stands for vLLM's choice of an FP8 kernel."""
    chosen = kernels.fp8(weight_quant_key=weight_quant_key)
    return ScaledKernel() if type(chosen) is kernels.ScaledKernel else chosen


ALLOCATORS = ("empty", "empty_like", "empty_strided")


class _Attention:
    """An attention that is never run."""

    forward_includes_kv_cache_update = True
    accept_output_buffer = True

    class Impl:
        supports_quant_query_input = False

        def __init__(self, *_: Any, **__: Any) -> None:
            self.dcp_world_size = 1

        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            """Nothing to prepare."""

    get_impl_cls = staticmethod(lambda: _Attention.Impl)
    get_name = staticmethod(lambda: "TRITON_ATTN")
    supports_alibi_sqrt = staticmethod(lambda: False)
    is_sparse = staticmethod(lambda: False)
    full_cls_name = staticmethod(lambda: "")


def _poison(tensor: torch.Tensor, value: float) -> torch.Tensor:
    if tensor.device.type == "meta" or not tensor.numel():
        return tensor
    with torch.no_grad():
        if tensor.dtype.is_floating_point:
            largest = torch.finfo(tensor.dtype).max
            tensor.fill_(value if value != value else min(value, largest))
        elif tensor.dtype not in (torch.bool,):
            tensor.fill_(0x77)
    return tensor


@contextlib.contextmanager
def poisoned(value: float) -> Iterator[None]:
    """While this holds, memory that nobody wrote holds this number, bytes of it 0x77."""

    def fill(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: _poison(allocate(*args, **kwargs), value)

    with contextlib.ExitStack() as stack:
        for name in ALLOCATORS:
            stack.enter_context(mock.patch.object(torch, name, fill(getattr(torch, name))))
        new_empty = torch.Tensor.new_empty
        stack.enter_context(mock.patch.object(torch.Tensor, "new_empty", fill(new_empty)))
        yield


def _choosing(name: str) -> Iterator[Any]:
    """Modules of the attention layers and of the experts that hold this name."""
    for package in ("vllm.model_executor.layers.attention", "vllm.model_executor.layers.fused_moe"):
        found = importlib.import_module(package)
        for entry in pkgutil.iter_modules(found.__path__, package + "."):
            if entry.name.rpartition(".")[2] in ("attention", "mla_attention", "unquantized_fused_moe_method"):
                module = importlib.import_module(entry.name)
                if hasattr(module, name):
                    yield module


@contextlib.contextmanager
def without_gpu(others: dict[str, Callable[..., Any]] | None = None) -> Iterator[None]:
    """While this holds, models can be built and loaded; linear layers get float64 kernels, or `others`."""
    from vllm import _custom_ops as custom_ops
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.platforms import current_platform

    def attention(*_: Any, use_mla: bool = False, **__: Any) -> Any:
        return k3_compat._Backend if use_mla else _Attention

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(merged_compat.without_gpu({"init_fp8_linear_kernel": fp8, **(others or {})}))
        for module in _choosing("get_attn_backend"):
            enter(mock.patch.object(module, "get_attn_backend", attention))
        for module in _choosing("get_mla_prefill_backend"):
            enter(mock.patch.object(module, "get_mla_prefill_backend", return_value=k3_compat._Prefill))
        for module in _choosing("select_unquantized_moe_backend"):
            chosen = UnquantizedMoeBackend.TRITON, None
            enter(mock.patch.object(module, "select_unquantized_moe_backend", return_value=chosen))
            # Experts are laid out for a GPU's kernel after loading.
            enter(mock.patch.object(module.UnquantizedFusedMoEMethod, "process_weights_after_loading"))
        for name in ("Stream", "Event"):
            enter(mock.patch.object(torch.cuda, name, return_value=None))
        enter(mock.patch.object(custom_ops, "scaled_fp8_quant", ops.scaled_fp8_quant))
        here = lambda *_: torch.device("cpu")  # noqa: E731
        enter(mock.patch.object(type(current_platform), "current_device", here, create=True))
        yield
