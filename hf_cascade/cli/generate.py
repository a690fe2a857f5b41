"""`hf-cascade generate`: samples of a prompt, or of several, as JSONL."""

from __future__ import annotations

import json
import secrets
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .errors import Failure, WrongUsageError, described
from .output import STDOUT, Lines, ReaderGoneError, check_writable
from .prompts import read_prompts

if TYPE_CHECKING:
    from ..stats import GenerateStats
    from .samples import Sample, Sampling
    from .summary import Summary

Dtype = Literal["auto", "float32", "float16", "bfloat16"]

# By how it ended; 128 and the number of the signal, as a shell has it.
EXIT_CODES = {"complete": 0, "interrupted": 130, "stdout closed": 141}


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder with a model, or its id on the hub.")
    ],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - or nothing: from stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Read many prompts from this file, one a line or as JSONL with "prompt"; '
            "what they have in common is shared."
        ),
    ] = None,
    num_samples: Annotated[
        int, typer.Option("--samples", "-n", min=1, help="Samples of each prompt.")
    ] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a sample.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 is greedy. Default: as the model's config says."),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="1 is off. Default: as for temperature.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="0 is off. Default: as for temperature.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End a sample at this text; may be given repeatedly.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="Of the random stream. Default: a new one."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Don't use the tokenizer's chat template.")
    ] = False,
    dtype: Annotated[
        Dtype, typer.Option(help="Of the weights; auto is the checkpoint's.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, .. Default: cuda if there is one.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the decode step; pays in long runs.")
    ] = False,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Most samples that are drawn at once.")
    ] = 64,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write to this file instead of stdout.")
    ] = STDOUT,
    as_json: Annotated[
        bool, typer.Option("--json", help="Close with a line of JSON, and show no progress.")
    ] = False,
) -> None:
    """Draw samples of a prompt, which is computed and stored once for all of them.

    Writes a line of JSON for each sample when it ends: prompt and sample (indices from 0), text,
    tokens (ids), finish_reason ("stop" or "length"). Ctrl-C keeps what has been written. What was
    shared is told on stderr.
    """
    texts = read_prompts(prompt, file, prompts)
    options = _sampling_options(temperature, top_p, top_k, num_samples)
    if "" in (stop or ()):
        raise typer.BadParameter("a stop text is empty", param_hint="--stop")
    check_writable(output)

    from .loading import checked_device, encode, load
    from .samples import Sampling

    where = checked_device(device)
    loaded, tokenizer = load(model, dtype=dtype, device=where, compile=compile)
    rows = encode(tokenizer, texts, raw=raw)
    lines = Lines(output)
    summary = _draw_all(
        loaded,
        tokenizer,
        rows,
        Sampling(num_samples, batch_size, max_new_tokens, tuple(stop or ()), options),
        seed=secrets.randbelow(2**32) if seed is None else seed,
        lines=lines,
        is_quiet=as_json,
    )
    lines.close()
    print(json.dumps(asdict(summary)) if as_json else summary, file=sys.stderr)
    raise typer.Exit(EXIT_CODES[summary.ending])


def _sampling_options(
    temperature: float | None, top_p: float | None, top_k: int | None, num_samples: int
) -> dict[str, Any]:
    """Arguments of `transformers`' generate; what is not given is left to the model's config."""
    if temperature == 0:
        if num_samples > 1:
            raise typer.BadParameter(
                "all samples are the same at temperature 0", param_hint="--samples"
            )
        if top_p is not None or top_k is not None:
            raise WrongUsageError("temperature 0 takes no --top-p and no --top-k")
        return {"do_sample": False}
    if top_p == 0:
        raise typer.BadParameter("it must be above 0", param_hint="--top-p")
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    return {"do_sample": True} | {k: v for k, v in given.items() if v is not None}


def _draw_all(
    model: Any,
    tokenizer: Any,
    rows: list[list[int]],
    sampling: Sampling,
    *,
    seed: int,
    lines: Lines,
    is_quiet: bool,
) -> Summary:
    """Write a line for each sample; Ctrl-C and a closed stdout end it early, but in order."""
    import torch

    from .progress import Display
    from .samples import draw
    from .summary import summarize

    wanted = len(rows) * sampling.num_samples
    display = Display("samples", wanted, is_quiet=is_quiet)
    calls: list[GenerateStats] = []
    new_tokens, ending = 0, "complete"

    def write(sample: Sample) -> None:
        nonlocal new_tokens
        with display.hidden() if lines.is_terminal else nullcontext():
            lines.write(asdict(sample))
        new_tokens += len(sample.tokens)
        display.end_sample()

    torch.manual_seed(seed)
    started = time.perf_counter()
    try:
        with display.shown():
            for stats in draw(
                model, tokenizer, rows, sampling, on_sample=write, on_step=display.update
            ):
                calls.append(stats)
    except KeyboardInterrupt:
        ending = "interrupted"
    except ReaderGoneError:
        ending = "stdout closed"
    except Failure:
        raise
    except torch.OutOfMemoryError as error:
        hint = f"a lower --batch-size than {sampling.batch_size} needs less"
        raise Failure(f"out of memory ({hint}): {described(error)}") from error
    except Exception as error:  # models, tokenizers and processors fail in ways of their own
        raise Failure(f"generate failed: {described(error)}") from error
    return summarize(
        calls,
        ending=ending,
        samples=lines.count,
        wanted=wanted,
        prompts=len(rows),
        new_tokens=new_tokens,
        seconds=time.perf_counter() - started,
        seed=seed,
    )
