"""The plan of decode steps: tensors that stay where they are, which the device itself advances.

A compiled step sees one set of shapes, and a captured one the same addresses, however the tree
grows and shrinks. From one step to the next every live row's leaf has one token more, and that is
all: `advance` does it on the device. The host takes part when a row needs a page (`add_pages`) and
when the tree has changed its shape (`rewrite`); nothing waits for it, and it waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .ops import DROPPED_SLOT
from .plan import Layout, Plan, Query, build_layout, packed_lists, to_device, views
from .tree import KVTree, Node


class StepPlan:
    """The plans of one call's decode steps, by device.

    Args:
        tree: the call's.
        devices: those that layers of the model lie on.
    """

    def __init__(self, tree: KVTree, devices: Iterable[torch.device]) -> None:
        self._tree = tree
        self._packed: dict[torch.device, Tensor | None] = dict.fromkeys(devices)
        self._growth: dict[torch.device, _Growth] = {}
        self._shapes: tuple[int, int, int] | None = None
        self._first_page: list[int] = []  # per row, where its leaf's pages begin in kv_indices
        self.plans: dict[torch.device, Plan] = {}

    def rewrite(self, leaves: Sequence[Node | None], room: int) -> None:
        """Take the tree over as it is, every leaf with the token of the coming step.

        Args:
            leaves: one per row; None is a row that is over.
            room: tokens that a leaf may grow by after this step; never more than the first time.
        """
        layout = build_layout(self._tree, [Query.last_of(leaf) for leaf in leaves], room)
        if self._shapes is None:
            self._shapes = _largest_shapes(layout)
        layout = layout.padded(*self._shapes)
        growth = _growth_of(layout, leaves)
        self._first_page = growth["first_page"]
        for node, grown in enumerate(growth["nodes"]):
            layout.kv_len[node] -= grown  # `advance` adds it
        of_plan = [getattr(layout, field.name) for field in fields(Layout)]
        lists = [*of_plan, *growth.values()]
        values = packed_lists(lists)
        for device, packed in self._packed.items():
            if packed is not None:
                packed.copy_(to_device(values, device), non_blocking=True)
                continue
            packed = self._packed[device] = to_device(values, device)
            parts = views(packed, [len(each) for each in lists])
            self.plans[device] = Plan(*parts[: len(of_plan)])
            self._growth[device] = _Growth(*parts[len(of_plan) :])

    def add_pages(self, leaves: Sequence[Node | None]) -> None:
        """List the page that each leaf took last, if its newest token is the first one in there."""
        page_size = self._tree.allocator.page_size
        places: list[int] = []
        pages: list[int] = []
        for row, leaf in enumerate(leaves):
            if leaf is not None and (leaf.first_slot + leaf.kv_len - 1) % page_size == 0:
                places.append(self._first_page[row] + len(leaf.pages) - 1)
                pages.append(leaf.pages[-1])
        if pages:
            for device, plan in self.plans.items():
                place, page = to_device(places + pages, device).chunk(2)
                plan.kv_indices.index_copy_(0, place.long(), page)

    def advance(self) -> None:
        """Every live row's leaf grows by one token, on the device.

        Device work alone, on tensors that stay where they are: it can be captured.
        """
        page_size = self._tree.allocator.page_size
        # Every operator here is a launch of its own in every step: there are as few as can be.
        for device, plan in self.plans.items():
            growth = self._growth[device]
            plan.kv_len.add_(growth.nodes)
            growth.place.add_(growth.rows)
            listed = (growth.place >> (page_size.bit_length() - 1)).add_(growth.first_page)
            pages = plan.kv_indices.index_select(0, listed)
            torch.add(growth.place & (page_size - 1), pages, alpha=page_size, out=plan.slots)
            plan.slots.bitwise_or_(growth.dropped)


@dataclass(frozen=True)
class _Growth:
    """What a step adds, int32 like the plan.

    Attributes:
        nodes: [N], 1 for the leaves of live rows.
        rows: [B], 1 for live rows.
        place: [B], of each row's newest token, in slots from the first one of its leaf's pages.
        first_page: [B], where those are listed in kv_indices.
        dropped: [B], all bits of rows that are over: with them any slot is DROPPED_SLOT.
    """

    nodes: Tensor
    rows: Tensor
    place: Tensor
    first_page: Tensor
    dropped: Tensor


def _growth_of(layout: Layout, leaves: Sequence[Node | None]) -> dict[str, list[int]]:
    """The fields of _Growth, before the step that `layout` shows."""
    lives = [leaf is not None for leaf in leaves]
    nodes = [0] * len(layout.kv_len)
    place = [0] * len(leaves)  # of a row that is over: it looks up some page, and drops it
    for row, node in enumerate(layout.leaves):
        if lives[row]:
            nodes[node] = 1
            place[row] = layout.first_slot[node] + layout.kv_len[node] - 2
    return {
        "nodes": nodes,
        "rows": [int(is_live) for is_live in lives],
        "place": place,
        "first_page": [layout.kv_indptr[node] for node in layout.leaves],
        "dropped": [0 if is_live else DROPPED_SLOT for is_live in lives],
    }


def _largest_shapes(layout: Layout) -> tuple[int, int, int]:
    """Most nodes, pages and reads that a step can come to have, given the first one's.

    Sizes of 0 and 1 are cases of their own to the compiler: there are always two.
    """
    num_nodes = len(layout.kv_len) + 1  # one for the rows that are over
    num_pages = len(layout.kv_indices) + 1  # such a row looks one up, and drops it
    return max(2, num_nodes), max(2, num_pages), max(2, len(layout.readers))
