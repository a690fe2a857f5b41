"""Questions about one document: the rows of a batch, and the samples of a question, share it.

The document is this project's own docs/how_it_works.md, about 1,100 tokens; the model is
SmolLM2-135M-Instruct on the CPU in float32: `python -m examples.document_qa`.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from examples.measure import compare
from examples.smollm2 import ModelUnavailableError, load_smollm2
from examples.terminal import comparison_table, progress_bar, quiet_on_interrupt

DOCUMENT = Path(__file__).parents[1] / "docs" / "how_it_works.md"
QUESTIONS = (
    "How many tokens does a page hold?",
    "In which year was Cascade Inference published?",
    "What is a page?",
)


def show_document_qa(
    console: Console,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_samples: int = 12,
    max_new_tokens: int = 24,
) -> None:
    """Answer three questions greedily in one batch, then sample one of them; stock and patched."""
    document = DOCUMENT.read_text(encoding="utf-8")
    three = encode_questions(tokenizer, document, QUESTIONS)
    one = encode_questions(tokenizer, document, QUESTIONS[-1:])
    with progress_bar(console) as progress:
        greedy = compare(
            model,
            three,
            seed=0,
            title="3 questions, greedy",
            progress=progress,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        sampled = compare(
            model,
            one,
            seed=0,
            title=f"1 question x {num_samples} samples",
            progress=progress,
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=0.7,
            num_return_sequences=num_samples,
        )
    answers = decode_answers(tokenizer, greedy.patched.sequences, three)
    console.print(answer_table("Greedy answers (patched)", zip(QUESTIONS, answers, strict=True)))
    console.print(comparison_table(greedy, title="3 questions about one document, greedy"))
    samples = decode_answers(tokenizer, sampled.patched.sequences, one)
    rows = (("" if i else QUESTIONS[-1], sample) for i, sample in enumerate(samples[:3]))
    console.print(answer_table(f"Three of the {num_samples} samples", rows))
    console.print(comparison_table(sampled, title=f"1 question x {num_samples} samples"))
    console.print("The KV tree when that call ended:")
    console.print(sampled.tree, markup=False, highlight=False)


def encode_questions(tokenizer, document: str, questions) -> BatchEncoding:
    """Chat prompts, the document first in each, as a left-padded batch [questions, prompt_len]."""
    prompts = [
        tokenizer.apply_chat_template(
            [
                {
                    "role": "system",
                    "content": f"Answer the question from this document.\n\n{document}",
                },
                {"role": "user", "content": question},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        for question in questions
    ]
    return tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)


def decode_answers(tokenizer, sequences: torch.Tensor, inputs: BatchEncoding) -> list[str]:
    """The text of the new tokens of each row."""
    prompt_len = inputs["input_ids"].shape[1]
    texts = tokenizer.batch_decode(sequences[:, prompt_len:], skip_special_tokens=True)
    return [" ".join(text.split()) for text in texts]


def answer_table(title: str, rows) -> Table:
    """Questions and answers, side by side."""
    table = Table("question", "answer", title=title, title_justify="left", show_lines=True)
    for question, answer in rows:
        table.add_row(question, answer)
    return table


@quiet_on_interrupt
def main() -> None:
    """Run the example by itself."""
    argparse.ArgumentParser(
        prog="python -m examples.document_qa", description=__doc__.splitlines()[0]
    ).parse_args()
    console = Console()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, tokenizer = load_smollm2(console)
    except ModelUnavailableError as error:
        sys.exit(f"error: {error}")
    show_document_qa(console, model, tokenizer)


if __name__ == "__main__":
    main()
