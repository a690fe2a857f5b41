"""N samples of one prompt on a GPU: the Llama-3.1-8B shape with random bf16 weights.

    python -m benchmarks.bench_generate_cuda [--json results.json]

Prefill is a call with one new token; a step is what each further token adds. Stock is transformers
as it comes (SDPA, dynamic cache); it is left out where it takes minutes or more memory than the
GPU has. Every cell is preceded by a short call of the same shape.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import hf_cascade

GRID = ((1, 2048, True), (16, 2048, True), (64, 4096, False), (64, 8192, False))
NEW_TOKENS = 33


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    arguments = parser.parse_args()
    model = llama_8b()
    rows = []
    for samples, prompt_tokens, with_stock in GRID:
        for side in ("patched", "stock") if with_stock else ("patched",):
            rows.append(measure(model, side, samples, prompt_tokens))
            Console().print(rows[-1])
    Console().print(results_table(rows))
    if arguments.json:
        settings = {
            "date": date.today().isoformat(),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "new tokens": NEW_TOKENS,
        }
        text = json.dumps({"settings": settings, "rows": rows}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")


def llama_8b() -> LlamaForCausalLM:
    """The shape of Llama-3.1-8B, weights drawn on the GPU; never ends a text."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def measure(model: LlamaForCausalLM, side: str, samples: int, prompt_tokens: int) -> dict:
    """Prefill seconds, milliseconds a step and peak GiB of one cell."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if side == "patched":
        hf_cascade.patch(model, strict=True)
    input_ids = torch.randint(3, 128256, (1, prompt_tokens), device="cuda")

    def seconds(new_tokens: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=samples,
            max_new_tokens=new_tokens,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds(3)
    prefill = seconds(1)
    step = (seconds(NEW_TOKENS) - prefill) / (NEW_TOKENS - 1)
    row = {
        "samples": samples,
        "prompt tokens": prompt_tokens,
        "side": side,
        "prefill s": round(prefill, 3),
        "ms a step": round(1e3 * step, 1),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "backend": model.cascade.stats.backend if side == "patched" else "stock",
    }
    hf_cascade.unpatch(model)
    return row


def results_table(rows: list[dict]) -> Table:
    table = Table(*rows[0], title="Llama-3.1-8B shape, bf16", title_justify="left")
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


if __name__ == "__main__":
    main()
