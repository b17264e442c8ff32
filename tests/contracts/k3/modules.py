"""Build vLLM's real modules on CPU from a checkpoint, as one rank of a tensor-parallel group, and load them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from . import compat, kernels
from .checkpoint import ALGORITHM

CPU = torch.device("cpu")
MODEL_DTYPE = torch.bfloat16
TP_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 96)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, so that nothing passes because an allocator happened to return zeros."""
    kept = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kept)


def vllm_config(folder: Path, quantization: str | None = None) -> VllmConfig:
    """vLLM's configuration of a checkpoint folder, for CPU; `quantization` is the user's --quantization."""
    model = ModelConfig(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        quantization=quantization,
    )
    return VllmConfig(model_config=model, device_config=DeviceConfig(device="cpu"))


@dataclass
class Model:
    """A model as one rank holds it."""

    module: torch.nn.Module
    config: VllmConfig
    log: kernels.Log
    size: int
    rank: int

    def attention(self, layer: int) -> torch.nn.Module:
        return compat.attention(self.module, layer)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The model's own load_weights, then vLLM's post-load steps."""
        with compat.tensor_parallel(self.size, self.rank), self._context():
            self.module.load_weights(weights)
            process_weights_after_loading(self.module, self.config.model_config, CPU)

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """New values into the loaded model, in the way vLLM's reload_weights takes."""
        with compat.tensor_parallel(self.size, self.rank), self._context():
            initialize_layerwise_reload(self.module)
            self.module.load_weights(weights)
            finalize_layerwise_reload(self.module, self.config.model_config)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with (
            poisoned_memory(),
            torch.no_grad(),
            set_current_vllm_config(self.config),
            set_default_torch_dtype(MODEL_DTYPE),
        ):
            yield


def build(
    config: VllmConfig,
    *,
    size: int = 1,
    rank: int = 0,
    part: str = "target",
    kernel: type = kernels.BlockKernel,
) -> Model:
    """Build the text model (`target`), its MTP draft (`mtp`) or AMD's text model (`amd`), unloaded."""
    log = kernels.Log()
    config.compilation_config.static_forward_context.clear()
    with (
        compat.buildable(),
        compat.linear_kernels(kernels.factory(kernel, log), kernels.factory(kernels.Mxfp8Kernel, log)),
        compat.tensor_parallel(size, rank),
        poisoned_memory(),
        torch.no_grad(),
        set_default_torch_dtype(MODEL_DTYPE),
    ):
        module = initialize_model(
            config,
            # The multimodal model names its text model so; the draft is built under no prefix.
            prefix="" if part == "mtp" else "language_model",
            model_class=compat.model_classes()[part],
        )
    return Model(module, config, log, size, rank)


@dataclass
class Linear:
    """One linear layer as one rank holds it."""

    layer: torch.nn.Module
    config: VllmConfig
    log: kernels.Log
    size: int
    rank: int

    def load(self, name: str, tensor: torch.Tensor, shard: int | None = None) -> None:
        """Hand one checkpoint tensor to the parameter's own loader."""
        parameter = getattr(self.layer, name)
        with compat.tensor_parallel(self.size, self.rank), torch.no_grad():
            parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))

    def finish(self) -> None:
        """vLLM's post-load steps."""
        with (
            compat.tensor_parallel(self.size, self.rank),
            poisoned_memory(),
            torch.no_grad(),
            set_current_vllm_config(self.config),
            set_default_torch_dtype(MODEL_DTYPE),
        ):
            process_weights_after_loading(self.layer, self.config.model_config, CPU)

    def reload(self, *tensors: tuple[str, torch.Tensor, int | None]) -> None:
        """New values (parameter, tensor, shard) into the loaded layer, in the way vLLM's reload_weights takes."""
        with (
            poisoned_memory(),
            torch.no_grad(),
            set_current_vllm_config(self.config),
            set_default_torch_dtype(MODEL_DTYPE),
        ):
            initialize_layerwise_reload(self.layer)
            for name, tensor, shard in tensors:
                self.load(name, tensor, shard)
            finalize_layerwise_reload(self.layer, self.config.model_config)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.layer(x)[0]


def linear(
    config: VllmConfig,
    make: Callable[..., torch.nn.Module],
    quant_config: Any,
    *args: Any,
    size: int = 1,
    rank: int = 0,
    kernel: type = kernels.BlockKernel,
    **kwargs: Any,
) -> Linear:
    """Build one of vLLM's linear layers, `make(*args, quant_config=quant_config, **kwargs)`."""
    log = kernels.Log()
    with (
        compat.linear_kernels(kernels.factory(kernel, log), kernels.factory(kernels.Mxfp8Kernel, log)),
        compat.tensor_parallel(size, rank),
        poisoned_memory(),
        torch.no_grad(),
        set_current_vllm_config(config),
        set_default_torch_dtype(MODEL_DTYPE),
    ):
        layer = make(*args, bias=False, quant_config=quant_config, **kwargs)
        record_metadata_for_reloading(layer)
    return Linear(layer, config, log, size, rank)


def block_fp8_config() -> Any:
    """A checkpoint that is FP8_PB_WO throughout."""
    return get_quantization_config("modelopt").from_config({"quant_method": "modelopt", "quant_algo": ALGORITHM})


def mxfp8_config() -> Any:
    """A checkpoint that is MXFP8 throughout."""
    return get_quantization_config("modelopt_mxfp8").from_config({"quant_method": "modelopt", "quant_algo": "MXFP8"})


def mixed_config(quantization: dict, platform: str = "nvidia") -> Any:
    """A mixed checkpoint's quantization config, which knows the merged layers of a platform's K3."""
    return compat.know_k3(get_quantization_config("modelopt_mixed").from_config(quantization), platform)
