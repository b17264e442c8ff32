"""Contract hopper-mla-decode: K3's MLA decodes with FLASH_ATTN_MLA, the backend that Hopper may choose.

K3's layer drives the attention implementation itself, without vLLM's generic
MLA layer.  What it hands to FlashAttention has to be complete all the same, from
the first decode on, and the numbers have to be attention's.

Refusals: none on any base; an assertion of stock releases goes.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hopper import layer as k3
from hopper.fake_flash_attn import FakeFlashAttention
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlashAttention:
    fake = FakeFlashAttention()
    fake.install(monkeypatch)
    return fake


def run(monkeypatch: pytest.MonkeyPatch, layer: k3.Layer, heads: int, batch: k3.Batch) -> None:
    q = torch.randn(batch.tokens, heads, k3.NOPE + k3.ROPE)
    latents = [torch.randn(total, k3.LATENT + k3.ROPE) for total in batch.lengths]
    got = layer.decode(monkeypatch, batch, q, latents)
    want = layer.expected(batch, q, latents)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 12, 96])
def test_the_first_decode(flash: FakeFlashAttention, monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    torch.manual_seed(heads)
    layer = k3.Layer(monkeypatch, heads)
    run(monkeypatch, layer, heads, k3.Batch(cached=[5, 0, 47], new=[1, 1, 1]))
    (call,) = flash.calls
    assert (call["cp_world_size"], call["cp_rank"], call["cp_tot_seqused_k"]) == (1, 0, None)
    assert call["return_softmax_lse"] is False


requests = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 4)), min_size=1, max_size=5)


@given(requests=requests, block_size=st.sampled_from([16, 32, 64]), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch(
    flash: FakeFlashAttention,
    monkeypatch: pytest.MonkeyPatch,
    requests: list[tuple[int, int]],
    block_size: int,
    seed: int,
) -> None:
    """Also several tokens a request: speculative decoding, and short prefills that this backend takes as decodes."""
    torch.manual_seed(seed)
    layer = k3.Layer(monkeypatch, 3)
    cached, new = (list(numbers) for numbers in zip(*requests, strict=True))
    run(monkeypatch, layer, 3, k3.Batch(cached, new, block_size))


@pytest.mark.parametrize(("world", "rank"), [(2, 1), (4, 0), (8, 7)])
def test_decode_context_parallel_groups_are_known_from_construction(
    flash: FakeFlashAttention, monkeypatch: pytest.MonkeyPatch, world: int, rank: int
) -> None:
    """Whoever drives the implementation: of a group of `world`, it tells FlashAttention its size and rank."""
    from vllm.distributed import parallel_state

    config = k3.vllm_config()
    k3.start_distributed(config)
    # The parallel config of such a group can't be validated without its devices.
    object.__setattr__(config.parallel_config, "decode_context_parallel_size", world)
    monkeypatch.setattr(parallel_state, "_DCP", SimpleNamespace(world_size=world, rank_in_group=rank))
    impl = k3.backend_impl(2, config)

    total = 37  # of which this rank holds every world-th token
    local = len(range(rank, total, world))
    batch = k3.Batch(cached=[local - 1], new=[1])
    decode = batch.decode_metadata()
    decode.dcp_tot_seq_lens = torch.tensor([total], dtype=torch.int32)
    cache = torch.randn(int(decode.block_table.max()) + 1, batch.block_size, k3.LATENT + k3.ROPE)
    q = torch.randn(1, 2 * world, k3.LATENT + k3.ROPE)
    _, lse = impl.forward_mqa(q, cache, SimpleNamespace(decode=decode), None)

    (call,) = flash.calls
    assert (call["cp_world_size"], call["cp_rank"]) == (world, rank)
    assert lse.shape == (1, 2 * world), "ranks are merged by their log-sum-exp, [tokens, heads]"
