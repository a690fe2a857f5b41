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
    """Whether cuBLASLt is faster than torch's choice for a step of `num_rows` rows, as measured."""
    # Products of Llama-3.1-8B's shape on an H200, cuBLASLt against torch's own choice: 3% slower
    # with 8 and 16 rows, 0.5 to 3% faster with 24 to 112, equal with 128, 4% slower from 160 on.
    # See benchmarks/NOTES.md, "Generate, captured", 10.
    return 24 <= num_rows < 128


@contextmanager
def by_faster_library(num_rows: int) -> Iterator[None]:
    """Within this context torch uses the library that is faster for steps of `num_rows` rows.

    A library that the user has selected stays. The setting belongs to the process: products of
    other threads use it too, until the last holder has left the context.
    """
    is_held = is_faster_by_cublaslt(num_rows) and _hold()
    try:
        yield
    finally:
        if is_held:
            _release()


_lock = threading.Lock()
_num_holders = 0
_held: torch._C._BlasBackend | None = None  # torch's value for the selected library


def _hold() -> bool:
    """Select cuBLASLt for one more holder; False if the user has selected a library."""
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
        if _num_holders == 0 and choose() == _held:  # else the user has selected another
            choose(torch._C._BlasBackend.Cublas)


def _is_chosen() -> bool:
    # torch answers Cublas both by default and if the user has selected cuBLAS. Its environment
    # variable, if set, is a choice: 1 is cuBLASLt, 0 is cuBLAS.
    return (
        "TORCH_BLAS_PREFER_CUBLASLT" in os.environ
        or torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublas
    )


@functools.cache
def _let_warn() -> None:
    """Select cuBLASLt without torch's one-time "experimental" warning."""

    def choose(_: float) -> float:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        return 0.0

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"torch\.backends\.cuda\.preferred_blas_library is an experimental feature"
        )
        # Called directly, torch writes the warning to stderr, past Python's filters. Called from
        # within `apply_`, it issues a Python warning, which the filter drops.
        torch.zeros(1, device="cpu").apply_(choose)
