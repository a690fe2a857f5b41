"""The pictures of docs/algorithm.md, drawn from a real KV tree and the layout of a decode step.

make figures
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from hf_cascade.pages import PageAllocator
from hf_cascade.plan import Layout, Query, build_layout
from hf_cascade.tree import KVTree, token_bytes

FOLDER = Path(__file__).parent
PAGE_SIZE = 4
DOCUMENT, QUESTIONS, SAMPLES, DECODED = 10, (3, 6), (2, 4), 2

# One colour a level, as in all pictures; empty slots stay white.
LEVEL_COLORS = ("#3f6fb5", "#e69138", "#6aa84f")
LEVEL_NAMES = ("document (prefix)", "question (prefix)", "sample (suffix)")
INK = "#333333"


@dataclass(frozen=True)
class Example:
    """Two questions about a document, sampled twice and four times, some steps into decoding.

    Attributes:
        layout: of the next decode step.
        levels: cascade level of each node of the layout.
        parents: the parent of each node, as an index into the layout's nodes; -1 at the root.
    """

    layout: Layout
    levels: list[int]
    parents: list[int]

    @property
    def num_sequences(self) -> int:
        return len(self.layout.leaves)

    @property
    def stock_reads(self) -> int:
        """Tokens of KV that a decode step reads when every sequence has its own copy."""
        reads = [self.layout.kv_len[leaf] for leaf in self.layout.leaves]
        for node in range(len(self.layout.kv_len)):
            reads += [self.layout.kv_len[node]] * len(self.readers(node))
        return sum(reads)

    @property
    def tree_reads(self) -> int:
        """Tokens of KV that a decode step reads when it reads every node once."""
        return sum(self.layout.kv_len)

    def readers(self, node: int) -> list[int]:
        """The sequences that have `node` in their prefix."""
        layout = self.layout
        return layout.readers[layout.reader_indptr[node] : layout.reader_indptr[node + 1]]

    def sequences(self, node: int) -> list[int]:
        """The sequences whose path goes through `node`."""
        return self.readers(node) or [self.layout.leaves.index(node)]

    def pages(self, node: int) -> list[int]:
        """Ids of the pages that hold a node."""
        return self.layout.kv_indices[self.layout.kv_indptr[node] : self.layout.kv_indptr[node + 1]]


def build_example() -> Example:
    tree = KVTree(PageAllocator(PAGE_SIZE))
    document = list(range(DOCUMENT))
    rows = [
        token_bytes(document + [100 * question + i for i in range(length)])
        for question, (length, count) in enumerate(zip(QUESTIONS, SAMPLES, strict=True), start=1)
        for _ in range(count)
    ]
    leaves = tree.open_leaves(tree.insert(rows))
    for step in range(DECODED + 1):
        tree.extend(leaves, [token_bytes([1000 + step])] * len(leaves))
    layout = build_layout(tree, [Query(leaf, leaf.kv_len - 1, leaf.kv_len) for leaf in leaves])
    # Nodes in the order of the layout: first seen on the way down to each sequence's leaf.
    nodes = list(dict.fromkeys(node for leaf in leaves for node in tree.path(leaf)))
    return Example(
        layout,
        levels=[len(tree.path(node)) - 1 for node in nodes],
        parents=[-1 if node.parent is None else nodes.index(node.parent) for node in nodes],
    )


def draw_pages(axes: Axes, example: Example) -> None:
    """The KV tree from left to right, each node as the pages that hold it."""
    layout = example.layout
    left_of_level = (0.0, 16.0, 29.0)
    rows = [
        sum(example.sequences(n)) / len(example.sequences(n)) for n in range(len(layout.kv_len))
    ]
    for node, level in enumerate(example.levels):
        x, y, color = left_of_level[level], -1.7 * rows[node], LEVEL_COLORS[level]
        pages = example.pages(node)
        for place, page in enumerate(pages):
            for slot in range(PAGE_SIZE):
                token = place * PAGE_SIZE + slot - layout.first_slot[node]
                held = 0 <= token < layout.kv_len[node]
                axes.add_patch(
                    Rectangle(
                        (x + place * (PAGE_SIZE + 0.5) + slot, y - 0.5), 1, 1, lw=0.8, ec="white",
                        fc=color if held else "#e8e8e8",
                    )
                )  # fmt: skip
            axes.text(
                x + place * (PAGE_SIZE + 0.5) + PAGE_SIZE / 2, y + 0.62, f"page {page}",
                ha="center", va="bottom", fontsize=7, color=INK,
            )  # fmt: skip
        parent = example.parents[node]
        if parent >= 0:
            start = left_of_level[level - 1] + len(example.pages(parent)) * (PAGE_SIZE + 0.5) - 0.4
            axes.add_patch(
                FancyArrowPatch(
                    (start, -1.7 * rows[parent]), (x - 0.15, y), arrowstyle="-", lw=1.2, color=INK,
                    connectionstyle="arc3,rad=0",
                )
            )  # fmt: skip
    for level, name in enumerate(LEVEL_NAMES):
        nodes = [node for node, its in enumerate(example.levels) if its == level]
        tokens = " + ".join(str(layout.kv_len[node]) for node in nodes[:2])
        what = f"{len(nodes)} leaves of {layout.kv_len[nodes[0]]}" if level == 2 else tokens
        axes.text(
            left_of_level[level], 1.9, f"level {level}: {name}\n{what} tokens",
            fontsize=9, color=LEVEL_COLORS[level], fontweight="bold", va="bottom",
        )  # fmt: skip
    axes.set_xlim(-0.5, 36.5)
    axes.set_ylim(-1.7 * (example.num_sequences - 1) - 1.2, 3.9)
    axes.set_aspect("equal")
    axes.axis("off")


def draw_reads(axes: Axes, example: Example) -> None:
    """A decode step as the matrix of who attends to what; a box is read once for all its rows."""
    layout, left = example.layout, 0
    for node, level in enumerate(example.levels):
        rows, width = example.sequences(node), layout.kv_len[node]
        top, height = -min(rows), max(rows) - min(rows) + 1
        axes.add_patch(
            Rectangle(
                (left + 0.08, top - height + 0.08), width - 0.16, height - 0.16, lw=1.6, ec=INK,
                fc=LEVEL_COLORS[level],
            )
        )  # fmt: skip
        for row in rows:
            for token in range(width):
                axes.plot(left + token + 0.5, -row - 0.5, ".", ms=4, color="white")
        left += width
    for row in range(example.num_sequences):
        axes.text(-0.5, -row - 0.5, f"sequence {row}", ha="right", va="center", fontsize=8)
        states = example.levels[layout.leaves[row]] + 1
        axes.annotate(
            f"merge {states} states", (left + 0.3, -row - 0.5), xytext=(left + 2.2, -row - 0.5),
            va="center", fontsize=8, color=INK, arrowprops={"arrowstyle": "<-", "color": INK},
        )  # fmt: skip
    axes.text(
        left / 2, 0.4,
        f"each box is read once: {example.tree_reads} tokens of KV a step; "
        f"each dot by itself, as stock reads: {example.stock_reads}",
        ha="center", va="bottom", fontsize=9, color=INK,
    )  # fmt: skip
    axes.text(left / 2, -example.num_sequences - 0.35, "KV tokens, node after node",
              ha="center", va="top", fontsize=8, color=INK)  # fmt: skip
    axes.set_xlim(-5, left + 8)
    axes.set_ylim(-example.num_sequences - 1.4, 1.6)
    axes.axis("off")


def main(suffix: str = "svg") -> None:
    example = build_example()
    # The same text and ids in the file on every run.
    with matplotlib.rc_context({"svg.hashsalt": "hf_cascade", "svg.fonttype": "path"}):
        for name, draw, size in (
            ("kv_tree", draw_pages, (9, 3.6)),
            ("decode_step", draw_reads, (9, 2.9)),
        ):
            figure = Figure(figsize=size, layout="constrained", facecolor="white")
            draw(figure.subplots(), example)
            metadata = {"Date": None} if suffix == "svg" else None
            figure.savefig(FOLDER / f"{name}.{suffix}", dpi=130, metadata=metadata)


if __name__ == "__main__":
    main()
