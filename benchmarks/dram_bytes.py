"""What a layer's attention moves, counted by the hardware: is each KV byte read from memory once?

    python -m benchmarks.dram_bytes

Runs a layer of a decode step of each shape under Nsight Compute (`ncu`, of the CUDA toolkit, on
PATH), after a layer whose answer is checked. `KV` is what has to be read, each token of the tree
once; `scratch` the partial states, which attention writes and the merge reads, counted from the
work list. Fails where attention reads more than 1.1 x KV.

ncu empties the caches before each kernel, so DRAM's counters see all that attention reads. The
merge's too, which outside of ncu finds its states in L2.

The table goes to dram_bytes.csv in $OUT or benchmarks/results: of each kernel the bytes that it
read from DRAM, wrote there (L2 keeps the rest), and moved to and from L2.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from hf_cascade.ops.cascade import HEADER_WORDS
from torch import Tensor

from benchmarks.bench_attention import HEAD_DIM, MAX_ERROR, build, error, grid, write_results

SHAPES = ("64x8192+128 32/8", "256x1024+128 32/32", "16x32768+128 32/32", "1x32768+128 32/8")
KERNELS = {
    "append": "append_kv_kernel",
    "attention": "cascade_attention_kernel",
    "merge": "merge_paths_kernel",
}
METRICS = {
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "l2": "lts__t_bytes.sum",
}
LAYERS = 2  # of a shape that ncu sees: the checked one, and the one that counts
LEAST_READ, MOST_READ = 0.95, 1.1  # x KV; less is a count that can't be
STATE_BYTES = HEAD_DIM * 2 + 8  # of a row: fp16, lse and scale


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", metavar="FILE", type=Path, help="what ncu watches: the layers; counts go to FILE"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("it takes a GPU")
    if not shutil.which("ncu"):
        parser.error("it takes ncu, of the CUDA toolkit, on PATH")
    if options.run:
        options.run.write_text(json.dumps(run_layers()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        counts, log = Path(folder) / "counts.json", Path(folder) / "ncu.csv"
        failed = subprocess.run(ncu_command(log, counts)).returncode
        lines = log.read_text().splitlines() if log.exists() else []
        if failed or not counts.exists():
            print(*lines[-20:], sep="\n")
            raise SystemExit("ncu failed")
        rows = make_rows(json.loads(counts.read_text()), read_launches(lines))
    print_rows(rows)
    save(rows)
    return 0 if all(map(is_read_once, rows)) else 1


def ncu_command(log: Path, counts: Path) -> list[str]:
    return [
        "ncu", "--metrics", ",".join(METRICS.values()), "--csv", "--print-units", "base",
        "--print-kernel-base", "function", "--kernel-name", "regex:" + "|".join(KERNELS.values()),
        "--cache-control", "all", "--clock-control", "none", "--log-file", str(log),
        sys.executable, "-m", "benchmarks.dram_bytes", "--run", str(counts),
    ]  # fmt: skip


# ------------------------------------------------------------------ under ncu


def run_layers() -> list[dict]:
    """Launch LAYERS layers of each shape; what each has to move."""
    shapes = {shape.name: shape for shape in grid("full")}
    counts = []
    for name in SHAPES:
        shape = shapes[name]
        step = build(shape, l2_bytes=0)
        wrong = error(step, shape)  # one layer
        if not wrong < MAX_ERROR:
            raise SystemExit(f"{name}: the answer is off by {wrong:.1e}")
        work = step.work()
        step.layer(1, work)
        torch.cuda.synchronize()
        states = num_scratch_states(work, shape.batch)
        scratch_bytes = states * shape.num_q_heads * STATE_BYTES
        counts.append({"shape": name, "kv": shape.kv_bytes(), "scratch": scratch_bytes})
        del step
        torch.cuda.empty_cache()
    return counts


def num_scratch_states(work: Tensor, num_seqs: int) -> int:
    """Of a decoding step's list: partial states of all heads. A lone one is a row of the output."""
    begin = HEADER_WORDS + num_seqs + 1
    path_indptr = work[begin : begin + num_seqs + 1].tolist()
    lengths = [after - before for before, after in pairwise(path_indptr)]
    return sum(length for length in lengths if length > 1)


# ------------------------------------------------------------------ what ncu says


def read_launches(lines: Iterable[str]) -> list[tuple[str, dict[str, float]]]:
    """Each launch's kernel and its metrics, named as in KERNELS and METRICS, in order.

    ncu writes a line a metric, among others that are no table.
    """
    launches: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        kernel = next(key for key, name in KERNELS.items() if name in row["Kernel Name"])
        metric = next(key for key, name in METRICS.items() if name == row["Metric Name"])
        value, unit = row["Metric Value"].replace(",", ""), row["Metric Unit"]
        if unit != "byte":
            raise ValueError(f"{row['Metric Name']} must be in byte, got {value} {unit}")
        launches.setdefault(row["ID"], (kernel, {}))[1][metric] = float(value)
    return list(launches.values())


def make_rows(counts: list[dict], launches: list[tuple[str, dict[str, float]]]) -> list[dict]:
    """The table: of each shape the last layer's kernels."""
    expected = list(KERNELS) * LAYERS * len(counts)
    if [kernel for kernel, _ in launches] != expected:
        raise ValueError(f"ncu must see {expected}, got {[kernel for kernel, _ in launches]}")
    rows = []
    for i, count in enumerate(counts):
        end = (i + 1) * LAYERS * len(KERNELS)
        layer = dict(launches[end - len(KERNELS) : end])
        row = dict(count) | {"ratio": layer["attention"]["read"] / count["kv"]}
        for kernel, metrics in layer.items():
            row |= {f"{kernel}_{metric}": metrics[metric] for metric in METRICS}
        rows.append(row)
    return rows


def save(rows: list[dict]) -> None:
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version (\S+)", version)
    where = f"{torch.cuda.get_device_name()} torch {torch.__version__}"
    where += f" ncu {found[1] if found else 'of unknown version'}; bytes of a layer"
    write_results(rows, "dram_bytes.csv", where, digits=9)


def is_read_once(row: dict) -> bool:
    return LEAST_READ < row["ratio"] <= MOST_READ


def print_rows(rows: list[dict]) -> None:
    columns = ("kv", "attention_read", "attention_written", "attention_l2", "scratch", "merge_l2")
    titles = ("KV", "DRAM read", "written", "L2", "scratch", "merge L2")
    print(f"{'shape, MB of a layer':22}", *(f"{title:>9}" for title in titles), "read / KV")
    for row in rows:
        cells = (f"{row[column] / 1e6:9.2f}" for column in columns)
        note = "" if is_read_once(row) else "  not once"
        print(f"{row['shape']:22}", *cells, f"{row['ratio']:9.3f}{note}")


if __name__ == "__main__":
    sys.exit(main())
