"""Which models, in which formats, on which ranks, are given their weights in which ways."""

from __future__ import annotations

from dataclasses import dataclass

from zoo import ALIKE, APART, MODELS, STORAGES


@dataclass(frozen=True)
class Step:
    """Weights that a model is given: how, and which."""

    name: str
    how: str
    seed: int = 1
    scales: tuple[float, ...] = APART


SCENARIOS = {
    "load, reload": (Step("load", "load"), Step("reload", "reload", 2, APART[::-1])),
    # The usual start of reinforcement learning.
    "dummy, real": (Step("dummy", "dummy"), Step("real", "reload")),
    "alike, apart": (Step("alike", "load", 1, ALIKE), Step("apart", "reload", 2)),
    "load, load": (Step("load", "load"), Step("again", "load", 2, APART[::-1])),
}
RANKS = ((1, 0), (2, 0), (2, 1))
# Each model in each format, on each rank once, and in most of the ways; --thorough is every way on every rank.
QUICK = ((1, 0, "load, reload"), (2, 1, "dummy, real"))
QUICK_GLOBAL_SCALES = (2, 0, "alike, apart")
QUICK_OTHERS = (2, 0, "load, load")


@dataclass(frozen=True)
class Case:
    """One model, built once and given weights in steps."""

    model: str
    storage: str
    size: int
    rank: int
    scenario: str
    poison: str = "nan"

    def __str__(self) -> str:
        return f"{self.model}/{self.storage}/{self.size}.{self.rank}/{self.scenario}/{self.poison}"

    @property
    def steps(self) -> tuple[Step, ...]:
        return SCENARIOS[self.scenario]


def cases(thorough: bool) -> list[Case]:
    """In an order that keeps one checkpoint's cases together."""
    chosen = []
    for model in MODELS:
        for storage in STORAGES:
            if thorough:
                ways = [(*ranks, scenario) for ranks in RANKS for scenario in SCENARIOS]
            else:
                ways = [*QUICK, QUICK_GLOBAL_SCALES if "nvfp4" in storage else QUICK_OTHERS]
            chosen += [Case(model, storage, *way) for way in ways]
            # What nobody writes there is only absent where a model shares KV.
            if model == "gemma":
                chosen += [Case(model, storage, *way, "1e30") for way in (ways if thorough else ways[:2])]
    return chosen
