"""Every projection of every rank of a tensor-parallel group, beside the oracle.

The contracts share one sweep: each rank is built and loaded once, whichever projections they ask about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig

from . import compat, modules
from .checkpoint import BLOCK, Checkpoint, Geometry
from .reference import Oracle, assert_columns, share, tokens

REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")
TOKENS = 3


@dataclass(frozen=True)
class Outcome:
    """One projection on one rank; `error` is None when its numbers are right."""

    projection: str
    error: str | None


class Sweep:
    """Outcomes by tensor-parallel size and layer, computed when first asked for."""

    def __init__(self, configure: Callable[[Checkpoint], VllmConfig], oracle: Oracle) -> None:
        self.configure = configure
        self.oracle = oracle
        self.geometry: Geometry = oracle.checkpoint.geometry
        width = self.geometry.heads * self.geometry.head_dim
        self._x = tokens(TOKENS, self.geometry.hidden, seed=1)
        self._core = tokens(TOKENS, width, seed=2)
        self._latent = tokens(TOKENS, self.geometry.kv_lora, seed=3)
        self._checkpoints: dict[tuple[int, tuple[str, ...]], Checkpoint] = {}
        self._outcomes: dict[tuple[int, int, int], list[Outcome]] = {}

    def wrong(self, size: int, layer: int, projections: tuple[str, ...], ranks: range | None = None) -> list[str]:
        """What is wrong with these projections of a layer, over these ranks (all, by default): one line each."""
        lines = []
        for rank in ranks if ranks is not None else range(size):
            key = size, layer, rank
            if key not in self._outcomes:
                self._outcomes[key] = self._rank(*key)
            lines += [
                f"rank {rank} of {size}, {outcome.error}"
                for outcome in self._outcomes[key]
                if outcome.error and outcome.projection in projections
            ]
        return lines

    def projections(self, layer: int) -> dict[str, tuple[int, int]]:
        """Quantized projections of a layer: name -> (rows, columns)."""
        return self.geometry.kda() if layer == self.geometry.kda_layer else self.geometry.mla()

    def straddling(self, size: int, layer: int) -> tuple[str, ...]:
        """Projections of which some rank's rows begin inside a block and end in another.

        They are refused or right, which a contract of their own says, and kept out of the others' way.
        """
        if layer == self.geometry.kda_layer or self.geometry.mla()["q_b_proj"][0] // size % BLOCK == 0:
            return ()
        return ("q_b_proj",)

    def _rank(self, size: int, layer: int, rank: int) -> list[Outcome]:
        expected = self._expected(size, layer, rank)
        try:
            actual = self._actual(size, layer, rank)
        except Exception as error:  # whatever stopped the rank is the outcome of all its projections
            return [Outcome(name, f"{name}: {type(error).__name__}: {error}") for name in expected]
        outcomes = []
        for name, columns in expected.items():
            try:
                assert_columns(actual[name], columns, name)
                outcomes.append(Outcome(name, None))
            except AssertionError as error:
                outcomes.append(Outcome(name, str(error)))
        return outcomes

    def _checkpoint(self, layer: int, skipped: tuple[str, ...]) -> Checkpoint:
        """The checkpoint with this layer quantized alone, without the skipped projections."""
        if (layer, skipped) not in self._checkpoints:
            kept = [name for name in self.projections(layer) if name not in skipped]
            whole = self.oracle.checkpoint
            self._checkpoints[layer, skipped] = whole.only(*(whole.module(layer, name) for name in kept))
        return self._checkpoints[layer, skipped]

    def _actual(self, size: int, layer: int, rank: int) -> dict[str, torch.Tensor]:
        skipped = self.straddling(size, layer)
        checkpoint = self._checkpoint(layer, skipped)
        model = modules.build(self.configure(checkpoint), size=size, rank=rank)
        model.load(checkpoint.weights())
        core = self._core[:, share(self._core.shape[1], size, rank)]
        attention = model.attention(layer)
        with torch.no_grad():
            if layer == self.geometry.kda_layer:
                return compat.kda_outputs(attention, self._x, core)
            outputs = compat.mla_outputs(attention, self._x, core, without=skipped)
            return outputs | {"kv_b_proj": attention.kv_b_proj(self._latent)[0]}

    def _expected(self, size: int, layer: int, rank: int) -> dict[str, torch.Tensor]:
        oracle = self.oracle
        # What feeds a projection that doesn't read the layer's input; f_a is seen through f_b.
        inputs: dict[str, Callable[[], torch.Tensor]] = {
            "f_b_proj": lambda: oracle.output(layer, "f_a_proj", self._x),
            "q_b_proj": lambda: oracle.output(layer, "q_a_proj", self._x),
            "kv_b_proj": lambda: self._latent,
        }
        expected: dict[str, torch.Tensor] = {}
        for name, (rows, cols) in self.projections(layer).items():
            if name == "f_a_proj" or name in self.straddling(size, layer):
                continue
            if name == "o_proj":
                part = share(cols, size, rank)
                expected[name] = oracle.partial(layer, name, self._core, part)
            else:
                part = slice(None) if name in REPLICATED else share(rows, size, rank)
                expected[name] = oracle.output(layer, name, inputs.get(name, lambda: self._x)())[:, part]
        return expected
