"""When generate stops, and which rows are finished, without waiting for the GPU.

Stock generate waits after each step for the GPU to say whether all rows are finished, and the GPU
then idles while the host prepares the next step. Here the host reads that answer one step late,
while the next step runs. If the answer is yes, the extra step is undone, including its effect on
the random state: tokens and random stream are those of stock generate.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import torch
from torch import Tensor

from .cache import CascadeCache


class HostCopy:
    """Copies a tensor to the host while the GPU goes on with its next work."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._arrived = tensor.detach(), None
        if tensor.device.type == "cuda":
            self._host = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True
            )
            stream = _copy_stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                self._host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record(stream)

    def wait(self) -> Tensor:
        """Wait for the copy and return the values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.cpu()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class RowCloser:
    """Tells the cache which rows are finished; on a GPU two steps late, so it need not wait."""

    def __init__(self, cache: CascadeCache) -> None:
        self._cache = cache
        self._over: Tensor | None = None
        self._copies: deque[HostCopy] = deque()

    def note(self, over: Tensor) -> None:
        """Record which rows this step finished: bool, [batch]."""
        self._over = over if self._over is None else self._over | over
        self._copies.append(HostCopy(self._over))
        if len(self._copies) > (2 if over.device.type == "cuda" else 0):
            self._cache.close_rows(self._copies.popleft().wait().tolist())


class LateStopCheck:
    """Whether all rows are finished, one step late; replaces transformers' `DeferredStopCheck`.

    Args:
        input_ids: the prompts, [batch, length].
        max_length: the length at which every row is finished; None is no limit.
        cache: the call's.
        cache_is_returned: part of DeferredStopCheck's signature; always False, since `is_supported`
            refuses True.
        streamer: gets each step's tokens one step late, and never those of an undone step.
    """

    def __init__(
        self,
        input_ids: Tensor,
        max_length: int | None,
        cache: CascadeCache,
        cache_is_returned: bool,
        streamer: Any = None,
    ) -> None:
        assert not cache_is_returned
        self._max_length, self._cache, self._streamer = max_length, cache, streamer
        self._device = input_ids.device
        # Of the newest step: which rows go on, its tokens, the random state after it.
        self._newest: tuple[HostCopy, HostCopy | None, Tensor] | None = None
        self._undone = False

    @staticmethod
    def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, **_: Any) -> bool:
        """Whether one step too many has no visible effect but the time it takes."""
        return (
            device.type == "cuda"
            and isinstance(cache, CascadeCache)
            and cache.may_step_too_far
            and not cache_is_returned
        )

    def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
        before, self._newest = (
            self._newest,
            (
                HostCopy(unfinished_sequences),
                None if self._streamer is None else HostCopy(tokens),
                _random_state(self._device),
            ),
        )
        if before is not None:
            unfinished, tokens_before, random_state = before
            self._stream(tokens_before)
            if not unfinished.wait().any():
                self._undone = True
                _set_random_state(self._device, random_state)
                return True
        return self._max_length is not None and length >= self._max_length

    def finish(self) -> int:
        """Undo the extra step, if there was one; return how many steps were undone, 0 or 1."""
        if self._undone:
            self._cache.undo_step()
        elif self._newest is not None:
            self._stream(self._newest[1])
        return int(self._undone)

    def _stream(self, tokens: HostCopy | None) -> None:
        if tokens is not None:
            self._streamer.put(tokens.wait())


def _random_state(device: torch.device) -> Tensor:
    """The state of the device's generator. It lies on the host, so reading it does not wait."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
