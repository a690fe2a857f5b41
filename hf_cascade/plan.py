"""From a KV tree to the tensors of one forward pass: layout (host values), then plan (tensors)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .ops import DROPPED_SLOT
from .tree import KVTree, Node


@dataclass(frozen=True)
class Query:
    """One sequence of a pass: tokens [start, stop) of a node are its query tokens.

    Decoding asks with the last token of a leaf; prefill with the tokens of a node that are to be
    computed.
    """

    node: Node
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The tree's shape in one pass, as host values; the fields of `Plan` by the same names."""

    q_indptr: list[int]
    slots: list[int]
    kv_indptr: list[int]
    kv_indices: list[int]
    kv_len: list[int]
    first_slot: list[int]
    leaves: list[int]
    reader_indptr: list[int]
    readers: list[int]

    def padded(self, num_nodes: int, num_pages: int, num_reads: int) -> Layout:
        """The same tree with empty nodes, pages and readers that nobody reads added at the end.

        A compiled step sees one set of shapes, however the tree grows and shrinks.
        """

        def pad(values: list[int], length: int, value: int) -> list[int]:
            return values + [value] * (length - len(values))

        return replace(
            self,
            kv_indptr=pad(self.kv_indptr, num_nodes + 1, self.kv_indptr[-1]),
            kv_indices=pad(self.kv_indices, num_pages, 0),
            kv_len=pad(self.kv_len, num_nodes, 0),
            first_slot=pad(self.first_slot, num_nodes, 0),
            reader_indptr=pad(self.reader_indptr, num_nodes + 1, self.reader_indptr[-1]),
            readers=pad(self.readers, num_reads, 0),
        )


@dataclass(frozen=True)
class Plan:
    """The tensors of one pass, int32 on one device; they serve every layer.

    Shapes, for N nodes, B sequences and T query tokens (ops/cascade.py says more of each):
    q_indptr [B + 1], slots [T], kv_indptr [N + 1] in pages, kv_indices [pages], kv_len [N],
    first_slot [N], leaves [B], reader_indptr [N + 1], readers [number of (node, sequence) pairs].
    All are parts of `packed`, so that one copy brings them to the device.
    """

    packed: Tensor
    q_indptr: Tensor
    slots: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len: Tensor
    first_slot: Tensor
    leaves: Tensor
    reader_indptr: Tensor
    readers: Tensor

    def update(self, layout: Layout) -> None:
        """Take over the values of a layout of the same shapes, in place."""
        self.packed.copy_(_pack(layout)[0], non_blocking=True)

    @property
    def nodes(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The query offsets and the node table, in the order in which the ops take them."""
        return self.q_indptr, self.kv_indptr, self.kv_indices, self.kv_len, self.first_slot

    @property
    def has_prefix(self) -> bool:
        """Whether any sequence has a prefix (known without a sync)."""
        return self.readers.shape[0] > 0


def build_layout(tree: KVTree, queries: Sequence[Query | None]) -> Layout:
    """The shape of the tree that a pass with these queries touches.

    Nodes are the queried ones and their ancestors, parents first. A queried node holds `stop`
    tokens in this pass (its later ones are not computed yet), an ancestor all of its tokens.

    Args:
        tree: the tree.
        queries: one per sequence, in the order of their tokens in packed q; None is a sequence
            that is over, whose one token is neither stored nor attended with.
    """
    index: dict[Node, int] = {}
    readers_of: list[list[int]] = []
    kv_len: list[int] = []
    leaves: list[int] = []
    q_indptr, slots = [0], []
    over = -1  # the row of the empty node that all sequences which are over share

    def row_of(node: Node) -> int:
        if node not in index:
            index[node] = len(kv_len)
            kv_len.append(node.kv_len)
            readers_of.append([])
        return index[node]

    for seq, query in enumerate(queries):
        if query is None:
            if over < 0:
                over = row_of(Node())
            leaves.append(over)
            slots.append(DROPPED_SLOT)
        else:
            for ancestor in tree.path(query.node)[:-1]:
                readers_of[row_of(ancestor)].append(seq)
            leaf = row_of(query.node)
            kv_len[leaf] = query.stop
            leaves.append(leaf)
            slots += tree.slots(query.node, query.start, query.stop)
        q_indptr.append(len(slots))

    kv_indptr, kv_indices, reader_indptr, readers = [0], [], [0], []
    for node, node_readers in zip(index, readers_of, strict=True):
        kv_indices += node.pages
        kv_indptr.append(len(kv_indices))
        readers += node_readers
        reader_indptr.append(len(readers))
    return Layout(
        q_indptr=q_indptr,
        slots=slots,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_len=kv_len,
        first_slot=[node.first_slot for node in index],
        leaves=leaves,
        reader_indptr=reader_indptr,
        readers=readers,
    )


def build_plan(layout: Layout, device: torch.device) -> Plan:
    """The layout's values on `device`: one copy, then views."""
    with torch.inference_mode(False):  # inference tensors could not be updated in place
        packed, lengths = _pack(layout)
        packed = packed.to(device)
    parts = packed.split([_aligned(length) for length in lengths])
    views = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    for view in views:
        # What differs between calls is a size, not another compilation.
        torch._dynamo.maybe_mark_dynamic(view, 0)
    return Plan(packed, *views)


def _pack(layout: Layout) -> tuple[Tensor, list[int]]:
    """All values in one host tensor, each list at an aligned offset; and the lists' lengths."""
    lists = [getattr(layout, field.name) for field in fields(Layout)]
    lengths = [len(values) for values in lists]
    padded = [values + [0] * (_aligned(len(values)) - len(values)) for values in lists]
    return torch.tensor([x for values in padded for x in values], dtype=torch.int32), lengths


def _aligned(length: int) -> int:
    """A length in int32 that keeps what follows at 16 bytes, as compiled code assumes."""
    return -(-length // 4) * 4
