"""What a launch of the attention kernel is made of, which the device decides, tested without a GPU.

Every row sees all of its path once; every partial state has one writer and a place of its own; who
reads what, and in what, is as the attention kernel takes it. Of a list only what that relies on is
asked, not how it is found.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from math import ceil
from random import Random

import pytest
from cases import TREES, Tree
from hf_cascade.ops.cascade import SCRATCH_STATES, SPLIT_UNIT
from host_sources import can_compile
from work_lists import (
    NOWHERE,
    ROWS_PER_TILE,
    Launch,
    WorkList,
    compile_work_list,
    indptr,
    make_list,
    paged,
)

from benchmarks.bench_attention import HEAD_DIM, PAGE_SIZE, Shape, grid

pytestmark = can_compile

GROUP_SIZES, HEAD_DIMS, STAGES = (1, 4, 8, 16), (64, 128, 256), (6, 5, 2, 1)
SEEDS = range(16)
TREES_OF_DECODING = [tree for tree in TREES if max(tree.q_len or (1,)) <= 1]


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> ctypes.CDLL:
    return compile_work_list(tmp_path_factory.mktemp("host"))


# ---------------------------------------------------------------------- trees


def random_tree(random: Random, *, prefills: bool, **shape) -> Tree:
    """Parents before children; lengths of one scale, some of them 0 or 1."""
    parents: list[int | None] = []
    kv_len: list[int] = []
    longest = random.choice([5, 200, 3000, 40000])

    def add(parent: int | None) -> int:
        parents.append(parent)
        kv_len.append(random.choice([0, 1, random.randint(1, longest), random.randint(1, longest)]))
        return len(parents) - 1

    for _ in range(random.randint(0, 12)):
        add(random.choice([None, *range(len(parents))]))
    inner, leaves = len(parents), []
    for _ in range(random.choice([1, 3, 20, 70])):
        parent = random.choice([None, *range(inner), *range(inner)])
        if random.random() < 0.2:
            parent = add(parent)  # one reader's
        leaves.append(add(parent))
    if random.random() < 0.3:
        leaves += random.sample(range(inner), min(inner, 2))  # others read them too
    if random.random() < 0.3:
        leaves += [add(None)] * 2  # of sequences that are finished
        kv_len[-1] = 0
    random.shuffle(leaves)
    choices = (0, 1, 2, 40, 300) if prefills else random.choice([(1,), (0, 1)])
    q_len = [random.choice(choices) for _ in leaves]
    if prefills:
        q_len[-1] = 70
    return Tree(
        "random", tuple(parents), tuple(kv_len), tuple(leaves), tuple(q_len), page_size=16, **shape
    )


def random_launch(seed: int, group_size: int, num_stages: int, *, prefills: bool = False) -> Launch:
    random = Random(f"{seed} {group_size} {num_stages} {prefills}")
    tree = random_tree(
        random,
        prefills=prefills,
        group_size=group_size,
        head_dim=random.choice(HEAD_DIMS),
        num_kv_heads=random.choice([1, 2, 3, 8]),
    )
    return paged(
        tree,
        random,
        num_stages=num_stages,
        num_ctas=random.choice([1, 20, 132]),
        room=random.choice([0, 3, 100, 2000]),
        batch_invariant=random.random() < 0.4,
        spare_reads=random.choice([0, 5]),
        parts=random.choice(["paths"] * 8 + ["prefixes", "suffixes"]),
    )


# ---------------------------------------------------------------------- decoding


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_rows_see_their_paths_once(host, group_size, num_stages):
    for seed in SEEDS:
        launch = random_launch(seed, group_size, num_stages)
        assert_serves(launch, make_list(host, launch, num_ctas=1 + seed % 2, seed=seed))


@pytest.mark.parametrize("tree", TREES_OF_DECODING, ids=str)
def test_named_trees_are_served(host, tree):
    for batch_invariant in (False, True):
        launch = paged(tree, batch_invariant=batch_invariant)
        assert_serves(launch, make_list(host, launch))


def test_more_sequences_and_nodes_than_threads(host):
    leaves = tuple(range(2, 1502))
    kv_len = (300, 0, *(leaf % 90 for leaf in leaves))
    launch = paged(Tree("wide", (None, 0, *[1] * 1500), kv_len, leaves, page_size=16))
    assert_serves(launch, make_list(host, launch, in_shared=False))


def assert_serves(launch: Launch, work: WorkList) -> None:
    """Every row's states, in their order, are the tokens of its path, the root's first."""
    assert_header(launch, work)
    assert work.path_indptr[0] == 0
    assert work.path_indptr[-1] <= launch.max_states
    q_indptr = indptr(launch.q_len)
    written: dict[tuple[int, int], dict[str, int]] = {}
    for item in work.items:
        for target, row in work.rows_of(item):
            # A shared item loads q for every reader, also for one without a query.
            assert item["first_read"] < 0 or 0 <= row < max(1, q_indptr[-1])
            if target == NOWHERE:
                continue
            assert (target, item["head"]) not in written, "a state has two writers"
            written[target, item["head"]] = item | {"row": row}
    for seq in range(launch.num_seqs):
        if not launch.q_len[seq]:
            continue
        states = range(work.path_indptr[seq], work.path_indptr[seq + 1])
        targets = [~q_indptr[seq]] if len(states) == 1 else states
        for head in range(launch.tree.num_kv_heads):
            items = [written.pop((target, head)) for target in targets]
            assert all(item["row"] == q_indptr[seq] for item in items)
            assert_is_path(launch, seq, items)
    assert not written, "a state is nobody's"


def assert_is_path(launch: Launch, seq: int, items: list[dict[str, int]]) -> None:
    kv_len, kv_indptr = launch.tree.kv_len, indptr(launch.num_pages)
    nodes = [node for node in (*launch.prefix(seq), *launch.leaf(seq)) if kv_len[node]]
    if not nodes:
        (item,) = items
        assert item["begin_slot"] == item["end_slot"]
        assert not item["grows"]
        return
    for node in nodes:
        begin, end = launch.first_slot[node], launch.first_slot[node] + kv_len[node]
        length = items[0]["end_slot"] - items[0]["begin_slot"]
        assert length == kv_len[node] or length % SPLIT_UNIT == 0
        while begin < end:
            item = items.pop(0)
            assert item["pages"] == kv_indptr[node]
            assert (item["begin_slot"], item["end_slot"]) == (begin, min(begin + length, end))
            assert item["grows"] == (item["end_slot"] == end), "but for a node's last split"
            reads_one = node in launch.leaf(seq) or launch.leaf_warps_read(node, seq)
            assert (item["first_read"] < 0) == reads_one
            begin = item["end_slot"]
    assert not items


def assert_header(launch: Launch, work: WorkList) -> None:
    header, tree = work.header, launch.tree
    num_shared, num_leaf = header["num_shared_items"], header["num_leaf_items"]
    assert header["is_decode"] == 1
    assert header["shape"] == tree.head_dim << 16 | tree.group_size
    if num_shared and num_leaf:
        assert 1 <= header["shared_stages"] < launch.num_stages
    else:
        assert header["shared_stages"] == (launch.num_stages if num_shared else 0)
    for i, item in enumerate(work.items):
        assert 0 <= item["head"] < tree.num_kv_heads
        assert 0 < item["num_tokens"] * tree.group_size <= ROWS_PER_TILE
        first_slot = item["begin_slot"] // 16 * 16
        for block in range(4):
            slot = first_slot + 16 * block
            if slot < item["end_slot"]:
                page = launch.pages[item["pages"] + slot // tree.page_size]
                assert item[f"page_{block}"] == page
        by_leaf_warps = item["first_read"] < 0 and launch.leaf_warps_read_leaves
        assert (i >= num_shared) == by_leaf_warps
        if item["first_read"] < 0:  # leaf warps write for whoever has a row
            assert (item["token"] == -1) == (item["target"] == NOWHERE)
        assert item["first_token"] == first_token_of(launch, item)
    # Who starts early reads what is not there yet, unless it stays; who need not wait should not.
    starts = indptr(launch.num_pages)
    grown = {leaf for seq in range(launch.num_seqs) for leaf in launch.leaf(seq)}
    pages_of_grown = {starts[leaf] for leaf in grown if tree.kv_len[leaf]}
    if header["shared_are_still"]:
        shared = [item for item in work.items[:num_shared] if item["begin_slot"] < item["end_slot"]]
        assert not pages_of_grown & {item["pages"] for item in shared}
    elif launch.leaf_warps_read_leaves:
        assert any(launch.readers[leaf] for leaf in grown)


def first_token_of(launch: Launch, item: dict[str, int]) -> int:
    """Where its rows of q begin: of readers that are neighbours, each with a row; -1: of others."""
    if item["first_read"] < 0:
        return item["token"]
    reads = [seq for seqs in launch.readers for seq in seqs][item["first_read"] :]
    seqs = reads[: item["num_tokens"]]
    are_neighbours = seqs == list(range(seqs[0], seqs[-1] + 1))
    have_rows = all(launch.q_len[seq] == 1 for seq in seqs)
    return indptr(launch.q_len)[seqs[0]] if are_neighbours and have_rows else -1


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_rows_of_neighbours_are_consecutive(host, group_size):
    """The copy engine brings rows from first_token on; items of either kind are among these."""
    launches = [random_launch(seed, group_size, 6) for seed in SEEDS]
    num_copied = num_others = 0
    for launch in [*launches, *map(paged, TREES_OF_DECODING)]:
        work = make_list(host, launch)
        for item in work.items:
            if item["num_tokens"] == 1:
                continue
            rows = [row for _, row in work.rows_of(item)]
            first = item["first_token"]
            num_copied += first >= 0
            num_others += first < 0
            assert first < 0 or rows == list(range(first, first + len(rows)))
    assert num_copied > 20
    assert num_others > 20


def test_who_looks_before_it_knows_finds_nothing(host):
    """CTAs look at the first items of a producer and of leaf warps before they have the header."""
    most_leaf_warps, num_empty = 6, 0  # kMostLeafWarps
    for seed in SEEDS:
        launch = random_launch(seed, 4, 6, prefills=seed % 3 == 0)
        work = make_list(host, launch, num_ctas=1 + seed % 3, seed=seed)
        words, is_decode = work.all_item_words, work.header["is_decode"]
        end = len(words) - is_decode * work.header["num_leaf_items"]
        for i in range(is_decode * work.header["num_shared_items"], end):
            from_behind = len(words) - 1 - i
            if i < launch.num_ctas or from_behind < most_leaf_warps * launch.num_ctas:
                assert not words[i].any()
                num_empty += 1
    assert num_empty > 1000


def test_tables_in_global_memory_make_the_same_list(host):
    for seed in SEEDS:
        launch = random_launch(seed, 4, 6, prefills=seed % 4 == 0)
        here = make_list(host, launch, num_ctas=3, seed=seed)
        there = make_list(host, launch, in_shared=False, seed=seed + 1)
        assert (here.words == there.words).all()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_little_room_makes_splits_grow(host, batch_invariant):
    kv_len, leaves = (20000, *[3000] * 8), tuple(range(1, 9))
    tree = Tree("long", (None, *[0] * 8), kv_len, leaves, num_kv_heads=8, page_size=16)
    num_states = []
    for room in (SCRATCH_STATES, 30, 0):
        launch = paged(tree, room=room, batch_invariant=batch_invariant)
        work = make_list(host, launch)
        assert_serves(launch, work)
        num_states.append(work.path_indptr[-1])
    assert num_states[0] > num_states[1] > num_states[2] == 16


# ---------------------------------------------------------------------- prefill


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_prefill_walks_whole_paths(host, group_size):
    for seed in SEEDS:
        launch = random_launch(seed, group_size, STAGES[seed % 4], prefills=True)
        work = make_list(host, launch, num_ctas=1 + seed % 2, seed=seed)
        kv_len, heads = launch.tree.kv_len, launch.tree.num_kv_heads
        prefixes = [[n for n in launch.prefix(seq) if kv_len[n]] for seq in range(launch.num_seqs)]
        tiles = [ceil(q_len / (ROWS_PER_TILE // group_size)) for q_len in launch.q_len]
        assert work.path_indptr == indptr(map(len, prefixes))
        assert work.path[: work.path_indptr[-1]] == [node for path in prefixes for node in path]
        assert work.leaf_items == indptr(heads * count for count in tiles)
        assert work.header["num_shared_items"] == heads * sum(tiles)
        assert work.header["num_leaf_items"] == work.header["is_decode"] == 0
        assert work.header["shared_stages"] == launch.num_stages


# ---------------------------------------------------------------------- the splits


def test_batch_invariant_splits_do_not_depend_on_companions(host):
    num_compared = 0
    for seed in SEEDS:
        random = Random(seed)
        group_size, heads = random.choice(GROUP_SIZES), random.choice([1, 2, 8])
        tree = random_tree(random, prefills=False, group_size=group_size, num_kv_heads=heads)
        launch = paged(tree, random, batch_invariant=True)
        seqs = sorted(random.sample(range(launch.num_seqs), ceil(launch.num_seqs / 3)))
        leaves, q_len = ([values[seq] for seq in seqs] for values in (tree.leaves, launch.q_len))
        few = replace(launch, tree=replace(tree, leaves=tuple(leaves), q_len=tuple(q_len)))
        among_all, among_few = ranges_of(host, launch), ranges_of(host, few)
        assert among_few == [among_all[seq] for seq in seqs]
        num_compared += sum(map(len, among_few))
    assert num_compared > 1000


def ranges_of(host: ctypes.CDLL, launch: Launch) -> list[set[tuple[int, ...]]]:
    """Of each sequence, what its states are of: (place on its path, head, pages, slots)."""
    work = make_list(host, launch)
    assert work.header["shared_split"] == work.header["leaf_split"] == ~0  # there is room enough
    seq_of = {row: seq for seq, row in enumerate(indptr(launch.q_len)[:-1]) if launch.q_len[seq]}
    found: list[set[tuple[int, ...]]] = [set() for _ in launch.q_len]
    for item in work.items:
        for target, row in work.rows_of(item):
            if target == NOWHERE:
                continue
            place = 0 if target < 0 else target - work.path_indptr[seq_of[row]]
            values = (item[name] for name in ("head", "pages", "begin_slot", "end_slot"))
            found[seq_of[row]].add((place, *values))
    return found


def test_ctas_have_work_where_there_is_enough(host):
    for shape in grid("full"):
        launch = launch_of(shape)
        work = make_list(host, launch)
        assert work.path_indptr[-1] <= launch.max_states
        # Each kind of warp shares out its own; a CTA's first items of either go one to a CTA. A
        # third of the CTAs is enough, or fewer where leaves take longer than the longest item of a
        # shared node: the matrix units need more than 0.5 us for 64 tokens of it.
        leaf_us = leaves_us(shape)
        longest_us = 0.5 * work.header["shared_split"] / SPLIT_UNIT
        for kind, is_read in (("shared", lambda num: num > 1), ("leaf", lambda num: num <= 1)):
            num_tokens = sum(length for length, readers in shape.nodes() if is_read(len(readers)))
            if num_tokens * shape.num_kv_heads >= launch.num_ctas * SPLIT_UNIT:
                is_short = kind == "shared" and longest_us < leaf_us
                least = shape.num_kv_heads if is_short else launch.num_ctas / 3
                assert work.header[f"num_{kind}_items"] >= least, shape.name


def leaves_us(shape: Shape) -> float:
    """To read the KV that one sequence alone sees, at 4.8 TB/s."""
    tokens = sum(length for length, readers in shape.nodes() if len(readers) <= 1)
    return tokens * shape.num_kv_heads * 2 * HEAD_DIM * 2 / 4.8e6


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("64x1024+128 32/8", 4),  # leaves take longer: fewer states are worth more than items
        ("256x1024+128 32/8", 16),
        ("16x1024+512 32/8", 3),
        ("64x8192+256 32/8", 16),  # about as long
        ("tree 1-4-16-64 32/8", 10),
        ("128x8192+128 32/8", 32),  # the shared node does: an item for every CTA
        ("16x8192+128 32/8", 8),
    ],
)
def test_splits_of_shared_nodes_heed_the_leaves_beside_them(host, name: str, units: int) -> None:
    """On an H200 the best of 80 to 190 forced combinations of splits, stages and buffers was at
    most 1.3% faster than the best with these splits, 6% for 64x8192+256 (benchmarks/NOTES.md,
    16)."""
    (shape,) = (shape for shape in grid("full") if shape.name == name)
    work = make_list(host, launch_of(shape))
    assert work.header["shared_split"] == units * SPLIT_UNIT


@pytest.mark.parametrize(
    ("rows", "shared", "own", "all_take", "splits"),
    [
        (16, 1024, 64, False, 8),  # one round of items for two leaf warps a CTA
        (48, 4096, 64, True, 8),  # two, and one for three
        (64, 4096, 64, False, 8),  # two of either
        (64, 4096, 16, True, 8),  # of a single tile each
        (64, 1024, 64, True, 4),  # one, with the matrix warps of CTAs that have nothing shared
        (64, 2048, 112, True, 5),  # which is worth splits of 448 tokens instead of 256
        (192, 512, 40, True, 1),  # three of either
    ],
)
def test_leaf_warps_save_rounds(
    host, rows: int, shared: int, own: int, all_take: bool, splits: int
) -> None:
    """An item to each leaf warp is a round (benchmarks/NOTES.md, 17, has what a round is worth)."""
    work = make_list(host, launch_of(Shape("rounds", (1, rows), (shared, own), 32, 8)))
    assert work.header["all_leaf_warps"] == all_take
    columns = 8 * ceil(rows / 32)  # kv heads, query tiles
    assert work.header["num_shared_items"] == columns * splits


@pytest.mark.parametrize(("rows", "all_take"), [(16, False), (64, True)])
def test_matrix_warps_join_leaf_warps_that_are_alone(host, rows: int, all_take: bool) -> None:
    work = make_list(host, launch_of(Shape("alone", (rows,), (64,), 32, 8)))
    assert work.header["num_shared_items"] == 0
    assert work.header["all_leaf_warps"] == all_take


@pytest.mark.parametrize(("own", "stages"), [(3, 4), (64, 3)])
def test_short_leaves_are_taken_for_what_they_are(host, own: int, stages: int) -> None:
    """Of a leaf's tokens, not of the 64 that it would have room for, hangs what takes longer."""
    shape = Shape("short", (1, 128), (128, own), 32, 8)
    assert make_list(host, launch_of(shape)).header["shared_stages"] == stages


def test_a_lone_row_s_merge_has_multiprocessors_of_its_own(host):
    def ctas(num_multiprocessors: int, num_rows: int, has_early_launch: bool = True) -> int:
        return host.attention_ctas(
            num_multiprocessors, ctypes.c_int64(num_rows), ctypes.c_bool(has_early_launch)
        )

    assert [ctas(132, rows) for rows in (1, 8, 9, 32)] == [131, 131, 130, 128]
    assert [ctas(132, rows) for rows in (33, 2048, 2**33)] == [132, 132, 132]
    assert ctas(132, 32, has_early_launch=False) == 132
    assert [ctas(few, 32) for few in (1, 2, 5)] == [1, 1, 1]


def launch_of(shape: Shape) -> Launch:
    """As the benchmark has it, on 132 multiprocessors."""
    nodes = shape.nodes()
    inner = [set(readers) for _, readers in nodes[: -shape.batch]]

    def parent(readers: set[int], num_before: int) -> int | None:
        return max((n for n in range(num_before) if readers <= inner[n]), default=None)

    tree = Tree(
        shape.name,
        (
            *(parent(readers, node) for node, readers in enumerate(inner)),
            *(parent({seq}, len(inner)) for seq in range(shape.batch)),
        ),
        tuple(length for length, _ in nodes),
        tuple(range(len(inner), len(nodes))),
        num_kv_heads=shape.num_kv_heads,
        group_size=shape.num_q_heads // shape.num_kv_heads,
        head_dim=HEAD_DIM,
        page_size=PAGE_SIZE,
    )
    least = paged(tree, room=0).max_states
    return paged(tree, room=max(0, SCRATCH_STATES - least))
