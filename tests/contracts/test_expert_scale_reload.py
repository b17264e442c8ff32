"""Contract expert-scale-reload: a TRTLLM NVFP4 expert is computed with its own scales, whatever moved or replaced it.

Weights are reloaded while serving, and EPLB moves experts to other rows, in
place and in the storage it saw after the first load.  After either, and after
one following the other, every scale that the kernel is handed belongs to the
expert whose weights stand at that row.  That holds for an eager call and for a
CUDA graph, which reads the addresses that it was captured with.  A reload needs
no more memory than the load did, and the layer's state is all that another rank
needs to compute the same.

Refusals: none on any base.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from moe import compat
from moe.fake_flashinfer import Call, FakeFlashInfer
from moe.reference import NON_SITU, SITU, Act, Expert

ALL = (SITU, *NON_SITU)
every_kernel = pytest.mark.parametrize("kernel", compat.KERNELS)
every_activation = pytest.mark.parametrize("act", ALL, ids=str)
every_format = pytest.mark.parametrize("checkpoint_format", compat.FORMATS)
# EPLB chooses the modular kernel.
modular = pytest.mark.parametrize("kernel", ["Modular"])

ORDER = [2, 0, 3, 1]
SCALES = ("gemm1_", "gemm2_", "output1_", "output2_")


@dataclass(frozen=True)
class Checkpoint:
    """One layer's experts, told apart by their weights: ``mark + i`` is expert i's every byte."""

    mark: int
    w13_scales: tuple[float, ...]
    w2_scales: tuple[float, ...]
    w13_input_scale: float
    w2_input_scale: float

    def tensors(self, config: Any) -> dict[str, torch.Tensor]:
        tensors = compat.checkpoint(
            config, list(self.w13_scales), list(self.w2_scales), self.w13_input_scale, self.w2_input_scale
        )
        for i in range(len(self.w13_scales)):
            for name in ("w13", "w2"):
                tensors[f"{name}_weight"][i] = self.mark + i
                tensors[f"{name}_weight_scale"][i] = self.block_scale(name, i)
        return tensors

    def block_scale(self, name: str, expert: int) -> float:
        """A power of two, which E4M3 holds; not the same for both GEMMs, nor for two checkpoints."""
        return 2.0 ** (expert - (3 if name == "w2" else 0) - (2 if self.mark > 16 else 0))


FIRST = Checkpoint(1, (0.25, 0.0117, 3.1, 0.5), (0.5, 2.3, 0.071, 0.013), 0.31, 0.0625)
SECOND = Checkpoint(17, (1.7, 0.33, 0.043, 2.9), (0.19, 0.41, 1.1, 3.7), 0.47, 0.125)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    fake = FakeFlashInfer()
    compat.pretend_blackwell(monkeypatch, fake)
    return fake


class Served:
    """A loaded layer, and what a CUDA graph keeps of its first call: where the kernel's tensors lie."""

    def __init__(
        self, act: Act, layer: compat.NvFp4Experts, checkpoint: Checkpoint, *, per_token: bool = False
    ) -> None:
        self.act, self.layer, self.per_token = act, layer, per_token
        self.layer.load(checkpoint.tensors(layer.layer.moe_config))
        self.movable = layer.expert_weights()
        self.captured = self.call()
        self.bytes = self.held_bytes()

    def call(self) -> Call:
        """What the kernels read in one eager call, as it is now and wherever it lies."""
        call = self.layer.call_kernel(quantized=not self.per_token)
        read = {name: value.data for name, value in call.items() if torch.is_tensor(value) and name.startswith(SCALES)}
        input_scale = self.layer.input_global_scale()
        assert (input_scale is None) is self.per_token
        return {"activation_type": call["activation_type"], "input_scale": input_scale, **_missing(call), **read}

    def reload(self, checkpoint: Checkpoint) -> None:
        self.layer.reload(checkpoint.tensors(self.layer.layer.moe_config))

    def rearrange(self, order: list[int]) -> None:
        for tensor in self.movable:
            tensor.data.copy_(tensor.data[order].clone())

    def held_bytes(self) -> int:
        tensors = [*self.layer.layer.state_dict().values(), *self.call().values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if torch.is_tensor(t)}
        return sum(storages.values())

    def check(self, checkpoint: Checkpoint, order: list[int] | None = None) -> None:
        """The eager call and the replayed one compute ``checkpoint``'s experts, in ``order``."""
        order = order or list(range(len(checkpoint.w13_scales)))
        for way, call in (("eager", self.call()), ("replayed", self.captured)):
            for row, number in enumerate(order):
                self.check_row(f"{way}, row {row}", call, row, checkpoint, number)

    def check_row(self, where: str, call: Call, row: int, checkpoint: Checkpoint, number: int) -> None:
        for name, gemm in (("w13", "gemm1"), ("w2", "gemm2")):
            weights, scales = call[f"{gemm}_weights"][row], call[f"{gemm}_weights_scale"][row].float()
            assert weights.unique().tolist() == [checkpoint.mark + number], f"{where}: another expert's {name} weights"
            block_scale = checkpoint.block_scale(name, number)
            assert scales.unique().tolist() == [block_scale], f"{where}: another expert's {name} block scales"
        generator = torch.Generator().manual_seed(row)
        expert = Expert.random(generator, checkpoint.w13_scales[number], checkpoint.w2_scales[number])
        x = expert.input_for(generator)
        input_scale = 1.0 if self.per_token else float(call["input_scale"].flatten()[0])
        got, want = expert.forward_in_kernel(call, row, x, input_scale), expert.forward(self.act, x)
        excess = (got - want).abs() - 1e-5 * expert.magnitude(self.act, x)
        assert (excess <= 0).all(), f"{where}: {got.tolist()} instead of {want.tolist()}"


def _missing(call: Call) -> Call:
    return {name: None for name, value in call.items() if value is None}


@pytest.fixture
def serve(flashinfer: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch, kernel: str) -> Any:
    """Serve a checkpoint in a format, with the kernel that the test asks for."""

    def serve(act: Act, checkpoint_format: str, checkpoint: Checkpoint = FIRST) -> Served:
        config = compat.moe_config(act, len(FIRST.w13_scales), eplb=kernel == "Modular")
        return Served(act, compat.nvfp4_experts(monkeypatch, flashinfer, checkpoint_format, config, kernel), checkpoint)

    return serve


@every_kernel
@every_format
@every_activation
def test_reloaded(serve: Any, act: Act, checkpoint_format: str) -> None:
    served = serve(act, checkpoint_format)
    served.check(FIRST)
    for checkpoint in (SECOND, FIRST, SECOND):
        served.reload(checkpoint)
        served.check(checkpoint)


@modular
@every_format
@every_activation
def test_rearranged(serve: Any, act: Act, checkpoint_format: str) -> None:
    served = serve(act, checkpoint_format)
    skip_without_eplb(served)
    served.rearrange(ORDER)
    served.check(FIRST, ORDER)


@modular
@every_format
@every_activation
def test_reloaded_then_rearranged(serve: Any, act: Act, checkpoint_format: str) -> None:
    served = serve(act, checkpoint_format)
    skip_without_eplb(served)
    for checkpoint in (SECOND, FIRST):
        served.reload(checkpoint)
        served.rearrange(ORDER)
        served.check(checkpoint, ORDER)
        served.rearrange(ORDER)
        served.check(checkpoint, [ORDER[i] for i in ORDER])


@modular
@every_format
def test_rearranged_then_reloaded(serve: Any, checkpoint_format: str) -> None:
    """A reload fills every row anew: nothing of the former order may stay."""
    served = serve(SITU, checkpoint_format)
    skip_without_eplb(served)
    served.rearrange(ORDER)
    served.reload(SECOND)
    served.check(SECOND)


@every_kernel
@every_format
@every_activation
def test_a_reload_takes_no_memory(serve: Any, act: Act, checkpoint_format: str) -> None:
    served = serve(act, checkpoint_format)
    for checkpoint in (SECOND, FIRST):
        served.reload(checkpoint)
        assert served.held_bytes() == served.bytes


@modular
@every_format
@every_activation
def test_state_is_all_that_another_rank_needs(serve: Any, act: Act, checkpoint_format: str) -> None:
    """Elastic EP starts a rank with dummy weights and sends it the state of one that serves."""
    joining = serve(act, checkpoint_format, SECOND)
    skip_without_eplb(joining)
    serving = serve(act, checkpoint_format)
    state = serving.layer.layer.state_dict()
    for name, tensor in joining.layer.layer.state_dict().items():
        tensor.copy_(state[name])
    joining.check(FIRST)


def skip_without_eplb(served: Served) -> None:
    if not served.layer.method.supports_eplb:
        pytest.skip("absent: experts of this format are not rebalanced")


@pytest.mark.parametrize("eplb", [False, True], ids=["monolithic", "modular"])
@pytest.mark.parametrize("act", [SITU, NON_SITU[0]], ids=str)
def test_per_token_activation(flashinfer: FakeFlashInfer, tmp_path: Path, act: Act, eplb: bool) -> None:
    option = {"moe": {"activation": "nvfp4_per_token"}}
    if not compat.accepts(option):
        pytest.skip("absent: no per-token activation scales for checkpoints")
    config = compat.moe_config(act, len(FIRST.w13_scales), eplb=eplb)
    refusal = None
    try:
        method = compat.Serving(tmp_path, "NVFP4", "modelopt_mixed", option).method(config)
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert eplb, refusal
        assert "modular" in refusal
        pytest.skip("absent: the modular kernel refuses per-token activation scales")
    served = Served(act, compat.NvFp4Experts(flashinfer, config, method), FIRST, per_token=True)
    served.check(FIRST)
    served.reload(SECOND)
    served.check(SECOND)
    if eplb:
        served.rearrange(ORDER)
        served.check(SECOND, ORDER)
    assert served.held_bytes() == served.bytes
