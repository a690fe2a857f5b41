"""RoPE on the way: the append kernel's rotation has the bits of torch's operators.

Products are rounded before the sum there, so nothing is fused into one multiply-add here; and as q
and the pools then are the same, so are all bits of the attention.
"""

from __future__ import annotations

import pytest
import torch
from cases import FOREST, TREES, Tree, angles, build, rotated
from hf_cascade.ops import kernels, reference
from kernel_calls import (
    LONERS,
    as_kernels_take,
    decode,
    needs_kernels,
    on_gpu,
    poison,
    same_bits,
    work_of,
)
from torch import Tensor

from hf_cascade import ops

pytestmark = needs_kernels

POOLS = ("k_pool", "v_pool")
DTYPES = (torch.float16, torch.bfloat16)
FINISHED = Tree("finished", (None, 0, 0, 0), (70, 3, 9, 40), (1, 2, 3), finished=(1,))


def call_of(tree: Tree, dtype: torch.dtype, rotary_dim: int, angle_dtype: torch.dtype) -> dict:
    """Arguments with cos and sin, q and k before RoPE."""
    args = on_gpu(build(as_kernels_take(tree), dtype).before_append(), ops.cascade_attention)
    turn = angles(len(args["q"]), rotary_dim, angle_dtype)
    return args | {name: value.cuda() for name, value in turn.items()}


def attend(args: dict, work: Tensor | None) -> tuple[Tensor, ...]:
    """The state, and the pools as they are then; those of `args` stay as they are."""
    pools = {name: args[name].clone() for name in POOLS}
    return (*ops.cascade_attention(**args | pools, work=work), *pools.values())


def rotated_first(args: dict) -> dict:
    given = dict(args)
    return rotated(given, given.pop("cos"), given.pop("sin"))


def assert_rotates(args: dict) -> None:
    for work in (None, work_of(args), work_of(args, batch_invariant=True)):
        expected = attend(rotated_first(args), work)
        assert all(same_bits(a, b) for a, b in zip(attend(args, work), expected, strict=True))


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", ["all", "some"])
@pytest.mark.parametrize("head_dim", kernels.HEAD_DIMS)
@pytest.mark.parametrize("tree", [FOREST, LONERS, FINISHED], ids=str)
def test_rotating_is_rotating_first(tree, head_dim, part, dtype, is_wide):
    """Several new tokens a sequence (the forest), one, and rows whose tokens are dropped."""
    rotary_dim = head_dim if part == "all" else 16 if head_dim < 128 else head_dim // 2
    args = on_gpu(
        build(as_kernels_take(tree, head_dim=head_dim), dtype).before_append(),
        ops.cascade_attention,
    )
    turn = angles(len(args["q"]), rotary_dim, torch.float32 if is_wide else dtype)
    assert_rotates(args | {name: value.cuda() for name, value in turn.items()})


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_trees(tree):
    assert_rotates(call_of(tree, torch.bfloat16, 64, torch.bfloat16))


# Heads and chunks of a token in one CTA, in several, and in a last one that is not full.
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(1, 1), (8, 4), (32, 1), (3, 7), (8, 16)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_numbers_of_heads(num_kv_heads, group_size, head_dim):
    paged = decode(3, 40, 9, num_kv_heads=num_kv_heads, group_size=group_size)
    tree = Tree("heads", (None, 0, 0), (40, 9, 1), (1, 2), num_kv_heads=num_kv_heads,
                group_size=group_size, head_dim=head_dim, page_size=16)  # fmt: skip
    for each in (paged, build(tree, torch.bfloat16)):
        args = on_gpu(each.before_append(), ops.cascade_attention)
        turn = angles(len(args["q"]), args["q"].shape[2], torch.bfloat16)
        assert_rotates(args | {name: value.cuda() for name, value in turn.items()})


def test_many_tokens():
    args = on_gpu(decode(400, 300, 20).before_append(), ops.cascade_attention)
    turn = angles(400, 64, torch.bfloat16)
    assert_rotates(args | {name: value.cuda() for name, value in turn.items()})


@pytest.mark.parametrize("is_transposed", [False, True])
def test_strided_rows_and_angles(is_transposed):
    args = call_of(FOREST, torch.bfloat16, 32, torch.bfloat16)
    expected = attend(rotated_first(args), work_of(args))
    names, heads = ("q", "k", "v"), [args[name].shape[1] for name in ("q", "k", "v")]
    packed = torch.cat([args[name] for name in names], dim=1)  # of one projection
    if is_transposed:
        packed = packed.transpose(0, 1).contiguous().transpose(0, 1)
    args |= dict(zip(names, packed.split(heads, dim=1), strict=True))
    both = torch.cat([args["cos"], args["sin"]], dim=1)
    args |= dict(zip(("cos", "sin"), both.chunk(2, dim=1), strict=True))
    state = attend(args, work_of(args))
    assert all(same_bits(a, b) for a, b in zip(state, expected, strict=True))


@pytest.mark.parametrize("changes", [{"rotary_dim": 24}, {"head_dim": 72}], ids=str)
def test_what_does_not_fit_is_composed(changes):
    head_dim = changes.get("head_dim", 64)
    tree = as_kernels_take(FOREST, head_dim=head_dim)
    args = on_gpu(build(tree, torch.bfloat16).before_append(), ops.cascade_attention)
    turn = angles(len(args["q"]), changes.get("rotary_dim", 32), torch.float32)
    args |= {name: value.cuda() for name, value in turn.items()}
    true = reference.cascade_attention(**args | {name: args[name].clone() for name in POOLS})
    out, lse, *_ = attend(args, None)
    torch.testing.assert_close(out, true[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, true[1], atol=1e-2, rtol=1e-3)


def test_one_without_the_other_is_refused(capfd):
    args = call_of(FOREST, torch.bfloat16, 32, torch.bfloat16)
    args["sin"] = None
    with pytest.raises(RuntimeError):
        ops.cascade_attention(**args)
    assert "cos and sin must be given both or not at all" in capfd.readouterr().err


@pytest.mark.parametrize("group_size", [1, 4, 8, 16])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nobody_reads_q_before_it_is_rotated(group_size, seed, monkeypatch):
    """The append is 20 microseconds late, and where it puts q there is NaN till then."""
    paged = decode(40, 900, 200, group_size=group_size)
    args = on_gpu(paged.before_append(), ops.cascade_attention)
    turn = angles(len(args["q"]), 64, torch.bfloat16)
    args |= {name: value.cuda() for name, value in turn.items()}
    works = (work_of(args), work_of(args, batch_invariant=True))
    expected = [attend(rotated_first(args), work) for work in works]
    monkeypatch.setenv("HF_CASCADE_DELAYS", str(seed))
    for work, true in zip(works, expected, strict=True):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            poison(0xFF)
            state = [x.cpu() for x in attend(args, work)]
        del pool
        assert all(same_bits(a, b.cpu()) for a, b in zip(state, true, strict=True))


def test_a_graph_replays_it():
    args = on_gpu(decode(5).before_append(), ops.cascade_attention)
    turn = angles(len(args["q"]), 64, torch.bfloat16)
    args |= {name: value.cuda() for name, value in turn.items()}
    work = work_of(args)
    eager = ops.cascade_attention(**args, work=work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = ops.cascade_attention(**args, work=work)
    for name in ("q", "k", "cos"):
        args[name].neg_()  # what is read is what is there at the replay
    expected = ops.cascade_attention(**args, work=work)
    graph.replay()
    assert all(same_bits(a, b) for a, b in zip(replayed, expected, strict=True))
    assert not same_bits(replayed[0], eager[0])
