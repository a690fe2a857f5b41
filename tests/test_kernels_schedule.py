"""What must not show in the bits: how many CTAs share the items, who is late, what the scratch held
before, who else runs on the GPU, and whether a graph or a call launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest
import torch
from cases import TREES, Tree, build
from hf_cascade.ops import kernels, reference
from kernel_calls import (
    as_kernels_take,
    header_of,
    needs_kernels,
    on_gpu,
    poison,
    same_bits,
    work_of,
)
from torch import Tensor

from hf_cascade import ops

pytestmark = needs_kernels

GRIDS = (1, 2, 7, 131, 132, 500)
SEEDS = (1, 2, 3, 4, 5)
CTAS, DELAYS = "HF_CASCADE_CTAS", "HF_CASCADE_DELAYS"

# Group sizes whose leaves are leaf warps' (to 8) and matrix warps' (16); head dims with wgmma (64,
# 128) and without.
SHAPES = ((1, 128), (4, 64), (4, 256), (8, 128), (8, 96), (16, 64))


# ------------------------------------------------------------------ trees


def random_tree(seed: int, group_size: int, head_dim: int, *, prefills: bool) -> Tree:
    """Some 40 nodes: shared ones of many readers and of few, prompts of one reader, ragged leaves;
    empty nodes and nodes of one token among all of them.
    """
    random = Random(f"{seed} {group_size} {head_dim}")
    parents: list[int | None] = [None, 0, 0, None]
    kv_len = [random.randint(1000, 2500), random.randint(17, 400), 1, random.randint(100, 700)]

    def add(parent: int | None, length: int) -> int:
        parents.append(parent)
        kv_len.append(length)
        return len(parents) - 1

    for _ in range(4):
        add(random.randrange(len(parents)), random.choice([0, 1, 16, random.randint(17, 500)]))
    num_shared, leaves = len(parents), []
    for i in range(24):
        parent = random.choice([0, 0, 1, *range(num_shared)])
        if i % 6 == 0:
            parent = add(random.choice([None, parent]), random.randint(100, 900))
        length = random.choice([0, 1, random.randint(2, 64), random.randint(65, 700)])
        leaves.append(add(parent, length))
    q_len = [1] * len(leaves)
    q_len[5] = 0
    if prefills:
        leaves += [0, 1, 3]  # what others read is computed in the same call
        q_len = [random.randint(0, min(kv_len[leaf], 90) or 2) for leaf in leaves]
        q_len[-3] = 150
    return Tree(
        f"{'prefill' if prefills else 'decode'} {group_size}x{head_dim} {seed}",
        tuple(parents),
        tuple(kv_len),
        tuple(leaves),
        q_len=tuple(q_len),
        finished=() if prefills else (3, 10),
        group_size=group_size,
        head_dim=head_dim,
        page_size=16,
    )


SOME_TREES, OTHER_TREES = (
    [random_tree(seed, *shape, prefills=prefills) for shape in SHAPES for prefills in (False, True)]
    for seed in (0, 1)
)
RANDOM_TREES = SOME_TREES + OTHER_TREES
SMALL_TREES = tuple(as_kernels_take(tree) for tree in TREES)


# ------------------------------------------------------------------ calls

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Call:
    """A call of `cascade_attention`, and what it gives with each kind of work list, undisturbed."""

    args: dict  # not to be called with: the query tokens' KV is not in these pools
    works: tuple[Tensor | None, ...]
    expected: tuple[State, ...]

    def fresh_args(self) -> dict:
        return self.args | {name: self.args[name].clone() for name in ("k_pool", "v_pool")}

    def states(self) -> list[State]:
        """An attention that overtook the append would see NaN."""
        return [ops.cascade_attention(**self.fresh_args(), work=work) for work in self.works]

    def check(self, states: Iterable[State]) -> None:
        for state, expected in zip(states, self.expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(state, expected, strict=True))


@cache
def call_of(tree: Tree) -> Call:
    """To be asked for before anything is forced."""
    args = on_gpu(build(tree, torch.bfloat16).before_append(), ops.cascade_attention)
    works = (None, work_of(args), work_of(args, batch_invariant=True))
    expected = tuple(Call(args, works, ()).states())
    assert all(same_bits(a, b) for a, b in zip(*expected[:2], strict=True))
    return Call(args, works, expected)


@pytest.fixture(autouse=True)
def unforced(monkeypatch):
    for name in (CTAS, DELAYS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def force(monkeypatch):
    """force(trees, NAME=value, ..): their answers are the same under this schedule."""
    header = (kernels.source_folder() / "forced_schedule.h").read_text()

    def check(trees: Iterable[Tree], **schedule: int) -> None:
        calls = [call_of(tree) for tree in trees]
        for name, value in schedule.items():
            assert f'"{name}"' in header  # a name that nobody reads would force nothing
            monkeypatch.setenv(name, str(value))
        for call in calls:
            call.check(call.states())

    return check


@pytest.mark.parametrize("tree", RANDOM_TREES, ids=str)
def test_random_trees(tree):
    call = call_of(tree)
    true = reference.cascade_attention(**call.fresh_args())
    for state in call.expected:
        assert_near(state, true)


def assert_near(state: State, true: State) -> None:
    torch.testing.assert_close(state[0], true[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(state[1], true[1], atol=1e-2, rtol=1e-3)


# ------------------------------------------------------------------ grids and delays


@pytest.mark.parametrize("trees", [RANDOM_TREES, SMALL_TREES], ids=["random", "small"])
@pytest.mark.parametrize("num_ctas", GRIDS)
def test_any_grid(force, num_ctas, trees):
    force(trees, **{CTAS: num_ctas})


@pytest.mark.parametrize("trees", [RANDOM_TREES, SMALL_TREES], ids=["random", "small"])
@pytest.mark.parametrize("seed", SEEDS)
def test_delays(force, seed, trees):
    force(trees, **{DELAYS: seed})


@pytest.mark.parametrize("num_ctas", GRIDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_delays_on_any_grid(force, seed, num_ctas):
    force((SOME_TREES, OTHER_TREES)[seed % 2], **{CTAS: num_ctas, DELAYS: seed})


# ------------------------------------------------------------------ scratch

# Its work list is too large for shared memory and made in scratch.
LARGE_LIST = Tree("large list", (None, 0, 0, 0, *[None] * 8000), (700, 30, 1, 200, *[0] * 8000),
                  (1, 2, 3), group_size=4, head_dim=64, page_size=16)  # fmt: skip


# As int32: -1 and a large number; as floats: NaN and a huge one.
@pytest.mark.parametrize("byte", [0xFF, 0x7F])
@pytest.mark.parametrize("tree", [*SOME_TREES, LARGE_LIST], ids=str)
def test_poisoned_scratch(tree, byte):
    """All memory that the op gets (its ticket, work list, states and outputs) is full of `byte`."""
    call = call_of(tree)
    kinds = (None, False, True)  # of work list: the op's own, balanced, batch invariant
    states = []
    for batch_invariant in kinds:
        args = call.fresh_args()
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            poison(byte)
            work = None
            if batch_invariant is not None:
                work = work_of(args, batch_invariant=batch_invariant)
            state = ops.cascade_attention(**args, work=work)
            states.append(tuple(x.cpu() for x in state))
            del state, work
        del pool
    expected = [tuple(x.cpu() for x in state) for state in call.expected]
    Call({}, (), tuple(expected)).check(states)


# ------------------------------------------------------------------ company


@pytest.mark.parametrize("is_beside_matmuls", [False, True])
@pytest.mark.parametrize(
    ("one", "other"), [(0, 0), (1, 1), (2, 3), (4, 6), (10, 0)], ids=lambda i: str(SOME_TREES[i])
)
def test_two_streams(one, other, is_beside_matmuls):
    calls = [call_of(SOME_TREES[i]) for i in (one, other)]
    args = [call.fresh_args() for call in calls]
    if one == other:
        args[1] = args[0]  # the pools too: both append the same to them
    large = torch.randn(8192, 8192, device="cuda").bfloat16()
    product = torch.empty_like(large)
    *streams, busy = (torch.cuda.Stream() for _ in range(3))
    states: list[list[list[State]]] = [[], []]
    torch.cuda.synchronize()
    for repeat in range(20):
        if is_beside_matmuls and repeat % 2 == 0:
            with torch.cuda.stream(busy):  # a few milliseconds, on all multiprocessors
                for _ in range(2):
                    torch.mm(large, large, out=product)
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found = [ops.cascade_attention(**args[i], work=work) for work in calls[i].works]
            states[i].append(found)
    torch.cuda.synchronize()
    for call, repeats in zip(calls, states, strict=True):
        for found in repeats:
            call.check(found)


# ------------------------------------------------------------------ graphs

# Of the shared node and of four leaves: tokens at the first replay, and how many more at each.
START, GROWTH = (700, 1, 15, 1, 60), (97, 1, 16, 113, 211)
NUM_REPLAYS = 20


@pytest.mark.parametrize("group_size", [4, 16])
def test_lengths_grow_between_replays(group_size):
    """Past borders of pages (of 16) and of splits; each step appends a token to each leaf."""
    longest = tuple(a + NUM_REPLAYS * b for a, b in zip(START, GROWTH, strict=True))
    tree = Tree("growing", (None, 0, 0, 0, 0), longest, (1, 2, 3, 4), group_size=group_size,
                head_dim=128, page_size=16)  # fmt: skip
    args = on_gpu(build(tree, torch.bfloat16), ops.cascade_attention)
    kv_len, growth = (
        torch.tensor(values, dtype=torch.int32, device="cuda") for values in (START, GROWTH)
    )
    args["kv_len"] = kv_len

    def step() -> State:
        leaves = args["leaves"]
        last = args["first_slot"][leaves] + kv_len[leaves] - 1
        page = args["kv_indices"][args["kv_indptr"][leaves] + last // 16]
        args["slots"].copy_(page * 16 + last % 16)
        return ops.cascade_attention(**args, work=work_of(args))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    headers = []
    for _ in range(NUM_REPLAYS):
        graph.replay()
        state = [x.clone() for x in captured]
        graph.replay()
        assert all(same_bits(a, b) for a, b in zip(captured, state, strict=True))
        eager = ops.cascade_attention(**args)
        true = reference.cascade_attention(**args)
        for other in (eager, true):
            assert_near(tuple(state), other)
        headers.append(header_of(args))
        kv_len += growth
    num_items = [h["num_shared_items"] + h["num_leaf_items"] for h in headers]
    assert len(set(num_items)) > 2  # nodes that are cut, and cut anew
