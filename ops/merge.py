"""Merging attention states: the operator that lets a cascade be computed in parts.

Attention of one query row over a set of KV pairs is a state (out, lse): the softmax-weighted mean
of the values, and the natural log of the softmax denominator. States of disjoint sets combine to
the state of their union,

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

which is commutative and associative, with the empty state (0, -inf) as its identity. So a shared
prefix and a private suffix can be attended to by different kernels, in any order, in any number
of pieces.

Source: Ye et al., Cascade Inference (flashinfer.ai/2024/02/02/cascade-inference.html);
arXiv 2501.01005, section 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_state
from .library import define


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint KV sets into attention over their union.

    Args:
        out_a, out_b: [num_tokens, num_q_heads, head_dim] (any leading shape), floating point.
        lse_a, lse_b: [num_tokens, num_q_heads], float32, natural log; -inf is the empty state.
    Returns:
        (out, lse), shaped and typed like (out_a, lse_a). Merged with an empty state, the other
        state comes back bit for bit.
    Raises:
        ValueError: a shape, dtype or device differs.
    Source: arXiv 2501.01005, section 2.2.
    """
    return torch.ops.hf_cascade.merge_state(out_a, lse_a, out_b, lse_b)


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over `num_states` disjoint KV sets into attention over their union.

    Args:
        out: [num_states, num_tokens, num_q_heads, head_dim] (any shape after the first).
        lse: [num_states, num_tokens, num_q_heads], float32, natural log; -inf is the empty state.
    Returns:
        (out, lse) without the first dimension, typed like the arguments; no states at all give
        the empty state.
    Raises:
        ValueError: a shape, dtype or device differs.
    Source: arXiv 2501.01005, section 2.2.
    """
    return torch.ops.hf_cascade.merge_states(out, lse)


def _merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    _check_pair(out_a, lse_a, out_b, lse_b)
    out, lse = _combine(out_a.float(), lse_a, out_b.float(), lse_b)
    return out.to(out_a.dtype).contiguous(), lse.contiguous()


def merge_nonempty(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """`merge_state` for callers that know that neither state is empty."""
    out = _weighted(as_float32(out_a), lse_a, as_float32(out_b), lse_b)
    return out if out.dtype == out_a.dtype else out.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)


def as_float32(x: Tensor) -> Tensor:
    """`x.float()`, but without that call if x is float32: in a short step the call shows."""
    return x if x.dtype == torch.float32 else x.float()


def _combine(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out = _weighted(out_a, lse_a, out_b, lse_b)
    # With an empty state the arithmetic would give -0 + 0, or NaN if both are empty. Selecting the
    # other state returns it bit for bit.
    out = torch.where(_is_empty(lse_b), out_a, torch.where(_is_empty(lse_a), out_b, out))
    return out, torch.logaddexp(lse_a, lse_b)


def _weighted(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    # Two weights, not one and its complement: so merging commutes bit for bit, and there is no
    # difference of outs that could overflow.
    log_ratio = (lse_a - lse_b)[..., None]
    return torch.sigmoid(log_ratio) * out_a + torch.sigmoid(-log_ratio) * out_b


def _merge_state_fake(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    _check_pair(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    _check_stack(out, lse)
    merged_out = out.new_zeros(out.shape[1:], dtype=torch.float32)
    merged_lse = lse.new_full(lse.shape[1:], -torch.inf)
    for state_out, state_lse in zip(out, lse, strict=True):
        merged_out, merged_lse = _combine(merged_out, merged_lse, state_out.float(), state_lse)
    return merged_out.to(out.dtype).contiguous(), merged_lse.contiguous()


def _merge_states_fake(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    _check_stack(out, lse)
    return out.new_empty(out.shape[1:]), lse.new_empty(lse.shape[1:])


def _is_empty(lse: Tensor) -> Tensor:
    return torch.isneginf(lse)[..., None]


def _check_pair(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    check_state(out_a, lse_a, "_a")
    check_state(out_b, lse_b, "_b")
    if out_a.shape != out_b.shape:
        raise ValueError(
            f"out_b must have shape {tuple(out_a.shape)} like out_a, got {tuple(out_b.shape)}"
        )
    if out_a.dtype != out_b.dtype:
        raise ValueError(f"out_b must be {out_a.dtype} like out_a, got {out_b.dtype}")
    if out_a.device != out_b.device:
        raise ValueError(f"out_b must be on {out_a.device} like out_a, got {out_b.device}")


def _check_stack(out: Tensor, lse: Tensor) -> None:
    if out.ndim < 2:
        raise ValueError(f"out must be [num_states, ..., head_dim], got {out.ndim} dimensions")
    check_state(out, lse)


define(
    "merge_state(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    implementation=_merge_state,
    fake=_merge_state_fake,
)
define(
    "merge_states(Tensor out, Tensor lse) -> (Tensor, Tensor)",
    implementation=_merge_states,
    fake=_merge_states_fake,
)
