"""How fast `cascade_attention` is, against the floor that memory and matrix units set.

    python benchmarks/bench_attention.py --grid quick|full [--peers]

Measures the roofs of this card first (read bandwidth, a bf16 matmul), checks each shape's answer
against float32 torch, then times replays of a CUDA graph that decodes one step in several layers,
KV rotated past four times the L2, median of the replays. A step makes its work list once for all
layers: `us` has a layer's share of it, `list_us` is the list alone.

`--peers` times FlashInfer's compositions (flashinfer_peers.py) beside ours, in shuffled order.
Without it the peers' times are those of benchmarks/results/peers_h200_grid.csv, measured earlier on
the same kind of card by the same method: FlashInfer 0.5.3 (best of six compositions) and vLLM 0.2.6
PagedAttention. The CSV's first line says which.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hf_cascade.ops import kernels
from torch import Tensor

from hf_cascade import ops

RESULTS = Path(__file__).resolve().parent / "results"
HEAD_DIM, PAGE_SIZE = 128, 16
DTYPE = torch.bfloat16
MAX_ERROR = 1e-2  # relative to float32; bfloat16's own is 2e-3
LAYERS = 32  # of one step, which makes one work list; as many as Llama-3.1-8B has


@dataclass(frozen=True)
class Shape:
    """A KV tree by levels: `levels[i]` nodes of `lengths[i]` tokens; the last level is the leaves.

    The nodes of a level are shared evenly by the sequences; loners read no prefix.
    """

    name: str
    levels: tuple[int, ...]
    lengths: tuple[int | tuple[int, ...], ...]
    num_q_heads: int
    num_kv_heads: int
    loners: int = 0

    @property
    def batch(self) -> int:
        return self.levels[-1]

    def nodes(self) -> list[tuple[int, range]]:
        """(kv_len, readers) of every node, leaves last."""
        found = []
        sharing = self.batch - self.loners
        for count, length in zip(self.levels[:-1], self.lengths[:-1], strict=True):
            per_node = sharing // count
            found += [(length, range(i * per_node, (i + 1) * per_node)) for i in range(count)]
        own = self.lengths[-1]
        own = own if isinstance(own, tuple) else (own,) * self.batch
        return found + [(length, range(0)) for length in own]

    def kv_bytes(self) -> int:
        """K and V of every token of the tree, once."""
        tokens = sum(length for length, _ in self.nodes())
        return 2 * tokens * self.num_kv_heads * HEAD_DIM * DTYPE.itemsize

    def floor_us(self, roofs: Roofs) -> tuple[float, float]:
        """(memory, compute): every live KV byte once, q and out; 4 flops a row, token and dim."""
        seen = sum(length * max(1, len(readers)) for length, readers in self.nodes())
        q_bytes = 2 * self.batch * self.num_q_heads * HEAD_DIM * DTYPE.itemsize
        flops = 4 * seen * self.num_q_heads * HEAD_DIM
        return (self.kv_bytes() + q_bytes) / roofs.bytes_per_us, flops / roofs.flops_per_us


@dataclass(frozen=True)
class Roofs:
    bytes_per_us: float
    flops_per_us: float


def grid(which: str) -> list[Shape]:
    def cell(batch: int, shared: int, unique: int, hq: int, hk: int) -> Shape:
        name = f"{batch}x{shared}+{unique} {hq}/{hk}"
        return Shape(name, (1, batch), (shared, unique), hq, hk)

    heads = ((32, 32), (32, 8))
    ragged = tuple(1 + 2047 * i // 63 for i in range(64))
    extra = [
        cell(8, 4000, 16, 8, 1),
        cell(128, 128, 3, 32, 32),
        cell(128, 128, 3, 32, 8),
    ]
    for hq, hk in heads:
        extra += [
            Shape(f"tree 1-4-16-64 {hq}/{hk}", (1, 4, 16, 64), (2048, 512, 256, 128), hq, hk),
            Shape(f"ragged 1-64 {hq}/{hk}", (1, 64), (4096, ragged), hq, hk),
            Shape(f"8 prefixes x 16 {hq}/{hk}", (8, 128), (2048, 256), hq, hk),
            Shape(f"half share nothing {hq}/{hk}", (1, 256), (4096, 512), hq, hk, loners=128),
            Shape(f"depth 32 {hq}/{hk}", (1,) * 31 + (64,), (64,) * 31 + (128,), hq, hk),
        ]
    if which == "quick":
        cells = [
            *((1, 1024, 128), (1, 8192, 512), (1, 32768, 128), (16, 1024, 128), (16, 8192, 512)),
            *((64, 8192, 128), (16, 32768, 128), (256, 1024, 128), (64, 1024, 2048)),
            *((256, 8192, 256), (256, 32768, 128)),
        ]
        return [cell(*c, *h) for h in heads for c in cells] + extra[:4]
    return [
        cell(batch, shared, unique, hq, hk)
        for hq, hk in heads
        for shared in (1024, 8192, 32768)
        for unique in (128, 256, 512, 2048)
        for batch in (1, 16, 64, 128, 256)
    ] + extra


@dataclass(frozen=True)
class Step:
    """The device tensors of one decode step, and several layers' pools over one page table."""

    args: dict[str, Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    pools: tuple[tuple[Tensor, Tensor], ...]
    sm_scale: float = HEAD_DIM**-0.5

    def work(self) -> Tensor:
        names = ("q_indptr", "kv_indptr", "kv_indices", "kv_len", "first_slot", "leaves")
        names += ("reader_indptr", "readers")
        return ops.work_list(
            *(self.args[name] for name in names),
            page_size=PAGE_SIZE,
            num_q_heads=self.q.shape[1],
            num_kv_heads=self.k.shape[1],
            head_dim=HEAD_DIM,
        )

    def layer(self, layer: int, work: Tensor | None) -> tuple[Tensor, Tensor]:
        k_pool, v_pool = self.pools[layer]
        return ops.cascade_attention(
            self.q, self.k, self.v, k_pool, v_pool, self.slots, **self.args,
            sm_scale=self.sm_scale, work=work,
        )  # fmt: skip

    def run(self) -> None:
        work = self.work()
        for layer in range(self.num_layers):
            self.layer(layer % len(self.pools), work)

    @property
    def num_layers(self) -> int:
        return max(LAYERS, len(self.pools))


def build(shape: Shape, l2_bytes: int) -> Step:
    nodes = shape.nodes()
    random = torch.Generator(device="cuda").manual_seed(0)
    pages = [-(-length // PAGE_SIZE) for length, _ in nodes]
    total = sum(pages)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).int()

    def indptr(counts: Sequence[int]) -> Tensor:
        return torch.tensor([0, *counts]).cumsum(0).int().cuda()

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=DTYPE, device="cuda", generator=random)

    batch = shape.batch
    leaves = torch.arange(len(nodes) - batch, len(nodes))
    kv_len = torch.tensor([length for length, _ in nodes])
    page_end = torch.tensor(pages).cumsum(0)
    last = (page_end[leaves] - 1).long()
    slots = order[last] * PAGE_SIZE + ((kv_len[leaves] - 1) % PAGE_SIZE).int()
    args = {
        "q_indptr": torch.arange(batch + 1).int().cuda(),
        "kv_indptr": indptr(pages),
        "kv_indices": order.cuda(),
        "kv_len": kv_len.int().cuda(),
        "first_slot": torch.zeros(len(nodes), dtype=torch.int32, device="cuda"),
        "leaves": leaves.int().cuda(),
        "reader_indptr": indptr([len(readers) for _, readers in nodes]),
        "readers": torch.tensor([s for _, r in nodes for s in r], dtype=torch.int32).cuda(),
    }
    pool_shape = (total, shape.num_kv_heads, PAGE_SIZE, HEAD_DIM)
    pool_bytes = 2 * total * shape.num_kv_heads * PAGE_SIZE * HEAD_DIM * DTYPE.itemsize
    # Enough pools that a layer's KV has left the L2 when its turn comes again.
    num_pools = min(32, max(2, -(-4 * l2_bytes // pool_bytes)))
    return Step(
        args=args,
        q=normal(batch, shape.num_q_heads, HEAD_DIM),
        k=normal(batch, shape.num_kv_heads, HEAD_DIM),
        v=normal(batch, shape.num_kv_heads, HEAD_DIM),
        slots=slots.int().cuda(),
        pools=tuple((normal(*pool_shape), normal(*pool_shape)) for _ in range(num_pools)),
    )


def error(step: Step, shape: Shape) -> float:
    """Largest relative error of some sequences against float32 torch on the same values."""
    out, _ = step.layer(0, step.work())
    k_pool, v_pool = step.pools[0]
    nodes = shape.nodes()
    bounds = step.args["kv_indptr"].tolist()
    worst = 0.0
    for seq in {0, shape.batch // 2, shape.batch - 1}:
        path = [n for n, (_, readers) in enumerate(nodes) if seq in readers]
        path.append(len(nodes) - shape.batch + seq)
        kv = []
        for pool in (k_pool, v_pool):
            parts = [
                pool[step.args["kv_indices"][bounds[n] : bounds[n + 1]].long()]
                .transpose(0, 1)
                .flatten(1, 2)[:, : nodes[n][0]]
                for n in path
            ]
            kv.append(torch.cat(parts, dim=1).float())  # [num_kv_heads, tokens, head_dim]
        group = shape.num_q_heads // shape.num_kv_heads
        q = step.q[seq].float().unflatten(0, (shape.num_kv_heads, group))
        scores = q @ kv[0].mT * step.sm_scale
        true = (scores.softmax(-1) @ kv[1]).flatten(0, 1)
        difference = (out[seq].float() - true).norm() / true.norm()
        worst = max(worst, difference.item() if difference.isfinite() else float("inf"))
    return worst


def measure_roofs() -> Roofs:
    """Reading 4 GB, and an 8192^3 bf16 matmul on random data."""
    data = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    read_us = replay_us(lambda: data.sum(), 1)
    a, b = (torch.randn(8192, 8192, dtype=DTYPE, device="cuda") for _ in range(2))
    matmul_us = replay_us(lambda: a @ b, 1)
    return Roofs(data.nbytes / read_us, 2 * 8192**3 / matmul_us)


def replay_us(
    run: Callable[[], object], per_replay: int, replays: int = 25, awake_s: float = 0.1
) -> float:
    """Median microseconds of a captured run, divided by per_replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    # An idle card clocks down: small shapes need it awake.
    awake = time.monotonic() + awake_s
    while time.monotonic() < awake:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000)
    return statistics.median(times) / per_replay


def race(step: Step, rivals: dict[str, Callable[[], None]], replays: int) -> dict[str, float]:
    """Microseconds a layer of "ours" and of each rival's step, timed alike, in shuffled order."""
    runs, times = {"ours": step.run} | rivals, {}
    for name in random.sample(list(runs), len(runs)):
        times[name] = replay_us(runs[name], step.num_layers, replays, awake_s=0.05)
    return times


def earlier_peers() -> dict[str, float]:
    """Microseconds of FlashInfer's best composition by shape, from an earlier run."""
    with (RESULTS / "peers_h200_grid.csv").open() as file:
        return {
            f"{row['b']}x{row['lp']}+{row['ls']} {row['hq']}/{row['hk']}": float(row["best_fi"])
            for row in csv.DictReader(file)
            if row["best_fi"]
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", choices=("quick", "full"), default="quick")
    parser.add_argument("--only", help="a part of the shape's name; nothing is saved")
    parser.add_argument(
        "--peers", nargs="?", type=int, const=9, default=0, metavar="N",
        help="time FlashInfer in this run too, N replays of ours and each of its own (default 9)",
    )  # fmt: skip
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it takes a GPU")
    peers, source = None, "FlashInfer's times from peers_h200_grid.csv, an earlier run"
    if arguments.peers:
        sys.path.insert(0, str(Path(__file__).parent))  # where it is not run as a script
        try:
            import flashinfer_peers as peers
        except ImportError as missing:
            parser.error(f"--peers needs flashinfer-python and apache-tvm-ffi: {missing}")
        source = f"FlashInfer {peers.VERSION} timed in this run"
    status = kernels.load()
    properties = torch.cuda.get_device_properties(0)
    print(f"# {properties.name}, torch {torch.__version__}, {status.reason}; {source}")
    roofs = measure_roofs()
    print(f"# reads {roofs.bytes_per_us / 1e6:.2f} TB/s, matmul {roofs.flops_per_us / 1e6:.0f}"
          f" TFLOP/s; head_dim {HEAD_DIM}, page_size {PAGE_SIZE}, {DTYPE}")  # fmt: skip
    earlier, rows = earlier_peers(), []
    print(f"{'shape':28} {'mem':>7} {'comp':>7} {'us':>8} {'x floor':>7} {'list':>6} "
          f"{'best FI':>8} {'FI/us':>6} {'GB/s':>6} {'TF/s':>5} {'error':>8}")  # fmt: skip
    for shape in grid(arguments.grid):
        if arguments.only and arguments.only not in shape.name:
            continue
        step = build(shape, properties.L2_cache_size)
        wrong = error(step, shape)
        if not wrong < MAX_ERROR:
            raise SystemExit(f"{shape.name}: the answer is off by {wrong:.1e}")
        memory, compute = shape.floor_us(roofs)
        rivals = peers.contenders(shape, step, step.layer(0, step.work())[0]) if peers else {}
        times = race(step, rivals, arguments.peers or 25)
        us = times.pop("ours")
        list_us = replay_us(step.work, 1)
        floor = max(memory, compute)
        nan = float("nan")
        best = min(times.values(), default=nan) if peers else earlier.get(shape.name, nan)
        rows.append(
            {
                "shape": shape.name, "mem_us": memory, "compute_us": compute, "us": us,
                "list_us": list_us, "layers": step.num_layers, "floor_ratio": us / floor,
                "best_fi_us": best, "speedup": best / us, "error": wrong,
            }
            | {f"fi_{name}": times.get(name, nan) for name in (peers.NAMES if peers else ())}
        )  # fmt: skip
        print(f"{shape.name:28} {memory:7.1f} {compute:7.1f} {us:8.1f} {us / floor:7.2f} "
              f"{list_us:6.1f} {best:8.1f} {best / us:6.2f} "
              f"{memory * roofs.bytes_per_us / us / 1e3:6.0f} "
              f"{compute * roofs.flops_per_us / us / 1e6:5.0f} {wrong:8.1e}"
              f"  {min(times, key=times.__getitem__, default='')}")  # fmt: skip
        if not arguments.only:  # what there is, should we be stopped
            card = f"{properties.name} torch {torch.__version__}"
            save(rows, arguments.grid, card, roofs, source)
        del step, rivals
        torch.cuda.empty_cache()
    summarize(rows)


def save(rows: list[dict], which: str, card: str, roofs: Roofs, source: str) -> None:
    where = (
        f"{card} reads {roofs.bytes_per_us / 1e6:.2f} TB/s"
        f" matmul {roofs.flops_per_us / 1e6:.0f} TFLOP/s; {source}"
    )
    write_results(rows, f"attention_{which}.csv", where)


def write_results(rows: list[dict], name: str, where: str, digits: int = 4) -> None:
    """A table to $OUT, else to benchmarks/results/, under a line with the date and `where`."""
    date = datetime.datetime.now(datetime.timezone.utc).date()
    with (Path(os.environ.get("OUT", RESULTS)) / name).open("w", newline="") as file:
        file.write(f"# {date} {where}\n")
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        for row in rows:
            cells = {k: f"{v:.{digits}g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(cells)


def summarize(rows: list[dict]) -> None:
    known = [row for row in rows if row["speedup"] == row["speedup"]]
    if known:
        mean = statistics.geometric_mean([row["speedup"] for row in known])
        losing = [r["shape"] for r in known if r["us"] > 1.03 * r["best_fi_us"] + 1]
        print(f"# best FlashInfer / ours: geometric mean {mean:.2f} over {len(known)} shapes; "
              f"{len(losing)} slower than 1.03 x + 1 us: {losing}")  # fmt: skip
    missed = []
    for row in rows:
        floor = max(row["mem_us"], row["compute_us"])
        bound = row["compute_us"] <= row["mem_us"] / 2
        allowed = floor + 7 if floor < 50 else (1.15 if bound else 1.40) * floor
        if row["us"] > allowed:
            missed.append(row["shape"])
    print(f"# over the floor's allowance: {len(missed)} of {len(rows)}: {missed}")


if __name__ == "__main__":
    main()
