"""What is read of the index arguments is kept for all layers of a step, and never for longer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from cases import FOREST, TREES, build
from hf_cascade.ops import reads
from hf_cascade.ops.reads import once_a_step
from torch import Tensor

from hf_cascade import ops

DECODING = [tree for tree in TREES if max(tree.q_len or (1,)) <= 1]
SHARING = next(tree for tree in DECODING if len(tree.leaves) > 2 and {*tree.parents} > {None})


def arguments(tree=FOREST) -> dict[str, Tensor]:
    return build(tree).before_append().args(ops.cascade_attention)


def attend(args: dict) -> list[Tensor]:
    """Result and pools, which stay as they were in `args`."""
    own = args | {name: args[name].clone() for name in ("k_pool", "v_pool")}
    return [*ops.cascade_attention(**own), own["k_pool"], own["v_pool"]]


def attend_anew(args: dict) -> list[Tensor]:
    """The same with tensors that no call has seen."""
    return attend({k: v.clone() if isinstance(v, Tensor) else v for k, v in args.items()})


def are_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    pairs = zip(a, b, strict=True)  # slots that hold no token are NaN
    return all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in pairs)


def swap(values: Tensor, i: int, j: int) -> None:
    values[[i, j]] = values[[j, i]]


def last_leaf_loses_a_token(args: dict) -> None:
    args["kv_len"][args["leaves"][-1]] -= 1


CHANGES = {
    "kv_len": last_leaf_loses_a_token,
    "kv_indices": lambda args: swap(args["kv_indices"], 0, 1),
    "leaves": lambda args: args["leaves"].copy_(args["leaves"].flip(0)),
    "slots": lambda args: args["slots"].copy_(args["slots"].flip(0)),
    "reader_indptr": lambda args: args["reader_indptr"].zero_(),
    "q_indptr": lambda args: args["q_indptr"][1:].copy_(args["q_indptr"][1:].clamp(max=1)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_change_in_place_is_seen(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        args = arguments(SHARING)
        before = attend(args)
        assert are_equal(before, attend(args))
        CHANGES[name](args)
        after = attend(args)
        assert are_equal(after, attend_anew(args))
    assert not are_equal(after, before)


def test_an_error_is_not_kept_nor_what_came_before_it() -> None:
    args = arguments()
    before = attend(args)
    length = args["kv_len"].clone()
    for _ in range(2):
        args["kv_len"][0] = -1
        for _ in range(2):
            with pytest.raises(ValueError, match=r"kv_len\[0\] must fit"):
                attend(args)
        args["kv_len"].copy_(length)
        assert are_equal(before, attend(args))


def test_the_pools_take_part() -> None:
    args = build(FOREST).args(ops.suffix_attention)
    ops.suffix_attention(**args)
    few = args | {name: args[name][:2] for name in ("k_pool", "v_pool")}
    with pytest.raises(ValueError, match="num_pages=2"):
        ops.suffix_attention(**few)


def test_values_are_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    args, read = arguments(), []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: read.append(self) or tolist(self))
    attend(args)
    once = len(read)
    assert once > 0
    for _ in range(3):
        attend(args)
    assert len(read) == once
    last_leaf_loses_a_token(args)
    attend(args)
    assert len(read) > once


WRITERS = {
    "numpy": lambda tensor: tensor.numpy(),
    "DLPack": torch.from_dlpack,
    ".data": lambda tensor: tensor.data,
}


@pytest.mark.parametrize("name", WRITERS)
def test_writes_that_no_version_counter_sees_are_seen(name: str) -> None:
    args = arguments(SHARING)
    before = attend(args)
    WRITERS[name](args["kv_len"])[int(args["leaves"][-1])] -= 1
    after = attend(args)
    assert are_equal(after, attend_anew(args))
    assert not are_equal(after, before)


def test_threads_keep_their_own() -> None:
    both_have_found = Barrier(2)

    class Index:
        """Stands for a tensor that is copied after something was found."""

        is_cuda = False

        def clone(self) -> Index:
            both_have_found.wait(timeout=60)
            return self

    find = once_a_step(lambda sizes, index: index)
    mine = [Index(), Index()]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(find, [(), ()], mine)) == mine


@pytest.mark.parametrize(("is_capturing", "times"), [(False, 1), (True, 2)])
def test_nothing_is_remembered_for_a_cuda_graph(
    is_capturing: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = SimpleNamespace(is_cuda=True, clone=lambda: index)
    monkeypatch.setattr(reads, "_are_equal", lambda a, b: True)
    calls: list[int] = []
    find = once_a_step(lambda sizes, index: calls.append(1))
    for capturing in (False, is_capturing):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        find((), index)
    assert len(calls) == times
