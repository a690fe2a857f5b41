"""N samples of one prompt on a GPU, wall-clock: the shape of a real model, random bf16 weights.

    python -m benchmarks.bench_generate --device cuda [--cells 64x4096 ...] [--sides patched ...]

Sides: `patched`; `no attention`, the same model and loop whose attention returns its queries (what
is left is what attention can't be blamed for); `stock`, transformers as it comes (SDPA, dynamic
cache); `static`, stock with its static cache, whose steps transformers then compiles
(reduce-overhead), each cell anew, as for a user who has no other. Stock sides run where they take
seconds and fit the GPU: of the cells asked for, those of 2048 prompt tokens and up to 16 samples.

Prefill is a call with one new token. A step is what each of `--new-tokens` further ones adds to the
rest of such a call, sampling included. Every cell is preceded by calls of its shape, of which
`compile s` is what the first one took longer. Floors use this run's own roofs: a step must read the
weights (but the input embedding) and the tree's KV once, and do their multiplications.

`--log-p` compares log-probabilities of sampled tokens as benchmarks/log_p.py does.

Results go to generate_<model>.csv and .png in $OUT or benchmarks/results, row by row.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import hf_cascade
from benchmarks import log_p
from benchmarks.bench_attention import Roofs, measure_roofs
from hf_cascade.cache import CascadeCache

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "llama-3.1-8b": {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8},
    "llama-2-7b": {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32},
}
CELLS = (
    "64x4096", "1x2048", "256x4096", "16x131072", "16x2048", "64x2048", "64x8192", "64x32768",
    "8*16x4096",
)  # fmt: skip
SIDES = ("patched", "no attention", "stock", "static")
STOCK_CELLS = ("1x2048", "16x2048")  # others take minutes or more memory than there is
STOCK_NEW_TOKENS = 32  # its steps take long
LONG_PREFILL_S = 1  # its calls are few: steps are timed apart from it


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    roofs = measure_roofs()
    torch.cuda.empty_cache()
    card = torch.cuda.get_device_name()
    stamp = (
        f"{datetime.datetime.now(datetime.timezone.utc).date()} {card}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {options.model} shape in bf16, "
        f"{'pack_linears, ' if options.pack_linears else ''}reads "
        f"{roofs.bytes_per_us / 1e6:.2f} TB/s, matmul {roofs.flops_per_us / 1e6:.0f} TFLOP/s"
    )
    print(f"# {stamp}", flush=True)
    model = new_model(options.model)
    rows: list[dict] = []
    for side in options.sides:
        with as_side(model, side, options):
            for cell in options.cells:
                if side in ("stock", "static") and cell not in STOCK_CELLS:
                    continue
                if side == "static":
                    torch._dynamo.reset()  # nor is one shape's graph another's
                try:
                    row = measure(model, side, cell, options.new_tokens, roofs)
                except torch.cuda.OutOfMemoryError:
                    row = {"cell": cell, "side": side, "prefill s": "out of memory"}
                rows.append(row)
                print(", ".join(f"{k} {v}" for k, v in row.items()), flush=True)
                save(rows, stamp, options.model)
    plot(rows, stamp, options.model)
    if options.log_p:
        stamp += f", {log_p_errors(model, options)}"
        print(f"# {stamp}")
        save(rows, stamp, options.model)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument(
        "--cells", nargs="+", type=cell_name, default=CELLS, help="[documents*]samplesxprompt"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--no-compile", dest="compile", action="store_const", const=False,
                        default="auto", help="patch(model, compile=False)")  # fmt: skip
    parser.add_argument("--pack-linears", action="store_true", help="patch(pack_linears=True)")
    parser.add_argument("--log-p", action="store_true", help="compare log-probabilities too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("it takes a GPU")
    return options


def new_model(name: str) -> LlamaForCausalLM:
    """Weights drawn on the GPU; never ends a text."""
    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2**18, eos_token_id=None, pad_token_id=0, **MODELS[name],
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


@contextmanager
def as_side(model: LlamaForCausalLM, side: str, options: argparse.Namespace) -> Iterator[None]:
    torch._dynamo.reset()  # one side's trace is not another's
    attend = CascadeCache.attend
    if side == "no attention":
        CascadeCache.attend = without_attention
    if side in ("patched", "no attention"):
        hf_cascade.patch(
            model, strict=True, compile=options.compile, pack_linears=options.pack_linears
        )
    try:
        yield
    finally:
        hf_cascade.unpatch(model)
        CascadeCache.attend = attend


def without_attention(self: CascadeCache, query: torch.Tensor, scaling: float) -> torch.Tensor:
    key, value, layer_idx = self._recorded
    self._recorded = None
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
    self.pool.layer(layer_idx, k, v, is_first_pass=self._is_first_pass)
    self._plan_on(query.device)
    self._attended.append(layer_idx)
    return query.transpose(1, 2)


def measure(
    model: LlamaForCausalLM, side: str, cell: str, new_tokens: int, roofs: Roofs
) -> dict[str, object]:
    """One row of the table."""
    documents, samples, length = parse(cell)
    if side == "stock":
        new_tokens = min(new_tokens, STOCK_NEW_TOKENS)
    if hasattr(model, "cascade"):
        model.cascade.release()  # the pages of other cells
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (documents, length), device="cuda")
    options = {"cache_implementation": "static"} if side == "static" else {}

    def timed(tokens: int, *, apart: bool) -> Call:
        call = timed_apart if apart else timed_whole
        return call(
            model, ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
            num_return_sequences=samples, min_new_tokens=tokens, max_new_tokens=tokens, **options,
        )  # fmt: skip

    first = timed(1 + new_tokens, apart=True)
    # Waiting between prefill and steps would show host work that a user's call hides behind the
    # prefill, such as the capture; a long prefill varies by more than that.
    apart = timed(1, apart=True).prefill_s > LONG_PREFILL_S
    repeats = 1 if apart else 2
    if repeats > 1:
        timed(1 + new_tokens, apart=apart)
    torch.cuda.reset_peak_memory_stats()
    short = [timed(1, apart=apart) for _ in range(repeats)]
    long = [timed(1 + new_tokens, apart=apart) for _ in range(repeats)]
    prefill = min(call.prefill_s + call.rest_s for call in short)
    step = (min(call.rest_s for call in long) - min(call.rest_s for call in short)) / new_tokens
    weights_ms, attention_ms = floors_ms(model, cell, new_tokens, roofs)
    return {
        "cell": cell,
        "side": side,
        "prefill s": round(prefill, 4),
        "ms a step": round(1e3 * step, 3),
        "tokens a s": round(documents * samples / step),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "weights floor ms": round(weights_ms, 3),
        "attention floor ms": round(attention_ms, 3),
        "x floor": round(1e3 * step / (weights_ms + attention_ms), 2),
        "compile s": round(first.prefill_s + first.rest_s - prefill - step * new_tokens, 1),
        "backend": model.cascade.stats.backend if hasattr(model, "cascade") else "stock",
        "fused": model.cascade.stats.fused_layers if hasattr(model, "cascade") else "",
    }


@dataclass(frozen=True)
class Call:
    """Seconds of one generate: until the prompt's logits are there, 0 where nobody waited for
    them, and from then on.
    """

    prefill_s: float
    rest_s: float


def timed_whole(model: LlamaForCausalLM, ids: torch.Tensor, **options: object) -> Call:
    torch.cuda.synchronize()
    started = time.perf_counter()
    model.generate(ids, **options)
    torch.cuda.synchronize()
    return Call(0.0, time.perf_counter() - started)


def timed_apart(model: LlamaForCausalLM, ids: torch.Tensor, **options: object) -> Call:
    prefill, ends = model._prefill, []

    def prefill_and_wait(*args: object, **kwargs: object) -> object:
        outputs = prefill(*args, **kwargs)
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
        return outputs

    model._prefill = prefill_and_wait
    started = time.perf_counter()
    try:
        whole = timed_whole(model, ids, **options)
    finally:
        del model._prefill
    prefill_s = ends[0] - started
    return Call(prefill_s, whole.rest_s - prefill_s)


def log_p_errors(model: LlamaForCausalLM, options: argparse.Namespace) -> str:
    """Errors of the log-probabilities of sampled tokens, in words."""
    torch.manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, log_p.PROMPT_TOKENS), device="cuda")
    with as_side(model, "patched", options):
        out = log_p.sample(model, ids)
    exact = copy.deepcopy(model).float()
    return log_p.describe(log_p.errors(out, ids.shape[1], model, exact))


def cell_name(text: str) -> str:
    if min(parse(text)) < 1:  # before the GPU has worked for nothing
        raise ValueError(f"documents, samples and tokens must be 1 or more, got {text!r}")
    return text


def parse(cell: str) -> tuple[int, int, int]:
    """Documents, samples of each and tokens a prompt of "8*16x4096" or "16x4096"."""
    documents, _, rest = cell.rpartition("*")
    samples, _, length = rest.partition("x")
    return int(documents or 1), int(samples), int(length)


def floors_ms(
    model: LlamaForCausalLM, cell: str, new_tokens: int, roofs: Roofs
) -> tuple[float, float]:
    """What weights and what attention alone take at least, in the mean step."""
    documents, samples, length = parse(cell)
    config, batch = model.config, documents * samples
    read = sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size
    own = new_tokens / 2  # tokens of a row, in the mean
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = config.num_hidden_layers * config.hidden_size // heads
    kv_bytes = 2 * 2 * (documents * length + batch * own) * kv_heads * width
    flops = 4 * batch * (length + own) * heads * width
    return (
        1e-3 * max(2 * read / roofs.bytes_per_us, 2 * read * batch / roofs.flops_per_us),
        1e-3 * max(kv_bytes / roofs.bytes_per_us, flops / roofs.flops_per_us),
    )


def folder() -> Path:
    return Path(os.environ.get("OUT", RESULTS))


def save(rows: Sequence[dict], stamp: str, model: str) -> None:
    with (folder() / f"generate_{model}.csv").open("w", newline="") as file:
        file.write(f"# {stamp}\n")
        writer = csv.DictWriter(file, max((row.keys() for row in rows), key=len))
        writer.writeheader()
        writer.writerows(rows)


def plot(rows: Sequence[dict], stamp: str, model: str) -> None:
    """Bars: milliseconds a step of each side, the floor as a line."""
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "ms a step" in row]
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    sides = list(dict.fromkeys(row["side"] for row in rows))
    figure, axis = plt.subplots(figsize=(10, 4.5))
    for i, side in enumerate(sides):
        mine = [(cells.index(row["cell"]), row["ms a step"]) for row in rows if row["side"] == side]
        places = [place + 0.8 * (i + 0.5) / len(sides) - 0.4 for place, _ in mine]
        bars = axis.bar(places, [ms for _, ms in mine], 0.8 / len(sides), label=side)
        axis.bar_label(bars, fmt="%.1f", fontsize=7)
    for place, cell in enumerate(cells):
        row = next(row for row in rows if row["cell"] == cell)
        floor = row["weights floor ms"] + row["attention floor ms"]
        axis.hlines(floor, place - 0.4, place + 0.4, colors="black",
                    label="floor" if not place else None)  # fmt: skip
    axis.set_xticks(range(len(cells)), cells)
    axis.set_ylabel("milliseconds a step")
    axis.set_title(stamp, fontsize=7)
    axis.legend()
    figure.tight_layout()
    figure.savefig(folder() / f"generate_{model}.png", dpi=150)


if __name__ == "__main__":
    main()
