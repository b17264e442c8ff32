#!/usr/bin/env python3
"""Which kernels one step of filling K3's DSpark caches starts, and how long each of them runs.

    python tests/gpu/profile_dspark_context_kv.py --out profile.json

For B and C of bench_dspark_context_kv.py, which tells what these are, at a few token counts: CUPTI's duration of each
kernel in microseconds, the median over the steps of a replayed CUDA graph, in the order in which they start.  A kernel
that waits in a dependent launch runs, by these numbers, from when it is resident.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_dspark_context_kv
import k3_linear
import torch
from timing import captured, machine
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

TOKENS = (1, 128, 2048)
WAYS = ("B", "C", "G")
REPLAYS = 20


def kernels(calls: Sequence[Callable[[], Any]]) -> list[dict[str, Any]]:
    """Name, microseconds and number in a step of each kernel that ``calls`` start, one step each."""
    graph = captured(calls, len(calls))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in sorted(seen.events(), key=lambda e: e.time_range.start):
        if event.device_type == DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    if not times:
        raise SystemExit("Error: the profiler saw no kernel: torch needs CUPTI, and the right to use it, for this")
    steps = REPLAYS * len(calls)
    return [
        {"kernel": name, "us": statistics.median(each), "in_a_step": len(each) / steps} for name, each in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the numbers")
    args = parser.parse_args()
    with k3_linear.engine():
        torch.manual_seed(0)
        bench = bench_dspark_context_kv.Bench()
        steps = []
        for tokens, (cache, name) in itertools.product(TOKENS, bench_dspark_context_kv.CACHES.items()):
            calls = bench.calls(cache, tokens)
            for way in WAYS:
                steps.append({"tokens": tokens, "cache": name, "way": way, "kernels": kernels(calls[way])})
                print(f"\n{way}, {tokens} tokens, {name} cache\n\n| kernel | in a step | us |\n|---|---|---|")
                for kernel in steps[-1]["kernels"]:
                    print(f"| `{kernel['kernel'][:110]}` | {kernel['in_a_step']:g} | {kernel['us']:.2f} |", flush=True)
    args.out.write_text(json.dumps({"machine": machine(), "steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
