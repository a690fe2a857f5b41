"""Attention over a KV tree composed of torch operators: the path where no kernel fits.

Index values live on the host here. K and V are gathered a node (or a batch of like leaves) at a
time, never expanded per query head or per sequence, so temporaries stay below the tree's own KV.
A pool whose memory runs [page, slot, head] spares even that copy where pages are consecutive.
"""

from __future__ import annotations

import operator
import threading
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from .merge import merge_state


@dataclass(frozen=True)
class Node:
    """Where one node's tokens are: its pages (those it fills), first slot and length."""

    pages: tuple[int, ...]
    first_slot: int
    kv_len: int
    is_run: bool  # pages are consecutive


class _LastRead(threading.local):
    """The node table read last: all layers of a step, and both ops, ask for the same one."""

    tensors: tuple[Tensor, ...] = ()
    versions: tuple[int, ...] = ()
    nodes: list[Node] | None = None


_last_read = _LastRead()


def read_nodes(
    pool: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len: Tensor, first_slot: Tensor
) -> list[Node]:
    """The node table as host values, checked against the pool it points into."""
    tensors = (kv_indptr, kv_indices, kv_len, first_slot)
    if any(tensor.is_inference() for tensor in tensors):  # these don't count their changes
        return _read_nodes(pool, *tensors)
    # The pool's size takes part in the checks. Slices of it that differ are new tensors anyway.
    versions = (pool.shape[0], pool.shape[2], *(tensor._version for tensor in tensors))
    last = _last_read
    is_same = versions == last.versions and all(map(operator.is_, tensors, last.tensors))
    if not is_same or last.nodes is None:
        last.nodes = _read_nodes(pool, *tensors)
        last.tensors, last.versions = tensors, versions
    return last.nodes


def _read_nodes(
    pool: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len: Tensor, first_slot: Tensor
) -> list[Node]:
    num_pages, page_size = pool.shape[0], pool.shape[2]
    pages = kv_indices.tolist()
    bounds = read_offsets("kv_indptr", kv_indptr, len(pages))
    nodes = []
    for n, (length, slot) in enumerate(zip(kv_len.tolist(), first_slot.tolist(), strict=True)):
        if not 0 <= slot < page_size:
            raise ValueError(f"first_slot[{n}] must be in [0, page_size={page_size}), got {slot}")
        listed = pages[bounds[n] : bounds[n + 1]]
        num_filled = -(-(slot + length) // page_size) if length else 0
        if length < 0 or num_filled > len(listed):
            raise ValueError(
                f"kv_len[{n}] must fit the node's {len(listed)} pages of {page_size} slots from "
                f"first_slot {slot}, got {length}"
            )
        filled = listed[:num_filled]
        if filled and not 0 <= min(filled) <= max(filled) < num_pages:
            raise ValueError(
                f"kv_indices of node {n} must be in [0, num_pages={num_pages}), got {filled}"
            )
        is_run = filled == list(range(filled[0], filled[0] + num_filled)) if filled else True
        nodes.append(Node(tuple(filled), slot, length, is_run))
    return nodes


def read_offsets(name: str, indptr: Tensor, total: int) -> list[int]:
    """An indptr as host values, checked to divide at most `total` things."""
    offsets = indptr.tolist()
    if offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] > total:
        raise ValueError(f"{name} must rise from 0 to at most {total}, got {offsets}")
    return offsets


def read_ids(name: str, ids: Tensor, count: int) -> list[int]:
    """Ids of nodes or sequences as host values, checked to be below `count`."""
    values = ids.tolist()
    lowest, highest = min(values, default=0), max(values, default=-1)
    if not (lowest >= 0 and highest < count):
        raise ValueError(f"{name} must be in [0, {count}), got {lowest} to {highest}")
    return values


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the first rotary_dim values of each head, in float32, rounded once to x's dtype.

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos, sin: [num_tokens, rotary_dim].
    """
    rotary_dim = cos.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (angles.to(wide)[:, None] for angles in (cos, sin))
    turning, passed = x.split([rotary_dim, x.shape[2] - rotary_dim], -1)
    turning = turning.to(wide)
    first, second = turning.chunk(2, -1)
    rotated = turning * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([rotated.to(x.dtype), passed], -1)


def prefix_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_indptr: list[int],
    nodes: list[Node],
    reader_indptr: list[int],
    readers: list[int],
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """One attention call per node over the rows of all its readers, merged along the paths."""
    out, lse = _empty_state(q, torch.float32)  # rounded once, however long the path
    started: set[int] = set()  # sequences whose state is no longer empty
    for n, node in enumerate(nodes):
        seqs = readers[reader_indptr[n] : reader_indptr[n + 1]]
        if seqs != sorted(set(seqs)):
            raise ValueError(f"readers of node {n} must ascend, got {seqs}")
        if not seqs or not node.kv_len:
            continue
        rows = _token_rows(q_indptr, seqs, q.device)
        q_rows = q[rows]
        if not q_rows.shape[0]:
            continue  # torch's attention divides by the number of rows
        k, v = (_gather(pool, [node]) for pool in (k_pool, v_pool))
        state = _attend_all(q_rows[None], k, v, sm_scale)
        node_out, node_lse = (x.squeeze(0).float() for x in state)
        if not started.isdisjoint(seqs):
            node_out, node_lse = merge_state(out[rows], lse[rows], node_out, node_lse)
        out[rows], lse[rows] = node_out, node_lse
        started.update(seqs)
    return out.to(q.dtype), lse


def suffix_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_indptr: list[int],
    nodes: list[Node],
    leaves: list[int],
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """One attention call per batch of sequences alike in lengths: no padding, no masks."""
    out, lse = _empty_state(q, q.dtype)
    alike: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for seq, leaf in enumerate(leaves):
        q_len, node = q_indptr[seq + 1] - q_indptr[seq], nodes[leaf]
        if q_len and node.kv_len:
            if q_len > node.kv_len:
                raise ValueError(
                    f"kv_len[{leaf}] must cover the {q_len} query tokens of sequence {seq}, "
                    f"got {node.kv_len}"
                )
            alike[q_len, node.kv_len, node.first_slot].append(seq)
    for (q_len, _, _), seqs in alike.items():
        batch = [nodes[leaves[seq]] for seq in seqs]
        k, v = (_gather(pool, batch) for pool in (k_pool, v_pool))
        rows = _token_rows(q_indptr, seqs, q.device)
        state = _attend_causal(q[rows].unflatten(0, (len(seqs), q_len)), k, v, sm_scale)
        out[rows], lse[rows] = (x.flatten(0, 1) for x in state)
    return out, lse


def _empty_state(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    return q.new_zeros(q.shape, dtype=dtype), lse


def _token_rows(q_indptr: list[int], seqs: list[int], device: torch.device) -> slice | Tensor:
    if seqs == list(range(seqs[0], seqs[-1] + 1)):
        return slice(q_indptr[seqs[0]], q_indptr[seqs[-1] + 1])
    tokens = [t for seq in seqs for t in range(q_indptr[seq], q_indptr[seq + 1])]
    return torch.tensor(tokens, dtype=torch.int64, device=device)


def _gather(pool: Tensor, batch: list[Node]) -> Tensor:
    """[batch, num_kv_heads, kv_len, head_dim] of nodes that have one length and first slot."""
    first, num_pages = batch[0], len(batch[0].pages)
    by_slot = pool.transpose(1, 2)  # [pages, page_size, num_kv_heads, head_dim]
    if len(batch) == 1 and first.is_run:
        taken = by_slot[first.pages[0] : first.pages[0] + num_pages]
    else:
        ids = torch.tensor([page for node in batch for page in node.pages], device=pool.device)
        taken = by_slot.index_select(0, ids)
    tokens = taken.reshape(len(batch), num_pages * pool.shape[2], *by_slot.shape[2:])
    return tokens[:, first.first_slot : first.first_slot + first.kv_len].transpose(1, 2)


def _attend_all(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """State of q [batch, q_len, num_q_heads, head_dim] over all of k and v."""
    batch, q_len, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group_size = num_q_heads // num_kv_heads
    # Without a mask, the query heads of a group are just more rows of their KV head.
    rows = q.unflatten(2, (num_kv_heads, group_size)).transpose(1, 2).flatten(2, 3)
    out, lse = _attend(rows, k, v, False, sm_scale)
    shape = (batch, num_kv_heads, q_len, group_size)
    out = out.reshape(*shape, head_dim).transpose(1, 2).flatten(2, 3)
    return out, lse.reshape(shape).transpose(1, 2).flatten(2, 3)


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Like `_attend_all`, for queries that are the last tokens of k and v."""
    q_len, kv_len = q.shape[1], k.shape[2]
    if q_len == 1:
        return _attend_all(q, k, v, sm_scale)
    if q_len < kv_len:
        past = _attend_all(q, k[:, :, :-q_len], v[:, :, :-q_len], sm_scale)
        own = _attend_causal(q, k[:, :, -q_len:], v[:, :, -q_len:], sm_scale)
        return merge_state(*past, *own)
    batch, _, num_q_heads, _ = q.shape
    num_kv_heads = k.shape[1]
    group_size = num_q_heads // num_kv_heads
    # Fold KV heads into the batch; a group's heads then share K and V by a stride of 0.
    heads = q.transpose(1, 2).reshape(batch * num_kv_heads, group_size, q_len, -1)
    k, v = (x.flatten(0, 1)[:, None].expand(-1, group_size, -1, -1) for x in (k, v))
    out, lse = _attend(heads, k, v, True, sm_scale)
    out = out.reshape(batch, num_q_heads, q_len, -1).transpose(1, 2)
    return out, lse.reshape(batch, num_q_heads, q_len).transpose(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """State of q [batch, heads, q_len, head_dim] over k, v; causal where q_len == kv_len."""
    if q.device.type == "cpu":
        # It takes the values of a row to lie side by side, and does not check.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=sm_scale
        )
        return out, lse.float()  # a no-op but for float64
    scores = torch.matmul(q.float() * sm_scale, k.float().mT)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype), scores.logsumexp(-1)
