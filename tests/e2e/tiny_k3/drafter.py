"""A DSpark drafter of the tiny target, in BF16, FP8_PB_WO and NVFP4.

How it drafts: the target's hidden states after `target_layer_ids`, side by side, become the context from which each
draft layer fills its latent cache. One pass then runs over the last accepted token and a mask token for each further
position; its hidden states go through the target's head. Tokens are taken from left to right, each after adding the
Markov head's bias w2 @ w1[previous token] to the head's logits.

How long its drafts are accepted: w1 is random with rows of length 1, and w2 holds, at each word, `MARKOV` times the row
of the word's predecessor in the target's cycle, so the bias of the cycle's next word is `MARKOV` and that of any other
has a standard deviation of MARKOV / sqrt(rank). Against base logits spread by `target.SPREAD` nats, the drafter names
the cycle's next word at nearly every position; at the first one the residual path says the same. A greedy target
accepts a position as often as it follows the cycle itself, a, and stops at the first that it does not: with n draft
tokens the acceptance length is 1 + a + a**2 + .. + a**n. `acceptance_length` says so; `tests/e2e/test_tiny_k3.py`
measures a with the float reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import contracts, encode
from .geometry import Geometry
from .seeded import matrix, noise
from .target import CONTRIBUTION, Tensors, dequantized, successor
from .vocabulary import FIRST_WORD, MASK, VOCABULARY

MARKOV, RANK = 12.0, 256
DRAFT_TOKENS = 4
BLOCK = (contracts.BLOCK, contracts.BLOCK)
SIZES = {
    "self_attn.q_a_proj": 1.0,
    "self_attn.kv_a_proj_with_mqa": 1.0,
    "self_attn.q_b_proj": 1.2,
    "self_attn.kv_b_proj": 1.2,
    "self_attn.o_proj": CONTRIBUTION / 0.7,
    "mlp.gate_proj": 1.5,
    "mlp.up_proj": 1.5,
    "mlp.down_proj": CONTRIBUTION / 1.2,
}
# One second scale for all of a drafter's matrices, so that whatever a release merges has the same: a power of two.
INPUT_SCALE = 2.0**-8


def acceptance_length(follows: float, draft_tokens: int = DRAFT_TOKENS) -> float:
    """Tokens a step of a target that greedily follows the cycle with this probability."""
    return sum(follows**position for position in range(draft_tokens + 1))


def geometry(target: Geometry) -> contracts.DrafterGeometry:
    """A drafter's sizes for a target: K3's five layers and latent sizes."""
    attention = target.attention
    return contracts.DrafterGeometry(
        layers=5,
        hidden=target.hidden,
        heads=16,  # of which the hidden size must be a multiple for a drafter's configuration class
        q_lora=attention.q_lora,
        kv_lora=attention.kv_lora,
        nope=attention.nope,
        rope=attention.rope,
        v_dim=attention.v_dim,
        intermediate=1024,
        vocab=VOCABULARY,
        epsilon=target.epsilon,
    )


def target_layers(target: Geometry) -> list[int]:
    """The target layers whose output the drafter reads: an early, a middle and a late one."""
    return [0, target.layers // 2, target.layers - 1]


def config(target: Geometry) -> dict[str, Any]:
    """config.json without quantization."""
    layers = target_layers(target)
    return {
        **geometry(target).config(),
        "max_position_embeddings": target.max_positions,
        "target_layer_ids": layers,
        "num_target_layers": len(layers),
        "target_num_hidden_layers": target.layers,
        "markov_rank": RANK,
        "block_size": DRAFT_TOKENS,
        "n_predict": DRAFT_TOKENS,
        "mask_token_id": MASK,
        "tie_word_embeddings": False,
    }


def original(target: Geometry, seed: int) -> Tensors:
    """Every tensor by its published name, in BF16."""
    sizes = geometry(target)
    tensors: Tensors = {}

    def put(name: str, value: torch.Tensor) -> None:
        tensors[f"{name}.weight"] = value.bfloat16().contiguous()

    def norm(name: str, width: int) -> None:
        put(name, 1 + 0.2 * noise(seed, f"drafter/{name}", width))

    def linear(name: str, rows: int, cols: int, size: float) -> None:
        put(name, matrix(seed, f"drafter/{name}", rows, cols, size, BLOCK))

    linear("context_proj", sizes.hidden, sizes.hidden * len(target_layers(target)), 1.0)
    norm("context_norm", sizes.hidden)
    for layer in range(sizes.layers):
        at = f"layers.{layer}"
        for module, (rows, cols) in sizes.linear().items():
            linear(f"{at}.{module}", rows, cols, SIZES[module])
        norm(f"{at}.input_layernorm", sizes.hidden)
        norm(f"{at}.post_attention_layernorm", sizes.hidden)
        norm(f"{at}.self_attn.q_a_layernorm", sizes.q_lora)
        norm(f"{at}.self_attn.kv_a_layernorm", sizes.kv_lora)
    norm("final_norm", sizes.hidden)
    first = noise(seed, "drafter/markov", VOCABULARY, RANK) / RANK**0.5
    second = torch.zeros(VOCABULARY, RANK)
    second[successor(seed)[FIRST_WORD:]] = MARKOV * first[FIRST_WORD:]
    put("markov_head.markov_w1", first)
    put("markov_head.markov_w2", second)
    return tensors


def is_quantized(name: str) -> bool:
    """Whether a quantized drafter quantizes this tensor: each layer's linear modules, and the context projection."""
    return name.endswith("_proj.weight") or name.endswith("_with_mqa.weight")


def fp8_pb_wo(tensors: Tensors) -> Tensors:
    made: Tensors = {}
    for name, tensor in tensors.items():
        if is_quantized(name):
            made[name], made[f"{name}_scale"] = encode.fp8_pb_wo(tensor)
        else:
            made[name] = tensor
    return made


def nvfp4(tensors: Tensors) -> Tensors:
    second = encode.global_scale(*(tensor for name, tensor in tensors.items() if is_quantized(name)))
    made: Tensors = {}
    for name, tensor in tensors.items():
        if is_quantized(name):
            made[name], made[f"{name}_scale"] = encode.nvfp4(tensor, second)
            made[f"{name}_scale_2"] = torch.tensor(second)
            made[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(INPUT_SCALE)
        else:
            made[name] = tensor
    return made


DRAFTER_FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "bf16": lambda tensors: tensors,
    "fp8_pb_wo": fp8_pb_wo,
    "fp8_pb_wo-reference": lambda tensors: dequantized(fp8_pb_wo(tensors)),
    "nvfp4": nvfp4,
    "nvfp4-reference": lambda tensors: dequantized(nvfp4(tensors)),
}
DRAFTER_REFERENCES = {"fp8_pb_wo": "fp8_pb_wo-reference", "nvfp4": "nvfp4-reference"}
ANNOUNCEMENTS = {"fp8_pb_wo": contracts.formats.FP8_PB_WO, "nvfp4": contracts.formats.NVFP4}
