"""The decode step: the model's forward pass compiled and, on a GPU, replayed as one CUDA graph.

Inductor's own graphs would not do: it leaves out whatever writes into its inputs, and every layer
writes into the page pool. So the compiled forward is plain, and a `DecodeStep` captures it. A
graph belongs to one `generate` call: whatever the compiler's guards watch over (weights, adapters,
modes, hooks) is checked once, when the call's graph is captured, and holds until the call ends.
Capturing is host work, and the GPU is busy with the prompt meanwhile.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cache import CascadeCache
from .fuse import num_fused
from .ops import kernels

logger = logging.getLogger("hf_cascade")
_capture_lock = threading.Lock()  # torch captures one graph at a time in a process


class StepCompiler:
    """What the decode steps of a model's calls have in common.

    Attributes:
        fused_layers: cascades that the compiler fused in one step; 0 before the first.
        failure: why steps can't be compiled here; None as long as they can.
    """

    def __init__(self) -> None:
        self.fused_layers = 0
        self.failure: str | None = None
        self._config: Any = None
        self._compiled: Callable[..., Any] | None = None
        self._known: set[tuple] = set()  # inputs, by shape, that a step has run with
        self._not_captured: set[tuple] = set()  # and those whose capture failed
        self._stream: Any = None  # to capture on
        self._last_graph: Any = None  # whose memory the next one takes over

    def step(
        self, model: Any, cache: CascadeCache, config: Any, *, must_compile: bool, captures: bool
    ) -> DecodeStep:
        """The decode step of one call.

        Args:
            model: what to run; called as it is where it can't be compiled.
            cache: the call's.
            config: a CompileConfig of transformers.
            must_compile: a failure to compile is an error.
            captures: replay steps on a GPU as a CUDA graph.
        """
        if self._compiled is None or config != self._config:
            self._config = config
            self._compiled = torch.compile(model.__call__, **config.to_dict())
            self._known.clear()
        return DecodeStep(self, model, cache, must_compile=must_compile, captures=captures)

    def run(self, model: Any, inputs: dict[str, Any], *, must_compile: bool) -> Any:
        """The model's forward pass: compiled or, where that fails, as it is."""
        if self.failure is not None:
            return model(**inputs)
        assert self._compiled is not None
        key = _shapes(inputs)
        if key in self._known:
            return self._compiled(**inputs)
        if not self._known:
            _announce(f"compiling the decode step of {type(model).__name__}, once a process")
        fused_before, started = num_fused(), time.perf_counter()
        try:
            outputs = self._compiled(**inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            if must_compile:
                raise
            self.failure = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            logger.warning("decode steps are not compiled: %s", self.failure)
            return model(**inputs)
        if num_fused() > fused_before:
            self.fused_layers = num_fused() - fused_before
            _announce(f"compiled in {time.perf_counter() - started:.0f} s")
        return outputs

    def knows(self, inputs: dict[str, Any]) -> bool:
        """Whether a step has run with inputs like these: nothing is left to load or compile."""
        return _shapes(inputs) in self._known

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        """Capture what `run` launches on the current device.

        Returns:
            The graph, and what `run` returned: tensors that each replay writes anew.
        Raises:
            RuntimeError: `run` waits for the GPU, or it is left to be compiled.
        """
        if self._stream is None or self._stream.device_index != torch.cuda.current_device():
            self._stream, self._last_graph = torch.cuda.Stream(), None
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream), torch.compiler.set_stance("fail_on_recompile"):
                graph, outputs = _capture(run, self._last_graph)
        except BaseException:
            # A capture that fails leaves torch's generators as they are in one; this ends it.
            with torch.cuda.stream(self._stream):
                _capture(lambda: torch.zeros(1, device="cuda"), None)
            raise
        torch.cuda.current_stream().wait_stream(self._stream)
        self._last_graph = graph
        return graph, outputs

    def release(self) -> None:
        """Give the memory of captured graphs back."""
        self._last_graph = None


class DecodeStep:
    """What `generate` calls in place of the model in the decode steps of one call."""

    def __init__(
        self,
        compiler: StepCompiler,
        model: Any,
        cache: CascadeCache,
        *,
        must_compile: bool,
        captures: bool,
    ) -> None:
        self._compiler, self._model, self._cache = compiler, model, cache
        self._must_compile, self._captures = must_compile, captures
        self._graph: _Graph | None = None

    def __call__(self, **inputs: Any) -> Any:
        """One step of inputs as `prepare_inputs_for_generation` makes them.

        Returns:
            The model's output; a later step may overwrite its tensors.
        """
        key = _shapes(inputs)
        version = self._cache.pool.version
        if self._graph is not None and (self._graph.key, self._graph.version) != (key, version):
            self._graph = None
        if self._graph is None and self._may_capture(key):
            self._graph = self._captured(key, version, inputs)
        if self._graph is not None:
            return self._graph.replay(inputs)
        outputs = self._run(inputs, must_compile=self._must_compile)
        self._compiler._known.add(key)
        return outputs

    def _run(self, inputs: dict[str, Any], *, must_compile: bool) -> Any:
        self._cache.advance()
        return self._compiler.run(self._model, _marked(inputs), must_compile=must_compile)

    def _may_capture(self, key: tuple) -> bool:
        compiler = self._compiler
        return (
            self._captures
            and key in compiler._known
            and key not in compiler._not_captured
            # Attention composed of torch operators reads lengths to the host.
            and all(kernels.serve(k_pool) for k_pool, _ in self._cache.pool.layers())
        )

    def _captured(self, key: tuple, version: int, inputs: dict[str, Any]) -> _Graph | None:
        """The step as a graph; None where that fails, and then the step has not run."""
        compiler = self._compiler
        statics = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        device = next(v.device for v in statics.values() if isinstance(v, Tensor))
        try:
            with _capture_lock, torch.cuda.device(device):
                graph, outputs = compiler.capture(lambda: self._run(statics, must_compile=True))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            # Unless it was a guard of the compiler, trying again does not help.
            if "recompile" not in str(error):
                compiler._not_captured.add(key)
                logger.warning("decode steps run without a CUDA graph: %s", error)
            compiler._known.discard(key)
            return None
        return _Graph(graph, key, version, statics, outputs)


@dataclass(frozen=True)
class _Graph:
    """A captured step; it reads `statics` and writes `outputs`.

    Attributes:
        key: shapes of its inputs.
        version: of the page pool that it writes to.
    """

    graph: Any
    key: tuple
    version: int
    statics: dict[str, Any]
    outputs: Any

    def replay(self, inputs: dict[str, Any]) -> Any:
        for name, static in self.statics.items():
            if isinstance(static, Tensor):
                static.copy_(inputs[name], non_blocking=True)
        self.graph.replay()
        return self.outputs


def _capture(run: Callable[[], Any], memory_of: Any) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    pool = () if memory_of is None else (memory_of.pool(),)
    graph.capture_begin(*pool, capture_error_mode="thread_local")
    try:
        outputs = run()
    finally:
        graph.capture_end()
    return graph, outputs


def _shapes(inputs: dict[str, Any]) -> tuple:
    """Inputs of equal keys run the same kernels: shapes of tensors, ids of what else there is."""
    return tuple(
        (name, value.shape if isinstance(value, Tensor) else repr(value))
        for name, value in inputs.items()
        if not isinstance(value, CascadeCache)
    )


def _marked(inputs: dict[str, Any]) -> dict[str, Any]:
    """Tell torch.compile that one batch size is like another, but for a single row."""
    for value in inputs.values():
        if isinstance(value, Tensor) and value.ndim and value.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(value, 0)
    return inputs


def _announce(message: str) -> None:
    """Log as INFO; on stderr where the program has set up no logging: a compiler takes its time."""
    logger.info(message)
    if not logger.hasHandlers():
        print(f"hf_cascade: {message}", file=sys.stderr)
