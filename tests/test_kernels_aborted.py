"""An aborted launch is an error and no hang, and leaves the GPU to others as it was.

A trap ends the CUDA context of its process, so that one is a child; a launch may also end because
its process is killed amid it. Contexts share the GPU alone: what such a launch would leave in the
scratch and ticket counters of its own is test_kernels_schedule's `test_poisoned_scratch`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading

import pytest
import torch
from cases import Tree, build
from kernel_calls import needs_kernels, on_gpu, work_of

from hf_cascade import ops

pytestmark = needs_kernels

ENOUGH_S = 120  # of a child, which loads torch and makes a context: over it, it hangs
TREE = Tree("two shared nodes", (None, 0, 0, 1, 1, 2, 2), (3000, 200, 90, 70, 5, 1, 300),
            (3, 4, 5, 6), group_size=4, head_dim=128, page_size=16)  # fmt: skip


# ------------------------------------------------------------------ what a child does


def fresh_args() -> dict:
    return on_gpu(build(TREE, torch.bfloat16).before_append(), ops.cascade_attention)


def digest() -> str:
    """Of the bits of an answer with a list of the op's own, and with one given."""
    bits = hashlib.sha256()
    for makes_list in (False, True):
        args = fresh_args()
        state = ops.cascade_attention(**args, work=work_of(args) if makes_list else None)
        for x in state:
            bits.update(x.cpu().view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def trap() -> None:
    """A list made for other heads, of the right size: the kernel stops."""
    args = fresh_args()
    names = ("q_indptr", "kv_indptr", "kv_indices", "kv_len", "first_slot", "leaves")
    foreign = ops.work_list(
        *(args[name] for name in (*names, "reader_indptr", "readers")),
        page_size=args["k_pool"].shape[2],
        num_q_heads=2 * args["q"].shape[1],
        num_kv_heads=args["k_pool"].shape[1],
        head_dim=args["q"].shape[2],
    )
    assert foreign.shape == work_of(args).shape
    ops.cascade_attention(**args, work=foreign)
    torch.cuda.synchronize()


def launch_until_killed() -> None:
    args = fresh_args()
    ops.cascade_attention(**args)
    torch.cuda.synchronize()
    print("launching", flush=True)
    while True:
        ops.cascade_attention(**args)


# ------------------------------------------------------------------ tests


def start_child(call: str) -> subprocess.Popen[str]:
    """A process that runs `call` of this module, with the packages of this one."""
    code = f"import test_kernels_aborted as here; {call}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    try:
        out, errors = child.communicate(timeout=ENOUGH_S)
    except subprocess.TimeoutExpired:
        child.kill()
        pytest.fail(f"a child hangs: {child.communicate()[1][-2000:]}")
    return child.returncode, out, errors


def assert_bits_are(expected: str) -> None:
    """In this process, which was there all the time, and in one that begins now."""
    assert digest() == expected
    status, out, errors = finish(start_child("print(here.digest())"))
    assert status == 0, errors
    assert out.strip() == expected


def test_after_a_trap():
    expected = digest()
    status, _, errors = finish(start_child("here.trap()"))
    assert status != 0
    assert "CUDA error" in errors
    assert_bits_are(expected)


def test_after_a_process_killed_amid_its_launches():
    expected = digest()
    child = start_child("here.launch_until_killed()")
    too_late = threading.Timer(ENOUGH_S, child.kill)
    too_late.start()
    first_line = child.stdout.readline()
    too_late.cancel()
    child.kill()
    _, _, errors = finish(child)
    assert first_line == "launching\n", errors
    assert_bits_are(expected)
