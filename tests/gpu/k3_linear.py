"""Kimi-K3's FP8_PB_WO projections as one rank of eight holds them, on a GPU, with a float64 reference.

The layers are vLLM's own, built by its mixed-precision config and loaded by their own weight
loaders from random matrices in ModelOpt's layout.  vLLM is the installed one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# The format's writer and its float64 definition are the contracts'; nothing of vLLM is in them.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contracts"))
from k3.checkpoint import ALGORITHM, Geometry, block_quantized
from k3.reference import dequantize, share

SIZE, RANK = 8, 3
GEOMETRY = Geometry(hidden=7168)
AT = "model.layers.0.self_attn"
# The kernels that can run block FP8 on Hopper, by the name that reports use; None: vLLM's own choice.
KERNELS: dict[str, str | None] = {
    "chosen": None,
    "DeepGEMM": "DeepGemmFp8BlockScaledMMKernel",
    "CUTLASS": "CutlassFp8BlockScaledMMKernel",
    "Triton": "TritonFp8BlockScaledMMKernel",
}


@dataclass(frozen=True)
class Projection:
    """A linear layer of K3.

    ``shards`` are the checkpoint matrices that it merges, in order; ``split`` says what tensor
    parallelism cuts: ``rows``, ``columns`` or nothing; ``replicated`` are shards every rank holds whole.
    """

    name: str
    shards: tuple[str, ...]
    split: str
    replicated: tuple[str, ...] = ()

    def sizes(self) -> dict[str, tuple[int, int]]:
        known = GEOMETRY.kda() if self.name in ("in_proj_qkvgfab", "f_b_proj") else GEOMETRY.mla()
        return {shard: known[shard] for shard in self.shards}


PROJECTIONS = (
    Projection(
        "in_proj_qkvgfab",
        ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"),
        "rows",
        replicated=("f_a_proj",),
    ),
    Projection("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"), ""),
    Projection("f_b_proj", ("f_b_proj",), "rows"),
    Projection("q_b_proj", ("q_b_proj",), "rows"),
    Projection("kv_b_proj", ("kv_b_proj",), "rows"),
    Projection("g_proj", ("g_proj",), "rows"),
    Projection("o_proj", ("o_proj",), "columns"),
)


@dataclass(frozen=True)
class Loaded:
    """A loaded layer and float64 [rows, columns] of what this rank's part of it must compute."""

    layer: torch.nn.Module
    kernel: str
    matrix: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.quant_method.apply(self.layer, x)


@contextlib.contextmanager
def engine(size: int = SIZE, rank: int = RANK) -> Iterator[None]:
    """vLLM's configuration and a process group that pretends to be ``rank`` of ``size``."""
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.v1.worker import workspace

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(GEOMETRY.text_config()))
    torch.cuda.set_device(0)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256
    )
    try:
        with set_current_vllm_config(VllmConfig(model_config=model)), torch.device("cuda"), torch.no_grad():
            if not parallel_state.model_parallel_is_initialized():
                init_distributed_environment(1, 0, (folder / "rendezvous").as_uri(), 0, "nccl")
                initialize_model_parallel(1, 1)
            group = parallel_state.get_tp_group()
            group.world_size, group.rank_in_group = size, rank
            workspace.reset_workspace_manager()
            workspace.init_workspace_manager(torch.device("cuda"))
            yield
    finally:
        workspace.reset_workspace_manager()
        torch.set_default_dtype(kept)


def load(projection: Projection, kernel: str) -> Loaded:
    """The projection with random weights, run by one of :data:`KERNELS`."""
    return _loaded(projection, kernel, _matrices(projection.sizes()))


def unfused(projection: Projection, kernel: str) -> list[Loaded]:
    """The same matrices, each in a layer of its own."""
    made = []
    for shard, matrix in _matrices(projection.sizes()).items():
        alone = Projection(shard, (shard,), "" if shard in projection.replicated else projection.split)
        made.append(_loaded(alone, kernel, {shard: matrix}))
    return made


def aligned(rows: int, columns: int, kernel: str) -> Loaded:
    """A plain layer of ``rows`` x ``columns``, both multiples of 128: what a padded one is measured against."""
    plain = Projection("plain_proj", ("plain_proj",), "")
    return _loaded(plain, kernel, _matrices({"plain_proj": (rows, columns)}))


Matrices = dict[str, tuple[torch.Tensor, torch.Tensor]]


def _matrices(sizes: dict[str, tuple[int, int]]) -> Matrices:
    """Random FP8_PB_WO matrices, the same at each call, with scales as a real checkpoint has them.

    The contracts' scales are further apart; here no block shall drown the others' error.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.device("cpu"):
        made = {shard: block_quantized(*size, generator) for shard, size in sizes.items()}
        return {
            shard: (weight, torch.rand(scale.shape, generator=generator) * 2e-5 + 1e-5)
            for shard, (weight, scale) in made.items()
        }


def _loaded(projection: Projection, kernel: str, matrices: Matrices) -> Loaded:
    layer = _build(projection, kernel, {shard: tuple(weight.shape) for shard, (weight, _) in matrices.items()})
    for index, (weight, scale) in enumerate(matrices.values()):
        shard = (index,) if len(matrices) > 1 else ()
        layer.weight.weight_loader(layer.weight, weight, *shard)
        layer.weight_scale.weight_loader(layer.weight_scale, scale, *shard)
    layer.quant_method.process_weights_after_loading(layer)
    parts = [_part(projection, s, dequantize(w.cuda(), sc.cuda())) for s, (w, sc) in matrices.items()]
    return Loaded(layer, _kernel_name(layer), torch.cat(parts))


def _part(projection: Projection, shard: str, matrix: torch.Tensor) -> torch.Tensor:
    if projection.split == "rows" and shard not in projection.replicated:
        return matrix[share(matrix.shape[0], SIZE, RANK)]
    if projection.split == "columns":
        return matrix[:, share(matrix.shape[1], SIZE, RANK)]
    return matrix


def _build(projection: Projection, kernel: str, sizes: dict[str, tuple[int, ...]]) -> Any:
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.models.kimi_k3.nvidia.kda import _KimiGDNMergedColumnParallelLinear
    from vllm.models.kimi_k3.nvidia.model import KimiLinearModel

    recipes = {f"{AT}.{shard}": {"quant_algo": ALGORITHM} for shard in projection.shards}
    config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": recipes, "exclude_modules": []}
    quant = modelopt.ModelOptMixedPrecisionConfig.from_config({"quantization": config})
    quant.packed_modules_mapping = dict(KimiLinearModel.packed_modules_mapping)
    common: dict[str, Any] = {"bias": False, "quant_config": quant, "prefix": f"{AT}.{projection.name}"}
    rows = [size[0] for size in sizes.values()]
    columns = next(iter(sizes.values()))[1]
    forced = KERNELS[kernel]
    original = modelopt.init_fp8_linear_kernel
    if forced:
        cls = getattr(kernels, forced)
        modelopt.init_fp8_linear_kernel = functools.partial(original, force_kernel=cls)
    try:
        if projection.name == "in_proj_qkvgfab":
            local = sum(size[0] // (1 if shard in projection.replicated else SIZE) for shard, size in sizes.items())
            # From 0.30.0 on, padding has no shard of its own, and fills whole blocks.
            whole = "padding_size" in inspect.signature(_KimiGDNMergedColumnParallelLinear).parameters
            padding = -local % (128 if whole else 16)
            if padding:
                rows.append(padding * SIZE)
            told = {"padding_size": padding} if whole else {"padding_shard_id": 6 if padding else None}
            layer = _KimiGDNMergedColumnParallelLinear(
                columns, rows, replicated_shard_id=4, tp_size=SIZE, **told, **common
            )
        elif len(rows) > 1:
            layer = MergedColumnParallelLinear(columns, rows, disable_tp=True, **common)
        elif projection.split == "rows":
            layer = ColumnParallelLinear(columns, rows[0], **common)
        elif projection.split == "columns":
            layer = RowParallelLinear(columns, rows[0], **common)
        else:
            layer = ReplicatedLinear(columns, rows[0], **common)
    finally:
        modelopt.init_fp8_linear_kernel = original
    found = _kernel_name(layer)
    assert not forced or found == forced, f"{projection.name}: {forced} was asked for, vLLM took {found}"
    return layer


def _kernel_name(layer: torch.nn.Module) -> str:
    """The kernel that a layer runs; releases keep it under different names."""
    method = layer.quant_method
    return type(getattr(method, "w8a8_block_fp8_linear", None) or method.kernel).__name__
