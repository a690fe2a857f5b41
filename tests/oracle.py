"""Attention of one sequence, flattened, in float64: the truth that everything is measured by.

Nothing here knows of trees, pages or kernels. Tolerance is earned: a state may err twice as much
as PyTorch does on the same problem in the same dtype, plus one rounding step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

State = tuple[Tensor, Tensor]  # (out, lse)


@dataclass(frozen=True)
class Flat:
    """One sequence's attention: query token t sees the first `visible[t]` tokens of k and v.

    q: [q_len, num_q_heads, head_dim]; k, v: [kv_len, num_kv_heads, head_dim]; all of one dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: tuple[int, ...]
    sm_scale: float

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.k.shape[1]


def attention(flat: Flat) -> State:
    """The state in float64, straight from the definition, one query row after the other."""
    q, k, v = flat.q.double(), flat.k.double(), flat.v.double()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    for token, seen in enumerate(flat.visible):
        for q_head in range(q.shape[1] if seen else 0):
            kv_head = q_head // flat.group_size
            scores = k[:seen, kv_head] @ q[token, q_head] * flat.sm_scale  # [seen]
            lse[token, q_head] = scores.logsumexp(0)
            out[token, q_head] = (scores - scores.logsumexp(0)).exp() @ v[:seen, kv_head]
    return out, lse


def merge(out: Tensor, lse: Tensor) -> State:
    """The union's state in float64, of states stacked along the first dimension."""
    weights = lse.double().softmax(0).nan_to_num(0)  # NaN: every part is empty
    return (weights[..., None] * out.double()).sum(0), lse.double().logsumexp(0)


def pytorch_attention(flat: Flat) -> State:
    """The state as PyTorch computes it in the dtype of q: SDPA, and the lse of q k^T."""
    q, k, v = (x.transpose(0, 1) for x in (flat.q, flat.k, flat.v))
    k, v = (x.repeat_interleave(flat.group_size, dim=0) for x in (k, v))
    visible = torch.arange(k.shape[1]) < torch.tensor(flat.visible)[:, None]  # [q_len, kv_len]
    scores = (q @ k.mT).float() * flat.sm_scale  # [num_q_heads, q_len, kv_len]
    lse = scores.masked_fill(~visible, -torch.inf).logsumexp(-1)
    out = torch.zeros_like(q)
    if visible.any():
        out = scaled_dot_product_attention(q, k, v, visible, scale=flat.sm_scale)
    return out.transpose(0, 1), lse.transpose(0, 1)


def pytorch_merge(out: Tensor, lse: Tensor) -> State:
    """The union's state as PyTorch computes it in the dtype of out, the lse in float32."""
    weights = lse.softmax(0).nan_to_num(0).to(out.dtype)
    return (weights[..., None] * out).sum(0), lse.logsumexp(0)


def assert_attends(state: State, flat: Flat, *, merges: int = 0) -> None:
    """`state`, made of so many merges, is the attention of `flat`."""
    truth, pytorch = attention(flat), pytorch_attention(flat)
    assert_as_exact(state, truth=truth, pytorch=pytorch, merges=merges)


def assert_as_exact(state: State, *, truth: State, pytorch: State, merges: int = 0) -> None:
    """`state` has its dtypes and earned tolerance; a merge on the way is a step in float32."""
    assert state[0].dtype == pytorch[0].dtype
    assert state[1].dtype == torch.float32
    for name, actual, true, peer in zip(("out", "lse"), state, truth, pytorch, strict=True):
        assert actual.shape == true.shape
        empty = true.isneginf()
        assert torch.equal(actual.isneginf(), empty), f"{name} is empty in the wrong rows"
        step = torch.finfo(actual.dtype).eps + merges * torch.finfo(torch.float32).eps
        actual, true, peer = (x.double().masked_fill(empty, 0) for x in (actual, true, peer))
        if true.numel():
            earned = 2 * (peer - true).abs().max() + step * true.abs().max()
            error = (actual - true).abs().max()
            assert error <= earned, f"{name} errs by {error:.2e}; {earned:.2e} is earned"
