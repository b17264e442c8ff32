"""Checkpoint folders with one thing wrong, of the kinds that loading must refuse.

Each function damages a folder of the mixed form in place, those in `OF_DRAFTER` one of a quantized drafter: give them
a copy. What a wrong file looks like from inside, a safetensors file and an index that agree with each other, is kept
where the fault isn't in the files themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .contracts import damaged_scale
from .folder import INDEX
from .geometry import OUTER
from .vocabulary import write_json

KDA = f"{OUTER}model.layers.1.self_attn"
MLA = f"{OUTER}model.layers.3.self_attn"
KV = "layers.2.self_attn.kv_a_proj_with_mqa"


def missing_shard(folder: Path) -> None:
    """The last file is not there; the index still names it."""
    sorted(folder.glob("*.safetensors"))[-1].unlink()


def half_written_file(folder: Path) -> None:
    """The second file ends in its middle, as after a broken download."""
    file = sorted(folder.glob("*.safetensors"))[1]
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def missing_scale(folder: Path) -> None:
    """One shard of a merged projection has no scales."""
    change(folder, {f"{KDA}.k_proj.weight_scale": None})


def missing_tensor(folder: Path) -> None:
    """One shard of a merged projection has no weight and no scales."""
    change(folder, {f"{MLA}.g_proj.weight": None, f"{MLA}.g_proj.weight_scale": None})


def swapped_scales(folder: Path) -> None:
    """Two shards of a merged projection have each other's scales."""
    query, latent = (f"{MLA}.{name}.weight_scale" for name in ("q_a_proj", "kv_a_proj_with_mqa"))
    change(folder, {query: read(folder, latent), latent: read(folder, query)})


def scale_fault(damage: str) -> Callable[[Path], None]:
    """Scales with one of the contracts' damages."""

    def fault(folder: Path) -> None:
        name = f"{MLA}.q_b_proj.weight_scale"
        change(folder, {name: damaged_scale(read(folder, name), damage)})

    return fault


def drafter_without_latent(folder: Path) -> None:
    """One draft layer has no latent projection."""
    change(folder, dict.fromkeys((f"{KV}.weight", f"{KV}.weight_scale"), None))


def drafter_without_latent_scale(folder: Path) -> None:
    """One draft layer's latent projection has no scales."""
    change(folder, {f"{KV}.weight_scale": None})


FAULTS: dict[str, Callable[[Path], None]] = {
    "missing shard": missing_shard,
    "half-written file": half_written_file,
    "missing scale": missing_scale,
    "missing tensor": missing_tensor,
    "swapped scales": swapped_scales,
    "wrong block shape": scale_fault("a block of rows too few"),
    "scale that is no number": scale_fault("NaN"),
    "drafter without a layer's latent": drafter_without_latent,
    "drafter without a latent's scale": drafter_without_latent_scale,
}
OF_DRAFTER = frozenset(name for name in FAULTS if name.startswith("drafter"))


def read(folder: Path, name: str) -> torch.Tensor:
    """One tensor of a checkpoint folder."""
    with safe_open(folder / _weight_map(folder)[name], framework="pt") as opened:
        return opened.get_tensor(name)


def change(folder: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Replace tensors by name, or leave them out with None; the index follows."""
    weight_map = _weight_map(folder)
    for file in {weight_map[name] for name in changes}:
        with safe_open(folder / file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        kept = {**tensors, **{name: tensor for name, tensor in changes.items() if name in tensors}}
        save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, folder / file)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in weight_map.items() if changes.get(name, True) is not None}
    write_json(folder / INDEX, index)


def _weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]
