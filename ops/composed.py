"""Attention over a KV tree composed of torch operators: the path where no kernel fits.

K and V are gathered a node (or a batch of like leaves) at a time (`reads.py`), never expanded per
query head or per sequence: a copy of one node's KV at most, and in float32 where it is not the CPU
that computes. A pool whose slots are evenly spaced in memory spares the copy where pages are
consecutive. Scores are computed for so many queries at a time that they stay below 256 MB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .append import Places, find_places, store
from .merge import as_float32, merge_nonempty, merge_state
from .reads import Read, Sizes, prefix_reads, suffix_reads

_MOST_SCORES = 1 << 26  # float32 values: 256 MB


class Pass(NamedTuple):
    """A pass through the model as the host sees it: what all of its layers have in common."""

    places: Places  # of the new tokens' K and V
    prefix: list[Read]
    suffix: list[Read]


def find_pass(
    sizes: Sizes,
    slots: Tensor,
    nodes: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    leaves: Tensor,
    reader_indptr: Tensor,
    readers: Tensor,
) -> Pass:
    """Read and check the index arguments of `cascade_attention` (`cascade.py`)."""
    return Pass(
        find_places((sizes.num_pages, sizes.page_size), slots),
        prefix_reads(sizes, *nodes, reader_indptr, readers),
        suffix_reads(sizes, *nodes, leaves),
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the first rotary_dim values of each head, as transformers computes it.

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos, sin: [num_tokens, rotary_dim].
    """
    rotary_dim = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    turning, passed = x.split([rotary_dim, x.shape[2] - rotary_dim], -1)
    first, second = turning.chunk(2, -1)
    rotated = turning * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([rotated.to(x.dtype), passed], -1)


def prefix_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, reads: list[Read], sm_scale: float
) -> tuple[Tensor, Tensor]:
    """One attention call per node over the rows of all its readers, merged along the paths."""
    if _is_whole(reads, q):
        return _attend_shared(q, k_pool, v_pool, reads[0], sm_scale)
    out, lse = _empty_state(q, torch.float32)  # rounded once, however long the path
    for read in reads:
        state = _attend_shared(q[read.rows], k_pool, v_pool, read, sm_scale)
        node_out, node_lse = (x.float() for x in state)
        if not read.is_first:
            node_out, node_lse = merge_state(out[read.rows], lse[read.rows], node_out, node_lse)
        out[read.rows], lse[read.rows] = node_out, node_lse
    return out.to(q.dtype), lse


def suffix_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, reads: list[Read], sm_scale: float
) -> tuple[Tensor, Tensor]:
    """One attention call per batch of sequences alike in lengths."""
    if _is_whole(reads, q):
        return _attend_leaves(q, k_pool, v_pool, reads[0], sm_scale)
    out, lse = _empty_state(q, q.dtype)
    for read in reads:
        state = _attend_leaves(q[read.rows], k_pool, v_pool, read, sm_scale)
        out[read.rows], lse[read.rows] = state
    return out, lse


def cascade_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    found: Pass,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """New K and V stored, then prefix and suffix, merged."""
    store(k, v, k_pool, v_pool, found.places)
    suffix = suffix_attention(q, k_pool, v_pool, found.suffix, sm_scale)
    if not found.prefix:
        return suffix
    prefix = prefix_attention(q, k_pool, v_pool, found.prefix, sm_scale)
    if _is_whole(found.prefix, q) and _is_whole(found.suffix, q):
        return merge_nonempty(*prefix, *suffix)
    return merge_state(*prefix, *suffix)


def _is_whole(reads: list[Read], q: Tensor) -> bool:
    """Whether there is one read, of all rows: then no state is empty."""
    return len(reads) == 1 and reads[0].is_of_all(q.shape[0])


def _attend_shared(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, read: Read, sm_scale: float
) -> tuple[Tensor, Tensor]:
    k, v = read.tokens.of(k_pool), read.tokens.of(v_pool)
    out, lse = _attend_all(q[None], k, v, sm_scale)
    return out[0].contiguous(), lse[0].contiguous()


def _attend_leaves(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, read: Read, sm_scale: float
) -> tuple[Tensor, Tensor]:
    k, v = read.tokens.of(k_pool), read.tokens.of(v_pool)
    num_tokens, num_q_heads, head_dim = q.shape
    if read.q_len == 1:  # a step: nothing is hidden, and nothing is to be moved
        rows = q.reshape(num_tokens, k.shape[1], -1, head_dim)
        out, lse = _attend(rows, k, v, False, sm_scale)
    else:
        by_node = q.reshape(num_tokens // read.q_len, read.q_len, num_q_heads, head_dim)
        out, lse = _attend_causal(by_node, k, v, sm_scale)
    return out.reshape(q.shape).contiguous(), lse.reshape(q.shape[:-1]).contiguous()


def _empty_state(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    return q.new_zeros(q.shape, dtype=dtype), lse


def _attend_all(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """State of q [batch, q_len, num_q_heads, head_dim] over all of k and v."""
    batch, q_len, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group_size = num_q_heads // num_kv_heads
    # Without a mask, the query heads of a group are just more rows of their KV head.
    grouped = q.reshape(batch, q_len, num_kv_heads, group_size, head_dim).transpose(1, 2)
    rows = grouped.reshape(batch, num_kv_heads, q_len * group_size, head_dim)
    out, lse = _attend(rows, k, v, False, sm_scale)
    out = out.reshape(batch, num_kv_heads, q_len, group_size, head_dim).transpose(1, 2)
    lse = lse.reshape(batch, num_kv_heads, q_len, group_size).transpose(1, 2)
    return out.reshape(q.shape), lse.reshape(batch, q_len, num_q_heads)


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Like `_attend_all`, for queries that are the last tokens of k and v."""
    q_len, kv_len = q.shape[1], k.shape[2]
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
        # The op assumes stride 1 in the last dimension and doesn't check.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal, scale=sm_scale
        )
        return out, as_float32(lse)  # float64's is its own
    return _attend_by_scores(q, k, v, is_causal, sm_scale)


def _attend_by_scores(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    k, v = k.float(), v.float()
    rows = max(1, _MOST_SCORES // max(1, k.shape[2] * q.shape[0] * q.shape[1]))
    states = []
    for start in range(0, max(1, q.shape[2]), rows):
        part = q[:, :, start : start + rows]
        scores = torch.matmul(part.float() * sm_scale, k.mT)
        if is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(1 + start), -torch.inf)
        out = torch.matmul(scores.softmax(-1), v).to(q.dtype)
        states.append((out, scores.logsumexp(-1)))
    if len(states) == 1:
        return states[0]
    outs, lses = zip(*states, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)
