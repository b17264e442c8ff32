"""K3's own MLA layer with the FLASH_ATTN_MLA backend, on CPU, and a batch of decodes for it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROPE, LATENT = 8, 24
NOPE, VALUE = 6, 10
NAME = "model.layers.3.self_attn"


class _Prefill:
    def __init__(self, **kwargs: Any) -> None:
        pass


def vllm_config() -> Any:
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig(device="cpu"))


def start_distributed(config: Any) -> None:
    """A gloo group of this process alone, for all of vLLM's kinds of parallelism."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)


def backend_impl(num_heads: int, config: Any) -> Any:
    """The backend's implementation alone, as a layer constructs it."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLAImpl

    with set_current_vllm_config(config):
        return FlashAttnMLAImpl(
            num_heads=num_heads,
            head_size=LATENT + ROPE,
            scale=1.0,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype="auto",
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=None,
            kv_lora_rank=LATENT,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            qk_head_dim=NOPE + ROPE,
            v_head_dim=VALUE,
            kv_b_proj=None,
        )


@dataclass
class Batch:
    """Requests in decode: for each, tokens in the cache already and tokens to decode now."""

    cached: list[int]
    new: list[int]
    block_size: int = 16

    @property
    def tokens(self) -> int:
        return sum(self.new)

    @property
    def lengths(self) -> list[int]:
        return [c + n for c, n in zip(self.cached, self.new, strict=True)]

    def decode_metadata(self) -> Any:
        from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLADecodeMetadata

        pages = [-(-length // self.block_size) for length in self.lengths]
        # Each request's pages, the last request's first: no request reads the right pages by luck.
        table = torch.zeros((len(pages), max(pages)), dtype=torch.int32)
        first = 1
        for request in reversed(range(len(pages))):
            table[request, : pages[request]] = torch.arange(first, first + pages[request])
            first += pages[request]
        return FlashAttnMLADecodeMetadata(
            block_table=table,
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
            dcp_tot_seq_lens=None,
            query_start_loc=torch.tensor([0, *self.new], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            max_query_len=max(self.new),
            max_seq_len=max(self.lengths),
        )

    def slots(self, decode: Any, request: int, start: int, stop: int) -> torch.Tensor:
        """Cache slots of a request's tokens start to stop."""
        token = torch.arange(start, stop)
        pages = decode.block_table[request, token // self.block_size].long()
        return pages * self.block_size + token % self.block_size


class Layer:
    """K3's MultiHeadLatentAttention, loaded with random weights in float32."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_heads: int) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.models.kimi_k3.nvidia import mla
        from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
        from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend

        self._module = mla
        monkeypatch.setattr(mla, "get_attn_backend", lambda *args, **kwargs: FlashAttnMLABackend)
        monkeypatch.setattr(mla, "get_mla_prefill_backend", lambda config: _Prefill)
        monkeypatch.setattr(mla, "fused_mla_decode_q_concat_kv_cache_insert", _concat_and_insert)
        config = vllm_config()
        start_distributed(config)
        with set_current_vllm_config(config), torch.no_grad():
            self.module = mla.MultiHeadLatentAttention(
                config=KimiLinearConfig(),
                hidden_size=32,
                num_heads=num_heads,
                qk_nope_head_dim=NOPE,
                qk_rope_head_dim=ROPE,
                v_head_dim=VALUE,
                q_lora_rank=16,
                kv_lora_rank=LATENT,
                prefix=NAME,
            )
            self.kv_b = torch.randn(num_heads * (NOPE + VALUE), LATENT)
            self.module.kv_b_proj.weight.data.copy_(self.kv_b)
            self.module.process_weights_after_loading(torch.float32)

    def decode(self, monkeypatch: pytest.MonkeyPatch, batch: Batch, q: torch.Tensor, c: list[torch.Tensor]) -> Any:
        """The layer's own decode of the last tokens of each request.

        q: [tokens, heads, nope + rope]. c: for each request, the latents [kv_c | k_pe] of all its tokens.
        """
        decode = batch.decode_metadata()
        cache = torch.full((int(decode.block_table.max()) + 1, batch.block_size, LATENT + ROPE), 1e3)
        self.module.kv_cache = cache
        new, slots = [], []
        for request, (cached, total) in enumerate(zip(batch.cached, batch.lengths, strict=True)):
            cache.view(-1, LATENT + ROPE)[batch.slots(decode, request, 0, cached)] = c[request][:cached]
            new.append(c[request][cached:])
            slots.append(batch.slots(decode, request, cached, total))
        latent = torch.cat(new)
        metadata = SimpleNamespace(
            num_actual_tokens=batch.tokens,
            num_decode_tokens=batch.tokens,
            num_decodes=len(batch.new),
            num_prefills=0,
            query_start_loc=decode.query_start_loc,
            prefill=None,
            decode=decode,
        )
        context = SimpleNamespace(attn_metadata={NAME: metadata}, slot_mapping={NAME: torch.cat(slots)})
        monkeypatch.setattr(self._module, "get_forward_context", lambda: context)
        out = torch.full((batch.tokens, q.shape[1] * VALUE), float("nan"))
        with torch.no_grad():
            self.module._attention(torch.arange(batch.tokens), q, latent[:, :LATENT], latent[:, None, LATENT:], out)
        return out

    def expected(self, batch: Batch, q: torch.Tensor, c: list[torch.Tensor]) -> torch.Tensor:
        """Attention by definition in float64: full keys and values from kv_b, no absorption, no pages."""
        heads = q.shape[1]
        kv_b = self.kv_b.double().view(heads, NOPE + VALUE, LATENT)
        out, done = [], 0
        for new, latents in zip(batch.new, c, strict=True):
            kv_c, k_pe = latents.double().split([LATENT, ROPE], dim=-1)
            k_nope, v = torch.einsum("hol,tl->hto", kv_b, kv_c).split([NOPE, VALUE], dim=-1)
            k = torch.cat([k_nope, k_pe.expand(heads, -1, -1)], dim=-1)
            scores = torch.einsum("nhd,htd->hnt", q[done : done + new].double(), k) * (NOPE + ROPE) ** -0.5
            total = latents.shape[0]
            later = torch.arange(total)[None, :] > torch.arange(total - new, total)[:, None]
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            out.append(torch.einsum("hnt,htv->nhv", weights, v).flatten(1))
            done += new
        return torch.cat(out)


def _concat_and_insert(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """What the Triton kernel of that name does for an unquantized cache without RoPE."""
    kv_cache.view(-1, kv_cache.shape[-1])[slot_mapping] = torch.cat([kv_c, k_pe.reshape(k_pe.shape[0], -1)], dim=-1)
    return torch.cat([ql_nope, q_pe], dim=-1)
