"""Page storage: one free list for all layers, one pool of K and V per layer."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .errors import OutOfPagesError, UnsupportedModelError


class PageAllocator:
    """Hands out page ids, counts their owners, and remembers the most that were in use.

    Ids are small: the lowest free one is always taken, so storage that covers `num_pages` pages
    covers every page ever handed out.

    Args:
        page_size: slots (tokens) per page.
        max_pages: how many pages may be in use at once; None is no limit but memory.
    """

    def __init__(self, page_size: int, max_pages: int | None = None) -> None:
        self.page_size, self.max_pages = page_size, max_pages
        self.num_pages = 0  # ids below this one have been handed out at least once
        self.peak_pages_in_use = 0
        self._free: list[int] = []  # a heap
        self._owners: Counter[int] = Counter()

    @property
    def pages_in_use(self) -> int:
        return self.num_pages - len(self._free)

    def owners(self, page: int) -> int:
        """How many nodes own `page` (0: it is free)."""
        return self._owners[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one owner: all of them or, on OutOfPagesError, none."""
        if self.max_pages is not None and self.pages_in_use + count > self.max_pages:
            raise OutOfPagesError(count, self.max_pages - self.pages_in_use, self.max_pages)
        reused = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        fresh = range(self.num_pages, self.num_pages + count - len(reused))
        self.num_pages = fresh.stop
        pages = [*reused, *fresh]
        self._owners.update(pages)
        self.peak_pages_in_use = max(self.peak_pages_in_use, self.pages_in_use)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one owner to each of `pages`."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free"
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner from each of `pages`; a page without owners is free."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                del self._owners[page]
                heapq.heappush(self._free, page)

    def reset_peak(self) -> None:
        self.peak_pages_in_use = self.pages_in_use


class PagePool:
    """K and V storage of every layer, [num_pages, num_kv_heads, page_size, head_dim] each.

    A layer's shape, dtype and device are those of the K and V that a call's first pass computes,
    so quantized, sharded and mixed models need no configuration. The pool grows with the allocator
    by doubling, but not beyond what `reserve` announced.

    `version` grows whenever storage moves; graphs captured before must be captured again.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._reserved_pages = 0
        self.version = 0

    def reserve(self, num_pages: int) -> None:
        """Announce the most pages that will be in use until the next call; allocates nothing."""
        self._reserved_pages = num_pages

    def grow(self) -> None:
        """Make every layer hold every page handed out so far."""
        for layer_idx, (k_pool, v_pool) in self._layers.items():
            if k_pool.shape[0] < self.allocator.num_pages:
                self.version += 1
                self._layers[layer_idx] = (self._grown(k_pool), self._grown(v_pool))

    def layer(
        self, layer_idx: int, k: Tensor, v: Tensor, *, is_first_pass: bool
    ) -> tuple[Tensor, Tensor]:
        """The (k_pool, v_pool) of a layer, made in a call's first pass where there is none yet.

        Args:
            layer_idx: index of the layer.
            k, v: [num_tokens, num_kv_heads, head_dim], what is about to be written.
            is_first_pass: nothing of the call is stored yet. A model that has changed its dtype or
                device since the last call then gets new pools.
        Raises:
            UnsupportedModelError: in a later pass, if K and V are unlike those of the first one.
        """
        pools = self._layers.get(layer_idx)
        if pools is None or not (_fits(pools[0], k) and _fits(pools[1], v)):
            if not is_first_pass:
                raise UnsupportedModelError(_change_of(layer_idx, pools, k, v))
            pools = self._layers[layer_idx] = (self._created(k), self._created(v))
            self.version += 1
        return pools

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """The (k_pool, v_pool) of every layer, in layer order."""
        return [self._layers[layer_idx] for layer_idx in sorted(self._layers)]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, given as (source, target), in every layer."""
        if not copies:
            return
        self.grow()  # a target may be newer than the storage
        for k_pool, v_pool in self._layers.values():
            source, target = torch.tensor(copies, device=k_pool.device).unbind(1)
            for pool in (k_pool, v_pool):
                pool[target] = pool[source]

    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V; 0 before the first token."""
        return sum(
            pool.shape[1:].numel() * pool.element_size()
            for pools in self._layers.values()
            for pool in pools
        )

    def _created(self, states: Tensor) -> Tensor:
        num_kv_heads, head_dim = states.shape[-2:]
        shape = (self._capacity(), num_kv_heads, self.allocator.page_size, head_dim)
        # On the CPU, memory that runs [head, page, slot] lets consecutive pages be read in place,
        # and a head's tokens one after the other: with a token's heads side by side, attention of
        # few rows took up to twice as long.
        order = (1, 0, 2, 3) if states.device.type == "cpu" else (0, 1, 2, 3)
        # A tensor born in inference mode could not be written under no_grad later.
        with torch.inference_mode(False):
            return _of_any_size(
                torch.empty_permuted(shape, order, dtype=states.dtype, device=states.device)
            )

    def _grown(self, pool: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            grown = self._created(pool.transpose(1, 2))
            grown[: pool.shape[0]] = pool
            return _of_any_size(grown)

    def _capacity(self) -> int:
        needed, limit = self.allocator.num_pages, self.allocator.max_pages
        useful = self._reserved_pages if limit is None else min(self._reserved_pages, limit)
        return max(needed, min(2 * needed, useful))


def _of_any_size(pool: Tensor) -> Tensor:
    """Tell torch.compile that a grown pool is no reason to compile anew."""
    torch._dynamo.maybe_mark_dynamic(pool, 0)
    return pool


def _fits(pool: Tensor, states: Tensor) -> bool:
    return (
        pool.dtype == states.dtype
        and pool.device == states.device
        and (pool.shape[1], pool.shape[3]) == tuple(states.shape[-2:])
    )


def _change_of(layer_idx: int, pools: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor) -> str:
    if pools is None:
        return f"layer {layer_idx} computed no K and V in the first pass of the call"
    stored, new = (
        ", ".join(f"{x.shape[1]} heads of {x.shape[-1]} in {x.dtype} on {x.device}" for x in both)
        for both in (pools, (k, v))
    )
    return (
        f"K and V of layer {layer_idx} changed within a generate call: stored are {stored}; "
        f"computed were {new}"
    )
