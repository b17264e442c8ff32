"""What a patched tree may not do to a model that is served by the release as it comes."""

from __future__ import annotations

import collections
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Where both are wrong: how much worse, of the largest element, is no rounding any more.
WORSE = 1.001


@dataclass(frozen=True)
class Finding:
    """One difference: `kind` says which of the promises it touches."""

    kind: str
    case: str
    step: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.case}, {self.step}: {self.what}"


BROKEN = ("refused", "wrong", "worse", "moved", "altered")
# What the fixes of FP8_PB_WO make another way on purpose: MLA's absorbed weights, from the logical matrix, and the
# scales of a tied head, which has the embedding's weight and so no use for any.
FORM_OF_PB_WO = re.compile(r".*\.W_U(K_T|V)|lm_head\.weight_scale")


def judge(case: str, pristine: dict[str, Any], patched: dict[str, Any]) -> Iterator[Finding]:
    """Findings on one case. Beside BROKEN: mended, other form (both right), as wrong, refused but wrong on stock."""
    for step, before in pristine["steps"].items():
        after = patched["steps"].get(step)
        if after is None or "refused" in before:
            if after is not None and "refused" not in after and after.get("layers"):
                wrong = [name for name, layer in after["layers"].items() if not layer["right"]]
                yield Finding("wrong" if wrong else "mended", case, step, f"refused before; {_some(wrong)}")
            return
        if "refused" in after:
            steps = pristine["steps"].values()
            layers = [entry for seen in steps for entry in seen.get("layers", {}).values()]
            # Only FP8_PB_WO's own fixes may refuse, and only what the release computes wrong, or cannot load itself
            # once it gets the real weights.
            served = all(layer["right"] for layer in layers) and not any("refused" in seen for seen in steps)
            wrong = "pb-wo" in case and not served
            yield Finding("refused, wrong on stock" if wrong else "refused", case, step, after["refused"])
            return
        yield from _layers(case, step, before, after)
        if "layers" in before:
            moved = sorted(set(after["moved"]) - set(before["moved"]))
            if moved and step in ("reload", "real", "apart", "again"):
                yield Finding("moved", case, step, _some(moved))


def _layers(case: str, step: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Finding]:
    layers = before.get("layers", {})
    settled = set()
    for name, old in layers.items():
        new = after["layers"].get(name)
        if new is None:
            yield Finding("wrong", case, step, f"{name} is gone")
            continue
        same = _below(name, before["tensors"]) == _below(name, after["tensors"])
        settled.add(name)
        if new["right"]:
            if not old["right"]:
                yield Finding("mended", case, step, name)
            elif old["exact"] and not new["exact"]:
                yield Finding("worse", case, step, f"{name}: exact before, off by {_error(new)}")
            elif not same:
                yield Finding("other form", case, step, name)
        elif old["right"]:
            yield Finding("wrong", case, step, f"{name}: off by {_error(new)}")
        elif new["error"] is None or (old["error"] is not None and new["error"] > old["error"] * WORSE):
            if new != old:
                yield Finding("worse", case, step, f"{name}: off by {_error(new)}, stock {_error(old)}")
        else:
            yield Finding("as wrong", case, step, f"{name}: off by {_error(new)}, stock {_error(old)}")
    if layers:
        rest = {
            key: value for key, value in before["tensors"].items() if not any(key.startswith(f"{n}.") for n in settled)
        }
        if "pb-wo" in case:
            rest = {key: value for key, value in rest.items() if not FORM_OF_PB_WO.fullmatch(key)}
        changed = sorted(key for key, value in rest.items() if after["tensors"].get(key) != value)
        if changed:
            yield Finding("altered", case, step, _some(changed))


def _below(name: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if key.startswith(f"{name}.")}


def _error(layer: dict[str, Any]) -> str:
    return layer.get("why") or ("not a number" if layer["error"] is None else f"{layer['error']:.3g}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "right now"


def main() -> None:
    """Print what differs between two reports, alike findings of several ranks as one."""
    before, after = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    kinds = sys.argv[3].split(",") if len(sys.argv) > 3 else [*BROKEN, "refused, wrong on stock", "as wrong", "mended"]
    grouped: dict[tuple[str, ...], list[str]] = {}
    count: collections.Counter[str] = collections.Counter()
    for case in before:
        if case in after:
            for found in judge(case, before[case], after[case]):
                model, storage, rank, scenario, poison = case.split("/")
                count[found.kind] += 1
                if found.kind in kinds:
                    key = found.kind, model, storage, scenario, found.step, found.what
                    grouped.setdefault(key, []).append(f"{rank} {poison}")
    for (kind, model, storage, scenario, step, what), ranks in grouped.items():
        print(f"{kind}: {model}/{storage}, {scenario}, {step}: {what} [{', '.join(ranks)}]")
    print(f"{len(before)} cases:", dict(count) or "no difference")


if __name__ == "__main__":
    main()
