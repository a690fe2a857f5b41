"""Writing new K and V into pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_index, check_pools, check_rows
from .library import define
from .reads import by_slot, lies_by_slot, once_a_step


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


class Places(NamedTuple):
    """Where new tokens go, and which of them go anywhere."""

    slot: Tensor
    page: Tensor
    offset: Tensor
    kept: Tensor | None  # None: all


def _append_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    check_append(k, v, k_pool, v_pool, slots)
    store(k, v, k_pool, v_pool, find_places((k_pool.shape[0], k_pool.shape[2]), slots))


def store(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, places: Places) -> None:
    """`append_kv` of what is known to fit, to where it goes."""
    for pool, rows in ((k_pool, k), (v_pool, v)):
        if places.kept is not None:
            rows = rows[places.kept]
        if lies_by_slot(pool):  # by one index in place of two: a step is short
            by_slot(pool).index_copy_(0, places.slot, rows)
        else:
            pool[places.page, :, places.offset] = rows


@once_a_step
def find_places(sizes: tuple[int, int], slots: Tensor) -> Places:
    """Read and check slots, of pools with so many pages of so many slots."""
    num_pages, page_size = sizes
    drops = True  # perhaps: to ask a device would be to wait for it twice
    if slots.device.type == "cpu":
        num_slots = num_pages * page_size
        lowest, highest = (int(x) for x in slots.aminmax()) if slots.numel() else (0, -1)
        if not (lowest >= DROPPED_SLOT and highest < num_slots):
            raise ValueError(
                f"slots must be in [{DROPPED_SLOT}, {num_slots}), got {lowest} to {highest}"
            )
        drops = lowest < 0
    kept = (slots != DROPPED_SLOT).nonzero().squeeze(1) if drops else None
    used = (slots if kept is None else slots[kept]).long()
    return Places(used, used // page_size, used % page_size, kept)


def _append_kv_fake(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    check_append(k, v, k_pool, v_pool, slots)


def check_append(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """All that can be told without reading slots."""
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
