"""The demo: `python -m examples.demo`.

Two parts on the CPU: questions about one document with a real model, and self-consistency, where
many samples of one prompt pay.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers
from rich.console import Console

from examples.document_qa import show_document_qa
from examples.self_consistency import show_self_consistency
from examples.smollm2 import ModelUnavailableError, load_smollm2
from examples.terminal import quiet_on_interrupt


@quiet_on_interrupt
def main() -> None:
    """Run both parts."""
    arguments = parse_arguments()
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)  # it is needed last: fail first
    except OSError as error:
        sys.exit(f"error: {error}")
    console = Console()
    transformers.utils.logging.disable_progress_bar()
    console.print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"CPU, torch threads: {torch.get_num_threads()}, float32",
        highlight=False,
    )
    console.rule("1. Questions about one document: SmolLM2-135M-Instruct", align="left")
    try:
        model, tokenizer = load_smollm2(console)
    except ModelUnavailableError as error:
        sys.exit(f"error: {error}")
    size = {"num_samples": 4, "max_new_tokens": 8} if arguments.quick else {}
    show_document_qa(console, model, tokenizer, **size)
    console.rule("2. Self-consistency: sample a chain 16 times, take the majority", align="left")
    show_self_consistency(
        console,
        num_problems=8 if arguments.quick else 96,
        chart=arguments.output / "self_consistency.png",
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tokens, samples and problems")
    parser.add_argument(
        "--output", type=Path, default=Path("build"), help="folder for the chart (default: build)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
