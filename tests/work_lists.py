"""Work lists without a GPU: their kernel, csrc/work_list.cuh, runs on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from random import Random

import numpy as np
from cases import Tree
from hf_cascade.ops.cascade import HEADER_WORDS, ITEM_WORDS, SCRATCH_STATES
from host_sources import compile_host

# As in csrc/: tiles.cuh, params.h.
ROWS_PER_TILE, MAX_LEAF_ROWS = 128, 8
NOWHERE = -(2**31)
HEADER = ("is_decode", "num_shared_items", "num_leaf_items", "shared_are_still", "shared_stages",
          "shared_split", "leaf_split", "all_leaf_warps", "shape")  # fmt: skip
ITEM = ("head", "num_tokens", "begin_slot", "end_slot", "pages", "first_read", "split", "token",
        "target", "grows", "page_0", "page_1", "page_2", "page_3", "first_token",
        "padding")  # fmt: skip
assert (len(HEADER), len(ITEM)) == (HEADER_WORDS, ITEM_WORDS)
ARRAYS = ("q_indptr", "kv_indptr", "kv_indices", "kv_len", "first_slot", "leaves", "reader_indptr",
          "readers")  # fmt: skip
COUNTS = ("num_tokens", "num_seqs", "num_nodes", "num_reads")
SHAPE = ("num_kv_heads", "group_size", "tile_tokens", "head_dim", "page_size_log2", "num_ctas",
         "num_stages", "max_states")  # fmt: skip


class TreeParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ARRAYS),
        *((name, ctypes.c_int) for name in COUNTS),
    )


class WorkShape(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int) for name in SHAPE), ("batch_invariant", ctypes.c_bool))


@dataclass(frozen=True)
class Launch:
    """A tree as the kernel gets it, and for whom.

    Args:
        first_slot, num_pages: of each node.
        num_stages, num_ctas: of the attention kernel: a CTA's stages, and CTAs.
        room: states that the scratch has room for, beyond the least that it can have.
        spare_reads: of `readers`, entries at the end that are no node's.
        parts: what is asked for, "paths" or of them the "prefixes" or the "suffixes".
    """

    tree: Tree
    first_slot: tuple[int, ...]
    num_pages: tuple[int, ...]
    num_stages: int = 6
    num_ctas: int = 132
    room: int = SCRATCH_STATES
    batch_invariant: bool = False
    spare_reads: int = 0
    parts: str = "paths"

    def prefix(self, seq: int) -> tuple[int, ...]:
        """In the order of the nodes, of which a plan lists parents first."""
        path = self.tree.path(self.tree.leaves[seq])
        return () if self.parts == "suffixes" else tuple(sorted(path[:-1]))

    def leaf(self, seq: int) -> tuple[int, ...]:
        return () if self.parts == "prefixes" else (self.tree.leaves[seq],)

    @property
    def num_seqs(self) -> int:
        return len(self.tree.leaves)

    @property
    def q_len(self) -> tuple[int, ...]:
        return self.tree.q_len or (1,) * self.num_seqs

    @cached_property
    def readers(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.tree.kv_len]
        for seq in range(self.num_seqs):
            for node in self.prefix(seq):
                found[node].append(seq)
        return found

    @cached_property
    def pages(self) -> list[int]:
        """The page table, kv_indices: no page twice, in no order."""
        return Random(len(self.num_pages)).sample(range(10**6), sum(self.num_pages))

    @property
    def num_reads(self) -> int:
        return 0 if self.parts == "suffixes" else sum(map(len, self.readers)) + self.spare_reads

    @property
    def max_states(self) -> int:
        return self.num_reads + self.num_seqs + self.room

    @property
    def leaf_warps_read_leaves(self) -> bool:
        return self.tree.group_size <= MAX_LEAF_ROWS and self.num_stages > 1

    def leaf_warps_read(self, node: int, seq: int) -> bool:
        is_single = len(self.readers[node]) == 1 and not self.batch_invariant
        return self.leaf_warps_read_leaves and (is_single or node in self.leaf(seq))


@dataclass(frozen=True)
class WorkList:
    """As csrc/params.h has it; `words` is all of it."""

    words: np.ndarray
    header: dict[str, int]
    leaf_items: list[int]
    path_indptr: list[int]
    path: list[int]
    read_tokens: list[int]
    item_words: np.ndarray  # [num_items, len(ITEM)]
    all_item_words: np.ndarray  # [most_items, len(ITEM)], also those that don't exist

    @cached_property
    def items(self) -> list[dict[str, int]]:
        return [dict(zip(ITEM, item, strict=True)) for item in self.item_words.tolist()]

    def rows_of(self, item: dict[str, int]) -> Iterator[tuple[int, int]]:
        """(target, row of q) of each of an item's tokens, as the attention kernel finds them."""
        if item["first_read"] < 0:
            yield item["target"], item["token"]
            return
        for read in range(item["first_read"], item["first_read"] + item["num_tokens"]):
            target = self.path[read]
            yield target + item["split"] if target >= 0 else target, self.read_tokens[read]


def paged(tree: Tree, random: Random | None = None, **options) -> Launch:
    """Nodes begin with their first page or, given `random`, anywhere in it, and may then list a
    page more than they need.
    """
    starts, num_pages = [], []
    for kv_len in tree.kv_len:
        starts.append(random.choice([0, random.randrange(tree.page_size)]) if random else 0)
        num_pages.append(ceil((starts[-1] + kv_len) / tree.page_size))
        num_pages[-1] += random.randint(0, 1) if random else 0
    return Launch(tree, tuple(starts), tuple(num_pages), **options)


def indptr(lengths: Iterable[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def compile_work_list(folder: Path) -> ctypes.CDLL:
    host = compile_host("work_list_host.cpp", folder)
    host.list_room.restype = host.first_item.restype = ctypes.c_int64
    host.num_guard_words.restype = ctypes.c_int64
    host.make_list.restype = ctypes.c_char_p
    return host


def make_list(
    host: ctypes.CDLL, launch: Launch, *, in_shared: bool = True, num_ctas: int = 1, seed: int = 0
) -> WorkList:
    """The list that a launch of num_ctas makes; the seed decides who runs before whom."""
    tree, readers = launch.tree, launch.readers
    index = {
        "q_indptr": indptr(launch.q_len),
        "kv_indptr": indptr(launch.num_pages),
        "kv_indices": launch.pages,
        "kv_len": tree.kv_len,
        "first_slot": launch.first_slot,
    }
    if launch.parts != "prefixes":
        index["leaves"] = tree.leaves
    if launch.parts != "suffixes":
        index["reader_indptr"] = indptr(map(len, readers))
        index["readers"] = [seq for seqs in readers for seq in seqs] + [0] * launch.spare_reads
    arrays = {name: np.array(values, dtype=np.int32) for name, values in index.items()}
    params = TreeParams(**{name: array.ctypes.data for name, array in arrays.items()})
    params.num_tokens, params.num_seqs = sum(launch.q_len), launch.num_seqs
    params.num_nodes, params.num_reads = len(tree.kv_len), launch.num_reads
    shape = WorkShape(
        tree.num_kv_heads,
        tree.group_size,
        ROWS_PER_TILE // tree.group_size,
        tree.head_dim,
        tree.page_size.bit_length() - 1,
        launch.num_ctas,
        launch.num_stages,
        launch.max_states,
        launch.batch_invariant,
    )
    given = ctypes.byref(params), ctypes.byref(shape)
    words = np.empty(host.list_room(*given), dtype=np.int32)
    place = ctypes.c_void_p(words.ctypes.data)
    error = host.make_list(*given, in_shared, num_ctas, ctypes.c_uint(seed), place)
    assert error is None, error.decode()
    return _view(words[: -host.num_guard_words()], launch, host.first_item(given[0]))


def _view(words: np.ndarray, launch: Launch, first_item: int) -> WorkList:
    header = dict(zip(HEADER, words[: len(HEADER)].tolist(), strict=True))
    sizes = [launch.num_seqs + 1] * 2 + [launch.num_reads] * 2
    places = pairwise(accumulate(sizes, initial=len(HEADER)))
    parts = [words[begin:end].tolist() for begin, end in places]
    items = words[first_item:].reshape(-1, len(ITEM))
    shared = items[: header["num_shared_items"] * header["is_decode"]]
    leaves = items[::-1][: header["num_leaf_items"] * header["is_decode"]]
    return WorkList(
        words, header, *parts, item_words=np.concatenate([shared, leaves]), all_item_words=items
    )
