"""Kimi-K3's DSpark drafter on a GPU, as far as its context KV goes: real projections, norms, tables and caches.

The model is vLLM's own, the installed one; only the parts of a draft layer that the context never meets are left
out.  Beside it stand the steps of releases that have no epilogue, as plain functions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from k3_linear import block_quantized  # first: it puts the contracts' modules on the path

HIDDEN, Q_LORA, LATENT, ROPE, LAYERS = 7168, 1536, 512, 64, 5
WIDTH = LATENT + ROPE
EPSILON = 1e-5
BLOCK_SIZE = 64
# A scaled table of a million rows.
YARN = {
    "rope_type": "deepseek_yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


class Matrices:
    """Random checkpoint tensors of every layer's down-projections, q_a then kv_a."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        self.fp8: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        with torch.device("cpu"):
            for _ in range(LAYERS):
                layer = []
                for rows in (Q_LORA, WIDTH):
                    weight, scale = block_quantized(rows, HIDDEN, generator)
                    layer.append((weight, torch.rand(scale.shape, generator=generator) * 2e-5 + 1e-5))
                self.fp8.append(layer)


@dataclass
class Context:
    """One step's input."""

    states: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]

    @classmethod
    def random(cls, tokens: int, blocks: int, seed: int = 0, groups: int = 1) -> Context:
        """Layers take turns with `groups` slot mappings: a hybrid model's may be of several cache groups."""
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.device("cuda"):
            states = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.bfloat16)
            positions = torch.randint(1 << 20, (tokens,), generator=generator)
            mappings = [torch.randperm(blocks * BLOCK_SIZE, generator=generator)[:tokens] for _ in range(groups)]
        return cls(states, positions, [mappings[layer % groups] for layer in range(LAYERS)])


class RawProjection:
    """A block-FP8 matrix as releases without whole-block shards hold it: rows one after the other, none of them
    padding.  Only its speed counts here."""

    def __init__(self, rows: int) -> None:
        from vllm.model_executor.layers.quantization import modelopt
        from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, create_fp8_quant_key

        weight, scale = (torch.randn(rows, HIDDEN) * 50).to(torch.float8_e4m3fn), -(-rows // 128)
        self.layer = torch.nn.Module()
        self.layer.weight_block_size = [128, 128]
        self.layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.layer.weight_scale = torch.nn.Parameter(
            torch.rand(scale, HIDDEN // 128, dtype=torch.float32) * 2e-5 + 1e-5, requires_grad=False
        )
        self.kernel = modelopt.init_fp8_linear_kernel(
            activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(1, 128)),
            weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(128, 128)),
            weight_shape=(rows, HIDDEN),
            input_dtype=torch.bfloat16,
            out_dtype=torch.bfloat16,
        )
        self.kernel.process_weights_after_loading(self.layer)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel.apply_weights(self.layer, x, None)


class DraftLayer(torch.nn.Module):
    """What the context projection knows of a draft layer."""

    def __init__(self, kv_cache_dtype: str, blocks: int, scale: float, rotary_emb: Any, norm: Any) -> None:
        super().__init__()
        from vllm.v1.attention.backend import MLAAttentionImpl

        attn = self.self_attn = torch.nn.Module()
        attn.q_lora_rank, attn.kv_lora_rank, attn.qk_rope_head_dim = Q_LORA, LATENT, ROPE
        attn.kv_a_layernorm, attn.rotary_emb = norm, rotary_emb
        attn.kv_cache_dtype = kv_cache_dtype
        dtype = torch.uint8 if kv_cache_dtype == "fp8" else torch.bfloat16
        attn.kv_cache = torch.zeros(blocks, BLOCK_SIZE, WIDTH, dtype=dtype)
        attn.register_buffer("_k_scale", torch.tensor(scale, dtype=torch.float32))
        attn.impl = SimpleNamespace(do_kv_cache_update=functools.partial(MLAAttentionImpl.do_kv_cache_update, None))


def rotary_embedding() -> Any:
    """The draft layers' common rotary embedding."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    return get_rope(ROPE, max_position=1 << 20, rope_parameters=YARN, is_neox_style=False, dtype=torch.float32)


def drafter(
    matrices: Matrices | None,
    kv_cache_dtype: str,
    blocks: int,
    *,
    scale: float = 1.0,
    rotary_emb: Any = None,
    max_tokens: int = 8192,
) -> Any:
    """vLLM's draft model: FP8_PB_WO with `matrices`, or BF16 without."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
    from vllm.models.kimi_k3.nvidia import dspark_mla

    quant_config = ModelOptFp8Config("FP8_PB_WO", True, None, []) if matrices else None
    rotary_emb = rotary_emb or rotary_embedding()

    def layer(*args: Any, **kwargs: Any) -> DraftLayer:
        norm = RMSNorm(LATENT, eps=EPSILON)
        norm.weight.data.copy_(1 + torch.randn(LATENT) / 4)
        return DraftLayer(kv_cache_dtype, blocks, scale, rotary_emb, norm)

    config = SimpleNamespace(
        target_hidden_size=128,
        num_target_layers=1,
        hidden_size=HIDDEN,
        q_lora_rank=Q_LORA,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        rms_norm_eps=EPSILON,
        num_hidden_layers=LAYERS,
        vocab_size=128,
        draft_vocab_size=128,
        markov_rank=4,
    )
    vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens),
    )
    with (
        mock.patch.object(dspark_mla, "K3DSparkDecoderLayer", layer),
        mock.patch.object(dspark_mla, "DSparkMarkovHead", return_value=torch.nn.Module()),
        mock.patch.object(dspark_mla, "get_draft_quant_config", return_value=quant_config),
    ):
        model = dspark_mla.K3DSparkModel(vllm_config=vllm_config, start_layer_id=93, prefix="model")
    proj = model.context_kv_proj
    if matrices:
        for shard, (_, (weight, scales)) in enumerate(matrices.fp8):
            proj.weight.weight_loader(proj.weight, weight, shard)
            proj.weight_scale.weight_loader(proj.weight_scale, scales, shard)
    else:
        proj.weight.data.normal_(std=HIDDEN**-0.5)
    proj.quant_method.process_weights_after_loading(proj)
    model._build_fused_context_kv_metadata()
    return model


def run(model: Any, context: Context) -> None:
    """The model's own function."""
    model.precompute_and_store_context_kv(context.states, context.positions, context.slots)


@contextlib.contextmanager
def without_epilogue(model: Any) -> Iterator[None]:
    """While this holds, the model runs an op for each step that follows the projection."""
    model._run_context_kv_epilogue = never
    yield
    del model._run_context_kv_epilogue


def never(*args: Any) -> bool:
    return False


def layer_by_layer(
    model: Any, projections: Sequence[RawProjection], norm_weights: torch.Tensor, context: Context
) -> None:
    """0.27.1 with a quantized drafter: the full Q+KV projection of each layer, then its norm, RoPE and insert."""
    from vllm import _custom_ops as ops

    for index, (layer, projection) in enumerate(zip(model.layers, projections, strict=True)):
        attn = layer.self_attn
        kv_c, k_pe = projection(context.states)[..., Q_LORA:].split([LATENT, ROPE], dim=-1)
        # The kernel that RMSNorm comes down to, without the choice of it.
        normed = torch.empty(kv_c.shape, dtype=kv_c.dtype, device=kv_c.device)
        ops.rms_norm(normed, kv_c, norm_weights[index], EPSILON)
        k_pe = k_pe.unsqueeze(1)
        rotate(attn, context.positions, k_pe)
        attn.impl.do_kv_cache_update(
            normed, k_pe, attn.kv_cache, context.slots[index], attn.kv_cache_dtype, attn._k_scale
        )


def grouped(model: Any, projection: Any, buffers: Buffers, context: Context) -> None:
    """0.27.1 with a BF16 drafter, and releases from 0.28.0 on with any: one projection, then copies to layer-major,
    one norm, one RoPE over positions repeated for the layers, and one insert, or for an FP8 cache one a layer."""
    from vllm import _custom_ops as ops

    tokens = context.states.shape[0]
    kv = projection(context.states).view(tokens, LAYERS, WIDTH)
    kv_c = kv[..., :LATENT].permute(1, 0, 2).contiguous()
    normed = torch.empty_like(kv_c)
    ops.rms_norm(normed, kv_c, buffers.norm_weights, EPSILON)
    k_pe = kv[..., LATENT:].permute(1, 0, 2).contiguous()
    positions = buffers.positions[: LAYERS * tokens]
    positions.view(LAYERS, tokens).copy_(context.positions)
    attns = [layer.self_attn for layer in model.layers]
    rotate(attns[0], positions, k_pe.view(LAYERS * tokens, 1, ROPE))
    if attns[0].kv_cache_dtype == "auto":
        cache = attns[0].kv_cache
        if len({slots.data_ptr() for slots in context.slots}) == 1:
            slots = context.slots[0].unsqueeze(0).expand(LAYERS, -1)
        else:
            slots = torch.stack(context.slots)
        ops.concat_and_cache_mla_grouped(
            normed,
            k_pe,
            buffers.addresses,
            slots,
            cache.size(1),
            cache.stride(0),
            cache.stride(1),
        )
        return
    for index, attn in enumerate(attns):
        attn.impl.do_kv_cache_update(
            normed[index], k_pe[index].unsqueeze(1), attn.kv_cache, context.slots[index], "fp8", attn._k_scale
        )


class Buffers:
    """What `grouped` keeps between steps."""

    def __init__(self, model: Any, max_tokens: int) -> None:
        attns = [layer.self_attn for layer in model.layers]
        self.norm_weights = torch.stack([attn.kv_a_layernorm.weight.detach() for attn in attns])
        self.positions = torch.empty(LAYERS * max_tokens, dtype=torch.int64)
        self.addresses = torch.tensor([attn.kv_cache.data_ptr() for attn in attns], dtype=torch.int64)


def rotate(attn: Any, positions: torch.Tensor, k_pe: torch.Tensor) -> None:
    from vllm import _custom_ops as ops

    emb = attn.rotary_emb
    ops.rotary_embedding(positions, k_pe, None, ROPE, emb.cos_sin_cache, emb.is_neox_style)
