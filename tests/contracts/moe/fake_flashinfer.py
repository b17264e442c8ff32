"""A flashinfer without kernels: it records what vLLM hands to the fused MoE and returns zeros.

Only names that vLLM's NVFP4 experts reach for are there.  Layout helpers are
identities: the contracts judge scales, and a row order would only obscure them.
"""

from __future__ import annotations

import enum
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

Call = dict[str, Any]


class ActivationType(enum.IntEnum):
    """The activations of flashinfer's own enumeration that vLLM asks for."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    SwigluBias = 5
    Relu2 = 6
    Situ = 99


class SfLayout(enum.Enum):
    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


class FakeFlashInfer:
    """Calls in the order they came, each as the keywords it was made with."""

    def __init__(self) -> None:
        self.moe_calls: list[Call] = []
        self.quantize_calls: list[Call] = []

    def _moe(self, **kwargs: Any) -> list[torch.Tensor]:
        self.moe_calls.append(kwargs)
        hidden_states = kwargs["hidden_states"]
        packed = 2 if hidden_states.dtype == torch.uint8 else 1
        return [
            hidden_states.new_zeros((hidden_states.shape[0], hidden_states.shape[1] * packed), dtype=torch.bfloat16)
        ]

    def _quantize(self, x: torch.Tensor, global_scale: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        self.quantize_calls.append({"x": x, "global_scale": global_scale, **kwargs})
        tokens, width = x.shape
        packed = torch.zeros((tokens, width // 2), dtype=torch.uint8)
        block_scale = torch.ones((tokens, width // 16), dtype=torch.float8_e4m3fn).view(torch.uint8)
        if not kwargs.get("per_token_activation", False):
            return packed, block_scale
        return packed, block_scale, x.abs().amax(dim=1).float()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        root, fused_moe, core = (
            ModuleType("flashinfer"),
            ModuleType("flashinfer.fused_moe"),
            ModuleType("flashinfer.fused_moe.core"),
        )

        def rows(cache: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.arange(x.shape[0])

        core.ActivationType = ActivationType
        core._maybe_get_cached_w3_w1_permute_indices = rows
        core.get_w2_permute_indices_with_cache = rows
        fused_moe.core = core
        fused_moe.ActivationType = ActivationType
        fused_moe.trtllm_fp4_block_scale_moe = self._moe
        fused_moe.trtllm_fp4_block_scale_routed_moe = self._moe
        root.fused_moe = fused_moe
        root.SfLayout = SfLayout
        root.nvfp4_quantize = self._quantize
        root.nvfp4_block_scale_interleave = torch.flatten  # the real one gives one dimension, too
        for module in (root, fused_moe, core):
            module.__spec__ = ModuleSpec(module.__name__, loader=None)
            monkeypatch.setitem(sys.modules, module.__name__, module)
