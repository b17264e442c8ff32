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


def later_refused(case: str) -> set[str]:
    """The kinds where the release takes dummy weights and no real ones, and the patched tree neither."""
    before, after = report(RIGHT), report(RIGHT)
    before["steps"]["reload"] = {"refused": "KeyError: weight_scale"}
    refuse(after)
    return {finding.kind for finding in verdict.judge(case, before, after)}


def test_only_fp8_pb_wo_may_refuse_what_the_release_cannot_load_either() -> None:
    assert later_refused("qwen2/mixed-pb-wo-nvfp4/2.1/dummy, real/nan").isdisjoint(verdict.BROKEN)
    assert "refused" in later_refused("qwen2/modelopt-nvfp4/2.1/dummy, real/nan")


@pytest.mark.parametrize(
    ("name", "is_own"), [("attn.W_UK_T", True), ("attn.W_UV", True), ("lm_head.weight_scale", True), ("norm", False)]
)
def test_only_fp8_pb_wo_may_have_another_form_of_its_own(name: str, is_own: bool) -> None:
    before = report(RIGHT)
    before["steps"]["load"]["tensors"][name] = ["torch.bfloat16", [2], "00"]
    after = copy.deepcopy(before)
    after["steps"]["load"]["tensors"][name][2] = "11"
    for case, may in (("deepseek/modelopt-pb-wo/1.0/load/nan", is_own), ("deepseek/modelopt-fp8/1.0/load/nan", False)):
        found = {finding.kind for finding in verdict.judge(case, before, after)}
        assert ("altered" in found) is not may
