"""Run the drafter's steps in a process whose Triton kernels are interpreted, and note every operation.

    python -m epilogue.step FOLDER RESULTS

Triton decides when it is imported whether it compiles, and vLLM whether there is a Triton at all: hence a process.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from k3patches import garbage
from torch.utils import _python_dispatch as dispatch
from triton.runtime import autotuner, interpreter

from .cases import BLOCKS, CASES, LAYERS, SCALES, TOKENS, UNLIKE, UNTOUCHED, Case, Step

PRODUCTS = ("mm", "addmm", "linear", "matmul")


class Watch(dispatch.TorchDispatchMode):
    """While this holds, notes the matrix product and, after it, every launch and every allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.projected: torch.Tensor | None = None
        self.launches: list[str] = []
        self.allocations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.projected = out.clone()
            self.launches.clear()
            self.allocations.clear()
        elif name.startswith(("empty", "new_empty")):
            self.allocations.append(name)
        elif not is_view(func, args, out):
            self.launches.append(name)
        return out

    def launching(self, name: str, run: Any) -> Any:
        """`run`, as one launch whatever it is made of."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            self.launches.append(name)
            with dispatch._disable_current_modes():
                return run(*args, **kwargs)

        return launch


def is_view(func: Any, args: Any, out: Any) -> bool:
    """Whether an operation only looks at its first argument in another way."""
    if func._schema.is_mutable or not isinstance(args[0], torch.Tensor):
        return False
    made = out if isinstance(out, (list, tuple)) else [out]
    return all(each.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr() for each in made)


@contextlib.contextmanager
def watched(caches: list[torch.Tensor]) -> Iterator[Watch]:
    """vLLM's CUDA operators by their definitions, and they and Triton's kernels counted."""
    from dspark import compat, ops
    from vllm.models.kimi_k3.nvidia import dspark_mla

    watch = Watch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.cuda_ops(caches))
        for name in ("rms_norm", "rotary_embedding", "concat_and_cache_mla", "concat_and_cache_mla_grouped"):
            counted = watch.launching(name, getattr(dspark_mla.ops, name))
            stack.enter_context(mock.patch.object(dspark_mla.ops, name, counted))
        stack.enter_context(mock.patch.object(torch.nn.functional, "linear", ops.linear))
        executor = interpreter.GridExecutor
        run = executor.__call__
        stack.enter_context(
            mock.patch.object(
                executor,
                "__call__",
                lambda self, *a, **k: watch.launching(f"triton {self.fn.__name__}", run)(self, *a, **k),
            )
        )
        stack.enter_context(watch)
        yield watch


def round_as_a_gpu() -> None:
    """The interpreter's own conversion loses a carry, so it rounds as no GPU does."""
    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target not in (tl.bfloat16, tl.float8e4nv):
            return convert(data, source, target, mode)
        values = torch.from_numpy(data.view("float32").copy())
        if target == tl.bfloat16:
            return values.bfloat16().view(torch.int16).numpy().view("uint16")
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert_float


def tune_by_arguments_alone() -> None:
    """Triton refuses tuning keys that are no arguments since 3.9, and some releases' kernels have such a key."""
    init = autotuner.Autotuner.__init__

    def tolerant(self: Any, fn: Any, arg_names: list[str], configs: Any, key: list[str], *args: Any, **kw: Any) -> None:
        init(self, fn, arg_names, configs, [name for name in key if name in arg_names], *args, **kw)

    autotuner.Autotuner.__init__ = tolerant


class Drafters:
    """Makes drafters, loaded by vLLM beside a BF16 target."""

    def __init__(self, folder: Path) -> None:
        from dspark import modules
        from k3 import checkpoint, compat

        self.folder, self.made = folder, 0
        (folder / "target").mkdir()
        text = checkpoint.Geometry(vocab=256, heads=8, q_lora=256).text_config()
        (folder / "target" / "config.json").write_text(json.dumps(text))
        compat.inspect_models_in_process()
        config = modules.target_config(folder / "target")
        compat.start_distributed(config)
        self.target = modules.Target(config)

    def make(self, cache: str) -> Any:
        """A fresh one: what a drafter notes of its first caches is another contract's."""
        from dspark import modules
        from dspark.checkpoint import Drafter, Geometry

        def built(model: torch.nn.Module) -> None:
            for layer, decoder in enumerate(model.model.layers):
                decoder.self_attn.kv_cache_dtype = cache
                decoder.self_attn._k_scale.fill_(SCALES[layer])

        self.made += 1
        drafter = Drafter.random(Geometry(layers=LAYERS), seed=1)
        return modules.load(drafter, self.folder / f"draft{self.made}", self.target, built=built)


def run(loaded: Any, case: Case) -> Step:
    """The second of two equal steps: the first may build what later ones use."""
    from k3.modules import MODEL_DTYPE

    generator = torch.Generator().manual_seed(3)
    states = torch.randn(TOKENS, loaded.geometry.hidden, generator=generator).to(MODEL_DTYPE)
    positions = torch.randint(0, 1024, (TOKENS,), generator=generator).to(case.index)
    caches = []
    for layer, decoder in enumerate(loaded.layers):
        attn, block = decoder.self_attn, case.block_sizes[layer % len(case.block_sizes)]
        width = loaded.geometry.latent * (2 if case.cache == "auto" else 1)
        data = torch.full((BLOCKS, block, width), UNTOUCHED, dtype=torch.uint8)
        attn.kv_cache = data.view(MODEL_DTYPE) if case.cache == "auto" else data
        caches.append(attn.kv_cache)
    slots: Any = case.slots()
    if case.mapping == "one for all":
        slots = slots[0]
    for _ in range(2):
        for cache in caches:
            cache.view(torch.uint8).fill_(UNTOUCHED)
        with loaded._context(), watched(caches) as watch:
            loaded.model.precompute_and_store_context_kv(states, positions, slots)
    attn = loaded.layers[0].self_attn
    assert watch.projected is not None
    return Step(
        watch.projected.view(TOKENS, LAYERS, -1),
        torch.stack([decoder.self_attn.kv_a_layernorm.weight.detach().clone() for decoder in loaded.layers]),
        attn.kv_a_layernorm.variance_epsilon,
        positions,
        attn.rotary_emb.cos_sin_cache.clone(),
        attn.kv_lora_rank,
        [cache.view(torch.uint8).clone() for cache in caches],
        list(watch.launches),
        list(watch.allocations),
    )


def main() -> None:
    garbage.collect_seldom()
    from dspark import compat

    # vLLM collects garbage twice with every model that it loads.
    garbage.set_aside()
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    round_as_a_gpu()
    tune_by_arguments_alone()
    results: dict[str, Any] = {}
    drafters = Drafters(folder)
    for case in (*CASES, UNLIKE):
        with compat.workspace_manager():
            try:
                results[case.name] = vars(run(drafters.make(case.cache), case))
            except Exception:
                results[case.name] = traceback.format_exc()
    torch.save(results, target)
    garbage.set_aside()


if __name__ == "__main__":
    main()
