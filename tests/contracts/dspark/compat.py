"""The one place that knows how vLLM's releases differ around the drafter, and what a machine without a GPU lacks."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm.config.vllm as vllm_config_module
from k3 import compat as k3_compat
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.models.kimi_k3.nvidia import dspark_mla
from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model as load_dspark_model

from . import kernels, ops

# What builds the model inside load_dspark_model, whichever loader is chosen.
LOADER = "vllm.model_executor.model_loader.base_loader"
QUANTIZATION = "vllm.model_executor.layers.quantization"
LINEAR_METHODS = (
    f"{QUANTIZATION}.modelopt",
    f"{QUANTIZATION}.fp8",
    f"{QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8",
    f"{QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",
)
CHOOSERS = {
    "init_fp8_linear_kernel": kernels.fp8,
    "init_nvfp4_linear_kernel": kernels.nvfp4,
    "init_mxfp8_linear_kernel": kernels.mxfp8,
}


@contextlib.contextmanager
def configurable() -> Iterator[None]:
    """While this holds, a configuration with a drafter is accepted without Triton, of which no kernel runs here."""
    with mock.patch.object(vllm_config_module, "HAS_TRITON", True):
        yield


def speculative_config(folder: str, target: ModelConfig, parallel: ParallelConfig) -> SpeculativeConfig:
    """What `--speculative-config` makes of a drafter's folder."""
    return SpeculativeConfig(
        method="dspark",
        model=folder,
        num_speculative_tokens=4,
        target_model_config=target,
        target_parallel_config=parallel,
    )


@contextlib.contextmanager
def loadable(built: Callable[[torch.nn.Module], None] | None = None) -> Iterator[None]:
    """While this holds, load_dspark_model works without a GPU; `built` sees the model before its weights do."""
    loader = importlib.import_module(LOADER)
    initialize = loader.initialize_model

    def initialize_and_tell(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = initialize(*args, **kwargs)
        if built is not None:
            built(model)
        return model

    # vLLM keeps rotary tables for all models of a process; one that a refused reload took apart is nobody else's.
    rotary_embedding._ROPE_DICT.clear()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(configurable())
        enter(k3_compat.buildable())
        enter(mock.patch.object(loader, "initialize_model", initialize_and_tell))
        enter(without_accelerator())
        enter(mock.patch.object(dspark_mla.ops, "scaled_fp8_quant", ops.scaled_fp8_quant))
        # kv_b's absorption is no part of these promises, and kv_b_proj need not be one that it can dequantize.
        enter(mock.patch.object(MultiHeadLatentAttention, "process_weights_after_loading"))
        for name in LINEAR_METHODS:
            module = importlib.import_module(name)
            for chooser, stand_in in CHOOSERS.items():
                if hasattr(module, chooser):
                    enter(mock.patch.object(module, chooser, stand_in))
        yield


@contextlib.contextmanager
def without_accelerator() -> Iterator[None]:
    """What torch raises at where there is no accelerator: its cache is empty, and nothing is being captured."""
    with (
        mock.patch.object(torch.accelerator, "empty_cache"),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        yield


@contextlib.contextmanager
def cuda_ops(caches: list[torch.Tensor]) -> Iterator[None]:
    """While this holds, CUDA's operators are their definitions; `caches` are those that a pointer may name."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(without_accelerator())
        enter(mock.patch.object(torch.nn.functional, "linear", ops.linear))
        custom = dspark_mla.ops
        enter(mock.patch.object(custom, "rms_norm", ops.rms_norm))
        enter(mock.patch.object(custom, "rotary_embedding", ops.rotary_embedding))
        enter(mock.patch.object(custom, "concat_and_cache_mla", ops.concat_and_cache_mla))
        enter(mock.patch.object(custom, "concat_and_cache_mla_grouped", ops.grouped_insert(caches)))
        yield


@contextlib.contextmanager
def idle_cuda_ops() -> Iterator[None]:
    """While this holds, CUDA's operators do nothing, so that only the model's own operations are left to see."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_accelerator())
        stack.enter_context(mock.patch.object(torch.nn.functional, "linear", ops.linear))
        for name in ("rms_norm", "rotary_embedding", "concat_and_cache_mla", "concat_and_cache_mla_grouped"):
            stack.enter_context(mock.patch.object(dspark_mla.ops, name))
        yield


@contextlib.contextmanager
def workspace_manager() -> Iterator[workspace.WorkspaceManager]:
    """A fresh workspace on the CPU, as the model runner makes one."""
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    try:
        yield workspace.current_workspace_manager()
    finally:
        workspace.reset_workspace_manager()


def duplicated(weights: Iterable[tuple[str, torch.Tensor]], layers: int) -> list[tuple[str, torch.Tensor]]:
    """What reaches the model's loaders, under runtime names, of a checkpoint's tensors."""
    twice = dspark_mla._duplicate_context_kv_weights(weights, layers)
    return list(dspark_mla.K3DSparkForCausalLM.hf_to_vllm_mapper.apply(twice))


@contextlib.contextmanager
def metadata_builds() -> Iterator[mock.Mock]:
    """While this holds, the returned mock counts how often the fused projection's metadata is built."""
    build = dspark_mla.K3DSparkModel._build_fused_context_kv_metadata
    with mock.patch.object(
        dspark_mla.K3DSparkModel, "_build_fused_context_kv_metadata", autospec=True, side_effect=build
    ) as counted:
        yield counted


@contextlib.contextmanager
def recorded_projections() -> Iterator[list[dict[str, Any]]]:
    """While this holds, arguments with which the drafter's own module makes merged projections are listed."""
    made: list[dict[str, Any]] = []
    real = dspark_mla.MergedColumnParallelLinear
    signature = inspect.signature(real.__init__)

    class Recorded(real):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(dict(signature.bind(self, *args, **kwargs).arguments))
            super().__init__(*args, **kwargs)

    with mock.patch.object(dspark_mla, "MergedColumnParallelLinear", Recorded):
        yield made


@contextlib.contextmanager
def bare_drafter(config: SimpleNamespace) -> Iterator[tuple[torch.nn.Module, list[tuple[tuple, dict]]]]:
    """K3DSparkModel with nothing real in it, and how it asked for merged projections."""
    calls: list[tuple[tuple, dict]] = []

    class Empty(torch.nn.Module):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    def projection(*args: Any, **kwargs: Any) -> Empty:
        calls.append((args, kwargs))
        return Empty()

    vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dspark_mla, "get_draft_quant_config", return_value=None))
        stack.enter_context(mock.patch.object(dspark_mla, "MergedColumnParallelLinear", projection))
        for name in ("ReplicatedLinear", "RMSNorm", "K3DSparkDecoderLayer", "DSparkMarkovHead"):
            stack.enter_context(mock.patch.object(dspark_mla, name, Empty))
        yield dspark_mla.K3DSparkModel(vllm_config=vllm_config, start_layer_id=0, prefix="model"), calls
