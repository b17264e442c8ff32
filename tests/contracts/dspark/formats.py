"""Every format in which a drafter's linear layers may be stored, each from its definition.

A format writes a random matrix as the checkpoint's tensors, says in float64 which matrix those tensors mean, and
knows how config.json announces it. Nothing here is vLLM's: the two directions are the format's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

BLOCK = 128
NVFP4_GROUP = 16
MXFP8_GROUP = 32
# The sixteen values of E2M1, by code: sign, two exponent bits, one mantissa bit.
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
# Half a step of E4M3, relative above its smallest normal number and absolute below.
E4M3_RELATIVE, E4M3_ABSOLUTE = 2.0**-4, 2.0**-10
ALGEBRA = 1e-6  # a product of an E4M3 or E2M1 value and FP32 scales, each rounded once


@dataclass(frozen=True)
class Format:
    """One way to store a matrix [rows, cols].

    write(rows, cols, global_scale, generator): the checkpoint's tensors, by what follows the module's name.
    read(tensors): float64 [rows, cols]. announce(): config.json's quantization_config, None if there is none.
    algorithm: ModelOpt's name for it in a mixed checkpoint. under_one: where one number scales a whole module, so
    that a fused layer has to bring its shards under one, the largest value that what is rounded by that stands
    for: 1 where elements are E4M3 themselves, 6 where E4M3 scales groups of E2M1. 0 elsewhere.
    """

    name: str
    write: Callable[[int, int, float, torch.Generator], Tensors]
    read: Callable[[Tensors], torch.Tensor]
    announce: Callable[[], dict[str, Any] | None]
    algorithm: str | None = None
    under_one: float = 0.0

    def __str__(self) -> str:
        return self.name

    def tolerance(self, matrix: torch.Tensor, largest_scale: float) -> torch.Tensor:
        """The most by which an element may be off when shards are brought under the largest scale among them."""
        return E4M3_RELATIVE * matrix.abs() + E4M3_ABSOLUTE * self.under_one * largest_scale


def e4m3(rows: int, cols: int, generator: torch.Generator, low: int = 0) -> torch.Tensor:
    """Random E4M3 numbers of either sign, codes from `low` up to the largest."""
    codes = torch.randint(low, 0x7F, (rows, cols), generator=generator, dtype=torch.uint8)  # 0x7F is NaN
    return (codes | (torch.randint(0, 2, (rows, cols), generator=generator, dtype=torch.uint8) << 7)).view(
        torch.float8_e4m3fn
    )


def scales(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """FP32 scales with a mantissa of their own, spread over 2**12; no two neighbours share an exponent."""
    board = sum(torch.arange(n).view(-1, *[1] * (len(shape) - 1 - axis)) for axis, n in enumerate(shape)) % 2
    exponents = 2 * torch.randint(0, 6, shape, generator=generator) + board
    return torch.ldexp(1 + torch.rand(shape, generator=generator), exponents - 16).float()


def blocks(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // BLOCK), -(-cols // BLOCK)


def under_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 of a weight under one scale for each block of 128 x 128."""
    rows, cols = weight.shape
    spread = scale.double().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return weight.double() * spread


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 2 * n] of bytes [rows, n]: the low nibble comes first."""
    return torch.stack([E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]], -1).flatten(-2)


def _bf16(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
    return {"weight": torch.randn(rows, cols, generator=generator).bfloat16()}


def _pb_wo(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
    return {
        "weight": e4m3(rows, cols, generator),
        "weight_scale": scales(blocks(rows, cols), generator)[:, None, :, None].contiguous(),
    }


def _block(name: str) -> Callable[..., Tensors]:
    def write(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
        return {"weight": e4m3(rows, cols, generator), name: scales(blocks(rows, cols), generator)}

    return write


def _per_tensor(shape: tuple[int, ...]) -> Callable[..., Tensors]:
    def write(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
        return {
            "weight": e4m3(rows, cols, generator),
            "weight_scale": torch.full(shape, scale),
            "input_scale": torch.full(shape, 0.25),
        }

    return write


def _per_channel(shape: tuple[int, ...]) -> Callable[..., Tensors]:
    def write(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
        return {"weight": e4m3(rows, cols, generator), "weight_scale": scales((rows,), generator).view(rows, *shape)}

    return write


def _nvfp4_parts(rows: int, cols: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed E2M1 [rows, cols / 2] and positive E4M3 group scales [rows, cols / 16] from 1 up."""
    packed = torch.randint(0, 256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
    groups = torch.randint(0x38, 0x7F, (rows, cols // NVFP4_GROUP), generator=generator, dtype=torch.uint8)
    return packed, groups.view(torch.float8_e4m3fn)


def _nvfp4(activation: bool) -> Callable[..., Tensors]:
    def write(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
        packed, groups = _nvfp4_parts(rows, cols, generator)
        tensors = {"weight": packed, "weight_scale": groups, "weight_scale_2": torch.tensor(scale)}
        return {**tensors, "input_scale": torch.tensor(0.25)} if activation else tensors

    return write


def _nvfp4_packed(activation: bool) -> Callable[..., Tensors]:
    # compressed-tensors stores global scales as divisors
    def write(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
        packed, groups = _nvfp4_parts(rows, cols, generator)
        tensors = {
            "weight_packed": packed,
            "weight_scale": groups,
            "weight_global_scale": torch.tensor([1 / scale]),
        }
        return {**tensors, "input_global_scale": torch.tensor([4.0])} if activation else tensors

    return write


def _mxfp8(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
    exponents = torch.randint(127 - 12, 127, (rows, cols // MXFP8_GROUP), generator=generator, dtype=torch.uint8)
    return {"weight": e4m3(rows, cols, generator), "weight_scale": exponents}


def _read_blocks(name: str = "weight_scale") -> Callable[[Tensors], torch.Tensor]:
    return lambda tensors: under_blocks(tensors["weight"], tensors[name])


def _read_rows(tensors: Tensors) -> torch.Tensor:
    scale = tensors["weight_scale"].double()
    return tensors["weight"].double() * (scale.view(-1, 1) if scale.numel() > 1 else scale.flatten())


def _read_nvfp4(tensors: Tensors) -> torch.Tensor:
    groups = tensors["weight_scale"].double().repeat_interleave(NVFP4_GROUP, 1)
    return e2m1(tensors["weight"]) * groups * tensors["weight_scale_2"].double()


def _read_nvfp4_packed(tensors: Tensors) -> torch.Tensor:
    groups = tensors["weight_scale"].double().repeat_interleave(NVFP4_GROUP, 1)
    return e2m1(tensors["weight_packed"]) * groups / tensors["weight_global_scale"].double()


def _read_mxfp8(tensors: Tensors) -> torch.Tensor:
    scale = torch.exp2(tensors["weight_scale"].double() - 127)
    return tensors["weight"].double() * scale.repeat_interleave(MXFP8_GROUP, 1)


def modelopt(algorithm: str) -> Callable[[], dict[str, Any]]:
    """A ModelOpt checkpoint of one algorithm throughout."""
    group = {"group_size": NVFP4_GROUP} if "NVFP4" in algorithm else {}
    return lambda: {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": [], **group}


def mixed(layers: Mapping[str, str]) -> dict[str, Any]:
    """A ModelOpt checkpoint that says for each module by which algorithm it is quantized."""
    recipes = {
        name: {"quant_algo": algorithm, **({"group_size": NVFP4_GROUP} if "NVFP4" in algorithm else {})}
        for name, algorithm in layers.items()
    }
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": [], "quantized_layers": recipes}


def compressed_tensors(
    layout: str,
    weights: dict[str, Any],
    activations: dict[str, Any] | None,
    targets: tuple[str, ...] = ("Linear",),
) -> dict[str, Any]:
    """A compressed-tensors checkpoint of one scheme."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            "group_0": {"targets": list(targets), "weights": weights, "input_activations": activations},
        },
    }


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FLOAT8_DYNAMIC = {**FLOAT8, "dynamic": True}
FLOAT4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "dynamic": False,
    "strategy": "tensor_group",
    "group_size": NVFP4_GROUP,
}


BF16 = Format("BF16", _bf16, lambda tensors: tensors["weight"].double(), lambda: None)
FP8_PB_WO = Format(
    "ModelOpt FP8_PB_WO",
    _pb_wo,
    lambda tensors: under_blocks(tensors["weight"], tensors["weight_scale"][:, 0, :, 0]),
    modelopt("FP8_PB_WO"),
    "FP8_PB_WO",
)
FP8 = Format("ModelOpt FP8", _per_tensor(()), _read_rows, modelopt("FP8"), "FP8", under_one=1.0)
FP8_CHANNEL = Format(
    "ModelOpt FP8 per channel per token", _per_channel(()), _read_rows, modelopt("FP8_PER_CHANNEL_PER_TOKEN")
)
NVFP4 = Format("ModelOpt NVFP4", _nvfp4(True), _read_nvfp4, modelopt("NVFP4"), "NVFP4", under_one=6.0)
NVFP4_W4A16 = Format(
    "ModelOpt W4A16_NVFP4", _nvfp4(False), _read_nvfp4, modelopt("W4A16_NVFP4"), "W4A16_NVFP4", under_one=6.0
)
MXFP8 = Format("ModelOpt MXFP8", _mxfp8, _read_mxfp8, modelopt("MXFP8"), "MXFP8")
CT_BLOCK = Format(
    "compressed-tensors FP8 block",
    _block("weight_scale"),
    _read_blocks(),
    lambda: compressed_tensors(
        "float-quantized",
        {**FLOAT8, "strategy": "block", "block_structure": [BLOCK, BLOCK]},
        {**FLOAT8_DYNAMIC, "strategy": "group", "group_size": BLOCK},
    ),
)
CT_CHANNEL = Format(
    "compressed-tensors FP8 channel",
    _per_channel((1,)),
    _read_rows,
    lambda: compressed_tensors(
        "float-quantized", {**FLOAT8, "strategy": "channel"}, {**FLOAT8_DYNAMIC, "strategy": "token"}
    ),
)
CT_TENSOR = Format(
    "compressed-tensors FP8 tensor",
    _per_tensor((1,)),
    _read_rows,
    lambda: compressed_tensors("float-quantized", {**FLOAT8, "strategy": "tensor"}, {**FLOAT8, "strategy": "tensor"}),
    under_one=1.0,
)
CT_NVFP4 = Format(
    "compressed-tensors NVFP4",
    _nvfp4_packed(True),
    _read_nvfp4_packed,
    lambda: compressed_tensors("nvfp4-pack-quantized", FLOAT4, {**FLOAT4, "dynamic": "local"}),
    under_one=6.0,
)
CT_NVFP4_W4A16 = Format(
    "compressed-tensors NVFP4 W4A16",
    _nvfp4_packed(False),
    _read_nvfp4_packed,
    lambda: compressed_tensors("nvfp4-pack-quantized", FLOAT4, None),
    under_one=6.0,
)
FP8_DEEPSEEK = Format(
    "FP8 block, DeepSeek's",
    _block("weight_scale_inv"),
    _read_blocks("weight_scale_inv"),
    lambda: {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
)

QUANTIZED = (
    FP8_PB_WO,
    FP8,
    FP8_CHANNEL,
    NVFP4,
    NVFP4_W4A16,
    MXFP8,
    CT_BLOCK,
    CT_CHANNEL,
    CT_TENSOR,
    CT_NVFP4,
    CT_NVFP4_W4A16,
    FP8_DEEPSEEK,
)
FORMATS = (BF16, *QUANTIZED)
