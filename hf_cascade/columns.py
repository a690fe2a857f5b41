"""What stock generate grows by a column in every step, made in one piece before the first step."""

from __future__ import annotations

import torch
from torch import Tensor

GROWING = ("attention_mask", "position_ids")
_MOST_AHEAD = 4096  # max_length may be "no limit", 1e30


class Columns:
    """The growing inputs of one call: each step's are a view, and no launch of a kernel.

    Args:
        room: columns that the call may come to need; so many at most are made ahead.
    """

    def __init__(self, room: int) -> None:
        self._room = max(1, min(room, _MOST_AHEAD))
        self._whole: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}

    def grown(self, name: str, now: Tensor) -> Tensor:
        """`now` with the column that stock generate would append.

        Args:
            name: one of GROWING; a mask grows by ones, positions by the next position.
            now: [batch, length]; if it is not what was returned last, all is made anew.
        """
        length = now.shape[1] + 1
        if now is not self._given.get(name) or length > self._whole[name].shape[1]:
            self._whole[name] = torch.cat([now, self._future(name, now)], dim=1)
        self._given[name] = self._whole[name][:, :length]
        return self._given[name]

    def _future(self, name: str, now: Tensor) -> Tensor:
        if name == "attention_mask":
            return now.new_ones(now.shape[0], self._room)
        return now[:, -1:] + torch.arange(1, self._room + 1, dtype=now.dtype, device=now.device)
