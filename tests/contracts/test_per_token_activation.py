"""Contract per-token-activation: ModelOpt's NVFP4 experts can quantize their input with a scale for each token.

An option, off by default, that the user gives with the serve command.  With it,
FlashInfer's TRTLLM kernel gets unquantized input's own scales, and the
checkpoint's calibrated ones have no part in the numbers.  Where the option can't
be had, that is said while the model is built, not in the first request.

Refusals, 0.27.1 to 0.31.0; each needs the option, whose name stock releases refuse:
- another NVFP4 backend, the modular kernel (EPLB, expert parallelism with all-to-all, a routing that the monolithic
  kernel lacks): stock has no such kernel, or one that fails in its first forward pass;
- experts in FP8, MXFP8, W4A16_NVFP4 or block FP8: nothing there can have a scale for each token, and the user asked
  for other numbers than the default's;
- beside an explicit --quantization modelopt*, anything else in quantization_config (0.27.1 to 0.29.0): as on stock.
An activation for other formats' experts, which stock ignores, is ignored with a warning.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from moe import compat
from moe.fake_flashinfer import FakeFlashInfer
from moe.reference import NON_SITU, SITU, Act, Expert

OPTION = {"moe": {"activation": "nvfp4_per_token"}}
SILU = NON_SITU[0]
W13_SCALES = [0.25, 0.0117, 3.1, 0.5]
W2_SCALES = [0.5, 2.3, 0.071, 0.013]
OTHER_W13_SCALES = [1.7, 0.33, 0.043, 2.9]
# A checkpoint whose calibrated scales are not one: K3's are, and would hide that they are still in use.
W13_INPUT_SCALE, W2_INPUT_SCALE = 0.31, 0.0625


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    fake = FakeFlashInfer()
    compat.pretend_blackwell(monkeypatch, fake)
    return fake


def served(
    flashinfer: FakeFlashInfer,
    folder: Path,
    user: dict[str, Any] | None,
    *,
    act: Act = SITU,
    eplb: bool = False,
    backend: str = "flashinfer_trtllm",
    quantization: str | None = "modelopt_mixed",
    algorithm: str = "NVFP4",
) -> compat.NvFp4Experts:
    config = compat.moe_config(act, len(W13_SCALES), eplb=eplb, backend=backend)
    method = compat.Serving(folder, algorithm, quantization, user).method(config)
    return compat.NvFp4Experts(flashinfer, config, method)


def load(layer: compat.NvFp4Experts) -> None:
    config = layer.layer.moe_config
    layer.load(compat.checkpoint(config, W13_SCALES, W2_SCALES, W13_INPUT_SCALE, W2_INPUT_SCALE))


def test_off_by_default(flashinfer: FakeFlashInfer, tmp_path: Path) -> None:
    layer = served(flashinfer, tmp_path, None)
    load(layer)
    assert not layer.experts.expects_unquantized_inputs
    call = layer.call_kernel()
    assert call["per_token_scale"] is None
    assert not flashinfer.quantize_calls
    torch.testing.assert_close(
        call["output1_scale_gate_scalar"].data, torch.tensor(W13_SCALES) * W13_INPUT_SCALE, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("quantization", ["modelopt_mixed", "modelopt_fp4", None])
@pytest.mark.parametrize("act", [SITU, SILU], ids=str)
def test_tokens_get_their_own_scale(
    flashinfer: FakeFlashInfer, tmp_path: Path, act: Act, quantization: str | None
) -> None:
    """Whether the user names the checkpoint's format or leaves it to vLLM."""
    layer = served(flashinfer, tmp_path, OPTION, act=act, quantization=quantization)
    load(layer)
    assert layer.experts.expects_unquantized_inputs
    call = layer.call_kernel(quantized=False)
    (quantized,) = flashinfer.quantize_calls
    assert quantized["per_token_activation"] is True
    assert quantized["x"].dtype == torch.bfloat16
    torch.testing.assert_close(call["per_token_scale"], quantized["x"].abs().amax(dim=1).float())
    assert call["hidden_states"].dtype == torch.uint8


def assert_calibration_is_gone(call: dict[str, Any], w13_scales: list[float]) -> None:
    """The expert's numbers, with input that is quantized by its own scale alone."""
    generator = torch.Generator().manual_seed(0)
    for slot, (w13, w2) in enumerate(zip(w13_scales, W2_SCALES, strict=True)):
        expert = Expert.random(generator, w13, w2)
        x = expert.input_for(generator)
        got, want = expert.forward_in_kernel(call, slot, x, 1.0), expert.forward(SILU, x)
        excess = (got - want).abs() - 1e-5 * expert.magnitude(SILU, x)
        assert (excess <= 0).all(), f"slot {slot}: {got.tolist()} instead of {want.tolist()}"


def test_calibrated_scales_are_out_of_the_numbers(flashinfer: FakeFlashInfer, tmp_path: Path) -> None:
    layer = served(flashinfer, tmp_path, OPTION, act=SILU)
    load(layer)
    assert_calibration_is_gone(layer.call_kernel(quantized=False), W13_SCALES)


def test_and_after_weights_are_loaded_a_second_time(flashinfer: FakeFlashInfer, tmp_path: Path) -> None:
    layer = served(flashinfer, tmp_path, OPTION, act=SILU)
    load(layer)
    config = layer.layer.moe_config
    layer.reload(compat.checkpoint(config, OTHER_W13_SCALES, W2_SCALES, 0.47, 0.125))
    assert layer.experts.expects_unquantized_inputs
    assert_calibration_is_gone(layer.call_kernel(quantized=False), OTHER_W13_SCALES)


@pytest.mark.parametrize("backend", ["cutlass", "marlin"])
def test_other_backends_refuse_and_are_untouched_without_it(
    flashinfer: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str
) -> None:
    compat.pretend_supported(monkeypatch, backend)
    layer = served(flashinfer, tmp_path, None, act=SILU, backend=backend)
    assert "TRTLLM" not in layer.method.nvfp4_backend.value
    with pytest.raises((ValueError, NotImplementedError)) as refusal:
        served(flashinfer, tmp_path, OPTION, act=SILU, backend=backend)
    message = str(refusal.value).lower()
    assert "quantization_config is only supported" not in message, "the option itself is unknown"
    assert "trtllm" in message or "quantization scheme" in message, f"does not say why: {message}"


def test_experts_without_activation_quantization_refuse(
    flashinfer: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """W4A16_NVFP4 has nothing to which the option could apply."""
    compat.pretend_supported(monkeypatch, "marlin")
    served(flashinfer, tmp_path, None, act=SILU, backend="marlin", algorithm="W4A16_NVFP4")
    with pytest.raises(ValueError, match=r"W4A(16|4)"):
        served(flashinfer, tmp_path, OPTION, act=SILU, backend="marlin", algorithm="W4A16_NVFP4")


def test_the_modular_kernel_does_it_or_refuses_at_start(flashinfer: FakeFlashInfer, tmp_path: Path) -> None:
    """EPLB and expert parallelism take the modular kernel: no request may be the first to learn that it can't."""
    layer = served(flashinfer, tmp_path, None, eplb=True)
    load(layer)
    assert type(layer.experts).__name__.endswith("Modular")
    layer.workspaces(compat.HIDDEN // 2)
    assert layer.call_kernel()["per_token_scale"] is None
    try:
        layer = served(flashinfer, tmp_path, OPTION, eplb=True)
    except (ValueError, NotImplementedError) as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert "modular" in refusal, f"does not say why: {refusal}"
        return
    load(layer)
    layer.workspaces(compat.HIDDEN)
    call = layer.call_kernel(quantized=False)
    assert call["per_token_scale"] is not None


@pytest.mark.parametrize(
    "user",
    [{"moe": "nvfp4_per_token"}, {"moe": {"activation": "no_such_format"}}],
    ids=["a weight format", "unknown"],
)
def test_what_these_experts_cannot_do_is_an_error(
    flashinfer: FakeFlashInfer, tmp_path: Path, user: dict[str, Any]
) -> None:
    if user == {"moe": "nvfp4_per_token"} and compat.composes_online_quantization():
        pytest.skip("absent: here this quantizes layers that the checkpoint leaves in high precision")
    served(flashinfer, tmp_path, OPTION)
    with pytest.raises(ValueError, match=r"(?i)activation|moe|quantization"):
        served(flashinfer, tmp_path, user)


def test_an_activation_for_other_formats_experts_is_no_fault(flashinfer: FakeFlashInfer, tmp_path: Path) -> None:
    """mxfp8 is for MXFP4 experts. Beside a ModelOpt checkpoint that the engine recognizes, stock releases ignore it."""
    from vllm.model_executor.layers.quantization import modelopt

    if "Unsupported ModelOpt NVFP4 MoE activation override" in inspect.getsource(modelopt):
        pytest.skip("absent: this release itself asks that such an override be left out")
    layer = served(flashinfer, tmp_path, {"moe": {"activation": "mxfp8"}}, quantization=None)
    load(layer)
    assert layer.call_kernel()["per_token_scale"] is None


def test_cached_weights_are_kept_apart(flashinfer: FakeFlashInfer, tmp_path: Path) -> None:
    """A weight cache's daemon has processed its experts for one activation: an engine with another can't map them."""
    if not compat.has_weight_cache():
        pytest.skip("absent: no weight cache")
    with_it, without, again = (compat.weight_cache_key(tmp_path, user) for user in (OPTION, None, OPTION))
    assert with_it == again
    assert with_it.mismatched_fields(without)
