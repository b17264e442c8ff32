"""python tests/models/worker.py TREE OUT [CASE..]: load the zoo's checkpoints into one vLLM source tree, on CPU.

Models are vLLM's own classes, filled by their own load_weights and prepared by vLLM's post-load steps; only what a
machine without a GPU lacks is stood in for. OUT becomes a JSON object: for each case what became of each step, either
the error, or every parameter's dtype, shape and digest, and how far each linear layer is from float64 of the
checkpoint. A case is MODEL/STORAGE/SIZE.RANK/SCENARIO, and may be a pattern.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from k3patches import bytecode

HERE = Path(__file__).resolve().parent
POISONS = {"nan": float("nan"), "1e30": 1e30}


def main() -> None:
    parser = argparse.ArgumentParser(prog="worker.py")
    parser.add_argument("tree", metavar="TREE", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("cases", metavar="CASE", nargs="*", default=["*"])
    parser.add_argument("--traceback", action="store_true", help="print where each error was raised")
    parser.add_argument("--thorough", action="store_true", help="every way on every rank")
    chosen = parser.parse_args()
    os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["OMP_NUM_THREADS"] = "1"
    bytecode.install(chosen.tree.resolve())
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(chosen.tree.resolve()), str(HERE), str(HERE.parent / "contracts")]
    import torch

    torch.set_num_threads(1)
    import cases

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), chosen.traceback)
        bench.config(cases.Case("moe", "modelopt-fp8", 1, 0, "load, reload"))  # of groups, one for experts
        report = {}
        for case in cases.cases(chosen.thorough):
            if any(fnmatch.fnmatchcase(str(case), pattern) for pattern in chosen.cases):
                began = time.perf_counter()
                report[str(case)] = bench.run(case)
                if len(report) == 1:
                    gc.freeze()  # what importing vLLM left: seconds to look through
                report[str(case)]["seconds"] = round(time.perf_counter() - began, 3)
    chosen.out.write_text(json.dumps(report, indent=1))


class Bench:
    """Builds and loads models, and looks at what they then are."""

    def __init__(self, folder: Path, traceback: bool) -> None:
        from k3 import compat

        self.folder = folder
        self.traceback = traceback
        self.models: dict[tuple[str, str], Any] = {}
        self.checkpoints: dict[tuple[Any, ...], Any] = {}
        compat.inspect_models_in_process()

    def config(self, case: Any) -> Any:
        """A configuration of vLLM's, new for each model that is built, as a process would have it."""
        import zoo
        from k3 import compat
        from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig

        key = case.model, case.storage
        if key not in self.models:
            folder = self.folder / str(len(self.models))
            folder.mkdir()
            written = zoo.config_json(zoo.MODELS[case.model], zoo.STORAGES[case.storage])
            (folder / "config.json").write_text(json.dumps(written))
            self.models[key] = ModelConfig(
                model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=128
            )
        load = LoadConfig(load_format="dummy" if case.steps[0].how == "dummy" else "auto")
        config = VllmConfig(model_config=self.models[key], device_config=DeviceConfig(device="cpu"), load_config=load)
        compat.start_distributed(config)
        return config

    def checkpoint(self, case: Any, step: Any) -> Any:
        import zoo

        key = case.model, case.storage, step.seed, step.scales
        if key not in self.checkpoints:
            if any(other[:2] != key[:2] for other in self.checkpoints):
                self.checkpoints.clear()  # cases come in order
            model, storage = zoo.MODELS[case.model], zoo.STORAGES[case.storage]
            self.checkpoints[key] = zoo.write(model, storage, step.seed, step.scales)
        return self.checkpoints[key]

    def run(self, case: Any) -> dict[str, Any]:
        """Each step of a case: what came of it."""
        import torch
        import zoo
        from vllm.model_executor.layers import rotary_embedding

        steps: dict[str, Any] = {}
        loaded = None
        # Kept for all models of a process; one that a refused reload took apart is nobody else's.
        rotary_embedding._ROPE_DICT.clear()
        torch.set_default_dtype(torch.float32)
        try:
            config = self.config(case)
            with self._context(case, config):
                loaded = Loaded(zoo.MODELS[case.model], config, case.size, case.rank)
                for step in case.steps:
                    before = loaded.addresses()
                    checkpoint = self.checkpoint(case, step)
                    loaded.take(step.how, checkpoint)
                    seen = loaded.report(None if step.how == "dummy" else checkpoint, step.scales)
                    seen["moved"] = sorted(k for k, v in loaded.addresses().items() if before.get(k, v) != v)
                    steps[step.name] = seen
        except Exception as error:
            if self.traceback:
                import traceback

                traceback.print_exc()
            left = [step.name for step in case.steps if step.name not in steps]
            steps[left[0]] = {"refused": f"{type(error).__name__}: {error}"[:600]}
        finally:
            torch.set_default_dtype(torch.float32)
            loaded = None
            gc.collect()
        return {"steps": steps}

    @contextlib.contextmanager
    def _context(self, case: Any, config: Any) -> Iterator[None]:
        import stand_ins
        import torch
        from k3 import compat
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with (
            compat.tensor_parallel(case.size, case.rank),
            stand_ins.without_gpu(),
            stand_ins.poisoned(POISONS[case.poison]),
            torch.no_grad(),
            set_current_vllm_config(config),
            set_default_torch_dtype(torch.bfloat16),
        ):
            yield


class Loaded:
    """A model as one rank holds it."""

    def __init__(self, model: Any, config: Any, size: int, rank: int) -> None:
        from vllm.model_executor.model_loader.utils import initialize_model

        self.model, self.config, self.size, self.rank = model, config, size, rank
        self.module = initialize_model(config)

    def take(self, how: str, checkpoint: Any) -> None:
        """Weights, in one of the ways in which vLLM and those who train with it hand them over."""
        import torch
        from vllm.model_executor.model_loader import reload, utils

        cpu, config = torch.device("cpu"), self.config.model_config
        if how == "dummy":
            from vllm.model_executor.model_loader import get_model_loader

            get_model_loader(self.config.load_config).load_weights(self.module, config)
            utils.process_weights_after_loading(self.module, config, cpu)
        elif how == "reload":
            reload.initialize_layerwise_reload(self.module)
            self.module.load_weights(checkpoint.weights())
            reload.finalize_layerwise_reload(self.module, config)
        else:
            self.module.load_weights(checkpoint.weights())
            utils.process_weights_after_loading(self.module, config, cpu)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """All that kernels may read: parameters, buffers, and tensors that are plain attributes of layers."""
        import torch

        for name, module in self.module.named_modules():
            for kind in (module._parameters, module._buffers, vars(module)):
                for key, tensor in kind.items():
                    if isinstance(tensor, torch.Tensor):
                        yield f"{name}.{key}", tensor

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.tensors() if tensor.numel()}

    def report(self, checkpoint: Any, scales: tuple[float, ...]) -> dict[str, Any]:
        """Digests, and with a checkpoint how far each linear layer is from it."""
        tensors = {name: digest(tensor) for name, tensor in self.tensors()}
        if checkpoint is None:
            return {"tensors": tensors}
        layers: dict[str, Any] = {}
        for linear in self.model.linears:
            for name, parts in self._held(linear):
                layers[name] = self._guarded(
                    lambda n=name, p=parts, ln=linear: self._linear(n, p, ln, checkpoint, scales)
                )
        for name, module in self.module.named_modules():
            if hasattr(module, "W_UV") and hasattr(module, "W_UK_T"):
                layers[f"{name} absorbed"] = self._guarded(
                    lambda n=name, m=module: self._absorbed(n, m, checkpoint, scales)
                )
        return {"tensors": tensors, "layers": layers}

    def _guarded(self, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return look()
        except Exception as error:
            return {"right": False, "error": None, "why": f"{type(error).__name__}: {error}"[:300]}

    def _held(self, linear: Any) -> Iterator[tuple[str, list[int]]]:
        """The modules that hold a layer's parts in this release: the merged one, or each apart."""
        modules = dict(self.module.named_modules())
        if linear.name in modules:
            yield linear.name, list(range(len(linear.parts)))
            return
        for index, part in enumerate(linear.parts):
            if part.name in modules:
                yield part.name, [index]
            elif not part.absent:
                yield part.name, []

    def _linear(
        self, name: str, parts: list[int], linear: Any, checkpoint: Any, scales: tuple[float, ...]
    ) -> dict[str, Any]:
        import torch

        if not parts:
            return {"right": False, "error": None, "why": "no such layer"}
        module = self.module.get_submodule(name)
        if hasattr(module, "reduce_results"):
            module.reduce_results = False  # one simulated rank has nobody to reduce with
        cols = linear.cols // (self.size if linear.split == "cols" else 1)
        inputs = torch.cat([torch.eye(cols, dtype=torch.float64), torch.zeros(1, cols, dtype=torch.float64)])
        if type(module.quant_method).__name__ == "UnquantizedLinearMethod":
            outputs = inputs @ module.weight.double().T
            if getattr(module, "bias", None) is not None:
                outputs = outputs + module.bias.double()
        else:
            outputs = module(inputs)
            outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        matrices = linear.share(checkpoint.matrices[linear.name], self.size, self.rank)
        biases = linear.share(checkpoint.biases[linear.name], self.size, self.rank)
        rows = linear.rows(self.size)
        if outputs.shape[1] != sum(rows[index] for index in parts):
            return {"right": False, "error": None, "why": f"{outputs.shape[1]} outputs, not {rows}"}
        form, at, found = checkpoint.forms[linear.name], 0, []
        used = [scales[i] for i in parts if matrices[i] is not None]
        for index in parts:
            matrix, bias, block = matrices[index], biases[index], outputs[:, at : at + rows[index]]
            at += rows[index]
            if matrix is None:
                continue
            shift = block[-1] if bias is None else block[-1] - bias
            found.append(compare((block[:-1] - block[-1]).T, matrix, form, max(used)))
            off = float(shift.abs().max())
            if not off <= 1e-9:
                found.append({"right": False, "exact": False, "error": off if off == off else None, "why": "bias"})
        return worst(found)

    def _absorbed(self, name: str, module: Any, checkpoint: Any, scales: tuple[float, ...]) -> dict[str, Any]:
        """MLA's decode weights, which are kv_b_proj's halves rounded to the model's dtype."""
        import torch

        prefix = name.partition(".self_attn")[0] + ".self_attn.kv_b_proj"
        linear = next(linear for linear in self.model.linears if linear.name == prefix)
        (matrix,) = linear.share(checkpoint.matrices[prefix], self.size, self.rank)
        nope = self.model.config["qk_nope_head_dim"]
        heads = matrix.view(module.W_UV.shape[0], -1, matrix.shape[1])
        form, up, down = checkpoint.forms[prefix], heads[:, :nope], heads[:, nope:]
        found = [
            compare(module.W_UK_T.double().flatten(), up.flatten(), form, scales[0], 2.0**-8),
            compare(module.W_UV.double().transpose(1, 2).flatten(), down.flatten(), form, scales[0], 2.0**-8),
        ]
        return worst(found) if module.W_UV.dtype == torch.bfloat16 else {"right": False, "error": None, "why": "dtype"}


def compare(actual: Any, expected: Any, form: Any, scale: float, rounding: float = 0.0) -> dict[str, Any]:
    """Whether each element is the checkpoint's, but for one rounding where shards share a number."""
    from dspark import formats

    if actual.shape != expected.shape:
        return {"right": False, "exact": False, "error": None, "why": f"{tuple(actual.shape)}"}
    off = (actual - expected).abs()
    exact = (formats.ALGEBRA + rounding) * expected.abs()
    bound = exact + form.tolerance(expected, scale) if form.under_one else exact
    error = float(off.max() / expected.abs().max())
    return {
        "right": bool((off <= bound).all()),
        "exact": bool((off <= exact).all()),
        "error": error if error == error else None,
    }


def worst(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One verdict on several parts."""
    return min(found, key=lambda one: (one["right"], one["exact"], -(one["error"] or 0.0), one["error"] is not None))


def digest(tensor: Any) -> list[Any]:
    """[dtype, shape, digest of the bytes]"""
    import torch

    data = tensor.detach()
    shape = list(data.shape)
    if not data.numel() or data.device.type == "meta":
        return [str(data.dtype), shape, ""]
    flat = data.contiguous().flatten().view(torch.uint8)
    return [str(data.dtype), shape, hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]]


if __name__ == "__main__":
    main()
