"""K3's FP8_PB_WO layers with the real kernels against float64.

    pytest tests/gpu/test_block_fp8_layers.py

Runs on the vLLM that is installed, K3's real shapes as rank 3 of 8 holds them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    import k3_linear
    from k3_linear import KERNELS, PROJECTIONS
else:
    KERNELS, PROJECTIONS = {}, ()

# Activations are quantized to E4M3 by groups of 128: 3 mantissa bits, so an error of at most 1/16 of each
# value, 1/16/sqrt(3) rms if uniform; sums of independent errors keep that ratio.
ROUNDING = 1 / 16 / 3**0.5


def bound(made: k3_linear.Loaded) -> float:
    """The relative error that the kernel's roundings explain."""
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    # DeepGEMM's post-load step also requantizes the weight, to scales that are powers of two.
    twice = "DeepGemm" in made.kernel.replace("GEMM", "Gemm") and is_deep_gemm_e8m0_used()
    return ROUNDING * (2**0.5 if twice else 1)


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with k3_linear.engine():
        yield


@pytest.mark.parametrize("tokens", [1, 7, 128, 2048])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("projection", PROJECTIONS, ids=lambda p: p.name)
def test_layer_computes_the_checkpoints_matrix(projection, kernel: str, tokens: int) -> None:
    made = k3_linear.load(projection, kernel)
    x = torch.randn(tokens, made.matrix.shape[1], device="cuda").bfloat16()
    got, want = made(x).double(), x.double() @ made.matrix.T
    # KDA's input projection ends in columns of no checkpoint.
    got, rest = got.split([want.shape[1], got.shape[1] - want.shape[1]], dim=1)
    assert not rest.any()
    # By column, so that a few misplaced rows can't hide among thousands of right ones.
    error = (got - want).norm(dim=0) / want.norm(dim=0).clamp(min=want.norm(dim=0).mean() / 10)
    assert (got - want).norm() / want.norm() < bound(made)
    if tokens >= 128:
        assert error.max() < 2 * bound(made)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("projection", [p for p in PROJECTIONS if len(p.shards) > 1], ids=lambda p: p.name)
def test_merging_changes_no_bit(projection, kernel: str) -> None:
    """Each column of a merged layer is what a layer of that shard alone gives, up to the order of a sum."""
    merged, apart = k3_linear.load(projection, kernel), k3_linear.unfused(projection, kernel)
    x = torch.randn(64, merged.matrix.shape[1], device="cuda").bfloat16()
    got, want = merged(x), torch.cat([layer(x) for layer in apart], dim=-1)
    torch.testing.assert_close(got[:, : want.shape[1]], want, rtol=2e-2, atol=2e-2 * float(want.abs().mean()))


@pytest.mark.parametrize("projection", PROJECTIONS, ids=lambda p: p.name)
def test_cuda_graph_replays_the_layer(projection) -> None:
    made = k3_linear.load(projection, "chosen")
    x = torch.randn(16, made.matrix.shape[1], device="cuda").bfloat16()
    made(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = made(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(got, made(x), rtol=0, atol=0)
