"""Self-consistency on chains of sums: many samples of one prompt, and their most frequent answer.

A 0.2M-parameter Llama, shipped in `chain_of_sums/`, adds prices one at a time in an order of its
own choice. Two samples seldom err alike, so the most frequent total of 16 samples is right more
often than the greedy one.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_cascade
from examples.terminal import progress_bar

MODEL_FOLDER = Path(__file__).parent / "chain_of_sums"
NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn")
NUM_SAMPLES = 16


@dataclass(frozen=True)
class Problem:
    """A prompt and the number that its chain should end with."""

    prompt: str
    total: int


@dataclass(frozen=True)
class Answers:
    """The totals that the model gave; None where a chain ends without one."""

    greedy: list[int | None]  # one per problem
    samples: list[list[int | None]]  # NUM_SAMPLES per problem
    stock_prompt_tokens: int  # what stock generate would have forwarded
    prefill_tokens: int  # what was forwarded


def show_self_consistency(console: Console, *, num_problems: int, chart: Path) -> None:
    """Solve problems greedily and by majority; print a table with bars, and save a chart as PNG."""
    model, tokenizer = load_chain_of_sums()
    problems = make_problems(num_problems, seed=0)
    answers = solve(console, model, tokenizer, problems)
    totals = [problem.total for problem in problems]
    accuracy = accuracy_by_method(answers, totals)
    title = f"{num_problems} problems, 8 prices each, {NUM_SAMPLES} samples at temperature 0.8"
    console.print(accuracy_table(accuracy, title=title))
    console.print(
        f"Prompt tokens forwarded: {answers.prefill_tokens:,} "
        f"(stock generate: {answers.stock_prompt_tokens:,})"
    )
    save_chart(accuracy, chart, title=title)
    console.print(f"Saved the chart in {chart}")


def load_chain_of_sums() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The shipped model, in float32 and eval mode, and its tokenizer, which pads on the left."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(MODEL_FOLDER)


def make_problems(count: int, *, num_prices: int = 8, seed: int) -> list[Problem]:
    """Random problems, each after one worked example with three prices."""
    rng = random.Random(seed)
    problems = []
    for _ in range(count):
        example = draw_prices(rng, 3)
        prices = draw_prices(rng, num_prices)
        prompt = f"<bos>{question(rng, example)}{chain(rng, example)}{question(rng, prices)}"
        problems.append(Problem(prompt, sum(prices)))
    return problems


def draw_prices(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(100, 999) for _ in range(count)]


def question(rng: random.Random, prices: Sequence[int]) -> str:
    """For example "Q: Dan buys 237, 682. Total?", a newline and "A:"."""
    return f"Q: {rng.choice(NAMES)} buys {', '.join(map(str, prices))}. Total?\nA:"


def chain(rng: random.Random, prices: Sequence[int]) -> str:
    """For example " 682, 237:919. Total=919" and a newline; the sums so far follow `:`."""
    first, *others = rng.sample(prices, len(prices))
    total, steps = first, [f" {first}"]
    for price in others:
        total += price
        steps.append(f" {price}:{total}")
    return f"{','.join(steps)}. Total={total}\n"


def parse_total(text: str) -> int | None:
    """The total of a finished chain, or None."""
    found = re.search(r"Total=(\d+)\n", text)
    return int(found[1]) if found else None


def majority_vote(votes: Sequence[int | None]) -> int | None:
    """The most frequent total, the earliest of equals; chains without a total have no vote."""
    counted = Counter(vote for vote in votes if vote is not None).most_common(1)
    return counted[0][0] if counted else None


def solve(
    console: Console,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    batch_size: int = 16,
) -> Answers:
    """Answer each problem greedily and NUM_SAMPLES times by sampling, on the patched model."""
    hf_cascade.patch(model, strict=True)
    torch.manual_seed(0)
    greedy, samples, stock_prompt_tokens, prefill_tokens = [], [], 0, 0
    with progress_bar(console) as progress:
        task = progress.add_task("Chains of sums", total=len(problems))
        for start in range(0, len(problems), batch_size):
            batch = problems[start : start + batch_size]
            greedy += generate_totals(model, tokenizer, batch, do_sample=False)
            flat = generate_totals(
                model,
                tokenizer,
                batch,
                do_sample=True,
                temperature=0.8,
                top_k=0,
                num_return_sequences=NUM_SAMPLES,
            )
            samples += [flat[i : i + NUM_SAMPLES] for i in range(0, len(flat), NUM_SAMPLES)]
            stock_prompt_tokens += model.cascade.stats.prompt_tokens
            prefill_tokens += model.cascade.stats.prefill_tokens
            progress.advance(task, len(batch))
    hf_cascade.unpatch(model)
    return Answers(greedy, samples, stock_prompt_tokens, prefill_tokens)


def generate_totals(model, tokenizer, problems: Sequence[Problem], **options) -> list[int | None]:
    """Complete the prompts of a batch and read the totals, one per row that `generate` returns."""
    inputs = tokenizer(
        [problem.prompt for problem in problems],
        return_tensors="pt",
        padding=True,
        return_token_type_ids=False,
    )
    newline = tokenizer.convert_tokens_to_ids("\n")
    out = model.generate(**inputs, **options, max_new_tokens=100, eos_token_id=newline)
    prompt_len = inputs["input_ids"].shape[1]
    texts = tokenizer.batch_decode(out[:, prompt_len:], skip_special_tokens=True)
    return [parse_total(text) for text in texts]


def accuracy_by_method(answers: Answers, totals: Sequence[int]) -> dict[str, float]:
    """The share of problems that each method gets right."""
    pairs = zip(answers.greedy, totals, strict=True)
    accuracy = {"greedy": sum(answer == total for answer, total in pairs) / len(totals)}
    names = {1: "one sample (mean)", 4: "majority of 4", 8: "majority of 8", 16: "majority of 16"}
    for size, name in names.items():
        accuracy[name] = majority_accuracy(answers.samples, totals, size)
    return accuracy


def majority_accuracy(
    samples: Sequence[Sequence[int | None]], totals: Sequence[int], size: int
) -> float:
    """The share of right majorities of `size` samples, over all disjoint groups of that size."""
    right = [
        majority_vote(votes[start : start + size]) == total
        for votes, total in zip(samples, totals, strict=True)
        for start in range(0, len(votes), size)
    ]
    return sum(right) / len(right)


def accuracy_table(accuracy: dict[str, float], *, title: str) -> Table:
    """A row per method: its accuracy, and a bar of that length."""
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    table.add_column("right", justify="right")
    table.add_column("0 to 1")
    for method, value in accuracy.items():
        table.add_row(method, f"{value:.3f}", Bar(1, 0, value, width=40, color="green"))
    return table


def save_chart(accuracy: dict[str, float], path: Path, *, title: str) -> None:
    """Draw the accuracies as bars and save them as a PNG file."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(accuracy), list(accuracy.values()), color="tab:green")
    axes.bar_label(bars, fmt="%.3f", padding=3)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.1), xlabel="share of right totals", title=title)
    axes.title.set_fontsize(10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
