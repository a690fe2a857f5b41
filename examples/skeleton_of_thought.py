"""Skeleton of thought: an outline of the answer first, then all its points at the same time.

The prompts of the points differ in their last line alone. As one batch they share everything before
it: the worked examples, the question and the outline. The model is SmolLM2-135M-Instruct, or one of
your own: `python -m examples.skeleton_of_thought "How do I ...?" --model FOLDER`.

Source: Ning et al., Skeleton-of-Thought: Prompting LLMs for Efficient Parallel Generation, 2023,
arXiv 2307.15337.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from examples.measure import compare
from examples.smollm2 import ModelUnavailableError, load_smollm2
from examples.terminal import comparison_table, progress_bar, quiet_on_interrupt

QUESTION = "How can I sleep better?"
MOST_POINTS = 5
OUTLINE_TOKENS = 48

# One worked example of each step.
EXAMPLE = "How do I learn to play the guitar?"
EXAMPLE_OUTLINE = (
    "Choose a suitable guitar",
    "Learn three chords",
    "Practise every day",
    "Play along with songs",
)
EXAMPLE_TEXTS = {
    "Choose a suitable guitar": "Start with a guitar that fits your hands and has soft strings. A "
    "music shop can set the strings low, so that they are easy to press.",
    "Practise every day": "Ten minutes a day are worth more than two hours on a Sunday. Keep the "
    "guitar in sight, and you will pick it up more often.",
    "Play along with songs": "Put on a slow song that you know well and strum along. The rhythm "
    "keeps you going, and wrong notes don't matter.",
}


def show_skeleton_of_thought(
    console: Console,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    *,
    max_new_tokens: int = 40,
) -> None:
    """Answer a question in two steps; print the answer and what the second step cost.

    Raises:
        ValueError: the model wrote no outline.
    """
    outline = write_outline(model, tokenizer, question)
    inputs = encode(tokenizer, point_prompts(tokenizer, question, outline))
    with progress_bar(console) as progress:
        points = compare(
            model,
            inputs,
            seed=0,
            title=f"{len(outline)} points",
            progress=progress,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.1,  # small models go round in circles
        )
    table = Table("point", "text", title=question, title_justify="left", show_lines=True)
    texts = decode_new(tokenizer, points.patched.sequences, inputs)
    for number, (point, text) in enumerate(zip(outline, texts, strict=True), start=1):
        table.add_row(f"{number}. {point}", " ".join(text.split()))
    console.print(table)
    console.print(comparison_table(points, title=f"{len(outline)} points in one batch, greedy"))


def write_outline(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str
) -> list[str]:
    """The first step: up to MOST_POINTS different points, a few words each.

    Raises:
        ValueError: the model wrote no numbered points.
    """
    messages = [
        {"role": "user", "content": ask_for_outline(EXAMPLE)},
        {"role": "assistant", "content": numbered(EXAMPLE_OUTLINE)},
        {"role": "user", "content": ask_for_outline(question)},
    ]
    inputs = encode(tokenizer, [chat_text(tokenizer, messages) + "1."])
    out = model.generate(**inputs, max_new_tokens=OUTLINE_TOKENS, do_sample=False)
    (text,) = decode_new(tokenizer, out, inputs)
    if out.shape[1] - inputs["input_ids"].shape[1] == OUTLINE_TOKENS:  # the last line was cut off
        text = text.rpartition("\n")[0]
    return read_outline(f"1.{text}")


def read_outline(text: str) -> list[str]:
    """Up to MOST_POINTS different points of a numbered list.

    Raises:
        ValueError: there are none.
    """
    found = re.findall(r"^ *\d+\. *(\S.*?)[.:]? *$", text, re.MULTILINE)
    points = list(dict.fromkeys(found))
    if not points:
        raise ValueError(
            f"the model wrote no outline but {text!r}: an instruction-tuned model is needed"
        )
    return points[:MOST_POINTS]


def point_prompts(
    tokenizer: PreTrainedTokenizerBase, question: str, outline: Sequence[str]
) -> list[str]:
    """The second step: a prompt per point, alike up to the last line."""
    examples = [
        message
        for point, text in EXAMPLE_TEXTS.items()
        for message in (
            {"role": "user", "content": ask_for_point(EXAMPLE, EXAMPLE_OUTLINE, point)},
            {"role": "assistant", "content": f"{point}. {text}"},
        )
    ]
    return [
        chat_text(
            tokenizer,
            [*examples, {"role": "user", "content": ask_for_point(question, outline, point)}],
        )
        + f"{point}."
        for point in outline
    ]


def ask_for_outline(question: str) -> str:
    return f"Question: {question}\nWrite the outline of an answer: four short points."


def ask_for_point(question: str, outline: Sequence[str], point: str) -> str:
    return f"{question}\n\nMy plan:\n{numbered(outline)}\n\nTell me more about this point: {point}"


def numbered(points: Sequence[str]) -> str:
    return "\n".join(f"{number}. {point}" for number, point in enumerate(points, start=1))


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The messages as a prompt, by the chat template if there is one, else as paragraphs."""
    if tokenizer.chat_template is None:
        return "".join(f"{message['content']}\n\n" for message in messages)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def encode(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> BatchEncoding:
    """A left-padded batch [prompts, prompt_len]."""
    return tokenizer(
        prompts,
        return_tensors="pt",
        padding=True,
        add_special_tokens=tokenizer.chat_template is None,
        return_token_type_ids=False,
    )


def decode_new(
    tokenizer: PreTrainedTokenizerBase, sequences: torch.Tensor, inputs: BatchEncoding
) -> list[str]:
    """The text of the new tokens of each row."""
    prompt_len = inputs["input_ids"].shape[1]
    return tokenizer.batch_decode(sequences[:, prompt_len:], skip_special_tokens=True)


def load_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of the user's, in float32 on the CPU, and its tokenizer, which pads on the left.

    Raises:
        ValueError: there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


@quiet_on_interrupt
def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.skeleton_of_thought", description=__doc__.splitlines()[0]
    )
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a checkpoint instead of SmolLM2"
    )
    arguments = parser.parse_args()
    console = Console()
    transformers.utils.logging.disable_progress_bar()
    try:
        if arguments.model is None:
            model, tokenizer = load_smollm2(console)
        else:
            model, tokenizer = load_folder(arguments.model)
        show_skeleton_of_thought(console, model, tokenizer, arguments.question)
    except (ModelUnavailableError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
