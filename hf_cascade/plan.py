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

    @classmethod
    def last_of(cls, leaf: Node | None) -> Query | None:
        """What decoding asks; None for a row that is over."""
        return None if leaf is None else cls(leaf, leaf.kv_len - 1, leaf.kv_len)


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
    All are parts of one tensor, so that one copy brings them to the device.
    """

    q_indptr: Tensor
    slots: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len: Tensor
    first_slot: Tensor
    leaves: Tensor
    reader_indptr: Tensor
    readers: Tensor

    @property
    def nodes(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The query offsets and the node table, in the order in which the ops take them."""
        return self.q_indptr, self.kv_indptr, self.kv_indices, self.kv_len, self.first_slot


def build_layout(tree: KVTree, queries: Sequence[Query | None], room: int = 0) -> Layout:
    """The shape of the tree that a pass with these queries touches.

    Nodes are the queried ones and their ancestors, parents first. A queried node holds `stop`
    tokens in this pass (its later ones are not computed yet), an ancestor all of its tokens.

    Args:
        tree: the tree.
        queries: one per sequence, in the order of their tokens in packed q; None is a sequence
            that is over, whose one token is neither stored nor attended with.
        room: tokens that each queried node may still grow by: its list of pages has the length
            that it then needs, with page 0 for those that it has not taken yet.
    """
    index: dict[Node, int] = {}
    readers_of: list[list[int]] = []
    kv_len: list[int] = []
    leaves: list[int] = []
    q_indptr, slots = [0], []
    num_pages: dict[int, int] = {}  # that a queried node lists
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
            if room:
                num_slots = query.node.first_slot + query.stop + room
                num_pages[leaf] = -(-num_slots // tree.allocator.page_size)
            leaves.append(leaf)
            slots += tree.slots(query.node, query.start, query.stop)
        q_indptr.append(len(slots))

    kv_indptr, kv_indices, reader_indptr, readers = [0], [], [0], []
    for row, (node, node_readers) in enumerate(zip(index, readers_of, strict=True)):
        kv_indices += node.pages + [0] * (num_pages.get(row, 0) - len(node.pages))
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
    lists = [getattr(layout, field.name) for field in fields(Layout)]
    return Plan(*views(to_device(packed_lists(lists), device), [len(values) for values in lists]))


def packed_lists(lists: Sequence[list[int]]) -> list[int]:
    """The lists one after the other, each at an aligned offset."""
    return [x for values in lists for x in values + [0] * (_aligned(len(values)) - len(values))]


def to_device(values: list[int], device: torch.device) -> Tensor:
    """int32 values on `device`, without a wait for it."""
    # On pinned memory a copy is no sync; torch keeps the memory until the copy is done.
    is_cuda = device.type == "cuda"
    with torch.inference_mode(False):  # inference tensors could not be updated in place
        host = torch.tensor(values, dtype=torch.int32, device="cpu", pin_memory=is_cuda)
        return host.to(device, non_blocking=True)


def views(packed: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The lists of these lengths in what `packed_lists` made."""
    with torch.inference_mode(False):
        parts = packed.split([_aligned(length) for length in lengths])
        found = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    for view in found:
        # What differs between calls is a size, not another compilation.
        torch._dynamo.maybe_mark_dynamic(view, 0)
    return found


def _aligned(length: int) -> int:
    """A length in int32 that keeps what follows at 16 bytes, as compiled code assumes."""
    return -(-length // 4) * 4
