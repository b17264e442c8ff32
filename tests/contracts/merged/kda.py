"""K3's KDA attention in NVFP4, as one rank of a group."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from dspark import formats
from dspark.formats import Format, Tensors
from k3 import compat as k3_compat
from k3 import modules
from k3.checkpoint import OUTER, Checkpoint, Geometry

from . import compat

LAYER = Geometry.kda_layer
IN = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")


def _config(geometry: Geometry, form: Format) -> dict[str, Any]:
    """config.json of a K3 whose KDA attention alone is quantized."""
    if form.algorithm is None:
        quantization = {**(form.announce() or {}), "ignore": ["lm_head", "re:.*mlp.*", "re:.*layers[.]1[.].*"]}
    else:
        layers = {Checkpoint.module(LAYER, name): form.algorithm for name in geometry.kda()}
        quantization = formats.mixed(layers)
    return {**geometry.text_config(), "quantization_config": quantization}


@functools.cache
def _plain(geometry: Geometry) -> dict[str, torch.Tensor]:
    """What is not quantized, which nobody writes to: made once, as the matrices that are made with it take long."""
    return Checkpoint.random(geometry, 1).only().tensors


class Kda:
    """The attention of a K3 under `scales`, the global scales of IN's matrices, on the first rank of `size`."""

    def __init__(self, folder: Path, geometry: Geometry, form: Format, size: int, scales: tuple[float, ...]) -> None:
        self.size, self.form = size, form
        generator = torch.Generator().manual_seed(1)
        given = dict(zip(IN, scales, strict=True))
        self.tensors: dict[str, Tensors] = {
            name: form.write(rows, cols, given.get(name, 0.01), generator)
            for name, (rows, cols) in geometry.kda().items()
        }
        k3_compat.inspect_models_in_process()
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(_config(geometry, form)))
        config = modules.vllm_config(folder)
        k3_compat.start_distributed(config)
        with compat.without_gpu({}):
            self.model = modules.build(config, size=size)
            self._fill()
            self.model.load((name.removeprefix(OUTER), tensor) for name, tensor in _plain(geometry).items())

    def _fill(self) -> None:
        # By the parameters' loaders: a K3 without experts takes compressed-tensors' names for those of MXFP4 experts.
        attention = self.model.attention(LAYER)
        with k3_compat.tensor_parallel(self.size, 0), torch.no_grad():
            for name, tensors in self.tensors.items():
                shard = (IN.index(name),) if name in IN else ()
                layer = getattr(attention, "in_proj_qkvgfab" if shard else name)
                for kind, tensor in tensors.items():
                    parameter = layer.get_parameter(kind)
                    parameter.weight_loader(parameter, tensor, *shard)

    def outputs(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the layer's own forward makes of x, by projection; `f_b_proj` is f_b(f_a(x))."""
        core = torch.zeros(len(x), self.tensors["o_proj"][self._packed].shape[1] * 2 // self.size, dtype=x.dtype)
        with k3_compat.tensor_parallel(self.size, 0), torch.no_grad():
            return k3_compat.kda_outputs(self.model.attention(LAYER), x, core)

    @property
    def _packed(self) -> str:
        return next(name for name, tensor in self.tensors["o_proj"].items() if tensor.dtype == torch.uint8)

    def expected(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by the format's definition, and how far off sums of rounded elements may be."""
        matrix = self.form.read(self.tensors[name])
        matrix = matrix.chunk(self.size)[0]
        return x @ matrix.T, x.abs() @ matrix.abs().T

    def assert_projects(self) -> None:
        """Every projection is that of the checkpoint's matrices."""
        x = torch.randn(3, Geometry.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        outputs = self.outputs(x)
        for name in ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj"):
            expected, terms = self.expected(name, x)
            assert bool(((outputs[name] - expected).abs() <= 1e-6 * terms).all()), name
