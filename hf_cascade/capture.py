"""CUDA graphs: a run of launches recorded once and replayed with other inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_lock = threading.Lock()  # torch captures one graph at a time in a process
_STANCE = "fail_on_recompile"


@dataclass(frozen=True)
class Graph:
    """A captured call of a function; it reads `inputs` and writes `outputs`."""

    graph: Any
    inputs: dict[str, Any]
    outputs: Any

    def replay(self, inputs: dict[str, Any]) -> Any:
        """Run it on tensors of the same shapes; returns the same output tensors every time."""
        for name, own in self.inputs.items():
            if isinstance(own, Tensor):
                own.copy_(inputs[name], non_blocking=True)
        self.graph.replay()
        return self.outputs


class Capturer:
    """Captures graphs that follow each other: each takes over the memory of the one before."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._last: Any = None

    def capture(self, function: Callable[..., Any], inputs: dict[str, Any]) -> Graph:
        """What `function` launches on the current device. Nothing runs before the first replay.

        Args:
            function: called with `inputs`, their tensors copied.
            inputs: keyword arguments; what is no tensor stays the same in all replays.
        Raises:
            Exception: whatever the function raised, or that it waited for the GPU.
        """
        own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        with _lock:
            if self._stream is None or self._stream.device_index != torch.cuda.current_device():
                self._stream, self._last = torch.cuda.Stream(), None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                try:
                    graph, outputs = _capture(lambda: function(**own), self._last)
                except BaseException:
                    # A capture that fails leaves torch's generators as they are in one: end it.
                    _capture(lambda: torch.zeros(1, device="cuda"), None)
                    raise
            torch.cuda.current_stream().wait_stream(self._stream)
            self._last = graph
        return Graph(graph, own, outputs)

    def release(self) -> None:
        """Give the memory of the last graph back, if that is no longer in use."""
        self._last = None


def without_recompiling(run: Callable[[], Any]) -> Any:
    """`run()`, in which compiled code whose guards fail is an error instead of compiled anew."""
    with torch.compiler.set_stance(_STANCE):
        return run()


def beside_captures(run: Callable[[], Any]) -> Any:
    """`run()`, once more if another thread's `without_recompiling` kept it from compiling.

    The stance that forbids to compile is that of the process.
    """
    try:
        return run()
    except RuntimeError as error:
        if _STANCE not in str(error):
            raise
    with _lock:  # nobody captures meanwhile
        return run()


def _capture(run: Callable[[], Any], memory_of: Any) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    pool = None if memory_of is None else memory_of.pool()
    # What other threads do with the GPU meanwhile is no error, and not captured.
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        outputs = run()
    finally:
        graph.capture_end()
    return graph, outputs
