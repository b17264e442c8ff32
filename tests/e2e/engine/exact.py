"""The prompts' log-probabilities in float64, and how far rounding alone may move them.

    python -m engine.exact JOB.json

What an engine is allowed to differ by is computed from the formats' definitions, with the same float64 model:

- ``bf16``: the result of every linear layer and norm rounded to BF16, as an engine stores it;
- ``activations``: beside that, the input of every FP8_PB_WO projection rounded to E4M3 with a scale for each
  128 columns of a token, its largest element at 448;
- ``power_of_two``: beside that, scales of both operands that are powers of two, for which the weight is quantized
  again: what DeepGEMM reads.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_k3.contracts import BLOCK
from tiny_k3.forward import Tiny, e4m3_scale

from engine import compare, prompts
from engine.turns import Turns


def rounded_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """E4M3 of a matrix under a power of two for each 128 x 128 block, as numbers again."""
    rows, columns = matrix.shape
    tall, wide = -rows % BLOCK, -columns % BLOCK
    tiles = torch.nn.functional.pad(matrix, (0, wide, 0, tall)).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = e4m3_scale(tiles.abs().amax((1, 3), keepdim=True), power_of_two=True)
    again = (tiles / scale).float().to(torch.float8_e4m3fn).to(matrix.dtype) * scale
    return again.flatten(2).flatten(0, 1)[:rows, :columns]


class Stored(Tiny):
    """The model with every result stored in BF16."""

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return super()._linear(name, x).bfloat16().to(x.dtype)

    def _norm(self, name: str, x: torch.Tensor, epsilon: float | None = None) -> torch.Tensor:
        return super()._norm(name, x, epsilon).bfloat16().to(x.dtype)


def tables(model: Tiny, batch: list[list[int]], device: str) -> list[np.ndarray]:
    """Of each prompt float64 [tokens - 1, vocabulary]."""
    return [model.log_probabilities(torch.tensor(p, device=device))[:-1].cpu().numpy() for p in batch]


def moved_to(model: Tiny, device: str) -> Tiny:
    model.weights = {name: weight.to(device) for name, weight in model.weights.items()}
    return model


def requantized(model: Tiny) -> dict[str, torch.Tensor]:
    return {
        name: rounded_blocks(weight) if model.is_block_scaled(name.removesuffix(".weight")) else weight
        for name, weight in model.weights.items()
    }


def expected(exact: Tiny, truth: list[np.ndarray], batch: list[list[int]], device: str) -> dict[str, Any]:
    """What each rounding alone costs, as :func:`engine.compare.difference`."""
    stored = Stored(exact.config, exact.weights, exact.algorithms)
    kinds = {
        "bf16": stored,
        "activations": stored.with_fp8_inputs(),
        "power_of_two": dataclasses.replace(stored.with_fp8_inputs(power_of_two=True), weights=requantized(exact)),
    }
    return {kind: compare.difference(tables(model, batch, device), truth, batch) for kind, model in kinds.items()}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    Turns(Path(job["lock"])).share()
    out = Path(job["results"])
    out.mkdir(parents=True, exist_ok=True)
    batch = prompts.prompts(job["vocabulary"], reserved=job["reserved"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bounds = {}
    with torch.no_grad():
        for form in job["forms"]:
            model = moved_to(Tiny.load(Path(job["folders"][form])), device)
            truth = tables(model, batch, device)
            np.savez(out / f"{form}.npz", *truth)
            if form == "mixed":
                bounds = expected(model, truth, batch, device)
    (out / "expected.json").write_text(json.dumps(bounds))


if __name__ == "__main__":
    main()
