"""vLLM's own model classes load every form, on CPU, and refuse what is broken: on release trees in build/."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tiny_k3
from tiny_k3 import damage
from tiny_k3.geometry import OUTER

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RELEASES = ("0.27.1", "0.33.0")
LAYERS = tiny_k3.Geometry()
TARGETS = ("bf16", "mixed", "compressed-tensors")
DRAFTERS = tuple(f"drafter-{form}" for form in ("bf16", "fp8_pb_wo", "nvfp4"))
MTP = f"{OUTER}model.layers.{LAYERS.layers}."
# Methods that a release may run each algorithm's modules with.
BLOCK_FP8 = {"ModelOptFp8PbWoLinearMethod", "ModelOptLinearMethod"}
EXPERTS = {
    "bf16": "UnquantizedFusedMoEMethod",
    "mixed": "ModelOptNvFp4FusedMoE",
    "compressed-tensors": "CompressedTensorsW4A4Nvfp4MoEMethod",
}
# What the error has to say of a fault: the file, or the layer's tensor.
NAMED = {
    "missing shard": "model-00003-of-00003.safetensors",
    "half-written file": "not fully covered",
    "missing scale": "layers.1.self_attn.k_proj.weight_scale",
    "missing tensor": "layers.3.self_attn.g_proj.weight",
    "swapped scales": "layers.3.self_attn.kv_a_proj_with_mqa.weight_scale has shape",
    "wrong block shape": "layers.3.self_attn.q_b_proj.weight_scale has shape",
    "scale that is no number": "layers.3.self_attn.q_b_proj.weight_scale must be positive and finite",
    "drafter without a layer's latent": "layers.2.self_attn.kv_a_proj_with_mqa.weight",
    "drafter without a latent's scale": "layers.2.self_attn.kv_a_proj_with_mqa.weight_scale",
}
Reports = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("forms")
    made = {form: tiny_k3.write_target(root / form, form) for form in TARGETS}
    for form in DRAFTERS:
        made[form] = tiny_k3.write_drafter(root / form, form.removeprefix("drafter-"))
    for number, (fault, break_it) in enumerate(damage.FAULTS.items()):
        made[fault] = root / f"fault-{number}"
        shutil.copytree(made["drafter-fp8_pb_wo" if fault in damage.OF_DRAFTER else "mixed"], made[fault])
        break_it(made[fault])
    return made


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[..., Reports]:
    """Reports of loading these, by name, into a source tree; one process for all."""

    def run(tree: Path, *names: str, size: int = 1) -> Reports:
        command = [sys.executable, "-m", "tiny_k3.loading", str(tree), "--size", str(size)]
        done = subprocess.run(
            [*command, *(str(folders[name]) for name in names)],
            env={**os.environ, "PYTHONPATH": str(HERE)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))

    return run


def patched(release: str) -> Path:
    tree = ROOT / "build" / f"v{release}" / "patched"
    if not (tree / "vllm").is_dir():
        pytest.skip(f"absent: ./build.sh apply --base {release} has not made {tree.relative_to(ROOT)}")
    return tree


@pytest.fixture(scope="module", params=RELEASES)
def reports(request: pytest.FixtureRequest, load: Callable[..., Reports]) -> Reports:
    """Everything, loaded into a patched release."""
    of_target = [fault for fault in damage.FAULTS if fault not in damage.OF_DRAFTER]
    drafters = [fault for fault in damage.FAULTS if fault in damage.OF_DRAFTER]
    return load(patched(request.param), *of_target, "bf16", "compressed-tensors", "mixed", *DRAFTERS, *drafters)


@pytest.mark.parametrize("form", TARGETS)
def test_a_target_is_loaded_whole(reports: Reports, form: str) -> None:
    report = reports[form]
    assert "refused" not in report, report
    assert report["unloaded"] == []
    # With no image allowed there is no vision tower, and the MTP layer is its draft's.
    left = [n for n in report["unused"] if not n.startswith((MTP, "vision_tower.", "mm_projector."))]
    assert left == []
    experts = {name: method for name, method in report["methods"].items() if name.endswith(".routed_experts")}
    found = set(experts.values()) or {method for method in report["methods"].values() if "MoE" in method}
    assert found == {EXPERTS[form]}


@pytest.mark.parametrize("form", TARGETS)
def test_the_mtp_layer_is_loaded_whole(reports: Reports, form: str) -> None:
    report = reports[form]["mtp"]
    assert report["unloaded"] == []
    assert [name for name in report["unused"] if name.startswith(MTP)] == []


def test_attention_projections_are_block_scaled(reports: Reports) -> None:
    for report in (reports["mixed"], reports["mixed"]["mtp"]):
        for name, method in report["methods"].items():
            if ".self_attn." in name and not name.endswith("conv1d"):
                assert method in BLOCK_FP8, name


@pytest.mark.parametrize("form", DRAFTERS)
def test_a_drafter_is_loaded_whole(reports: Reports, form: str) -> None:
    report = reports[form]
    assert "refused" not in report, report
    assert report["unloaded"] == []
    assert report["unused"] == []
    linear = {method for method in report["methods"].values() if "Linear" in method}
    assert len(linear) == 1
    assert linear.isdisjoint({"UnquantizedLinearMethod"}) == (form != "drafter-bf16")


@pytest.mark.parametrize("fault", damage.FAULTS)
def test_a_fault_is_refused_by_name(reports: Reports, fault: str) -> None:
    assert NAMED[fault] in reports[fault].get("refused", "loaded without a word")


@pytest.mark.parametrize("release", RELEASES)
def test_the_second_of_two_ranks_loads_too(load: Callable[..., Reports], release: str) -> None:
    loaded = load(patched(release), "mixed", "drafter-nvfp4", size=2)
    for report in loaded.values():
        assert "refused" not in report, report
        assert report["unloaded"] == []


def test_stock_0_27_1_refuses_the_mixed_form(load: Callable[..., Reports], tmp_path: Path) -> None:
    archive = subprocess.run(
        ["git", "archive", "pristine", "vllm"], cwd=patched("0.27.1"), capture_output=True, check=True
    )
    subprocess.run(["tar", "x"], cwd=tmp_path, input=archive.stdout, check=True)
    loaded = load(tmp_path, "mixed", "bf16")
    assert "weight_scale" in loaded["mixed"]["refused"]
    assert loaded["bf16"]["unloaded"] == []
