"""mla-gate-view: MLA reads its latents and its output gate where the kernel of the merged projection wrote them.

K3's MLA may merge its gate into the projection of q_a and kv_a, whose 1536 + 576 rows do not fill whole blocks of 128:
in FP8_PB_WO padding stands between them and the gate. At every layer and step MLA takes both as views of the kernel's
output, and copies neither.

Nothing is refused.
"""

from __future__ import annotations

import torch
from k3 import compat, modules
from k3.checkpoint import Checkpoint, Geometry
from k3.reference import tokens
from vllm.config import VllmConfig

pytest_plugins = ("k3.fixtures",)

MLA = Geometry.mla_layer


def test_mla_reads_the_kernels_output_in_place(config: VllmConfig, first: Checkpoint) -> None:
    model = modules.build(config, size=8)
    model.load(first.weights())
    attention = model.attention(MLA)
    with torch.no_grad():
        out = compat.mla_outputs(attention, tokens(4, first.geometry.hidden), tokens(4, 12288 // 8))
    for name in ("q_a_proj", "g_proj"):
        kernel = model.log.calls_of(compat.input_projection(attention, name))[-1].out
        assert out[name].untyped_storage().data_ptr() == kernel.untyped_storage().data_ptr(), name
