"""Load a drafter from disk through vLLM's own load_dspark_model, on CPU, and let it fill its KV caches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from k3 import compat as k3_compat
from k3.modules import MODEL_DTYPE, poisoned_memory
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.torch_utils import set_default_torch_dtype

from . import checkpoint, compat, trace

Load = Callable[..., "Loaded"]
Slots = torch.Tensor | list[torch.Tensor | None] | None
EMPTY = -7.0  # what nobody wrote
BLOCK_SIZE = 16


def target_config(folder: Path) -> VllmConfig:
    """The configuration of a target model alone."""
    model = ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256
    )
    return VllmConfig(model_config=model, device_config=DeviceConfig(device="cpu"))


@dataclass
class Target:
    """The target model's configuration, and the parts of it that a drafter borrows."""

    config: VllmConfig

    @property
    def layers(self) -> int:
        return self.config.model_config.get_total_num_hidden_layers()

    def module(self, hidden: int, vocab: int) -> torch.nn.Module:
        """A target with the embedding and the head that the drafter shares."""
        target = torch.nn.Module()
        target.model = torch.nn.Module()
        target.model.embed_tokens = torch.nn.Embedding(vocab, hidden)
        target.lm_head = torch.nn.Linear(hidden, vocab, bias=False)
        return target

    def with_drafter(self, folder: Path, load_format: str) -> VllmConfig:
        """The configuration of this target with the drafter in `folder`."""
        with compat.configurable():
            drafter = compat.speculative_config(str(folder), self.config.model_config, self.config.parallel_config)
            return VllmConfig(
                model_config=self.config.model_config,
                device_config=DeviceConfig(device="cpu"),
                speculative_config=drafter,
                load_config=LoadConfig(load_format=load_format),
            )


@dataclass
class Loaded:
    """A drafter as vLLM loaded it."""

    model: torch.nn.Module
    config: VllmConfig
    geometry: checkpoint.Geometry
    size: int
    rank: int
    caches: list[torch.Tensor] = field(default_factory=list)
    known: list[torch.Tensor] = field(default_factory=list)
    """Every cache that a pointer may name: those of the layers, and what a test keeps of earlier ones."""

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The draft layers."""
        return list(self.model.model.layers)

    @property
    def fused(self) -> torch.nn.Module:
        """The projection of all layers' context latents."""
        return self.model.model.context_kv_proj

    @property
    def max_tokens(self) -> int:
        """The most tokens that one step may bring."""
        return self.config.scheduler_config.max_num_batched_tokens

    def matrix(self) -> torch.Tensor:
        """float64 [layers, latent, hidden]: the matrix by which the fused projection multiplies."""
        with self._context(), compat.cuda_ops(self.known):
            out = self.fused(torch.eye(self.geometry.hidden, dtype=torch.float64))
        return out.T.reshape(self.geometry.layers, self.geometry.latent, -1)

    def allocate(self, blocks: int, sizes: tuple[int, ...] = (BLOCK_SIZE,), dtype: torch.dtype = torch.float64) -> None:
        """A fresh KV cache for each layer: `blocks` blocks, of the block sizes in turn."""
        self.caches = []
        for layer, decoder in enumerate(self.layers):
            shape = blocks, sizes[layer % len(sizes)], self.geometry.latent
            self.caches.append(torch.full(shape, EMPTY, dtype=torch.float64).to(dtype))
            decoder.self_attn.kv_cache = self.caches[-1]
        self.known = list(self.caches)

    def clear(self) -> None:
        """Empty the caches in place: their addresses stay."""
        for cache in self.caches:
            cache.fill_(EMPTY)

    def precompute(self, x: torch.Tensor, positions: torch.Tensor, slots: Slots) -> None:
        """Fill the caches from context states [tokens, hidden]."""
        with self._context(), compat.cuda_ops(self.known):
            self.model.precompute_and_store_context_kv(x, positions, slots)

    def trace(self, x: torch.Tensor, positions: torch.Tensor, slots: Slots) -> trace.Trace:
        """The tensor operations that the model itself asks for while it fills the caches."""
        with self._context(), compat.idle_cuda_ops(), trace.Trace() as seen:
            self.model.precompute_and_store_context_kv(x, positions, slots)
        return seen

    def reload(self, drafter: checkpoint.Drafter) -> None:
        """New values into the loaded drafter, in the way vLLM's reload_weights takes."""
        with self._reloading():
            self.model.load_weights(iter(drafter.tensors.items()))

    def transfer(self, drafter: checkpoint.Drafter) -> None:
        """New values one tensor at a time, in the way vLLM's weight transfer engines hand over a draft update."""
        with self._reloading(), disable_mtp_completeness_check():
            for item in drafter.tensors.items():
                self.model.load_weights([item])

    def update(self, drafter: checkpoint.Drafter) -> None:
        """New values in place, one tensor at a time, as trainers do that call load_weights themselves."""
        with compat.loadable(), self._context(), set_default_torch_dtype(MODEL_DTYPE):
            for item in drafter.tensors.items():
                self.model.load_weights([item])

    @contextlib.contextmanager
    def _reloading(self) -> Iterator[None]:
        with compat.loadable(), self._context(), set_default_torch_dtype(MODEL_DTYPE):
            initialize_layerwise_reload(self.model)
            yield
            finalize_layerwise_reload(self.model, self.config.speculative_config.draft_model_config)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with (
            k3_compat.tensor_parallel(self.size, self.rank),
            poisoned_memory(),
            torch.no_grad(),
            set_current_vllm_config(self.config),
        ):
            yield


def load(
    drafter: checkpoint.Drafter,
    folder: Path,
    target: Target,
    *,
    size: int = 1,
    rank: int = 0,
    load_format: str = "auto",
    built: Callable[[torch.nn.Module], None] | None = None,
) -> Loaded:
    """Write the drafter to `folder` and load it beside `target`, as one rank of a tensor-parallel group."""
    config = target.with_drafter(drafter.save(folder), load_format)
    geometry = drafter.geometry
    with (
        compat.loadable(built),
        k3_compat.tensor_parallel(size, rank),
        poisoned_memory(),
        torch.no_grad(),
        set_current_vllm_config(config),
    ):
        model = compat.load_dspark_model(target.module(geometry.hidden, geometry.vocab), config)
    return Loaded(model, config, geometry, size, rank)
