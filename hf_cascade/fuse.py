"""An Inductor pass that turns the four ops of a cascade into one.

    append_kv -> prefix_attention --+                          cascade_attention
             \\-> suffix_attention --+-> merge_state    =====>

It runs on the post-grad graph, in which torch.compile has already made mutation explicit:
`append_kv` stands there as `auto_functionalized_v2(append_kv, ..)`, whose results are the pools
after the write. The fused node is one such call of `cascade_attention`. What is not exactly this
pattern is left as it is: different pools, plans or scales, a state or a pool that something else
reads in between.

Of equal products, which `packing` leaves behind, one is kept.

Where CUDA kernels serve, cascades over the same nodes also share one `work_list`, put before the
first of them: all layers of a model do. And they rotate q and k themselves (`fuse_rope`), and take
q, k and v as columns of one product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from . import fuse_rope
from .ops import kernels  # importing ops declares the ops that are named below

_OPS = torch.ops.hf_cascade
_CAST = torch.ops.prims.convert_element_type.default
_PREFIX_ARGUMENTS = (
    "q", "k_pool", "v_pool", "q_indptr", "kv_indptr", "kv_indices", "kv_len", "first_slot",
    "reader_indptr", "readers", "sm_scale",
)  # fmt: skip
_SUFFIX_ARGUMENTS = (*_PREFIX_ARGUMENTS[:8], "leaves", "sm_scale")
_WORK_ARGUMENTS = (*_PREFIX_ARGUMENTS[3:8], "leaves", "reader_indptr", "readers")
# Inductor stores what a compilation adds to its counters with the compiled graph, and adds it
# again when it takes the graph from its cache on disk.
_COUNTER = "hf_cascade_fused"


def num_fused() -> int:
    """Cascades fused in this process, those in graphs from torch's cache on disk included."""
    return counters["inductor"][_COUNTER]


class FusePass(CustomGraphPass):
    """The pass; see `fuse_pass`."""

    def __init__(
        self, then: Callable[[Graph], None] | None = None, *, batch_invariant: bool = False
    ) -> None:
        self.then = then
        self.batch_invariant = batch_invariant

    def __call__(self, graph: Graph) -> None:
        _merge_equals(graph)
        merges = graph.find_nodes(op="call_function", target=_OPS.merge_state.default)
        made: dict[tuple, Node] = {}
        counters["inductor"][_COUNTER] += sum(
            _fuse(merge, made, self.batch_invariant) for merge in merges
        )
        if self.then is not None:
            self.then(graph)

    def __deepcopy__(self, memo: dict) -> FusePass:
        return self  # transformers copies compile options, and compares them

    def uuid(self) -> Any:
        """What the compile cache keys on; None (no caching) if the chained pass has no key."""
        library = kernels.status().library
        own = (
            get_hash_for_files((__file__, fuse_rope.__file__)),
            None if library is None else library.name,
            self.batch_invariant,
        )
        if self.then is None:
            return own
        other = self.then.uuid() if isinstance(self.then, CustomGraphPass) else None
        return None if other is None else (own, other)


def fuse_pass(
    then: Callable[[Graph], None] | None = None, *, batch_invariant: bool = False
) -> FusePass:
    """A pass for `torch.compile(.., options={"post_grad_custom_pre_pass": fuse_pass()})`.

    Fuses `append_kv -> prefix_attention, suffix_attention -> merge_state` into
    `cascade_attention` wherever code composes the public ops in this way and, where CUDA kernels
    serve, the RoPE of q and k before them.

    Args:
        then: another pass to run afterwards, such as one that was set before.
        batch_invariant: of the fused calls' work lists, see `ops.work_list`.
    Raises:
        TypeError: then is not callable, or batch_invariant no bool.
    """
    if not (then is None or callable(then)):
        raise TypeError(f"then must be a pass to call or None, got {then!r}")
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant must be True or False, got {batch_invariant!r}")
    return FusePass(then, batch_invariant=batch_invariant)


def _merge_equals(graph: Graph) -> None:
    """Keep one of the nodes that compute the same: layers that `packing` made one ask twice."""
    first: dict[tuple, Node] = {}
    for node in graph.nodes:
        if not _is_pure(node):
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node


def _is_pure(node: Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and (target.namespace == "aten" or target is _CAST)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        # What is new might be written to: only one that is made of values can be shared.
        and any(isinstance(argument, Node) for argument in node.args)
    )


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(each)) for name, each in value.items())
    # 1, 1.0 and True are equal, and not the same argument.
    return value if isinstance(value, Node) else (type(value), value)


def _fuse(merge: Node, made: dict[tuple, Node], batch_invariant: bool) -> bool:
    """Fuse the cascade that ends in this merge_state; False if there is none.

    `made`: what the fused calls before it in the graph have in common.
    """
    states = _states(merge)
    if states is None:
        return False
    prefix, suffix = (_arguments(node, names) for node, names in states)
    if any(prefix[name] != suffix[name] for name in (*_PREFIX_ARGUMENTS[:8], "sm_scale")):
        return False
    append = _append_of(
        prefix["k_pool"], prefix["v_pool"], readers={n for n, _ in states}, merge=merge
    )
    if append is None:
        return False

    graph = merge.graph
    kwargs = {
        name: value for name, value in append.kwargs.items() if name not in ("k_pool", "v_pool")
    }
    kwargs |= {name: suffix[name] for name in _SUFFIX_ARGUMENTS if name not in ("k_pool", "v_pool")}
    kwargs |= {name: prefix[name] for name in ("reader_indptr", "readers")}
    with graph.inserting_before(merge):
        pool = prefix["k_pool"].meta["val"]
        kwargs["work"] = _work_list(graph, kwargs, pool, made, batch_invariant)
        fused = graph.call_function(
            auto_functionalized_v2, (_OPS.cascade_attention.default,), kwargs
        )
        # (out, lse) of the op, then the pools: append_kv itself returns nothing, shown as None.
        fused.meta["val"] = (*merge.meta["val"], *append.meta["val"][1:])
        results = [graph.call_function(operator.getitem, (fused, i)) for i in range(4)]
        for result, value in zip(results, fused.meta["val"], strict=True):
            result.meta["val"] = value
    _redirect(merge, {0: results[0], 1: results[1]})
    _redirect(append, {1: results[2], 2: results[3]}, apart_from={n for n, _ in states})
    for node in (merge, *(n for n, _ in states), append):
        _erase(node)
    if kwargs["work"] is not None:  # kernels serve; Inductor's own RoPE is faster than operators
        fuse_rope.fuse_rope(fused, made)
        for name in ("q", "k", "v"):
            _compute_whole(fused.kwargs[name])
    return True


def _compute_whole(rows: Any) -> None:
    """Have Inductor compute what these rows are columns of, and pass them on as a view of it.

    A product with a single row is its own code (`_compile_config` in compat.py), of which it would
    compute and store each user's columns by a kernel of their own.
    """
    is_part = False
    while _is_view(rows):
        is_part |= rows.target is torch.ops.aten.slice.Tensor
        rows = rows.args[0]
    if is_part and isinstance(rows, Node) and rows.op == "call_function":
        rows.meta["inductor_realize_to_strides"] = True


def _is_view(node: Any) -> bool:
    return isinstance(node, Node) and (
        node.target in (torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
        or (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view)
    )


def _work_list(
    graph: Graph,
    kwargs: dict[str, Any],
    pool: Tensor,
    made: dict[tuple, Node],
    batch_invariant: bool,
) -> Node | None:
    """The work list of a fused call, None where no kernels serve it."""
    q = kwargs["q"].meta["val"]
    if not kernels.serve(pool) or q.dtype != pool.dtype:
        return None
    _, num_kv_heads, page_size, head_dim = pool.shape
    sizes = (page_size, q.shape[1], num_kv_heads, head_dim)
    if not all(isinstance(size, int) for size in sizes):  # a symbol is no argument of a node
        return None
    arguments = (*(kwargs[name] for name in _WORK_ARGUMENTS), *sizes, batch_invariant)
    if arguments not in made:
        node = graph.call_function(_OPS.work_list.default, arguments)
        values = [value.meta["val"] if isinstance(value, Node) else value for value in arguments]
        node.meta["val"] = _OPS.work_list.default(*values)
        made[arguments] = node
    return made[arguments]


def _states(
    merge: Node,
) -> tuple[tuple[Node, tuple[str, ...]], tuple[Node, tuple[str, ...]]] | None:
    """The prefix and the suffix attention that this merge alone reads, in either order."""
    if len(merge.args) != 4:
        return None
    out_a, lse_a, out_b, lse_b = merge.args
    sources = [_source(out, lse) for out, lse in ((out_a, lse_a), (out_b, lse_b))]
    by_target = {node.target: node for node in sources if node is not None}
    prefix = by_target.get(_OPS.prefix_attention.default)
    suffix = by_target.get(_OPS.suffix_attention.default)
    if prefix is None or suffix is None:
        return None
    for node in (prefix, suffix):
        if any(set(item.users) != {merge} for item in node.users):
            return None
    return (prefix, _PREFIX_ARGUMENTS), (suffix, _SUFFIX_ARGUMENTS)


def _source(out: Any, lse: Any) -> Node | None:
    """The node whose results 0 and 1 these are."""
    items = [
        (item.args[0], item.args[1])
        for item in (out, lse)
        if isinstance(item, Node) and item.target is operator.getitem
    ]
    if len(items) != 2 or items[0][0] is not items[1][0] or [i for _, i in items] != [0, 1]:
        return None
    return items[0][0]  # type: ignore[return-value]


def _append_of(k_pool: Any, v_pool: Any, readers: set[Node], merge: Node) -> Node | None:
    """The append whose pools these are, if nothing but `readers` reads them before `merge`."""
    for pool, position in ((k_pool, 1), (v_pool, 2)):
        if not isinstance(pool, Node) or pool.target is not operator.getitem:
            return None
        if pool.args[1] != position:
            return None
        if any(user not in readers and user < merge for user in pool.users):
            return None
    append = k_pool.args[0]
    is_append = (
        append is v_pool.args[0]
        and append.target is auto_functionalized_v2
        and append.args[0] is _OPS.append_kv.default
    )
    return append if is_append else None


def _arguments(node: Node, names: Iterable[str]) -> dict[str, Any]:
    return dict(zip(names, node.args, strict=True)) | dict(node.kwargs)


def _redirect(node: Node, results: dict[int, Node], apart_from: Collection[Node] = ()) -> None:
    for item in list(node.users):
        item.replace_all_uses_with(
            results[item.args[1]],  # type: ignore[index]
            delete_user_cb=lambda user: user not in apart_from,
        )


def _erase(node: Node) -> None:
    for item in list(node.users):
        item.graph.erase_node(item)
    node.graph.erase_node(node)
