"""A plan that the device advances is, at every step, the one that would be built anew."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from trees import insert, new_tree

from hf_cascade.plan import Plan, Query, build_layout
from hf_cascade.step_plan import StepPlan
from hf_cascade.tree import UNKNOWN_TOKEN, KVTree, Node, token_bytes

CPU = torch.device("cpu")


def random_leaves(tree: KVTree, random: Random) -> list[Node | None]:
    """A leaf for each sample of some prompts, which share what they begin with."""
    shared = [random.randrange(3) for _ in range(random.randrange(40))]
    rows = [
        shared[: random.randrange(len(shared) + 1)]
        + [random.randrange(3) for _ in range(random.randint(1, 40))]
        for _ in range(random.randint(1, 4))
    ]
    ends = insert(tree, *rows)
    return [*tree.open_leaves([end for end in ends for _ in range(random.randint(1, 3))])]


def assert_is_current(plan: Plan, tree: KVTree, leaves: Sequence[Node | None]) -> None:
    layout = build_layout(tree, [Query.last_of(leaf) for leaf in leaves])
    num_nodes = len(layout.kv_len)
    assert plan.slots.tolist() == layout.slots
    assert plan.leaves.tolist() == layout.leaves
    assert plan.q_indptr.tolist() == layout.q_indptr
    assert plan.kv_len.tolist()[:num_nodes] == layout.kv_len
    assert not plan.kv_len[num_nodes:].any()
    for node in range(num_nodes):
        pages = layout.kv_indices[layout.kv_indptr[node] : layout.kv_indptr[node + 1]]
        listed = plan.kv_indices[plan.kv_indptr[node] :][: len(pages)]
        assert listed.tolist() == pages


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", range(8))
def test_it_is_what_would_be_built_anew(page_size: int, seed: int) -> None:
    random = Random(f"{page_size} {seed}")
    tree, _ = new_tree(page_size)
    leaves = random_leaves(tree, random)
    plans = StepPlan(tree, [CPU])
    addresses: set[int] = set()
    is_reshaped, steps = True, random.randint(1, 3 * page_size + 5)
    for room in reversed(range(1, steps + 1)):
        live = [leaf for leaf in leaves if leaf is not None]
        tree.extend(live, [token_bytes([UNKNOWN_TOKEN])] * len(live))
        if is_reshaped:
            plans.rewrite(leaves, room)
        else:
            plans.add_pages(leaves)
        plans.advance()
        assert_is_current(plans.plans[CPU], tree, leaves)
        addresses.add(plans.plans[CPU].slots.data_ptr())
        is_reshaped = len(live) > 1 and random.random() < 0.1
        if is_reshaped:  # a row is over; what it leaves may be joined or taken by another
            row = random.choice([i for i, leaf in enumerate(leaves) if leaf is not None])
            tree.prune(leaves[row])
            leaves[row] = None
    assert len(addresses) == 1


def test_rows_that_are_all_over_store_nothing() -> None:
    tree, _ = new_tree(4)
    leaves = random_leaves(tree, Random(0))
    tree.extend(leaves, [token_bytes([UNKNOWN_TOKEN])] * len(leaves))
    plans = StepPlan(tree, [CPU])
    plans.rewrite(leaves, 1)
    plans.advance()
    over = [None] * len(leaves)
    plans.rewrite(over, 0)
    for _ in range(3):
        plans.advance()
        assert_is_current(plans.plans[CPU], tree, over)
