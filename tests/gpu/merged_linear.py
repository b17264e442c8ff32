"""Merged linear layers of any model on a GPU, as vLLM makes them of a config.json, with its own kernels.

Formats, shapes and checkpoints, with their float64 definition, are the contracts'.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import k3_linear
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contracts"))
from merged.layers import PARTS, Checkpoint, Shape, config_json

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Layer:
    """A merged layer with a checkpoint in it."""

    module: torch.nn.Module
    shape: Shape
    config: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)[0]

    def fill(self, checkpoint: Checkpoint) -> None:
        """Every tensor by its parameter's own loader."""
        for shard, tensors in zip(self.shape.shards, checkpoint.matrices, strict=True):
            for name, tensor in tensors.items():
                parameter = self.module.get_parameter(name)
                parameter.weight_loader(parameter, tensor, shard)

    def reload(self, checkpoint: Checkpoint) -> None:
        """New values, in the way vLLM's reload_weights takes."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.module)
        self.fill(checkpoint)
        finalize_layerwise_reload(self.module, self.config.model_config)


@contextlib.contextmanager
def loaded(checkpoint: Checkpoint, shape: Shape) -> Iterator[Layer]:
    """The layer that vLLM makes of a model with such a checkpoint, under that model's configuration."""
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    with tempfile.TemporaryDirectory() as folder, k3_linear.engine(size=1, rank=0):
        (Path(folder) / "config.json").write_text(json.dumps(config_json(checkpoint.form)))
        model = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256
        )
        config = VllmConfig(model_config=model)
        config.quant_config.packed_modules_mapping = {name: list(parts) for name, parts in PARTS.items()}
        with set_current_vllm_config(config):
            layer = Layer(shape.make(bias=False, quant_config=config.quant_config), shape, config)
            record_metadata_for_reloading(layer.module)
            layer.fill(checkpoint)
            process_weights_after_loading(layer.module, config.model_config, DEVICE)
            yield layer
