"""Small models of five kinds, and their checkpoints in the formats that vLLM's users have.

A model says which linear layers vLLM builds, of which of the checkpoint's matrices each is made and how ranks share
it. A checkpoint is written from each format's own definition, the contracts' `dspark.formats` and `merged.formats`.
Nothing here is vLLM's.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from dspark import formats
from dspark.formats import Format
from merged.formats import QUARK_NVFP4

HIDDEN, VOCAB = 384, 256


@dataclass(frozen=True)
class Part:
    """One matrix of the checkpoint: its module's name there and its rows."""

    name: str
    rows: int
    copies: int = 0  # ranks that hold the same KV head: TP size over this, if that is more than one
    absent: bool = False  # no file holds it, and the model never reads it


@dataclass(frozen=True)
class Linear:
    """A linear layer of vLLM's: parts one below the other, shared by rows, by columns, or held whole by each rank."""

    name: str
    parts: tuple[Part, ...]
    cols: int
    split: str = "rows"
    bias: bool = False

    def share(self, tensors: list[torch.Tensor | None], size: int, rank: int) -> list[torch.Tensor | None]:
        """Each part as a rank of `size` computes it; biases are one-dimensional."""
        shares: list[torch.Tensor | None] = []
        for part, tensor in zip(self.parts, tensors, strict=True):
            if tensor is None or self.split == "none":
                shares.append(tensor)
            elif self.split == "cols":
                shares.append(tensor.chunk(size, 1)[rank] if tensor.dim() == 2 else tensor)
            else:
                copies = max(1, size // part.copies) if part.copies else 1
                shares.append(tensor.chunk(size // copies)[rank // copies])
        return shares

    def rows(self, size: int) -> list[int]:
        """How many rows each part has on a rank."""
        if self.split != "rows":
            return [part.rows for part in self.parts]
        return [part.rows // min(size, part.copies or size) for part in self.parts]


@dataclass(frozen=True)
class Model:
    """config.json without quantization, linear layers, and all else that a checkpoint holds, by its shape."""

    name: str
    config: Mapping[str, Any]
    linears: tuple[Linear, ...]
    plain: Mapping[str, tuple[int, ...]]
    unquantized: tuple[str, ...] = ("lm_head",)  # patterns of checkpoint modules that stay BF16, beside `plain`
    experts: int = 0

    def quantized(self, module: str) -> bool:
        return not any(fnmatch.fnmatchcase(module, pattern) for pattern in self.unquantized)


def attention(at: str, head: int, heads: int, kv: int, bias: bool, absent: bool = False) -> list[Linear]:
    parts = (
        Part(f"{at}.q_proj", head * heads),
        Part(f"{at}.k_proj", head * kv, copies=kv, absent=absent),
        Part(f"{at}.v_proj", head * kv, copies=kv, absent=absent),
    )
    return [
        Linear(f"{at}.qkv_proj", parts, HIDDEN, bias=bias),
        Linear(f"{at}.o_proj", (Part(f"{at}.o_proj", HIDDEN),), head * heads, "cols"),
    ]


def mlp(at: str, intermediate: int) -> list[Linear]:
    return [
        Linear(
            f"{at}.gate_up_proj",
            (Part(f"{at}.gate_proj", intermediate), Part(f"{at}.up_proj", intermediate)),
            HIDDEN,
        ),
        Linear(f"{at}.down_proj", (Part(f"{at}.down_proj", HIDDEN),), intermediate, "cols"),
    ]


def _plain(layers: int, norms: tuple[str, ...], tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(layers):
        for norm in norms:
            shapes[f"model.layers.{layer}.{norm}.weight"] = (HIDDEN,)
    return shapes


def _experts(at: str, count: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(count):
        shapes[f"{at}.{expert}.gate_proj.weight"] = (intermediate, HIDDEN)
        shapes[f"{at}.{expert}.up_proj.weight"] = (intermediate, HIDDEN)
        shapes[f"{at}.{expert}.down_proj.weight"] = (HIDDEN, intermediate)
    return shapes


NORMS = ("input_layernorm", "post_attention_layernorm")


def _dense(
    name: str, kind: str, head: int, kv: int, intermediate: int, bias: bool = False, tied: bool = False, **more: Any
) -> Model:
    layers, heads = 2, HIDDEN // head if kind == "qwen2" else 4  # Qwen2 knows no other head size
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]],
        "model_type": kind,
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 256,
    }
    linears = [
        linear
        for layer in range(layers)
        for linear in (
            *attention(f"model.layers.{layer}.self_attn", head, heads, kv, bias),
            *mlp(f"model.layers.{layer}.mlp", intermediate),
        )
    ]
    return Model(name, config, tuple(linears), _plain(layers, NORMS, tied), **more)


def _deepseek() -> Model:
    heads, layers, q_rank, kv_rank, nope, rope, v_dim = 4, 2, 128, 128, 64, 64, 64
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": v_dim,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "num_nextn_predict_layers": 0,
    }
    plain = _plain(layers, NORMS, tied=False)
    linears = []
    for layer in range(layers):
        at = f"model.layers.{layer}.self_attn"
        # The second matrix ends inside a block.
        fused = (Part(f"{at}.q_a_proj", q_rank), Part(f"{at}.kv_a_proj_with_mqa", kv_rank + rope))
        linears += [
            Linear(f"{at}.fused_qkv_a_proj", fused, HIDDEN, "none"),
            Linear(f"{at}.q_b_proj", (Part(f"{at}.q_b_proj", heads * (nope + rope)),), q_rank),
            Linear(f"{at}.kv_b_proj", (Part(f"{at}.kv_b_proj", heads * (nope + v_dim)),), kv_rank),
            Linear(f"{at}.o_proj", (Part(f"{at}.o_proj", HIDDEN),), heads * v_dim, "cols"),
        ]
        plain[f"{at}.q_a_layernorm.weight"] = (q_rank,)
        plain[f"{at}.kv_a_layernorm.weight"] = (kv_rank,)
    linears += mlp("model.layers.0.mlp", 512)
    linears += mlp("model.layers.1.mlp.shared_experts", 256)
    plain["model.layers.1.mlp.gate.weight"] = (4, HIDDEN)
    plain["model.layers.1.mlp.gate.e_score_correction_bias"] = (4,)
    plain |= _experts("model.layers.1.mlp.experts", 4, 128)
    return Model(
        "deepseek-v3 with MLA",
        config,
        tuple(linears),
        plain,
        ("lm_head", "model.layers.1.mlp.gate", "model.layers.1.mlp.experts*"),
        experts=4,
    )


def _gemma() -> Model:
    head, heads, kv, layers, shared, intermediate = 128, 4, 1, 4, 2, 512
    norms = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    config = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": HIDDEN,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "global_head_dim": head,
        "num_hidden_layers": layers,
        "num_kv_shared_layers": shared,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "sliding_window": 64,
    }
    plain = _plain(layers, norms, tied=True)
    linears = []
    for layer in range(layers):
        at, absent = f"model.layers.{layer}.self_attn", layer >= layers - shared
        linears += attention(at, head, heads, kv, False, absent)
        linears += mlp(f"model.layers.{layer}.mlp", intermediate)
        plain[f"{at}.q_norm.weight"] = (head,)
        if not absent:
            plain[f"{at}.k_norm.weight"] = (head,)
        plain[f"model.layers.{layer}.layer_scalar"] = (1,)
    return Model("gemma-4 with shared KV", config, tuple(linears), plain)


def _moe() -> Model:
    head, heads, kv, layers, intermediate = 64, 6, 2, 2, 128
    config = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "moe_intermediate_size": intermediate,
        "shared_expert_intermediate_size": 256,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
    }
    plain = _plain(layers, NORMS, tied=False)
    linears = [
        linear
        for layer in range(layers)
        for linear in attention(f"model.layers.{layer}.self_attn", head, heads, kv, True)
    ]
    linears += mlp("model.layers.0.mlp", 512)
    linears += mlp("model.layers.1.mlp.shared_expert", 256)
    plain["model.layers.1.mlp.gate.weight"] = (4, HIDDEN)
    plain["model.layers.1.mlp.shared_expert_gate.weight"] = (1, HIDDEN)
    plain |= _experts("model.layers.1.mlp.experts", 4, intermediate)
    return Model(
        "qwen2-moe with BF16 experts",
        config,
        tuple(linears),
        plain,
        (
            "lm_head",
            "model.layers.1.mlp.gate",
            "model.layers.1.mlp.shared_expert_gate",
            "model.layers.1.mlp.experts*",
        ),
        experts=4,
    )


MODELS = {
    "llama": _dense("llama", "llama", 128, 2, 512),
    # Every matrix of gate and up ends inside a block.
    "llama-uneven": _dense("llama, uneven", "llama", 64, 2, 320),
    "qwen2": _dense("qwen2 with bias", "qwen2", 64, 2, 512, bias=True, tied=True),
    # Its list of what stays BF16 doesn't name lm_head, which is the embedding.
    "qwen2-tied": _dense("qwen2, tied and unnamed", "qwen2", 64, 2, 512, bias=True, tied=True, unquantized=()),
    "deepseek": _deepseek(),
    "gemma": _gemma(),
    "moe": _moe(),
}


@dataclass(frozen=True)
class Storage:
    """How a checkpoint stores a model: the format of each of its modules, and config.json's word for that."""

    name: str
    choose: Callable[[str], Format]
    announce: Callable[[Model], dict[str, Any]]


def _ignored(model: Model, regular: bool = False) -> list[str]:
    if not regular:
        return list(model.unquantized)
    return ["re:" + fnmatch.translate(name) if "*" in name else name for name in model.unquantized]


def _modelopt(form: Format) -> Storage:
    return Storage(form.name, lambda _: form, lambda model: {**(form.announce() or {}), "ignore": _ignored(model)})


def _compressed(form: Format) -> Storage:
    return Storage(
        form.name, lambda _: form, lambda model: {**(form.announce() or {}), "ignore": _ignored(model, True)}
    )


def _deepseek_fp8(form: Format) -> Storage:
    def announce(model: Model) -> dict[str, Any]:
        names = sorted(
            {name.rpartition(".")[0] for name in model.plain if not model.quantized(name.rpartition(".")[0])}
        )
        return {**(form.announce() or {}), "modules_to_not_convert": names}

    return Storage(form.name, lambda _: form, announce)


def _quark(form: Format) -> Storage:
    return Storage(
        form.name, lambda _: form, lambda model: {**(form.announce() or {}), "exclude": _ignored(model, True)}
    )


def _mixed(name: str, attention: Format, rest: Format) -> Storage:
    def choose(module: str) -> Format:
        return attention if ".self_attn." in module else rest

    def announce(model: Model) -> dict[str, Any]:
        layers = {
            part.name: choose(part.name).algorithm or ""
            for linear in model.linears
            for part in linear.parts
            if not part.absent
        }
        return {**formats.mixed(layers), "ignore": _ignored(model)}

    return Storage(name, choose, announce)


STORAGES = {
    "modelopt-fp8": _modelopt(formats.FP8),
    "modelopt-nvfp4": _modelopt(formats.NVFP4),
    "modelopt-nvfp4-a16": _modelopt(formats.NVFP4_W4A16),
    "modelopt-mxfp8": _modelopt(formats.MXFP8),
    "modelopt-pb-wo": _modelopt(formats.FP8_PB_WO),
    "mixed-fp8-nvfp4": _mixed("ModelOpt mixed FP8 and NVFP4", formats.FP8, formats.NVFP4),
    "mixed-nvfp4-fp8": _mixed("ModelOpt mixed NVFP4 and FP8", formats.NVFP4, formats.FP8),
    "mixed-pb-wo-nvfp4": _mixed("ModelOpt mixed FP8_PB_WO and NVFP4", formats.FP8_PB_WO, formats.NVFP4),
    "ct-nvfp4": _compressed(formats.CT_NVFP4),
    "ct-nvfp4-a16": _compressed(formats.CT_NVFP4_W4A16),
    "ct-block": _compressed(formats.CT_BLOCK),
    "ct-fp8": _compressed(formats.CT_TENSOR),
    "fp8-block": _deepseek_fp8(formats.FP8_DEEPSEEK),
    "quark-nvfp4": _quark(QUARK_NVFP4),
}
# Global scales of a layer's matrices: the parts of a merged layer differ, no ratio but one is a power of two.
APART = (0.5, 0.171, 0.25)
ALIKE = (0.37, 0.37, 0.37)


@dataclass
class Checkpoint:
    """Tensors by name, and in float64 what the matrices of each linear layer mean."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    matrices: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    biases: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    forms: dict[str, Format] = field(default_factory=dict)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As a file's reader hands them out."""
        yield from ((name, tensor.clone()) for name, tensor in self.tensors.items())


def write(model: Model, storage: Storage, seed: int, scales: tuple[float, ...] = APART) -> Checkpoint:
    """A random checkpoint; `scales` are the global scales of a layer's matrices, where the format has any."""
    generator = torch.Generator().manual_seed(seed)
    made = Checkpoint()
    for linear in model.linears:
        matrices: list[torch.Tensor | None] = []
        biases: list[torch.Tensor | None] = []
        for part, scale in zip(linear.parts, scales, strict=False):
            if part.absent:
                matrices.append(None)
                biases.append(None)
                continue
            form = storage.choose(part.name)
            tensors = form.write(part.rows, linear.cols, scale, generator)
            made.tensors |= {f"{part.name}.{name}": tensor for name, tensor in tensors.items()}
            matrices.append(form.read(tensors))
            made.forms[linear.name] = form
            if linear.bias:
                bias = torch.randn(part.rows, generator=generator).bfloat16()
                made.tensors[f"{part.name}.bias"] = bias
                biases.append(bias.double())
            else:
                biases.append(None)
        made.matrices[linear.name], made.biases[linear.name] = matrices, biases
    for name, shape in model.plain.items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        made.tensors[name] = torch.randn(shape, generator=generator).to(dtype)
    return made


def config_json(model: Model, storage: Storage) -> dict[str, Any]:
    """The checkpoint's config.json."""
    return {**model.config, "torch_dtype": "bfloat16", "quantization_config": storage.announce(model)}
