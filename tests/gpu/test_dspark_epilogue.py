"""dspark-fused-epilogue on a GPU: one kernel after the projection stores the bits of the ops that it replaces.

    pytest tests/gpu/test_dspark_epilogue.py

Runs the model's own function of the vLLM that is installed, at K3's real shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    import k3_dspark
    import k3_linear

BLOCKS = 64
DRAFTERS = [(form, cache) for form in ("BF16", "FP8_PB_WO") for cache in ("auto", "fp8")]


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with k3_linear.engine():
        yield


@pytest.fixture(scope="module")
def made() -> Callable[[str, str], Any]:
    """Drafters, each built once, whose FP8 caches have a scale that divides nothing evenly."""
    models: dict[tuple[str, str], Any] = {}
    matrices, rotary_emb = k3_dspark.Matrices(), k3_dspark.rotary_embedding()

    def make(form: str, cache: str) -> Any:
        if (form, cache) not in models:
            chosen = matrices if form == "FP8_PB_WO" else None
            models[form, cache] = k3_dspark.drafter(chosen, cache, BLOCKS, scale=0.0237, rotary_emb=rotary_emb)
        return models[form, cache]

    return make


def stored(model: Any, run: Callable[[], None]) -> list[torch.Tensor]:
    """The bytes of all caches after `run`, over a pattern that no entry equals."""
    caches = [layer.self_attn.kv_cache.view(torch.uint8) for layer in model.layers]
    for cache in caches:
        cache.fill_(0x5A)
    run()
    torch.cuda.synchronize()
    return [cache.clone() for cache in caches]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for layer, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"layer {layer}: {int((a != b).sum())} of {a.numel()} bytes differ"


@pytest.mark.parametrize("tokens", [1, 7, 128, 1025, 4096])
@pytest.mark.parametrize(("form", "cache"), DRAFTERS)
def test_the_same_bits_are_stored(made: Callable[[str, str], Any], form: str, cache: str, tokens: int) -> None:
    model = made(form, cache)
    context = k3_dspark.Context.random(tokens, BLOCKS, seed=tokens, groups=2)
    for slots in context.slots[:2]:
        slots[4::5] = -1
    if tokens == 7:
        context.slots[3] = None
    with k3_dspark.without_epilogue(model):
        want = stored(model, lambda: k3_dspark.run(model, context))
    assert any((cache != 0x5A).any() for cache in want)
    assert_same(stored(model, lambda: k3_dspark.run(model, context)), want)


@pytest.mark.parametrize(("form", "cache"), DRAFTERS)
def test_one_kernel_follows_the_projection(made: Callable[[str, str], Any], form: str, cache: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    model, context = made(form, cache), k3_dspark.Context.random(9, BLOCKS)

    def kernels(run: Callable[[], object]) -> list[str]:
        run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
        return [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]

    projection = kernels(lambda: model._project_context_kv(context.states))
    if not projection:
        pytest.skip("the profiler sees no kernels on this machine")
    assert len(kernels(lambda: k3_dspark.run(model, context))) == len(projection) + 1


@pytest.mark.parametrize(("form", "cache"), DRAFTERS)
def test_a_graph_replays_with_other_inputs(made: Callable[[str, str], Any], form: str, cache: str) -> None:
    model, context = made(form, cache), k3_dspark.Context.random(33, BLOCKS, groups=2)
    other = k3_dspark.Context.random(33, BLOCKS, seed=1, groups=2)
    k3_dspark.run(model, context)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k3_dspark.run(model, context)
    with k3_dspark.without_epilogue(model):
        want = stored(model, lambda: k3_dspark.run(model, other))
    context.states.copy_(other.states)
    context.positions.copy_(other.positions)
    for mine, theirs in zip(context.slots[:2], other.slots[:2], strict=True):
        mine.copy_(theirs)
    assert_same(stored(model, graph.replay), want)


def test_a_step_without_slots_stores_nothing(made: Callable[[str, str], Any]) -> None:
    model, context = made("BF16", "auto"), k3_dspark.Context.random(5, BLOCKS)
    want = stored(model, lambda: None)
    got = stored(model, lambda: model.precompute_and_store_context_kv(context.states, context.positions, None))
    assert_same(got, want)
