"""How tests call the CUDA kernels, and what they compare."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import PagedTree, Tree, build
from hf_cascade.ops import kernels, reference
from oracle import assert_attends
from torch import Tensor

from hf_cascade import ops

STATUS = kernels.status()
needs_kernels = pytest.mark.skipif(STATUS.library is None, reason=f"no kernels: {STATUS.reason}")

SMALL = Tree("small", (None, 0, 0, 0), (70, 3, 0, 40), (1, 2, 3), head_dim=64, page_size=16)
# Of five sequences, two share a node, one has a prefix of two nodes that nobody else reads, one has
# a leaf alone and one sees nothing.
LONERS = Tree("loners", (None, 0, 0, None, 3, 4, None, None), (150, 3, 40, 700, 130, 9, 65, 0),
              (1, 2, 5, 6, 7), head_dim=64, page_size=16)  # fmt: skip


def as_kernels_take(tree: Tree, **changes) -> Tree:
    return replace(tree, **({"head_dim": 64, "page_size": 16} | changes))


def run(op, paged: PagedTree, **more) -> tuple[Tensor, Tensor]:
    """The op on the GPU, its results on the CPU."""
    args = on_gpu(paged, op) | more
    return tuple(x.cpu() for x in op(**args))


def on_gpu(paged: PagedTree, op) -> dict:
    return {
        name: value.cuda() if isinstance(value, Tensor) else value
        for name, value in paged.args(op).items()
    }


def assert_tree_attends(paged: PagedTree) -> None:
    """All three ops give every sequence what the oracle gives it flattened."""
    assert_part_attends(paged, "prefixes", run(ops.prefix_attention, paged))
    assert_part_attends(paged, "suffixes", run(ops.suffix_attention, paged))
    assert_part_attends(paged, "paths", run(ops.cascade_attention, paged.before_append()))


def assert_part_attends(paged: PagedTree, part: str, state: tuple[Tensor, Tensor]) -> None:
    for seq, flat in enumerate(getattr(paged, part)):
        rows = paged.rows(seq)
        assert_attends(tuple(x[rows] for x in state), flat, merges=len(paged.nodes))


def assert_work_list_serves(paged: PagedTree, *, batch_invariant: bool) -> None:
    """With a list of this kind, every sequence gets what the oracle gives it."""
    args = on_gpu(paged.before_append(), ops.cascade_attention)
    work = work_of(args, batch_invariant=batch_invariant)
    state = ops.cascade_attention(**args, work=work)
    assert_part_attends(paged, "paths", tuple(x.cpu() for x in state))


def assert_as_reference(args: dict, *, batch_invariant: bool = False) -> None:
    """The same on the GPU, for what is too large for the oracle."""
    work = work_of(args, batch_invariant=batch_invariant)
    out, lse = ops.cascade_attention(**args, work=work)
    true = reference.cascade_attention(**args)
    torch.testing.assert_close(out, true[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, true[1], atol=1e-2, rtol=1e-3)


def decode(batch: int, prefix: int = 1500, suffix: int = 600, **more) -> PagedTree:
    tree = Tree("decode", (None, *[0] * batch), (prefix, *[suffix] * batch),
                tuple(range(1, batch + 1)), head_dim=64, page_size=16, **more)  # fmt: skip
    return build(tree, torch.bfloat16)


def work_of(args: dict, *, batch_invariant: bool = False) -> Tensor:
    names = ("q_indptr", "kv_indptr", "kv_indices", "kv_len", "first_slot", "leaves")
    names += ("reader_indptr", "readers")
    return ops.work_list(
        *(args[name] for name in names), page_size=args["k_pool"].shape[2],
        num_q_heads=args["q"].shape[1], num_kv_heads=args["k_pool"].shape[1],
        head_dim=args["q"].shape[2], batch_invariant=batch_invariant,
    )  # fmt: skip


def header_of(args: dict, **options) -> dict[str, int]:
    """As csrc/params.h has it, WorkHeader."""
    names = ("is_decode", "num_shared_items", "num_leaf_items", "shared_are_still",
             "shared_stages", "shared_split", "leaf_split")  # fmt: skip
    return dict(zip(names, work_of(args, **options)[: len(names)].tolist(), strict=True))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def poison(byte: int) -> None:
    """Fill the memory of a new pool, whole segments of it: for small tensors and for large ones."""
    sizes = [1 << 20] * 8 + [256 << 20]
    blocks = [torch.full((n,), byte, dtype=torch.uint8, device="cuda") for n in sizes]
    del blocks
    for size in (8, 4 << 10, 8 << 20):  # it is there, and it is what others get
        found = torch.empty(size, dtype=torch.uint8, device="cuda").cpu()
        assert (found == byte).all()
