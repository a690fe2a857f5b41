"""What `benchmarks/dram_bytes.py` makes of ncu's table and of a work list, without a GPU."""

import pytest
import torch
from cases import Tree
from host_sources import COMPILER
from work_lists import HEADER, compile_work_list, make_list, paged

from benchmarks.bench_attention import grid
from benchmarks.dram_bytes import (
    HEADER_WORDS,
    KERNELS,
    METRICS,
    SHAPES,
    is_read_once,
    make_rows,
    num_scratch_states,
    read_launches,
)

TITLES = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
    "Block Size", "Grid Size", "Device", "CC", "Section Name", "Metric Name", "Metric Unit",
    "Metric Value",
)  # fmt: skip


def line(*cells: object) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


def table(launches: list[tuple[str, tuple[int, int, int]]], unit: str = "byte") -> list[str]:
    """As ncu 2025 writes it, numbers with their commas."""
    lines = ["==PROF== Connected to process 77 (/usr/bin/python3.12)", line(*TITLES)]
    for i, (kernel, values) in enumerate(launches):
        lines.insert(1, f'==PROF== Profiling "{kernel}" - {i}: 0%....50%....100% - 1 pass')
        place = (i, 77, "python3.12", "127.0.0.1", kernel, 1, 7, "(416, 1, 1)", "(132, 1, 1)", 0)
        place += ("9.0", "Command line profiler metrics")
        for metric, value in zip(METRICS.values(), values, strict=True):
            lines.append(line(*place, metric, unit, f"{value:,}"))
    return [*lines, "==PROF== Disconnected from process 77"]


def test_a_launch_has_its_metrics():
    launches = read_launches(
        table([("append_kv_kernel", (1, 2, 3)), ("merge_paths_kernel", (67_108_864, 0, 9_999))])
    )
    assert launches == [
        ("append", {"read": 1, "written": 2, "l2": 3}),
        ("merge", {"read": 67_108_864, "written": 0, "l2": 9_999}),
    ]


def test_numbers_of_another_unit_are_refused():
    with pytest.raises(ValueError, match="must be in byte, got 1 Mbyte"):
        read_launches(table([("append_kv_kernel", (1, 2, 3))], unit="Mbyte"))


def test_the_last_layer_of_a_shape_counts():
    layers = [(name, (100 * i, i, 0)) for i in range(4) for name in KERNELS.values()]
    counts = [{"shape": shape, "kv": 100, "scratch": 8} for shape in ("one", "other")]
    rows = make_rows(counts, read_launches(table(layers)))
    assert [row["shape"] for row in rows] == ["one", "other"]
    assert [row["ratio"] for row in rows] == [1, 3]
    assert [row["merge_written"] for row in rows] == [1, 3]


def test_once_is_neither_twice_nor_never():
    ratios = (0.0, 0.9, 1.0, 1.09, 1.11, 2.0, float("nan"))
    assert [x for x in ratios if is_read_once({"ratio": x})] == [1.0, 1.09]


@pytest.mark.parametrize("lost", [0, 4])
def test_a_launch_that_ncu_missed_is_noticed(lost):
    layers = [(name, (1, 1, 1)) for _ in range(2) for name in KERNELS.values()]
    del layers[lost]
    counts = [{"shape": "one", "kv": 100, "scratch": 8}]
    with pytest.raises(ValueError, match="ncu must see"):
        make_rows(counts, read_launches(table(layers)))


def test_shapes_are_of_the_benchmark():
    shapes = {shape.name: shape for shape in grid("full")}
    assert set(SHAPES) <= shapes.keys()
    assert shapes["64x8192+128 32/8"].kv_bytes() == (8192 + 64 * 128) * 2 * 8 * 128 * 2


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
def test_states_in_scratch_are_those_that_are_merged(tmp_path):
    # Two read a shared node and their leaf, one its leaf alone, which is too short to be cut.
    tree = Tree("", (None, 0, 0, None), (40, 30, 30, 30), (1, 2, 3), group_size=4, head_dim=128,
                page_size=16)  # fmt: skip
    work = make_list(compile_work_list(tmp_path), paged(tree))
    assert len(HEADER) == HEADER_WORDS
    assert num_scratch_states(torch.from_numpy(work.words), len(tree.leaves)) == 4
