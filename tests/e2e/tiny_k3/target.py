"""The target's weights in BF16, and their quantized forms.

What makes the numbers mean something:

- The residual stream begins with the token's embedding, of variance 1, and every attention and MLP adds about
  `CONTRIBUTION` of it, so that half of what reaches the head is the layers' work.
- A head row is `MEMORY` times the embedding of its predecessor in one fixed cycle through all words, plus noise of
  `SPREAD` nats: the most likely next word is mostly the cycle's next one, while every logit depends on every layer.
- The first dimensions of an embedding are a code that says which experts the token goes to. Layers perturb it, but
  seldom so far that two experts are nearly tied: a choice that rounding could turn would move log-probabilities by
  more than what it is to be compared with.
- Each 128 x 128 block of an attention projection and each group of 16 in an expert has a gain of its own between 1/4
  and 4. Scales in a wrong place are wrong by up to 16 times.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from . import contracts, encode
from .geometry import OUTER, Geometry, vision_shapes
from .seeded import matrix, noise, permutation
from .vocabulary import FIRST_WORD, VOCABULARY, WORDS

Tensors = dict[str, torch.Tensor]

CONTRIBUTION = 0.35  # RMS of what one attention or MLP adds to the residual stream, of which the embedding is 1
MLA_CONTRIBUTION = 0.6  # of which there are few
CODE = 4.0  # size of the code's elements
MEMORY, SPREAD = 0.5, 2.0
ATTENTION_BLOCK, EXPERT_BLOCK = (contracts.BLOCK, contracts.BLOCK), (1, contracts.NVFP4_GROUP)
# RMS of each projection's output for inputs of RMS 1. Outputs of o_proj and down_proj are made to meet CONTRIBUTION
# with the RMS that their inputs were seen to have.
SIZES = {
    "q_proj": 1.5,
    "k_proj": 1.5,
    "v_proj": 1.5,
    "g_proj": 2.0,
    "f_a_proj": 1.0,
    "f_b_proj": 2.0,
    "b_proj": 1.5,
    "q_a_proj": 1.0,
    "kv_a_proj_with_mqa": 1.0,
    "q_b_proj": 1.2,
    "kv_b_proj": 1.2,
}
KDA_OUT, MLA_OUT = CONTRIBUTION / 0.55, MLA_CONTRIBUTION / 0.35
GATE_UP, MLP_DOWN = 1.5, CONTRIBUTION / 1.2
SHARED_DOWN, LATENT_UP = 0.2 / 1.2, 0.3


def successor(seed: int) -> torch.Tensor:
    """[VOCABULARY]: the word that follows each word in the cycle; a special token is its own successor."""
    following = torch.arange(VOCABULARY)
    following[FIRST_WORD:] = FIRST_WORD + permutation(seed, "cycle", WORDS)
    return following


def original(geometry: Geometry, seed: int) -> Tensors:
    """Every tensor by its checkpoint name, unquantized."""
    return Writer(geometry, seed).tensors


class Writer:
    """Fills a dictionary with the model's tensors."""

    def __init__(self, geometry: Geometry, seed: int) -> None:
        self.geometry, self.seed = geometry, seed
        self.tensors: Tensors = {}
        hidden = geometry.hidden
        embedding = noise(seed, "embedding", VOCABULARY, hidden)
        embedding[:, : geometry.experts] = CODE * self.code()
        self.put("model.embed_tokens.weight", embedding)
        for layer in geometry.all_layers:
            self._layer(layer)
            if layer >= geometry.layers:
                self._mtp(layer, embedding)
        self.norm("model.norm", hidden)
        self.put("lm_head.weight", self.head(embedding))
        for name, shape in vision_shapes(hidden).items():
            value = noise(seed, name, *shape) * 0.05 if len(shape) > 1 else torch.ones(shape)
            self.tensors[name] = value.bfloat16()

    def head(self, embedding: torch.Tensor) -> torch.Tensor:
        """lm_head [VOCABULARY, hidden]. Special tokens have no predecessor and are rarely likely."""
        rows = SPREAD * noise(self.seed, "head", *embedding.shape)
        rows[:FIRST_WORD] *= 0.25
        remembered = embedding.clone()
        remembered[:, : self.geometry.experts] = 0  # words that share experts shall not look alike
        rows[successor(self.seed)[FIRST_WORD:]] += MEMORY * remembered[FIRST_WORD:]
        return rows / embedding.shape[1] ** 0.5

    def code(self) -> torch.Tensor:
        """[VOCABULARY, experts] of 1 and -1: as many ones in each row as a token has experts."""
        order = noise(self.seed, "code", VOCABULARY, self.geometry.experts).argsort(dim=-1, stable=True).argsort(dim=-1)
        return 2.0 * (order < self.geometry.experts_per_token) - 1

    def put(self, name: str, value: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tensors[f"{OUTER}{name}"] = value.to(dtype).contiguous()

    def norm(self, name: str, width: int) -> None:
        self.put(f"{name}.weight", 1 + 0.2 * noise(self.seed, name, width))

    def linear(self, name: str, shape: tuple[int, int], size: float, block: tuple[int, int] | None = None) -> None:
        self.put(f"{name}.weight", matrix(self.seed, name, *shape, size, block))

    def _layer(self, layer: int) -> None:
        at, geometry = f"model.layers.{layer}", self.geometry
        self.norm(f"{at}.input_layernorm", geometry.hidden)
        self.norm(f"{at}.post_attention_layernorm", geometry.hidden)
        out = MLA_OUT if geometry.is_mla(layer) else KDA_OUT
        for projection, shape in geometry.projections(layer).items():
            size = SIZES.get(projection, out)
            self.linear(f"{at}.self_attn.{projection}", shape, size, ATTENTION_BLOCK)
        if geometry.is_mla(layer):
            self.norm(f"{at}.self_attn.q_a_layernorm", geometry.attention.q_lora)
            self.norm(f"{at}.self_attn.kv_a_layernorm", geometry.attention.kv_lora)
        else:
            self._kda(f"{at}.self_attn")
        if geometry.is_moe(layer):
            self._moe(f"{at}.block_sparse_moe")
        else:
            self._mlp(f"{at}.mlp", geometry.intermediate, MLP_DOWN)

    def _kda(self, at: str) -> None:
        attention = self.geometry.attention
        width = attention.heads * attention.head_dim
        for conv in ("q_conv1d", "k_conv1d", "v_conv1d"):
            kernel = 0.5 * noise(self.seed, f"{at}.{conv}", width, 1, attention.conv_width)
            self.put(f"{at}.{conv}.weight", kernel, torch.float32)
        # Decay of a few per cent to a third a token: neither without memory nor without end.
        self.put(f"{at}.dt_bias", -3.5 + 0.8 * noise(self.seed, f"{at}.dt_bias", width), torch.float32)
        self.put(f"{at}.A_log", 0.3 * noise(self.seed, f"{at}.A_log", attention.heads), torch.float32)
        self.norm(f"{at}.o_norm", attention.head_dim)

    def _mlp(self, at: str, intermediate: int, down: float) -> None:
        for projection, shape in self.geometry.mlp(intermediate).items():
            self.linear(f"{at}.{projection}", shape, down if projection == "down_proj" else GATE_UP)

    def _moe(self, at: str) -> None:
        geometry = self.geometry
        gate = matrix(self.seed, f"{at}.gate", geometry.experts, geometry.hidden, 0.3, None)
        gate[permutation(self.seed, f"{at}.code", geometry.experts), torch.arange(geometry.experts)] += 1.0
        self.put(f"{at}.gate.weight", gate)
        bias = 0.1 * noise(self.seed, f"{at}.gate.e_score_correction_bias", geometry.experts)
        self.put(f"{at}.gate.e_score_correction_bias", bias, torch.float32)
        self.linear(f"{at}.routed_expert_down_proj", (geometry.latent, geometry.hidden), 1.0)
        for expert in range(geometry.experts):
            # No two neighbours of one size, so that an expert under another's scale, or under one twice, shows: the
            # norm behind the experts would hide a factor that they share.
            for projection, shape in geometry.expert().items():
                size = 2.0 ** (expert % 3) if projection != "w2" else 2.0 ** -(expert % 4)
                self.linear(f"{at}.experts.{expert}.{projection}", shape, size, EXPERT_BLOCK)
        self.norm(f"{at}.routed_expert_norm", geometry.latent)
        self.linear(f"{at}.routed_expert_up_proj", (geometry.hidden, geometry.latent), LATENT_UP)
        self._mlp(f"{at}.shared_experts", geometry.shared_experts * geometry.expert_intermediate, SHARED_DOWN)

    def _mtp(self, layer: int, embedding: torch.Tensor) -> None:
        """What an MTP layer has beside a decoder layer. It continues the cycle from the token it is given."""
        at, hidden = f"model.layers.{layer}", self.geometry.hidden
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self.norm(f"{at}.{name}", hidden)
        mixed = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
        self.put(f"{at}.eh_proj.weight", mixed + matrix(self.seed, f"{at}.eh_proj", hidden, 2 * hidden, 0.3, None))
        self.put(f"{at}.embed_tokens.weight", embedding)
        self.put(f"{at}.shared_head.head.weight", self.head(embedding))


PROJECTION = re.compile(rf"{re.escape(OUTER)}model\.layers\.\d+\.self_attn\.\w+_(?:proj|proj_with_mqa)\.weight")
EXPERT = re.compile(rf"({re.escape(OUTER)}model\.layers\.\d+\.block_sparse_moe\.experts)\.\d+\.w[123]\.weight")


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def second_scale(tensors: Tensors, name: str) -> float:
    """NVFP4's second scale of an expert's matrix: w1 and w3, which one kernel merges, have the same."""
    if name.endswith(".w2.weight"):
        return encode.global_scale(tensors[name])
    expert = name[: -len(".w1.weight")]
    return encode.global_scale(tensors[f"{expert}.w1.weight"], tensors[f"{expert}.w3.weight"])


def mixed(tensors: Tensors) -> Tensors:
    """ModelOpt's MIXED_PRECISION: attention projections FP8_PB_WO, routed experts NVFP4 with input_scale 1."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if PROJECTION.fullmatch(name):
            made[name], made[f"{name}_scale"] = encode.fp8_pb_wo(tensor)
        elif EXPERT.fullmatch(name):
            second = second_scale(tensors, name)
            made[name], made[f"{name}_scale"] = encode.nvfp4(tensor, second)
            made[f"{name}_scale_2"] = torch.tensor(second)
            made[f"{_module(name)}.input_scale"] = torch.tensor(1.0)
        else:
            made[name] = tensor
    return made


def compressed(tensors: Tensors) -> Tensors:
    """compressed-tensors' nvfp4-pack-quantized of the routed experts: the same codes under other names.

    Its global scales are divisors, where ModelOpt's are factors.
    """
    made: Tensors = {}
    for name, tensor in tensors.items():
        if EXPERT.fullmatch(name):
            second = second_scale(tensors, name)
            made[f"{name}_packed"], made[f"{name}_scale"] = encode.nvfp4(tensor, second)
            made[f"{name}_global_scale"] = torch.tensor([1 / second])
            made[f"{_module(name)}.input_global_scale"] = torch.tensor([1.0])
        else:
            made[name] = tensor
    return made


def dequantized(tensors: Tensors) -> Tensors:
    """BF16 of either quantized form, under the names of the original."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight"):
            made[name] = matrix_of(tensors, name).bfloat16() if tensor.dtype in QUANTIZED else tensor
        elif name.endswith(".weight_packed"):
            plain = name.removesuffix("_packed")
            made[plain] = matrix_of(tensors, plain).bfloat16()
        elif not name.endswith(SCALES):
            made[name] = tensor
    return made


# Which algorithm a matrix's type tells of: no other tensors have one of these as a weight.
QUANTIZED = {torch.uint8: "NVFP4", torch.float8_e4m3fn: contracts.ALGORITHM}
SCALES = (".weight_scale", ".weight_scale_2", ".input_scale", ".weight_global_scale", ".input_global_scale")


def matrix_of(tensors: Tensors, name: str) -> torch.Tensor:
    """float64 of the matrix called `name`, in whatever form it is stored; by the formats' definitions."""
    module = _module(name)
    stored = {
        suffix: tensors[f"{module}.{suffix}"]
        for suffix in ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale")
        if f"{module}.{suffix}" in tensors
    }
    if "weight_packed" in stored:
        return contracts.formats.CT_NVFP4.read(stored)
    if stored["weight"].dtype == torch.uint8:
        return contracts.formats.NVFP4.read(stored)
    if stored["weight"].dtype == torch.float8_e4m3fn:
        return contracts.dequantize(stored["weight"], stored["weight_scale"])
    return stored["weight"].double()


# What the published checkpoint leaves alone, as its metadata says it.
EXCLUDED = (
    "*block_sparse_moe.gate*",
    "*block_sparse_moe.routed_expert_up_proj*",
    "*block_sparse_moe.routed_expert_down_proj*",
    "*block_sparse_moe.routed_expert_norm*",
    "*block_sparse_moe.shared_experts*",
    "*self_attn.q_conv1d*",
    "*self_attn.k_conv1d*",
    "*self_attn.v_conv1d*",
    "*self_attn.o_norm*",
    "*self_attn.q_a_layernorm*",
    "*self_attn.kv_a_layernorm*",
    "*layernorm*",
    "language_model.model.layers.0.mlp.*",
    "language_model.lm_head",
    "vision_tower*",
    "mm_projector*",
)


def quantized_layers(tensors: Tensors) -> dict[str, str]:
    """Module -> algorithm of a mixed checkpoint: each attention projection, and each layer's experts as one module."""
    layers: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn and name.endswith(".weight"):
            layers[_module(name)] = contracts.ALGORITHM
        elif experts := EXPERT.fullmatch(name):
            layers[experts[1]] = "NVFP4"
    return layers


# Engines' names of merged projections, and the shards of which any one makes the metadata name it.
MERGED = {
    "in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"),
    "fused_qkvg_proj": ("q_proj", "k_proj", "v_proj", "g_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def _aliases(name: str) -> list[str]:
    """A module's name as any engine may look it up."""
    names = {name, name.replace("block_sparse_moe", "mlp")}
    inner = {short for short in names if short.startswith(f"{OUTER}model.")}
    names |= {short.removeprefix(OUTER) for short in inner}
    names |= {short.removeprefix(f"{OUTER}model.") for short in inner}
    return sorted(names)


def _with_aliases(layers: dict[str, str]) -> dict[str, str]:
    merged = {
        f"{name.rpartition('.')[0]}.{whole}": algorithm
        for name, algorithm in layers.items()
        for whole, shards in MERGED.items()
        if name.rpartition(".")[2] in shards
    }
    return {alias: algorithm for name, algorithm in {**layers, **merged}.items() for alias in _aliases(name)}


def mixed_metadata(tensors: Tensors, aliases: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json's quantization_config, hf_quant_config.json) of a mixed checkpoint.

    aliases: list each module under every name that an engine may look it up by, merged ones included, as the public
    converter of the published checkpoint does; otherwise under the checkpoint's own names only.
    """
    layers = quantized_layers(tensors)
    excluded = list(EXCLUDED)
    if aliases:
        layers = _with_aliases(layers)
        excluded = [alias for name in EXCLUDED for alias in _aliases(name)]
    legacy = contracts.hf_quant_config(layers, tuple(excluded))
    legacy["quantization"]["group_size"] = contracts.NVFP4_GROUP
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": contracts.NVFP4_GROUP}
    groups: dict[str, dict[str, Any]] = {
        "NVFP4": {"input_activations": dict(four_bits), "weights": dict(four_bits)},
        contracts.ALGORITHM: {"quant_algo": contracts.ALGORITHM},
    }
    used = list(dict.fromkeys(layers.values()))
    for algorithm in used:
        groups[algorithm]["targets"] = sorted(name for name, of in layers.items() if of == algorithm)
    config = contracts.quantization_config(
        layers,
        tuple(excluded),
        config_groups={f"group_{number}": group for number, group in enumerate(map(groups.get, used))},
        producer=legacy["producer"],
    )
    return {**config, "quant_method": "modelopt_mixed" if aliases else "modelopt"}, legacy


# Everything but the experts; patterns, since a model's names differ in what precedes the layers.
IGNORED = (
    "re:.*self_attn.*",
    r"re:.*layers\.\d+\.mlp\..*",
    "re:.*shared_experts.*",
    "re:.*routed_expert_(down|up)_proj",
    "re:.*block_sparse_moe.gate",
    "re:.*eh_proj",
    "re:.*shared_head.*",
    "re:.*lm_head",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
)


def compressed_metadata() -> dict[str, Any]:
    """config.json's quantization_config of a compressed-tensors checkpoint."""
    config = contracts.formats.CT_NVFP4.announce()
    assert config is not None
    return {**config, "ignore": list(IGNORED)}


FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "bf16": lambda tensors: tensors,
    "mixed": mixed,
    "reference": lambda tensors: dequantized(mixed(tensors)),
    "compressed-tensors": compressed,
    "compressed-tensors-reference": lambda tensors: dequantized(compressed(tensors)),
}
# The BF16 form of what each quantized form means.
REFERENCES = {"mixed": "reference", "compressed-tensors": "compressed-tensors-reference"}
