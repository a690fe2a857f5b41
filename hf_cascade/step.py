"""The decode step: the model's forward pass compiled and, on a GPU, replayed as one CUDA graph.

Inductor's own graphs would not do: it leaves out whatever writes into its inputs, and every layer
writes into the page pool. So the compiled forward is plain, and a `DecodeStep` captures it. A
graph belongs to one `generate` call: whatever the compiler's guards watch over (weights, adapters,
modes, hooks) is checked once, when the call's graph is captured, and holds until the call ends.
Capturing is host work, and the GPU is busy with the prompt meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .cache import CascadeCache
from .capture import Capturer, Graph, beside_captures, without_recompiling
from .draw import Draw
from .fuse import num_fused
from .ops import kernels
from .own_code import with_own_code
from .products import by_faster_library

logger = logging.getLogger("hf_cascade")


class StepCompiler:
    """What the decode steps of a model's calls have in common.

    Attributes:
        failure: why steps can't be compiled here; None as long as they can.
        draw: draws tokens, compiled.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self.capturer = Capturer()
        self.draw = Draw()
        self._told: set[str] = set()
        self._forwards: list[tuple[Any, CompiledForward]] = []

    def warn_once(self, reason: str) -> None:
        """Say why steps are not compiled for now."""
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("decode steps are not compiled: %s", reason)

    def forward(self, model: Any, config: Any, *, must_compile: bool) -> CompiledForward:
        """The model's forward pass as a CompileConfig of transformers says."""
        for known, forward in self._forwards:
            if known == config:
                return forward
        compiled = torch.compile(_call_of(model), **config.to_dict())
        self._forwards.append((config, CompiledForward(self, model, compiled, must_compile)))
        return self._forwards[-1][1]


def _call_of(model: Any) -> Callable[..., Any]:
    # `model.__call__` leads to a code object that all models have in common.
    def call(**inputs: Any) -> Any:
        return model(**inputs)

    return with_own_code(call, "decode_step")


class CompiledForward:
    """The forward pass of a model, compiled; where that fails, as it is.

    Args:
        compiler: the model's.
        model: the model.
        compiled: its compiled call.
        must_compile: a failure to compile is an error.
    Attributes:
        can_be_captured: False once a capture has failed for good.
    """

    def __init__(
        self, compiler: StepCompiler, model: Any, compiled: Callable[..., Any], must_compile: bool
    ) -> None:
        self._compiler, self._model, self._compiled = compiler, model, compiled
        self._must_compile = must_compile
        self._known: set[tuple] = set()  # shapes that it has run with
        self.can_be_captured = True
        self._fused_layers = 0

    @property
    def fused_layers(self) -> int:
        """Cascades that the compiler fused in it; 0 before its first run."""
        return self._fused_layers if self._compiler.failure is None else 0

    @property
    def draw(self) -> Draw | None:
        """Draws the tokens after a step; None where nothing is known to compile."""
        return self._compiler.draw if self._known and self._compiler.failure is None else None

    def __call__(self, inputs: dict[str, Any]) -> Any:
        """Run with inputs of any shapes, compiling what is not yet compiled."""
        if not self._known:
            # Loud like the build of the kernels: whoever set up no logging waits just as long.
            logger.warning(
                "compiling the decode step of %s: a minute or two, the first time on a machine",
                type(self._model).__name__,
            )
        fused_before, started = num_fused(), time.perf_counter()
        try:
            # Known shapes may compile too: dtypes, modes, adapters and hooks can have changed.
            outputs = beside_captures(lambda: self._run(inputs))
        except Exception as error:
            if self._compiler.failure is not None or not _is_of_compiler(error):
                raise
            self._fail(error)
            outputs = self._run(inputs)
        if num_fused() > fused_before:
            self._fused_layers = num_fused() - fused_before
            logger.info("compiled in %.0f s", time.perf_counter() - started)
        self._known.add(shapes(inputs))
        return outputs

    def is_ready(self, inputs: dict[str, Any]) -> bool:
        """Whether it has run with inputs of these shapes: nothing is left to load or compile."""
        return shapes(inputs) in self._known

    def captured(self, cache: CascadeCache, inputs: dict[str, Any]) -> Graph | None:
        """A step of `cache` as a graph; None where that is not possible (yet)."""
        if not self.is_ready(inputs):
            return None

        def run(**own: Any) -> Any:
            cache.advance()
            # What is left to compile is compiled outside, in the step that then takes over.
            return without_recompiling(lambda: self._run(own))

        try:
            with torch.cuda.device(next(tensors(inputs)).device):
                return self._compiler.capturer.capture(run, inputs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            if "recompile" in str(error):  # a guard failed
                self._known.discard(shapes(inputs))
            else:
                self.can_be_captured = False
                logger.warning("decode steps run without a CUDA graph: %s", error)
            return None

    def _run(self, inputs: dict[str, Any]) -> Any:
        if self._compiler.failure is not None:
            return self._model(**inputs)
        for value in tensors(inputs):
            if value.ndim and value.shape[0] > 1:  # one batch size is like another
                torch._dynamo.maybe_mark_dynamic(value, 0)
        # torch leaves forward hooks out of its guards unless told otherwise.
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            return self._compiled(**inputs)

    def _fail(self, error: Exception) -> None:
        """Go on without a compiler, or raise what says why there is none."""
        cause = "" if error.__cause__ is None else f": {error.__cause__}"
        failure = " ".join(f"{type(error).__name__}: {error}{cause}".split())[:500]
        if not self._must_compile:
            self._compiler.failure = failure
            logger.warning("decode steps are not compiled: %s", failure)
        elif isinstance(error, torch._dynamo.exc.TorchDynamoException):
            raise error
        else:  # its own words name neither what was compiled nor what to do
            raise type(error)(
                f"the decode step of {type(self._model).__name__} could not be compiled; "
                f'with compile="auto" in hf_cascade.patch it would run as it is. {failure}'
            ) from error


class DecodeStep:
    """What `generate` calls in place of the model in the decode steps of one call.

    Args:
        forward: the compiled forward pass.
        cache: the call's.
        captures: replay steps on a GPU as a CUDA graph.
    """

    def __init__(self, forward: CompiledForward, cache: CascadeCache, *, captures: bool) -> None:
        self._forward, self._cache = forward, cache
        self._captures = captures
        self._graph: Graph | None = None
        self._graph_of: tuple | None = None
        self._has_run = False

    @property
    def fused_layers(self) -> int:
        """Layers whose attention was one call in the steps that have run; 0 before the first."""
        return self._forward.fused_layers if self._has_run else 0

    @property
    def draw(self) -> Draw | None:
        """Draws the tokens after a step; None where nothing is known to compile."""
        return self._forward.draw

    def __call__(self, **inputs: Any) -> Any:
        """One step of inputs as `prepare_inputs_for_generation` makes them.

        Returns:
            The model's output; the next step may overwrite its tensors.
        """
        self._has_run = True
        of = (shapes(inputs), self._cache.pool.version, self._cache.num_step_plans)
        if self._graph is not None and self._graph_of == of:
            return self._graph.replay(inputs)
        self._graph, self._graph_of = None, of
        # Attention composed of torch operators reads lengths to the host.
        captures = (
            self._captures
            and self._forward.can_be_captured
            and all(kernels.serve(k_pool) for k_pool, _ in self._cache.pool.layers())
        )
        # Also before the capture, so that the first call uses the same library, and gives the same
        # tokens, as later ones.
        with by_faster_library(len(self._cache.leaves)) if captures else nullcontext():
            if captures:
                self._graph = self._forward.captured(self._cache, inputs)
            if self._graph is None:
                self._cache.advance()
                return self._forward(inputs)
        return self._graph.replay(inputs)


def tensors(inputs: dict[str, Any]) -> Any:
    return (value for value in inputs.values() if isinstance(value, Tensor))


def shapes(inputs: dict[str, Any]) -> tuple:
    """Equal for inputs that run the same kernels: shapes of tensors, and what else there is."""
    return tuple(
        (name, value.shape if isinstance(value, Tensor) else repr(value))
        for name, value in inputs.items()
        if not isinstance(value, CascadeCache)
    )


def _is_of_compiler(error: Exception) -> bool:
    """Whether it tells of compiling, rather than of running what was compiled."""
    known = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
    # Raised as a bare RuntimeError where the compiler passes over the whole function.
    return isinstance(error, known) or "found no compiled frames" in str(error)
