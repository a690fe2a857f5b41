"""The KV tree as text, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tree import Node


def describe_tree(roots: Sequence[Node], nodes: Sequence[Node]) -> str:
    """One line per node; leaves side by side that look alike share one.

    Args:
        roots: the roots of a forest.
        nodes: all of its nodes.
    """
    totals = [
        _quantity(len(nodes), "node"),
        _quantity(sum(node.kv_len for node in nodes), "token"),
        _quantity(sum(root.num_sequences for root in roots), "sequence"),
        _quantity(len({page for node in nodes for page in node.pages}), "page") + " in use",
    ]
    return "\n".join(["KV tree: " + ", ".join(totals), *_lines(roots)])


def _lines(roots: Sequence[Node]) -> Iterator[str]:
    """Depth first, like `_depth_first`, over runs of siblings that look alike."""
    waiting = [("", run, is_last) for run, is_last in _runs_backwards(roots)]
    while waiting:
        indent, run, is_last = waiting.pop()
        tee, bar = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        count = f"  x {len(run)}" if len(run) > 1 else ""
        yield f"{indent}{tee}level {len(indent) // 3}: {describe_node(run[0])}{count}"
        children = _runs_backwards(run[0].children)
        waiting += [(indent + bar, below, is_last) for below, is_last in children]


def _runs_backwards(siblings: Sequence[Node]) -> list[tuple[list[Node], bool]]:
    grouped = groupby(siblings, lambda node: (describe_node(node), node if node.children else None))
    runs = [list(run) for _, run in grouped]
    return [(run, run is runs[-1]) for run in reversed(runs)]


def describe_node(node: Node) -> str:
    """Its tokens, sequences and pages, and first_slot where that is not 0."""
    quantities = (node.kv_len, "token"), (node.num_sequences, "sequence"), (len(node.pages), "page")
    first_slot = f" (first_slot {node.first_slot})" if node.first_slot else ""
    return ", ".join(_quantity(*quantity) for quantity in quantities) + first_slot


def _quantity(count: int, word: str) -> str:
    return f"{count:,} {word}" + "s" * (count != 1)
