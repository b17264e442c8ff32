"""python -m tiny_k3.loading TREE FOLDER..: load checkpoints into a vLLM source tree, on CPU.

The models are built by vLLM's own classes and filled by their own loaders; only what a machine without a GPU lacks is
stood in for. A drafter is loaded beside the target that was named before it. Prints a JSON list: for each folder the
parameters that nothing was loaded into, the checkpoint's tensors that nobody asked for, and the quantization method of
every linear layer and expert bank; or why it was refused. This alone of the package imports vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from k3patches import bytecode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiny_k3.loading")
    parser.add_argument("tree", metavar="TREE", type=Path)
    parser.add_argument("folders", metavar="FOLDER", type=Path, nargs="+")
    parser.add_argument("--size", type=int, default=1, help="tensor parallel ranks, of which the last is loaded")
    chosen = parser.parse_args()
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["OMP_NUM_THREADS"] = "1"
    bytecode.install(chosen.tree.resolve())
    sys.dont_write_bytecode = True
    # The contracts' stand-ins for a GPU.
    sys.path[:0] = [str(chosen.tree.resolve()), str(Path(__file__).resolve().parents[2] / "contracts")]
    reports, beside = [], None
    for folder in chosen.folders:
        try:
            if _config(folder)["model_type"] == "k3_dspark":
                if beside is None:
                    parser.error(f"{folder} is a drafter: name its target first")
                reports.append(drafter(beside, folder, chosen.size))
            else:
                beside = folder
                reports.append(target(folder, chosen.size))
        except Exception as error:
            traceback.print_exc()
            reports.append({"refused": f"{type(error).__name__}: {error}"})
    print(json.dumps(reports))


def target(folder: Path, size: int) -> dict[str, Any]:
    """Load a target as the last of `size` ranks holds it."""
    import torch
    from k3 import compat
    from k3.modules import MODEL_DTYPE, poisoned_memory
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    compat.inspect_models_in_process()
    options = {"limit_mm_per_prompt": {"image": 0}} if "vision_config" in _config(folder) else {}
    model_config = ModelConfig(model=str(folder), tokenizer=str(folder), dtype="bfloat16", max_model_len=256, **options)
    config = VllmConfig(model_config=model_config, device_config=DeviceConfig(device="cpu"))
    compat.start_distributed(config)
    with (
        buildable(),
        compat.tensor_parallel(size, size - 1),
        poisoned_memory(),
        torch.no_grad(),
        set_default_torch_dtype(MODEL_DTYPE),
        set_current_vllm_config(config),
    ):
        model = initialize_model(config)
        report = _load(model, _weights(model_config, model), model.load_weights)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
        if model_config.hf_text_config.num_nextn_predict_layers:
            config.compilation_config.static_forward_context.clear()
            draft = initialize_model(config, model_class=compat.model_classes()["mtp"])
            report["mtp"] = _load(draft, _weights(model_config, draft), draft.load_weights)
        return report


def drafter(folder: Path, draft: Path, size: int) -> dict[str, Any]:
    """Load a drafter beside a target's configuration, through vLLM's own load_dspark_model."""
    from dspark import compat, modules
    from k3 import compat as k3_compat
    from vllm.config import set_current_vllm_config

    k3_compat.inspect_models_in_process()
    beside = modules.Target(modules.target_config(folder))
    k3_compat.start_distributed(beside.config)
    config = beside.with_drafter(draft, "auto")
    text = _config(folder)
    text = text.get("text_config", text)
    seen: dict[str, Any] = {}

    def built(model: Any) -> None:
        load = model.load_weights
        model.load_weights = lambda weights: seen.update(_load(model, weights, load))

    with compat.loadable(built), k3_compat.tensor_parallel(size, size - 1), set_current_vllm_config(config):
        compat.load_dspark_model(beside.module(text["hidden_size"], text["vocab_size"]), config)
    return seen


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _weights(model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    return get_model_loader(LoadConfig(use_tqdm_on_load=False)).get_all_weights(model_config, model)


def _load(model: Any, weights: Iterator[tuple[str, Any]], load: Callable[..., set[str]]) -> dict[str, Any]:
    """Let the model load, watching which tensors it does more with than look at their shape."""
    import torch

    asked: set[str] = set()
    names: list[str] = []

    class Watched(torch.Tensor):
        origin: str

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ not in LOOKS:
                asked.update(arg.origin for arg in args if isinstance(arg, Watched))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    def watched() -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            marked = tensor.as_subclass(Watched)
            marked.origin = name
            names.append(name)
            yield name, marked

    loaded = load(watched())
    return _report(model, loaded, [name for name in names if name not in asked])


LOOKS = ("__get__", "dim", "size", "numel", "element_size", "is_contiguous", "__len__")


def _report(model: Any, loaded: set[str], unused: list[str]) -> dict[str, Any]:
    methods = {
        name: type(module.quant_method).__name__
        for name, module in model.named_modules()
        if getattr(module, "quant_method", None) is not None
    }
    parameters = {name for name, _ in model.named_parameters()}
    return {"unloaded": sorted(parameters - loaded), "unused": unused, "methods": methods}


@contextlib.contextmanager
def buildable() -> Iterator[None]:
    """While this holds, the multimodal model and its experts can be built without a GPU."""
    import torch
    from k3 import compat, kernels
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as compressed,
    )
    from vllm.platforms import current_platform

    log = kernels.Log()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(compat.buildable())
        enter(
            compat.linear_kernels(kernels.factory(kernels.BlockKernel, log), kernels.factory(kernels.Mxfp8Kernel, log))
        )
        enter(mock.patch.object(torch.cuda, "Event"))
        here = lambda *_: torch.device("cpu")  # noqa: E731
        enter(mock.patch.object(type(current_platform), "current_device", here, create=True))
        for module in (modelopt, compressed):
            chosen = NvFp4MoeBackend.MARLIN, MarlinExperts
            enter(mock.patch.object(module, "select_nvfp4_moe_backend", return_value=chosen))
        # Experts are laid out for a GPU's kernel after loading; everything else is looked through here as well.
        for method in (
            modelopt.ModelOptNvFp4FusedMoE,
            compressed.CompressedTensorsW4A4Nvfp4MoEMethod,
            unquantized.UnquantizedFusedMoEMethod,
        ):
            enter(mock.patch.object(method, "process_weights_after_loading"))
        plain = UnquantizedMoeBackend.TRITON, None
        enter(mock.patch.object(unquantized, "select_unquantized_moe_backend", return_value=plain))
        yield


if __name__ == "__main__":
    main()
