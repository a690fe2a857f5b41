"""Attention over a KV tree equals attention over each of its sequences, flattened."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from cases import FOREST, TREES, PagedTree, Tree, build, cut, int32, renumber_pages, reorder, trees
from hf_cascade.ops import composed, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Flat, State, assert_attends, attention
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hf_cascade import ops

# What each op computes of the sequences of a tree, as an attribute of PagedTree.
FLATTENED = {
    "prefix_attention": "prefixes",
    "suffix_attention": "suffixes",
    "cascade_attention": "paths",
}
over_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
over_trees = pytest.mark.parametrize("tree", [*TREES, FOREST], ids=str)
over_random_trees = settings(derandomize=True, deadline=None, max_examples=60)


@over_dtypes
@over_trees
@pytest.mark.parametrize("implementation", [ops, reference], ids=["ops", "reference"])
def test_a_tree_equals_its_sequences(implementation, tree, dtype):
    assert_equals_sequences(build(tree, dtype), implementation)


@over_trees
def test_pools_may_lie_slot_by_slot(tree):
    assert_equals_sequences(build(replace(tree, by_slot=True)))


@over_trees
@over_dtypes
@pytest.mark.parametrize("most_scores", [1, 24, 1 << 26])
def test_elsewhere_than_on_a_cpu_scores_are_computed_a_few_rows_at_a_time(
    tree, dtype, most_scores, monkeypatch
):
    monkeypatch.setattr(composed, "_attend", composed._attend_by_scores)
    monkeypatch.setattr(composed, "_MOST_SCORES", most_scores)
    assert_equals_sequences(build(tree, dtype))


@over_trees
def test_what_fails_writes_nothing(tree):
    tree_args = build(tree).before_append().args(ops.cascade_attention)
    before = [tree_args[name].clone() for name in ("k_pool", "v_pool")]
    args = tree_args | {"kv_len": tree_args["kv_len"] + 10_000}  # more than the pages hold
    with pytest.raises(ValueError, match="kv_len"):
        ops.cascade_attention(**args)
    for pool, as_it_was in zip((args["k_pool"], args["v_pool"]), before, strict=True):
        torch.testing.assert_close(pool, as_it_was, rtol=0, atol=0, equal_nan=True)


@over_random_trees
@given(trees(), st.integers(0, 9))
def test_any_tree_equals_its_sequences(tree, seed):
    assert_equals_sequences(build(tree, seed=seed))


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 32, 128])
def test_any_page_size_will_do(page_size):
    assert_equals_sequences(build(replace(FOREST, page_size=page_size)))


@over_dtypes
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_any_head_dim_will_do(head_dim, dtype):
    assert_equals_sequences(build(replace(FOREST, head_dim=head_dim), dtype))


@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("group_size", [1, 3, 4, 8])
def test_any_group_of_heads_will_do(group_size, num_kv_heads):
    heads = {"group_size": group_size, "num_kv_heads": num_kv_heads}
    assert_equals_sequences(build(replace(FOREST, **heads)))


@pytest.mark.parametrize("group_size", [1, 3, 4, 8])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 21])
def test_a_prefix_in_parts_is_the_same_prefix(num_parts, group_size):
    tree = build(Tree("", (None, 0), (21, 6), (1,), q_len=(5,), group_size=group_size))
    for _ in range(num_parts - 1):
        tree = cut(tree, 0, at=21 // num_parts)
    assert_equals_sequences(tree)


@over_random_trees
@given(trees(), st.data())
def test_cutting_a_node_changes_nothing(tree, data):
    node = data.draw(st.integers(0, len(tree.kv_len) - 1))
    q_len = tree.q_len[tree.leaves.index(node)] if node in tree.leaves else 0
    at = data.draw(st.integers(0, max(0, tree.kv_len[node] - q_len)))
    assert_equals_sequences(cut(build(tree), node, at))


@over_random_trees
@given(trees(), st.randoms())
def test_rows_follow_the_order_of_sequences(tree, random):
    order = random.sample(range(len(tree.leaves)), len(tree.leaves))
    assert_equals_sequences(reorder(build(tree), order))


@over_random_trees
@given(trees(), st.randoms())
def test_page_ids_change_no_bit(tree, random):
    tree = build(tree)
    page_ids = random.sample(range(len(tree.k_pool)), len(tree.k_pool))
    assert_same_bits(renumber_pages(tree, page_ids), tree)


@over_dtypes
@over_trees
@pytest.mark.parametrize("garbage", [0.0, torch.inf])
def test_what_no_node_owns_changes_no_bit(garbage, tree, dtype):
    poisoned = build(tree, dtype)  # with NaN
    k_pool, v_pool = (x.where(~x.isnan(), garbage) for x in (poisoned.k_pool, poisoned.v_pool))
    assert_same_bits(replace(poisoned, k_pool=k_pool, v_pool=v_pool), poisoned)


@over_dtypes
@over_trees
def test_a_token_changes_only_the_rows_that_see_it(tree, dtype):
    tree = build(tree, dtype)
    before = run("cascade_attention", tree)
    for token in range(len(tree.q)):
        k, v = tree.k.clone(), tree.v.clone()
        k[token], v[token] = k[token] + 1, v[token] + 1
        after = run("cascade_attention", replace(tree, k=k, v=v))
        sees = tree.rows_that_see(token)
        for a, b in zip(after, before, strict=True):
            changed = (a != b).flatten(1).any(1)  # bits: there is no tolerance
            assert torch.equal(changed, sees)


@over_dtypes
@pytest.mark.parametrize("name", FLATTENED)
def test_values_may_lie_apart(name, dtype):
    tree = build(FOREST, dtype)
    apart = {
        each: getattr(tree, each).mT.contiguous().mT for each in ("q", "k", "v", "k_pool", "v_pool")
    }
    assert all(value.stride(-1) > 1 for value in apart.values())
    assert_same(run(name, replace(tree, **apart)), run(name, tree))


def test_plans_made_together_run_apart():
    one, other = build(FOREST, seed=1), build(FOREST, seed=2)
    arguments = [tree.args(ops.prefix_attention) for tree in (one, other)]
    states = [ops.prefix_attention(**each) for each in arguments]
    assert_rows(states[0], one.prefixes, one)
    assert_rows(states[1], other.prefixes, other)


@over_dtypes
@pytest.mark.parametrize("num_tokens", [4096, 32768])
def test_lse_is_a_natural_logarithm_however_many_the_tokens(num_tokens, dtype):
    tree = build(Tree("", (None, 0), (num_tokens, 100), (1,), page_size=128), dtype)
    for name, flattened in FLATTENED.items():
        [flat] = getattr(tree, flattened)
        assert (run(name, tree)[1] - attention(flat)[1]).abs().max() < 1e-3


def test_a_cascade_appends_then_attends_to_both_then_merges():
    tree = build(FOREST)
    whole, steps = tree.before_append(), tree.before_append()
    state = ops.cascade_attention(**whole.args(ops.cascade_attention))
    ops.append_kv(**steps.args(ops.append_kv))
    prefix = ops.prefix_attention(**steps.args(ops.prefix_attention))
    suffix = ops.suffix_attention(**steps.args(ops.suffix_attention))
    assert_same(state, ops.merge_state(*prefix, *suffix))
    assert_same((whole.k_pool, whole.v_pool), (steps.k_pool, steps.v_pool))
    assert_same((whole.k_pool, whole.v_pool), (tree.k_pool, tree.v_pool))


@pytest.mark.parametrize("name", FLATTENED)
def test_a_shared_prefix_is_not_copied_for_each_sequence(name):
    num_seqs = 64
    parents, kv_len = (None, *[0] * num_seqs), (2048, *[8] * num_seqs)
    shape = {"num_kv_heads": 2, "group_size": 4, "head_dim": 64, "page_size": 16}
    tree = build(Tree("", parents, kv_len, tuple(range(1, 1 + num_seqs)), **shape))
    kv_bytes = 2 * sum(kv_len) * tree.k[0].nbytes
    op, arguments = getattr(ops, name), tree.args(getattr(ops, name))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        op(**arguments)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profiler.events())
    assert allocated < 3 * kv_bytes  # one copy a row would be 64


def with_entry(index: int, value: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.index_fill(0, torch.tensor(index), value)


@pytest.mark.parametrize(
    ("argument", "unfit"),
    [
        ("q", lambda q: q.half()),
        ("q", lambda q: q[..., :8]),
        ("q", lambda q: q[:, :3]),
        ("q", lambda q: q.flatten(1)),
        ("k_pool", lambda pool: pool[0]),
        ("v_pool", lambda pool: pool[1:]),
        ("v_pool", lambda pool: pool.half()),
        ("q_indptr", lambda indptr: indptr.long()),
        ("q_indptr", lambda indptr: indptr[:0]),
        ("q_indptr", with_entry(0, 1)),
        ("q_indptr", with_entry(1, 6)),
        ("q_indptr", with_entry(-1, 100)),
        ("kv_indptr", lambda indptr: indptr[1:]),
        ("kv_indptr", with_entry(1, -1)),
        ("kv_indptr", with_entry(-1, 10_000)),
        ("kv_indices", lambda pages: pages.long()),
        ("kv_indices", lambda pages: pages[None]),
        ("kv_indices", with_entry(0, 1000)),
        ("kv_indices", with_entry(0, -1)),
        ("kv_len", lambda kv_len: kv_len.long()),
        ("kv_len", with_entry(0, -1)),
        ("kv_len", with_entry(0, 100)),
        ("first_slot", lambda first_slot: first_slot[1:]),
        ("first_slot", with_entry(0, -1)),
        ("first_slot", with_entry(0, FOREST.page_size)),
        ("leaves", lambda leaves: leaves[1:]),
        ("leaves", with_entry(0, -1)),
        ("leaves", with_entry(0, len(FOREST.parents))),
        ("reader_indptr", lambda indptr: indptr[1:]),
        ("reader_indptr", with_entry(-1, 100)),
        ("readers", lambda readers: readers.long()),
        ("readers", lambda readers: readers.flip(0)),
        ("readers", with_entry(0, -1)),
        ("readers", with_entry(0, len(FOREST.leaves))),
    ],
)
@pytest.mark.parametrize("name", FLATTENED)
def test_an_unfit_argument_is_named(name, argument, unfit):
    op = getattr(ops, name)
    arguments = build(FOREST).args(op)
    if argument in arguments:
        with pytest.raises(ValueError, match=argument):
            op(**arguments | {argument: unfit(arguments[argument])})


def test_more_queries_than_tokens_of_a_leaf_are_refused():
    arguments = build(Tree("", (None,), (3,), (0,), q_len=(3,))).args(ops.suffix_attention)
    with pytest.raises(ValueError, match="kv_len"):
        ops.suffix_attention(**arguments | {"kv_len": int32([2])})


@pytest.mark.parametrize("name", FLATTENED)
def test_gradients_are_refused(name):
    op, tree = getattr(ops, name), build(FOREST)
    with pytest.raises(RuntimeError, match=f"{name} is for inference and has no gradient"):
        op(**tree.args(op) | {"q": tree.q.requires_grad_()})


def run(name: str, tree: PagedTree, implementation: ModuleType = ops) -> State:
    """The state that an op gives; the cascade has to append the new tokens first."""
    op = getattr(implementation, name)
    return op(**(tree.before_append() if name == "cascade_attention" else tree).args(op))


@over_trees
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("op", FLATTENED)
def test_states_lie_as_compiled_code_expects_them(op, group_size, tree):
    paged = build(replace(tree, group_size=group_size, num_kv_heads=3))
    paged = paged.before_append() if op == "cascade_attention" else paged
    function = getattr(ops, op)
    assert all(each.is_contiguous() for each in function(**paged.args(function)))


def assert_equals_sequences(tree: PagedTree, implementation: ModuleType = ops) -> None:
    """Every op gives every sequence the state that the oracle finds without a tree."""
    for name, flattened in FLATTENED.items():
        assert_rows(run(name, tree, implementation), getattr(tree, flattened), tree)


def assert_rows(state: State, flats: tuple[Flat, ...], tree: PagedTree) -> None:
    assert len(state[0]) == sum(tree.q_len)
    for seq, flat in enumerate(flats):
        rows = tree.rows(seq)
        assert_attends((state[0][rows], state[1][rows]), flat, merges=len(tree.nodes))


def assert_same_bits(one: PagedTree, other: PagedTree) -> None:
    for name in FLATTENED:
        assert_same(run(name, one), run(name, other))


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
