#!/usr/bin/env python3
"""Draw the numbers of bench_dspark_context_kv.py: GPU time of each way to fill the caches, over tokens.

    pip install matplotlib
    python tests/gpu/plot_dspark_context_kv.py RESULTS.json PLOT.svg

The same numbers give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "k3-patches", "svg.fonttype": "none", "font.size": 9})
from matplotlib import pyplot as plt  # noqa: E402  the backend is chosen first

WAYS = {
    "A": ("0.27.1, FP8 drafter", "#b5473c", "-", "o"),
    "A16": ("0.27.1, BF16 drafter", "#d99a3d", "-", "s"),
    "B": ("fused as in 0.28.0, FP8 drafter", "#7a7a7a", "-", "^"),
    "C16": ("this series, BF16 drafter", "#5b9bd5", "-", "s"),
    "C": ("this series, FP8 drafter", "#1f5fa8", "-", "o"),
    "G": ("its projection alone: the bound", "#1f5fa8", ":", ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("plot", type=Path)
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    caches = sorted({row["cache"] for row in results["rows"]})
    figure, axes = plt.subplots(1, len(caches), figsize=(8.4, 3.7), sharey=True, layout="constrained")
    for axis, cache in zip(axes, caches, strict=True):
        rows = sorted((row for row in results["rows"] if row["cache"] == cache), key=lambda row: row["tokens"])
        tokens = [row["tokens"] for row in rows]
        for name, (label, color, line, mark) in WAYS.items():
            times = [row["gpu_us"][name] for row in rows]
            axis.plot(tokens, times, color=color, linestyle=line, marker=mark, markersize=3.5, label=label)
        axis.set(title=f"{cache} cache", xlabel="context tokens", xscale="log", yscale="log")
        axis.set_xticks(tokens, [str(t) for t in tokens], rotation=60)
        axis.minorticks_off()
        ticks = (10, 20, 50, 100, 200, 500, 1000, 2000)
        axis.set_yticks(ticks, [str(t) for t in ticks])
        axis.grid(color="#e4e4e4", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"GPU time, µs, {results['machine']['gpu']}")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(args.plot, metadata={"Date": None})


if __name__ == "__main__":
    main()
