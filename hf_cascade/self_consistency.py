"""Self-consistency: many sampled answers to a prompt, and the one that most of them give.

Samples of a prompt share it, and prompts share their common beginning (a few-shot header), so one
`generate` call takes rows of several prompts, drawn in rounds until no vote can change any more.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, overload

import torch
from torch import Tensor

from .errors import CascadeFallbackWarning, UnsupportedModelError
from .patch import patch, unpatch
from .runtime import Cascade
from .vote import Answer, Consensus, Sample, next_chunk

DEFAULT_NEW_TOKENS = 256


@overload
def self_consistency(
    model: Any,
    tokenizer: Any,
    prompts: str,
    *,
    parse: Callable[[str], Answer | None],
    n: int = ...,
    batch_size: int = ...,
    early_stop: bool = ...,
    chunk_size: int | None = ...,
    seed: int | None = ...,
    add_special_tokens: bool = ...,
    progress: bool | None = ...,
    **generate_kwargs: Any,
) -> Consensus[Answer]: ...


@overload
def self_consistency(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    parse: Callable[[str], Answer | None],
    n: int = ...,
    batch_size: int = ...,
    early_stop: bool = ...,
    chunk_size: int | None = ...,
    seed: int | None = ...,
    add_special_tokens: bool = ...,
    progress: bool | None = ...,
    **generate_kwargs: Any,
) -> list[Consensus[Answer]]: ...


def self_consistency(
    model: Any,
    tokenizer: Any,
    prompts: str | Sequence[str],
    *,
    parse: Callable[[str], Answer | None],
    n: int = 16,
    batch_size: int = 32,
    early_stop: bool = True,
    chunk_size: int | None = None,
    seed: int | None = None,
    add_special_tokens: bool = True,
    progress: bool | None = None,
    **generate_kwargs: Any,
) -> Consensus[Answer] | list[Consensus[Answer]]:
    """Sample each prompt up to `n` times and return the answer that most samples give.

    A patched model is used as it is and stays patched. Another one is patched for this call with
    the defaults of `patch` and unpatched when it ends; if `patch` refuses it, the call runs on
    stock `generate` with a CascadeFallbackWarning.

    With `early_stop`, a prompt is sampled no further once none of the samples that are left could
    change its answer, whatever they were: the answer is the one that they would have confirmed.
    As rows of one `generate` call share its random stream, other prompts of the call then see
    other random numbers, as they do with another `batch_size`.

    Args:
        model: a decoder-only transformers model that can generate, or a PEFT model around one.
        tokenizer: its tokenizer; padding is done here, on the left, so it needs no pad token, and
            none of its settings change.
        prompts: one prompt or several; equal ones are sampled separately.
        parse: reads the answer from a sample's text; anything hashable that compares equal for
            equal answers. None is no vote.
        n: most samples of a prompt.
        batch_size: most rows of one `generate` call, of all its prompts together; what bounds
            memory. With beams, each row has `num_beams` of them.
        early_stop: stop sampling a prompt whose answer is certain; False draws all `n` at once.
        chunk_size: fewest samples to draw of a prompt in a round of `early_stop`; None is a quarter
            of `n`. Fewer than could settle the vote are never drawn: the first round has n / 2.
            A larger chunk means fewer calls, a smaller one fewer samples.
        seed: what to pass to torch.manual_seed first; None goes on with the random stream.
        add_special_tokens: as the tokenizer's argument of that name. False for prompts made by
            `apply_chat_template(..., tokenize=False)`, which have their special tokens.
        progress: show a progress bar on stderr, which needs rich; None is yes if rich is installed
            and stderr is a terminal.
        generate_kwargs: more arguments of `generate`, such as temperature, top_p, max_new_tokens
            (256 unless a length is set here or in the generation config), stop_strings,
            generation_config. `do_sample` is True.
    Returns:
        A Consensus for a single string, else a list of them, one per prompt.
    Raises:
        ValueError: an argument is out of range, a prompt has no tokens, an argument of `generate`
            can't be set here, or `parse` raised, which is then the cause.
        TypeError: an argument is of the wrong type, or an answer is not hashable.
        UnsupportedModelError: the model is an encoder-decoder.
        ImportError: progress=True without rich.
    Source: Wang et al., Self-Consistency Improves Chain of Thought Reasoning in Language Models,
        2022, arXiv 2203.11171: the unweighted vote of section 2, the agreement ("consistency")
        of section 3.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    _check_arguments(texts, parse, n=n, batch_size=batch_size, chunk_size=chunk_size)
    chunk_size = max(1, n // 4) if chunk_size is None else chunk_size
    sampler = _Sampler(model, tokenizer, texts, parse, add_special_tokens, generate_kwargs)
    with ExitStack() as stack:
        report = stack.enter_context(_progress_bar(progress, total=n * len(texts)))
        stack.enter_context(_patched(model))
        if seed is not None:
            torch.manual_seed(seed)
        samples = _sample_in_rounds(
            sampler.draw,
            len(texts),
            n=n,
            batch_size=batch_size,
            chunk_size=chunk_size if early_stop else n,
            report=report,
        )
    results = [Consensus(tuple(drawn)) for drawn in samples]
    return results[0] if isinstance(prompts, str) else results


def _sample_in_rounds(
    draw: Callable[[Sequence[int]], list[Sample[Answer]]],
    num_prompts: int,
    *,
    n: int,
    batch_size: int,
    chunk_size: int,
    report: Callable[[int], object],
) -> list[list[Sample[Answer]]]:
    """Draw samples until every vote is settled; `report` gets how many need no more drawing.

    `draw` takes the prompt index of each row of a call and returns a sample for each.
    """
    samples: list[list[Sample[Answer]]] = [[] for _ in range(num_prompts)]
    while True:
        wanted = [next_chunk(drawn, n, chunk_size) for drawn in samples]
        done = sum(
            n if count == 0 else len(drawn) for count, drawn in zip(wanted, samples, strict=True)
        )
        report(done)
        # A prompt's rows are neighbours: a call has few prompts, and those share.
        rows = [prompt for prompt, count in enumerate(wanted) for _ in range(count)]
        if not rows:
            return samples
        for start in range(0, len(rows), batch_size):
            call = rows[start : start + batch_size]
            for prompt, sample in zip(call, draw(call), strict=True):
                samples[prompt].append(sample)
            done += len(call)
            report(done)


class _Sampler(Generic[Answer]):
    """Draws samples of the prompts it was made with, any of them in one `generate` call."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[str],
        parse: Callable[[str], Answer | None],
        add_special_tokens: bool,
        generate_kwargs: dict[str, Any],
    ) -> None:
        if not hasattr(model, "generate"):
            raise TypeError(f"model must have generate, {type(model).__name__} has none")
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"self_consistency serves decoder-only models; {type(model).__name__} is an "
                "encoder-decoder"
            )
        self.model, self.tokenizer, self.parse = model, tokenizer, parse
        self.prompts = [
            tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
            for prompt in prompts
        ]
        for index, ids in enumerate(self.prompts):
            if len(ids) == 0:
                raise ValueError(f"prompts[{index}] has no tokens: {prompts[index]!r}")
        self.config, self.generate_kwargs = _sampling_config(model, generate_kwargs)
        self.generate_kwargs.setdefault("tokenizer", tokenizer)  # for stop_strings
        eos = _setting(self.config, model, "eos_token_id")
        self.eos: list[int] = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
        self.pad: int | None = _setting(self.config, model, "pad_token_id")

    def draw(self, rows: Sequence[int]) -> list[Sample[Answer]]:
        """One sample for each row, given the index of its prompt."""
        input_ids, attention_mask = _pad_left(
            [self.prompts[prompt] for prompt in rows], self.pad or 0
        )
        prompt_len = input_ids.shape[1]
        device = self.model.device
        if device.type == "meta":
            device = torch.device("cpu")
        out = self.model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=self.config,
            **self.generate_kwargs,
        )
        texts = self.tokenizer.batch_decode(
            [self._without_padding(ids) for ids in out[:, prompt_len:].tolist()],
            skip_special_tokens=True,
        )
        return [self._sample(prompt, text) for prompt, text in zip(rows, texts, strict=True)]

    def _without_padding(self, ids: list[int]) -> list[int]:
        """A row up to its first end token, or up to the padding after a stop string.

        The pad token may be an ordinary one, which decoding doesn't skip.
        """
        for index, token in enumerate(ids):
            if token in self.eos:
                return ids[: index + 1]
        end = len(ids)
        while self.eos and end and ids[end - 1] == self.pad:  # `generate` pads if it has an eos
            end -= 1
        return ids[:end]

    def _sample(self, prompt: int, text: str) -> Sample[Answer]:
        try:
            answer = self.parse(text)
        except Exception as error:
            raise ValueError(
                f"parse raised {type(error).__name__} for a sample of prompts[{prompt}]: {text!r}; "
                "it should return None for a text without an answer"
            ) from error
        try:
            hash(answer)
        except TypeError:
            raise TypeError(
                f"parse must return something hashable or None, got {type(answer).__name__} for a "
                f"sample of prompts[{prompt}]: {text!r}"
            ) from None
        return Sample(text, answer)


def _pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask, both [rows, longest], int64."""
    length = max(map(len, rows))
    input_ids = torch.full((len(rows), length), pad)
    attention_mask = torch.zeros_like(input_ids)
    for index, ids in enumerate(rows):
        input_ids[index, length - len(ids) :] = torch.tensor(ids)
        attention_mask[index, length - len(ids) :] = 1
    return input_ids, attention_mask


# What `generate` is told

_SET_HERE = {
    "num_return_sequences": "n says how many samples to draw",
    "return_dict_in_generate": "texts and answers are returned",
    "streamer": "rows of many prompts are generated at once",
} | dict.fromkeys(
    (
        "inputs",
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "past_key_values",
    ),
    "the model's inputs are made from prompts",
)


def _sampling_config(model: Any, generate_kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The generation config of the calls, and the arguments of `generate` that are none of its.

    The user's options are folded into a copy of the config, so that no later default hides them.
    """
    for name, reason in _SET_HERE.items():
        if name in generate_kwargs:
            raise ValueError(f"{name} can't be passed to self_consistency: {reason}")
    kwargs = dict(generate_kwargs)
    given = kwargs.pop("generation_config", None)
    if kwargs.get("do_sample", getattr(given, "do_sample", None)) is False:
        raise ValueError("do_sample=False can't be asked of self_consistency: samples must differ")
    if getattr(given, "num_return_sequences", None) not in (None, 1):
        raise ValueError(
            f"generation_config.num_return_sequences={given.num_return_sequences} can't be asked "
            f"of self_consistency: {_SET_HERE['num_return_sequences']}"
        )
    config = copy.deepcopy(model.generation_config if given is None else given)
    others = config.update(
        **kwargs | {"do_sample": True, "num_return_sequences": 1, "return_dict_in_generate": False}
    )
    if all(_setting(config, model, name) is None for name in ("max_new_tokens", "max_length")):
        config.max_new_tokens = DEFAULT_NEW_TOKENS
    return config, others


def _setting(config: Any, model: Any, name: str) -> Any:
    """A value of the config, or the model's where it has none, as `generate` reads it."""
    value = getattr(config, name)
    return getattr(model.generation_config, name) if value is None else value


@contextmanager
def _patched(model: Any) -> Iterator[None]:
    """Within this context the model is patched, if it can be; afterwards it is as it was."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_ours = not isinstance(getattr(base, "cascade", None), Cascade)
    if is_ours:
        try:
            patch(model)
        except UnsupportedModelError as error:
            is_ours = False
            warnings.warn(
                f"self_consistency runs without shared prefixes: {error}",
                CascadeFallbackWarning,
                stacklevel=5,
            )
    try:
        yield
    finally:
        if is_ours:
            unpatch(model)


@contextmanager
def _progress_bar(show: bool | None, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr while this context lasts; yields what tells it how much is done."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    except ImportError:
        has_rich = False
        if show:
            raise ImportError("progress=True needs rich: pip install rich") from None
    else:
        has_rich = True
    if not has_rich:  # not within `except`: errors of the body would get that one as their context
        yield lambda done: None
        return
    console = Console(stderr=True)
    show = console.is_terminal if show is None else show
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not show) as bar:
        task = bar.add_task("Samples", total=total)
        yield lambda done: bar.update(task, completed=done)


def _check_arguments(prompts: Sequence[Any], parse: Any, **counts: Any) -> None:
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise TypeError(
                f"prompts[{index}] must be a str, got {type(prompt).__name__}; of a chat, make one "
                "by tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)"
            )
    if not callable(parse):
        raise TypeError(f"parse must be callable, got {type(parse).__name__}")
    for name, value in counts.items():
        if value is None and name == "chunk_size":
            continue
        if not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
