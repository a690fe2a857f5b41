"""How exact the log-probabilities of sampled tokens are (see log_p.py), for SmolLM2.

python -m benchmarks.bench_log_p [--prompts 4] [--no-compile] [--device cpu]
"""

from __future__ import annotations

import argparse
import copy

import torch
import transformers
from rich.console import Console

import hf_cascade
from benchmarks.bench_generate import prompt_ids
from benchmarks.log_p import PROMPT_TOKENS, describe, errors, sample
from examples.smollm2 import load_smollm2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=4, help="texts that are continued")
    parser.add_argument("--no-compile", action="store_true", help="patch(model, compile=False)")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = load_smollm2(Console(stderr=True))
    stock = model.to(arguments.device, torch.bfloat16)
    exact = copy.deepcopy(stock).float()
    patched = hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=not arguments.no_compile)
    text = prompt_ids(tokenizer, arguments.prompts * PROMPT_TOKENS).to(arguments.device)
    for seed, ids in enumerate(text.view(arguments.prompts, 1, PROMPT_TOKENS)):
        torch.manual_seed(seed)
        print(describe(errors(sample(patched, ids), ids.shape[1], stock, exact)), flush=True)


if __name__ == "__main__":
    main()
