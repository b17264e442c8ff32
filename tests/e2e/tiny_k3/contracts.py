"""The contracts' format writers and definitions, which hold nothing of vLLM's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "contracts"))
from dspark import formats as formats
from dspark.checkpoint import Geometry as DrafterGeometry
from dspark.formats import BLOCK, NVFP4_GROUP
from k3.checkpoint import ALGORITHM, Geometry, hf_quant_config, quantization_config
from k3.damage import damaged_scale
from k3.reference import dequantize

__all__ = [
    "ALGORITHM",
    "BLOCK",
    "NVFP4_GROUP",
    "DrafterGeometry",
    "Geometry",
    "damaged_scale",
    "dequantize",
    "formats",
    "hf_quant_config",
    "quantization_config",
]
