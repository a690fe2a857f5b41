"""Writing new K and V into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_index, check_pools, check_rows
from .library import define


def append_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Write the K and V of new tokens into the slots of a layer's page pool, in place.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], positions (RoPE) already applied.
        k_pool, v_pool: [num_pages, num_kv_heads, page_size, head_dim], written.
        slots: [num_tokens], int32, page * page_size + offset of each token. A token whose slot is
            DROPPED_SLOT is not stored. No slot may occur twice.
    Raises:
        ValueError: a shape, dtype or device differs, or (on the CPU) a slot is out of range.
    """
    torch.ops.hf_cascade.append_kv(k, v, k_pool, v_pool, slots)


DROPPED_SLOT = -1


def _append_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    _check(k, v, k_pool, v_pool, slots)
    page_size = k_pool.shape[2]
    if slots.device.type == "cpu":
        num_slots = k_pool.shape[0] * page_size
        lowest, highest = (int(x) for x in slots.aminmax()) if slots.numel() else (0, -1)
        if not (lowest >= DROPPED_SLOT and highest < num_slots):
            raise ValueError(
                f"slots must be in [{DROPPED_SLOT}, {num_slots}), got {lowest} to {highest}"
            )
        if lowest >= 0:  # nothing dropped: skip the selection below
            return _write(k, v, k_pool, v_pool, slots.long())
    kept = (slots != DROPPED_SLOT).nonzero().squeeze(1)
    return _write(k[kept], v[kept], k_pool, v_pool, slots[kept].long())


def _write(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    page_size = k_pool.shape[2]
    page, offset = slots // page_size, slots % page_size
    k_pool[page, :, offset] = k
    v_pool[page, :, offset] = v


def _append_kv_fake(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    _check(k, v, k_pool, v_pool, slots)


def _check(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    check_pools(k_pool, v_pool)
    for name, rows in (("k", k), ("v", v)):
        check_rows(name, rows, k_pool)
        if rows.shape[1] != k_pool.shape[1]:
            raise ValueError(
                f"{name} must have num_kv_heads = {k_pool.shape[1]} heads, got {rows.shape[1]}"
            )
    if not (k.shape[0] == v.shape[0] == slots.shape[0]):
        raise ValueError(
            f"k, v and slots must have as many tokens, "
            f"got {k.shape[0]}, {v.shape[0]} and {slots.shape[0]}"
        )
    check_index("slots", slots, k)


define(
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slots) -> ()",
    implementation=_append_kv,
    fake=_append_kv_fake,
)
