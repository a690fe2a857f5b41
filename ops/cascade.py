"""Attention over a KV tree: prefixes, suffixes, and both in one call.

The ops of this module share their index arguments, all int32 and on the device of q. N nodes and
B sequences; a sequence's path is its prefix (every node but the last) and its leaf.

    q_indptr       [B + 1]      offsets of each sequence's query tokens in packed q
    kv_indptr      [N + 1]      offsets of each node's pages in kv_indices, counted in pages
    kv_indices     [num_pages]  page ids, in token order; a node may list more than it fills
    kv_len         [N]          tokens present in each node, those appended by this step included
    first_slot     [N]          slot of the node's first token within its first page
    leaves         [B]          the leaf of each sequence
    reader_indptr  [N + 1]      offsets of each node's readers
    readers        [num_reads]  the sequences that have the node in their prefix, ascending

Decoding has one query token a sequence. Prefill is the same thing: the "sequences" are the nodes
whose tokens are computed, each reads its ancestors in full and itself causally.

Source: Cascade Inference (flashinfer.ai/2024/02/02/cascade-inference.html); grouping queries by
the KV node they share is DeFT's (arXiv 2404.00242, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import composed
from .append import append_kv, check_append
from .checks import (
    check_index,
    check_leaves,
    check_nodes,
    check_queries,
    check_readers,
    check_rotation,
    check_rows,
)
from .library import define
from .reads import Sizes, prefix_reads, suffix_reads

# The work list of the CUDA kernels, in int32: csrc/params.h has its parts, csrc/split_rule.cuh and
# csrc/cascade_attention.cu the sizes.
HEADER_WORDS, ITEM_WORDS = 9, 16
SPLIT_UNIT = 64  # tokens of the shortest split
SCRATCH_STATES = 8192  # most partial states, unless there are more reads and sequences


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
    """Attend from every sequence's query tokens to its prefix; each node is read once.

    Args:
        q: [num_tokens, num_q_heads, head_dim], packed by q_indptr.
        k_pool, v_pool: [num_pages, num_kv_heads, page_size, head_dim], typed like q; slots that
            no node owns may hold anything, NaN included.
        q_indptr, kv_indptr, kv_indices, kv_len, first_slot, reader_indptr, readers: see above.
        sm_scale: factor on q k^T.
    Returns:
        (out, lse): [num_tokens, num_q_heads, head_dim] typed like q and [num_tokens, num_q_heads]
        float32; the empty state (0, -inf) for sequences without a prefix.
    Raises:
        ValueError: a shape, dtype or device differs, or (on the CPU) a length or page id is
            impossible.
    """
    return torch.ops.hf_cascade.prefix_attention(
        q, k_pool, v_pool, q_indptr, kv_indptr, kv_indices, kv_len, first_slot,
        reader_indptr, readers, sm_scale,
    )  # fmt: skip


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
    """Attend from each sequence's query tokens to its own leaf.

    The query tokens are the last tokens of the leaf: of q_len queries, query t sees the leaf's
    first kv_len - q_len + t + 1 tokens. A leaf with kv_len 0 gives the empty state.

    Args, returns and errors: as `prefix_attention`, with leaves in place of the readers.
    """
    return torch.ops.hf_cascade.suffix_attention(
        q, k_pool, v_pool, q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves, sm_scale
    )


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
    """Append new K and V, then attend to prefix and suffix and merge: a layer's whole attention.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], the new tokens' KV, typed like the pools.
        slots: [num_tokens], where they go, see `append_kv`; k_pool and v_pool are written.
        others: as `prefix_attention` and `suffix_attention`.
        work: what `work_list` returned for these index arguments, head counts and head_dim; made
            anew in every call, not batch invariant, if None. One of another size is an error; one
            that happens to have the size but not the head_dim or group_size stops the kernel, and
            with it the CUDA context. With one, a sequence of a single query token must append that
            token alone, the last of its leaf: the leaf's others are read before the append is done.
            On the CPU it is not looked at.
        cos, sin: [num_tokens, rotary_dim], typed like q or float32. With them q and k come before
            RoPE, as many tokens of one as of the other, and the first rotary_dim values x of each
            head become x cos + rotate_half(x) sin, where rotate_half makes (-b, a) of their halves
            (a, b), with the bits of torch's operators in these dtypes, then cast to q's. The other
            values stay.
    Returns:
        (out, lse) of each query token over its whole path.
    """
    return torch.ops.hf_cascade.cascade_attention(
        q, k, v, k_pool, v_pool, slots, q_indptr, kv_indptr, kv_indices, kv_len, first_slot,
        leaves, reader_indptr, readers, sm_scale, work, cos, sin,
    )  # fmt: skip


def work_list(
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len: Tensor,
    first_slot: Tensor,
    leaves: Tensor,
    reader_indptr: Tensor,
    readers: Tensor,
    *,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    batch_invariant: bool = False,
) -> Tensor:
    """How `cascade_attention` cuts its work, found once a step for all layers of one shape.

    It depends on the values of the index arguments: make it after they changed, on the same
    stream, and after older tokens were written to the pools, which a layer's attention may read
    beside its append. Nothing waits for the host. On the CPU it is empty.

    Args:
        q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves, reader_indptr, readers: see
            above.
        page_size, num_q_heads, num_kv_heads, head_dim: of the pools and of q.
        batch_invariant: cut each node by its own length alone, not by what is fastest for all of
            them: a row's bits then are the same in any batch of one query token a sequence that
            has the same nodes on the row's path, as long as the partial states fit (8192, or one
            a node read if those are more).
    Returns:
        int32, to be passed as `work`; its size depends on the shapes of the arguments alone.
    Raises:
        ValueError: an index argument's dtype, shape or device, or a number, is impossible (on a
            GPU a RuntimeError, which also says which sizes the kernels have).
    """
    return torch.ops.hf_cascade.work_list(
        q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves, reader_indptr, readers,
        page_size, num_q_heads, num_kv_heads, head_dim, batch_invariant,
    )  # fmt: skip


def _prefix_attention(
    q, k_pool, v_pool, q_indptr, kv_indptr, kv_indices, kv_len, first_slot,
    reader_indptr, readers, sm_scale,
):  # fmt: skip
    sizes = _checked_sizes(q, k_pool, v_pool, q_indptr)
    nodes = (q_indptr, kv_indptr, kv_indices, kv_len, first_slot)
    reads = prefix_reads(sizes, *nodes, reader_indptr, readers)
    return composed.prefix_attention(q, k_pool, v_pool, reads, sm_scale)


def _prefix_attention_fake(
    q, k_pool, v_pool, q_indptr, kv_indptr, kv_indices, kv_len, first_slot,
    reader_indptr, readers, sm_scale,
):  # fmt: skip
    _check_prefix(
        q, k_pool, v_pool, q_indptr, kv_indptr, kv_indices, kv_len, first_slot,
        reader_indptr, readers,
    )  # fmt: skip
    return _state_like(q)


def _suffix_attention(
    q, k_pool, v_pool, q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves, sm_scale
):
    sizes = _checked_sizes(q, k_pool, v_pool, q_indptr)
    reads = suffix_reads(sizes, q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves)
    return composed.suffix_attention(q, k_pool, v_pool, reads, sm_scale)


def _suffix_attention_fake(
    q, k_pool, v_pool, q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves, sm_scale
):
    _check_suffix(q, k_pool, v_pool, q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves)
    return _state_like(q)


def _cascade_attention(
    q, k, v, k_pool, v_pool, slots, q_indptr, kv_indptr, kv_indices, kv_len, first_slot,
    leaves, reader_indptr, readers, sm_scale, work=None, cos=None, sin=None,
):  # fmt: skip
    if not (cos is None and sin is None):
        _check_rotation(q, k, k_pool, v_pool, cos, sin)
        q, k = (composed.rotate(x, cos, sin) for x in (q, k))
    check_append(k, v, k_pool, v_pool, slots)
    nodes = (q_indptr, kv_indptr, kv_indices, kv_len, first_slot)
    sizes = _checked_sizes(q, k_pool, v_pool, q_indptr)
    found = composed.find_pass(sizes, slots, nodes, leaves, reader_indptr, readers)
    return composed.cascade_attention(q, k, v, k_pool, v_pool, found, sm_scale)


def _cascade_attention_fake(
    q, k, v, k_pool, v_pool, slots, q_indptr, kv_indptr, kv_indices, kv_len, first_slot,
    leaves, reader_indptr, readers, sm_scale, work=None, cos=None, sin=None,
):  # fmt: skip
    if not (cos is None and sin is None):
        _check_rotation(q, k, k_pool, v_pool, cos, sin)
    nodes = (q_indptr, kv_indptr, kv_indices, kv_len, first_slot)
    append_kv(k, v, k_pool, v_pool, slots)
    _check_prefix(q, k_pool, v_pool, *nodes, reader_indptr, readers)
    _check_suffix(q, k_pool, v_pool, *nodes, leaves)
    return _state_like(q)


def _work_list(
    q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves, reader_indptr, readers,
    page_size, num_q_heads, num_kv_heads, head_dim, batch_invariant=False,
):  # fmt: skip
    _check_work_list(
        q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves, reader_indptr, readers,
        page_size, num_q_heads, num_kv_heads, head_dim,
    )  # fmt: skip
    return q_indptr.new_empty(0)


def _work_list_fake(
    q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves, reader_indptr, readers,
    page_size, num_q_heads, num_kv_heads, head_dim, batch_invariant=False,
):  # fmt: skip
    _check_work_list(
        q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves, reader_indptr, readers,
        page_size, num_q_heads, num_kv_heads, head_dim,
    )  # fmt: skip
    if q_indptr.device.type != "cuda":
        return q_indptr.new_empty(0)
    num_seqs, num_reads = leaves.shape[0], readers.shape[0]
    least = num_reads + num_seqs
    most = least + num_seqs * (kv_indices.shape[0] * page_size // SPLIT_UNIT)
    # No guard on which it is.
    num_states = torch.sym_min(most, torch.sym_max(least, SCRATCH_STATES))
    counts = HEADER_WORDS + 2 * (num_seqs + 1) + 2 * num_reads
    return q_indptr.new_empty((counts + 3) // 4 * 4 + ITEM_WORDS * num_states * num_kv_heads)


def _state_like(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _checked_sizes(q, k_pool, v_pool, q_indptr):
    """The other index arguments are checked against q_indptr, once a step (`reads.py`)."""
    check_queries(q, k_pool, v_pool)
    check_index("q_indptr", q_indptr, q)
    return Sizes(q.shape[0], k_pool.shape[0], k_pool.shape[2])


def _check_prefix(
    q, k_pool, v_pool, q_indptr, kv_indptr, kv_indices, kv_len, first_slot, reader_indptr, readers
):
    check_queries(q, k_pool, v_pool)
    check_nodes(q, q_indptr, kv_indptr, kv_indices, kv_len, first_slot)
    check_readers(reader_indptr, readers, kv_len, q)


def _check_rotation(q, k, k_pool, v_pool, cos, sin):
    check_queries(q, k_pool, v_pool)
    check_rows("k", k, k_pool)
    check_rotation(cos, sin, q, k)


def _check_work_list(
    q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves, reader_indptr, readers,
    page_size, num_q_heads, num_kv_heads, head_dim,
):  # fmt: skip
    check_nodes(q_indptr, q_indptr, kv_indptr, kv_indices, kv_len, first_slot)
    check_leaves(leaves, q_indptr, q_indptr)
    check_readers(reader_indptr, readers, kv_len, q_indptr)
    if min(page_size, num_q_heads, num_kv_heads, head_dim) < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            "page_size, num_q_heads, num_kv_heads and head_dim must be positive, num_q_heads a "
            f"multiple of num_kv_heads, got {page_size}, {num_q_heads}, {num_kv_heads}, {head_dim}"
        )


def _check_suffix(q, k_pool, v_pool, q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves):
    check_queries(q, k_pool, v_pool)
    check_nodes(q, q_indptr, kv_indptr, kv_indices, kv_len, first_slot)
    check_leaves(leaves, q_indptr, q)


_NODES = "Tensor q_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor kv_len, Tensor first_slot"
_READERS = "Tensor reader_indptr, Tensor readers"

define(
    f"prefix_attention(Tensor q, Tensor k_pool, Tensor v_pool, {_NODES}, {_READERS}, "
    "float sm_scale) -> (Tensor, Tensor)",
    implementation=_prefix_attention,
    fake=_prefix_attention_fake,
)
define(
    f"suffix_attention(Tensor q, Tensor k_pool, Tensor v_pool, {_NODES}, Tensor leaves, "
    "float sm_scale) -> (Tensor, Tensor)",
    implementation=_suffix_attention,
    fake=_suffix_attention_fake,
)
define(
    "cascade_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, "
    f"Tensor slots, {_NODES}, Tensor leaves, {_READERS}, float sm_scale, Tensor? work=None, "
    "Tensor? cos=None, Tensor? sin=None) -> (Tensor, Tensor)",
    implementation=_cascade_attention,
    fake=_cascade_attention_fake,
)
define(
    f"work_list({_NODES}, Tensor leaves, {_READERS}, int page_size, int num_q_heads, "
    "int num_kv_heads, int head_dim, bool batch_invariant=False) -> Tensor",
    implementation=_work_list,
    fake=_work_list_fake,
)
