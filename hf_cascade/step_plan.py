"""The plan of decode steps: tensors that stay where they are, which the device itself advances.

A compiled step sees one set of shapes, and a captured one the same addresses, however the tree
grows and shrinks. From one step to the next every live row's leaf has one token more, and that is
all: `advance` does it on the device. The host takes part when a row needs a page (`add_pages`) and
when the tree has changed its shape (`rewrite`); nothing waits for it, and it waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

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
        self._growth: dict[torch.device, Tensor] = {}  # like what is packed: what a step adds
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
        self._first_page = [layout.kv_indptr[node] for node in layout.leaves]
        if self._shapes is None:
            self._shapes = _largest_shapes(layout)
        layout = layout.padded(*self._shapes)
        growth = {name: [0] * len(values) for name, values in vars(layout).items()}
        for row, node in enumerate(layout.leaves):
            if leaves[row] is not None:
                growth["kv_len"][node] = growth["slots"][row] = 1
                layout.kv_len[node] -= 1  # `advance` adds them
                layout.slots[row] -= 1
        lists = [getattr(layout, field.name) for field in fields(Layout)]
        values = packed_lists(lists)
        growths = packed_lists([growth[field.name] for field in fields(Layout)])
        for device, packed in self._packed.items():
            if packed is None:
                packed = self._packed[device] = to_device(values, device)
                self._growth[device] = to_device(growths, device)
                self.plans[device] = Plan(*views(packed, [len(each) for each in lists]))
            else:
                packed.copy_(to_device(values, device), non_blocking=True)
                self._growth[device].copy_(to_device(growths, device), non_blocking=True)

    def add_pages(self, leaves: Sequence[Node | None]) -> None:
        """List the page that each leaf took last, if its newest token is the first one in there."""
        page_size = self._tree.allocator.page_size
        begun = [
            (row, len(leaf.pages) - 1, leaf.pages[-1])
            for row, leaf in enumerate(leaves)
            if leaf is not None and (leaf.first_slot + leaf.kv_len - 1) % page_size == 0
        ]
        if not begun:
            return
        for device, plan in self.plans.items():
            packed = self._packed[device]
            assert packed is not None
            indices = int(plan.kv_indices.storage_offset())
            slots = int(plan.slots.storage_offset())
            places = [indices + self._first_page[row] + place for row, place, _ in begun]
            values = [page for *_, page in begun]
            places += [slots + row for row, *_ in begun]
            values += [page * page_size - 1 for page in values]  # `advance` adds the 1
            place, value = to_device(places + values, device).chunk(2)
            packed.index_copy_(0, place.long(), value)

    def advance(self) -> None:
        """Every live row's leaf grows by one token, on the device, which knows its slot: the next.

        Device work alone, on tensors that stay where they are: it can be captured.
        """
        for device, growth in self._growth.items():
            packed = self._packed[device]
            assert packed is not None
            packed.add_(growth)


def _largest_shapes(layout: Layout) -> tuple[int, int, int]:
    """Most nodes, pages and reads that a step can come to have, given the first one's.

    Sizes of 0 and 1 are cases of their own to the compiler: there are always two.
    """
    num_nodes = len(layout.kv_len) + 1  # one for the rows that are over
    num_pages = len(layout.kv_indices) + 1  # such a row looks one up, and drops it
    return max(2, num_nodes), max(2, num_pages), max(2, len(layout.readers))
