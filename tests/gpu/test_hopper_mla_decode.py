"""K3's MLA decode with the real FlashAttention 3 kernel on Hopper, against attention in float64.

    pytest tests/gpu/test_hopper_mla_decode.py

Runs on the vLLM that is installed (the patched wheel), K3's dimensions as one rank of
eight holds them.  Stock 0.27.1 fails in the first decode: "cp_world_size must be positive".
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="the FLASH_ATTN_MLA backend is Hopper's",
    ),
]
if torch.cuda.is_available():
    import k3_linear

HEADS, HIDDEN = 12, 7168  # 96 heads over 8 ranks
Q_LORA, LATENT, ROPE, NOPE, VALUE = 1536, 512, 64, 128, 128
BLOCK = 64
NAME = "model.layers.3.self_attn"


@pytest.fixture(scope="module")
def layer() -> Iterator[Any]:
    from vllm.models.kimi_k3.nvidia import mla
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
    from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend

    with k3_linear.engine(size=1, rank=0), pytest.MonkeyPatch.context() as patch:
        # Prefill isn't run, and which backend wins on this machine isn't the question.
        patch.setattr(mla, "get_attn_backend", lambda *args, **kwargs: FlashAttnMLABackend)
        patch.setattr(mla, "get_mla_prefill_backend", lambda config: lambda **kwargs: None)
        module = mla.MultiHeadLatentAttention(
            config=KimiLinearConfig(),
            hidden_size=HIDDEN,
            num_heads=HEADS,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            q_lora_rank=Q_LORA,
            kv_lora_rank=LATENT,
            prefix=NAME,
        )
        module.kv_b_proj.weight.data.normal_(std=LATENT**-0.5)
        module.process_weights_after_loading(torch.bfloat16)
        yield module


def schedule(lengths: torch.Tensor, starts: torch.Tensor, query: int, longest: int) -> torch.Tensor:
    """FlashAttention 3's schedule made ahead, as the backend's metadata builder makes it."""
    from vllm.vllm_flash_attn import get_scheduler_metadata

    return get_scheduler_metadata(
        batch_size=lengths.numel(),
        max_seqlen_q=query,
        max_seqlen_k=longest,
        num_heads_q=HEADS,
        num_heads_kv=1,
        headdim=ROPE,
        cache_seqlens=lengths,
        qkv_dtype=torch.bfloat16,
        headdim_v=LATENT,
        page_size=BLOCK,
        cu_seqlens_q=starts,
        causal=True,
        num_splits=0,
    )


def expected(layer: Any, q: torch.Tensor, latents: torch.Tensor, query: int) -> torch.Tensor:
    """One request by definition, in float64: full keys and values, no absorption, no pages."""
    kv_b = layer.kv_b_proj.weight.double().view(HEADS, NOPE + VALUE, LATENT)
    kv_c, k_pe = latents.double().split([LATENT, ROPE], dim=-1)
    k_nope, v = torch.einsum("hol,tl->hto", kv_b, kv_c).split([NOPE, VALUE], dim=-1)
    k = torch.cat([k_nope, k_pe.expand(HEADS, -1, -1)], dim=-1)
    scores = torch.einsum("nhd,htd->hnt", q.double(), k) * (NOPE + ROPE) ** -0.5
    total = latents.shape[0]
    position = torch.arange(total, device=q.device)
    scores = scores.masked_fill(position[None, :] > position[total - query :, None], float("-inf"))
    return torch.einsum("hnt,htv->nhv", scores.softmax(-1), v).flatten(1)


@pytest.mark.parametrize("ahead", [False, True], ids=["schedule_inside", "schedule_ahead"])
@pytest.mark.parametrize("query", [1, 4])
@pytest.mark.parametrize(
    "lengths",
    [[4], [64], [65, 4, 1000], [8192], [2048 + 17 * i for i in range(32)], [4 + 3 * i for i in range(256)]],
    ids=lambda lengths: f"{len(lengths)}x{lengths[0]}..{lengths[-1]}",
)
def test_decode(layer: Any, monkeypatch: pytest.MonkeyPatch, lengths: list[int], query: int, ahead: bool) -> None:
    from vllm.models.kimi_k3.nvidia import mla
    from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLADecodeMetadata

    torch.manual_seed(len(lengths))
    cuda = {"device": "cuda"}
    pages = [-(-length // BLOCK) for length in lengths]
    table = torch.zeros((len(lengths), max(pages)), dtype=torch.int32, **cuda)
    order = (torch.randperm(sum(pages), **cuda) + 1).int()
    cache = torch.full((sum(pages) + 1, BLOCK, LATENT + ROPE), 1e3, dtype=torch.bfloat16, **cuda)
    q = torch.randn((query * len(lengths), HEADS, NOPE + ROPE), dtype=torch.bfloat16, **cuda)
    latents, new, slots, used = [], [], [], 0
    for request, length in enumerate(lengths):
        table[request, : pages[request]] = order[used : used + pages[request]]
        used += pages[request]
        latents.append(torch.randn((length, LATENT + ROPE), dtype=torch.bfloat16, **cuda))
        token = torch.arange(length, **cuda)
        slot = table[request, token // BLOCK].long() * BLOCK + token % BLOCK
        cache.view(-1, LATENT + ROPE)[slot[:-query]] = latents[-1][:-query]
        new.append(latents[-1][-query:])
        slots.append(slot[-query:])

    seq_lens = torch.tensor(lengths, dtype=torch.int32, **cuda)
    starts = torch.arange(0, query * len(lengths) + 1, query, dtype=torch.int32, **cuda)
    decode = FlashAttnMLADecodeMetadata(
        block_table=table,
        seq_lens=seq_lens,
        dcp_tot_seq_lens=None,
        query_start_loc=starts,
        max_query_len=query,
        max_seq_len=max(lengths),
        scheduler_metadata=schedule(seq_lens, starts, query, max(lengths)) if ahead else None,
    )
    metadata = SimpleNamespace(
        num_actual_tokens=q.shape[0],
        num_decode_tokens=q.shape[0],
        num_decodes=len(lengths),
        query_start_loc=starts,
        prefill=None,
        decode=decode,
    )
    context = SimpleNamespace(attn_metadata={NAME: metadata}, slot_mapping={NAME: torch.cat(slots)})
    monkeypatch.setattr(mla, "get_forward_context", lambda: context)
    monkeypatch.setattr(layer, "kv_cache", cache)
    latent = torch.cat(new)
    out = torch.full((q.shape[0], HEADS * VALUE), float("nan"), dtype=torch.bfloat16, **cuda)
    with torch.no_grad():
        positions = torch.arange(q.shape[0], **cuda)
        layer._attention(positions, q, latent[:, :LATENT].contiguous(), latent[:, None, LATENT:], out)

    want = torch.cat([expected(layer, q[query * i : query * (i + 1)], c, query) for i, c in enumerate(latents)])
    error = float((out.double() - want).norm() / want.norm())
    print(f"requests {len(lengths)} query {query} longest {max(lengths)}: relative error {error:.2e}")
    # Rounding of the absorbed query, of the latent output and of the result to bfloat16; a wrong page,
    # mask or scale gives an error near 1.
    assert error < 1.5e-2
