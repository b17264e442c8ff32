"""Write a checkpoint folder whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from .vocabulary import write_json

SHARD_BYTES = 64 << 20
INDEX = "model.safetensors.index.json"


@contextlib.contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that becomes `folder` once the block ends well; an older `folder` is replaced."""
    folder = Path(os.path.abspath(folder))  # noqa: PTH100  (resolve would follow a link that is to be replaced)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        made.chmod(0o755)
        yield made
        old = made.with_name(f"{made.name}.old")
        if folder.exists():
            folder.rename(old)
        made.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Two or more safetensors files and their index, tensors in the order given."""
    shards = _split(tensors)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors writes it for its owner alone
        weight_map.update(dict.fromkeys(names, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _split(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    total = sum(tensor.nbytes for tensor in tensors.values())
    limit = min(SHARD_BYTES, -(-total // 2))
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder that `save_tensors` filled, in the index's order."""
    from safetensors import safe_open

    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, framework="pt") as opened:
            loaded.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return loaded
