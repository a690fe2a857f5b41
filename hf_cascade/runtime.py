"""What a patched model carries as `model.cascade`: its page pool, its lock, its last call."""

from __future__ import annotations

import gc
import logging
import re
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from .cache import CascadeCache
from .columns import Columns
from .draw import Draw
from .errors import CascadeFallbackWarning, UnsupportedCallError
from .fuse import FusePass
from .ops import kernels
from .pages import PageAllocator, PagePool
from .returned_cache import ReturnedCache
from .stats import GenerateStats
from .step import DecodeStep, StepCompiler
from .tree import KVTree

logger = logging.getLogger("hf_cascade")

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_LIBRARIES = ("hf_cascade", "transformers", "torch", "contextlib")


def _is_same(one: object, other: object) -> bool:
    """Whether two passes of the user's do the same; transformers copies those that are objects."""
    if isinstance(one, CustomGraphPass) and type(one) is type(other):
        return one is other or (one.uuid() is not None and one.uuid() == other.uuid())
    return one == other


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Options:
    """The options of `patch`; see there."""

    page_size: int = 16
    max_pages: int | None = None
    strict: bool = False
    compile: bool | Literal["auto"] = "auto"
    pack_linears: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if not _is_int(self.page_size) or self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, got {self.page_size!r}")
        if self.max_pages is not None and not (_is_int(self.max_pages) and self.max_pages >= 1):
            raise ValueError(
                f"max_pages must be a whole number, at least 1, or None, got {self.max_pages!r}"
            )
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise ValueError(f'compile must be True, False or "auto", got {self.compile!r}')
        for name in ("strict", "pack_linears", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")


def _users_line() -> tuple[str, int]:
    """File and line of the innermost code that is not the libraries' own."""
    frame = innermost = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        if frame.f_back is None:
            frame = innermost
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class Cascade:
    """`model.cascade` of a patched model.

    A copy or a pickle of it has the options and nothing else: pages belong to one model.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._fusions: list[FusePass] = []
        self.compiler = StepCompiler()
        self.lock = threading.RLock()
        self._in_strict = threading.local()  # depth of `strict()` contexts in this thread
        # The running call last; there are several where generate runs inside generate.
        self._calls: list[Call] = []
        self._stats: GenerateStats | None = None
        self._description = "no generate call yet"
        self._warned: set[str] = set()
        self._dropped: deque[KVTree] = deque()  # filled by finalizers, in any thread
        self.pool = self._new_pool()

    def __reduce__(self):
        return type(self), (self.options,)

    def fusion(self, then: Callable[[Graph], None] | None) -> FusePass:
        """The pass that fuses this model's cascades before `then`: one object for each of those.

        Compile configs that have the same one are equal, and share what is compiled.
        """
        for known in self._fusions:
            if _is_same(known.then, then):
                return known
        self._fusions.append(FusePass(then, batch_invariant=self.options.batch_invariant))
        return self._fusions[-1]

    def __deepcopy__(self, memo: dict) -> Cascade:
        return type(self)(self.options)

    @property
    def stats(self) -> GenerateStats | None:
        """What happened in the last finished `generate` call; None before the first."""
        return self._stats

    def describe(self) -> str:
        """The KV tree of the last finished `generate` call as text, as it stood at its end."""
        return self._description

    def release(self) -> None:
        """Give the memory of the page pool and of captured steps back; calls allocate anew.

        Caches returned by earlier calls stay usable and keep the memory they need.
        """
        with self.lock:
            if self._calls:
                raise RuntimeError("release() during generate: the pages are in use")
            storage = [weakref.ref(k_pool) for k_pool, _ in self.pool.layers()]
            self.pool = self._new_pool()
            self.compiler.capturer.release()
            if any(k_pool() is not None for k_pool in storage):
                gc.collect()  # compiling leaves reference cycles that hold what it ran with

    @contextmanager
    def strict(self) -> Iterator[None]:
        """Within this context, in this thread, a call that would fall back is an error.

        It raises UnsupportedCallError.
        """
        depth = getattr(self._in_strict, "depth", 0)
        self._in_strict.depth = depth + 1
        try:
            yield
        finally:
            self._in_strict.depth -= 1

    # What the generate hooks use

    @contextmanager
    def call(self) -> Iterator[Call]:
        """One `generate` call: exclusive, and whatever happens inside, every page comes back."""
        with self.lock:
            depth, is_interrupted = len(self._calls), False
            try:
                self._drain()
                self._calls.append(Call())
                yield self._calls[-1]
                last = self._calls[-1]
                if last.has_begun or last.reason_before is not None:
                    self._finish(last)
            except Exception:
                raise
            except BaseException:  # Ctrl-C, say: it may have come between any two lines
                is_interrupted = True
                self.pool = self._new_pool()
                raise
            finally:
                while len(self._calls) > depth:
                    self._calls.pop().close(keep_pages=is_interrupted)

    def begin_run(self) -> Call | None:
        """Stock generate begins; a model's own `generate` may let it do so more than once.

        Returns:
            The state of that run; None where it was entered past the patched `generate`.
        """
        call = self.uncached
        if call is not None:
            if call.has_begun:
                call = self._calls[-1] = call.next()
            call.has_begun = True
        return call

    def end_run(self, output: Any) -> None:
        """The decoding loop of the running call is over, and returned `output`.

        What of it outlives the call is the caller's own from here on.
        """
        call = self._calls[-1]
        self._finish(call)
        returned = getattr(output, "past_key_values", None)
        if isinstance(returned, CascadeCache):  # a model may have dropped it on the way
            output.past_key_values = ReturnedCache(returned, self.reclaim)
            call.is_handed_over = True
        call.close()
        self._calls[-1] = call.next()

    @property
    def current(self) -> Call | None:
        """The running `generate` call of this thread, if any."""
        calls = self._calls
        return calls[-1] if calls and calls[-1].thread == threading.get_ident() else None

    @property
    def uncached(self) -> Call | None:
        """The running call, if it has no cache of ours: not yet, or as it runs on stock."""
        call = self.current
        return call if call is not None and call.cache is None else None

    def compiles_on(self, device: torch.device) -> bool:
        """Whether decode steps of a model on this device are compiled."""
        if self.options.compile == "auto":
            return device.type == "cuda"
        return self.options.compile

    def open_cache(self, call: Call) -> CascadeCache:
        """A cache over an empty tree, for `call`."""
        is_within_another = any(other.cache is not None for other in self._calls[:-1])
        # Then with pages of its own: it may be of another dtype.
        pool = self._new_pool() if is_within_another else self.pool
        pool.allocator.reset_peak()
        call.cache = CascadeCache(
            KVTree(pool.allocator), pool, batch_invariant=self.options.batch_invariant
        )
        return call.cache

    def fall_back(self, call: Call, reason: str, model_name: str) -> None:
        """Note that `call` runs on stock transformers; in strict mode refuse instead.

        Raises:
            UnsupportedCallError: in strict mode.
        """
        call.reason = reason
        message = f"{model_name}.generate runs without shared prefixes: {reason}"
        if self.options.strict or getattr(self._in_strict, "depth", 0) > 0:
            raise UnsupportedCallError(message)
        kind = re.sub(r"\d+", "#", reason)  # a length in the reason doesn't make it another one
        if kind not in self._warned:
            self._warned.add(kind)
            # With a registry of its own: Python's remembers the text by the line that warns, and
            # would keep a second model's warning back.
            filename, line = _users_line()
            warnings.warn_explicit(message, CascadeFallbackWarning, filename, line, registry={})

    def reclaim(self, tree: KVTree) -> None:
        """A returned cache is gone: take its pages back before the next call."""
        self._dropped.append(tree)

    def _finish(self, call: Call) -> None:
        if call.cache is not None:
            call.cache.end()
            self._description = call.cache.tree.describe()
        self._stats = call.stats()
        logger.debug("generate: %s", self._stats)

    def _drain(self) -> None:
        while self._dropped:
            self._dropped.popleft().clear()

    @property
    def allocator(self) -> PageAllocator:
        return self.pool.allocator

    def _new_pool(self) -> PagePool:
        return PagePool(PageAllocator(self.options.page_size, self.options.max_pages))


class Call:
    """The running state of one `generate` call, from which its stats are made.

    Args:
        is_plain: nothing of the user's watches the steps.
        reason_before: why it runs on stock, if its arguments say so before any hook.
    """

    def __init__(self, is_plain: bool = True, reason_before: str | None = None) -> None:
        self.thread = threading.get_ident()
        self.is_plain, self.reason_before = is_plain, reason_before
        self.reason: str | None = None
        self.has_begun = False  # the first hook was there
        self.cleanup = ExitStack()  # undone when its run ends, however it ends
        self.cache: CascadeCache | None = None
        self.columns: Columns | None = None
        self.step: DecodeStep | None = None  # where decode steps are compiled
        self.only_draws = False  # the loop uses logits only to draw tokens
        self.is_prefilling = self.is_prefilled = False  # on stock
        self.is_handed_over = False  # the cache outlives the call
        self.prompt_tokens = 0
        self.prefill_tokens = 0
        self.decode_steps = 0
        self.prompt_shape: tuple[int, int] | None = None  # rows and columns, padding included
        self.longest = 0  # tokens of a row that criteria of the caller's allow

    def next(self) -> Call:
        """The state in which stock generate may begin anew, within the same `generate` call."""
        return Call(self.is_plain, self.reason_before)

    def close(self, keep_pages: bool = False) -> None:
        """Undo what the call has set up, and give its pages back, unless nobody will need them."""
        self.cleanup.close()
        if self.cache is not None and not self.is_handed_over and not keep_pages:
            self.cache.tree.clear()

    def count_prompt(
        self, attention_mask: Tensor | None, shape: tuple[int, int], known: int
    ) -> None:
        """Count what stock generate would forward.

        Args:
            attention_mask: [batch, length] or something else that says nothing here.
            shape: rows and columns of the prompt batch.
            known: columns whose KV the caller has passed in.
        """
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            self.prompt_tokens = int((attention_mask[:, known:] != 0).sum())
        else:
            self.prompt_tokens = shape[0] * max(0, shape[1] - known)

    def draw(self) -> Draw | None:
        """What draws the tokens of the next step; None: torch's own softmax and multinomial."""
        return None if self.step is None else self.step.draw

    def stats(self) -> GenerateStats:
        cache = self.cache
        kv_bytes = kv_bytes_unshared = 0
        if cache is not None:
            allocator, page_bytes = cache.pool.allocator, cache.pool.page_bytes()
            stored_tokens = sum(cache.prompt_length) + cache.row_steps
            kv_bytes = allocator.peak_pages_in_use * page_bytes
            kv_bytes_unshared = stored_tokens * page_bytes // allocator.page_size
        return GenerateStats(
            path="stock" if cache is None else "cascade",
            reason=self.reason,
            prompt_tokens=self.prompt_tokens,
            prefill_tokens=self.prompt_tokens if cache is None else self.prefill_tokens,
            decode_steps=self.decode_steps if cache is None else cache.decode_steps,
            kv_bytes=kv_bytes,
            kv_bytes_unshared=kv_bytes_unshared,
            backend="stock" if cache is None else self._backend(cache),
            fused_layers=0 if self.step is None else self.step.fused_layers,
        )

    def _backend(self, cache: CascadeCache) -> str:
        k_pools = [k_pool for k_pool, _ in cache.pool.layers()]
        served_by = "kernels" if all(map(kernels.serve, k_pools)) else "torch"
        return f"{served_by}/{k_pools[0].device.type}"
