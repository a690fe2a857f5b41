"""What each op computes, in plain float32 PyTorch: the specification, slow and without tricks.

Index arguments are those of the ops (`ops/cascade.py` describes them); `append_kv` and
`cascade_attention` write into the pools here as well.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """The union's state: a softmax over the parts' denominators weighs the parts' outputs."""
    return merge_states(torch.stack([out_a, out_b]), torch.stack([lse_a, lse_b]))


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Like `merge_state`, over the first dimension of both."""
    if out.shape[0] == 0:
        return out.new_zeros(out.shape[1:]), lse.new_full(lse.shape[1:], -torch.inf)
    merged_lse = torch.logsumexp(lse, dim=0)
    # exp(-inf - -inf) is NaN; where every part is empty, every weight is 0.
    weights = torch.where(merged_lse == -torch.inf, 0.0, torch.exp(lse - merged_lse))
    return (weights[..., None] * out.float()).sum(0).to(out.dtype), merged_lse


def append_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Token t of k and v goes to slot slots[t]; slot -1 drops it."""
    page_size = k_pool.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_pool[slot // page_size, :, slot % page_size] = k[token]
            v_pool[slot // page_size, :, slot % page_size] = v[token]


def prefix_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len: Tensor,
    first_slot: Tensor,
    reader_indptr: Tensor,
    readers: Tensor,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Each sequence's queries see every token of every node that lists the sequence as reader."""
    out, lse = _empty_state(q)
    for seq, (start, stop) in enumerate(_ranges(q_indptr)):
        nodes = [n for n, (a, b) in enumerate(_ranges(reader_indptr)) if seq in readers[a:b]]
        kv = [
            _node_kv(node, k_pool, v_pool, kv_indptr, kv_indices, kv_len, first_slot)
            for node in nodes
        ]
        if kv:
            k, v = (torch.cat(parts) for parts in zip(*kv, strict=True))
            visible = torch.ones(stop - start, k.shape[0], dtype=torch.bool, device=q.device)
            out[start:stop], lse[start:stop] = _attend(q[start:stop], k, v, visible, sm_scale)
    return out, lse


def suffix_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len: Tensor,
    first_slot: Tensor,
    leaves: Tensor,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Each sequence's queries are the last tokens of its leaf and see it causally."""
    out, lse = _empty_state(q)
    for (start, stop), leaf in zip(_ranges(q_indptr), leaves.tolist(), strict=True):
        k, v = _node_kv(leaf, k_pool, v_pool, kv_indptr, kv_indices, kv_len, first_slot)
        if k.shape[0]:
            q_len = stop - start
            last_visible = torch.arange(q_len, device=q.device) + k.shape[0] - q_len
            visible = torch.arange(k.shape[0], device=q.device) <= last_visible[:, None]
            out[start:stop], lse[start:stop] = _attend(q[start:stop], k, v, visible, sm_scale)
    return out, lse


def cascade_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len: Tensor,
    first_slot: Tensor,
    leaves: Tensor,
    reader_indptr: Tensor,
    readers: Tensor,
    sm_scale: float,
    work: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Append, then attend to prefixes and suffixes, then merge; `work` changes how, not what.

    With `cos` and `sin`, q and k are rotated first.
    """
    if cos is not None and sin is not None:
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    append_kv(k, v, k_pool, v_pool, slots)
    nodes = (q_indptr, kv_indptr, kv_indices, kv_len, first_slot)
    prefix = prefix_attention(q, k_pool, v_pool, *nodes, reader_indptr, readers, sm_scale)
    suffix = suffix_attention(q, k_pool, v_pool, *nodes, leaves, sm_scale)
    return merge_state(*prefix, *suffix)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: each pair (a, b), of a first and a second half, turns by its angle."""
    half, rotated = cos.shape[1] // 2, x.clone()
    cos, sin = cos[:, None], sin[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    rotated[..., :half] = a * cos[..., :half] - b * sin[..., :half]
    rotated[..., half : 2 * half] = b * cos[..., half:] + a * sin[..., half:]
    return rotated


def _empty_state(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)


def _ranges(indptr: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(indptr.tolist()))


def _node_kv(
    node: int,
    k_pool: Tensor,
    v_pool: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len: Tensor,
    first_slot: Tensor,
) -> tuple[Tensor, Tensor]:
    page_size = k_pool.shape[2]
    position = torch.arange(int(kv_len[node]), device=k_pool.device) + first_slot[node]
    page = kv_indices[kv_indptr[node] + position // page_size]
    k, v = (pool[page, :, position % page_size] for pool in (k_pool, v_pool))
    return k, v  # [kv_len, num_kv_heads, head_dim]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.float(), k) * sm_scale
    scores = scores.masked_fill(~visible[:, None, :], -torch.inf)  # [q_len, num_q_heads, kv_len]
    out = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
    return out.to(q.dtype), scores.logsumexp(-1)
