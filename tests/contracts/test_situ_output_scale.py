"""Contract situ-output-scale: an NVFP4 expert's output has every dequantization scale in it once.

The SiTU kernel dequantizes gate and up with output1_scale_gate_scalar before its
nonlinearity.  Whatever else multiplies the result must not contain that scale
again: not after construction, nor after loading, nor after a weight update, nor
when EPLB has moved experts to other slots.  The activations that want it there
keep it.

Refusals: none on any base that stock does not have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe import compat
from moe.fake_flashinfer import Call, FakeFlashInfer
from moe.reference import NON_SITU, SITU, Act, Expert

# Powers of two and a bit: a scale applied twice, or another expert's, is off by far more than rounding.
W13_SCALES = [0.25, 0.0117, 3.1, 0.5]
W2_SCALES = [0.5, 2.3, 0.071, 0.013]
OTHER_W13_SCALES = [1.7, 0.33, 0.043, 2.9]
OTHER_W2_SCALES = [0.19, 0.41, 1.1, 3.7]
ORDER = [2, 0, 3, 1]

ALL = (SITU, *NON_SITU)
every_kernel = pytest.mark.parametrize("kernel", compat.KERNELS)
every_activation = pytest.mark.parametrize("act", ALL, ids=str)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    fake = FakeFlashInfer()
    compat.pretend_blackwell(monkeypatch, fake)
    return fake


@pytest.fixture
def select(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """ModelOpt's method with the kernel that the test asks for, whatever the parallel config would choose."""
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt

    choice = NvFp4MoeBackend.FLASHINFER_TRTLLM, compat.experts_class(kernel)
    monkeypatch.setattr(modelopt, "select_nvfp4_moe_backend", lambda *args, **kwargs: choice)


def check(
    act: Act,
    call: Call,
    w13_scales: list[float],
    w2_scales: list[float],
    a1_gscale: torch.Tensor,
    seed: int = 0,
) -> None:
    """Each slot of the kernel call computes the expert whose scales are given for that slot."""
    generator = torch.Generator().manual_seed(seed)
    assert call["activation_type"] == act.kernel
    for slot, (w13, w2) in enumerate(zip(w13_scales, w2_scales, strict=True)):
        expert = Expert.random(generator, w13, w2)
        x = expert.input_for(generator)
        got, want = expert.forward_in_kernel(call, slot, x, float(a1_gscale[0])), expert.forward(act, x)
        # Scales are float32; a scale too many or another expert's is off by much more.
        excess = (got - want).abs() - 1e-5 * expert.magnitude(act, x)
        assert (excess <= 0).all(), f"slot {slot}: {got.tolist()} instead of {want.tolist()}"


def bare_experts(act: Act, kernel: str, scales: dict[str, torch.Tensor]) -> Any:
    """Experts as they are right after construction: g1_alphas and g2_alphas have the input scales in them."""
    from vllm.model_executor.layers.fused_moe.config import nvfp4_moe_quant_config

    experts = scales["g1_alphas"].numel()
    quant_config = nvfp4_moe_quant_config(
        **scales,
        w1_scale=torch.ones((experts, 2, 1)).to(torch.float8_e4m3fn),
        w2_scale=torch.ones((experts, 2, 1)).to(torch.float8_e4m3fn),
        is_scale_swizzled=False,
    )
    return compat.experts_class(kernel)(moe_config=compat.moe_config(act, experts), quant_config=quant_config)


def layer_of(scales: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The layer of those experts, whose registered scales are the very tensors of the quant config."""
    layer = torch.nn.Module()
    experts = scales["g1_alphas"].numel()
    for name, tensor in {
        "w13_weight": torch.zeros((experts, 2, 1), dtype=torch.uint8),
        "w2_weight": torch.zeros((experts, 2, 1), dtype=torch.uint8),
        "w13_weight_scale_2": scales["g1_alphas"],
        "w2_weight_scale_2": scales["g2_alphas"],
        "w13_input_scale": torch.ones(experts),
        "w2_input_scale": torch.ones(experts),
    }.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return layer


def per_expert_scales(w13: list[float], w2: list[float], a1: float, a2: list[float]) -> dict[str, torch.Tensor]:
    """The quant config's scales, with an input scale of its own for each expert's second GEMM."""
    a2_scale = torch.tensor(a2)
    return {
        "g1_alphas": torch.tensor(w13) * a1,
        "g2_alphas": torch.tensor(w2) * a2_scale,
        "a1_gscale": torch.full((len(w13),), 1.0 / a1),
        "a2_gscale": 1.0 / a2_scale,
    }


@every_kernel
@every_activation
def test_at_construction(flashinfer: FakeFlashInfer, kernel: str, act: Act) -> None:
    scales = per_expert_scales(W13_SCALES, W2_SCALES, 0.31, [0.7, 0.09, 1.9, 0.02])
    experts = bare_experts(act, kernel, scales)
    if act.limit is not None:
        # The limit is given in dequantized numbers and becomes the kernel's only when weights are loaded.
        experts.process_weights_after_loading(layer_of(scales))
    call = compat.call_kernel(flashinfer, experts, layer_of(scales))
    check(act, call, W13_SCALES, W2_SCALES, scales["a1_gscale"])


scale = st.floats(2.0**-12, 2.0**4, width=32)


@given(data=st.data(), count=st.integers(1, 6), beta=st.floats(0.5, 8), linear_beta=st.floats(1, 64))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@every_kernel
def test_any_scales_any_betas(
    flashinfer: FakeFlashInfer, kernel: str, data: st.DataObject, count: int, beta: float, linear_beta: float
) -> None:
    w13, w2, a2 = (data.draw(st.lists(scale, min_size=count, max_size=count)) for _ in range(3))
    act = Act("situ", SITU.kernel, beta=beta, linear_beta=linear_beta)
    scales = per_expert_scales(w13, w2, data.draw(scale), a2)
    experts, layer = bare_experts(act, kernel, scales), layer_of(scales)
    check(act, compat.call_kernel(flashinfer, experts, layer), w13, w2, scales["a1_gscale"])
    experts.process_weights_after_loading(layer)
    check(act, compat.call_kernel(flashinfer, experts, layer), w13, w2, scales["a1_gscale"])


@every_kernel
@every_activation
def test_rearranged_experts_take_their_scale_along(flashinfer: FakeFlashInfer, kernel: str, act: Act) -> None:
    """EPLB moves registered parameters in place: the kernel reads the moved ones, and nothing else moves."""
    scales = per_expert_scales(W13_SCALES, W2_SCALES, 0.31, [0.7, 0.09, 1.9, 0.02])
    a2_gscale = scales["a2_gscale"].clone()
    experts, layer = bare_experts(act, kernel, scales), layer_of(scales)
    experts.process_weights_after_loading(layer)
    compat.ExpertsLayer.permute_experts(layer, ORDER)
    call = compat.call_kernel(flashinfer, experts, layer)
    assert call["output1_scale_scalar"] is layer.g1_scale_c
    check(act, call, [W13_SCALES[i] for i in ORDER], [W2_SCALES[i] for i in ORDER], scales["a1_gscale"])
    torch.testing.assert_close(experts.quant_config.a2_gscale, a2_gscale, rtol=0, atol=0)


def loaded(flashinfer: FakeFlashInfer, act: Act) -> compat.NvFp4Experts:
    config = compat.moe_config(act, len(W13_SCALES))
    layer = compat.NvFp4Experts(flashinfer, config)
    layer.load(compat.checkpoint(config, W13_SCALES, W2_SCALES, 0.31, 0.0625))
    return layer


@pytest.mark.usefixtures("select")
@every_kernel
@every_activation
def test_loaded_by_modelopt(flashinfer: FakeFlashInfer, kernel: str, act: Act) -> None:
    layer = loaded(flashinfer, act)
    call = layer.call_kernel()
    assert call["output1_scale_scalar"] is layer.layer.g1_scale_c
    check(act, call, W13_SCALES, W2_SCALES, layer.method.moe_quant_config.a1_gscale)
    layer.layer.permute_experts(ORDER)
    check(
        act,
        layer.call_kernel(),
        [W13_SCALES[i] for i in ORDER],
        [W2_SCALES[i] for i in ORDER],
        layer.method.moe_quant_config.a1_gscale,
    )


@pytest.mark.usefixtures("select")
@every_kernel
@every_activation
def test_weights_loaded_a_second_time(flashinfer: FakeFlashInfer, kernel: str, act: Act) -> None:
    """Other scales, other input scales.  Captured CUDA graphs read the first load's storage: it must be kept."""
    layer = loaded(flashinfer, act)
    registered = layer.layer.g1_scale_c
    config = layer.layer.moe_config
    for w13, w2, a1, a2 in (
        (OTHER_W13_SCALES, OTHER_W2_SCALES, 0.47, 0.125),
        (W13_SCALES, W2_SCALES, 0.31, 0.0625),
    ):
        layer.reload(compat.checkpoint(config, w13, w2, a1, a2))
        call = layer.call_kernel()
        check(act, call, w13, w2, layer.method.moe_quant_config.a1_gscale)
        assert layer.layer.g1_scale_c is registered
        torch.testing.assert_close(layer.layer.g1_scale_c.data, call["output1_scale_scalar"].data, rtol=0, atol=0)
