"""dspark-fused-epilogue: after the projection of the context, one launch fills the caches of all draft layers.

It allocates nothing, whether caches are BF16 or FP8 and however the layers' slots are given.  What stands in the
caches then is the projection's output, normalized and rotated: bit by bit what float64 gives, rounded to BF16 and for
an FP8 cache divided by the layer's scale and rounded again, but for values within FP32's error of a tie.  Slots of
nobody keep what they held.  Layers whose caches have layouts of their own get the same numbers, in more launches.

The release's own steps store the same numbers, in a launch for each of them: there the count is what fails.

Refusals: none on any base. What the one kernel cannot do takes the separate operations.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from epilogue.cases import CASES, LAYERS, SCALES, UNLIKE, UNTOUCHED, Case, Step
from epilogue.reference import candidates

HERE = Path(__file__).parent
# An empty list of devices is what lets vLLM keep Triton where no driver is active.
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def steps(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Step]:
    """What the tree's drafter did in a case."""
    folder = tmp_path_factory.mktemp("epilogue")
    command = [sys.executable, "-m", "epilogue.step", str(folder), str(folder / "results")]
    env = os.environ | INTERPRETED | {"PYTHONPATH": f"{tree}{os.pathsep}{HERE}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    results = torch.load(folder / "results")

    def of(case: Case) -> Step:
        assert isinstance(results[case.name], dict), results[case.name]
        return Step(**results[case.name])

    return of


def assert_stored(step: Step, case: Case) -> None:
    for layer, slots in enumerate(case.slots()):
        cache = step.caches[layer].flatten(0, 1)
        touched = (cache != UNTOUCHED).any(-1)
        kept = torch.zeros(0, dtype=torch.int64) if slots is None else slots[slots >= 0].long()
        assert not touched[torch.isin(torch.arange(len(cache)), kept, invert=True)].any(), f"layer {layer}: astray"
        if slots is None:
            continue
        got = cache[kept].view(torch.int16 if case.cache == "auto" else torch.uint8)
        low, high = (bits[slots >= 0] for bits in candidates(step, layer, case.cache, SCALES[layer]))
        wrong = (got != low) & (got != high)
        assert not wrong.any(), f"layer {layer}: {int(wrong.sum())} of {wrong.numel()} values"
        # And the two differ so rarely that they can't hide an error.
        assert (low != high).float().mean() < 0.01


@pytest.mark.parametrize("case", [*CASES], ids=lambda case: case.name)
def test_one_launch_follows_the_projection(steps: Callable[[Case], Step], case: Case) -> None:
    step = steps(case)
    assert len(step.launches) == 1, step.launches
    assert not step.allocations


@pytest.mark.parametrize("case", [*CASES, UNLIKE], ids=lambda case: case.name)
def test_the_caches_hold_the_layers_latents_to_the_bit(steps: Callable[[Case], Step], case: Case) -> None:
    step = steps(case)
    assert len(step.caches) == LAYERS
    assert_stored(step, case)
