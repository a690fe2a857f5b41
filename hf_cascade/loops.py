"""What transformers' decoding loops are given in place of their own parts."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

from .step import DecodeStep
from .stopping import RowCloser


class Stepping:
    """The model as the decoding loop sees it, but called it runs the decode step."""

    def __init__(self, model: Any, step: DecodeStep) -> None:
        self._model, self._step = model, step

    def __call__(self, **inputs: Any) -> Any:
        return self._step(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Criteria(StoppingCriteriaList):
    """The call's stopping criteria, which also tell `rows` which ones are over.

    The host knows when the length is reached: until then that criterion costs no launch.
    """

    def __init__(self, criteria: StoppingCriteriaList, rows: RowCloser | None = None) -> None:
        super().__init__(criteria)
        # A list with a call of its own is asked as a whole.
        self._asked = criteria if type(criteria) is StoppingCriteriaList else [criteria]
        self._rows = rows
        self._none: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self._none is None or self._none.shape[0] != input_ids.shape[0]:
            self._none = input_ids.new_zeros(input_ids.shape[0], dtype=torch.bool)
        over = self._none
        for criterion in self._asked:
            if not _is_shorter(input_ids, criterion):
                over = over | criterion(input_ids, scores, **kwargs)
        if self._rows is not None:
            self._rows.note(over)
        return over


def _is_shorter(input_ids: Tensor, criterion: Any) -> bool:
    """Whether it is one of length, which has nothing to say yet."""
    if type(criterion) is not MaxLengthCriteria:
        return False
    positions = criterion.max_position_embeddings  # beyond which it warns
    lengths = (criterion.max_length, *(() if positions is None else (positions,)))
    return input_ids.shape[1] < min(lengths)


def stock_sample(**instead: Any) -> Callable[..., Any]:
    """The stock loop: the same code, which finds other things by some of its global names."""
    stock = GenerationMixin._sample
    return FunctionType(
        stock.__code__, {**stock.__globals__, **instead}, "_sample", stock.__defaults__
    )
