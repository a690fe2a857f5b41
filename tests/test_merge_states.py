"""States of attention under merge: a commutative monoid, law by law.

A state is (out, lse), what attention over a KV set leaves behind. Merging gives the state of the
union of disjoint sets, in any order and any number of pieces; the state of no KV at all,
(0, -inf), changes nothing.
"""

from functools import reduce

import pytest
import torch
from hf_cascade.ops import merge_state, merge_states, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Flat, State, assert_as_exact, assert_attends, attention, merge, pytorch_merge
from torch import Tensor

SHAPE = (30, 4, 16)  # num_tokens, num_q_heads, head_dim
over_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


@over_dtypes
@pytest.mark.parametrize(
    "sizes", [(5, 5), (9, 1), (0, 10), (10, 0), (3, 0, 6, 1), (1,) * 10], ids=str
)
def test_attention_over_a_union_is_the_merge_of_attention_over_its_parts(sizes, dtype):
    q, k, v = normal(3, 10, 4, 16).to(dtype)
    parts = [
        attention(Flat(q, k_part, v_part, visible=(len(k_part),) * 10, sm_scale=0.25))
        for k_part, v_part in zip(k.split(sizes), v.split(sizes), strict=True)
    ]
    out, lse = stack(*parts)
    merged = merge_states(out.to(dtype), lse.float())
    assert_attends(merged, Flat(q, k, v, visible=(10,) * 10, sm_scale=0.25), merges=len(parts))


@over_dtypes
def test_merging_commutes_to_the_bit(dtype):
    a, b = each(random_states(2, dtype))
    assert_same_bits(merge_state(*a, *b), merge_state(*b, *a))


@over_dtypes
def test_merging_associates(dtype):
    states = random_states(3, dtype)
    a, b, c = each(states)
    assert_merged(merge_state(*merge_state(*a, *b), *c), states)
    assert_merged(merge_state(*a, *merge_state(*b, *c)), states)


@over_dtypes
@pytest.mark.parametrize("num_states", [0, 1, 2, 3, 7])
def test_many_states_merge_as_one_after_the_other(num_states, dtype):
    states = random_states(num_states, dtype)
    folded = reduce(lambda a, b: merge_state(*a, *b), each(states), empty_state(dtype))
    for merged in (folded, merge_states(*states), reference.merge_states(*states)):
        assert_merged(merged, states)


@over_dtypes
def test_an_empty_state_changes_no_bit(dtype):
    [(out, lse)] = each(random_states(1, dtype))
    out[0], out[1], lse[2], lse[3] = -0.0, torch.finfo(dtype).max, 1e4, -1e4
    state, empty = (out, lse), empty_state(dtype)
    assert_same_bits(merge_state(*state, *empty), state)
    assert_same_bits(merge_state(*empty, *state), state)
    assert_same_bits(merge_states(*stack(empty, state, empty)), state)


@over_dtypes
def test_nothing_merged_with_nothing_is_nothing(dtype):
    empty = empty_state(dtype)
    assert_same_bits(merge_state(*empty, *empty), empty)
    assert_same_bits(merge_states(*stack(empty, empty, empty)), empty)
    assert_same_bits(merge_states(*random_states(0, dtype)), empty)


@over_dtypes
@pytest.mark.parametrize("lse", [(1e4, -1e4), (-1e4, 1e4), (1e4, 1e4), (-1e4, 1 - 1e4)], ids=str)
def test_extreme_states_merge_like_any(lse, dtype):
    states = random_states(2, dtype)
    states[1][:] = torch.tensor(lse)[:, None, None]
    a, b = each(states)
    assert_merged(merge_state(*a, *b), states)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(finite, finite) | st.just((0.0, -torch.inf)), min_size=2, max_size=4))
def test_no_finite_states_make_a_nan(states):
    out, lse = torch.tensor(states).split(1, dim=1)  # [num_states, 1] each
    for merged in (merge_states(out, lse[:, 0]), merge_state(out[0], lse[0, 0], out[1], lse[1, 0])):
        assert not any(x.isnan().any() for x in merged)


@pytest.mark.parametrize("num_tokens", [4096, 32768])
def test_lse_is_a_natural_logarithm_however_many_the_tokens(num_tokens):
    scores = normal(num_tokens)
    lse = torch.stack([part.logsumexp(0) for part in scores.split(500)])
    merged_lse = merge_states(torch.zeros(len(lse), 1), lse)[1]
    assert abs(merged_lse - scores.double().logsumexp(0)) < 1e-3


@pytest.mark.parametrize("shape", [(16,), (0, 4, 16), (2, 3, 4, 16)], ids=str)
def test_states_have_any_shape(shape):
    states = normal(3, *shape), normal(3, *shape[:-1])
    assert_merged(merge_states(*states), states)


@over_dtypes
def test_states_may_lie_in_memory_as_they_like(dtype):
    states = random_states(2, dtype)
    heads_first = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in states)
    a, b = each(heads_first)
    for merged in (merge_state(*a, *b), merge_states(*heads_first)):
        assert_merged(merged, states)
        assert all(x.is_contiguous() for x in merged)  # as the fakes promise


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("out_a", torch.zeros(SHAPE, dtype=torch.int32)),
        ("lse_a", torch.zeros(SHAPE[:-1], dtype=torch.float64)),
        ("lse_a", torch.zeros(SHAPE)),
        ("out_b", torch.zeros(SHAPE, dtype=torch.float16)),
        ("lse_b", torch.zeros(SHAPE[:1])),
        ("lse_b", torch.zeros(SHAPE[:-1], device="meta")),
    ],
)
def test_an_unfit_argument_is_named(argument, value):
    (out, lse) = empty_state(torch.float32)
    arguments = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse} | {argument: value}
    with pytest.raises(ValueError, match=f"{argument} must"):
        merge_state(**arguments)


def test_an_unfit_stack_is_named():
    out, lse = random_states(2, torch.float32)
    for argument, states in (("lse", (out, lse[:1])), ("out", (out[0, 0, 0, 0], lse[0, 0, 0]))):
        with pytest.raises(ValueError, match=f"{argument} must"):
            merge_states(*states)


def test_gradients_are_refused():
    a, b = each(random_states(2, torch.float32))
    a[0].requires_grad_()
    for op, arguments in ((merge_state, (*a, *b)), (merge_states, stack(a, b))):
        with pytest.raises(RuntimeError, match=f"{op.__name__} is for inference"):
            op(*arguments)
        with torch.no_grad():
            op(*arguments)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def random_states(count: int, dtype: torch.dtype) -> State:
    """States stacked along the first dimension, none so heavy that the others don't matter."""
    return normal(count, *SHAPE).to(dtype), 2 * normal(count, *SHAPE[:-1])


def empty_state(dtype: torch.dtype) -> State:
    return torch.zeros(SHAPE, dtype=dtype), torch.full(SHAPE[:-1], -torch.inf)


def each(states: State) -> list[State]:
    return list(zip(*states, strict=True))


def stack(*states: State) -> State:
    out, lse = zip(*states, strict=True)
    return torch.stack(out), torch.stack(lse)


def assert_merged(state: State, parts: State) -> None:
    truth, pytorch = merge(*parts), pytorch_merge(*parts)
    assert_as_exact(state, truth=truth, pytorch=pytorch, merges=len(parts[0]))


def assert_same_bits(actual: State, expected: State) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # tells -0.0 from 0.0
