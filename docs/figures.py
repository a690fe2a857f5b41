"""The README's picture, drawn from benchmarks/results/generate_cpu.json: `make figures`."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DATA = Path(__file__).parents[1] / "benchmarks" / "results" / "generate_cpu.json"
PICTURE = Path(__file__).parent / "generate_cpu.png"
COLORS = {"stock": "tab:gray", "patched": "tab:green"}


def main() -> None:
    results = json.loads(DATA.read_text(encoding="utf-8"))
    settings, runs = results["settings"], results["runs"]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    draw(time_axes, runs, "seconds", 1, "seconds per call")
    draw(memory_axes, runs, "kv_bytes", 1e6, "KV cache, MB")
    figure.suptitle(
        f"N samples of one prompt: {settings['model']}, {settings['prompt tokens']} prompt tokens, "
        f"{settings['new tokens']} new, {settings['torch threads']} CPU threads",
        fontsize=10,
    )
    figure.savefig(PICTURE, dpi=150)


def draw(axes: Axes, runs: list[dict], quantity: str, unit: float, label: str) -> None:
    """Stock and patched over the number of samples, with the last ratio written beside it."""
    samples = [run["samples"] for run in runs]
    for side, color in COLORS.items():
        values = [run[side][quantity] / unit for run in runs]
        axes.plot(samples, values, marker="o", color=color, label=side)
    last = runs[-1]
    axes.annotate(
        f"{last['stock'][quantity] / last['patched'][quantity]:.1f}x less",
        (samples[-1], last["patched"][quantity] / unit),
        textcoords="offset points",
        xytext=(0, 8),
        ha="right",
        color=COLORS["patched"],
    )
    axes.set(xlabel="samples (num_return_sequences)", ylabel=label, xticks=samples)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
