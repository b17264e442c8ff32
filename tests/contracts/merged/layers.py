"""Build vLLM's merged linear layers from a checkpoint's config, as one rank of a group, and load them on CPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dspark.formats import Format, Tensors
from k3 import compat as k3_compat
from k3.modules import CPU, MODEL_DTYPE, poisoned_memory
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight
from vllm.utils.torch_utils import set_default_torch_dtype

from . import compat
from .compat import MergedColumnParallelLinear, QKVParallelLinear

SIZES = (1, 2, 4)
# How models call the parts of what they merge.
PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj": ("a_proj", "b_proj", "c_proj"),
}
PREFIX = "model.layers.1.self_attn."


@dataclass(frozen=True)
class Shape:
    """A merged layer: the rows of its matrices, or the heads of a QKV projection."""

    name: str
    rows: tuple[int, ...]
    cols: int
    heads: tuple[int, int, int] | None = None  # head size, heads, KV heads
    unsharded: bool = False

    def __str__(self) -> str:
        kind = f"{self.heads} heads" if self.heads else "+".join(map(str, self.rows))
        return f"{self.name} {kind}{' on every rank' if self.unsharded else ''}"

    @property
    def shards(self) -> tuple[Any, ...]:
        """What vLLM's weight loaders call the matrices."""
        return ("q", "k", "v") if self.heads else tuple(range(len(self.rows)))

    def make(self, **kwargs: Any) -> torch.nn.Module:
        kwargs["prefix"] = PREFIX + self.name
        if self.unsharded:
            kwargs["disable_tp"] = True
        if self.heads is None:
            return MergedColumnParallelLinear(self.cols, list(self.rows), **kwargs)
        return QKVParallelLinear(self.cols, *self.heads, **kwargs)

    def fused(self) -> Shape:
        """As a checkpoint holds it that has one matrix for all of them."""
        return Shape(self.name, (sum(self.rows),), self.cols, unsharded=self.unsharded)

    def share(self, matrices: list[torch.Tensor], size: int, rank: int) -> torch.Tensor:
        """The rows of every matrix that one rank of `size` computes, one after the other."""
        if self.unsharded:
            return torch.cat(matrices)
        parts = []
        for index, matrix in enumerate(matrices):
            copies = max(1, size // self.heads[2]) if self.heads and index else 1
            parts.append(matrix.chunk(size // copies)[rank // copies])
        return torch.cat(parts)


def merged(*rows: int, cols: int = 256, unsharded: bool = False) -> Shape:
    """A gate-and-up like projection."""
    return Shape("gate_up_proj" if len(rows) == 2 else "in_proj", rows, cols, unsharded=unsharded)


def qkv(head: int, heads: int, kv_heads: int, cols: int = 256, unsharded: bool = False) -> Shape:
    """An attention's merged projection."""
    rows = head * heads, head * kv_heads, head * kv_heads
    return Shape("qkv_proj", rows, cols, (head, heads, kv_heads), unsharded)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds of a merged layer: the tensors of each matrix."""

    form: Format
    matrices: tuple[Tensors, ...]
    biases: tuple[torch.Tensor, ...] | None = None

    @classmethod
    def random(
        cls, form: Format, shape: Shape, seed: int, scales: tuple[float, ...] = (), bias: bool = False
    ) -> Checkpoint:
        """A checkpoint whose matrices have these global scales, where the format has any."""
        generator = torch.Generator().manual_seed(seed)
        scales = scales or (1.0,) * len(shape.rows)
        made = tuple(
            form.write(rows, shape.cols, scale, generator) for rows, scale in zip(shape.rows, scales, strict=True)
        )
        biases = tuple(torch.randn(rows, generator=generator).bfloat16() for rows in shape.rows) if bias else None
        return cls(form, made, biases)

    def changed(self, index: int, **tensors: torch.Tensor | None) -> Checkpoint:
        """The same with other tensors of one matrix, None for those that are missing."""
        kept = {name: tensor for name, tensor in {**self.matrices[index], **tensors}.items() if tensor is not None}
        return Checkpoint(self.form, (*self.matrices[:index], kept, *self.matrices[index + 1 :]), self.biases)

    def read(self) -> list[torch.Tensor]:
        """Each matrix in float64, by the format's definition."""
        return [self.form.read(tensors) for tensors in self.matrices]


class Operations(TorchDispatchMode):
    """Writes down which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@dataclass
class Layer:
    """A merged layer as one rank holds it."""

    module: torch.nn.Module
    shape: Shape
    config: VllmConfig
    size: int = 1
    rank: int = 0
    kernels: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def load(self, checkpoint: Checkpoint) -> Layer:
        """Every tensor by its parameter's own loader, then vLLM's post-load steps."""
        with self._context():
            self._fill(checkpoint)
            process_weights_after_loading(self.module, self.config.model_config, CPU)
        return self

    def load_fused(self, checkpoint: Checkpoint) -> Layer:
        """A checkpoint that holds the layer as one matrix, by the loaders that split it."""
        with self._context():
            for name, tensor in checkpoint.matrices[0].items():
                parameter = self.module.get_parameter(name)
                parameter.weight_loader(parameter, tensor)
            process_weights_after_loading(self.module, self.config.model_config, CPU)
        return self

    def load_dummy(self) -> Layer:
        """Dummy weights, then vLLM's post-load steps, as load_format="dummy" does."""
        with self._context():
            for parameter in self.module.parameters():
                initialize_single_dummy_weight(parameter)
            process_weights_after_loading(self.module, self.config.model_config, CPU)
        return self

    def reload(self, checkpoint: Checkpoint) -> None:
        """New values into the loaded layer, in the way vLLM's reload_weights takes."""
        with self._context():
            initialize_layerwise_reload(self.module)
            self._fill(checkpoint)
            finalize_layerwise_reload(self.module, self.config.model_config)

    def load_processed(self, stored: dict[str, torch.Tensor]) -> None:
        """The parameters of a loaded layer, as a cache of processed weights hands them over."""
        with self._context(), compat.weights_already_processed():
            for name in [name for name, _ in self.module.named_parameters()]:
                delattr(self.module, name)
            for name, tensor in stored.items():
                self.module.register_parameter(name, torch.nn.Parameter(tensor.data.clone(), requires_grad=False))
            process_weights_after_loading(self.module, self.config.model_config, CPU)

    def _fill(self, checkpoint: Checkpoint) -> None:
        # A checkpoint may hold one matrix for all of them.
        shards = self.shape.shards if len(checkpoint.matrices) > 1 else (None,)
        for index, (shard, tensors) in enumerate(zip(shards, checkpoint.matrices, strict=True)):
            every = dict(tensors)
            if checkpoint.biases is not None:
                every["bias"] = checkpoint.biases[index]
            for name, tensor in every.items():
                parameter = self.module.get_parameter(name)
                parameter.weight_loader(parameter, tensor, shard)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with self._context():
            return self.module(x)[0]

    def kernels_launched(self) -> list[str]:
        """The operations of one call, of which a captured CUDA graph consists."""
        with Operations() as operations:
            self(torch.ones(2, self.shape.cols, dtype=torch.float64))
        return operations.names

    def tensors(self) -> dict[str, int]:
        """Where each tensor of the layer lies."""
        return {name: tensor.data_ptr() for name, tensor in self.module.named_parameters()}

    def matrix(self) -> torch.Tensor:
        """float64 [rows, cols] by which the layer multiplies."""
        return self(torch.eye(self.shape.cols, dtype=torch.float64)).T

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with (
            k3_compat.tensor_parallel(self.size, self.rank),
            compat.without_gpu(self.kernels),
            poisoned_memory(),
            torch.no_grad(),
            set_current_vllm_config(self.config),
            set_default_torch_dtype(MODEL_DTYPE),
        ):
            yield


def fill(layer: Layer, value: float) -> None:
    """What memory may hold before anything is loaded."""
    for parameter in layer.module.parameters():
        if parameter.dtype != torch.uint8:
            parameter.data.fill_(min(value, torch.finfo(parameter.dtype).max))


def only(checkpoint: Checkpoint, *present: int) -> Checkpoint:
    """A checkpoint that holds these matrices alone."""
    matrices = tuple(tensors if i in present else {} for i, tensors in enumerate(checkpoint.matrices))
    return Checkpoint(checkpoint.form, matrices)


def config_json(form: Format) -> dict[str, Any]:
    """The config.json of a small Llama in this format."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 256,
        "torch_dtype": "bfloat16",
        "quantization_config": form.announce(),
    }


class Bench:
    """Builds layers under the configuration that vLLM makes of a model's config.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configs: dict[str, VllmConfig] = {}
        k3_compat.inspect_models_in_process()

    def config(self, form: Format) -> VllmConfig:
        """vLLM's configuration of a small Llama in this format."""
        if str(form) not in self.configs:
            folder = self.folder / str(len(self.configs))
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config_json(form)))
            model = ModelConfig(
                model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256
            )
            config = VllmConfig(model_config=model, device_config=DeviceConfig(device="cpu"))
            config.quant_config.packed_modules_mapping = {name: list(parts) for name, parts in PARTS.items()}
            k3_compat.start_distributed(config)
            self.configs[str(form)] = config
        return self.configs[str(form)]

    def build(
        self,
        form: Format,
        shape: Shape,
        size: int = 1,
        rank: int = 0,
        bias: bool = False,
        kernels: dict[str, Callable[..., Any]] | None = None,
    ) -> Layer:
        """A layer, unloaded; `kernels` are other stand-ins than compat's, by what they stand for."""
        config = self.config(form)
        made = Layer(torch.nn.Module(), shape, config, size, rank, kernels or {})
        with made._context():
            made.module = shape.make(bias=bias, quant_config=config.quant_config)
            record_metadata_for_reloading(made.module)
        return made

    def load(self, checkpoint: Checkpoint, shape: Shape, size: int = 1, rank: int = 0, **kwargs: Any) -> Layer:
        """A layer with a checkpoint in it."""
        bias = checkpoint.biases is not None
        return self.build(checkpoint.form, shape, size, rank, bias, **kwargs).load(checkpoint)
