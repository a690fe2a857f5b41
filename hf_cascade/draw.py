"""Drawing each row's next token as torch.multinomial does, in a third of the passes over scores.

Stock generate computes probabilities with a softmax. For one draw per row, multinomial then checks
them in three passes, divides them by exponential noise and takes the largest quotient. The
softmax's sum divides all quotients of a row alike, so it changes no choice, and what the checks
look for shows in the row's largest score. So `select` divides unnormalized exponentials by the
same noise from the same generator: the tokens are the same, up to ties within float32 rounding,
and so is the random stream.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .capture import beside_captures
from .own_code import with_own_code

logger = logging.getLogger("hf_cascade")

# As many scores as one Inductor program holds in registers, so it reads them only once.
_PART = 1024


class Draw:
    """Draws tokens for one model.

    Each model compiles its own function, so one model's shapes never recompile another's.
    """

    @cached_property
    def _select(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return torch.compile(with_own_code(select, "select"))

    def __call__(self, scores: Tensor) -> Tensor:
        """One token a row, with probabilities softmax(scores), from the default generator.

        Args:
            scores: [batch, vocab_size], of any floating dtype.
        Returns:
            [batch] int64.
        Raises:
            RuntimeError: a row holds NaN or +inf, or nothing but -inf. As with multinomial, on a
                GPU the error comes at some later call, and the CUDA context is lost.
        """
        noise = torch.empty(scores.shape, dtype=torch.float32, device=scores.device).exponential_()
        scores = scores.contiguous().data  # a view or other strides would recompile
        if scores.shape[0] > 1:
            for each in (scores, noise):
                torch._dynamo.maybe_mark_dynamic(each, 0)
        try:
            tokens, is_valid = beside_captures(lambda: self._select(scores, noise))
        except torch._dynamo.exc.TorchDynamoException as error:
            # No compiler works here, though the step itself may have come from torch's disk cache.
            logger.warning("tokens are drawn without a compiler: %s", " ".join(str(error).split()))
            self._select = select
            tokens, is_valid = select(scores, noise)
        torch._assert_async(is_valid, "scores hold inf or nan, or a row without a possible token")
        return tokens


def select(scores: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's token with the largest exp(score) / noise, and whether every row has one.

    Args:
        scores: [batch, vocab_size], of any floating dtype.
        noise: [batch, vocab_size] float32, above 0.
    Returns:
        (tokens, is_valid): [batch] int64 and a bool.
    """
    padding = (0, -scores.shape[1] % _PART)
    scores = pad(scores.float(), padding, value=-torch.inf).unflatten(1, (-1, _PART))
    noise = pad(noise, padding, value=1.0).unflatten(1, (-1, _PART))
    # Scale each part by its own largest score, then the parts by the row's.
    highest = scores.amax(2)
    base = torch.where(highest == -torch.inf, 0.0, highest)
    quotients = (scores - base[:, :, None]).exp() / noise
    highest_of_row = highest.amax(1, keepdim=True)
    part = (quotients.amax(2) * (highest - highest_of_row).exp()).argmax(1, keepdim=True)
    within = quotients.argmax(2).gather(1, part)
    return (part * _PART + within).squeeze(1), highest_of_row.isfinite().all()


def replacements(draw: Callable[[], Draw | None]) -> dict[str, Any]:
    """Stand-ins for the globals `torch` and `nn` of stock `_sample`.

    Args:
        draw: called in each step; it returns None if the step is to use softmax and multinomial.
    """

    def softmax(scores: Tensor | _LastLogits, dim: int) -> Tensor | _Drawable:
        by = draw()
        if isinstance(scores, _LastLogits):
            scores = scores.logits
            if by is None or scores.dtype == torch.float64:
                scores = scores.float()  # as in stock
        fits = scores.ndim == 2 and dim in (-1, 1) and scores.dtype != torch.float64
        if by is None or not fits or not scores.numel():
            return nn.functional.softmax(scores, dim=dim)
        return _Drawable(scores, by)

    def multinomial(probabilities: Tensor | _Drawable, num_samples: int) -> Tensor:
        if isinstance(probabilities, _Drawable):
            assert num_samples == 1, "stock generate has changed"
            return probabilities.by(probabilities.scores)[:, None]
        return torch.multinomial(probabilities, num_samples=num_samples)

    functional = _Instead(nn.functional, softmax=softmax)
    return {
        "nn": _Instead(nn, functional=functional),
        "torch": _Instead(torch, multinomial=multinomial),
    }


def hand_on_logits(outputs: Any) -> Any:
    """A copy of a model's outputs, for a loop that passes the logits to softmax only."""
    outputs = copy.copy(outputs)
    outputs.logits = _LastLogits(outputs.logits)
    return outputs


@dataclass(frozen=True)
class _LastLogits:
    """The last token's logits, which stay uncopied when the loop asks for a float32 copy."""

    logits: Tensor

    def __getitem__(self, index: Any) -> _LastLogits:
        return _LastLogits(self.logits[index])

    def to(self, *, copy: bool, dtype: torch.dtype, device: torch.device) -> _LastLogits:
        assert dtype == torch.float32, "stock generate has changed"
        return _LastLogits(self.logits.to(device))


@dataclass(frozen=True)
class _Drawable:
    """Stands in for the probabilities: the scores whose softmax they would be."""

    scores: Tensor
    by: Draw


class _Instead:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
