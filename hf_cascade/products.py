"""The library of a decode step's matrix products: torch's own choice or cuBLASLt."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_faster_by_cublaslt(num_rows: int) -> bool:
    """Whether a step of so many rows is, by a fixed rule."""
    # Products of Llama-3.1-8B's shape on an H200, by cuBLASLt instead of torch's own choice: 3%
    # slower with 8 and 16 rows, 0.5 to 3% faster with 24 to 112, alike with 128, from 160 on 4%
    # slower. See benchmarks/NOTES.md, "Generate, captured", 10.
    return 24 <= num_rows < 128


@contextmanager
def by_faster_library(num_rows: int) -> Iterator[None]:
    """Within it torch computes products by the library that is faster for steps of so many rows.

    What the user chose stays. It is a setting of the process: the products of other threads
    follow it, too, until the last of those who are within has left.
    """
    is_held = is_faster_by_cublaslt(num_rows) and _hold()
    try:
        yield
    finally:
        if is_held:
            _release()


_lock = threading.Lock()
_num_holders = 0
_held: torch._C._BlasBackend | None = None  # what torch calls the library they hold


def _hold() -> bool:
    """Choose cuBLASLt, for one more; False where the user has chosen."""
    global _num_holders, _held
    with _lock:
        if _num_holders == 0:
            if _is_chosen():
                return False
            _let_warn()
            _held = torch.backends.cuda.preferred_blas_library("cublaslt")
        _num_holders += 1
    return True


def _release() -> None:
    global _num_holders
    with _lock:
        _num_holders -= 1
        choose = torch.backends.cuda.preferred_blas_library
        if _num_holders == 0 and choose() == _held:  # else another was chosen meanwhile
            choose(torch._C._BlasBackend.Cublas)


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
