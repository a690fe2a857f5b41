"""Small calls of every kernel, for compute-sanitizer: benchmarks/gpu_check.py --sanitize.

Each tool runs all of this file, ten to a hundred times slower than the GPU is. Slots that no token
owns hold NaN, listed pages that no token needs do not exist (cases.py).
"""

from __future__ import annotations

import pytest
import torch
from cases import FOREST, Tree, angles, build, rotated
from hf_cascade.ops import reference
from kernel_calls import (
    as_kernels_take,
    assert_part_attends,
    needs_kernels,
    on_gpu,
    run,
    work_of,
)
from oracle import assert_as_exact, merge, pytorch_merge

from hf_cascade import ops

pytestmark = needs_kernels

# A node that two of four read, two that only one reads, a leaf alone and one with nothing in it.
DECODE = Tree("decode", (None, 0, 0, None, 3, 4, None), (150, 3, 70, 200, 17, 9, 0),
              (1, 2, 5, 6))  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tree", [DECODE, FOREST], ids=["decode", "prefill"])
def test_sanitized_attention(tree, head_dim):
    paged = build(as_kernels_take(tree, head_dim=head_dim), torch.bfloat16)
    args = on_gpu(paged.before_append(), ops.cascade_attention)
    states = [ops.cascade_attention(**args, work=work) for work in (None, work_of(args))]
    for state in states:
        assert_part_attends(paged, "paths", tuple(x.cpu() for x in state))


@pytest.mark.parametrize("angle_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rotary_dim", [32, 128])
@pytest.mark.parametrize("tree", [DECODE, FOREST], ids=["decode", "prefill"])
def test_sanitized_rope(tree, rotary_dim, angle_dtype):
    paged = build(as_kernels_take(tree, head_dim=128), torch.bfloat16)
    args = on_gpu(paged.before_append(), ops.cascade_attention)
    turn = angles(len(args["q"]), rotary_dim, angle_dtype)
    cos, sin = (turn[name].cuda() for name in ("cos", "sin"))
    first = rotated(args, cos, sin) | {name: args[name].clone() for name in ("k_pool", "v_pool")}
    expected = ops.cascade_attention(**first, work=work_of(args))
    state = ops.cascade_attention(**args, work=work_of(args), cos=cos, sin=sin)
    assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))


def test_sanitized_parts():
    paged = build(as_kernels_take(DECODE), torch.bfloat16)
    assert_part_attends(paged, "prefixes", run(ops.prefix_attention, paged))
    assert_part_attends(paged, "suffixes", run(ops.suffix_attention, paged))


def test_sanitized_append():
    paged = build(as_kernels_take(FOREST), torch.bfloat16).before_append()
    args, truth = on_gpu(paged, ops.append_kv), paged.args(reference.append_kv)
    ops.append_kv(**args)
    reference.append_kv(**truth)
    for name in ("k_pool", "v_pool"):
        assert torch.equal(args[name].cpu().nan_to_num(7), truth[name].nan_to_num(7))


def test_sanitized_merge():
    random = torch.Generator().manual_seed(0)
    out = torch.randn(3, 5, 2, 64, generator=random).bfloat16()
    lse = torch.randn(3, 5, 2, generator=random)
    for count in (2, 3):
        parts = out[:count], lse[:count]
        on_device = [x.cuda() for x in parts]
        if count == 2:
            state = ops.merge_state(*(part[i] for i in range(2) for part in on_device))
        else:
            state = ops.merge_states(*on_device)
        assert_as_exact(
            tuple(x.cpu() for x in state), truth=merge(*parts), pytorch=pytorch_merge(*parts),
            merges=count,
        )  # fmt: skip
