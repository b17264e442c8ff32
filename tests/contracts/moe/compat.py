"""vLLM's NVFP4 experts on CPU, and what the releases 0.27.1 to 0.33.0 name differently."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .fake_flashinfer import Call, FakeFlashInfer
from .reference import Act

# The kernel pads hidden sizes to 256 (512 in some releases' per-token mode) and
# intermediate sizes to 64 or 128: with these, nothing is padded.
HIDDEN = 512
INTERMEDIATE = 128
TOKENS = 3
TOPK = 2

KERNELS = ("Modular", "Monolithic")


class _Blackwell:
    """A platform that answers as a B200 does; everything else as the real one."""

    device_name = "fake B200"

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def is_device_capability_family(self, capability: int) -> bool:
        return capability == 100

    def has_device_capability(self, capability: Any) -> bool:
        return True


class _OneRank:
    world_size, rank_in_group, device_group, cpu_group = 1, 0, None, None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def pretend_blackwell(monkeypatch: pytest.MonkeyPatch, flashinfer: FakeFlashInfer) -> None:
    """Make the TRTLLM NVFP4 experts importable, selectable and callable here."""
    # Imported first: on import, vLLM looks whether the real flashinfer has what it wants.
    from vllm.distributed import parallel_state
    from vllm.model_executor import parameter
    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.model_executor.layers.fused_moe.experts import trtllm_nvfp4_moe as experts
    from vllm.model_executor.layers.quantization import modelopt  # noqa: F401

    flashinfer.install(monkeypatch)
    for module in (moe_config, experts):
        monkeypatch.setattr(module, "current_platform", _Blackwell(module.current_platform))
    monkeypatch.setattr(experts, "has_flashinfer_trtllm_fused_moe", lambda: True)
    # Later releases agree with the other ranks on input scales when experts are rebalanced: here is one rank.
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(parallel_state, "get_ep_group", _OneRank)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: torch.device("cpu"))
    if hasattr(experts, "trtllm_moe_pack_topk_ids_weights"):  # a Triton kernel; gone in later releases
        monkeypatch.setattr(experts, "trtllm_moe_pack_topk_ids_weights", lambda ids, weights: ids)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)


def moe_config(act: Act, num_experts: int, *, eplb: bool = False, backend: str = "flashinfer_trtllm") -> Any:
    """The MoE's config.  Expert load balancing is what makes vLLM choose the modular kernel on one rank."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.enable_eplb = eplb
    return FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=TOPK,
        hidden_dim=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=num_experts,
        num_logical_experts=num_experts,
        activation=MoEActivation(act.name),
        device="cpu",
        routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        moe_backend=backend,
        swiglu_limit=act.limit,
        swiglu_alpha=act.alpha,
        swiglu_beta=act.shift,
        activation_situ_beta=act.beta,
        activation_situ_linear_beta=act.linear_beta,
    )


def experts_class(kernel: str) -> type:
    from vllm.model_executor.layers.fused_moe.experts import trtllm_nvfp4_moe

    return getattr(trtllm_nvfp4_moe, f"TrtLlmNvFp4Experts{kernel}")


def call_kernel(flashinfer: FakeFlashInfer, experts: Any, layer: Any, *, quantized: bool = True) -> Call:
    """One forward of the experts; returns what the (one) kernel call was handed."""
    if quantized:
        hidden_states = torch.zeros((TOKENS, HIDDEN // 2), dtype=torch.uint8)
        a1q_scale = torch.ones((TOKENS, HIDDEN // 16), dtype=torch.float8_e4m3fn)
    else:
        hidden_states = torch.randn((TOKENS, HIDDEN), dtype=torch.bfloat16)
        a1q_scale = None
    offered = {
        "output": torch.zeros((TOKENS, HIDDEN), dtype=torch.bfloat16),
        "hidden_states": hidden_states,
        "w1": layer.w13_weight,
        "w2": layer.w2_weight,
        "topk_weights": torch.ones((TOKENS, TOPK)),
        "topk_ids": torch.zeros((TOKENS, TOPK), dtype=torch.int32),
        "router_logits": torch.zeros((TOKENS, experts.moe_config.num_experts)),
        "activation": experts.moe_config.activation,
        "global_num_experts": experts.moe_config.num_experts,
        "expert_map": None,
        "a1q_scale": a1q_scale,
        "a2_scale": None,
        "workspace13": None,
        "workspace2": None,
        "expert_tokens_meta": None,
        "apply_router_weight_on_input": False,
    }
    wanted = inspect.signature(experts.apply).parameters
    before = len(flashinfer.moe_calls)
    experts.apply(**{name: value for name, value in offered.items() if name in wanted})
    assert len(flashinfer.moe_calls) == before + 1
    return flashinfer.moe_calls[-1]


class ExpertsLayer(torch.nn.Module):
    """What ModelOpt's NVFP4 method needs of vLLM's routed-experts layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.moe_config = config
        self.activation = config.activation
        self.global_num_experts = config.num_experts
        self.local_num_experts = config.num_local_experts
        self.swiglu_limit = config.swiglu_limit

    def _expert_routing_tables(self) -> None:
        return None

    def permute_experts(self, order: list[int]) -> None:
        """EPLB's rearrangement: in place, every registered per-expert tensor but the shared input scales."""
        for name, parameter in self.named_parameters():
            if name not in ("w13_input_scale", "w2_input_scale"):
                parameter.data.copy_(parameter.data[order].clone())


def _load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


def checkpoint(
    config: Any,
    w13_scale_2: list[float],
    w2_scale_2: list[float],
    w13_input_scale: float,
    w2_input_scale: float,
) -> dict[str, torch.Tensor]:
    """The tensors of a ModelOpt NVFP4 checkpoint for one layer, all local experts, as they are loaded."""
    experts, shards = config.num_local_experts, 2 if config.is_act_and_mul else 1
    rows, hidden, inner = shards * INTERMEDIATE, HIDDEN, INTERMEDIATE
    return {
        "w13_weight": torch.zeros((experts, rows, hidden // 2), dtype=torch.uint8),
        "w2_weight": torch.zeros((experts, hidden, inner // 2), dtype=torch.uint8),
        "w13_weight_scale": torch.ones((experts, rows, hidden // 16)).to(torch.float8_e4m3fn),
        "w2_weight_scale": torch.ones((experts, hidden, inner // 16)).to(torch.float8_e4m3fn),
        "w13_weight_scale_2": torch.tensor(w13_scale_2)[:, None].repeat(1, shards),
        "w2_weight_scale_2": torch.tensor(w2_scale_2),
        "w13_input_scale": torch.full((config.num_experts, shards), w13_input_scale),
        "w2_input_scale": torch.full((config.num_experts,), w2_input_scale),
    }


EXPERTS = "language_model.model.layers.1.block_sparse_moe.experts"


class Serving:
    """A ModelOpt checkpoint as the user serves it: --quantization and --quantization-config."""

    def __init__(self, folder: Path, algorithm: str, quantization: str | None, user: dict[str, Any] | None) -> None:
        from vllm.config import DeviceConfig, LoadConfig, VllmConfig
        from vllm.config.quantization import resolve_quantization_config
        from vllm.model_executor.model_loader.weight_utils import get_quant_config

        mixed = quantization != "modelopt_fp4"
        checkpoint: dict[str, Any] = {"quant_algo": "MIXED_PRECISION" if mixed else algorithm, "exclude_modules": []}
        if mixed:
            checkpoint["quantized_layers"] = {f"{EXPERTS}.0.w1": {"quant_algo": algorithm, "group_size": 16}}
        self.model_config = SimpleNamespace(
            model=str(folder),
            revision=None,
            quantization=quantization or "modelopt_mixed",  # what the engine finds out from the checkpoint
            quantization_config=resolve_quantization_config(quantization, user),
            hf_config=SimpleNamespace(quantization_config={"quant_method": "modelopt", **checkpoint}),
            hf_overrides={},
        )
        self.vllm_config = VllmConfig(device_config=DeviceConfig(device="cpu"))
        self.vllm_config.model_config = self.model_config
        self.quant_config = get_quant_config(self.model_config, LoadConfig())

    def method(self, config: Any) -> Any:
        """The method that this checkpoint's experts get, as the model asks for it while it is built."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import RoutedExperts

        layer = RoutedExperts.__new__(RoutedExperts)
        torch.nn.Module.__init__(layer)
        layer.moe_config = config
        with set_current_vllm_config(self.vllm_config):
            return self.quant_config.get_quant_method(layer, EXPERTS)


def accepts(user: dict[str, Any]) -> bool:
    """Whether --quantization-config knows all that is named there."""
    from vllm.config.quantization import QuantizationConfigArgs

    try:
        return QuantizationConfigArgs(**user) is not None
    except ValueError:
        return False


def composes_online_quantization() -> bool:
    """Whether --quantization-config also quantizes what a quantized checkpoint leaves alone (from 0.31.0 on)."""
    from vllm.config.quantization import resolve_quantization_config

    try:
        return resolve_quantization_config("modelopt_mixed", {"moe": "nvfp4_per_token"}) is not None
    except ValueError:
        return False


def has_weight_cache() -> bool:
    """Whether engines can map weights that a daemon has processed (from 0.30.0 on)."""
    return importlib.util.find_spec("vllm.model_executor.model_loader.weight_cache") is not None


def weight_cache_key(folder: Path, user: dict[str, Any] | None) -> Any:
    """What a daemon and an engine that are given ``user`` compare before weights are mapped."""
    from transformers import PretrainedConfig
    from vllm.config import CacheConfig
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheKey

    model_config = SimpleNamespace(
        model=str(folder),
        revision=None,
        dtype=torch.bfloat16,
        quantization="modelopt_mixed",
        quantization_config=resolve_quantization_config("modelopt_mixed", user),
        hf_config=PretrainedConfig(),
        hf_text_config=PretrainedConfig(),
    )
    make = WeightCacheKey.from_model_config
    needed = {"cache_config": CacheConfig()} if "cache_config" in inspect.signature(make).parameters else {}
    return make(model_config, tp_size=1, tp_rank=0, **needed)


def pretend_supported(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Let this machine pass for one that the backend's kernels run on."""
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4

    for kernel in nvfp4.backend_to_kernel_cls(nvfp4.map_nvfp4_backend(backend)):
        monkeypatch.setattr(kernel, "_supports_current_device", staticmethod(lambda: True))


FORMATS = ("modelopt", "compressed-tensors")


def _modelopt_method(config: Any) -> Any:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE

    return ModelOptNvFp4FusedMoE(ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True, group_size=16), config)


def nvfp4_experts(
    monkeypatch: pytest.MonkeyPatch, flashinfer: FakeFlashInfer, checkpoint_format: str, config: Any, kernel: str
) -> NvFp4Experts:
    """Experts of a format, with the TRTLLM kernel that is named, whatever the config would choose."""
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as compressed_tensors,
    )

    choice = NvFp4MoeBackend.FLASHINFER_TRTLLM, experts_class(kernel)
    for module in (modelopt, compressed_tensors):
        monkeypatch.setattr(module, "select_nvfp4_moe_backend", lambda *args, **kwargs: choice)
    if checkpoint_format == "modelopt":
        return NvFp4Experts(flashinfer, config, _modelopt_method(config))
    return CompressedTensorsExperts(flashinfer, config, compressed_tensors.CompressedTensorsW4A4Nvfp4MoEMethod(config))


class NvFp4Experts:
    """A layer of NVFP4 experts that a quantization method, ModelOpt's by default, creates, loads and reloads."""

    def __init__(self, flashinfer: FakeFlashInfer, config: Any, method: Any | None = None) -> None:
        from vllm.model_executor.model_loader import reload

        self.flashinfer = flashinfer
        self.method = method or _modelopt_method(config)
        self.layer = ExpertsLayer(config)
        self.layer.quant_method = self.method
        self.method.create_weights(
            self.layer,
            num_experts=config.num_local_experts,
            hidden_size=HIDDEN,
            intermediate_size_per_partition=INTERMEDIATE,
            params_dtype=torch.bfloat16,
            global_num_experts=config.num_experts,
            weight_loader=_load,
        )
        reload.record_metadata_for_reloading(self.layer)

    def stored(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """ModelOpt's tensors as this format stores them."""
        return tensors

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.stored(tensors).items():
            parameter = getattr(self.layer, name)
            parameter.weight_loader(parameter, tensor)
        self.method.process_weights_after_loading(self.layer)

    def reload(self, tensors: dict[str, torch.Tensor]) -> None:
        """A weight update while serving, as vLLM's layerwise reload does it."""
        from vllm.model_executor.model_loader import reload

        reload.initialize_layerwise_reload(self.layer)
        for name, tensor in self.stored(tensors).items():
            parameter = getattr(self.layer, name)
            parameter.weight_loader(parameter, tensor)
        reload.finalize_layerwise_reload(self.layer, SimpleNamespace(dtype=torch.bfloat16))

    def expert_weights(self) -> list[torch.Tensor]:
        """What EPLB moves, one row an expert: vLLM asks for it once, after the first load."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts

        weights = RoutedExperts.get_expert_weights(self.layer)
        return [w.view(torch.uint8) if w.element_size() == 1 else w for w in weights]

    def input_global_scale(self) -> torch.Tensor | None:
        """The scale that input is quantized with before the kernel; None where the kernel gets it unquantized."""
        from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep

        seen = []

        def quantize(a1: torch.Tensor, scale: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
            seen.append(scale.data)
            return a1, None

        offered = {
            "a1": torch.zeros((TOKENS, HIDDEN), dtype=torch.bfloat16),
            "topk_weights": torch.ones((TOKENS, TOPK)),
            "topk_ids": torch.zeros((TOKENS, TOPK), dtype=torch.int32),
            "router_logits": torch.zeros((TOKENS, self.layer.global_num_experts)),
            "num_experts": self.layer.global_num_experts,
            "expert_map": None,
            "apply_router_weight_on_input": False,
            "quant_config": self.experts.quant_config,
            "defer_input_quant": self.experts.expects_unquantized_inputs,
        }
        prepare = self.method.moe_kernel.prepare_finalize.prepare
        wanted = inspect.signature(prepare).parameters
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(no_dp_ep, "moe_kernel_quantize_input", quantize)
            prepare(**{name: value for name, value in offered.items() if name in wanted})
        return seen[0] if seen else None

    @property
    def experts(self) -> Any:
        return self.method.moe_kernel.fused_experts

    def workspaces(self, hidden: int) -> Any:
        """What the modular kernel asks for before it runs, given the width of its input as it comes in."""
        offered = {
            "M": TOKENS,
            "N": 2 * INTERMEDIATE,
            "K": hidden,
            "topk": TOPK,
            "global_num_experts": self.layer.global_num_experts,
            "local_num_experts": self.layer.local_num_experts,
            "expert_tokens_meta": None,
            "activation": self.layer.activation,
        }
        wanted = inspect.signature(self.experts.workspace_shapes).parameters
        return self.experts.workspace_shapes(**{name: value for name, value in offered.items() if name in wanted})

    def call_kernel(self, *, quantized: bool = True) -> Call:
        return call_kernel(self.flashinfer, self.experts, self.layer, quantized=quantized)


class CompressedTensorsExperts(NvFp4Experts):
    """The same experts in compressed-tensors: global scales are stored as their reciprocals."""

    def stored(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        experts = self.layer.local_num_experts
        stored = {}
        for name in ("w13", "w2"):
            stored[f"{name}_weight_packed"] = tensors[f"{name}_weight"]
            stored[f"{name}_weight_scale"] = tensors[f"{name}_weight_scale"]
            stored[f"{name}_weight_global_scale"] = 1.0 / tensors[f"{name}_weight_scale_2"]
            stored[f"{name}_input_global_scale"] = 1.0 / tensors[f"{name}_input_scale"][:experts]
        return stored
