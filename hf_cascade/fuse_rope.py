"""RoPE moves into the `cascade_attention` call that alone reads the rotated q and k.

    q_embed = (q * cos) + (rotate_half(q) * sin)

is how transformers writes it, and the same for k. On the graph q is
[batch, num_heads, 1, head_dim], cos and sin are [batch, 1, rotary_dim], unsqueezed over the heads;
where rotary_dim is smaller than head_dim, the rest of each head is cut off first and joined again
at the end. What is not exactly this stays as it is: interleaved pairs, several query tokens a
sequence, rotated values that something else reads, and layouts that the append kernel can't take
(`can_rotate` in csrc/append_kv.cu).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

_ATEN = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_VIEWS = (_ATEN.reshape.default, _ATEN.view.default)
_ACCESS_BYTES = 16  # which the kernel reads at a time


@dataclass(frozen=True)
class _Rope:
    """What rotated values [batch, num_heads, 1, head_dim] are made of."""

    x: Node  # the same before RoPE
    cos: Node  # [batch, 1, rotary_dim]
    sin: Node


def fuse_rope(call: Node, made: dict[tuple, Node]) -> bool:
    """Let a call of `cascade_attention` rotate q and k; False if RoPE did not make both of them.

    Args:
        call: the `auto_functionalized_v2` node, to be changed.
        made: cos and sin as the calls before it in the graph take them.
    """
    rows: list[Any] = [call.kwargs["q"], call.kwargs["k"]]
    q, k = (_rope_of_rows(each, reader=call) for each in rows)
    if q is None or k is None or (q.cos, q.sin) != (k.cos, k.sin):
        return False
    num_tokens = rows[0].args[1][0]
    with call.graph.inserting_before(call):
        new = {
            "q": _as_rows(q.x, rows[0]),
            "k": _as_rows(k.x, rows[1]),
            "cos": _as_angles(q.cos, num_tokens, made),
            "sin": _as_angles(q.sin, num_tokens, made),
        }
    is_served = all(_has_whole_rows(node.meta["val"]) for node in new.values())
    if is_served:
        for angles in (q.cos, q.sin):
            # Inductor then computes it once, and not anew for each call that reads it.
            angles.meta["inductor_realize_to_strides"] = True
        call.kwargs = {**call.kwargs, **new}
    for node in rows if is_served else (new["q"], new["k"]):
        _erase_unused(node)
    return is_served


# ------------------------------------------------------------------ what is there


def _rope_of_rows(rows: Any, reader: Node) -> _Rope | None:
    """How these rows [batch, num_heads, head_dim] were rotated, read by `reader` alone."""
    if not _is_call(rows, *_VIEWS) or set(rows.users) != {reader}:
        return None
    heads_last = rows.args[0]
    if not _is_call(heads_last, _ATEN.permute.default) or set(heads_last.users) != {rows}:
        return None
    rotated, order = heads_last.args
    if list(order) != [0, 2, 1, 3] or set(rotated.users) != {heads_last}:
        return None
    rope = _partial_rope(rotated) or _rope(rotated)
    return rope if rope is not None and _fits(rope, rows) else None


def _partial_rope(joined: Node) -> _Rope | None:
    """cat([rope of x[..., :rotary_dim], x[..., rotary_dim:]])"""
    parts = _cat(joined)
    if parts is None or set(parts[0].users) != {joined}:
        return None
    rope = _rope(parts[0])
    if rope is None:
        return None
    rotary_dim = rope.cos.meta["val"].shape[-1]
    source = rope.x.args[0] if _is_call(rope.x, _ATEN.slice.Tensor) else None
    if not (_is_slice(rope.x, source, 0, rotary_dim) and _is_slice(parts[1], source, rotary_dim)):
        return None
    return _Rope(source, rope.cos, rope.sin)  # type: ignore[arg-type]


def _rope(rotated: Node) -> _Rope | None:
    """x * cos + rotate_half(x) * sin, cast to x's dtype where cos and sin are wider."""
    total: Any = rotated
    if _is_call(total, _CAST) and set(total.args[0].users) == {total}:
        total = total.args[0]
    if not _is_call(total, _ATEN.add.Tensor):
        return None
    products = total.args
    if not all(
        _is_call(each, _ATEN.mul.Tensor) and set(each.users) == {total} for each in products
    ):
        return None
    (x, *cos), (turned, *sin) = (each.args for each in products)
    angles = [_unsqueezed(*each) for each in (cos, sin)]
    if not isinstance(x, Node) or None in angles:
        return None
    halves = _cat(turned)
    if halves is None or not _is_call(halves[0], _ATEN.neg.default):
        return None
    half = x.meta["val"].shape[-1] // 2
    second, first = halves[0].args[0], halves[1]
    if not (_is_slice(first, x, 0, half) and _is_slice(second, x, half)):
        return None
    return _Rope(x, *angles)  # type: ignore[arg-type]


def _unsqueezed(node: Any) -> Node | None:
    """The node whose values [batch, q_len, rotary_dim] these are for each head."""
    if not _is_call(node, _ATEN.unsqueeze.default) or node.args[1] != 1:
        return None
    return node.args[0]


def _fits(rope: _Rope, rows: Node) -> bool:
    """Whether it is a step's, one token a sequence, and its result is of the dtype of x."""
    x, cos, sin, result = (node.meta["val"] for node in (rope.x, rope.cos, rope.sin, rows))
    if x.ndim != 4:
        return False
    batch, num_heads, q_len, head_dim = x.shape
    rotary_dim = cos.shape[-1]
    return (
        statically_known_true(q_len == 1)
        and _are_equal(cos.shape, (batch, 1, rotary_dim))
        and _are_equal(sin.shape, cos.shape)
        and _are_equal(result.shape, (batch, num_heads, head_dim))
        and isinstance(rotary_dim, int)
        and rotary_dim * x.element_size() % (2 * _ACCESS_BYTES) == 0
        and cos.dtype == sin.dtype
        and cos.dtype in (x.dtype, torch.float32)
        and result.dtype == x.dtype
    )


def _has_whole_rows(rows: Tensor) -> bool:
    """Whether accesses of 16 bytes can walk it: `has_whole_rows` in csrc/checks.h."""
    width = _ACCESS_BYTES // rows.element_size()
    outer = (*rows.stride()[:-1], rows.storage_offset())
    return rows.stride(-1) == 1 and all(statically_known_true(each % width == 0) for each in outer)


def _is_call(node: Any, *targets: Callable) -> bool:
    return isinstance(node, Node) and node.target in targets and not node.kwargs


def _cat(node: Any) -> list[Node] | None:
    """The two nodes that this one joins along the last of its four dimensions."""
    if not _is_call(node, _ATEN.cat.default):
        return None
    parts, *dim = node.args
    return list(parts) if len(parts) == 2 and dim in ([-1], [3]) else None


def _is_slice(node: Any, source: Any, start: int, end: int | None = None) -> bool:
    """Whether it is source[..., start:end] of four dimensions."""
    if not _is_call(node, _ATEN.slice.Tensor) or node.args[0] is not source:
        return False
    size = source.meta["val"].shape[-1]
    given: list[Any] = list(node.args[1:])
    dim, first, last, step = given + [0, 0, size, 1][len(given) :]
    found = (dim, first or 0, size if last is None else min(last, size), step)
    return found in [(dim, start, size if end is None else end, 1) for dim in (-1, 3)]


def _are_equal(shape: Any, expected: Any) -> bool:
    return len(shape) == len(expected) and all(
        statically_known_true(a == b) for a, b in zip(shape, expected, strict=True)
    )


# ------------------------------------------------------------------ what takes its place


def _as_rows(x: Node, rows: Node) -> Node:
    """x [batch, num_heads, 1, head_dim], shaped like `rows`."""
    return _add(_ATEN.reshape.default, _add(_ATEN.permute.default, x, [0, 2, 1, 3]), rows.args[1])


def _as_angles(angles: Node, num_tokens: Any, made: dict[tuple, Node]) -> Node:
    """angles [batch, 1, rotary_dim] as [num_tokens, rotary_dim]"""
    if (angles, num_tokens) not in made:
        shape = [num_tokens, angles.meta["val"].shape[-1]]
        made[angles, num_tokens] = _add(_ATEN.reshape.default, angles, shape)
    return made[angles, num_tokens]


def _add(target: Callable, *args: Any) -> Node:
    node = args[0].graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda each: each.meta["val"]))
    return node


def _erase_unused(node: Node) -> None:
    """Erase a node that nobody reads, and what was made for it alone."""
    if node.op != "call_function" or node.users:
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for each in inputs:
        _erase_unused(each)
