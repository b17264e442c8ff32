"""What a piece of the model asks of torch, operation by operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result the host must wait for: a CUDA graph can hold none of them.
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
PRODUCTS = ("mm", "addmm", "bmm", "matmul", "linear")


@dataclass(frozen=True)
class Product:
    """One matrix product: [rows, inner] times [inner, columns]."""

    rows: int
    inner: int
    columns: int


class Trace(TorchDispatchMode):
    """While this holds, every operation is noted by name, and matrix products by size."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.names.append(name)
        if name in PRODUCTS:
            first = args[1] if name == "addmm" else args[0]
            self.products.append(Product(out.numel() // out.shape[-1], first.shape[-1], out.shape[-1]))
        return out

    @property
    def host_reads(self) -> list[str]:
        return [name for name in self.names if name in HOST_READS]


def held_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that modules keep besides parameters and buffers, by where they are, containers included."""
    found: dict[str, torch.Tensor] = {}

    def look(value: Any, at: str, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            found[at] = value
        elif isinstance(value, torch.nn.Module) or depth > 3:
            return
        elif isinstance(value, dict):
            for key, item in value.items():
                look(item, f"{at}[{key!r}]", depth + 1)
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                look(item, f"{at}[{place}]", depth + 1)
        elif hasattr(value, "__dataclass_fields__"):
            look(vars(value), at, depth + 1)

    for name, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                look(value, f"{name}.{attribute}")
        for attribute, buffer in owner.named_buffers(recurse=False):
            found[f"{name}.{attribute}"] = buffer
    return found
