"""FlashAttention 3's varlen decode over a paged MLA cache, in float64, with the real one's demands on its arguments."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

MODULE = "vllm.vllm_flash_attn"


class FakeFlashAttention:
    """Calls in the order they came, each as the keywords it was made with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def varlen(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        world, rank = kwargs["cp_world_size"], kwargs["cp_rank"]
        # What the extension itself says (hopper/flash_api.cpp).
        if world <= 0:
            raise RuntimeError("cp_world_size must be positive, required by downstream unified code path.")
        if not 0 <= rank < world:
            raise RuntimeError("cp_rank must be in [0, cp_world_size)")
        out, lse = attend(**kwargs)
        return (out, lse) if kwargs["return_softmax_lse"] else out

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the backend's module be imported without the CUDA extension, and call this instead."""
        if "vllm.v1.attention.backends.mla.flashattn_mla" not in sys.modules:
            module = ModuleType(MODULE)
            module.__spec__ = ModuleSpec(MODULE, loader=None)
            module.flash_attn_varlen_func = module.get_scheduler_metadata = None
            monkeypatch.setitem(sys.modules, MODULE, module)
            from vllm.v1.attention.backends import fa_utils

            for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):  # where later releases import them from
                monkeypatch.setattr(fa_utils, name, None, raising=False)
        from vllm.v1.attention.backends.mla import flashattn_mla

        monkeypatch.setattr(flashattn_mla, "flash_attn_varlen_func", self.varlen)
        monkeypatch.setattr(flashattn_mla, "flash_attn_supports_mla", lambda: True)


def attend(
    *,
    q: torch.Tensor,  # [tokens, heads, rope]
    k: torch.Tensor,  # [blocks, block_size, 1, rope]
    v: torch.Tensor,  # [blocks, block_size, 1, latent]
    q_v: torch.Tensor,  # [tokens, heads, latent]
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    cp_world_size: int,
    cp_rank: int,
    cp_tot_seqused_k: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of (q k + q_v v) over each request's pages; of context parallelism, this rank's part of the keys."""
    out = torch.empty_like(q_v)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float64)
    starts = cu_seqlens_q.tolist()
    for request, (begin, end) in enumerate(pairwise(starts)):
        length = int(seqused_k[request])
        total = length if cp_tot_seqused_k is None else int(cp_tot_seqused_k[request])
        keys, values = (t[block_table[request].long()].flatten(0, 2)[:length].double() for t in (k, v))
        scores = q[begin:end].double() @ keys.T + q_v[begin:end].double() @ values.T
        scores = (scores * softmax_scale).transpose(0, 1)  # [heads, queries, keys]
        if causal:
            positions = torch.arange(length) * cp_world_size + cp_rank
            queries = torch.arange(total - (end - begin), total)
            scores = scores.masked_fill(positions[None, :] > queries[:, None], float("-inf"))
        out[begin:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
        lse[:, begin:end] = scores.logsumexp(-1)
    return out, lse
