"""Float64 definitions: what an expert computes, and what the TRTLLM-Gen kernel computes from its scales.

Quantization rounds; scaling must not.  Rounding is left out on both sides, so
that they agree to float32's precision of the scales or not at all.

The kernel's first GEMM gives raw gate and up accumulators.  Then, as documented
by its callers: ``output1_scale_gate_scalar`` dequantizes the gate (for SiTU and
for activations with one half: everything that enters the nonlinearity), the
clamp and the shift act on the raw accumulator, and ``output1_scale_scalar``
multiplies the result, which the second GEMM reads as quantized input.
``output2_scale_scalar`` multiplies the second GEMM's result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .fake_flashinfer import ActivationType, Call


@dataclass(frozen=True)
class Act:
    """An activation by vLLM's name, and the numbers that the model's config gives it."""

    name: str
    kernel: ActivationType
    beta: float | None = None  # SiTU
    linear_beta: float | None = None  # SiTU
    limit: float | None = None  # SwiGLU
    alpha: float | None = None  # SwiGLU
    shift: float | None = None  # SwiGLU

    @property
    def is_gated(self) -> bool:
        return not self.name.endswith("_no_mul")

    def __str__(self) -> str:
        return self.name if self.limit is None else f"{self.name}_clamped"


SITU = Act("situ", ActivationType.Situ, beta=4.0, linear_beta=25.0)
NON_SITU = (
    Act("silu", ActivationType.Swiglu),
    Act("silu", ActivationType.Swiglu, limit=0.75),
    Act("gelu", ActivationType.Geglu),
    Act("gelu_tanh", ActivationType.Geglu),
    Act("swigluoai_uninterleave", ActivationType.Swiglu, limit=7.0, alpha=1.702, shift=1.0),
    Act("relu2_no_mul", ActivationType.Relu2),
)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float, shift: float) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + shift)


def activate(act: Act, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activation by its definition, on dequantized numbers (``up`` unused where there is one half)."""
    if act.name == "situ":
        assert act.beta is not None
        assert act.linear_beta is not None
        left = act.beta * torch.tanh(gate / act.beta) * torch.sigmoid(gate)
        return left * act.linear_beta * torch.tanh(up / act.linear_beta)
    if act.name in ("gelu", "gelu_tanh"):
        return _gelu(gate) * up
    if act.name == "relu2_no_mul":
        return gate.clamp(min=0.0) ** 2
    return _clamped_swiglu(gate, up, act.limit or math.inf, act.alpha or 1.0, act.shift or 0.0)


@dataclass(frozen=True)
class Expert:
    """One expert: integers as quantized, and the scales that make them real numbers."""

    gate: torch.Tensor  # [intermediate, hidden]
    up: torch.Tensor  # [intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    w13_scale_2: float
    w2_scale_2: float

    @classmethod
    def random(cls, generator: torch.Generator, w13_scale_2: float, w2_scale_2: float) -> Expert:
        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-6, 7, shape, generator=generator).double()

        return cls(integers(6, 8), integers(6, 8), integers(8, 6), w13_scale_2, w2_scale_2)

    def forward(self, act: Act, x: torch.Tensor) -> torch.Tensor:
        """By definition: dequantize, then compute."""
        return self.w2_scale_2 * self.down @ self._hidden(act, x)

    def magnitude(self, act: Act, x: torch.Tensor) -> torch.Tensor:
        """What forward adds up, without cancellation: the measure for rounding errors in it."""
        return self.w2_scale_2 * self.down.abs() @ self._hidden(act, x).abs()

    def input_for(self, generator: torch.Generator) -> torch.Tensor:
        """An input whose dequantized gate and up are neither lost in rounding nor all in saturation."""
        return torch.randn(8, generator=generator, dtype=torch.float64) / (4.0 * self.w13_scale_2)

    def _hidden(self, act: Act, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.w13_scale_2 * w @ x for w in (self.gate, self.up))
        return activate(act, gate, up)

    def forward_in_kernel(self, call: Call, slot: int, x: torch.Tensor, a1_gscale: float) -> torch.Tensor:
        """As the kernel does: integers all the way, with the scales it was handed for this slot."""

        def scale(name: str, default: float | None = None) -> float:
            tensor = call[name]
            if tensor is None:
                assert default is not None, f"the kernel needs {name}"
                return default
            assert tensor.dtype == torch.float32
            return float(tensor.flatten()[slot])

        x_q = x * a1_gscale
        gate, up = self.gate @ x_q, self.up @ x_q
        dequant, out = scale("output1_scale_gate_scalar"), scale("output1_scale_scalar")
        kernel = ActivationType(call["activation_type"])
        if kernel is ActivationType.Situ:
            beta, linear_beta = scale("gemm1_alpha"), scale("gemm1_beta")
            gate, up = gate * dequant, up * dequant
            hidden = beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)
        elif kernel is ActivationType.Geglu:
            hidden = _gelu(gate * dequant) * up
        elif kernel is ActivationType.Relu2:
            hidden = (gate * dequant).clamp(min=0.0) ** 2
        else:
            assert kernel is ActivationType.Swiglu
            limit = scale("gemm1_clamp_limit", math.inf)
            gate, up = dequant * gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = gate * torch.sigmoid(scale("gemm1_alpha", 1.0) * gate) * (up + scale("gemm1_beta", 0.0))
        return scale("output2_scale_scalar") * self.down @ (out * hidden)
