"""What the drafter's CUDA operators compute, in plain torch from their definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight^T + bias, in the wider of the two dtypes."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    out = x.to(dtype) @ weight.to(dtype).T
    return out if bias is None else out + bias


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """out = x / rms(x) * weight; a weight of two dimensions has one row for each group of x's first dimension."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        rows = weight.double()
        normed = normed * (rows.view(rows.shape[0], *[1] * (x.dim() - 2), -1) if rows.dim() == 2 else rows)
    out.copy_(normed)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate query and key in place by the rows of the table that their positions name."""
    cos, sin = cos_sin_cache[positions.flatten()].double().chunk(2, -1)
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.reshape(cos.shape[0], -1, head_size).double()
        c, s = cos[:, None], sin[:, None]
        if is_neox:
            first, second = heads.chunk(2, -1)
            turned = torch.cat([first * c - second * s, second * c + first * s], -1)
        else:
            first, second = heads[..., 0::2], heads[..., 1::2]
            turned = torch.stack([first * c - second * s, second * c + first * s], -1)
        tensor.copy_(turned.reshape(tensor.shape))


def _store(
    cache: torch.Tensor, slots: torch.Tensor, entries: torch.Tensor, dtype: str, scale: torch.Tensor | None
) -> None:
    """Write entries [tokens, width] to their slots of a cache [blocks, block, width]; below 0 is nobody's."""
    kept = slots >= 0
    if dtype.startswith("fp8"):
        assert scale is not None
        entries = (entries.float() / scale.float()).to(torch.float8_e4m3fn).view(cache.dtype)
    cache[slots[kept] // cache.shape[1], slots[kept] % cache.shape[1]] = entries[kept].to(cache.dtype)


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    skip_scale: bool = False,  # says that the scale is 1
) -> None:
    """Write [kv_c, k_pe] of each token to its slot."""
    entries = torch.cat([kv_c, k_pe.reshape(kv_c.shape[0], -1)], -1)
    _store(kv_cache, slot_mapping, entries, kv_cache_dtype, scale)


def grouped_insert(caches: list[torch.Tensor]) -> Callable[..., None]:
    """concat_and_cache_mla_grouped, which finds a layer's cache by its address."""
    at = {cache.data_ptr(): cache for cache in caches}

    def insert(
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache_ptrs: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_size: int,
        block_stride: int,
        entry_stride: int,
        kv_scales: torch.Tensor | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        for layer, pointer in enumerate(kv_cache_ptrs.tolist()):
            cache = at[pointer]
            if (cache.shape[1], cache.stride(0), cache.stride(1)) != (block_size, block_stride, entry_stride):
                raise RuntimeError(f"grouped insert: layer {layer}'s cache has a layout of its own")
            scale = None if kv_scales is None else kv_scales[layer]
            entries = torch.cat([kv_c[layer], k_pe[layer].reshape(kv_c.shape[1], -1)], -1)
            _store(cache, slot_mapping[layer], entries, kv_cache_dtype, scale)

    return insert


def scaled_fp8_quant(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / scale in E4M3, saturated, under a scale that is given."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale.float()).clamp(-largest, largest).to(torch.float8_e4m3fn), scale
