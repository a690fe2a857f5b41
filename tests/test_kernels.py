"""The CUDA kernels against the oracle: numbers, addressing, launches, and bits.

The ops' own tests run on the CPU; here the same trees meet the kernels, in their dtypes and at
their sizes. Names in brackets are other projects' issues: what broke there, see what is tried here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import FOREST, TREES, Tree, build
from hf_cascade.ops import kernels, reference
from kernel_calls import (
    LONERS,
    SMALL,
    as_kernels_take,
    assert_as_reference,
    assert_tree_attends,
    assert_work_list_serves,
    decode,
    header_of,
    needs_kernels,
    on_gpu,
    run,
    same_bits,
    work_of,
)
from oracle import assert_as_exact, merge, pytorch_merge
from torch import Tensor

from hf_cascade import ops

pytestmark = needs_kernels

HEAD_DIMS = kernels.HEAD_DIMS
DTYPES = (torch.float16, torch.bfloat16)

# ------------------------------------------------------------------ trees


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_trees(tree, dtype):
    assert_tree_attends(build(as_kernels_take(tree), dtype))


# 8 is the last group whose leaves are the leaf warps'.
@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("group_size", [1, 8, 16])
def test_trees_of_other_groups(tree, group_size):
    assert_tree_attends(build(as_kernels_take(tree, group_size=group_size), torch.bfloat16))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_sizes(head_dim, page_size):  # [flashinfer 320]
    assert_tree_attends(
        build(as_kernels_take(FOREST, head_dim=head_dim, page_size=page_size), torch.bfloat16)
    )


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 7, 8, 9, 16, 40])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_group_sizes(group_size, head_dim):
    tree = as_kernels_take(FOREST, group_size=group_size, head_dim=head_dim)
    assert_tree_attends(build(tree, torch.float16))


@pytest.mark.parametrize("group_size", [1, 3, 4, 8])
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_splits(group_size, splits):  # [flash-attention 87 of the vllm fork]
    # Batch invariant, with 2 KV heads, a split is 128 tokens: here of the prefix and of a leaf, the
    # last one ragged. Balanced it is 64 of leaves.
    tree = Tree("splits", (None, 0, 0, 0), (128 * splits - 17, 128 * splits - 100, 5, 300),
                (1, 2, 3), group_size=group_size, head_dim=64, page_size=16)  # fmt: skip
    paged = build(tree, torch.bfloat16)
    assert_tree_attends(paged)
    assert_work_list_serves(paged, batch_invariant=True)


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 63, 64, 65, 127, 129, 255, 257, 1025])
def test_lengths(kv_len):
    tree = Tree("lengths", (None, 0, 0), (kv_len, kv_len, 1), (1, 2), head_dim=64, page_size=16)
    assert_tree_attends(build(tree, torch.bfloat16))


@pytest.mark.parametrize("batch", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_batches(batch):
    tree = Tree("batch", (None, *[0] * batch), (33, *(1 + i % 9 for i in range(batch))),
                tuple(range(1, batch + 1)), head_dim=64, page_size=16)  # fmt: skip
    assert_tree_attends(build(tree, torch.bfloat16))


@pytest.mark.parametrize(("num_kv_heads", "batch"), [(1, 100), (2, 600), (3, 100), (8, 280)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_more_leaves_than_warps(num_kv_heads, batch, head_dim):
    tree = Tree("leaves", (None, *[0] * batch), (33, *(1 + i % 70 for i in range(batch))),
                tuple(range(1, batch + 1)), num_kv_heads=num_kv_heads, group_size=2,
                head_dim=head_dim, page_size=16)  # fmt: skip
    assert_as_reference(on_gpu(build(tree, torch.bfloat16), ops.cascade_attention))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("group_size", [1, 4, 8, 9, 16, 32])
def test_nodes_of_one_reader(group_size, batch_invariant):
    paged = build(replace(LONERS, group_size=group_size), torch.bfloat16)
    assert_tree_attends(paged)
    assert_work_list_serves(paged, batch_invariant=batch_invariant)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_leaves_of_large_groups(group_size, batch_invariant):  # the matrix warps'
    paged = decode(3, prefix=400, suffix=300, num_kv_heads=1, group_size=group_size)
    assert_work_list_serves(paged, batch_invariant=batch_invariant)


# Batch 256 is found in shared memory; 800 is too large for it.
@pytest.mark.parametrize(("batch", "longest"), [(256, 400), (800, 90)])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_prompts_that_share_nothing(batch, longest, batch_invariant):
    lengths = [1 + 37 * i % longest for i in range(2 * batch)]
    parents = (*[None] * batch, *range(batch))
    tree = Tree("singles", parents, tuple(lengths), tuple(range(batch, 2 * batch)),
                head_dim=64, page_size=16)  # fmt: skip
    assert_work_list_serves(build(tree, torch.bfloat16), batch_invariant=batch_invariant)


def test_splits_double_where_the_scratch_is_full():
    # 300 rows have 8192 states; of splits of 128 tokens they would need 30 each.
    args = on_gpu(decode(300, prefix=3600, suffix=3), ops.cascade_attention)
    assert header_of(args, batch_invariant=True)["shared_split"] == ~1
    assert_as_reference(args, batch_invariant=True)


@pytest.mark.parametrize("tokens", [4096, 32768])
def test_lse_is_natural(tokens):  # [sglang 40903]
    tree = Tree("long", (None, 0), (tokens - 7, 7), (1,), num_kv_heads=1, head_dim=64, page_size=16)
    paged = build(tree, torch.bfloat16)
    _, lse = run(ops.cascade_attention, paged)
    [flat] = paged.paths
    scores = torch.einsum("qhd,kd->qhk", flat.q.double(), flat.k[:, 0].double()) * flat.sm_scale
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-3


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_large_and_small_scores(factor):
    paged = build(as_kernels_take(FOREST), torch.bfloat16)
    args = on_gpu(paged, ops.cascade_attention) | {"sm_scale": factor}
    out, lse = ops.cascade_attention(**args)
    true = reference.cascade_attention(**args)
    assert out.isfinite().all()
    torch.testing.assert_close(out, true[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, true[1], atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("tree", [FOREST, LONERS], ids=str)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_logits_of_ten_thousand(tree, is_mixed):
    """All of a row's logits are 1e4 or all -1e4; or, mixed, both kinds meet in its nodes."""
    args = on_gpu(build(as_kernels_take(tree), torch.bfloat16), ops.cascade_attention)

    def signs(x: Tensor) -> Tensor:  # one a token and head; NaN stays what it is
        return (x[..., :1] / x[..., :1].abs()).expand_as(x).contiguous()

    for name in ("q", "k", "k_pool"):
        args[name] = signs(args[name])
        if name != "q" and not is_mixed:
            args[name] = args[name].abs()
    args["sm_scale"] = 1e4 / args["q"].shape[2]
    out, lse = ops.cascade_attention(**args)
    true = reference.cascade_attention(**args)
    torch.testing.assert_close(out, true[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, true[1], atol=2e-2, rtol=0)  # float32 has steps of 1e-3 there


@pytest.mark.parametrize("has_one_prefix", [False, True])
@pytest.mark.parametrize("sizes", [(1e-30, 1e30), (3e-6, 7e4), (1e-36, 0.0)], ids=str)
def test_values_of_any_size(has_one_prefix, sizes):
    """Partial states are fp16; the values of a bfloat16 model need not fit that, in any head."""
    loners = build(replace(LONERS, num_kv_heads=2), torch.bfloat16)
    paged = decode(5, num_kv_heads=2) if has_one_prefix else loners
    args = on_gpu(paged, ops.cascade_attention)
    for name in ("v", "v_pool"):
        for head, size in enumerate(sizes):
            args[name][:, head] *= size
    out, lse = ops.cascade_attention(**args)
    true = reference.cascade_attention(**args)
    torch.testing.assert_close(lse, true[1], atol=1e-2, rtol=1e-3)
    assert out.isfinite().all()
    for head, size in enumerate(sizes):
        actual, expected = (x.unflatten(1, (2, -1))[:, head].double() for x in (out, true[0]))
        assert (actual - expected).abs().max() <= 2e-2 * size


@pytest.mark.parametrize("op", [ops.prefix_attention, ops.suffix_attention])
def test_rows_without_owner_are_empty(op):
    args = on_gpu(build(SMALL, torch.bfloat16), op)
    expected = op(**args)
    args["q"] = torch.cat([args["q"], args["q"]])
    out, lse = op(**args)
    assert torch.equal(out[:3], expected[0])
    assert torch.equal(lse[:3], expected[1])
    assert (out[3:] == 0).all()
    assert lse[3:].isneginf().all()


def test_states_merge_as_soon_as_they_are_made():
    # The merge is the kernel after the one that writes what it reads: it has to wait for it.
    args = on_gpu(decode(256, prefix=700, suffix=600, num_kv_heads=8), ops.cascade_attention)
    expected = ops.cascade_attention(**args)
    names = ("q", "k_pool", "v_pool", "q_indptr", "kv_indptr", "kv_indices", "kv_len", "first_slot")
    shared = {name: args[name] for name in names} | {"sm_scale": args["sm_scale"]}
    for _ in range(20):
        prefix = ops.prefix_attention(
            **shared, reader_indptr=args["reader_indptr"], readers=args["readers"]
        )
        suffix = ops.suffix_attention(**shared, leaves=args["leaves"])
        out, lse = ops.merge_state(*prefix, *suffix)
        torch.testing.assert_close(out, expected[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, expected[1], atol=1e-3, rtol=1e-3)


def test_a_foreign_work_list_is_refused():
    args = on_gpu(decode(5), ops.cascade_attention)
    with pytest.raises(RuntimeError, match="work must be what work_list makes"):
        ops.cascade_attention(**args, work=work_of(args)[:-1].clone())


# ------------------------------------------------------------------ what kernels do not fit


@pytest.mark.parametrize(
    "changes", [{"head_dim": 72}, {"page_size": 4}, {"group_size": 130, "num_kv_heads": 1}], ids=str
)
def test_what_does_not_fit_is_composed(changes):
    assert_tree_attends(build(as_kernels_take(FOREST, **changes), torch.bfloat16))


def test_float32_is_composed():
    assert_tree_attends(build(as_kernels_take(FOREST)))


def test_a_wrong_argument_is_named(capfd):
    # A Python error that passes through the stable ABI becomes a RuntimeError; torch prints it.
    args = on_gpu(build(SMALL, torch.bfloat16), ops.suffix_attention)
    args["kv_len"] = args["kv_len"].long()
    with pytest.raises(RuntimeError):
        ops.suffix_attention(**args)
    assert "kv_len must be int32, got torch.int64" in capfd.readouterr().err


def test_strided_queries_and_keys():
    paged = build(as_kernels_take(FOREST), torch.bfloat16).before_append()
    args = on_gpu(paged, ops.cascade_attention)
    expected = ops.cascade_attention(**(args | {n: args[n].clone() for n in ("k_pool", "v_pool")}))
    for name in ("q", "k", "v"):
        wide = torch.cat([args[name], args[name]], dim=1)  # as cut from one fused projection
        args[name] = wide[:, : args[name].shape[1]]
    actual = ops.cascade_attention(**args)
    assert torch.equal(actual[0], expected[0])


# ------------------------------------------------------------------ append and merge


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_append(dtype):
    paged = build(as_kernels_take(FOREST), dtype).before_append()
    args, truth = on_gpu(paged, ops.append_kv), paged.args(reference.append_kv)
    ops.append_kv(**args)
    reference.append_kv(**truth)
    for name in ("k_pool", "v_pool"):
        assert torch.equal(args[name].cpu().nan_to_num(7), truth[name].nan_to_num(7))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("num_states", [0, 1, 2, 3, 9])
def test_merge_states(dtype, num_states):
    out = torch.randn(num_states, 5, 3, 64).to(dtype)
    lse = torch.randn(num_states, 5, 3) * 4
    lse[torch.rand(lse.shape) < 0.3] = -torch.inf
    out = out.masked_fill(lse.isneginf()[..., None], 0)
    merged = ops.merge_states(out.cuda(), lse.cuda())
    assert_as_exact(
        tuple(x.cpu() for x in merged), truth=merge(out, lse), pytorch=pytorch_merge(out, lse),
        merges=num_states,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_merge_has_an_identity_and_commutes(dtype):  # [flashinfer 4051, vllm 28181]
    out_a, out_b = torch.randn(2, 7, 3, 64, device="cuda").to(dtype)
    out_a[0, 0, 0] = -0.0
    lse_a, lse_b = torch.randn(2, 7, 3, device="cuda")
    empty = torch.zeros_like(out_a), torch.full_like(lse_a, -torch.inf)
    for pair in ((*empty, out_a, lse_a), (out_a, lse_a, *empty)):
        out, lse = ops.merge_state(*pair)
        assert same_bits(out, out_a)
        assert same_bits(lse, lse_a)
    out, lse = ops.merge_state(*empty, *empty)
    assert (out == 0).all()
    assert lse.isneginf().all()
    one, other = (
        ops.merge_state(out_a, lse_a, out_b, lse_b),
        ops.merge_state(out_b, lse_b, out_a, lse_a),
    )
    assert same_bits(one[0], other[0])
    assert same_bits(one[1], other[1])


# ------------------------------------------------------------------ addressing


def test_pools_beyond_32_bits():  # [flashinfer 3136]
    pages, heads, page_size, head_dim = 2**18 + 1, 8, 16, 128  # just over 2**32 elements
    pools = [torch.full((pages, heads, page_size, head_dim), torch.nan, dtype=torch.bfloat16,
                        device="cuda") for _ in range(2)]  # fmt: skip
    kv = [torch.randn(heads, page_size, head_dim, device="cuda").bfloat16() for _ in pools]
    for pool, values in zip(pools, kv, strict=True):
        pool[-1] = values
    index = {"q_indptr": [0, 1], "kv_indptr": [0, 1], "kv_indices": [pages - 1], "kv_len": [16],
             "first_slot": [0], "leaves": [0]}  # fmt: skip
    q = torch.randn(1, heads, head_dim, device="cuda").bfloat16()
    tensors = {k: torch.tensor(v, dtype=torch.int32, device="cuda") for k, v in index.items()}
    out, _ = ops.suffix_attention(q, *pools, **tensors, sm_scale=0.1)
    weights = (torch.einsum("hd,hkd->hk", q[0].float(), kv[0].float()) * 0.1).softmax(-1)
    true = torch.einsum("hk,hkd->hd", weights, kv[1].float())
    torch.testing.assert_close(out[0].float(), true, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_device():  # [flashinfer 924]
    args = on_gpu(build(SMALL, torch.bfloat16), ops.cascade_attention)
    expected, _ = ops.cascade_attention(**args)
    moved = {n: v.to("cuda:1") if isinstance(v, Tensor) else v for n, v in args.items()}
    with torch.cuda.device(0):
        out, _ = ops.cascade_attention(**moved)
    assert torch.equal(out.cpu(), expected.cpu())


# ------------------------------------------------------------------ launches


@pytest.mark.parametrize(
    ("batch", "group_size", "batch_invariant", "shared", "leaf"),
    [
        (1, 4, False, False, True),
        (1, 4, True, True, True),  # who else reads a node must not matter
        (2, 4, False, True, True),
        (1, 16, False, True, False),
        (2, 16, False, True, False),
    ],
)
def test_who_reads_what(batch, group_size, batch_invariant, shared, leaf):
    """Matrix warps nodes of several readers and groups of more than 8, leaf warps the rest."""
    args = on_gpu(decode(batch, group_size=group_size), ops.cascade_attention)
    header = header_of(args, batch_invariant=batch_invariant)
    assert header["is_decode"]
    assert (header["num_shared_items"] > 0, header["num_leaf_items"] > 0) == (shared, leaf)
    assert (header["shared_stages"] > 0) == shared
    assert bool(header["shared_are_still"]) == (group_size <= 8)


def test_streams_and_graphs():  # [sglang 5419, vllm 16693]
    args = on_gpu(decode(5), ops.cascade_attention)
    eager = ops.cascade_attention(**args)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        beside = ops.cascade_attention(**args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = ops.cascade_attention(**args)
    graph.replay()
    for state in (beside, replayed):
        assert all(torch.equal(a, b) for a, b in zip(state, eager, strict=True))


def test_two_plans_before_two_runs():  # [mini-sglang 103]
    trees = [on_gpu(decode(batch), ops.cascade_attention) for batch in (3, 8)]
    expected = [ops.cascade_attention(**args)[0] for args in trees]
    works = [work_of(args) for args in trees]
    for args, work, true in zip(trees, works, expected, strict=True):
        assert torch.equal(ops.cascade_attention(**args, work=work)[0], true)


def test_lengths_grow_under_a_graph():  # [vllm 28702]
    grown = on_gpu(decode(4, prefix=700, suffix=800), ops.cascade_attention)
    start = torch.tensor([700, 1, 100, 250, 560], dtype=torch.int32, device="cuda")
    args = grown | {"kv_len": start.clone()}
    args["slots"] = torch.full_like(args["slots"], ops.DROPPED_SLOT)

    def step():
        args["kv_len"][1:] += 1
        return ops.cascade_attention(**args, work=work_of(args))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    args["kv_len"].copy_(start)
    for i in range(200):
        graph.replay()
        if i % 40 == 0:
            eager = ops.cascade_attention(**args)
            assert torch.equal(out, eager[0])
            assert torch.equal(lse, eager[1])
            true = reference.cascade_attention(**args)
            torch.testing.assert_close(out, true[0], atol=2e-2, rtol=2e-2)


# ------------------------------------------------------------------ bits


def cascade(args: dict, *, batch_invariant: bool) -> tuple[Tensor, Tensor]:
    return ops.cascade_attention(**args, work=work_of(args, batch_invariant=batch_invariant))


@pytest.mark.parametrize("group_size", [1, 4])
def test_bits_do_not_depend_on_the_batch(group_size):  # [vllm 32561]
    paged = decode(256, prefix=2100, suffix=530, group_size=group_size)
    args = on_gpu(paged, ops.cascade_attention)
    expected = cascade(args, batch_invariant=True)
    heads = args["q"].shape[1]
    for batch in (1, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256):
        part = dict(args)
        for name in ("q", "k", "v", "slots", "leaves", "readers"):
            part[name] = args[name][:batch]
        part["q_indptr"] = args["q_indptr"][: batch + 1]
        part["reader_indptr"] = args["reader_indptr"].clamp(max=batch)
        if batch > 1:  # companions that are not numbers stay among themselves
            part["q"] = part["q"].clone()
            part["q"][1:] = torch.nan
        out, lse = cascade(part, batch_invariant=True)
        assert torch.equal(out[0], expected[0][0]), batch
        assert torch.equal(lse[0], expected[1][0]), batch
        assert out.shape[1] == heads


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("batch", [1, 40])
def test_bits_repeat(batch, batch_invariant):
    paged = decode(batch, prefix=5000, suffix=900, group_size=4)
    args = on_gpu(paged, ops.cascade_attention)
    first = cascade(args, batch_invariant=batch_invariant)
    for _ in range(20):
        again = cascade(args, batch_invariant=batch_invariant)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
