"""Which rows of q read which tokens, found on the host once for all layers of a step.

This is where the values of the index arguments (`cascade.py` describes them) are read and checked;
`composed.py` computes what comes of it. All layers of a step pass the same values: what was found
for the last call's is kept until a call brings others.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .checks import check_leaves, check_nodes, check_readers


def lies_by_slot(pool: Tensor) -> bool:
    """Whether a pool's slots, of one page after the other, are evenly spaced in memory."""
    page, _, slot, _ = pool.stride()
    return page == slot * pool.shape[2]


def by_slot(pool: Tensor) -> Tensor:
    """Such a pool as [num_slots, num_kv_heads, head_dim]."""
    num_pages, num_kv_heads, page_size, head_dim = pool.shape
    _, head, slot, value = pool.stride()
    shape = (num_pages * page_size, num_kv_heads, head_dim)
    return pool.as_strided(shape, (slot, head, value))  # in place of two views: a step is short


@dataclass(frozen=True)
class Tokens:
    """Tokens of nodes that are alike in length and in first slot."""

    pages: slice | Tensor  # that the nodes fill, one node after the other
    num_nodes: int
    first_slot: int
    kv_len: int

    def of(self, pool: Tensor) -> Tensor:
        """[num_nodes, num_kv_heads, kv_len, head_dim].

        Copied, but where pages are consecutive in a pool whose slots are evenly spaced in memory.
        """
        if isinstance(self.pages, slice) and lies_by_slot(pool):
            page, head, slot, value = pool.stride()
            pages = self.pages.stop - self.pages.start
            return pool.as_strided(  # in place of four views: a step is short
                (self.num_nodes, pool.shape[1], self.kv_len, pool.shape[3]),
                (pages // self.num_nodes * page, head, slot, value),
                pool.storage_offset() + self.pages.start * page + self.first_slot * slot,
            )
        by_head, seen = pool.transpose(0, 1), slice(self.first_slot, self.first_slot + self.kv_len)
        if isinstance(self.pages, Tensor) and by_head.is_contiguous():  # a head's pages, whole
            taken = by_head.index_select(1, self.pages)
            tokens = taken.reshape(pool.shape[1], self.num_nodes, -1, pool.shape[3])
            return tokens[:, :, seen].transpose(0, 1)
        slots = pool.transpose(1, 2)  # [pages, page_size, num_kv_heads, head_dim]
        if isinstance(self.pages, slice):
            taken = slots[self.pages]
        else:
            taken = slots.index_select(0, self.pages)
        tokens = taken.reshape(self.num_nodes, -1, *slots.shape[2:])
        return tokens[:, seen].transpose(1, 2)


@dataclass(frozen=True)
class Read:
    """Rows of q and what they attend to."""

    rows: slice | Tensor
    tokens: Tokens
    q_len: int  # rows that belong to each of the tokens' nodes
    is_first: bool  # these rows have read nothing before

    def is_of_all(self, num_tokens: int) -> bool:
        """Whether these are all rows."""
        return isinstance(self.rows, slice) and self.rows == slice(0, num_tokens)


class Sizes(NamedTuple):
    """What the values of the index arguments are checked against."""

    num_tokens: int
    num_pages: int
    page_size: int


class _Node(NamedTuple):
    pages: tuple[int, ...]  # that it fills
    first_slot: int
    kv_len: int


Found = TypeVar("Found")


class _Last(threading.local):
    sizes: tuple[int, ...] | None = None  # None: nothing is kept
    tensors: tuple[Tensor, ...] = ()
    found: object = None


def once_a_step(find: Callable[..., Found]) -> Callable[..., Found]:
    """`find(sizes, *tensors)`, but nothing is found twice in a row for equal arguments.

    Values are compared with copies of the last call's: a tensor's version counter does not see what
    is written through numpy, DLPack or `.data`.
    """
    last = _Last()

    @wraps(find)
    def find_or_remember(sizes: tuple[int, ...], *tensors: Tensor) -> Found:
        # A CUDA graph would keep today's values for good. Reading them while it is captured fails.
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return find(sizes, *tensors)
        if not (sizes == last.sizes and all(map(_are_equal, tensors, last.tensors))):
            last.sizes = None  # if `find` raises, nothing is kept
            last.found = find(sizes, *tensors)
            last.tensors = tuple(tensor.clone() for tensor in tensors)
            last.sizes = sizes
        return last.found  # type: ignore[return-value]

    return find_or_remember


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


# ------------------------------------------------------------------ what the ops ask for


@once_a_step
def prefix_reads(
    sizes: Sizes,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len: Tensor,
    first_slot: Tensor,
    reader_indptr: Tensor,
    readers: Tensor,
) -> list[Read]:
    """One for each node with readers, in the order of the nodes: the rows of all its readers."""
    offsets, nodes = _tree(sizes, q_indptr, kv_indptr, kv_indices, kv_len, first_slot)
    check_readers(reader_indptr, readers, kv_len, q_indptr)
    bounds = _offsets("reader_indptr", reader_indptr, readers.shape[0])
    sequences = _ids("readers", readers, len(offsets) - 1)
    reads, started = [], set[int]()
    for n, node in enumerate(nodes):
        seqs = sequences[bounds[n] : bounds[n + 1]]
        if seqs != sorted(set(seqs)):
            raise ValueError(f"readers of node {n} must ascend, got {seqs}")
        q_len = sum(offsets[seq + 1] - offsets[seq] for seq in seqs)
        if not q_len or not node.kv_len:
            continue
        rows = _rows(offsets, seqs, q_indptr.device)
        tokens = _tokens([node], kv_indices.device)
        reads.append(Read(rows, tokens, q_len, started.isdisjoint(seqs)))
        started.update(seqs)
    return reads


@once_a_step
def suffix_reads(
    sizes: Sizes,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len: Tensor,
    first_slot: Tensor,
    leaves: Tensor,
) -> list[Read]:
    """One for each batch of sequences that are alike in lengths: no padding, no masks."""
    offsets, nodes = _tree(sizes, q_indptr, kv_indptr, kv_indices, kv_len, first_slot)
    check_leaves(leaves, q_indptr, q_indptr)
    leaf_of = _ids("leaves", leaves, len(nodes))
    alike: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for seq, leaf in enumerate(leaf_of):
        q_len, node = offsets[seq + 1] - offsets[seq], nodes[leaf]
        if q_len and node.kv_len:
            if q_len > node.kv_len:
                raise ValueError(
                    f"kv_len[{leaf}] must cover the {q_len} query tokens of sequence {seq}, "
                    f"got {node.kv_len}"
                )
            alike[q_len, node.kv_len, node.first_slot].append(seq)
    return [
        Read(
            _rows(offsets, seqs, q_indptr.device),
            _tokens([nodes[leaf_of[seq]] for seq in seqs], kv_indices.device),
            q_len,
            True,
        )
        for (q_len, _, _), seqs in alike.items()
    ]


# ------------------------------------------------------------------ how it is found


@once_a_step
def _tree(
    sizes: Sizes,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len: Tensor,
    first_slot: Tensor,
) -> tuple[list[int], list[_Node]]:
    """What prefixes and suffixes have in common: each sequence's rows of q, and the nodes."""
    check_nodes(q_indptr, q_indptr, kv_indptr, kv_indices, kv_len, first_slot)
    offsets = _offsets("q_indptr", q_indptr, sizes.num_tokens)
    pages = kv_indices.tolist()
    bounds = _offsets("kv_indptr", kv_indptr, len(pages))
    nodes = []
    for n, (length, slot) in enumerate(zip(kv_len.tolist(), first_slot.tolist(), strict=True)):
        if not 0 <= slot < sizes.page_size:
            raise ValueError(
                f"first_slot[{n}] must be in [0, page_size={sizes.page_size}), got {slot}"
            )
        listed = pages[bounds[n] : bounds[n + 1]]
        num_filled = -(-(slot + length) // sizes.page_size) if length else 0
        if length < 0 or num_filled > len(listed):
            raise ValueError(
                f"kv_len[{n}] must fit the node's {len(listed)} pages of {sizes.page_size} slots "
                f"from first_slot {slot}, got {length}"
            )
        filled = listed[:num_filled]
        if filled and not 0 <= min(filled) <= max(filled) < sizes.num_pages:
            raise ValueError(
                f"kv_indices of node {n} must be in [0, num_pages={sizes.num_pages}), got {filled}"
            )
        nodes.append(_Node(tuple(filled), slot, length))
    return offsets, nodes


def _tokens(nodes: list[_Node], device: torch.device) -> Tokens:
    pages = [page for node in nodes for page in node.pages]
    is_run = all(page + 1 == following for page, following in pairwise(pages))
    found = slice(pages[0], pages[-1] + 1) if is_run else torch.tensor(pages, device=device)
    return Tokens(found, len(nodes), nodes[0].first_slot, nodes[0].kv_len)


def _rows(offsets: list[int], seqs: list[int], device: torch.device) -> slice | Tensor:
    if seqs == list(range(seqs[0], seqs[-1] + 1)):
        return slice(offsets[seqs[0]], offsets[seqs[-1] + 1])
    tokens = [t for seq in seqs for t in range(offsets[seq], offsets[seq + 1])]
    return torch.tensor(tokens, dtype=torch.int64, device=device)


def _offsets(name: str, indptr: Tensor, total: int) -> list[int]:
    """An indptr as host values, checked to divide at most `total` things."""
    offsets = indptr.tolist()
    if offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] > total:
        raise ValueError(f"{name} must rise from 0 to at most {total}, got {offsets}")
    return offsets


def _ids(name: str, ids: Tensor, count: int) -> list[int]:
    """Ids of nodes or sequences as host values, checked to be below `count`."""
    values = ids.tolist()
    lowest, highest = min(values, default=0), max(values, default=-1)
    if not (lowest >= 0 and highest < count):
        raise ValueError(f"{name} must be in [0, {count}), got {lowest} to {highest}")
    return values
