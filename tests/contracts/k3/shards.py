"""A merged FP8_PB_WO projection that every rank has whole, and random matrices for it."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from . import kernels, modules
from .checkpoint import block_quantized

COLS = 256
MLA_WIDTHS = (1536, 576)


def merged(config: VllmConfig, widths: tuple[int, ...], kernel: type = kernels.BlockKernel) -> modules.Linear:
    """A replicated merged projection of these shards, unloaded."""
    return modules.linear(
        config,
        MergedColumnParallelLinear,
        modules.block_fp8_config(),
        COLS,
        list(widths),
        kernel=kernel,
        disable_tp=True,
        prefix="language_model.model.layers.1.self_attn.fused_qkv_a_proj",
    )


def shards(widths: tuple[int, ...], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One random FP8_PB_WO matrix a shard."""
    generator = torch.Generator().manual_seed(seed)
    return [block_quantized(width, COLS, generator) for width in widths]


def loads(held: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[str, torch.Tensor, int | None]]:
    """The same as (parameter, tensor, shard)."""
    return [
        (name, tensor, shard)
        for shard, (weight, scale) in enumerate(held)
        for name, tensor in (("weight", weight), ("weight_scale", scale))
    ]


def loaded(config: VllmConfig, widths: tuple[int, ...], kernel: type = kernels.BlockKernel) -> modules.Linear:
    """The merged projection with its first checkpoint in it."""
    built = merged(config, widths, kernel)
    for load in loads(shards(widths, 1)):
        built.load(*load)
    built.finish()
    return built
