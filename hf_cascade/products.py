"""The library of a decode step's matrix products: torch's own choice or cuBLASLt."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_faster_by_cublaslt(num_rows: int) -> bool:
    """Whether a step of so many rows is, by a fixed rule."""
    # A step of Llama-3.1-8B's shape on an H200: with 64 rows 5.45 ms instead of 5.62, with 256 rows
    # 9.93 and 9.90; with 16 rows its products take 1 to 2% longer. Nothing between was measured.
    # See benchmarks/NOTES.md, "Generate, captured", 5 and 6.
    return 32 < num_rows <= 64


@contextmanager
def by_faster_library(num_rows: int) -> Iterator[None]:
    """Within it torch computes products by the library that is faster for steps of so many rows.

    What the user chose stays. It is a setting of the process: the products of other threads
    follow it, too.
    """
    if not is_faster_by_cublaslt(num_rows) or _is_chosen():
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    try:
        _let_warn()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _is_chosen() -> bool:
    # Where nothing was chosen torch answers Cublas, as it does where that was. Its environment
    # variable tells: 1 is cuBLASLt, 0 is cuBLAS.
    return (
        "TORCH_BLAS_PREFER_CUBLASLT" in os.environ
        or torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublas
    )


@functools.cache
def _let_warn() -> None:
    """Choose cuBLASLt; that this is experimental, which torch says once, is said to nobody."""

    def choose(_: float) -> float:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        return 0.0

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"torch\.backends\.cuda\.preferred_blas_library is an experimental feature"
        )
        # By itself it writes to stderr, past Python's filters. Within a tensor's method that calls
        # Python it warns through that.
        torch.zeros(1, device="cpu").apply_(choose)
