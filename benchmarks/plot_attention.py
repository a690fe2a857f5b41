"""Draw benchmarks/results/attention_full.csv against the peers' times: attention_speedup.png.

python benchmarks/plot_attention.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
BATCHES = (1, 16, 64, 128, 256)


def main() -> None:
    with (RESULTS / "attention_full.csv").open() as file:
        stamp = next(file).lstrip("# ").strip()
        ours = {row["shape"]: row for row in csv.DictReader(file)}
    with (RESULTS / "peers_h200_grid.csv").open() as file:
        peers = list(csv.DictReader(file))
    for peer in peers:  # FlashInfer's times may be of our own run: the header of ours says
        name = f"{peer['b']}x{peer['lp']}+{peer['ls']} {peer['hq']}/{peer['hk']}"
        peer["us"] = ours[name]["us"] if name in ours else ""
        peer["best_fi"] = ours[name]["best_fi_us"] if name in ours else ""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True)
    for row, heads in enumerate(("32/32", "32/8")):
        for axis, (peer, label) in zip(
            axes[row], (("best_fi", "best of FlashInfer 0.5.3"), ("vllm_v2", "vLLM 0.2.6 v2")),
            strict=True,
        ):  # fmt: skip
            for shared in ("1024", "8192", "32768"):
                points = [
                    (int(p["b"]), float(p[peer]) / float(p["us"]))
                    for p in peers
                    if p["lp"] == shared and p["ls"] == "128" and f"{p['hq']}/{p['hk']}" == heads
                    and p[peer] and p["us"]
                ]  # fmt: skip
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=f"{shared} shared")
            axis.axhline(1, color="grey", linewidth=0.8)
            axis.set_title(f"{heads} heads: {label} / ours", fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_xticks(BATCHES, [str(b) for b in BATCHES])
            axis.legend(fontsize=8)
            if peer == "vllm_v2":
                axis.set_yscale("log", base=2)
                axis.yaxis.set_major_formatter("{x:g}")
    for axis in axes[1]:
        axis.set_xlabel("sequences (128 unique tokens each)")
    figure.suptitle(
        "Decode attention, head_dim 128, page size 16 (vLLM: an earlier run on such a card)\n"
        + stamp,
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(RESULTS / "attention_speedup.png", dpi=120)


if __name__ == "__main__":
    main()
