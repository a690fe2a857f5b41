"""Every op is what its schema, its fake and its reference say, so that tracing can trust them."""

import inspect

import pytest
import torch
from cases import FOREST, TREES, Tree, angles, build
from hf_cascade.ops import reference
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from hf_cascade import ops

WRITTEN = {
    "append_kv": {"k_pool", "v_pool"},
    "prefix_attention": set(),
    "suffix_attention": set(),
    "merge_state": set(),
    "merge_states": set(),
    "cascade_attention": {"k_pool", "v_pool"},
}
EMPTY = [tree for tree in TREES if tree.name in ("nothing to see", "finished rows")]

over_ops = pytest.mark.parametrize("name", WRITTEN)
over_arguments = pytest.mark.parametrize(
    ("tree", "dtype", "heads_first"),
    [
        (FOREST, torch.float32, False),
        (FOREST, torch.float32, True),
        (FOREST, torch.bfloat16, True),
        *((tree, torch.float32, False) for tree in EMPTY),
    ],
    ids=str,
)


@over_ops
@over_arguments
def test_opcheck(name, tree, dtype, heads_first):
    torch.library.opcheck(overload(name), (), arguments(name, tree, dtype, heads_first))


@over_ops
@over_arguments
def test_op_fake_and_reference_return_alike(name, tree, dtype, heads_first):
    given = arguments(name, tree, dtype, heads_first)
    with FakeTensorMode() as mode:
        fake = overload(name)(**tree_map_only(Tensor, mode.from_tensor, given))
    real, specified = getattr(ops, name)(**given), getattr(reference, name)(**given)
    assert kinds(fake) == kinds(real) == kinds(specified)


@over_ops
def test_op_schema_and_reference_name_their_arguments_alike(name):
    schema = overload(name)._schema
    names = [argument.name for argument in schema.arguments]
    assert names == list(inspect.signature(getattr(ops, name)).parameters)
    assert names == list(inspect.signature(getattr(reference, name)).parameters)
    assert {argument.name for argument in schema.arguments if argument.is_write} == WRITTEN[name]


@over_ops
def test_tracing_refuses_what_running_refuses(name):
    given = arguments(name, FOREST, torch.float32, heads_first=False)
    unfit = next(iter(given))
    given[unfit] = given[unfit].int()
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=f"{unfit} must"):
        overload(name)(**tree_map_only(Tensor, mode.from_tensor, given))


def test_a_work_list_may_come_along():
    given = arguments("cascade_attention", FOREST, torch.float32, heads_first=False)
    _, num_q_heads, head_dim = given["q"].shape
    sizes = {
        "page_size": FOREST.page_size,
        "num_q_heads": num_q_heads,
        "num_kv_heads": given["k"].shape[1],
        "head_dim": head_dim,
    }
    of_tree = build(FOREST).args(ops.work_list) | sizes
    torch.library.opcheck(overload("work_list"), (), of_tree)
    work = ops.work_list(**of_tree)
    torch.library.opcheck(overload("cascade_attention"), (), given | {"work": work})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_may_come_along(dtype):
    given = arguments("cascade_attention", FOREST, dtype, heads_first=True)
    given |= angles(len(given["q"]), 8)
    torch.library.opcheck(overload("cascade_attention"), (), given)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="got no sin"):
        overload("cascade_attention")(
            **tree_map_only(Tensor, mode.from_tensor, given) | {"sin": None}
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_size": -3}, "must be positive, .* got -3, "),
        ({"num_kv_heads": 0}, "must be positive"),
        ({"num_q_heads": 3, "num_kv_heads": 2}, "num_q_heads a multiple of num_kv_heads"),
        ({"kv_len": torch.zeros(1, dtype=torch.int64)}, "kv_len must be int32"),
        ({"leaves": torch.zeros(1, dtype=torch.int32)}, "leaves must have num_seqs"),
    ],
)
def test_a_work_list_says_what_it_cannot_be_made_of(changed, message):
    sizes = {"page_size": 16, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    given = build(FOREST).args(ops.work_list) | sizes | changed
    with pytest.raises(ValueError, match=message):
        ops.work_list(**given)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=message):
        ops.work_list(**tree_map_only(Tensor, mode.from_tensor, given))


def overload(name: str) -> OpOverload:
    return getattr(torch.ops.hf_cascade, name).default


def arguments(name: str, tree: Tree, dtype: torch.dtype, heads_first: bool) -> dict:
    """An op's arguments by name; `heads_first`: rows are views of [num_heads, num_tokens, ..]."""
    paged = build(tree, dtype)
    if name.startswith("merge"):
        (out_a, lse_a), (out_b, lse_b) = (
            op(**paged.args(op)) for op in (ops.prefix_attention, ops.suffix_attention)
        )
        named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
        if name == "merge_states":
            named = {"out": torch.stack([out_a, out_b]), "lse": torch.stack([lse_a, lse_b])}
    else:
        named = (paged.before_append() if WRITTEN[name] else paged).args(getattr(ops, name))
    rows = ("q", "k", "v", "out", "lse", "out_a", "lse_a", "out_b", "lse_b") if heads_first else ()
    return {
        key: value.transpose(0, 1).contiguous().transpose(0, 1) if key in rows else value
        for key, value in named.items()
    }


def kinds(result: tuple[Tensor, ...] | None) -> list | None:
    return result and [(x.shape, x.dtype) for x in result]
