"""Tries every architecture that `AutoModelForCausalLM` knows and writes docs/supported_models.md.

Each gets a tiny random model, once stock and once patched, and the two generate the same: 3
samples of each row of a ragged batch, then greedily with logits, in float32. One that differs is
a bug of hf_cascade: it stops the script. Each runs in a process of its own, so that one that
hangs or crashes is a row of the table and not the end of the script.

    make supported-models        all of them, some minutes
    python -m docs.supported_models llama gemma2        a few, printed instead of written
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_cascade
from docs.tiny_configs import PAD, VOCAB_SIZE, tiny_config
from hf_cascade import CascadeError, CascadeFallbackWarning, UnsupportedModelError

TABLE = Path(__file__).parent / "supported_models.md"
TIMEOUT = 120  # seconds for one architecture
MOST_PARAMETERS = 20_000_000  # more than these and the config was not made tiny
NARROW = 6  # tokens of a window that is narrower than the texts
NUM_SAMPLES = 3
NEW_TOKENS = 8
TOLERANCE = 1e-3  # of logits, relative to the largest of them


@dataclass(frozen=True)
class Verdict:
    """What came of one architecture.

    Attributes:
        name: its model_type.
        model_class: the class that AutoModelForCausalLM gives.
        outcome: a key of OUTCOMES.
        reason: why not "cascade"; else what about windows, if anything.
    """

    name: str
    model_class: str
    outcome: str
    reason: str = ""


OUTCOMES = {
    "cascade": "Shared prefixes are computed, stored and read once; tokens are those of stock",
    "stock": "`generate` falls back to stock, with a warning",
    "refused": "`patch` raises UnsupportedModelError and leaves the model as it was",
    "not tried": "No tiny random model could be built, or stock `generate` does not run on it",
    "wrong": "Stock and patched differ",
}


def architectures() -> dict[str, str]:
    """The model types that AutoModelForCausalLM knows, and their classes."""
    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def verdict(name: str, on_stock_done: Callable[[], None] = lambda: None) -> Verdict:
    """Try one architecture, in this process.

    Args:
        name: its model_type.
        on_stock_done: called when the stock model has generated: from then on it is up to
            hf_cascade.
    """
    model_class = architectures()[name]
    try:
        config = tiny_config(name)
        model = tiny_model(config)
        stock = generate(model)
    except Exception as error:  # whatever is wrong here is not about hf_cascade
        return Verdict(name, model_class, "not tried", _in_one_line(error))
    on_stock_done()
    outcome, reason = compare(model, stock)
    narrow_config = tiny_config(name, window=NARROW)
    if outcome == "cascade" and narrow_config.to_dict() != config.to_dict():
        narrow = tiny_model(narrow_config)
        outcome, narrow_reason = compare(narrow, generate(narrow))
        if outcome == "stock":
            outcome, reason = "cascade", "stock where its sliding window is shorter than the text"
        elif outcome != "cascade":
            reason = f"with a narrow window: {narrow_reason}"
    return Verdict(name, model_class, outcome, reason)


def compare(model: PreTrainedModel, stock: list[Tensor]) -> tuple[str, str]:
    """Patch `model`, generate, compare with what it gave before: outcome and reason."""
    try:
        hf_cascade.patch(model)
    except UnsupportedModelError as error:
        return "refused", str(error).partition("can't be patched: ")[2]
    try:
        patched = generate(model)
    except CascadeError as error:
        return "refused", f"in `generate`: {error}"
    except Exception as error:
        return "wrong", _in_one_line(error)
    if not torch.equal(stock[0], patched[0]):
        return "wrong", "sampled tokens differ"
    error = float((stock[1] - patched[1]).abs().max() / stock[1].abs().max())
    if not error < TOLERANCE:
        return "wrong", f"logits differ by {error:.1e} of the largest"
    stats = model.cascade.stats
    return stats.path, stats.reason or ""


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A random model in eval mode, the same one for the same config.

    Weights are large, biases and norms are random too: what a model generates depends on all of
    its prompt, so that an error anywhere in attention shows.
    """
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"its config can't be made tiny: {size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        parameter.data = 0.3 * noise if parameter.ndim > 1 else parameter.data + 0.2 * noise
    return model


def generate(model: PreTrainedModel) -> list[Tensor]:
    """Sampled tokens [rows * NUM_SAMPLES, length] and greedy logits [steps, rows, vocab_size]."""
    common: dict[str, Any] = {**ragged_batch(), "max_new_tokens": NEW_TOKENS, "pad_token_id": PAD}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CascadeFallbackWarning)
        torch.manual_seed(1)
        # Greedily first: the stats are those of the last call.
        greedy = model.generate(
            **common, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        sampled = model.generate(**common, do_sample=True, num_return_sequences=NUM_SAMPLES)
    return [sampled, torch.stack(greedy.logits)]


def ragged_batch() -> dict[str, Tensor]:
    """Left-padded: two questions about a document, one of them twice, the document, a loner."""
    random = torch.Generator().manual_seed(1)
    document, one, other, loner = (
        torch.randint(3, VOCAB_SIZE, (length,), generator=random).tolist()
        for length in (11, 3, 5, 4)
    )
    rows = [document + one, document + other, document + one, document, loner]
    length = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (length - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (length - len(r)) + [1] * len(r) for r in rows]),
    }


def isolated_verdicts(names: Iterable[str]) -> Iterator[Verdict]:
    """The verdict on each, found in a process of its own, one after the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers", "hf_cascade.patch"])
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send_verdict, args=(name, sender))
        process.start()
        sender.close()
        outcome = "not tried"
        try:
            while receiver.poll(TIMEOUT):
                message = receiver.recv()
                if message is not None:
                    yield message
                    break
                outcome = "wrong"  # stock came back: what happens now is our doing
            else:
                yield _without_answer(name, outcome, f"no answer in {TIMEOUT} s")
        except EOFError:
            process.join()
            what = f"the process ended with exit code {process.exitcode}"
            yield _without_answer(name, outcome, what)
        finally:
            process.kill()
            process.join()


def _send_verdict(name: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sender.send(verdict(name, on_stock_done=lambda: sender.send(None)))


def _without_answer(name: str, outcome: str, what: str) -> Verdict:
    return Verdict(name, architectures().get(name, "unknown"), outcome, what)


def _in_one_line(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 160 else text[:157] + "..."


def as_markdown(verdicts: list[Verdict]) -> str:
    """The page of the documentation."""
    version = Version(transformers.__version__)
    counts = Counter(each.outcome for each in verdicts)
    lines = [
        "# Supported models",
        "",
        "<!-- Written by docs/supported_models.py (`make supported-models`): don't edit. -->",
        "",
        f"What `hf_cascade.patch` does with each of the {len(verdicts)} architectures that",
        f"`AutoModelForCausalLM` of transformers {version} knows. Each was tried: a tiny random",
        f"model, {NUM_SAMPLES} samples of every row of a ragged batch and the logits of greedy",
        "search, in float32, stock and patched. Where patched, the tokens are the same.",
        "",
        "| outcome | architectures | what it means |",
        "|---|---|---|",
        *(f"| {key} | {counts[key]} | {text} |" for key, text in OUTCOMES.items() if counts[key]),
        "",
        "A model is what its config makes of it: these are the defaults of each architecture, with",
        "every kind of layer that they have, as a decoder where it can be an encoder too. A",
        "checkpoint that switches on something else (a sliding window, shared KV) is judged by",
        "`patch` and `generate` anew, and gets its answer from them.",
        "",
        "| architecture | class | outcome | |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(as_row, verdicts)]) + "\n"


def as_row(each: Verdict) -> str:
    """One architecture's line of the table."""
    reason = re.sub(r"([|<>*_\[\]])", r"\\\1", each.reason)
    return f"| {each.name} | `{each.model_class}` | {each.outcome} | {reason} |"


def main(names: list[str]) -> None:
    verdicts = []
    for each in isolated_verdicts(names or architectures()):
        print(each.name, each.outcome, each.reason, sep="\t", flush=True)
        verdicts.append(each)
    wrong = [each.name for each in verdicts if each.outcome == "wrong"]
    if wrong:
        sys.exit(f"patched and stock differ: {', '.join(wrong)}")
    if not names:
        TABLE.write_text(as_markdown(verdicts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
