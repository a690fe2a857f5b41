"""`cascade_attention` with cos and sin is the same after RoPE was applied to q and k."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import FOREST, TREES, angles, build, rotated
from hf_cascade.ops import reference
from torch import Tensor

from hf_cascade import ops

POOLS = ("k_pool", "v_pool")
TREE = replace(FOREST, head_dim=32)


def arguments(tree=TREE, dtype: torch.dtype = torch.float32) -> dict:
    return build(tree, dtype).before_append().args(ops.cascade_attention)


@pytest.mark.parametrize("implementation", [ops, reference], ids=["ops", "reference"])
@pytest.mark.parametrize(
    ("dtype", "angle_dtype"),
    [
        (torch.float32, torch.float32),
        *((dtype, wide) for dtype in (torch.float16, torch.bfloat16)
          for wide in (dtype, torch.float32)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rotary_dim", [2, 8, 32])
@pytest.mark.parametrize(
    "tree",
    [FOREST, *(tree for tree in TREES if tree.name in ("finished rows", "one prefix"))],
    ids=str,
)
def test_rotating_is_rotating_first(tree, rotary_dim, dtype, angle_dtype, implementation):
    args = arguments(replace(tree, head_dim=32), dtype)
    turn = angles(len(args["q"]), rotary_dim, angle_dtype)
    first = rotated(args, **turn) | {name: args[name].clone() for name in POOLS}
    expected = implementation.cascade_attention(**first)
    state = implementation.cascade_attention(**args, **turn)
    for a, b in zip(
        (*state, *(args[name] for name in POOLS)),
        (*expected, *(first[name] for name in POOLS)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_rotary_dim_counts_from_the_front_of_a_head():
    """Of a quarter turn, the first half is the second one's negative, the second is the first."""
    args = arguments()
    shape = (len(args["q"]), 8)
    ops.cascade_attention(**args, cos=torch.zeros(shape), sin=torch.ones(shape))
    slot, k = int(args["slots"][0]), args["k"][0]
    stored = args["k_pool"][slot // TREE.page_size, :, slot % TREE.page_size]
    assert torch.equal(stored, torch.cat([-k[:, 4:8], k[:, :4], k[:, 8:]], -1))


def test_q_and_k_stay_as_they_were():
    args = arguments()
    before = {name: args[name].clone() for name in ("q", "k")}
    ops.cascade_attention(**args, **angles(len(args["q"]), 32))
    assert all(torch.equal(args[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sin": None}, "cos and sin must be given both or not at all, got no sin"),
        ({"cos": None}, "cos and sin must be given both or not at all, got no cos"),
        ({"cos": torch.zeros(11, 1, 8)}, r"cos must be \[num_tokens, rotary_dim\], got 3 dim"),
        ({"sin": torch.zeros(10, 8)}, "sin must have as many tokens as q, 11, got 10"),
        ({"sin": torch.zeros(11, 6)}, r"sin must be like cos \(\(11, 8\), .*got \(11, 6\)"),
        ({"cos": torch.zeros(11, 8).half()}, "cos must be torch.float32 like q or float32, got"),
        ({"cos": torch.zeros(11, 8, device="meta")}, "cos must be on cpu like q, got meta"),
        (dict.fromkeys(("cos", "sin"), torch.zeros(11, 7)), "even and at most head_dim .*, got 7"),
        (dict.fromkeys(("cos", "sin"), torch.zeros(11, 34)), "at most head_dim = 32, got 34"),
        (dict.fromkeys(("cos", "sin"), torch.zeros(11, 0)), "cos must have a rotary_dim .* got 0"),
        ({name: torch.zeros(5, 2, 32) for name in ("k", "v")}, "k must have as many tokens as q"),
        ({"k": torch.zeros(11, 2, 16)}, "k must have head_dim 32"),
        ({"q": torch.zeros(11, 32)}, r"q must be \[num_tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_before_anything_is_written(
    change: dict[str, Tensor | None], message: str
):
    args = arguments() | angles(11, 8)
    before = [args[name].clone() for name in POOLS]
    with pytest.raises(ValueError, match=message):
        ops.cascade_attention(**args | change)
    for name, pool in zip(POOLS, before, strict=True):
        torch.testing.assert_close(args[name], pool, rtol=0, atol=0, equal_nan=True)
