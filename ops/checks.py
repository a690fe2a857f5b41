"""Checks at the boundary of the ops. Every message names the argument, the need and what came.

They run in every call of an op, once a layer, so a message is made only when it is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

INDEX_DTYPE = torch.int32


def check_state(out: Tensor, lse: Tensor, suffix: str = "") -> None:
    """An attention state: out [..., head_dim] floating, lse [...] float32, on one device."""
    if not out.is_floating_point():
        raise ValueError(f"out{suffix} must be floating point, got {out.dtype}")
    if lse.dtype != torch.float32:
        raise ValueError(f"lse{suffix} must be float32, got {lse.dtype}")
    if not (out.ndim >= 1 and lse.shape == out.shape[:-1]):
        raise ValueError(
            f"lse{suffix} must have shape out{suffix}.shape[:-1] = {tuple(out.shape[:-1])}, "
            f"got {tuple(lse.shape)}"
        )
    if lse.device != out.device:
        raise ValueError(f"lse{suffix} must be on {out.device} like out{suffix}, got {lse.device}")


def check_index(name: str, value: Tensor, like: Tensor) -> None:
    """An index tensor: one dimension, int32, on the device of `like`."""
    if value.dtype != INDEX_DTYPE:
        raise ValueError(f"{name} must be int32, got {value.dtype}")
    if value.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got {value.ndim}")
    if value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {value.device}")


def check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    """Pools of one layer: [num_pages, num_kv_heads, page_size, head_dim], alike."""
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.ndim != 4:
            raise ValueError(
                f"{name} must be [num_pages, num_kv_heads, page_size, head_dim], "
                f"got {pool.ndim} dimensions"
            )
    if not (k_pool.shape == v_pool.shape and k_pool.dtype == v_pool.dtype):
        raise ValueError(
            f"v_pool must be like k_pool ({tuple(k_pool.shape)}, {k_pool.dtype}), "
            f"got {tuple(v_pool.shape)}, {v_pool.dtype}"
        )
    if k_pool.device != v_pool.device:
        raise ValueError(f"v_pool must be on {k_pool.device} like k_pool, got {v_pool.device}")


def check_rows(name: str, rows: Tensor, pool: Tensor) -> None:
    """Packed rows [num_tokens, num_heads, head_dim] that fit a pool's head_dim, dtype, device."""
    if rows.ndim != 3:
        raise ValueError(
            f"{name} must be [num_tokens, num_heads, head_dim], got {rows.ndim} dimensions"
        )
    if rows.shape[2] != pool.shape[3]:
        raise ValueError(
            f"{name} must have head_dim {pool.shape[3]} like the pool, got {rows.shape[2]}"
        )
    if rows.dtype != pool.dtype:
        raise ValueError(f"{name} must be {pool.dtype} like the pool, got {rows.dtype}")
    if rows.device != pool.device:
        raise ValueError(f"{name} must be on {pool.device} like the pool, got {rows.device}")


def check_queries(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Queries whose heads divide into groups over the pool's KV heads."""
    check_pools(k_pool, v_pool)
    check_rows("q", q, k_pool)
    num_q_heads, num_kv_heads = q.shape[1], k_pool.shape[1]
    if not (num_kv_heads > 0 and num_q_heads % num_kv_heads == 0):
        raise ValueError(
            f"q must have a multiple of num_kv_heads = {num_kv_heads} heads, got {num_q_heads}"
        )


def check_rotation(cos: Tensor | None, sin: Tensor | None, q: Tensor, k: Tensor) -> None:
    """`cos` and `sin` [num_tokens, rotary_dim], alike, of tokens of which each has a q and a k."""
    if cos is None or sin is None:
        missing = "cos" if cos is None else "sin"
        raise ValueError(f"cos and sin must be given both or not at all, got no {missing}")
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.ndim != 2:
            raise ValueError(
                f"{name} must be [num_tokens, rotary_dim], got {angles.ndim} dimensions"
            )
        if angles.dtype not in (q.dtype, torch.float32):
            raise ValueError(f"{name} must be {q.dtype} like q or float32, got {angles.dtype}")
        if angles.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {angles.device}")
        if angles.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} must have as many tokens as q, {q.shape[0]}, got {angles.shape[0]}"
            )
    if not (cos.shape == sin.shape and cos.dtype == sin.dtype):
        raise ValueError(
            f"sin must be like cos ({tuple(cos.shape)}, {cos.dtype}), "
            f"got {tuple(sin.shape)}, {sin.dtype}"
        )
    rotary_dim, head_dim = cos.shape[1], q.shape[2]
    if not (0 < rotary_dim <= head_dim and rotary_dim % 2 == 0):
        raise ValueError(
            f"cos must have a rotary_dim that is even and at most head_dim = {head_dim}, "
            f"got {rotary_dim}"
        )
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k must have as many tokens as q to be rotated like it, {q.shape[0]}, got {k.shape[0]}"
        )


def check_nodes(
    q: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len: Tensor,
    first_slot: Tensor,
) -> None:
    """The node table and the query offsets: int32, on q's device, lengths that agree."""
    named = (
        ("q_indptr", q_indptr),
        ("kv_indptr", kv_indptr),
        ("kv_indices", kv_indices),
        ("kv_len", kv_len),
        ("first_slot", first_slot),
    )
    for name, value in named:
        check_index(name, value, q)
    num_nodes = kv_len.shape[0]
    if kv_indptr.shape[0] != num_nodes + 1:
        raise ValueError(
            f"kv_indptr must have num_nodes + 1 = {num_nodes + 1} entries, got {kv_indptr.shape[0]}"
        )
    if first_slot.shape[0] != num_nodes:
        raise ValueError(
            f"first_slot must have num_nodes = {num_nodes} entries, got {first_slot.shape[0]}"
        )
    if q_indptr.shape[0] < 1:
        raise ValueError("q_indptr must have num_seqs + 1 entries, got 0")


def check_leaves(leaves: Tensor, q_indptr: Tensor, like: Tensor) -> None:
    """`leaves` [num_seqs]: one node per sequence."""
    check_index("leaves", leaves, like)
    num_seqs = q_indptr.shape[0] - 1
    if leaves.shape[0] != num_seqs:
        raise ValueError(f"leaves must have num_seqs = {num_seqs} entries, got {leaves.shape[0]}")


def check_readers(reader_indptr: Tensor, readers: Tensor, kv_len: Tensor, like: Tensor) -> None:
    """`reader_indptr` [num_nodes + 1], `readers`: the sequences that have a node as prefix."""
    check_index("reader_indptr", reader_indptr, like)
    check_index("readers", readers, like)
    num_nodes = kv_len.shape[0]
    if reader_indptr.shape[0] != num_nodes + 1:
        raise ValueError(
            f"reader_indptr must have num_nodes + 1 = {num_nodes + 1} entries, "
            f"got {reader_indptr.shape[0]}"
        )
