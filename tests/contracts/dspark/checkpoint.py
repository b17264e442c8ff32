"""A small DSpark drafter's checkpoint: tensors by their published names, in any format, and its config.json.

Layers are numbered from 0, as drafters are published. Row counts of the latent (512 + 64) are K3's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .formats import BF16, Format, Tensors

KV = "kv_a_proj_with_mqa"


@dataclass(frozen=True)
class Geometry:
    """Sizes of a drafter."""

    layers: int = 3
    hidden: int = 256
    heads: int = 8
    q_lora: int = 384
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    v_dim: int = 128
    intermediate: int = 128
    vocab: int = 256
    epsilon: float = 1e-5
    theta: float = 50000.0
    confidence: bool = False  # whether it has a head that predicts acceptance

    @property
    def latent(self) -> int:
        """Rows that one layer adds to the fused projection."""
        return self.kv_lora + self.rope

    def linear(self) -> dict[str, tuple[int, int]]:
        """Linear modules of one layer: name -> (rows, columns)."""
        return {
            "self_attn.q_a_proj": (self.q_lora, self.hidden),
            f"self_attn.{KV}": (self.latent, self.hidden),
            "self_attn.q_b_proj": (self.heads * (self.nope + self.rope), self.q_lora),
            "self_attn.kv_b_proj": (self.heads * (self.nope + self.v_dim), self.kv_lora),
            "self_attn.o_proj": (self.hidden, self.heads * self.v_dim),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    def config(self) -> dict[str, Any]:
        """config.json without quantization."""
        return {
            "architectures": ["K3DSparkModel"],
            "model_type": "k3_dspark",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
            "draft_vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "first_k_dense_replace": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_lora,
            "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.v_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.epsilon,
            "rope_theta": self.theta,
            "max_position_embeddings": 1024,
            "target_hidden_size": self.hidden,
            "target_layer_ids": [0, 1],
            "num_target_layers": 2,
            "markov_rank": 8,
            "block_size": 4,
            "n_predict": 4,
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.confidence,
        }


@dataclass
class Drafter:
    """A drafter on disk: its tensors, its geometry, and what config.json says of its quantization."""

    geometry: Geometry
    tensors: dict[str, torch.Tensor]
    formats: dict[str, Format]
    quantization: dict[str, Any] | None = None
    largest_scale: float = field(default=0.0)

    @classmethod
    def random(
        cls,
        geometry: Geometry,
        seed: int,
        form: Format = BF16,
        *,
        formats: Mapping[str, Format] | None = None,
        quantization: dict[str, Any] | None = None,
        spread: tuple[float, ...] = (1.0,),
    ) -> Drafter:
        """Random tensors, every linear module in `form`, except for those that `formats` names.

        quantization: what config.json says, if not what `form` announces. spread: by what the one scale of a module
        is multiplied, layer after layer in turn (formats with a scale a module only).
        """
        generator = torch.Generator().manual_seed(seed)
        made = cls(geometry, {}, {}, quantization if quantization is not None else form.announce())
        base = 2.0**-8
        for layer in range(geometry.layers):
            scale = base * spread[layer % len(spread)]
            made.largest_scale = max(made.largest_scale, scale)
            for module, (rows, cols) in geometry.linear().items():
                name = f"layers.{layer}.{module}"
                chosen = (formats or {}).get(name, form)
                made.formats[name] = chosen
                for suffix, tensor in chosen.write(rows, cols, scale, generator).items():
                    made.tensors[f"{name}.{suffix}"] = tensor
            at = f"layers.{layer}"
            for norm, width in (
                ("input_layernorm", geometry.hidden),
                ("post_attention_layernorm", geometry.hidden),
                ("self_attn.q_a_layernorm", geometry.q_lora),
                ("self_attn.kv_a_layernorm", geometry.kv_lora),
            ):
                made.tensors[f"{at}.{norm}.weight"] = torch.randn(width, generator=generator).bfloat16()
        for suffix, tensor in form.write(geometry.hidden, 2 * geometry.hidden, base, generator).items():
            made.tensors[f"context_proj.{suffix}"] = tensor
        for name, shape in (
            ("context_norm.weight", (geometry.hidden,)),
            ("final_norm.weight", (geometry.hidden,)),
            ("markov_head.markov_w1.weight", (geometry.vocab, 8)),
            ("markov_head.markov_w2.weight", (geometry.vocab, 8)),
        ):
            made.tensors[name] = torch.randn(shape, generator=generator).bfloat16()
        if geometry.confidence:
            made.tensors["confidence_head.proj.weight"] = torch.randn(1, geometry.hidden + 8, generator=generator)
            made.tensors["confidence_head.proj.bias"] = torch.randn(1, generator=generator)
        return made

    @staticmethod
    def kv_name(layer: int) -> str:
        """The module whose rows the fused projection gathers."""
        return f"layers.{layer}.self_attn.{KV}"

    def kv_tensors(self, layer: int) -> Tensors:
        """What the checkpoint holds for a layer's latent projection, by suffix."""
        at = f"{self.kv_name(layer)}."
        return {name.removeprefix(at): tensor for name, tensor in self.tensors.items() if name.startswith(at)}

    def kv_matrix(self, layer: int) -> torch.Tensor:
        """float64 [kv_lora + rope, hidden] of a layer's latent projection."""
        return self.formats[self.kv_name(layer)].read(self.kv_tensors(layer))

    def changed(self, changes: Mapping[str, torch.Tensor | None]) -> Drafter:
        """The same with tensors replaced or added by name; None leaves one out."""
        tensors = {name: tensor for name, tensor in {**self.tensors, **changes}.items() if tensor is not None}
        return replace(self, tensors=tensors)

    def save(self, folder: Path) -> Path:
        """Write the checkpoint as a user has it."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.geometry.config()
        if self.quantization is not None:
            config["quantization_config"] = self.quantization
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.tensors, folder / "model.safetensors")
        return folder
