"""Sizes of the tiny Kimi-K3: the real latent and head sizes, few layers, heads and experts, and a small hidden size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import contracts
from .vocabulary import BOS, EOS, MEDIA, PAD, VOCABULARY

OUTER = "language_model."
# Shapes of the matrices [rows, columns] by what follows the layer's name.
Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Geometry:
    """The target's sizes. Layers are counted from 0; the first is dense, as K3's is.

    K3 has an MLA layer after three KDA layers each, and one at the very end.
    """

    layers: int = 5
    mla_layers: tuple[int, ...] = (3, 4)
    dense_layers: int = 1
    mtp_layers: int = 1
    intermediate: int = 2048
    experts: int = 16
    experts_per_token: int = 4
    latent: int = 512
    expert_intermediate: int = 512
    shared_experts: int = 1
    routed_scaling: float = 2.5
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    epsilon: float = 1e-5
    gate_lower_bound: float = -5.0
    max_positions: int = 8192
    attention: contracts.Geometry = field(
        default_factory=lambda: contracts.Geometry(hidden=1024, heads=12, vocab=VOCABULARY)
    )

    @property
    def hidden(self) -> int:
        return self.attention.hidden

    @property
    def all_layers(self) -> range:
        """Layers that the checkpoint holds, those of MTP last."""
        return range(self.layers + self.mtp_layers)

    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers or layer >= self.layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.dense_layers

    def projections(self, layer: int) -> Shapes:
        """The attention projections, all of which the mixed form quantizes."""
        return self.attention.mla() if self.is_mla(layer) else self.attention.kda()

    def expert(self) -> Shapes:
        """One routed expert: w1 gate, w3 up, w2 down."""
        wide, narrow = self.expert_intermediate, self.latent
        return {"w1": (wide, narrow), "w3": (wide, narrow), "w2": (narrow, wide)}

    def mlp(self, intermediate: int) -> Shapes:
        """A dense layer's or the shared experts' MLP."""
        return {
            "gate_proj": (intermediate, self.hidden),
            "up_proj": (intermediate, self.hidden),
            "down_proj": (self.hidden, intermediate),
        }

    def text_config(self) -> dict[str, Any]:
        """The text model's part of config.json."""
        linear = self.attention.text_config()["linear_attn_config"]
        mla = [layer + 1 for layer in self.mla_layers]
        return {
            **self.attention.text_config(self.mtp_layers),
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "hidden_act": "situ",
            "activation_situ_beta": self.situ_beta,
            "activation_situ_linear_beta": self.situ_linear_beta,
            "rms_norm_eps": self.epsilon,
            "max_position_embeddings": self.max_positions,
            "model_max_length": self.max_positions,
            "linear_attn_config": {
                **linear,
                "kda_layers": [n for n in range(1, self.layers + 1) if n not in mla],
                "full_attn_layers": mla,
                "gate_lower_bound": self.gate_lower_bound,
            },
            "num_experts": self.experts,
            "num_experts_per_token": self.experts_per_token,
            "num_shared_experts": self.shared_experts,
            "moe_intermediate_size": self.expert_intermediate,
            "routed_expert_hidden_size": self.latent,
            "latent_moe_use_norm": True,
            "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "topk_method": "noaux_tc",
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": self.routed_scaling,
            "tie_word_embeddings": False,
            **_special_tokens(),
        }

    def config(self) -> dict[str, Any]:
        """config.json of the multimodal model, without quantization."""
        return {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "torch_dtype": "bfloat16",
            "text_config": self.text_config(),
            "vision_config": vision_config(self.hidden),
            "media_placeholder_token_id": MEDIA,
            "image_placeholder": "<|kimi_image_placeholder|>",
            "tie_word_embeddings": False,
            **_special_tokens(),
        }


def _special_tokens() -> dict[str, int]:
    return {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


VISION_HIDDEN, VISION_INTERMEDIATE, VISION_GRID, PATCH = 128, 256, 16, 14


def vision_config(hidden: int) -> dict[str, Any]:
    """A vision tower of one layer: there so that the checkpoint is that of the multimodal model."""
    return {
        "model_type": "kimi_k3_vision",
        "patch_size": PATCH,
        "init_pos_emb_height": VISION_GRID,
        "init_pos_emb_width": VISION_GRID,
        "vt_hidden_size": VISION_HIDDEN,
        "vt_intermediate_size": VISION_INTERMEDIATE,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 1,
        "qkv_hidden_size": VISION_HIDDEN,
        "mm_hidden_size": VISION_HIDDEN,
        "text_hidden_size": hidden,
    }


def vision_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the vision tower and of the projector."""
    block, merged = "vision_tower.encoder.blocks.0", 4 * VISION_HIDDEN
    return {
        "vision_tower.patch_embed.proj.weight": (VISION_HIDDEN, 3, PATCH, PATCH),
        "vision_tower.patch_embed.pos_emb.weight": (VISION_GRID, VISION_GRID, VISION_HIDDEN),
        f"{block}.norm0.weight": (VISION_HIDDEN,),
        f"{block}.norm1.weight": (VISION_HIDDEN,),
        f"{block}.wqkv.weight": (3 * VISION_HIDDEN, VISION_HIDDEN),
        f"{block}.wo.weight": (VISION_HIDDEN, VISION_HIDDEN),
        f"{block}.mlp.fc0.weight": (VISION_INTERMEDIATE, VISION_HIDDEN),
        f"{block}.mlp.fc1.weight": (VISION_HIDDEN, VISION_INTERMEDIATE),
        "vision_tower.encoder.final_layernorm.weight": (VISION_HIDDEN,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (hidden, merged),
        "mm_projector.post_norm.weight": (hidden,),
    }
