"""What the tiny Kimi-K3 computes, in plain torch from the architecture's definition, in float64 or float32.

Weights are read from a checkpoint folder of any form and dequantized by their format's definition; activations are
never quantized. One sequence at a time, no cache: the recurrence of KDA runs token by token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad, silu

from .contracts import ALGORITHM, BLOCK
from .encode import E4M3_MAX
from .folder import load_tensors
from .geometry import OUTER
from .target import QUANTIZED, SCALES, Tensors, matrix_of

CONV_NORM_EPSILON = 1e-6  # of the L2 norm of KDA's queries and keys
GATED_NORM_EPSILON = 1e-5  # of KDA's output norm


def e4m3_scale(largest: torch.Tensor, power_of_two: bool = False) -> torch.Tensor:
    """The scale under which `largest` becomes 448, or the next power of two above it."""
    scale = largest.clamp(min=1e-10) / E4M3_MAX
    return torch.exp2(torch.ceil(torch.log2(scale))) if power_of_two else scale


def e4m3_groups(x: torch.Tensor, power_of_two: bool = False) -> torch.Tensor:
    """[T, width] rounded to E4M3 under one scale for each token's 128 neighbours."""
    groups = x.view(x.shape[0], -1, BLOCK)
    scale = e4m3_scale(groups.abs().amax(-1, keepdim=True), power_of_two)
    return ((groups / scale).float().to(torch.float8_e4m3fn).to(x.dtype) * scale).view(x.shape)


@dataclass
class Tiny:
    """A checkpoint's text model. `weights` are by name, without the multimodal model's prefix."""

    config: dict[str, Any]
    weights: Tensors
    algorithms: dict[str, str] = field(default_factory=dict)
    """By which algorithm a module is quantized, of those that are."""
    rounding: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    """What is done to a linear module's input: what a kernel's own quantization of activations costs."""
    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    """The output of every attention and MLP of the last call, by the module's name."""

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float64) -> Tiny:
        """Read a folder that `write_target` wrote."""
        config = json.loads((folder / "config.json").read_text())
        return cls.of(config.get("text_config", config), load_tensors(folder), dtype)

    @classmethod
    def of(cls, text_config: dict[str, Any], tensors: Tensors, dtype: torch.dtype = torch.float64) -> Tiny:
        weights: Tensors = {}
        algorithms: dict[str, str] = {}
        for name, tensor in tensors.items():
            if name.endswith(SCALES) or name.startswith(("vision_tower.", "mm_projector.")):
                continue
            plain = name.replace(".weight_packed", ".weight")
            short = plain.removeprefix(OUTER)
            if tensor.dtype in QUANTIZED:
                algorithms[short.removesuffix(".weight")] = QUANTIZED[tensor.dtype]
                tensor = matrix_of(tensors, plain)
            weights[short] = tensor.to(dtype)
        return cls(text_config, weights, algorithms)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, vocabulary] for one sequence of T tokens."""
        hidden = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            hidden = self._layer(layer, hidden)
        return self._norm("model.norm", hidden) @ self.weights["lm_head.weight"].T

    def log_probabilities(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, vocabulary], of the token that follows each."""
        return self.logits(tokens).log_softmax(-1)

    def _layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        at = f"model.layers.{layer}"
        attention = self._kda if layer + 1 in self.config["linear_attn_config"]["kda_layers"] else self._mla
        hidden = hidden + self._see(
            f"{at}.self_attn", attention(f"{at}.self_attn", self._norm(f"{at}.input_layernorm", hidden))
        )
        x = self._norm(f"{at}.post_attention_layernorm", hidden)
        if layer >= self.config["first_k_dense_replace"]:
            return hidden + self._see(f"{at}.block_sparse_moe", self._moe(f"{at}.block_sparse_moe", x))
        return hidden + self._see(f"{at}.mlp", self._mlp(f"{at}.mlp", x))

    def _see(self, name: str, output: torch.Tensor) -> torch.Tensor:
        self.seen[name] = output
        return output

    def is_block_scaled(self, module: str) -> bool:
        return self.algorithms.get(module) == ALGORITHM

    def with_fp8_inputs(self, power_of_two: bool = False) -> Tiny:
        """The same, but the input of each FP8_PB_WO module is rounded to E4M3 as block kernels do."""

        def rounding(module: str, x: torch.Tensor) -> torch.Tensor:
            return e4m3_groups(x, power_of_two) if self.is_block_scaled(module) else x

        return replace(self, rounding=rounding)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = x if self.rounding is None else self.rounding(name, x)
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, name: str, x: torch.Tensor, epsilon: float | None = None) -> torch.Tensor:
        epsilon = self.config["rms_norm_eps"] if epsilon is None else epsilon
        return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * self.weights[f"{name}.weight"]

    def _conv(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Causal convolution of each channel over the last tokens, then SiLU."""
        kernel = self.weights[f"{name}.weight"][:, 0]  # [channels, width], the present token last
        width = kernel.shape[1]
        windows = pad(x, (0, 0, width - 1, 0)).unfold(0, width, 1)  # [T, channels, width]
        return silu((windows * kernel).sum(-1))

    def _kda(self, at: str, x: torch.Tensor) -> torch.Tensor:
        """Kimi Delta Attention: a state [key, value] a head that decays by channel and learns by the delta rule."""
        sizes = self.config["linear_attn_config"]
        heads, width = sizes["num_heads"], sizes["head_dim"]
        q, k, v = (self._conv(f"{at}.{n}_conv1d", self._linear(f"{at}.{n}_proj", x)) for n in "qkv")
        q, k, v = (part.view(-1, heads, width) for part in (q, k, v))
        q, k = (part * (part.square().sum(-1, keepdim=True) + CONV_NORM_EPSILON).rsqrt() for part in (q, k))
        raw = self._linear(f"{at}.f_b_proj", self._linear(f"{at}.f_a_proj", x)) + self.weights[f"{at}.dt_bias"]
        rate = self.weights[f"{at}.A_log"].exp()[:, None]
        decay = (sizes["gate_lower_bound"] * torch.sigmoid(rate * raw.view(-1, heads, width))).exp()
        beta = torch.sigmoid(self._linear(f"{at}.b_proj", x))
        state = x.new_zeros(heads, width, width)
        outputs = []
        for token in range(x.shape[0]):
            state = state * decay[token][..., None]
            known = torch.einsum("hk,hkv->hv", k[token], state)
            learned = beta[token][:, None] * (v[token] - known)
            state = state + k[token][..., None] * learned[:, None]
            outputs.append(torch.einsum("hk,hkv->hv", q[token] * width**-0.5, state))
        gate = torch.sigmoid(self._linear(f"{at}.g_proj", x)).view(-1, heads, width)
        core = self._norm(f"{at}.o_norm", torch.stack(outputs), GATED_NORM_EPSILON) * gate
        return self._linear(f"{at}.o_proj", core.flatten(1))

    def _mla(self, at: str, x: torch.Tensor) -> torch.Tensor:
        """Multi-head latent attention without rotation, its output gated."""
        config = self.config
        heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        q = self._linear(f"{at}.q_b_proj", self._norm(f"{at}.q_a_layernorm", self._linear(f"{at}.q_a_proj", x)))
        q = q.view(-1, heads, nope + rope)
        latent, k_pe = self._linear(f"{at}.kv_a_proj_with_mqa", x).split([config["kv_lora_rank"], rope], -1)
        kv = self._linear(f"{at}.kv_b_proj", self._norm(f"{at}.kv_a_layernorm", latent))
        k, v = kv.view(-1, heads, nope + config["v_head_dim"]).split([nope, config["v_head_dim"]], -1)
        k = torch.cat([k, k_pe[:, None].expand(-1, heads, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (nope + rope) ** -0.5
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
        gated = attended.flatten(1) * torch.sigmoid(self._linear(f"{at}.g_proj", x))
        return self._linear(f"{at}.o_proj", gated)

    def _situ(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        beta, linear_beta = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)

    def _mlp(
        self, at: str, x: torch.Tensor, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Any:
        gate, up, down = (f"{at}.{name}" for name in names)
        return self._linear(down, self._situ(self._linear(gate, x), self._linear(up, x)))

    def routing(self, at: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, experts) [T, experts a token]: chosen by biased scores, weighted by the plain ones."""
        scores = torch.sigmoid(self._linear(f"{at}.gate", x))
        biased = scores + self.weights[f"{at}.gate.e_score_correction_bias"]
        chosen = biased.topk(self.config["num_experts_per_token"], -1).indices
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True) * self.config["routed_scaling_factor"], chosen

    def _moe(self, at: str, x: torch.Tensor) -> torch.Tensor:
        """Routed experts in the latent space, and the shared experts beside them."""
        weights, chosen = self.routing(at, x)
        latent = self._linear(f"{at}.routed_expert_down_proj", x)
        mixed = torch.zeros_like(latent)
        for expert in range(self.config["num_experts"]):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            output = self._mlp(f"{at}.experts.{expert}", latent[tokens], ("w1", "w3", "w2"))
            mixed.index_add_(0, tokens, output * weights[tokens, place][:, None])
        routed = self._linear(f"{at}.routed_expert_up_proj", self._norm(f"{at}.routed_expert_norm", mixed))
        return routed + self._mlp(f"{at}.shared_experts", x)
