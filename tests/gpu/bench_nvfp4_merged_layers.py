#!/usr/bin/env python3
"""Time of merged NVFP4 layers on this GPU: what it costs that the matrices have global scales of their own.

    python tests/gpu/bench_nvfp4_merged_layers.py --out results.json

"common": one scale for all.  "powers of two": scales that the group scales take up when the layer is loaded.
"apart": scales of which the rest is multiplied into the output.  GPU time from a replayed CUDA graph, with the
kernel that vLLM chooses here.  Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import merged_linear
import torch
from merged.formats import NVFP4
from merged.layers import Checkpoint, Shape, merged, qkv
from timing import graph_time, machine

TOKENS = (1, 8, 64, 512, 4096)
REPEATS = 30
SHAPES = (qkv(128, 32, 8, cols=4096), merged(14336, 14336, cols=4096))
SCALES = {"common": (0.7,) * 3, "powers of two": (0.7, 0.35, 1.4), "apart": (0.7, 0.4, 1.1)}


def measure(form: Any, shape: Shape, name: str, scales: tuple[float, ...]) -> list[dict[str, Any]]:
    with torch.device("cpu"):
        checkpoint = Checkpoint.random(form, shape, 1, scales[: len(shape.rows)])
    rows = []
    with contextlib.ExitStack() as stack:
        layer = stack.enter_context(merged_linear.loaded(checkpoint, shape))
        method = getattr(layer.module, "scheme", None) or layer.module.quant_method
        for tokens in TOKENS:
            x = torch.randn(tokens, shape.cols, device="cuda").bfloat16()
            us = graph_time([lambda x=x: layer(x)], REPEATS)
            kernel = type(method.kernel).__name__
            rows.append({"form": str(form), "shape": str(shape), "scales": name, "tokens": tokens, "us": us})
            rows[-1] |= {"kernel": kernel, "columns": sum(shape.rows)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the numbers")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    measured_on = machine()
    for form in NVFP4:
        for shape in SHAPES:
            for name, scales in SCALES.items():
                rows += measure(form, shape, name, scales)
                args.out.write_text(json.dumps({"machine": measured_on, "rows": rows}, indent=1) + "\n")
    print(json.dumps(measured_on), "\n")
    print("| layer | format | kernel | tokens |", " | ".join(SCALES), "| apart / common |")
    print("|---|---|---|---|" + "---|" * (len(SCALES) + 1))
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = row["shape"], row["form"], row["kernel"], row["tokens"]
        cells.setdefault(key, {})[row["scales"]] = row["us"]
    for key, times in cells.items():
        ratio = times["apart"] / times["common"]
        print(
            "|", " | ".join(map(str, key)), "|", " | ".join(f"{times[name]:.1f}" for name in SCALES), f"| {ratio:.3f} |"
        )


if __name__ == "__main__":
    main()
