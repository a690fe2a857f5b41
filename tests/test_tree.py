"""The KV tree shares all it can, never shows a sequence another one's KV, and loses no page."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import (
    PAGE_SIZES,
    check_structure,
    deterministic,
    grow,
    ids,
    insert,
    new_tree,
    path_ids,
    path_slots,
    snapshot,
)

from hf_cascade.errors import OutOfPagesError
from hf_cascade.pages import PageAllocator
from hf_cascade.tree import UNKNOWN_TOKEN, KVTree, Node, token_bytes

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def trie(rows: list[list[int]]) -> tuple[int, int]:
    """(nodes, tokens) of the rows' trie: a node ends where a row ends or does not go on one way."""
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    branches = [sum(p[:-1] == prefix for p in prefixes) for prefix in prefixes]
    ends = {tuple(row) for row in rows}
    nodes = sum(n != 1 or p in ends for p, n in zip(prefixes, branches, strict=True))
    return nodes, len(prefixes)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@deterministic(60)
@given(rows=ROWS, later_rows=ROWS)
def test_insert_makes_the_exact_trie(page_size, rows, later_rows):
    tree, allocator = new_tree(page_size)
    ends = insert(tree, *rows)
    assert [path_ids(tree, end) for end in ends] == rows
    nodes = tree.nodes()
    assert (len(nodes), sum(node.kv_len for node in nodes)) == trie(rows)
    assert allocator.pages_in_use == sum(-(-node.kv_len // page_size) for node in nodes)

    leaves = tree.open_leaves(ends)
    later = tree.open_leaves(insert(tree, *later_rows))
    nodes = [node for node in tree.nodes() if node.kv_len]  # leaves that were forked are empty
    assert (len(nodes), sum(node.kv_len for node in nodes)) == trie(rows + later_rows)
    assert [path_ids(tree, leaf) for leaf in leaves + later] == rows + later_rows
    check_structure(tree, allocator)

    for leaf in later:
        tree.prune(leaf)
    assert [path_ids(tree, leaf) for leaf in leaves] == rows
    for leaf in leaves:
        tree.prune(leaf)
    assert (tree.roots, allocator.pages_in_use) == ([], 0)


def test_insert_makes_one_topology_whatever_the_order_of_rows_and_keeps_that_order():
    rows = [[1, 2, 3, 4], [1, 2], [5], [1, 2, 3, 5, 6], [1, 2], [256, 1], [256, 2]]
    topologies = set()
    for seed in range(20):
        order = random.Random(seed).sample(rows, len(rows))
        tree, _ = new_tree(2)
        ends = insert(tree, *order)
        assert [path_ids(tree, end) for end in ends] == order
        topologies.add(tuple(sorted((*path_ids(tree, n), -n.kv_len) for n in tree.nodes())))
        first_row = {node: i for i in range(len(rows))[::-1] for node in tree.path(ends[i])}
        for siblings in [tree.roots, *(node.children for node in tree.nodes())]:
            assert siblings == sorted(siblings, key=first_row.get)
        tree.open_leaves(ends)
        old = [ids(root)[0] for root in tree.roots]
        insert(tree, [9], *[[*row, 9] for row in order[::-1]])
        assert [ids(root)[0] for root in tree.roots] == [*old, 9]
    assert len(topologies) == 1


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 64, 100, 257])
def test_match_finds_the_first_difference_at_every_position(length):
    tree, _ = new_tree(16)
    row = [random.Random(length).randrange(2**31) for _ in range(length)]
    [root] = insert(tree, row)
    for at in range(length):
        for bit in (1, 1 << 24):  # the lowest byte and the highest
            other = [*row[:at], row[at] ^ bit, *row[at + 1 :]]
            assert tree.match(token_bytes(other)) == ((root, at) if at else (None, 0))
        assert tree.match(token_bytes(row[: at + 1])) == (root, at + 1)
    assert tree.match(token_bytes([*row, 7])) == (root, length)
    assert tree.match(b"") == (None, 0)


def test_match_compares_tokens_and_not_bytes():
    tree, _ = new_tree(4)
    insert(tree, [0x01000000, 0x00000001])
    shifted = token_bytes([0, 0x01000000, 0x00000001])[1:-3]
    assert tree.match(shifted) == (None, 0)
    insert(tree, [0x00FFFFFF, 0x7FFFFFFF, 5])
    assert tree.match(token_bytes([0x00FFFFFF, 0x7FFFFFFF, 5]))[1] == 3


@pytest.mark.parametrize("length", [1, 5, 40])
def test_an_unknown_token_matches_nothing(length):
    tree, _ = new_tree(4)
    for at in range(length):
        tree.clear()
        row = list(range(length))
        row[at] = UNKNOWN_TOKEN
        [leaf] = grow(tree, [100])
        tree.extend([leaf], [token_bytes(row)])
        assert tree.match(token_bytes([100, *row]))[1] == 1 + at
        assert tree.match(token_bytes([100, *range(length)]))[1] == 1 + at
    # Nor do two rows of one batch share it.
    ends = insert(tree, [8, UNKNOWN_TOKEN, 9], [8, UNKNOWN_TOKEN, 9])
    assert ends[0] is not ends[1]
    assert [path_ids(tree, end) for end in ends] == [[8, UNKNOWN_TOKEN, 9]] * 2


def test_match_looks_into_every_leaf_that_decoded_the_same_tokens():
    tree, _ = new_tree(4)
    leaves = grow(tree, [1, 2], [1, 2], [1, 2])
    tree.extend(leaves, [token_bytes(row) for row in ([7, 7, 8], [7, 7, 9, 9], [7])])
    assert tree.match(token_bytes([1, 2, 7, 7, 9, 9, 9])) == (leaves[1], 6)
    assert tree.match(token_bytes([1, 2, 7, 7, 8])) == (leaves[0], 5)


def test_match_goes_on_below_an_empty_node():
    tree, _ = new_tree(4)
    first, _ = grow(tree, [1, 2], [1, 2])
    [child, _] = tree.fork(first, 2)
    tree.extend([child], [token_bytes([3, 4])])
    assert tree.match(token_bytes([1, 2, 3, 4])) == (child, 4)


@pytest.mark.parametrize("copies", [1, 2, 64])
def test_identical_rows_are_one_node(copies):
    """Copies of a row store it once; each has a leaf of its own to grow."""
    tree, allocator = new_tree(16)
    ends = insert(tree, *[[1, 2, 3]] * copies)
    assert set(ends) == set(tree.roots)
    assert allocator.pages_in_use == 1
    leaves = tree.open_leaves(ends)
    assert len(set(leaves)) == copies
    assert len(tree.nodes()) == (1 if copies == 1 else 1 + copies)
    assert allocator.pages_in_use == 1
    assert tree.roots[0].num_sequences == copies


def test_two_groups_and_a_loner_share_within_the_groups():
    """Each group stores its prefix once, and the loner shares with nobody."""
    tree, allocator = new_tree(4)
    a, b = list(range(10, 20)), list(range(30, 43))
    rows = [[*a, 1], [*b, 1], [5, 5, 5], [*a, 2], [*b, 2], [*a, 3]]
    leaves = grow(tree, *rows)
    assert [path_ids(tree, leaf) for leaf in leaves] == rows
    assert sorted((ids(root), root.num_sequences) for root in tree.roots) == [
        ([5, 5, 5], 1),
        (a, 3),
        (b, 2),
    ]
    assert leaves[2] in tree.roots
    assert allocator.pages_in_use == 3 + 4 + 1 + 5


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("survivor", [0, 1])
@pytest.mark.parametrize("is_one_batch", [True, False])
def test_the_same_row_twice_outlives_either_of_its_sequences(page_size, survivor, is_one_batch):
    """Pruning one sequence leaves the other its KV in the same slots."""
    tree, allocator = new_tree(page_size)
    row = list(range(7))
    leaves = grow(tree, row, row) if is_one_batch else grow(tree, row) + grow(tree, row)
    slots = path_slots(tree, leaves[survivor])
    tree.prune(leaves[1 - survivor])
    tree.extend([leaves[survivor]], [token_bytes([8, 9])])
    assert path_ids(tree, leaves[survivor]) == [*row, 8, 9]
    assert path_slots(tree, leaves[survivor])[:7] == slots
    check_structure(tree, allocator)
    tree.prune(leaves[survivor])
    assert allocator.pages_in_use == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prefix_lengths_of_every_residue_lose_no_page(page_size):
    """Wherever the last shared page ends, pages in use are those counted by hand, then none."""
    for length in range(1, 3 * page_size + 2):
        tree, allocator = new_tree(page_size)
        leaves = grow(tree, *[list(range(length))] * 3, [*range(length), 7, 8])
        shared = -(-length // page_size)
        assert allocator.pages_in_use == shared + -(-2 // page_size)
        for step in range(1, 2 * page_size + 1):
            tree.extend(leaves, [token_bytes([UNKNOWN_TOKEN])] * 4)
            private = 3 * -(-step // page_size) + -(-(step + 2) // page_size)
            assert allocator.pages_in_use == shared + private
            check_structure(tree, allocator)
        for leaf in leaves:
            tree.prune(leaf)
            check_structure(tree, allocator)
        assert allocator.pages_in_use == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("is_leaf", [True, False])
def test_fork_and_cut_at_every_position_change_no_content(page_size, is_leaf):
    """Every row reads back as it was, from the slots it had."""
    row = list(range(2 * page_size + 3))
    for at in range(1, len(row)):
        tree, allocator = new_tree(page_size)
        leaves = grow(tree, row) if is_leaf else grow(tree, row, row)
        slots, in_use = path_slots(tree, leaves[0]), allocator.pages_in_use
        lower = tree.roots[0]
        upper = tree.cut(lower, at)
        assert (lower.parent, tree.roots) == (upper, [upper])
        assert (ids(upper), ids(lower)) == (row[:at], row[at:])
        assert upper.num_sequences == lower.num_sequences == len(leaves)
        assert allocator.pages_in_use == in_use
        check_structure(tree, allocator)

        forks = tree.fork(upper, 2)
        assert allocator.pages_in_use == in_use, "a fork copies nothing"
        tree.extend(forks, [token_bytes([50]), token_bytes([51, 52])])
        tree.extend(leaves, [token_bytes([60])] * len(leaves))
        assert [path_ids(tree, leaf) for leaf in leaves] == [[*row, 60]] * len(leaves)
        assert path_slots(tree, leaves[0])[:-1] == slots
        assert path_slots(tree, forks[1])[:-2] == slots[:at]
        assert [path_ids(tree, fork)[at:] for fork in forks] == [[50], [51, 52]]
        check_structure(tree, allocator)

        for fork in forks:
            tree.prune(fork)
        assert len(tree.nodes()) == (1 if is_leaf else 3), "the cut is joined again"
        assert path_slots(tree, leaves[0])[:-1] == slots
        check_structure(tree, allocator)


@pytest.mark.parametrize("forked", [0, 1, 2])
def test_cuts_of_cuts_join_into_the_leaf(forked):
    tree, allocator = new_tree(4)
    [leaf] = grow(tree, list(range(11)))
    slots = path_slots(tree, leaf)
    tree.cut(tree.cut(leaf, 6), 3)
    tree.cut(leaf, 2)
    path = tree.path(leaf)
    assert [node.kv_len for node in path] == [3, 3, 2, 3]
    [fork] = tree.fork(path[forked], 1)
    tree.prune(fork)
    assert tree.nodes() == [leaf]
    assert path_slots(tree, leaf) == slots
    check_structure(tree, allocator)


def test_a_node_does_not_join_where_a_row_ends_or_storage_has_a_gap():
    tree, allocator = new_tree(4)
    a, b, c = grow(tree, [1, 2], [1, 2, 3], [1, 2, 4])
    tree.prune(c)
    assert len(tree.nodes()) == 3, "the row [1, 2] ends at the root"
    tree.prune(a)
    assert [ids(node) for node in tree.nodes()] == [[1, 2], [3]], "slots 2 and 3 are a gap"
    check_structure(tree, allocator)

    tree.clear()
    a, b = grow(tree, [1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    tree.prune(a)
    assert tree.nodes() == [b], "a page ends where the root does: no gap"
    assert path_ids(tree, b) == [1, 2, 3, 4, 6]
    check_structure(tree, allocator)


def test_a_live_leaf_stays_a_leaf_when_a_row_goes_on_from_it():
    tree, allocator = new_tree(4)
    [leaf] = grow(tree, [1, 2, 3])
    [longer] = grow(tree, [1, 2, 3, 4])
    assert leaf.is_leaf
    assert path_ids(tree, leaf) == [1, 2, 3]
    tree.extend([leaf], [token_bytes([9])])
    assert (path_ids(tree, leaf), path_ids(tree, longer)) == ([1, 2, 3, 9], [1, 2, 3, 4])
    check_structure(tree, allocator)


def test_an_upper_part_never_grows_into_tokens_that_a_clone_still_reads():
    """A clone shares full pages; a cut then leaves an upper part that ends inside such a page."""
    tree, allocator = new_tree(4)
    [leaf] = grow(tree, [1, 2, 3, 4])
    (leaf, clone), copies = tree.reorder([leaf], [0, 0])
    assert (copies, leaf.pages) == ([], clone.pages)
    [short] = grow(tree, [1, 2])
    slots = path_slots(tree, short)
    [lower] = [sibling for sibling in short.parent.children if sibling is not short]
    [other] = {leaf, clone} - {lower}
    tree.prune(lower)
    tree.extend([short], [token_bytes([7, 8])])
    assert path_ids(tree, short) == [1, 2, 7, 8]
    assert path_slots(tree, short)[:2] == slots
    assert not set(path_slots(tree, short)[2:]) & set(path_slots(tree, other))
    check_structure(tree, allocator)


def test_a_leaf_can_be_opened_again_and_an_empty_one_just_gets_siblings():
    tree, allocator = new_tree(4)
    [leaf] = grow(tree, [1, 2])
    twins = tree.open_leaves([leaf, leaf])
    assert tree.open_leaves([leaf])[0].parent is leaf.parent
    assert [node.kv_len for node in tree.nodes()] == [2, 0, 0, 0, 0]
    assert tree.roots[0].num_sequences == 4
    tree.extend([leaf, *twins], [token_bytes([3]), token_bytes([4]), token_bytes([5])])
    assert [path_ids(tree, node)[2:] for node in (leaf, *twins)] == [[3], [4], [5]]
    check_structure(tree, allocator)


# Too few pages: all or nothing


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_insert_without_enough_pages_changes_nothing_and_names_all_rows(page_size):
    held = list(range(2 * page_size + 1))
    rows = [[*held[: page_size + 1], 90], [*held, 91], [92] * (page_size + 1), [92]]
    needed = 1 + 1 + 1 + -(-page_size // page_size)
    for max_pages in range(3, 3 + needed):
        tree, allocator = new_tree(page_size, max_pages)
        grow(tree, held)
        before = snapshot(tree, allocator)
        with pytest.raises(OutOfPagesError) as caught:
            insert(tree, *rows)
        assert (caught.value.needed, caught.value.available) == (needed, max_pages - 3)
        assert snapshot(tree, allocator) == before
    tree, allocator = new_tree(page_size, 3 + needed)
    grow(tree, held)
    insert(tree, *rows)
    assert allocator.pages_in_use == 3 + needed


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_extend_without_enough_pages_changes_no_leaf(page_size):
    tree, allocator = new_tree(page_size, 4)
    leaves = grow(tree, [1, 2], [1, 3], [1, 4])
    before = snapshot(tree, allocator)
    with pytest.raises(OutOfPagesError) as caught:
        tree.extend(leaves, [b"", token_bytes([5]), token_bytes([5] * page_size)])
    assert caught.value.needed == {1: 2}.get(page_size, 1)
    assert snapshot(tree, allocator) == before
    tree.extend(leaves, [b""] * 3)
    assert snapshot(tree, allocator) == before


def test_reorder_without_enough_pages_changes_nothing():
    tree, allocator = new_tree(4, 4)
    leaves = grow(tree, [1, 2], [1, 3], [1, 4])
    before = snapshot(tree, allocator)
    with pytest.raises(OutOfPagesError) as caught:
        tree.reorder(leaves, [0, 0, 1, 1, 2])
    assert (caught.value.needed, caught.value.available) == (2, 0)
    with pytest.raises(OutOfPagesError) as caught:
        tree.reorder(leaves, [0, 0, 1, 1])  # one page is set free, two are needed
    assert (caught.value.needed, caught.value.available) == (1, 0)
    assert snapshot(tree, allocator) == before


# Beams


def test_reorder_in_a_full_pool_lives_on_the_pages_it_sets_free():
    tree, allocator = new_tree(4, 4)
    leaves = grow(tree, [1, 2], [1, 3], [1, 4])
    [new, copies] = tree.reorder(leaves, [1, 1, 1])
    assert [path_ids(tree, leaf) for leaf in new] == [[1, 3]] * 3
    assert new[0] is leaves[1]
    assert {source for source, _ in copies} == set(leaves[1].pages)
    assert sorted(target for _, target in copies) == sorted(new[1].pages + new[2].pages)
    assert (allocator.pages_in_use, allocator.peak_pages_in_use) == (4, 4)
    check_structure(tree, allocator)


def test_reorder_reuses_the_pages_of_a_whole_branch_that_ends():
    tree, allocator = new_tree(4, 6)
    leaves = grow(tree, [1, 2, 3], [1, 2, 4], [5, 6, 7])
    tree.extend(leaves[2:], [token_bytes([8, 9])])
    assert allocator.pages_in_use == 5
    new, copies = tree.reorder(leaves, [2, 2, 2, 2, 2])
    assert len(copies) == 4
    assert [path_ids(tree, leaf) for leaf in new] == [[5, 6, 7, 8, 9]] * 5
    assert allocator.pages_in_use == 6
    check_structure(tree, allocator)


def test_reorder_never_reuses_a_page_that_a_living_beam_shares():
    tree, allocator = new_tree(2)
    [leaf] = grow(tree, [1, 2, 3])
    leaves, _ = tree.reorder([leaf], [0, 0, 0])
    tree.extend(leaves[1:], [token_bytes([4]), token_bytes([5])])
    shared = leaf.pages[0]
    new, copies = tree.reorder(leaves, [0, 0])
    assert [path_ids(tree, leaf) for leaf in new] == [[1, 2, 3]] * 2
    assert [leaf.pages[0] for leaf in new] == [shared] * 2
    assert shared not in [target for _, target in copies]
    check_structure(tree, allocator)


def test_clones_share_full_pages_and_siblings_keep_their_prefix():
    tree, allocator = new_tree(2)
    prompt = [1, 2, 3, 4]  # ends at a page border, where nodes could join
    leaves = grow(tree, prompt, prompt)
    tree.extend(leaves, [token_bytes([5, 6, 7]), token_bytes([8])])
    (first, clone), copies = tree.reorder(leaves, [0, 0])
    assert first is leaves[0]
    assert clone.parent is first.parent
    assert ids(clone.parent) == prompt, "the shared prompt is still one node"
    assert clone.pages[0] == first.pages[0]
    assert copies == [(first.pages[1], clone.pages[1])]
    assert allocator.pages_in_use == 2 + 1 + 2
    check_structure(tree, allocator)


def test_a_leaf_that_starts_inside_a_shared_page_is_cloned_whole():
    tree, allocator = new_tree(4)
    [leaf] = grow(tree, [1, 2, 3])
    upper = tree.cut(leaf, 2)
    (leaf, clone), copies = tree.reorder([leaf], [0, 0])
    assert (clone.first_slot, clone.parent) == (2, upper)
    assert copies == [(leaf.pages[0], clone.pages[0])]
    tree.prune(leaf)
    assert [ids(node) for node in tree.nodes()] == [[1, 2], [3]], "the clone is on another page"
    check_structure(tree, allocator)


def test_reorder_may_drop_everything_or_only_permute():
    tree, allocator = new_tree(4)
    leaves = grow(tree, [1], [2], [3])
    assert tree.reorder(leaves, [2, 0, 1]) == ([leaves[2], leaves[0], leaves[1]], [])
    assert tree.reorder(leaves, []) == ([], [])
    assert (tree.roots, allocator.pages_in_use) == ([], 0)


# What a user sees


def test_describe():
    tree, _ = new_tree(4)
    document = list(range(2000))
    leaves = grow(tree, *[document] * 17, [*document[:1002], 7], [5])
    assert tree.describe() == "\n".join(
        [
            "KV tree: 21 nodes, 2,002 tokens, 19 sequences, 503 pages in use",
            "├─ level 0: 1,002 tokens, 18 sequences, 251 pages",
            "│  ├─ level 1: 998 tokens, 17 sequences, 250 pages",
            "│  │  └─ level 2: 0 tokens, 1 sequence, 0 pages  x 17",
            "│  └─ level 1: 1 token, 1 sequence, 1 page",
            "└─ level 0: 1 token, 1 sequence, 1 page",
        ]
    )
    tree.extend(leaves[1:3], [token_bytes([8, 9])] * 2)
    tree.cut(leaves[17].parent, 500)
    tree.cut(leaves[17].parent, 1)
    tree.prune(leaves[-1])
    assert tree.describe() == "\n".join(
        [
            "KV tree: 22 nodes, 2,005 tokens, 18 sequences, 504 pages in use",
            "└─ level 0: 500 tokens, 18 sequences, 125 pages",
            "   └─ level 1: 1 token, 18 sequences, 1 page",
            "      └─ level 2: 501 tokens, 18 sequences, 126 pages (first_slot 1)",
            "         ├─ level 3: 998 tokens, 17 sequences, 250 pages",
            "         │  ├─ level 4: 0 tokens, 1 sequence, 0 pages",
            "         │  ├─ level 4: 2 tokens, 1 sequence, 1 page  x 2",
            "         │  └─ level 4: 0 tokens, 1 sequence, 0 pages  x 14",
            "         └─ level 3: 1 token, 1 sequence, 1 page",
        ]
    )
    tree.clear()
    assert tree.describe() == "KV tree: 0 nodes, 0 tokens, 0 sequences, 0 pages in use"


def test_interior_nodes_that_look_alike_are_not_folded():
    tree, _ = new_tree(4)
    grow(tree, [1, 1], [1, 2], [3, 1], [3, 2])
    assert len(tree.describe().splitlines()) == 1 + 2 * 2


def test_clear_returns_every_page_and_ends_every_leaf():
    tree, allocator = new_tree(4)
    leaves = grow(tree, [1, 2, 3], [1, 2, 4], [5])
    tree.cut(leaves[0].parent, 1)
    tree.clear()
    assert (tree.nodes(), allocator.pages_in_use) == ([], 0)
    with pytest.raises(ValueError, match="live sequence"):
        tree.extend(leaves, [b""] * 3)
    tree.clear()
    assert allocator.pages_in_use == 0


def test_two_trees_share_one_allocator():
    allocator = PageAllocator(4)
    first, second = KVTree(allocator), KVTree(allocator)
    [a], [b] = grow(first, [1, 2, 3]), grow(second, [1, 2, 3])
    assert not set(path_slots(first, a)) & set(path_slots(second, b))
    first.clear()
    assert path_ids(second, b) == [1, 2, 3]
    assert allocator.pages_in_use == 1


def test_wrong_calls_name_the_argument_and_change_nothing():
    tree, allocator = new_tree(4)
    a, b, c = grow(tree, [1, 2], [1, 2, 3], [1, 2, 4])
    root = b.parent
    tree.prune(c)
    before = snapshot(tree, allocator)
    one = token_bytes([1])
    wrong = [
        ("rows\\[1\\]", tree.insert, [one, b""]),
        ("rows\\[0\\]", tree.insert, [one + b"\0", one]),
        ("at must", tree.cut, root, 0),
        ("at must", tree.cut, root, 2),
        ("at must", tree.cut, root, -1),
        ("at must", tree.cut, a, 0),
        ("count must", tree.fork, root, 0),
        ("distinct", tree.extend, [a, a], [one, one]),
        ("leaves\\[1\\]", tree.extend, [a, root], [one, one]),
        ("leaves\\[0\\]", tree.extend, [c], [one]),
        ("tokens must", tree.extend, [a, b], [one]),
        ("tokens must", tree.extend, [a, b], [one, b"\0"]),
        ("distinct", tree.reorder, [a, a], [0, 1]),
        ("leaves\\[1\\]", tree.reorder, [a, c], [0, 1]),
        ("order must", tree.reorder, [a, b], [0, 2]),
        ("order must", tree.reorder, [a, b], [0, -1]),
        ("leaves\\[0\\]", tree.prune, c),
        ("leaves\\[0\\]", tree.prune, root),
        ("\\[0, 3\\)", tree.slots, root, 0, 3),
        ("\\[2, 1\\)", tree.slots, root, 2, 1),
        ("\\[-1, 1\\)", tree.slots, root, -1, 1),
    ]
    for message, call, *args in wrong:
        with pytest.raises(ValueError, match=message):
            call(*args)
        assert snapshot(tree, allocator) == before, message


def test_calls_about_nothing_are_fine():
    tree, allocator = new_tree(4)
    tree.extend([], [])
    assert tree.insert([]) == tree.open_leaves([]) == tree.nodes() == []
    assert tree.reorder([], []) == ([], [])
    assert tree.slots(Node()) == []
    assert (tree.roots, allocator.pages_in_use) == ([], 0)


def test_nodes_come_depth_first_and_deep_trees_are_fine():
    tree, allocator = new_tree(4)
    [leaf] = grow(tree, [0])
    for token in range(1, 3000):
        [leaf, _] = tree.fork(leaf, 2)
        tree.extend([leaf], [token_bytes([token])])
    nodes = tree.nodes()
    assert len(tree.path(leaf)) == 3000
    assert all(b.parent is a for a, b in pairwise(nodes[:3000]))
    assert path_ids(tree, leaf) == list(range(3000))
    tree.clear()
    assert allocator.pages_in_use == 0


def test_a_very_deep_tree_can_be_described():
    tree = KVTree(PageAllocator(16))
    row = list(range(3, 1503))
    tree.open_leaves(tree.insert([token_bytes(row[:end]) for end in range(1, 1501)]))
    assert tree.describe().count("\n") >= 1500
