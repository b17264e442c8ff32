"""How much CPU time a mixed ModelOpt config takes to choose the method of every layer of a model.

`python tests/bench_mixed_dispatch.py --tree TREE` builds no layer: it asks the config of a vLLM source tree, on CPU,
for each projection and each block of routed experts, as building the model does. One row for each kind of pattern.
Run it on a pristine tree and on a patched one, and compare.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

BLOCKS = 93
MERGED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.in_proj_qkvgfab": tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "g", "f_a", "b")),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
FORM = "language_model.model."


def patterns(kind: str, count: int) -> list[str]:
    """So many patterns of a kind, none of which excludes a layer of the model."""
    name = "vision_tower.encoder.blocks.{}.attn.wqkv"
    spell = {
        "names": name,
        "text names": f"{FORM}layers.{{}}.other.projection",
        "leading star": "*.blocks.{}.attn.wqkv",
        "trailing star": "vision_tower.encoder.blocks.{}.*",
        "inner star": f"{FORM}layers.*.other.{{}}",
        "both ends": "*.blocks.{}.attn*",
        "expert names": f"{FORM}layers.{{}}.moe.experts.0.w1",
    }[kind]
    return [spell.format(1000 + index) for index in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", required=True, help="a vLLM source tree")
    parser.add_argument("--patterns", type=int, default=4000)
    parser.add_argument("--experts", type=int, default=0, help="experts listed one by one in each block")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each row, of which the fastest counts")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(arguments.tree).resolve()))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    import torch
    import vllm.model_executor.layers.quantization.modelopt as modelopt

    def layer(cls: type) -> Any:
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made.moe_config = None
        return made

    linear, experts = layer(modelopt.LinearBase), layer(modelopt.RoutedExperts)
    asked: list[tuple[Any, str]] = []
    listed: dict[str, dict[str, str]] = {}
    for block in range(BLOCKS):
        for merged, shards in MERGED.items():
            asked.append((linear, f"{FORM}layers.{block}.{merged}"))
            listed |= {f"{FORM}layers.{block}.{shard}": {"quant_algo": "FP8"} for shard in shards}
        asked.append((experts, f"{FORM}layers.{block}.moe.experts"))
        for expert in range(arguments.experts):
            listed |= {f"{FORM}layers.{block}.moe.experts.{expert}.{w}": {"quant_algo": "NVFP4"} for w in ("w1", "w2")}

    kinds = ("names", "text names", "leading star", "trailing star", "inner star", "both ends", "expert names")
    with contextlib.ExitStack() as stack:
        for name in ("ModelOptFp8LinearMethod", "ModelOptNvFp4FusedMoE", "build_linear_method"):
            if hasattr(modelopt, name):  # making one looks for a kernel
                stack.enter_context(mock.patch.object(modelopt, name, return_value=None))
        for kind in kinds:
            times = []
            for _ in range(arguments.repeat):
                config = modelopt.ModelOptMixedPrecisionConfig.from_config(
                    {
                        "quant_method": "modelopt",
                        "quant_algo": "MIXED_PRECISION",
                        "ignore": patterns(kind, arguments.patterns),
                        "quantized_layers": listed,
                    }
                )
                config.packed_modules_mapping = {
                    merged.rpartition(".")[2]: [shard.rpartition(".")[2] for shard in shards]
                    for merged, shards in MERGED.items()
                    if len(shards) > 1
                }
                start = time.process_time()
                for module, prefix in asked:
                    config.get_quant_method(module, prefix)
                times.append(time.process_time() - start)
            print(f"{kind:14} {len(asked)} layers, {arguments.patterns} patterns: {min(times):.3f} s", flush=True)


if __name__ == "__main__":
    main()
