"""Write a small Kimi-K3 checkpoint in ModelOpt's FP8_PB_WO layout, from the format's definition.

FP8_PB_WO stores a matrix as E4M3 bytes [rows, cols] beside one FP32 scale for each block of 128 x 128, the
scales in a tensor of shape [ceil(rows / 128), 1, ceil(cols / 128), 1]. The real matrix is their product. Tensor
names are those of the published checkpoint; row counts are the real ones, only the hidden size is small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

BLOCK = 128
ALGORITHM = "FP8_PB_WO"
OUTER = "language_model."


@dataclass(frozen=True)
class Geometry:
    """Sizes of the text model. Layer 0 is KDA, layer 1 MLA, layer 2 the MTP layer (MLA)."""

    hidden: int = 256
    heads: int = 96
    head_dim: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    v_dim: int = 128
    conv_width: int = 4
    intermediate: int = 1536
    vocab: int = 6144

    kda_layer = 0
    mla_layer = 1
    mtp_layer = 2

    def kda(self) -> dict[str, tuple[int, int]]:
        """Quantized projections of a KDA layer: name -> (rows, columns)."""
        width = self.heads * self.head_dim
        return {
            "q_proj": (width, self.hidden),
            "k_proj": (width, self.hidden),
            "v_proj": (width, self.hidden),
            "g_proj": (width, self.hidden),
            "f_a_proj": (self.head_dim, self.hidden),
            "b_proj": (self.heads, self.hidden),
            "f_b_proj": (width, self.head_dim),
            "o_proj": (self.hidden, width),
        }

    def mla(self) -> dict[str, tuple[int, int]]:
        """Quantized projections of an MLA layer: name -> (rows, columns)."""
        return {
            "q_a_proj": (self.q_lora, self.hidden),
            "kv_a_proj_with_mqa": (self.kv_lora + self.rope, self.hidden),
            "g_proj": (self.heads * self.v_dim, self.hidden),
            "q_b_proj": (self.heads * (self.nope + self.rope), self.q_lora),
            "kv_b_proj": (self.heads * (self.nope + self.v_dim), self.kv_lora),
            "o_proj": (self.hidden, self.heads * self.v_dim),
        }

    def text_config(self, mtp_layers: int = 0) -> dict:
        """The text model's config.json, without quantization."""
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": mtp_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "q_lora_rank": self.q_lora,
            "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.v_dim,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "hidden_act": "silu",
            "max_position_embeddings": 256,
            "linear_attn_config": {
                "kda_layers": [self.kda_layer + 1],
                "full_attn_layers": [self.mla_layer + 1],
                "num_heads": self.heads,
                "head_dim": self.head_dim,
                "short_conv_kernel_size": self.conv_width,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
            },
        }


def block_quantized(rows: int, cols: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A random FP8_PB_WO matrix: E4M3 [rows, cols] and FP32 scales [ceil(rows/128), 1, ceil(cols/128), 1].

    Scales spread over 2**12, each with a mantissa of its own, and neighbours never share an exponent: a row
    under the block next to its own can't come out right.
    """
    codes = torch.randint(0, 0x7F, (rows, cols), generator=generator, dtype=torch.uint8)  # 0x7F is NaN
    signs = torch.randint(0, 2, (rows, cols), generator=generator, dtype=torch.uint8) << 7
    weight = (codes | signs).view(torch.float8_e4m3fn)
    blocks = (-(-rows // BLOCK), -(-cols // BLOCK))
    # Even exponents on the white squares of a chess board, odd ones on the black.
    board = (torch.arange(blocks[0])[:, None] + torch.arange(blocks[1])) % 2
    exponents = 2 * torch.randint(0, 6, blocks, generator=generator) + board
    mantissa = 1 + torch.rand(blocks, generator=generator)
    scale = torch.ldexp(mantissa, exponents - 16).float()
    return weight, scale[:, None, :, None].contiguous()


def quantization_config(layers: Mapping[str, str], ignore: tuple[str, ...] = (), **extra: object) -> dict:
    """config.json's `quantization_config` of a mixed ModelOpt checkpoint: layer name -> algorithm."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": list(ignore),
        "quantized_layers": _recipes(layers),
        **extra,
    }


def hf_quant_config(layers: Mapping[str, str], ignore: tuple[str, ...] = ()) -> dict:
    """The older hf_quant_config.json of the same checkpoint."""
    return {
        "producer": {"name": "modelopt", "version": "0.45.0"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "exclude_modules": list(ignore),
            "quantized_layers": _recipes(layers),
        },
    }


def _recipes(layers: Mapping[str, str]) -> dict[str, dict]:
    return {
        name: {"quant_algo": algo, **({"group_size": 16} if "NVFP4" in algo else {})} for name, algo in layers.items()
    }


@dataclass
class Checkpoint:
    """Tensors by their checkpoint name, and which modules are quantized with what."""

    geometry: Geometry
    tensors: dict[str, torch.Tensor]
    quantized: dict[str, str]
    mtp: bool = False
    ignore: tuple[str, ...] = field(default=("lm_head",))

    @classmethod
    def random(cls, geometry: Geometry, seed: int, mtp: bool = False) -> Checkpoint:
        """A whole checkpoint of random blocks: one KDA, one MLA and, if asked, one MTP layer."""
        generator = torch.Generator().manual_seed(seed)
        made = cls(geometry, {}, {}, mtp)
        made._plain("model.embed_tokens.weight", geometry.vocab, geometry.hidden)
        made._plain("model.norm.weight", geometry.hidden)
        made._plain("lm_head.weight", geometry.vocab, geometry.hidden)
        made._layer(geometry.kda_layer, geometry.kda(), generator)
        made._kda_extras()
        made._layer(geometry.mla_layer, geometry.mla(), generator)
        made._mla_extras(geometry.mla_layer)
        if mtp:
            made._layer(geometry.mtp_layer, geometry.mla(), generator)
            made._mla_extras(geometry.mtp_layer)
            at = f"model.layers.{geometry.mtp_layer}"
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                made._plain(f"{at}.{norm}.weight", geometry.hidden)
            made._plain(f"{at}.eh_proj.weight", geometry.hidden, 2 * geometry.hidden)
            made._plain(f"{at}.embed_tokens.weight", geometry.vocab, geometry.hidden)
            made._plain(f"{at}.shared_head.head.weight", geometry.vocab, geometry.hidden)
        return made

    @staticmethod
    def module(layer: int, projection: str) -> str:
        """A projection's name as the checkpoint writes it."""
        return f"{OUTER}model.layers.{layer}.self_attn.{projection}"

    def matrix(self, layer: int, projection: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(E4M3 weight, FP32 scales in ModelOpt's four dimensions) of one projection."""
        name = self.module(layer, projection)
        return self.tensors[f"{name}.weight"], self.tensors[f"{name}.weight_scale"]

    def weights(self, changed: Mapping[str, torch.Tensor | None] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) as the outer multimodal model hands them to the text model.

        `changed` replaces tensors by full name; None leaves one out.
        """
        for name, tensor in {**self.tensors, **(changed or {})}.items():
            if tensor is not None:
                yield name.removeprefix(OUTER), tensor

    def only(self, *modules: str) -> Checkpoint:
        """The same checkpoint with these modules quantized alone; the others' matrices are left out."""
        dropped = tuple(f"{name}." for name in self.quantized if name not in modules)
        tensors = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(dropped)}
        return replace(self, tensors=tensors, quantized={name: self.quantized[name] for name in modules})

    def config(self) -> dict:
        """config.json."""
        text = self.geometry.text_config(mtp_layers=int(self.mtp))
        return {**text, "quantization_config": quantization_config(self.quantized, self.ignore)}

    def save_config(self, folder: Path) -> Path:
        """Write config.json and hf_quant_config.json, which is all that building a model reads."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config()))
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config(self.quantized, self.ignore)))
        return folder

    def save(self, folder: Path) -> Path:
        """Write the whole checkpoint."""
        save_file(self.tensors, self.save_config(folder) / "model.safetensors")
        return folder

    def _layer(self, layer: int, projections: dict[str, tuple[int, int]], generator: torch.Generator) -> None:
        for projection, (rows, cols) in projections.items():
            name = self.module(layer, projection)
            self.tensors[f"{name}.weight"], self.tensors[f"{name}.weight_scale"] = block_quantized(
                rows, cols, generator
            )
            self.quantized[name] = ALGORITHM
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self._plain(f"{at}.{norm}.weight", self.geometry.hidden)
        for mlp in ("gate_proj", "up_proj"):
            self._plain(f"{at}.mlp.{mlp}.weight", self.geometry.intermediate, self.geometry.hidden)
        self._plain(f"{at}.mlp.down_proj.weight", self.geometry.hidden, self.geometry.intermediate)

    def _kda_extras(self) -> None:
        width, at = self.geometry.heads * self.geometry.head_dim, f"model.layers.{self.geometry.kda_layer}.self_attn"
        for conv in ("q_conv1d", "k_conv1d", "v_conv1d"):
            self._plain(f"{at}.{conv}.weight", width, 1, self.geometry.conv_width, dtype=torch.float32)
        self._plain(f"{at}.dt_bias", width, dtype=torch.float32)
        self._plain(f"{at}.A_log", self.geometry.heads, dtype=torch.float32)
        self._plain(f"{at}.o_norm.weight", self.geometry.head_dim)

    def _mla_extras(self, layer: int) -> None:
        at = f"model.layers.{layer}.self_attn"
        self._plain(f"{at}.q_a_layernorm.weight", self.geometry.q_lora)
        self._plain(f"{at}.kv_a_layernorm.weight", self.geometry.kv_lora)

    def _plain(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tensors[f"{OUTER}{name}"] = torch.ones(shape, dtype=dtype)
