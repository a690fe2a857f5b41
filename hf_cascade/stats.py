"""What happened in a `generate` call, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GenerateStats:
    """One `generate` call in numbers; `model.cascade.stats` is the last call's.

    Attributes:
        path: "cascade", or "stock" where the call fell back; `reason` then says why.
        prompt_tokens: tokens that stock generate would forward in prefill: rows x length, padding
            excluded.
        prefill_tokens: tokens really forwarded in prefill (on the stock path: prompt_tokens).
        decode_steps: forward passes after prefill.
        kv_bytes: most bytes of pages in use at once, K and V, all layers; pages count whole, full
            or not; 0 on the stock path.
        kv_bytes_unshared: bytes that the same tokens hold when no row shares any, as in a cache
            without pages: it can be less than `kv_bytes` where little is shared; 0 on the stock
            path. On a GPU it is known two steps late that a row is over; this and kv_bytes count
            those steps.
        backend: what computed attention and where: "kernels/cuda" is the CUDA kernels of csrc/,
            "torch/cpu" torch operators on the CPU; "stock" on the stock path.
        fused_layers: layers whose attention the compiler made one call of in the decode steps; 0
            where these were not compiled.
    """

    path: Literal["cascade", "stock"]
    reason: str | None
    prompt_tokens: int
    prefill_tokens: int
    decode_steps: int
    kv_bytes: int
    kv_bytes_unshared: int
    backend: str
    fused_layers: int
