"""Self-consistency on chains of sums: many samples of a prompt, and their most frequent answer.

A 0.2M-parameter Llama, shipped in `chain_of_sums/`, adds prices one at a time in an order of its
own choice. Two samples seldom err alike, so the most frequent total of 16 samples is right more
often than the greedy one. `python -m examples.self_consistency` shows it.
"""

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from examples.terminal import quiet_on_interrupt
from hf_cascade import Consensus

MODEL_FOLDER = Path(__file__).parent / "chain_of_sums"
NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn")
NUM_SAMPLES = 16


@dataclass(frozen=True)
class Problem:
    """A prompt and the number that its chain should end with."""

    prompt: str
    total: int


def show_self_consistency(console: Console, *, num_problems: int, chart: Path) -> None:
    """Solve problems greedily and by majority; print a table with bars, and save a chart as PNG."""
    model, tokenizer = load_chain_of_sums()
    problems = make_problems(num_problems, seed=0)
    greedy = solve_greedily(model, tokenizer, problems)
    with counted_prompt_tokens(model) as passes:
        full = solve_by_vote(model, tokenizer, problems, early_stop=False)
    early = solve_by_vote(model, tokenizer, problems)
    accuracy = accuracy_by_method(problems, greedy, full)
    title = f"{num_problems} problems, 8 prices each, {NUM_SAMPLES} samples at temperature 0.8"
    console.print(accuracy_table(accuracy, title=title))
    stock = NUM_SAMPLES * sum(len(tokenizer(problem.prompt).input_ids) for problem in problems)
    console.print(f"Prompt tokens forwarded: {sum(passes):,} (stock generate: {stock:,})")
    drawn = sum(len(consensus.samples) for consensus in early) / num_problems
    right = share_of_right(problems, [consensus.answer for consensus in early])
    console.print(
        f"Early stop settled votes after {drawn:.1f} samples on average "
        f"({right:.3f} right, other draws)"
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


def solve_by_vote(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    early_stop: bool = True,
) -> list[Consensus[int]]:
    """The most frequent total of up to NUM_SAMPLES samples of each problem."""
    return hf_cascade.self_consistency(
        model,
        tokenizer,
        [problem.prompt for problem in problems],
        parse=parse_total,
        n=NUM_SAMPLES,
        batch_size=256,
        early_stop=early_stop,
        seed=0,
        temperature=0.8,
        top_k=0,
        max_new_tokens=100,
        eos_token_id=tokenizer.convert_tokens_to_ids("\n"),
    )


def solve_greedily(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
) -> list[int | None]:
    """The total of each problem's greedy chain; None where it ends without one."""
    inputs = tokenizer(
        [problem.prompt for problem in problems],
        return_tensors="pt",
        padding=True,
        return_token_type_ids=False,
    )
    newline = tokenizer.convert_tokens_to_ids("\n")
    out = model.generate(**inputs, do_sample=False, max_new_tokens=100, eos_token_id=newline)
    prompt_len = inputs["input_ids"].shape[1]
    texts = tokenizer.batch_decode(out[:, prompt_len:], skip_special_tokens=True)
    return [parse_total(text) for text in texts]


@contextmanager
def counted_prompt_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """Collects, while this context lasts, the tokens of each prefill, padding included."""
    passes: list[int] = []

    def count(module, args, output) -> None:
        (ids,) = args  # [rows, tokens]; a decode step has one token a row
        if ids.shape[1] > 1:
            passes.append(ids.numel())

    hook = model.get_input_embeddings().register_forward_hook(count)
    try:
        yield passes
    finally:
        hook.remove()


def accuracy_by_method(
    problems: Sequence[Problem], greedy: Sequence[int | None], votes: Sequence[Consensus[int]]
) -> dict[str, float]:
    """The share of problems that each method gets right, with NUM_SAMPLES samples of each."""
    accuracy = {"greedy": share_of_right(problems, greedy)}
    names = {1: "one sample (mean)", 4: "majority of 4", 8: "majority of 8", 16: "majority of 16"}
    for size, name in names.items():
        groups = [  # all disjoint ones of that many samples
            [Consensus(vote.samples[start : start + size]).answer for vote in votes]
            for start in range(0, NUM_SAMPLES, size)
        ]
        accuracy[name] = sum(share_of_right(problems, group) for group in groups) / len(groups)
    return accuracy


def share_of_right(problems: Sequence[Problem], answers: Sequence[int | None]) -> float:
    pairs = zip(answers, problems, strict=True)
    return sum(answer == problem.total for answer, problem in pairs) / len(problems)


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


@quiet_on_interrupt
def main() -> None:
    """Run the example by itself."""
    argparse.ArgumentParser(
        prog="python -m examples.self_consistency", description=__doc__.splitlines()[0]
    ).parse_args()
    show_self_consistency(Console(), num_problems=96, chart=Path("build/self_consistency.png"))


if __name__ == "__main__":
    main()
