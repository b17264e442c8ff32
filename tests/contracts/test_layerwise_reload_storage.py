"""layerwise-reload-storage: what a layer's method built its kernel from stays the layer's after a reload.

A quantization method may hand the tensors that it left on the layer to a kernel, which then reads those objects. That
holds after any number of layerwise reloads as after the first load: the kernel reads the new values where captured
CUDA graphs read them, follows what is later changed in the layer's tensors in place, and no second copy is kept.

Refusals: none on any base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import replace_parameter

ROWS, COLS = 6, 8
SEEDS = (2, 3, 4)


def by_replacing(layer: torch.nn.Module) -> None:
    """Values in other tensors of the same shape."""
    replace_parameter(layer, "weight", layer.weight.data.flip(0))
    replace_parameter(layer, "scale", 1 / layer.scale.data)


def by_setting(layer: torch.nn.Module) -> None:
    """New parameters of another shape and dtype, as kernels that repack want them."""
    layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
    layer.scale = torch.nn.Parameter(layer.scale.data.double().unsqueeze(1), requires_grad=False)


def by_adding(layer: torch.nn.Module) -> None:
    """Tensors that no checkpoint holds, a parameter and a buffer, beside one that is left as it was loaded."""
    layer.register_parameter("alpha", torch.nn.Parameter(layer.scale.data * 2, requires_grad=False))
    layer.register_buffer("sums", layer.weight.data.sum(1))


def by_renaming(layer: torch.nn.Module) -> None:
    """A parameter under another name."""
    layer.packed = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
    del layer.weight


WAYS: dict[str, Callable[[torch.nn.Module], None]] = {
    way.__name__: way for way in (by_replacing, by_setting, by_adding, by_renaming)
}


class Method(QuantizeMethodBase):
    """A method whose kernel is built anew at each load and holds the layer's tensors."""

    def __init__(self, way: Callable[[torch.nn.Module], None]) -> None:
        self.way = way
        self.kernel: dict[str, torch.Tensor] = {}

    def create_weights(self, layer: torch.nn.Module, *args: object, **kwargs: object) -> None:
        for name, shape in (("weight", (ROWS, COLS)), ("scale", (ROWS,))):
            parameter = torch.nn.Parameter(torch.empty(shape), requires_grad=False)
            parameter.weight_loader = default_weight_loader
            layer.register_parameter(name, parameter)

    def apply(self, layer: torch.nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.way(layer)
        self.kernel = {**layer._parameters, **layer._buffers}


class Model(torch.nn.Module):
    """Layers of one way of processing, one below the other."""

    def __init__(self, way: Callable[[torch.nn.Module], None]) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Module(), torch.nn.Module()
        self.second.inner = torch.nn.Module()
        for layer in self.layers:
            layer.quant_method = Method(way)
            layer.quant_method.create_weights(layer)
        record_metadata_for_reloading(self)

    @property
    def layers(self) -> tuple[torch.nn.Module, ...]:
        return self.first, self.second, self.second.inner

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            for name, shape in (("weight", (ROWS, COLS)), ("scale", (ROWS,))):
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, 1 + torch.rand(shape, generator=generator))

    def load(self, seed: int) -> Model:
        self.fill(seed)
        for layer in self.layers:
            layer.quant_method.process_weights_after_loading(layer)
        return self

    def reload(self, seed: int) -> None:
        initialize_layerwise_reload(self)
        self.fill(seed)
        finalize_layerwise_reload(self, SimpleNamespace(dtype=torch.float32))

    def kernels(self) -> dict[str, torch.Tensor]:
        """What the kernels read."""
        return {
            f"{index}.{name}": tensor
            for index, layer in enumerate(self.layers)
            for name, tensor in layer.quant_method.kernel.items()
        }


@pytest.fixture(autouse=True)
def without_accelerator() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.accelerator, "empty_cache"))
        yield


every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(actual[name].data, tensor.data), name


@every_way
def test_kernels_and_captured_graphs_read_the_new_values(way: Callable[[torch.nn.Module], None]) -> None:
    model = Model(way).load(1)
    captured = {name: tensor.data for name, tensor in model.kernels().items()}
    for seed in SEEDS:
        model.reload(seed)
        expected = Model(way).load(seed)
        assert_same(dict(model.state_dict()), dict(expected.state_dict()))
        assert_same(model.kernels(), expected.kernels())
        assert_same(captured, expected.kernels())


@every_way
def test_kernels_read_where_captured_graphs_do(way: Callable[[torch.nn.Module], None]) -> None:
    model = Model(way).load(1)
    captured = {name: tensor.data_ptr() for name, tensor in model.kernels().items()}
    for seed in SEEDS:
        model.reload(seed)
        assert {name: tensor.data_ptr() for name, tensor in model.kernels().items()} == captured


@every_way
def test_kernels_follow_what_is_changed_in_place(way: Callable[[torch.nn.Module], None]) -> None:
    model = Model(way).load(1)
    # EPLB keeps what it saw after the first load.
    movable = dict(model.state_dict())
    for seed in SEEDS:
        model.reload(seed)
        order = torch.arange(ROWS).roll(seed)
        for tensor in movable.values():
            dim = tensor.shape.index(ROWS)
            tensor.copy_(tensor.index_select(dim, order))
        expected = {
            name: tensor.data.index_select(tensor.shape.index(ROWS), order)
            for name, tensor in Model(way).load(seed).kernels().items()
        }
        assert_same(model.kernels(), expected)


@every_way
def test_a_reload_takes_no_memory(way: Callable[[torch.nn.Module], None]) -> None:
    def held(model: Model) -> int:
        tensors = [*model.state_dict().values(), *model.kernels().values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    model = Model(way).load(1)
    before = held(model)
    for seed in SEEDS:
        model.reload(seed)
        assert held(model) == before
