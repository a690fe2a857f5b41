"""Drawing samples: which rows go into which `generate` call, and how rows become samples.

A sample is handed on when its row ends, not when its call does: what was drawn is kept, whatever
happens next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..stats import GenerateStats


@dataclass(frozen=True)
class Sample:
    """One continuation of one prompt.

    Attributes:
        prompt: index of the prompt.
        sample: index of the sample among those of its prompt.
        text: without special tokens; it ends before a stop text.
        tokens: ids of all new tokens, the end of sequence included.
        finish_reason: "stop" at an end of sequence or a stop text, "length" where there was no
            more room.
    """

    prompt: int
    sample: int
    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn; `options` go to `generate` as they are."""

    num_samples: int
    batch_size: int
    max_new_tokens: int
    stop: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """The rows of one `generate` call: these samples of each of these prompts."""

    prompts: range
    samples: range

    def row(self, index: int) -> tuple[int, int]:
        """The (prompt, sample) of a row, in the order of `generate`."""
        return self.prompts[index // len(self.samples)], self.samples[index % len(self.samples)]


def batches(num_prompts: int, num_samples: int, batch_size: int) -> Iterator[Batch]:
    """All samples of all prompts in order, at most `batch_size` rows at a time."""
    prompts_at_once = max(1, batch_size // num_samples)
    for start in range(0, num_prompts, prompts_at_once):
        prompts = range(start, min(start + prompts_at_once, num_prompts))
        for first in range(0, num_samples, batch_size):
            yield Batch(prompts, range(first, min(first + batch_size, num_samples)))


def draw(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    on_sample: Callable[[Sample], object],
    on_step: Callable[[float], object],
) -> Iterator[GenerateStats]:
    """Sample continuations of prompts; the random stream is the caller's to seed.

    Args:
        model: patched; stop texts in its generation config move to `sampling`.
        rows: the prompts' tokens.
        on_sample: called with each sample when it ends.
        on_step: called after each step with what the running rows have, in samples: two that are
            halfway to `max_new_tokens` make one.
    Yields:
        What happened in each `generate` call.
    """
    config = model.generation_config
    if config.stop_strings:  # what ends a row must be seen here
        configured = config.stop_strings
        configured = (configured,) if isinstance(configured, str) else tuple(configured)
        sampling = replace(sampling, stop=sampling.stop + configured)
        config.stop_strings = None
    eos = _ids(config.eos_token_id) or _ids(tokenizer.eos_token_id)
    pad = next(iter(_ids(tokenizer.pad_token_id) or eos), 0)
    for batch in batches(len(rows), sampling.num_samples, sampling.batch_size):
        prompts = [rows[i] for i in batch.prompts]
        stream = _RowStream(tokenizer, batch, sampling, frozenset(eos), on_sample, on_step)
        stops = _StopTexts(tokenizer, sampling.stop, stream)
        inputs = _left_padded(prompts, pad)
        model.generate(
            **{name: tensor.to(model.device) for name, tensor in inputs.items()},
            **sampling.options,
            max_new_tokens=sampling.max_new_tokens,
            num_return_sequences=len(batch.samples),
            num_beams=1,
            eos_token_id=eos or None,
            pad_token_id=pad,
            streamer=stream,
            # Rows that are over cost less where nobody looks at all rows.
            stopping_criteria=[stops] if sampling.stop else None,
        )
        yield model.cascade.stats


class _RowStream:
    """A streamer of `generate` that follows each row until it ends.

    `live` has the new tokens of the rows that go on; a row in `stopped` ends with its next one.
    """

    def __init__(
        self,
        tokenizer: Any,
        batch: Batch,
        sampling: Sampling,
        eos: frozenset[int],
        on_sample: Callable[[Sample], object],
        on_step: Callable[[float], object],
    ) -> None:
        self._tokenizer, self._batch, self._sampling, self._eos = tokenizer, batch, sampling, eos
        self._on_sample, self._on_step = on_sample, on_step
        count = len(batch.prompts) * len(batch.samples)
        self.live: dict[int, list[int]] = {row: [] for row in range(count)}
        self.stopped: set[int] = set()
        self._steps_left: int | None = None

    def put(self, value: Tensor) -> None:
        """Called by `generate` with the prompts, and then with a token a row."""
        if self._steps_left is None:
            self._steps_left = self._sampling.max_new_tokens
            return
        self._steps_left -= 1
        ids = value.tolist()
        for row, tokens in list(self.live.items()):
            tokens.append(ids[row])
            if ids[row] in self._eos or row in self.stopped:
                self._end(row, "stop")
            elif self._steps_left == 0:
                self._end(row, "length")
        self._on_step(len(self.live) * (1 - self._steps_left / self._sampling.max_new_tokens))

    def end(self) -> None:
        """Called by `generate` when it ends; a limit of the model's own may have ended rows."""
        for row in list(self.live):
            self._end(row, "length")

    def _end(self, row: int, reason: Literal["stop", "length"]) -> None:
        tokens = self.live.pop(row)
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        found = [text.find(stop) for stop in self._sampling.stop if stop in text]
        prompt, sample = self._batch.row(row)
        self._on_sample(Sample(prompt, sample, text[: min(found, default=None)], tokens, reason))


class _StopTexts:
    """A stopping criterion of `generate`: a row ends when its last token completes a stop text.

    Transformers' own goes through the vocabulary beforehand, which fails for some tokenizers.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: Sequence[str],
        stream: _RowStream,
    ) -> None:
        self._tokenizer, self._texts, self._stream = tokenizer, texts, stream
        # A character has at most 4 bytes, and a token at least one of them.
        self._length = 4 * max(map(len, texts), default=0)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Called by `generate` after each step, before the streamer; [rows], bool."""
        for row, token in enumerate(input_ids[:, -1].tolist()):
            tokens = self._stream.live.get(row)
            if tokens is not None and self._completes([*tokens[-self._length :], token]):
                self._stream.stopped.add(row)
        over = [row in self._stream.stopped for row in range(input_ids.shape[0])]
        return torch.tensor(over, device=input_ids.device)

    def _completes(self, tokens: Sequence[int]) -> bool:
        before, after = self._tokenizer.decode(tokens[:-1]), self._tokenizer.decode(tokens)
        return any(after.count(text) > before.count(text) for text in self._texts)


def _left_padded(rows: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """input_ids and attention_mask, [rows, longest row]."""
    length = max(map(len, rows))
    padding = [length - len(row) for row in rows]
    return {
        "input_ids": torch.tensor(
            [[pad] * p + [*row] for p, row in zip(padding, rows, strict=True)]
        ),
        "attention_mask": torch.tensor([[0] * p + [1] * (length - p) for p in padding]),
    }


def _ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
