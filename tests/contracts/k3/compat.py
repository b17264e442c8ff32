"""The one place that knows what vLLM's releases call things, and what a machine without a GPU lacks.

Contracts speak of projections and checkpoints; this module finds them in whatever release is imported.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm.distributed.parallel_state as parallel_state
import vllm.model_executor.layers.quantization.modelopt as modelopt
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.model_executor.models import registry

# Shards of K3's merged projections in the order in which the layer holds them.
KDA_MERGED = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
MLA_MERGED = ("q_a_proj", "kv_a_proj_with_mqa")


def inspect_models_in_process() -> None:
    """Look at model classes here: vLLM asks a subprocess, which would import an installed vLLM or none."""

    def inspect(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect


def start_distributed(config: VllmConfig) -> None:
    """A gloo group of this process alone; `tensor_parallel` then pretends that it is larger."""
    if parallel_state.model_parallel_is_initialized():
        return
    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, rendezvous.as_uri(), 0, "gloo")
        initialize_model_parallel(1, 1)


@contextlib.contextmanager
def tensor_parallel(size: int, rank: int) -> Iterator[None]:
    """Build and load as rank `rank` of `size` would; no collective may run meanwhile."""
    group = parallel_state.get_tp_group()
    kept = group.world_size, group.rank_in_group
    group.world_size, group.rank_in_group = size, rank
    try:
        yield
    finally:
        group.world_size, group.rank_in_group = kept


class MlaImpl(MLACommonImpl):
    """The real MLA implementation's shared part, with no decode kernel."""

    supports_quant_query_input = True

    def __init__(self, **kwargs: Any) -> None:
        wanted = (
            "num_heads",
            "head_size",
            "scale",
            "num_kv_heads",
            "kv_cache_dtype",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "qk_head_dim",
            "v_head_dim",
            "kv_b_proj",
        )
        for name in wanted:
            setattr(self, name, kwargs[name])
        self._use_flashinfer_concat_mla_k = False
        self.dcp_world_size = 1
        self.dcp_rank = 0

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _Backend:
    get_impl_cls = staticmethod(lambda: MlaImpl)
    get_name = staticmethod(lambda: "REFERENCE")
    is_sparse = staticmethod(lambda: False)


class _Prefill:
    """A prefill attention whose output nobody reads."""

    def __init__(self, **kwargs: Any) -> None:
        self.requires_v_padding = False

    def supports_out(self) -> bool:
        return False

    def run_prefill_new_tokens(self, q: torch.Tensor, v: torch.Tensor, **_: Any) -> Any:
        return torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.bfloat16)

    def run_prefill_context_chunk(self, *args: Any, q: torch.Tensor, v: torch.Tensor, **_: Any) -> Any:
        out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.bfloat16)
        return out, torch.zeros(q.shape[1], q.shape[0])


def _amd_kda() -> Any:
    """AMD's KDA module; None where its model shares Kimi-Linear's."""
    try:
        from vllm.models.kimi_k3.amd import kda
    except ImportError:
        return None
    return kda


@contextlib.contextmanager
def buildable() -> Iterator[None]:
    """While this holds, K3's modules can be built without a GPU."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.models.kimi_k3.nvidia import mla, model

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        for module in (mla, mla_attention):  # AMD's model takes the attention layer that all models share
            enter(mock.patch.object(module, "get_attn_backend", return_value=_Backend))
            enter(mock.patch.object(module, "get_mla_prefill_backend", return_value=_Prefill))
        kda = _amd_kda()
        for name in filter(re.compile("is_fused_kda_.*_supported").fullmatch, dir(kda)):
            enter(mock.patch.object(kda, name, return_value=False))  # asks for ROCm's driver even to say no
        enter(mock.patch.object(torch.cuda, "Stream", return_value=None))
        if hasattr(model, "maybe_init_gemm_rs_ar"):  # asks for the cutlass package even to say no
            enter(mock.patch.object(model, "maybe_init_gemm_rs_ar", return_value=False))
        yield


@contextlib.contextmanager
def linear_kernels(block: Callable[..., Any], mxfp8: Callable[..., Any]) -> Iterator[None]:
    """Give ModelOpt's linear methods these kernels while layers are built."""
    with (
        mock.patch.object(modelopt, "init_fp8_linear_kernel", block),
        mock.patch.object(modelopt, "init_mxfp8_linear_kernel", mxfp8),
    ):
        yield


def merges_mla_gate() -> bool:
    """Whether K3's MLA merges its output gate into the projection of q_a and kv_a."""
    from vllm.models.kimi_k3.nvidia.model import KimiLinearModel

    return "fused_qkv_a_g_proj" in KimiLinearModel.packed_modules_mapping


def model_classes() -> dict[str, type[torch.nn.Module]]:
    """The text model, the MTP draft, and AMD's own text model."""
    from vllm.models.kimi_k3.amd import linear as amd
    from vllm.models.kimi_k3.nvidia.model import KimiLinearForCausalLM
    from vllm.models.kimi_k3.nvidia.mtp import KimiK3MTP

    return {"target": KimiLinearForCausalLM, "mtp": KimiK3MTP, "amd": amd.KimiLinearForCausalLM}


def know_k3(quant_config: Any, platform: str = "nvidia") -> Any:
    """Tell a quantization config of K3's merged layers, as building a platform's model does."""
    from vllm.models.kimi_k3.amd import linear as amd
    from vllm.models.kimi_k3.nvidia.model import KimiLinearModel

    model = {"nvidia": KimiLinearModel, "amd": amd.KimiLinearModel}[platform]
    model.__new__(model, quant_config)
    return quant_config


def attention(model: torch.nn.Module, layer: int) -> torch.nn.Module:
    """The attention module of a layer, target or MTP."""
    layers = model.model.layers
    found = layers[str(layer)] if isinstance(layers, torch.nn.ModuleDict) else layers[layer]
    found = getattr(found, "mtp_block", found)
    found.self_attn.o_proj.reduce_results = False  # one simulated rank has nobody to reduce with
    return found.self_attn


def kda_outputs(kda: torch.nn.Module, x: torch.Tensor, core: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run the layer's own forward around a recurrence that returns `core`.

    x: [tokens, hidden]. core: [tokens, local heads * head_dim], what the recurrence hands to o_proj.
    Returns each projection's output on this rank; `f_b_proj` is f_b(f_a(x)).
    """
    seen: dict[str, torch.Tensor] = {}

    def recurrence(
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
        **_: Any,
    ) -> None:
        seen["q_proj"], seen["k_proj"], seen["v_proj"] = mixed_qkv.chunk(3, dim=-1)
        seen["f_b_proj"] = g1.reshape(x.shape[0], -1)
        seen["g_proj"] = g2.flatten(1)
        seen["b_proj"] = beta.reshape(x.shape[0], -1)
        core_attn_out.copy_(core.view(core_attn_out.shape))

    with mock.patch.object(kda, "_forward", recurrence):
        seen["o_proj"] = kda(hidden_states=x, positions=torch.arange(x.shape[0]))
    return seen


def mla_outputs(
    mla: torch.nn.Module, x: torch.Tensor, attended: torch.Tensor, without: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Run the layer's own forward with norms that do nothing and an attention that returns `attended`.

    x: [tokens, hidden]. attended: [tokens, local heads * v_dim], which reaches o_proj ungated.
    Returns each projection's output on this rank, except for `without`; `q_b_proj` is q_b(q_a(x)), and
    kv_b_proj, which the attention calls, is apart.
    """
    from vllm.models.kimi_k3.nvidia import mla as module

    seen: dict[str, torch.Tensor] = {}

    def norms(q_c: torch.Tensor, kv_c: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen["q_a_proj"], seen["kv_c"] = q_c, kv_c
        return q_c, kv_c

    def attend(positions: Any, q: torch.Tensor, kv_c: Any, k_pe: torch.Tensor, out: torch.Tensor, *_: Any) -> None:
        seen["q_b_proj"] = q.flatten(1)
        seen["k_pe"] = k_pe.reshape(x.shape[0], -1)
        out.copy_(attended)

    def gate(attn_out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        seen["g_proj"] = gate
        return attn_out

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "fused_q_kv_rmsnorm", norms))
        stack.enter_context(mock.patch.object(module, "_gate_sigmoid_mul", gate))
        stack.enter_context(mock.patch.object(mla, "_attention", attend))
        for name in without:
            linear = getattr(mla, name)
            zeros = x.new_zeros(x.shape[0], linear.output_size_per_partition)
            stack.enter_context(mock.patch.object(linear, "forward", lambda _, zeros=zeros: (zeros, None)))
        seen["o_proj"] = mla(positions=torch.arange(x.shape[0]), hidden_states=x)
    seen["kv_a_proj_with_mqa"] = torch.cat([seen.pop("kv_c"), seen.pop("k_pe")], dim=-1)
    return {name: out for name, out in seen.items() if name not in without}


def merged_outputs(attn: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each shard's output, of the projections that an attention module merges and of a gate apart."""
    merged = {
        "in_proj_qkvgfab": KDA_MERGED,
        "fused_qkv_a_proj": (*MLA_MERGED, "g_proj"),  # of which AMD's holds the gate since 0.33.0
        "fused_qkv_a_g_proj": (*MLA_MERGED, "g_proj"),
        "g_proj": ("g_proj",),
    }
    seen: dict[str, torch.Tensor] = {}
    for name, shards in merged.items():
        if isinstance(layer := getattr(attn, name, None), torch.nn.Module):
            parts = layer(x)[0].split(layer.output_partition_sizes, dim=-1)
            # A layer may lack the gate, or end with columns that no checkpoint holds.
            seen.update(zip(shards, parts, strict=False))
    return seen


def input_projection(attn: torch.nn.Module, projection: str) -> torch.nn.Module:
    """The linear layer that holds a projection, merged or not."""
    for name in (projection, "in_proj_qkvgfab", "fused_qkv_a_proj", "fused_qkv_a_g_proj"):
        found = getattr(attn, name, None)
        if isinstance(found, torch.nn.Module):
            return found
    raise LookupError(f"{type(attn).__name__} holds no {projection}")


# Which of vLLM's classes runs routed experts of each algorithm.
EXPERT_METHODS = {
    "NVFP4": "ModelOptNvFp4FusedMoE",
    "W4A16_NVFP4": "ModelOptNvFp4FusedMoE",
    "MXFP8": "ModelOptMxFp8FusedMoE",
    "FP8": "ModelOptFp8MoEMethod",
}


def routed_experts_method(quant_config: Any, prefix: str) -> str | None:
    """The class to which a config sends the routed experts at `prefix`; None where it leaves them unquantized."""
    experts = modelopt.RoutedExperts.__new__(modelopt.RoutedExperts)
    torch.nn.Module.__init__(experts)
    experts.moe_config = None
    with contextlib.ExitStack() as stack:
        for name in set(EXPERT_METHODS.values()):  # each would look for a GPU kernel when made
            stack.enter_context(mock.patch.object(modelopt, name, lambda *a, name=name, **k: name))
        return quant_config.get_quant_method(experts, prefix)


def prefill_new_tokens(mla: torch.nn.Module, latent: torch.Tensor) -> None:
    """Run the layer's prefill of new tokens on a latent [tokens, kv_lora], up to the attention itself."""
    from vllm.models.kimi_k3.nvidia import mla as module

    count = latent.shape[0]
    prefill = SimpleNamespace(
        chunked_context=None, q_data_type=torch.bfloat16, prefill_backend=mla.prefill_backend, output_dtype=None
    )
    heads = mla.num_local_heads
    with mock.patch.object(module, "fused_mla_key_concat_kv_cache_insert", lambda q, *_, **__: q):
        mla._forward_prefill_fused(
            torch.zeros(count, heads, mla.qk_head_dim, dtype=torch.bfloat16),
            latent,
            torch.zeros(count, 1, mla.qk_rope_head_dim, dtype=torch.bfloat16),
            None,
            None,
            torch.arange(count),
            SimpleNamespace(prefill=prefill),
            torch.zeros(count, heads * mla.v_head_dim, dtype=torch.bfloat16),
        )


def prefill_with_context(mla: torch.nn.Module, latent: torch.Tensor) -> None:
    """Run the chunked-context prefill of FP8 queries on one chunk: a gathered latent [tokens, kv_lora] in E4M3."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.models.kimi_k3.nvidia import mla as module

    count = latent.shape[0]
    rope = torch.zeros(count, mla.qk_rope_head_dim, dtype=torch.bfloat16).to(latent.dtype)
    workspace = torch.cat([latent.view(torch.uint8), rope.view(torch.uint8)], -1).view(latent.dtype)
    query = torch.zeros(count, mla.num_local_heads, mla.qk_head_dim, dtype=torch.bfloat16).to(latent.dtype)
    if hasattr(mla, "_compute_prefill_context"):  # K3's own since it fuses the chunk's tail
        chunk = SimpleNamespace(num_context_tokens=count, token_slice=slice(None), is_continuation=False)
        context = SimpleNamespace(workspace=workspace, chunks=[chunk], empty_token_slices=[])
        metadata = SimpleNamespace(prefill=_fp8_prefill(mla, context))
        with (
            mock.patch.object(mla, "_gather_context_latent"),
            mock.patch.object(module, "fused_mla_kv_concat_quant_fp8", lambda k, _, v: (k, v)),
        ):
            mla._compute_prefill_context(query, metadata)
        return
    context = SimpleNamespace(
        workspace=workspace,
        seq_tot=[count],
        cu_seq_lens=[None],
        starts=[None],
        has_empty_context=[False],
    )
    metadata = SimpleNamespace(prefill=_fp8_prefill(mla, context), num_prefills=1)
    gather = SimpleNamespace(cp_gather_cache=lambda **_: None)  # the workspace holds the chunk already
    with mock.patch.object(mla_attention, "ops", gather):
        mla.impl._compute_prefill_context(query, None, metadata, torch.ones(1))


def _fp8_prefill(mla: torch.nn.Module, context: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        chunked_context=context,
        q_data_type=torch.float8_e4m3fn,
        prefill_backend=mla.prefill_backend,
        block_table=None,
        output_dtype=torch.bfloat16,
    )


# Where K3 calls kv_b_proj.
KV_B_CALLERS: dict[str, Callable[[torch.nn.Module, torch.Tensor], None]] = {
    "new tokens": prefill_new_tokens,
    "chunked context": prefill_with_context,
}
