"""Which library multiplies in captured steps: cuBLAS, torch's default, or cuBLASLt.

Neither is always the faster. So a step's products are measured once for each number of rows, on
the model's own weights, before the first capture; a graph keeps the library it was captured with.
"""

from __future__ import annotations

import logging
import random
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear

from .capture import Capturer, Graph
from .packing import PackedLinear, operands

logger = logging.getLogger("hf_cascade")

_LEAST_SAVING = 0.02  # less may be noise
_MOST_WEIGHTS = 8  # of a shape that take turns: more than L2 holds, where it matters
_REPEATS = 5
_lock = threading.Lock()  # a process has one preference

Products = dict[tuple, list[tuple[Tensor, Tensor | None]]]  # of a shape and dtype: weights, biases
Times = list[tuple[int, float, float]]  # of a shape: products in a step, us of one by each library


class BlasChoice:
    """The faster library for each number of rows of a model's steps; `capturer` captures these."""

    def __init__(self, capturer: Capturer) -> None:
        self._capturer = capturer
        self._pays: dict[tuple, bool] = {}

    @contextmanager
    def preferred(self, model: Any, device: torch.device, rows: int) -> Iterator[None]:
        """In it torch prefers cuBLASLt, if that pays. It may wait for the GPU before, once."""
        # What another thread multiplies meanwhile, outside this lock, may use cuBLASLt as well.
        with _lock, _preferring_lt() if self._pays_for(model, device, rows) else nullcontext():
            yield

    def _pays_for(self, model: Any, device: torch.device, rows: int) -> bool:
        # The compiler's own kernels multiply a single row.
        if rows == 1 or device.type != "cuda" or not _is_free_to_choose():
            return False
        products = products_of(model, device)
        key = (rows, *((kind, len(each)) for kind, each in products.items()))
        if products and key not in self._pays:
            self._pays[key] = False  # if measuring fails
            try:
                saved = saving(measured(products, rows, self._capturer))
            except Exception as error:
                logger.info("cuBLAS and cuBLASLt could not be compared: %s", error)
            else:
                self._pays[key] = saved > _LEAST_SAVING
                name = "cuBLASLt" if self._pays[key] else "cuBLAS"
                text = "steps of %d rows multiply by %s; cuBLASLt saves %.1f%% of cuBLAS's time"
                logger.info(text, rows, name, 100 * saved)
        return self._pays.get(key, False)


def saving(times: Times) -> float:
    """The part of the time of all products that cuBLASLt saves; negative where it takes longer."""
    return 1 - sum(n * lt_us for n, _, lt_us in times) / sum(n * us for n, us, _ in times)


def products_of(model: Any, device: torch.device) -> Products:
    """A step's products with plain weights in half precision on `device`; siblings make one."""
    wrapped = {
        part
        for module in model.modules()
        if "base_layer" in module._modules or "_hf_hook" in vars(module)  # by PEFT, accelerate
        for part in module.modules()
    }
    plain = [m for m in model.modules() if type(m) in (Linear, PackedLinear) and m not in wrapped]
    products: Products = {}
    for weight, bias in {id(pair[0]): pair for pair in map(operands, plain)}.values():
        is_half = weight.dtype in (torch.float16, torch.bfloat16)
        if type(weight.data) is Tensor and weight.device == device and is_half:
            kind = (weight.shape, weight.dtype, bias is None)
            products.setdefault(kind, []).append((weight, bias))
    return products


@torch.no_grad()
def measured(products: Products, rows: int, capturer: Capturer) -> Times:
    """What they take in graphs on the current device."""
    graphs, lengths = [], []
    for each in products.values():
        some = each[:: -(-len(each) // _MOST_WEIGHTS)]
        lengths.append((len(each), len(some)))
        weight = some[0][0]
        # Rows of a weight as activations: random numbers would change the random state.
        x = weight[torch.arange(rows, device=weight.device) % len(weight)]
        for library in (nullcontext, _preferring_lt):
            with library():
                _multiply(some, x)  # loads the kernels, for the step too
                graphs.append(capturer.capture(partial(_multiply, some), {"x": x}))
    times = iter(_medians_us(graphs))
    return [(number, next(times) / part, next(times) / part) for number, part in lengths]


def _multiply(some: list[tuple[Tensor, Tensor | None]], x: Tensor) -> None:
    for weight, bias in some:
        linear(x, weight, bias)


def _medians_us(graphs: list[Graph]) -> list[float]:
    order = [index for index in range(len(graphs)) for _ in range(_REPEATS)]
    random.Random(0).shuffle(order)  # a changing clock favours nobody
    events: list[list[Any]] = [[] for _ in graphs]
    for index in order:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs[index].graph.replay()  # its inputs are those it was captured with
        end.record()
        events[index].append((start, end))
    torch.cuda.current_stream().synchronize()
    return [1e3 * median(start.elapsed_time(end) for start, end in pairs) for pairs in events]


def _is_free_to_choose() -> bool:
    """Whether no one has chosen, nor wants results that no measurement can change."""
    is_nvidia = torch.version.hip is None and hasattr(torch.backends.cuda, "preferred_blas_library")
    return (
        is_nvidia
        and torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublas
        and not torch.are_deterministic_algorithms_enabled()
    )


@contextmanager
def _preferring_lt() -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.backends.cuda.preferred_blas_library is an exp")
        torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
