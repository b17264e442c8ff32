"""Merged linear layers of any model on a GPU, as vLLM makes them of a config.json, with its own kernels.

Formats, shapes and checkpoints, with their float64 definition, are the contracts'.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import k3_linear

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contracts"))
from dspark.formats import Format
from merged import layers


class Layer(layers.Layer):
    """The contracts' layer inside of `loaded`, which has set up what they do at each call; the kernels are vLLM's."""

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def built(form: Format, shape: layers.Shape, bias: bool = False) -> Iterator[Layer]:
    """The layer that vLLM makes of a model in this format, under that model's configuration, unloaded."""
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    with tempfile.TemporaryDirectory() as folder, k3_linear.engine(size=1, rank=0):
        (Path(folder) / "config.json").write_text(json.dumps(layers.config_json(form)))
        model = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256
        )
        config = VllmConfig(model_config=model)
        config.quant_config.packed_modules_mapping = {name: list(parts) for name, parts in layers.PARTS.items()}
        with set_current_vllm_config(config):
            module = shape.make(bias=bias, quant_config=config.quant_config)
            record_metadata_for_reloading(module)
            yield Layer(module, shape, config)


@contextlib.contextmanager
def loaded(checkpoint: layers.Checkpoint, shape: layers.Shape) -> Iterator[Layer]:
    """The same with a checkpoint in it."""
    with built(checkpoint.form, shape, bias=checkpoint.biases is not None) as layer:
        yield layer.load(checkpoint)
