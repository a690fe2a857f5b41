"""One generate call, measured; and the same call on the stock model and on the patched one."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.progress import Progress
from torch import Tensor, nn
from transformers import BatchEncoding, PreTrainedModel
from transformers.generation import BaseStreamer

import hf_cascade


@dataclass(frozen=True)
class Measurement:
    """What one generate call returned and what it cost."""

    sequences: Tensor  # [rows, prompt and new tokens], int64
    prompt_tokens: int  # tokens that went through the model before the first new token, padding too
    decode_steps: int
    prefill_seconds: float  # until every row has its first new token
    seconds: float  # the whole call
    kv_bytes: (
        int  # keys and values held when the call ended, or at their peak where pages are given back
    )

    @property
    def step_seconds(self) -> float:
        """Mean time of a decode step."""
        return (self.seconds - self.prefill_seconds) / max(self.decode_steps, 1)


@dataclass(frozen=True)
class Comparison:
    """The same generate call on the stock model and on the patched one."""

    stock: Measurement
    patched: Measurement
    tree: str  # the KV tree when the patched call ended, as text

    @property
    def identical(self) -> bool:
        """Whether both calls returned the same tokens."""
        return torch.equal(self.stock.sequences, self.patched.sequences)


def compare(
    model: PreTrainedModel,
    inputs: BatchEncoding,
    *,
    seed: int,
    title: str,
    progress: Progress,
    max_new_tokens: int,
    compile: bool = False,
    **options,
) -> Comparison:
    """Run one generate call twice with one seed, on the stock model and then on the patched one.

    Args:
        model: unpatched; it is unpatched again when the call returns.
        inputs: input_ids and attention_mask, both [prompts, prompt_len].
        title: what `progress` calls the two runs.
        compile: let the patched model compile its decode step, before the measured call.
        options: more arguments of `generate`.
    """

    def run(label: str) -> Measurement:
        task = progress.add_task(f"{title}, {label}", total=max_new_tokens)
        result = measure(
            model,
            inputs,
            seed=seed,
            on_step=lambda: progress.advance(task),
            max_new_tokens=max_new_tokens,
            **options,
        )
        progress.update(task, completed=max_new_tokens)  # all rows may end early
        return result

    stock = run("stock")
    hf_cascade.patch(model, strict=True, compile=compile)
    try:
        if compile:
            model.generate(**inputs, **options | {"min_new_tokens": 3}, max_new_tokens=3)
        patched = run("patched")
        return Comparison(stock, patched, tree=model.cascade.describe())
    finally:
        hf_cascade.unpatch(model)


def measure(
    model: PreTrainedModel,
    inputs: BatchEncoding,
    *,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
    **options,
) -> Measurement:
    """Seed the random stream, call `generate` and measure it.

    Args:
        model: stock or patched.
        inputs: input_ids and attention_mask, both [prompts, prompt_len].
        on_step: called after each new token.
        options: more arguments of `generate`.
    """
    torch.manual_seed(seed)
    meter = Meter(on_step)
    hook = model.get_input_embeddings().register_forward_hook(meter.count_tokens)
    patched = hasattr(model, "cascade")
    try:
        started = time.perf_counter()
        out = model.generate(
            **inputs, **options, streamer=meter, return_dict_in_generate=not patched
        )
        seconds = time.perf_counter() - started
    finally:
        hook.remove()
    return Measurement(
        sequences=out if patched else out.sequences,
        prompt_tokens=meter.prompt_tokens,
        decode_steps=len(meter.token_times) - 1,
        prefill_seconds=meter.token_times[0] - started,
        seconds=seconds,
        kv_bytes=model.cascade.stats.kv_bytes if patched else cache_bytes(out.past_key_values),
    )


class Meter(BaseStreamer):
    """Notes when new tokens arrive, and counts the tokens that the model sees before the first."""

    def __init__(self, on_step: Callable[[], object]):
        self.on_step = on_step
        self.prompt_tokens = 0
        self.token_times: list[float] = []
        self.prompt_seen = False

    def count_tokens(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        """Forward hook of the input embedding, whose argument is [rows, tokens]."""
        if not self.token_times:
            self.prompt_tokens += args[0].numel()

    def put(self, value: Tensor) -> None:
        """Called by `generate` with the prompt, and then with each step's new tokens."""
        if self.prompt_seen:
            self.token_times.append(time.perf_counter())
            self.on_step()
        self.prompt_seen = True

    def end(self) -> None:
        """Called by `generate` when all rows have ended."""


def cache_bytes(cache) -> int:
    """Bytes of keys and values in the cache that stock `generate` returns."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
