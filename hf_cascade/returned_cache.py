"""The cache as the caller of `generate` gets it, in place of the tree over the page pool."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache

from .cache import CascadeCache
from .tree import KVTree


class ReturnedCache(DynamicCache):
    """`past_key_values` of a `generate` output: an ordinary cache, gathered at its first use.

    Until then it costs no memory but the pages it keeps. Rows are left-padded as they were in the
    prompt batch; padded positions are zero.
    """

    def __init__(self, cache: CascadeCache, on_close: Callable[[KVTree], None]) -> None:
        self._pages: _Pages | None = _Pages(cache, on_close)
        super().__init__()

    def __reduce_ex__(self, protocol):
        _ = self.layers  # copies and pickles are of the gathered rows, never of the page pool
        return super().__reduce_ex__(protocol)

    @property
    def layers(self) -> list:
        if self._pages is not None:
            pages, self._pages = self._pages, None  # `update` asks for the layers
            try:
                for layer_idx, (k, v) in enumerate(pages.gather()):
                    self.update(k, v, layer_idx)
            except BaseException:  # out of memory, say: the pages still have it all
                self.layers, self._pages = [], pages
                raise
        return self._layers

    @layers.setter
    def layers(self, value: list) -> None:
        self._layers = value


class _Pages:
    """The pages of a finished call's rows, returned to their tree when this object goes."""

    def __init__(self, cache: CascadeCache, on_close: Callable[[KVTree], None]) -> None:
        self._tree, self._on_close = cache.tree, on_close
        self._pools = cache.pool.layers()  # kept alive even if the pool is released or grows
        self._length = cache.get_seq_length()
        self._slots = [
            [
                slot
                for node in cache.tree.path(leaf)
                for slot in cache.tree.slots(node, 0, node.kv_len)
            ]
            for leaf in cache.leaves
            if leaf is not None
        ]

    def gather(self) -> list[tuple[Tensor, Tensor]]:
        return [(self._rows(k_pool), self._rows(v_pool)) for k_pool, v_pool in self._pools]

    def _rows(self, pool: Tensor) -> Tensor:
        _, num_kv_heads, page_size, head_dim = pool.shape
        rows = pool.new_zeros(len(self._slots), num_kv_heads, self._length, head_dim)
        for row, slots in zip(rows, self._slots, strict=True):
            slot = torch.tensor(slots, device=pool.device)
            row[:, self._length - len(slots) :] = pool[
                slot // page_size, :, slot % page_size
            ].transpose(0, 1)
        return rows

    def __del__(self) -> None:
        self._on_close(self._tree)
