"""Many samples of one prompt: stock generate against patched generate, in one run.

    python -m benchmarks.bench_generate [--samples 1 4 16] [--json results.json]

The baseline is transformers as it comes: SDPA attention and the dynamic cache. Both sides make the
same number of tokens. Greedy tokens are compared before the timing, on two rows that differ in
length; that warms both sides up as well. Prompt tokens are counted by a forward hook.
"""

import argparse
import ctypes
import json
import os
import platform
import sys
from collections.abc import Iterable
from datetime import date
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

from benchmarks import bench_generate_cuda
from examples.measure import Comparison, Measurement, compare
from examples.smollm2 import ModelUnavailableError, load_smollm2
from examples.terminal import comparison_table, progress_bar

TEXT = Path(__file__).parents[1] / "docs" / "how_it_works.md"


def main() -> None:
    """Check, time, print."""
    arguments, rest = parse_arguments()
    keep_freed_memory()
    if arguments.device.startswith("cuda") and arguments.model is None:
        return bench_generate_cuda.main(rest)
    if rest:
        sys.exit(f"error: unknown arguments {rest}; they are for --device cuda without --model")
    console = Console()
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = load_model(arguments, console)
    settings = describe_settings(arguments, model)
    console.print(settings_table(settings))

    ids = prompt_ids(tokenizer, arguments.prompt_tokens).to(arguments.device)
    with progress_bar(console) as progress:
        greedy = compare(
            model,
            ragged_pair(ids),
            seed=0,
            title="greedy check",
            progress=progress,
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=False,
        )
        medians = {
            samples: median_run(
                compare(
                    model,
                    one_row(ids),
                    seed=repeat,
                    title=f"{samples} samples, run {repeat + 1}",
                    progress=progress,
                    max_new_tokens=arguments.new_tokens,
                    min_new_tokens=arguments.new_tokens,
                    do_sample=True,
                    num_return_sequences=samples,
                    compile=arguments.compile,
                )
                for repeat in range(arguments.repeats)
            )
            for samples in arguments.samples
        }
    console.print(f"Greedy check, identical tokens: {'yes' if greedy.identical else 'no'}")
    for samples, run in medians.items():
        title = f"{samples} samples, median of {arguments.repeats}"
        console.print(comparison_table(run, title=title))
    if arguments.json:
        results = {
            "settings": settings,
            "greedy_identical": greedy.identical,
            "runs": [{"samples": n} | run_numbers(run) for n, run in medians.items()],
        }
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="folder of a transformers model (default: SmolLM2-135M)")
    parser.add_argument(
        "--device", default="cpu", help="cuda without --model: as benchmarks/bench_generate_cuda.py"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--samples", type=int, nargs="+", default=[16])
    parser.add_argument("--prompt-tokens", type=int, default=700)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of each side")
    parser.add_argument("--compile", action="store_true", help="patch(model, compile=True)")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    return parser.parse_known_args()


def load_model(
    arguments: argparse.Namespace, console: Console
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if arguments.model is None:
        try:
            model, tokenizer = load_smollm2(console)
        except ModelUnavailableError as error:
            sys.exit(f"error: {error}")
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    dtype = getattr(torch, arguments.dtype)
    return model.to(device=arguments.device, dtype=dtype), tokenizer


def describe_settings(arguments: argparse.Namespace, model: PreTrainedModel) -> dict[str, object]:
    """What a reader needs to judge and repeat the numbers."""
    device = torch.device(arguments.device)
    return {
        "date": date.today().isoformat(),
        "model": arguments.model or "SmolLM2-135M-Instruct",
        "parameters": model.num_parameters(),
        "dtype": arguments.dtype,
        "patched decode step": "compiled" if arguments.compile else "eager",
        "stock attention": model.config._attn_implementation,
        "prompt tokens": arguments.prompt_tokens,
        "new tokens": arguments.new_tokens,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "CPU cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def keep_freed_memory() -> None:
    """Have glibc hand nothing back to the system, where it is glibc.

    Whether it does, and takes it again page by page, is luck of the heap, stock or patched, and
    makes a prefill 15% longer.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # M_MMAP_THRESHOLD, which is 32 MB at most, then M_TRIM_THRESHOLD: one without the other would
    # make it worse.
    if mallopt is not None and mallopt(-3, 2**25):
        mallopt(-1, 2**31 - 1)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "CPU"


def settings_table(settings: dict[str, object]) -> Table:
    table = Table(title="Settings", title_justify="left", show_header=False)
    for name, value in settings.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    return table


def prompt_ids(tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """The first `length` token ids of the text, repeated as often as needed; int64 [length]."""
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    return ids.repeat(-(-length // len(ids)))[:length]


def one_row(ids: torch.Tensor) -> BatchEncoding:
    """A batch [1, prompt_len] of one prompt."""
    return BatchEncoding({"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]})


def ragged_pair(ids: torch.Tensor) -> BatchEncoding:
    """A left-padded batch [2, prompt_len]: the prompt, and all of it but its last 5 tokens."""
    pad = ids.new_zeros(5)
    mask = torch.ones_like(ids)
    return BatchEncoding(
        {
            "input_ids": torch.stack([ids, torch.cat([pad, ids[:-5]])]),
            "attention_mask": torch.stack([mask, torch.cat([pad, mask[:-5]])]),
        }
    )


def median_run(runs: Iterable[Comparison]) -> Comparison:
    """The run with the median speed-up."""
    ordered = sorted(runs, key=speedup)
    return ordered[len(ordered) // 2]


def speedup(run: Comparison) -> float:
    """How many times faster the patched call was."""
    return run.stock.seconds / run.patched.seconds


def run_numbers(run: Comparison) -> dict[str, object]:
    """A timed run as plain numbers, for the JSON file."""
    return {
        "speedup": speedup(run),
        "identical_tokens": run.identical,
        "stock": measurement_numbers(run.stock),
        "patched": measurement_numbers(run.patched),
    }


def measurement_numbers(measurement: Measurement) -> dict[str, float]:
    return {
        "seconds": measurement.seconds,
        "prefill_seconds": measurement.prefill_seconds,
        "step_seconds": measurement.step_seconds,
        "decode_steps": measurement.decode_steps,
        "prompt_tokens": measurement.prompt_tokens,
        "kv_bytes": measurement.kv_bytes,
    }


if __name__ == "__main__":
    main()
