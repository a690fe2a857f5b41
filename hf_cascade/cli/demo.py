"""`hf-cascade demo`."""

from __future__ import annotations

import importlib.util
import runpy
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

# What examples/ needs beyond what the command line does.
_NEEDS = ("accelerate", "gguf", "matplotlib", "safetensors")
_NUM_SAMPLES, _PROMPT_TOKENS, _NEW_TOKENS = 16, 512, 32


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer tokens, samples and problems.")
    ] = False,
) -> None:
    """Show what sharing a prompt saves on this machine.

    In a checkout of the project with the `demo` extra it runs `examples.demo`: questions about a
    document, and self-consistency. Elsewhere it compares stock and patched generate on a small
    model of random weights.
    """
    root = Path(__file__).parents[2]
    has_examples = (root / "pyproject.toml").is_file() and (root / "examples" / "demo.py").is_file()
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if has_examples and not missing:
        sys.path.insert(0, str(root))
        sys.argv = ["hf-cascade demo", *(["--quick"] if quick else [])]
        runpy.run_module("examples.demo", run_name="__main__")
        return
    if has_examples:
        print(f"examples.demo needs {', '.join(missing)} (pip install -e '.[demo]'); without:\n")
    _compare(num_samples=4 if quick else _NUM_SAMPLES)


def _compare(num_samples: int) -> None:
    """Print one generate call, on the stock model and on the patched one."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from ..patch import patch
    from .loading import random_model

    console = Console(highlight=False)
    console.print(
        f"{num_samples} samples of a prompt of {_PROMPT_TOKENS} tokens, {_NEW_TOKENS} new tokens "
        "each,\nby a small Llama of random weights on the CPU"
    )
    model: Any = random_model()
    prompt = torch.arange(_PROMPT_TOKENS)[None] + 3
    mask = torch.ones_like(prompt)

    def timed() -> tuple[Any, float]:
        options = {"do_sample": True, "num_return_sequences": num_samples}
        # The first call of a process imports and allocates.
        model.generate(prompt[:, :2], attention_mask=mask[:, :2], max_new_tokens=2, **options)
        torch.manual_seed(0)
        started = time.perf_counter()
        out = model.generate(prompt, attention_mask=mask, max_new_tokens=_NEW_TOKENS, **options)
        return out, time.perf_counter() - started

    with console.status("stock"):
        stock, stock_seconds = timed()
    patch(model, strict=True)
    with console.status("patched"):
        patched, seconds = timed()
    stats = model.cascade.stats
    table = Table("", "stock", "patched", "ratio")
    for name, before, after, digits in (
        ("prompt tokens forwarded", stats.prompt_tokens, stats.prefill_tokens, 0),
        ("KV, MB", stats.kv_bytes_unshared / 1e6, stats.kv_bytes / 1e6, 1),
        ("whole call, s", stock_seconds, seconds, 2),
    ):
        values = (f"{value:,.{digits}f}" for value in (before, after))
        table.add_row(name, *values, f"{before / after:.1f}x")
    table.add_row("identical tokens", "", "yes" if torch.equal(stock, patched) else "no", "")
    console.print(table)
    console.print(model.cascade.describe(), markup=False)
