#!/usr/bin/env python3
"""Time and memory of filling K3's DSpark caches from the target's context, stock and with this series, side by side.

    python tests/gpu/bench_dspark_context_kv.py --out results.json

GPU time: replays of a CUDA graph whose calls go round several drafters, so that no weight stays in the L2 cache
from one call to the next.  Host time: of a call that starts nothing but work for the GPU.  Microseconds, medians.
Prints a line for each token count as it is done, then Markdown.

  A   0.27.1 with an FP8 drafter: five full Q+KV projections, an op for each step of each layer
  B   the fused projection as 0.28.0 and later have it, an op for each step that follows
  S   this series without the epilogue: its own projection, an op for each step
  C   this series
  G   its projection alone, activation quantization included: the bound
  A16, C16, G16   the same for a BF16 drafter; 0.27.1 fuses that one, so that B is its own
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import k3_dspark
import k3_linear
import torch
import torch.nn.functional as F
from timing import graph_time, machine

# What matters most comes first: a run that is cut short has it.
TOKENS = (1, 8, 128, 512, 2048, 8192, 64, 32, 16, 4, 2)
CACHES = {"auto": "BF16", "fp8": "FP8"}
COPIES, REPEATS, HOST_REPEATS = 4, 15, 50
SCALE = 0.0237  # of FP8 caches: one that divides nothing evenly
BLOCKS = 160  # over 8192 slots
Call = Callable[[], Any]


def host_time(calls: Sequence[Call]) -> float:
    """Microseconds until one call has handed its work to the GPU, with few enough of them not to fill its queue."""
    times = []
    # A default device makes every operation of torch pass through Python; an engine that serves has none.
    with torch.overrides._pop_mode_temporarily():
        for _ in range(HOST_REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for call in calls:
                call()
            times.append((time.perf_counter() - start) * 1e6 / len(calls))
        torch.cuda.synchronize()
    return statistics.median(times)


class Bench:
    """Drafters of both formats with caches of both, in COPIES, and stock's projections beside them."""

    def __init__(self) -> None:
        rotary, matrices = k3_dspark.rotary_embedding(), k3_dspark.Matrices()
        self.memory: dict[str, int] = {}
        self.models: dict[tuple[str, str], list[Any]] = {}
        for form, cache in itertools.product(("FP8", "BF16"), CACHES):
            given = matrices if form == "FP8" else None
            self.models[form, cache] = [
                k3_dspark.drafter(given, cache, BLOCKS, scale=SCALE, rotary_emb=rotary) for _ in range(COPIES)
            ]
        first = self.models["BF16", "auto"][0]
        self.memory["0.27.1, FP8 drafter"] = 0
        with self.measured("0.27.1, BF16 drafter"):
            self.buffers = [k3_dspark.Buffers(first, max(TOKENS))]
            self.stock_weights = [torch.randn(k3_dspark.LAYERS * k3_dspark.WIDTH, k3_dspark.HIDDEN)]
        for form in ("BF16", "FP8"):
            proj = self.models[form, "auto"][0].context_kv_proj
            self.memory[f"this series, {form} drafter"] = sum(p.numel() * p.element_size() for p in proj.parameters())
        self.stock_weights += [torch.randn_like(self.stock_weights[0]) for _ in range(COPIES - 1)]
        self.full = [
            [k3_dspark.RawProjection(k3_dspark.Q_LORA + k3_dspark.WIDTH) for _ in range(k3_dspark.LAYERS)]
            for _ in range(COPIES)
        ]
        self.fused = [k3_dspark.RawProjection(k3_dspark.LAYERS * k3_dspark.WIDTH) for _ in range(COPIES)]
        self.kernel = type(self.fused[0].kernel).__name__
        self.made_buffers: dict[int, k3_dspark.Buffers] = {}

    @contextlib.contextmanager
    def measured(self, name: str) -> Any:
        before = torch.cuda.memory_allocated()
        yield
        self.memory[name] = torch.cuda.memory_allocated() - before

    def buffers_of(self, model: Any) -> k3_dspark.Buffers:
        if id(model) not in self.made_buffers:
            self.made_buffers[id(model)] = k3_dspark.Buffers(model, max(TOKENS))
        return self.made_buffers[id(model)]

    def calls(self, cache: str, tokens: int) -> dict[str, list[Call]]:
        """Each way to do one step, once for each copy."""
        contexts = [k3_dspark.Context.random(tokens, BLOCKS, seed) for seed in range(COPIES)]
        made: dict[str, list[Call]] = {}

        def add(name: str, call: Callable[..., Any], *args: Any) -> None:
            made.setdefault(name, []).append(lambda: call(*args))

        for i, context in enumerate(contexts):
            fp8, bf16 = self.models["FP8", cache][i], self.models["BF16", cache][i]
            norms = self.buffers_of(fp8).norm_weights
            add("A", k3_dspark.layer_by_layer, fp8, self.full[i], norms, context)
            add("B", k3_dspark.grouped, fp8, self.fused[i], self.buffers_of(fp8), context)
            add("S", separately, fp8, context)
            add("C", k3_dspark.run, fp8, context)
            add("G", fp8._project_context_kv, context.states)
            linear = lambda x, weight=self.stock_weights[i]: F.linear(x, weight)  # noqa: E731
            add("A16", k3_dspark.grouped, bf16, linear, self.buffers_of(bf16), context)
            add("C16", k3_dspark.run, bf16, context)
            add("G16", bf16._project_context_kv, context.states)
        return made

    def row(self, cache: str, tokens: int) -> dict[str, Any]:
        calls = self.calls(cache, tokens)
        row: dict[str, Any] = {"cache": CACHES[cache], "tokens": tokens}
        row["gpu_us"] = {name: graph_time(each, REPEATS) for name, each in calls.items()}
        row["host_us"] = {name: host_time(each) for name, each in calls.items()}
        if tokens == max(TOKENS):
            row["transient_bytes"] = {name: transient(each[0]) for name, each in calls.items()}
        return row

    def shapes(self, cache: str, tokens: int) -> dict[str, Any]:
        """C with other launches of the epilogue: rows a program, and with or without dependent launch."""
        contexts = [k3_dspark.Context.random(tokens, BLOCKS, seed) for seed in range(COPIES)]
        models, times = self.models["FP8", cache], {}
        for rows, pdl in itertools.product((1, 2, 4), (True, False)):

            def call(model: Any, context: k3_dspark.Context, rows: int = rows, pdl: bool = pdl) -> None:
                kv = model._project_context_kv(context.states)
                epilogue = dataclasses.replace(model._context_kv_epilogue, launch_pdl=pdl)
                epilogue._launch(tokens, rows, kv, context.positions, tuple(context.slots))

            pairs = zip(models, contexts, strict=True)
            times[f"{rows}{' pdl' if pdl else ''}"] = graph_time(
                [lambda m=m, c=c: call(m, c) for m, c in pairs], REPEATS
            )
        return {"cache": CACHES[cache], "tokens": tokens, "gpu_us": times}


def separately(model: Any, context: k3_dspark.Context) -> None:
    with k3_dspark.without_epilogue(model):
        k3_dspark.run(model, context)


def transient(call: Call) -> int:
    """Bytes that one call allocates at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ratios(us: dict[str, float]) -> str:
    pairs = (("A", "C"), ("B", "C"), ("S", "C"), ("C", "G"), ("A16", "C16"), ("C16", "G16"))
    return " | ".join(f"{us[a] / us[b]:.2f}" for a, b in pairs)


def report(result: dict[str, Any]) -> None:
    for kind in ("gpu_us", "host_us"):
        print(f"\n{kind}\n\n| cache | tokens | A | B | S | C | G | A16 | C16 | G16 |", end="")
        print(" A/C | B/C | S/C | C/G | A16/C16 | C16/G16 |\n|" + "---|" * 16)
        for row in sorted(result["rows"], key=lambda r: (r["cache"], r["tokens"])):
            numbers = " | ".join(f"{us:.1f}" for us in row[kind].values())
            print(f"| {row['cache']} | {row['tokens']} | {numbers} | {ratios(row[kind])} |")
    print("\n| resident besides the layers' own weights | bytes |\n|---|---|")
    for name, size in result["memory"].items():
        print(f"| {name} | {size:,} |")
    for row in result["rows"]:
        if "transient_bytes" in row:
            print(f"\npeak of one step of {row['tokens']}, {row['cache']} cache:", row["transient_bytes"])
    if result["shapes"]:
        print("\nC by rows a program\n\n| cache | tokens | " + " | ".join(result["shapes"][0]["gpu_us"]) + " |")
        print("|" + "---|" * 8)
        for row in result["shapes"]:
            numbers = " | ".join(f"{us:.1f}" for us in row["gpu_us"].values())
            print(f"| {row['cache']} | {row['tokens']} | {numbers} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the numbers")
    parser.add_argument("--seconds", type=float, default=400, help="start no further row after this")
    args = parser.parse_args()
    started = time.monotonic()
    with k3_linear.engine():
        torch.manual_seed(0)
        bench = Bench()
        result: dict[str, Any] = {
            "machine": machine(),
            "kernel": bench.kernel,
            "memory": bench.memory,
            "rows": [],
            "shapes": [],
        }
        print(json.dumps({k: result[k] for k in ("machine", "kernel", "memory")}), flush=True)
        work = [("rows", bench.row, tokens, cache) for tokens in TOKENS[:6] for cache in CACHES]
        work += [("shapes", bench.shapes, tokens, cache) for tokens in (1, 128, 2048, 8192) for cache in CACHES]
        work += [("rows", bench.row, tokens, cache) for tokens in TOKENS[6:] for cache in CACHES]
        for kind, measure, tokens, cache in work:
            if time.monotonic() - started > args.seconds:
                print(f"out of time before {kind} {tokens} {cache}", flush=True)
                continue
            row = measure(cache, tokens)
            result[kind].append(row)
            result["seconds"] = time.monotonic() - started
            args.out.write_text(json.dumps(result, indent=1) + "\n")
            times = {name: round(us, 1) for name, us in row["gpu_us"].items()}
            print(f"{result['seconds']:5.0f} s  {kind} {tokens} {CACHES[cache]}", times, flush=True)
    report(result)


if __name__ == "__main__":
    main()
