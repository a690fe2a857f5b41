"""Named KV trees, and how they come to lie in pages with traps between them.

A `Tree` is a few small numbers. `build` places its nodes into shuffled pages, from random slots
on: every slot that no node owns holds NaN, every listed page that no token needs is out of range,
so a stray read cannot hide. A `PagedTree` is what the ops get, and remembers what each sequence
looks like flattened, which is what the oracle gets.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import torch
from hf_cascade.ops import DROPPED_SLOT
from hypothesis import strategies as st
from oracle import Flat
from torch import Tensor

OUT_OF_RANGE_PAGES = (2**31 - 1, -1)


@dataclass(frozen=True)
class Tree:
    """A KV tree and the query tokens over it.

    Args:
        parents: parent of each node, None for a root.
        kv_len: tokens present in each node, the query tokens included.
        leaves: the leaf of each sequence; in prefill, it may be another sequence's prefix.
        q_len: query tokens of each sequence, the last of its leaf; empty is one each.
        finished: sequences whose query tokens are not stored, nor among those of the leaf.
        by_slot: the pools' memory runs [head, page, slot], as it does on the CPU.
    """

    name: str
    parents: tuple[int | None, ...]
    kv_len: tuple[int, ...]
    leaves: tuple[int, ...]
    q_len: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    num_kv_heads: int = 2
    group_size: int = 2
    head_dim: int = 16
    page_size: int = 4
    by_slot: bool = False

    def __str__(self) -> str:
        return self.name

    def path(self, node: int) -> tuple[int, ...]:
        """Root to node."""
        parent = self.parents[node]
        return (node,) if parent is None else (*self.path(parent), node)


TREES = (
    Tree("one token", (None,), (1,), (0,)),
    Tree("nothing to see", (None, 0), (0, 0), (1,)),
    Tree("no sharing", (None,) * 3, (5, 1, 9), (0, 1, 2)),
    Tree("one prefix", (None, 0, 0, 0), (11, 3, 3, 3), (1, 2, 3)),
    Tree("ragged leaves", (None, 0, 0, 0, 0), (6, 1, 9, 4, 2), (1, 2, 3, 4)),
    Tree("empty leaves", (None, 0, 0, 0), (7, 0, 3, 0), (1, 2, 3)),
    Tree("empty nodes", (None, 0, 1, 2, 2, None, 5), (0, 5, 0, 2, 0, 0, 3), (3, 4, 6)),
    Tree("one-token nodes", (None, 0, 1, 1, 0), (1,) * 5, (2, 3, 4)),
    Tree("two prefixes and a loner", (None, None, None, 0, 0, 1, 1), (9, 6, 5, *(2, 3) * 2),
         (3, 4, 2, 5, 6)),
    Tree("interleaved readers", (None, None, 0, 0, 1, 1), (5, 8, 2, 1, 3, 2), (2, 4, 3, 5)),
    Tree("leaves before roots", (2, 2, 3, None), (2, 3, 4, 6), (1, 0)),
    Tree("32 levels", (None, *range(31), 3, 15, 30), tuple(1 + i % 3 for i in range(35)),
         (31, 32, 33, 34)),
    Tree("finished rows", (None, 0, 0, None), (6, 3, 2, 0), (1, 3, 2, 3), finished=(1, 2, 3)),
    Tree("prefill of one root", (None,), (9,), (0,), q_len=(9,)),
    Tree("prefill of a tree", (None, 0, 0, 2, 2), (7, 3, 5, 1, 4), (0, 1, 2, 3, 4),
         q_len=(7, 3, 5, 1, 4)),
    Tree("prefill in chunks", (None, 0, 0, None), (8, 9, 6, 5), (1, 2, 3), q_len=(4, 6, 2)),
    Tree("prefill beside decoding", (None, 0, 0, 0), (5, 6, 3, 4), (1, 2, 3), q_len=(6, 1, 0)),
)  # fmt: skip

# Two trees, three levels, rows that prefill and rows that decode: for sweeps over everything else.
FOREST = Tree("forest", (None, 0, 0, 1, 1, None, 5), (37, 18, 5, 1, 7, 9, 20),
              (3, 2, 4, 6, 1), q_len=(1, 3, 1, 2, 4))  # fmt: skip


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any small tree: any node may be the leaf of a sequence, whoever else reads it."""
    size = draw(st.integers(1, 7))
    parents = [draw(st.sampled_from([None, *range(node)])) for node in range(size)]
    kv_len = [draw(st.integers(0, 9)) for _ in range(size)]
    leaves = draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
    return Tree(
        "random",
        tuple(parents),
        tuple(kv_len),
        tuple(leaves),
        q_len=tuple(draw(st.integers(0, kv_len[leaf] or 2)) for leaf in leaves),
        finished=tuple(seq for seq in range(len(leaves)) if draw(st.booleans())),
        num_kv_heads=draw(st.integers(1, 2)),
        group_size=draw(st.integers(1, 3)),
        page_size=draw(st.sampled_from([1, 2, 3, 4, 16])),
        by_slot=draw(st.booleans()),
    )


@dataclass(frozen=True)
class Node:
    """Where one node's tokens lie, and the sequences that have it in their prefix."""

    pages: tuple[int, ...]
    first_slot: int
    kv_len: int
    readers: tuple[int, ...]

    def slots(self, page_size: int) -> list[int]:
        offsets = range(self.first_slot, self.first_slot + self.kv_len)
        return [self.pages[i // page_size] * page_size + i % page_size for i in offsets]


@dataclass(frozen=True)
class PagedTree:
    """A tree in pages: the arguments of the ops, and every sequence flattened."""

    nodes: tuple[Node, ...]
    leaves: tuple[int, ...]
    q_len: tuple[int, ...]
    q: Tensor  # [num_tokens, num_q_heads, head_dim]
    k: Tensor  # [num_tokens, num_kv_heads, head_dim], those of the query tokens
    v: Tensor
    slots: Tensor  # [num_tokens]
    k_pool: Tensor  # [num_pages, num_kv_heads, page_size, head_dim]
    v_pool: Tensor
    sm_scale: float
    paths: tuple[Flat, ...]
    prefix_len: tuple[int, ...]

    def args(self, op: Callable) -> dict:
        """The arguments of an op (or of its reference), by name."""
        page_ids = [(*node.pages, *OUT_OF_RANGE_PAGES) for node in self.nodes]
        index = {
            "q_indptr": _indptr(self.q_len),
            "kv_indptr": _indptr(len(ids) for ids in page_ids),
            "kv_indices": [page for ids in page_ids for page in ids],
            "kv_len": [node.kv_len for node in self.nodes],
            "first_slot": [node.first_slot for node in self.nodes],
            "leaves": self.leaves,
            "reader_indptr": _indptr(len(node.readers) for node in self.nodes),
            "readers": [seq for node in self.nodes for seq in node.readers],
        }
        named = vars(self) | {name: int32(values) for name, values in index.items()}
        return {name: named[name] for name in inspect.signature(op).parameters if name in named}

    @property
    def page_size(self) -> int:
        return self.k_pool.shape[2]

    def rows(self, seq: int) -> slice:
        """Where the query tokens of a sequence are in packed q."""
        return slice(sum(self.q_len[:seq]), sum(self.q_len[: seq + 1]))

    def rows_that_see(self, token: int) -> Tensor:
        """[num_tokens], bool: whose attention takes in the K and V of query token `token`."""
        sees = torch.zeros(len(self.q), dtype=torch.bool)
        if self.slots[token] != DROPPED_SLOT:
            owner = bisect_right(_indptr(self.q_len), token) - 1
            sees[token : self.rows(owner).stop] = True
            for reader in self.nodes[self.leaves[owner]].readers:
                sees[self.rows(reader)] = True
        return sees

    @property
    def prefixes(self) -> tuple[Flat, ...]:
        """What `prefix_attention` computes of each path."""
        return tuple(
            replace(path, k=path.k[:length], v=path.v[:length], visible=(length,) * len(path.q))
            for path, length in zip(self.paths, self.prefix_len, strict=True)
        )

    @property
    def suffixes(self) -> tuple[Flat, ...]:
        """What `suffix_attention` computes of each path."""
        return tuple(
            replace(
                path,
                k=path.k[length:],
                v=path.v[length:],
                visible=tuple(seen - length for seen in path.visible),
            )
            for path, length in zip(self.paths, self.prefix_len, strict=True)
        )

    def before_append(self) -> PagedTree:
        """The same, with the query tokens' own K and V still to be written to their slots."""
        k_pool, v_pool = self.k_pool.clone(), self.v_pool.clone()
        slots = self.slots[self.slots != DROPPED_SLOT].long()
        for pool in (k_pool, v_pool):
            pool[slots // self.page_size, :, slots % self.page_size] = torch.nan
        return replace(self, k_pool=k_pool, v_pool=v_pool)


def build(tree: Tree, dtype: torch.dtype = torch.float32, seed: int = 0) -> PagedTree:
    """Fill a tree with random numbers and place it into pages."""
    random = torch.Generator().manual_seed(seed)
    page_size, kv_shape = tree.page_size, (tree.num_kv_heads, tree.head_dim)

    def normal(num_tokens: int, *shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=random).to(dtype)

    first_slot = torch.randint(page_size, (len(tree.kv_len),), generator=random).tolist()
    num_pages = [
        -(-(slot + length) // page_size) if length else 0
        for slot, length in zip(first_slot, tree.kv_len, strict=True)
    ]
    shuffled = iter(torch.randperm(sum(num_pages) + 2, generator=random).tolist())
    nodes = tuple(
        Node(
            pages=tuple(islice(shuffled, num_pages[n])),
            first_slot=first_slot[n],
            kv_len=tree.kv_len[n],
            readers=tuple(s for s, leaf in enumerate(tree.leaves) if n in tree.path(leaf)[:-1]),
        )
        for n in range(len(tree.kv_len))
    )
    kv = [(normal(length, *kv_shape), normal(length, *kv_shape)) for length in tree.kv_len]
    pool_shape = (sum(num_pages) + 2, tree.num_kv_heads, page_size, tree.head_dim)
    k_pool, v_pool = (empty_pool(pool_shape, dtype, by_slot=tree.by_slot) for _ in range(2))
    for node, (k, v) in zip(nodes, kv, strict=True):
        slots = int32(node.slots(page_size))
        k_pool[slots // page_size, :, slots % page_size] = k
        v_pool[slots // page_size, :, slots % page_size] = v

    q_len = tree.q_len or (1,) * len(tree.leaves)
    q = normal(sum(q_len), tree.num_kv_heads * tree.group_size, tree.head_dim)
    k, v = normal(sum(q_len), *kv_shape), normal(sum(q_len), *kv_shape)
    slots = torch.full((sum(q_len),), DROPPED_SLOT, dtype=torch.int32)
    sm_scale = 1.25 * tree.head_dim**-0.5  # not what PyTorch takes by default
    paths, prefix_len = [], []
    for seq, leaf in enumerate(tree.leaves):
        rows = slice(sum(q_len[:seq]), sum(q_len[: seq + 1]))
        leaf_k, leaf_v = kv[leaf]
        if q_len[seq] and len(leaf_k) and seq not in tree.finished:
            k[rows], v[rows] = leaf_k[-q_len[seq] :], leaf_v[-q_len[seq] :]
            slots[rows] = int32(nodes[leaf].slots(page_size)[-q_len[seq] :])
        path_k, path_v = (torch.cat(x) for x in zip(*(kv[n] for n in tree.path(leaf)), strict=True))
        hidden = range(q_len[seq] - 1, -1, -1) if len(leaf_k) else [0] * q_len[seq]
        visible = tuple(len(path_k) - later for later in hidden)
        paths.append(Flat(q[rows], path_k, path_v, visible, sm_scale))
        prefix_len.append(len(path_k) - len(leaf_k))
    return PagedTree(
        nodes=nodes,
        leaves=tree.leaves,
        q_len=q_len,
        q=q,
        k=k,
        v=v,
        slots=slots,
        k_pool=k_pool,
        v_pool=v_pool,
        sm_scale=sm_scale,
        paths=tuple(paths),
        prefix_len=tuple(prefix_len),
    )


def cut(tree: PagedTree, n: int, at: int) -> PagedTree:
    """Divide node n after its first `at` tokens. Copies nothing: the halves may share a page."""
    node, start = tree.nodes[n], tree.nodes[n].first_slot + at
    owners = [seq for seq, leaf in enumerate(tree.leaves) if leaf == n]
    upper = replace(
        node,
        pages=node.pages[: -(-start // tree.page_size)],
        kv_len=at,
        readers=tuple(sorted({*node.readers, *owners})),
    )
    lower = replace(
        node,
        pages=node.pages[start // tree.page_size :],
        first_slot=start % tree.page_size,
        kv_len=node.kv_len - at,
    )
    return replace(
        tree,
        nodes=(*tree.nodes[:n], lower, *tree.nodes[n + 1 :], upper),
        prefix_len=tuple(
            length + at * (seq in owners) for seq, length in enumerate(tree.prefix_len)
        ),
    )


def renumber_pages(tree: PagedTree, page_ids: Sequence[int]) -> PagedTree:
    """Move page p of the pools to page_ids[p]."""
    source = int32(page_ids).argsort()
    moved = [
        page_ids[slot // tree.page_size] * tree.page_size + slot % tree.page_size
        if slot != DROPPED_SLOT
        else DROPPED_SLOT
        for slot in tree.slots.tolist()
    ]
    return replace(
        tree,
        nodes=tuple(
            replace(node, pages=tuple(page_ids[page] for page in node.pages)) for node in tree.nodes
        ),
        slots=int32(moved),
        k_pool=tree.k_pool[source],
        v_pool=tree.v_pool[source],
    )


def reorder(tree: PagedTree, order: Sequence[int]) -> PagedTree:
    """The same sequences, the one at order[i] now being sequence i."""
    rows = [row for seq in order for row in range(*tree.rows(seq).indices(len(tree.q)))]
    return replace(
        tree,
        nodes=tuple(
            replace(node, readers=tuple(sorted(order.index(seq) for seq in node.readers)))
            for node in tree.nodes
        ),
        **{name: getattr(tree, name)[rows] for name in ("q", "k", "v", "slots")},
        **{
            name: tuple(getattr(tree, name)[seq] for seq in order)
            for name in ("leaves", "q_len", "paths", "prefix_len")
        },
    )


def angles(
    num_tokens: int, rotary_dim: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """cos and sin as `cascade_attention` takes them: any numbers, other ones for each half."""
    random = torch.Generator().manual_seed(rotary_dim)
    shape = (num_tokens, rotary_dim)
    return {name: torch.randn(shape, generator=random).to(dtype) for name in ("cos", "sin")}


def rotated(args: dict, cos: Tensor, sin: Tensor) -> dict:
    """The same arguments, RoPE applied to q and k, as transformers writes it."""
    return args | {name: _rotated(args[name], cos[:, None], sin[:, None]) for name in ("q", "k")}


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turning.chunk(2, -1)
    turned = turning * cos + torch.cat([-b, a], -1) * sin
    return torch.cat([turned.to(x.dtype), passed], -1)


def empty_pool(shape: Sequence[int], dtype: torch.dtype, *, by_slot: bool) -> Tensor:
    """NaN in every slot; shape: [num_pages, num_kv_heads, page_size, head_dim]."""
    order = (1, 0, 2, 3) if by_slot else (0, 1, 2, 3)
    return torch.empty_permuted(tuple(shape), order, dtype=dtype).fill_(torch.nan)


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _indptr(lengths: Iterable[int]) -> list[int]:
    return [0, *accumulate(lengths)]
