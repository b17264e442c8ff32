"""kv-b-input-dtype: an FP8 latent that enters kv_b_proj reaches its kernel in the model's dtype.

With an FP8 KV cache and FP8 prefill queries the MLA latent can arrive in E4M3, while FP8_PB_WO and MXFP8 kernels
quantize 16-bit inputs themselves. Whoever calls kv_b_proj, the new tokens' prefill or the chunked context, its
kernel is given the latent in the model's dtype, the values unchanged. Any other input, and every other layer, is
passed on as it came. So it is with an adapter on kv_b_proj, whose own kernels read the latent too.

Refusals: none on any base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from k3 import compat, modules
from k3.checkpoint import ALGORITHM, Checkpoint, Geometry, block_quantized
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import ColumnParallelLinearWithLoRA
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

pytest_plugins = ("k3.fixtures",)

ATTENTION = "language_model.model.layers.1.self_attn"
LATENT, ROWS = 512, 1024
FP8 = torch.float8_e4m3fn


def latent(count: int, width: int = LATENT) -> torch.Tensor:
    """Random finite E4M3 values [count, width]."""
    return block_quantized(count, width, torch.Generator().manual_seed(7))[0]


def load_mxfp8(built: modules.Linear, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(8)
    built.load("weight", block_quantized(rows, cols, generator)[0])
    built.load("weight_scale", torch.randint(120, 130, (rows, cols // 32), generator=generator, dtype=torch.uint8))


def load_block_fp8(built: modules.Linear, rows: int, cols: int) -> None:
    weight, scale = block_quantized(rows, cols, torch.Generator().manual_seed(8))
    built.load("weight", weight)
    built.load("weight_scale", scale)


FORMATS = {"FP8_PB_WO": (modules.block_fp8_config, load_block_fp8), "MXFP8": (modules.mxfp8_config, load_mxfp8)}


@pytest.fixture(params=FORMATS)
def algorithm(request: pytest.FixtureRequest) -> str:
    return request.param


def projection(config: VllmConfig, algorithm: str, name: str) -> modules.Linear:
    """A loaded projection [1024 x 512] of this name."""
    quant, load = FORMATS[algorithm]
    make = RowParallelLinear if name == "o_proj" else ColumnParallelLinear
    built = modules.linear(config, make, quant(), LATENT, ROWS, prefix=f"{ATTENTION}.{name}")
    load(built, ROWS, LATENT)
    built.finish()
    return built


def test_an_fp8_latent_is_restored_for_kv_b_proj(config: VllmConfig, algorithm: str) -> None:
    built = projection(config, algorithm, "kv_b_proj")
    x = latent(5)
    out = built(x)
    (call,) = built.log.calls
    assert call.x.dtype == modules.MODEL_DTYPE
    assert torch.equal(call.x.float(), x.float())
    assert torch.equal(out, built(x.to(modules.MODEL_DTYPE)))


def test_a_16_bit_latent_is_passed_on_as_it_is(config: VllmConfig, algorithm: str) -> None:
    built = projection(config, algorithm, "kv_b_proj")
    x = latent(5).to(modules.MODEL_DTYPE)
    built(x)
    assert built.log.calls[0].x.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("name", ["q_b_proj", "g_proj", "o_proj"])
def test_other_layers_are_untouched(config: VllmConfig, algorithm: str, name: str) -> None:
    built = projection(config, algorithm, name)
    x = latent(5)
    built(x)
    assert built.log.calls[0].x.dtype == FP8
    assert built.log.calls[0].x.data_ptr() == x.data_ptr()


@pytest.fixture(scope="module", params=FORMATS)
def model(
    request: pytest.FixtureRequest, configure: Callable[[Checkpoint], VllmConfig], first: Checkpoint
) -> modules.Model:
    """K3's text model with kv_b_proj quantized alone, as one of eight ranks."""
    name = first.module(first.geometry.mla_layer, "kv_b_proj")
    checkpoint = first.only(name)
    if request.param != ALGORITHM:
        rows, cols = first.geometry.mla()["kv_b_proj"]
        scale = torch.randint(120, 130, (rows, cols // 32), dtype=torch.uint8)
        checkpoint = replace(
            checkpoint,
            tensors=checkpoint.tensors | {f"{name}.weight_scale": scale},
            quantized={name: request.param},
        )
    built = modules.build(configure(checkpoint), size=8, rank=3)
    built.load(checkpoint.weights())
    return built


@pytest.mark.parametrize("caller", compat.KV_B_CALLERS)
def test_every_caller_hands_the_kernel_the_model_dtype(model: modules.Model, caller: str) -> None:
    mla = model.attention(Geometry.mla_layer)
    model.log.calls.clear()
    x = latent(6)
    compat.KV_B_CALLERS[caller](mla, x)
    (call,) = model.log.calls_of(mla.kv_b_proj)
    assert call.x.dtype == modules.MODEL_DTYPE
    assert torch.equal(call.x.float(), x.float())


class Adapted(ColumnParallelLinearWithLoRA):
    """kv_b_proj as LoRA wraps it, with an adapter that adds nothing and notes what it reads."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__(layer)
        self.read: list[torch.dtype] = []
        self.create_lora_weights(1, LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=modules.MODEL_DTYPE))
        self.punica_wrapper = SimpleNamespace(add_lora_linear=self.note, no_lora=False)

    def note(self, output: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> None:
        self.read.append(x.dtype)


def test_chunked_context_hands_an_adapter_the_model_dtype(
    model: modules.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    mla = model.attention(Geometry.mla_layer)
    adapted = Adapted(mla.kv_b_proj)
    for owner in (mla, mla.impl):
        if hasattr(owner, "kv_b_proj"):
            monkeypatch.setattr(owner, "kv_b_proj", adapted)
    model.log.calls.clear()
    x = latent(6)
    compat.prefill_with_context(mla, x)
    (call,) = model.log.calls_of(adapted.base_layer)
    assert call.x.dtype == modules.MODEL_DTYPE
    assert torch.equal(call.x.float(), x.float())
    assert adapted.read == [modules.MODEL_DTYPE]
