"""The code in the docs runs, and the numbers beside the pictures are those of the pictures."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

import pytest

from docs.kernel_figure import constant, stage_tokens
from docs.tree_figures import DOCUMENT, build_example

DOCS = Path(__file__).parents[1] / "docs"
MODEL = Path(__file__).parents[1] / "examples" / "chain_of_sums"


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def python_in(page: str) -> str:
    """All Python of a page, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE)
    assert blocks
    return "\n".join(blocks).replace("path/to/model", str(MODEL))


def test_the_quick_start_runs(capsys):
    names = {}
    exec(python_in("index.md"), names)
    assert "KV tree" in capsys.readouterr().out
    assert names["out"].shape[0] == 2
    assert len(names["result"].samples) <= 16


def test_the_merge_is_the_state_of_the_union():
    exec(python_in("algorithm.md"), {})


def test_the_algorithm_s_numbers_are_those_of_its_pictures():
    example, page = build_example(), " ".join(read("algorithm.md").split())
    assert f"document of {DOCUMENT} tokens" in page
    assert f"The tree holds {example.tree_reads}" in page
    assert f"{example.tree_reads} tokens instead of {example.stock_reads}" in page
    for picture in ("kv_tree.svg", "decode_step.svg"):
        assert (DOCS / picture).exists()


def test_a_read_of_the_picture_is_a_node_of_the_layout():
    example = build_example()
    assert example.num_sequences == 6
    for sequence in range(example.num_sequences):
        path = [n for n in range(len(example.levels)) if sequence in example.sequences(n)]
        assert [example.levels[node] for node in path] == [0, 1, 2]
        assert [example.parents[node] for node in path] == [-1, *path[:-1]]


def test_the_kernels_sizes_are_those_of_csrc():
    page = " ".join(read("kernels.md").split())
    leaf_warps, most = constant("kLeafWarps"), constant("kMostLeafWarps")
    for claim in (
        f"{constant('kMatrixWarps')} warps own the {constant('kRowsPerTile')} query rows",
        f"ring of stages, {stage_tokens()} tokens at a time",
        f"up to {constant('kMaxLeafRows')} query rows",
        f"fetches {constant('kLeafTokens')} tokens at a time",
        f"There are {leaf_warps} in a CTA, or {leaf_warps - 1} with more buffers each",
        f"{most - leaf_warps} of the matrix warps become leaf warps",
        f"each of {constant('kNumCandidates')} lengths",
    ):
        assert claim in page, claim


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_a_path_of_the_repository_exists(path):
    for name in re.findall(
        r"`((?:hf_cascade|ops|tests|csrc|docs|benchmarks)/[\w./]+)`", path.read_text()
    ):
        assert (DOCS.parent / name).exists(), name


Cell = tuple[int, int, int, int]  # batch, shared, unique, kv heads


def speedups(chosen: Callable[[Cell], bool] = lambda cell: True) -> list[float]:
    """FlashInfer's best time / ours, of the grid's shapes: one prefix, 1 to 256 rows."""
    found = []
    for row in measured():
        name = re.fullmatch(r"(\d+)x(\d+)\+(\d+) 32/(\d+)", row["shape"])
        cell = tuple(map(int, name.groups())) if name else (0, 0, 0, 0)
        if cell[1] >= 1024 and chosen(cell):
            found.append(float(row["speedup"]))
    return found


def measured() -> list[dict[str, str]]:
    path = DOCS.parent / "benchmarks" / "results" / "attention_full.csv"
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize(
    ("row", "chosen"),
    [
        ("all of the grid", lambda c: True),
        ("32 query, 32 kv heads", lambda c: c[3] == 32),
        ("32 query, 8 kv heads", lambda c: c[3] == 8),
        ("1 row", lambda c: c[0] == 1),
        ("16 rows", lambda c: c[0] == 16),
        ("64, 128, 256 rows", lambda c: c[0] >= 64),
        (
            "16 rows and more, 8,192 shared tokens and more, 512 of its own at most",
            lambda c: c[0] >= 16 and c[1] >= 8192 and c[2] <= 512,
        ),
    ],
)
def test_the_speeds_are_those_of_the_data(row, chosen):
    found = speedups(chosen)
    mean, least, most = geometric_mean(found), min(found), max(found)
    line = f"| {row} | {len(found)} | {mean:.2f} | {least:.2f} .. {most:.2f} |"
    assert line in read("kernels.md")


def test_the_readme_has_the_same_speeds():
    readme = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())
    every, one, several = (
        geometric_mean(speedups(chosen))
        for chosen in (lambda c: True, lambda c: c[0] == 1, lambda c: c[0] >= 16)
    )
    lost = [row for row in measured() if float(row["us"]) > 1.03 * float(row["best_fi_us"]) + 1]
    assert f"120 shapes of that grid: {every:.2f} (" in readme
    assert f"From 16 rows on it is {several:.2f}, " in readme
    assert f"for a single row {one:.2f}." in readme
    assert f"{len(measured())} in all; slower by more than 3% + 1 us: {len(lost)}," in readme
    assert f"{every:.2f} times as fast as the best of seven ways" in readme
