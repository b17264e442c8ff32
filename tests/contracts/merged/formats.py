"""Formats of merged layers that no drafter is stored in, each from its definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from dspark import formats
from dspark.formats import NVFP4_GROUP, Format, Tensors


def _quark_levels(dynamic: bool) -> list[dict[str, Any]]:
    return [
        {"dtype": "fp4", "qscheme": "per_group", "group_size": NVFP4_GROUP, "is_dynamic": dynamic},
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
    ]


def _quark() -> dict[str, Any]:
    weights, inputs = _quark_levels(False), _quark_levels(True)
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "order"},
        "exclude": [],
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "global_quant_config": {"weight": weights, "input_tensors": inputs, "output_tensors": None, "bias": None},
    }


def _write_quark(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
    tensors = formats.NVFP4.write(rows, cols, scale, generator)
    tensors["input_scale_2"] = tensors.pop("input_scale")
    return tensors


HADAMARD = 16


def hadamard() -> torch.Tensor:
    """Sylvester's matrix of +1 and -1, which is symmetric; over its root it rotates."""
    matrix = torch.ones(1, 1)
    while len(matrix) < HADAMARD:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _write_rotated(rows: int, cols: int, scale: float, generator: torch.Generator) -> Tensors:
    return {**formats.CT_NVFP4.write(rows, cols, scale, generator), "R1_input.weight": hadamard()}


def _read_rotated(tensors: Tensors) -> torch.Tensor:
    groups = formats.CT_NVFP4.read(tensors).unflatten(1, (-1, HADAMARD))
    rotation = tensors["R1_input.weight"].double() / HADAMARD**0.5
    return (groups @ rotation).flatten(1)


def _rotated() -> dict[str, Any]:
    apply = [{"targets": ["Linear"], "location": "input", "inverse": False, "ignore": []}]
    scheme = {"type": "random-hadamard", "apply": apply, "head_dim": HADAMARD, "requires_grad": False}
    return {**(formats.CT_NVFP4.announce() or {}), "transform_config": {"config_groups": {"R1": scheme}}}


# Inputs are rotated in groups before the matrix: QuTLASS has one kernel for that and the quantization.
CT_NVFP4_ROTATED = replace(
    formats.CT_NVFP4,
    name="compressed-tensors NVFP4, rotated inputs",
    write=_write_rotated,
    read=_read_rotated,
    announce=_rotated,
)
QUARK_NVFP4 = replace(formats.NVFP4, name="Quark NVFP4", write=_write_quark, announce=_quark, algorithm=None)
NVFP4 = (formats.NVFP4, formats.NVFP4_W4A16, formats.CT_NVFP4, formats.CT_NVFP4_W4A16, QUARK_NVFP4)
BLOCK_FP8 = (formats.CT_BLOCK, formats.FP8_DEEPSEEK)


def global_scale(form: Format) -> str:
    """What the checkpoint calls a matrix's global scale."""
    return "weight_global_scale" if form.name.startswith("compressed-tensors") else "weight_scale_2"


def input_scale(form: Format) -> str | None:
    """What it calls the inputs' global scale, and None where inputs are not quantized."""
    if form in (formats.NVFP4_W4A16, formats.CT_NVFP4_W4A16):
        return None
    return {formats.CT_NVFP4: "input_global_scale", QUARK_NVFP4: "input_scale_2"}.get(form, "input_scale")


def stored(form: Format, scale: float, like: torch.Tensor) -> torch.Tensor:
    """A global scale as the checkpoint stores it: compressed-tensors keeps divisors."""
    return torch.full_like(like, 1 / scale if form.name.startswith("compressed-tensors") else scale)


def block_scale(form: Format) -> str:
    """What the checkpoint calls the scales of a matrix's blocks."""
    return "weight_scale_inv" if form is formats.FP8_DEEPSEEK else "weight_scale"
