#!/usr/bin/env python3
"""Error and time of K3's FP8_PB_WO layers on this GPU, with each kernel, at K3's real shapes (rank 3 of 8).

    python tests/gpu/bench_block_fp8_layers.py --out results.json

Error: relative Frobenius norm against float64, of the layer and of layers that hold each of its
matrices alone.  Time, for the padded layers: GPU time from a replayed CUDA graph, activation
quantization included, beside a plain layer of the next aligned size, and beside padding followed
by a copy of the output.  Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import k3_linear
import torch
from k3_linear import KERNELS, PROJECTIONS
from timing import graph_time, machine

TOKENS = (1, 8, 64, 128, 512, 2048, 8192)
REPEATS = 30


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def measure(projection: k3_linear.Projection, kernel: str) -> list[dict[str, Any]]:
    made, apart = k3_linear.load(projection, kernel), k3_linear.unfused(projection, kernel)
    stored, columns = made.layer.weight.shape
    logical = made.matrix.shape[0]
    is_padded = stored != logical
    plain = k3_linear.aligned(stored, columns, kernel) if is_padded else None
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        want = x.double() @ made.matrix.T
        row: dict[str, Any] = {
            "projection": projection.name,
            "kernel": kernel,
            "class": made.kernel,
            "tokens": tokens,
            "rows": logical,
            "stored_rows": stored,
            "columns": columns,
            "error": relative(made(x)[:, :logical], want),
            "error_unfused": relative(torch.cat([layer(x) for layer in apart], dim=-1), want),
        }
        if plain:
            row |= {
                "us": graph_time([lambda x=x: made(x)], REPEATS),
                "us_aligned": graph_time([lambda x=x: plain(x)], REPEATS),
                "us_copied": graph_time([lambda x=x: made(x).contiguous()], REPEATS),
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the numbers")
    args = parser.parse_args()
    with k3_linear.engine():
        torch.manual_seed(0)
        measured_on = machine()
        rows: list[dict[str, Any]] = []
        for projection in PROJECTIONS:
            for kernel in KERNELS:
                rows += measure(projection, kernel)
                args.out.write_text(json.dumps({"machine": measured_on, "rows": rows}, indent=1) + "\n")
    print(json.dumps(measured_on), "\n\n| layer | kernel | tokens | error | unfused | us | aligned | with copy |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        times = " | ".join(f"{r[k]:.1f}" if k in r else "" for k in ("us", "us_aligned", "us_copied"))
        name = f"{r['projection']} {r['rows']}x{r['columns']}"
        print(f"| {name} | {r['kernel']} | {r['tokens']} | {r['error']:.4f} | {r['error_unfused']:.4f} | {times} |")


if __name__ == "__main__":
    main()
