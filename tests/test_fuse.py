"""The fusion pass: it fires on the cascade and nothing else, and changes no result."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, GraphModule

from hf_cascade import ops
from hf_cascade.fuse import FusePass, fuse_pass
from hf_cascade.fuse import num_fused as fused_so_far

CASCADE = torch.ops.hf_cascade.cascade_attention.default
WORK_LIST = torch.ops.hf_cascade.work_list.default
SM_SCALE = 0.25


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of compiled graphs of the module's own, empty at first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def tree() -> dict[str, Tensor]:
    """Three sequences, two of them below a second shared node; page_size 4."""
    torch.manual_seed(0)

    def index(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return {
        "x": torch.randn(3, 4, 8),
        "k_pool": torch.randn(16, 2, 4, 8),
        "v_pool": torch.randn(16, 2, 4, 8),
        "slots": index(32, 44, -1),
        "q_indptr": index(0, 1, 2, 3),
        "kv_indptr": index(0, 3, 5, 6, 8, 8),
        "kv_indices": index(3, 1, 7, 7, 9, 8, 10, 11),
        "kv_len": index(9, 5, 1, 5, 0),
        "first_slot": index(0, 1, 0, 0, 0),
        "leaves": index(2, 3, 4),
        "reader_indptr": index(0, 3, 5, 5, 5, 5),
        "readers": index(0, 1, 2, 0, 2),
    }


NODES = ("q_indptr", "kv_indptr", "kv_indices", "kv_len", "first_slot")


def attend(
    t: dict[str, Tensor],
    *,
    swapped: bool = False,
    suffix_scale: float = SM_SCALE,
    suffix_q_scale: float | None = None,
    between: Callable[[dict[str, Tensor]], Tensor] | None = None,
    reads_prefix_lse: bool = False,
) -> tuple[Tensor, ...]:
    """A layer's attention, composed as the blog does, with what a near-miss does differently."""
    q, k, v = t.get("qkv") or (t["x"] * 2, t["x"][:, :2] + 1, t["x"][:, 2:] * 3)
    pools, nodes = (t["k_pool"], t["v_pool"]), [t[name] for name in NODES]
    ops.append_kv(k, v, *pools, t["slots"])
    prefix = ops.prefix_attention(q, *pools, *nodes, t["reader_indptr"], t["readers"], SM_SCALE)
    suffix_q = q if suffix_q_scale is None else q * suffix_q_scale
    suffix = ops.suffix_attention(suffix_q, *pools, *nodes, t["leaves"], suffix_scale)
    seen = () if between is None else (between(t),)
    states = (*suffix, *prefix) if swapped else (*prefix, *suffix)
    out, lse = ops.merge_state(*states)
    return (out + 1, lse, *seen, *([prefix[1]] if reads_prefix_lse else []))


def run_fused(
    function: Callable[..., tuple[Tensor, ...]], t: dict[str, Tensor], fusion: FusePass
) -> tuple[tuple[Tensor, ...], Graph]:
    """Trace to the functionalized graph that Inductor's passes see, fuse it, run it."""
    graphs: list[Graph] = []

    def compiler(module: GraphModule, _):
        fusion(module.graph)
        module.graph.lint()
        module.recompile()
        graphs.append(module.graph)
        return module

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(
            function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True
        )
        return compiled(t), graphs[0]


def check(function: Callable[..., tuple[Tensor, ...]], num_fused: int) -> Graph:
    """The compiled function fuses so often, and computes and writes what the plain one does."""
    plain, traced, before = tree(), tree(), fused_so_far()
    with torch.no_grad():
        expected = function(plain)
    results, graph = run_fused(function, traced, fuse_pass())
    assert fused_so_far() - before == num_fused
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0)
    assert torch.equal(traced["k_pool"], plain["k_pool"])
    assert torch.equal(traced["v_pool"], plain["v_pool"])
    calls = [n for n in graph.nodes if n.op == "call_function" and CASCADE in n.args]
    assert len(calls) == num_fused
    return graph


@pytest.mark.parametrize("swapped", [False, True])
def test_the_cascade_becomes_one_op(swapped: bool) -> None:
    graph = check(lambda t: attend(t, swapped=swapped), num_fused=1)
    assert not [n for n in graph.nodes if "merge_state" in str(n.target)]


def test_every_layer_is_fused() -> None:
    def two_layers(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
        first, *_ = attend(t)
        return attend(t | {"x": first})

    check(two_layers, num_fused=2)


@pytest.mark.parametrize(
    "near_miss",
    [
        {"suffix_scale": 0.5},
        {"suffix_q_scale": 3.0},
        {"reads_prefix_lse": True},
        {"between": lambda t: t["k_pool"].sum()},
    ],
    ids=["other scale", "other queries", "state read elsewhere", "pool read in between"],
)
def test_near_misses_are_left_alone(near_miss: dict) -> None:
    check(lambda t: attend(t, **near_miss), num_fused=0)


def test_a_pool_read_afterwards_sees_the_write() -> None:
    def then_read(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (*attend(t), t["k_pool"] * 2)

    check(then_read, num_fused=1)


def test_two_appends_in_a_row_are_left_alone_where_the_first_is_not_attended_to() -> None:
    def append_twice(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
        ops.append_kv(t["x"][:, :2], t["x"][:, 2:], t["k_pool"], t["v_pool"], t["slots"] + 4)
        return attend(t)

    check(append_twice, num_fused=1)


@pytest.mark.parametrize("time", ["first", "from the cache on disk"])
def test_inductor_runs_the_pass(time: str, cache_folder: None) -> None:
    expected_pools, pools = tree(), tree()
    before, hits = fused_so_far(), counters["inductor"]["fxgraph_cache_hit"]
    torch._dynamo.reset()
    with torch.no_grad():
        expected = attend(expected_pools)
        compiled = torch.compile(
            attend, fullgraph=True, options={"post_grad_custom_pre_pass": fuse_pass()}
        )
        results = compiled(pools)
    assert (counters["inductor"]["fxgraph_cache_hit"] > hits) == (time != "first")
    assert fused_so_far() == before + 1
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(pools["k_pool"], expected_pools["k_pool"])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_layers_share_a_work_list_where_kernels_serve(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_layers(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
        first, *_ = attend(t)
        return attend(t | {"x": first})

    monkeypatch.setattr(ops.kernels, "serve", lambda pool: True)
    _, graph = run_fused(two_layers, tree(), fuse_pass(batch_invariant=batch_invariant))
    [work] = graph.find_nodes(op="call_function", target=WORK_LIST)
    assert (
        dict(zip(names_of(WORK_LIST), work.args, strict=True))["batch_invariant"] is batch_invariant
    )
    calls = [n for n in graph.nodes if n.op == "call_function" and CASCADE in n.args]
    assert [call.kwargs["work"] for call in calls] == [work, work]


def test_columns_of_a_product_that_inductor_computes_are_views_of_it(monkeypatch) -> None:
    matrix = torch.randn(16, 64)

    def layer(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
        def columns(start: int, heads: int) -> Tensor:  # asked for thrice, as by packed linears
            rows = t["x"].flatten(1)[:, :16].double()
            product = (rows.unsqueeze(2) * matrix.double()).sum(1).float()
            return product[:, start : start + 8 * heads].unflatten(1, (heads, 8))

        return attend(t | {"qkv": (columns(0, 4), columns(32, 2), columns(48, 2))})

    monkeypatch.setattr(ops.kernels, "serve", lambda pool: True)
    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": fuse_pass(), "fx_graph_cache": False}
    results, [code] = run_and_get_code(torch.compile(layer, options=options), tree())
    torch.testing.assert_close(results, layer(tree()))
    [call] = re.findall(r"= torch\.ops\.hf_cascade\.cascade_attention\.default\((.*)\)", code)
    views = re.findall(r"reinterpret_tensor\((\w+), \(3, (\d), 8\), \(64, 8, 1\), (\d+)\)", call)
    [buffer] = {name for name, *_ in views}
    assert views == [(buffer, "4", "0"), (buffer, "2", "32"), (buffer, "2", "48")]


def names_of(op: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def test_it_chains_with_another_pass() -> None:
    seen: list[int] = []
    before = fused_so_far()
    run_fused(attend, tree(), fuse_pass(then=lambda graph: seen.append(len(graph.nodes))))
    assert fused_so_far() == before + 1
    assert len(seen) == 1


def test_the_compile_cache_key_covers_the_chain() -> None:
    alone = fuse_pass()
    assert alone.uuid() == fuse_pass().uuid()
    assert fuse_pass(then=alone).uuid() != alone.uuid()
    assert fuse_pass(then=lambda graph: None).uuid() is None
    assert fuse_pass(batch_invariant=True).uuid() != alone.uuid()
    assert copy.deepcopy(alone).uuid() == alone.uuid()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((True,), {}, "then must be a pass to call or None, got True"),
        ((), {"batch_invariant": "False"}, "batch_invariant must be True or False, got 'False'"),
    ],
)
def test_it_says_what_it_cannot_take(arguments, options, message) -> None:
    with pytest.raises(TypeError, match=message):
        fuse_pass(*arguments, **options)
