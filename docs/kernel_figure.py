"""The picture of docs/kernels.md: what a CTA of the attention kernel owns, moves and computes.

make figures
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).parent
CSRC = FOLDER.parent / "csrc"
HEADERS = ("tiles.cuh", "attention_traits.cuh", "split_rule.cuh")

SHARED, LEAF, INK = "#3f6fb5", "#6aa84f", "#333333"  # prefix and suffix, as in tree_figures.py


def constant(name: str) -> int:
    """An integer of the kernels' headers, as they state it."""
    for header in HEADERS:
        text = (CSRC / header).read_text(encoding="utf-8")
        if found := re.search(rf"constexpr int {name} = (\d+);", text):
            return int(found[1])
    raise ValueError(f"csrc has no constexpr int {name}")


def stage_tokens() -> int:
    """Tokens of K, and of V, in a stage, at head_dim 128."""
    text = (CSRC / "tiles.cuh").read_text(encoding="utf-8")
    found = re.search(r"return head_dim <= 128 \? (\d+) :", text)
    if not found:
        raise ValueError("csrc/tiles.cuh does not say how long a stage is")
    return int(found[1])


def draw(axes: Axes) -> None:
    warps, leaf_warps = constant("kMatrixWarps"), constant("kLeafWarps")
    rows, leaf_rows = constant("kRowsPerTile"), constant("kMaxLeafRows")
    tokens, leaf_tokens = stage_tokens(), constant("kLeafTokens")
    titles = (
        ("memory", 1.2), ("shared memory", 7.0), ("warps of a CTA", 10.6), ("left behind", 15)
    )  # fmt: skip
    for title, x in titles:
        axes.text(x, 5.9, title, ha="center", fontsize=9, fontweight="bold", color=INK)

    box(axes, (1.2, 4.7), (2.3, 1.5), "KV of shared\nnodes;\nreaders' q", SHARED)
    box(axes, (4.0, 4.7), (1.5, 1.5), "producer\n(1 warp)", SHARED)
    stage = f"ring of stages:\n{tokens} tokens of K, V\n\n{rows} rows of q"
    box(axes, (7.0, 4.7), (2.5, 1.5), stage, SHARED)
    text = f"{warps} matrix warps\n{rows} query rows:\nS = q K$^T$, softmax,\nO += P V"
    box(axes, (10.6, 4.7), (2.9, 1.5), text, SHARED)

    box(axes, (1.2, 1.6), (2.3, 1.5), "KV of leaves,\nof nodes with\none reader", LEAF)
    for i in range(leaf_warps):
        y = 2.6 - i
        text = f"own ring: {leaf_tokens} tokens" if i == 0 else "own ring"
        box(axes, (7.0, y), (2.5, 0.7), text, LEAF)
        text = f"leaf warp: up to {leaf_rows} rows" if i == 0 else "leaf warp"
        box(axes, (10.6, y), (2.9, 0.7), text, LEAF)
        arrow(axes, (2.35, 1.6 + 0.35 * (1 - i)), (5.75, y), LEAF)
        arrow(axes, (8.25, y), (9.15, y), LEAF)
    arrow(axes, (2.35, 4.7), (3.25, 4.7), SHARED)
    arrow(axes, (4.75, 4.7), (5.75, 4.7), SHARED)
    arrow(axes, (8.25, 4.7), (9.15, 4.7), SHARED)

    text = "partial states (out, lse)\nof rows that have several:\nmerged by the next kernel"
    box(axes, (15, 4.7), (3.4, 1.5), text, INK)
    box(axes, (15, 1.6), (3.4, 1.5), "out and lse\nof rows that have one state", INK)
    for start in (4.7, 1.6):
        for end in (4.7, 1.6):
            arrow(axes, (12.05, start), (13.3, end), SHARED if start > 3 else LEAF)
    axes.set_xlim(-0.1, 16.8)
    axes.set_ylim(0.1, 6.3)
    axes.axis("off")


def box(
    axes: Axes, center: tuple[float, float], size: tuple[float, float], text: str, color: str
) -> None:
    (x, y), (width, height) = center, size
    style, corner = "round,pad=0,rounding_size=0.1", (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(corner, width, height, style, lw=1.4, ec=color, fc="white"))
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, lw=1.2, color=color)
    )


def main(suffix: str = "svg") -> None:
    # The same text and ids in the file on every run.
    with matplotlib.rc_context({"svg.hashsalt": "hf_cascade", "svg.fonttype": "path"}):
        figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
        draw(figure.subplots())
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(FOLDER / f"attention_kernel.{suffix}", dpi=130, metadata=metadata)


if __name__ == "__main__":
    main()
