"""The verdict sees what it is for."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import verdict

RIGHT = {"right": True, "exact": True, "error": 0.0}
WRONG = {"right": False, "exact": False, "error": 0.5}


def report(layer: dict[str, Any]) -> dict[str, Any]:
    step = {
        "tensors": {"a.weight": ["torch.uint8", [2], "00"], "norm.weight": ["torch.bfloat16", [2], "00"]},
        "layers": {"a": dict(layer)},
        "moved": [],
    }
    return {"steps": {"load": step, "reload": copy.deepcopy(step)}}


def kinds(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {finding.kind for finding in verdict.judge("case", before, after)}


def refuse(seen: dict[str, Any]) -> None:
    seen["steps"] = {"load": {"refused": "ValueError: no"}}


def other_bytes(seen: dict[str, Any]) -> None:
    seen["steps"]["load"]["tensors"]["a.weight"][2] = "11"


def other_norm(seen: dict[str, Any]) -> None:
    seen["steps"]["load"]["tensors"]["norm.weight"][2] = "11"


def inexact(seen: dict[str, Any]) -> None:
    seen["steps"]["load"]["layers"]["a"] = {"right": True, "exact": False, "error": 0.01}


def not_a_number(seen: dict[str, Any]) -> None:
    seen["steps"]["load"]["layers"]["a"] = {**WRONG, "error": None}


def further(seen: dict[str, Any]) -> None:
    seen["steps"]["load"]["layers"]["a"] = {**WRONG, "error": 0.6}


def moved(seen: dict[str, Any]) -> None:
    seen["steps"]["reload"]["moved"] = ["a.weight"]


@pytest.mark.parametrize(
    ("layer", "change", "kind"),
    [
        (RIGHT, refuse, "refused"),
        (WRONG, refuse, "refused"),
        (RIGHT, other_bytes, "other form"),
        (RIGHT, other_norm, "altered"),
        (RIGHT, inexact, "worse"),
        (RIGHT, not_a_number, "wrong"),
        (WRONG, not_a_number, "worse"),
        (WRONG, further, "worse"),
        (RIGHT, moved, "moved"),
    ],
)
def test_a_change_for_the_worse_is_seen(
    layer: dict[str, Any], change: Callable[[dict[str, Any]], None], kind: str
) -> None:
    before = report(layer)
    after = copy.deepcopy(before)
    change(after)
    assert kind in kinds(before, after)
    assert kinds(before, before).isdisjoint(verdict.BROKEN)


def test_what_is_mended_is_no_fault() -> None:
    assert kinds(report(WRONG), report(RIGHT)) == {"mended"}
