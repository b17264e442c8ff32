"""Which engines are run: a form of the model, a drafter, a cache, a way to launch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One engine.

    ``target`` and ``drafter`` are forms that tiny_k3 writes, or the drafter is ``mtp``, the target's own; ``cache`` is
    vLLM's kv_cache_dtype; ``timed`` engines also measure throughput, in turns, while nothing else runs.
    """

    target: str
    drafter: str | None = None
    cache: str = "auto"
    graphs: bool = True
    tp: int = 1
    timed: bool = False

    @property
    def needs_blackwell(self) -> bool:
        """K3's FP8 cache takes an FP8 prefill query, for which vLLM has kernels on Blackwell alone."""
        return self.cache == "fp8"

    @property
    def name(self) -> str:
        parts = [self.target, f"drafter-{self.drafter}" if self.drafter else "", f"tp{self.tp}"]
        parts += ["fp8-cache" if self.cache == "fp8" else "", "" if self.graphs else "eager"]
        return "_".join(part for part in parts if part)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# The long ones to start come first.
CASES = (
    Case("mixed", drafter="nvfp4"),
    Case("mixed", tp=2),
    Case("mixed", drafter="fp8_pb_wo", tp=2),
    Case("reference", tp=2),
    Case("bf16", timed=True),
    Case("mixed", timed=True),
    Case("compressed-tensors"),
    Case("mixed", drafter="bf16", timed=True),
    Case("mixed", drafter="fp8_pb_wo", timed=True),
    Case("mixed", drafter="fp8_pb_wo", cache="fp8"),
    Case("mixed", drafter="mtp"),
    Case("reference", drafter="mtp"),
    Case("reference", drafter="bf16"),
    Case("reference", drafter="fp8_pb_wo"),
    Case("reference", drafter="nvfp4"),
    Case("reference"),
    Case("reference", cache="fp8"),
    Case("reference", graphs=False),
    Case("mixed", cache="fp8"),
    Case("mixed", graphs=False),
)


def chosen(names: list[str], gpus: int) -> list[Case]:
    """The cases that fit ``gpus``, or those of them that ``names`` asks for; LookupError names what is unknown."""
    known = {case.name: case for case in CASES}
    if unknown := [name for name in names if name not in known]:
        raise LookupError(f"no case is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [case for case in CASES if case.tp <= gpus and (not names or case.name in names)]
