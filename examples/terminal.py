"""How examples and benchmarks look in a terminal: one progress bar, one table of two runs."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from examples.measure import Comparison

Arguments = ParamSpec("Arguments")


def quiet_on_interrupt(main: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """A program that Ctrl-C ends without a traceback, with the exit status 130 of shells."""

    @functools.wraps(main)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            main(*args, **kwargs)
        except KeyboardInterrupt:
            sys.exit(130)

    return run


def progress_bar(console: Console) -> Progress:
    """A progress display with a bar, a count and the time that has passed for each task."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def comparison_table(comparison: Comparison, *, title: str) -> Table:
    """Stock and patched side by side, and how many times less the patched call needs."""
    stock, patched = comparison.stock, comparison.patched
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for header in ("stock", "patched", "ratio"):
        table.add_column(header, justify="right")

    def add(name: str, of_stock: float, of_patched: float, digits: int) -> None:
        values = (f"{value:,.{digits}f}" for value in (of_stock, of_patched))
        table.add_row(name, *values, f"{of_stock / of_patched:.1f}x")

    add("prompt tokens forwarded", stock.prompt_tokens, patched.prompt_tokens, 0)
    add("prefill, s", stock.prefill_seconds, patched.prefill_seconds, 2)
    add("decode step, ms", stock.step_seconds * 1e3, patched.step_seconds * 1e3, 1)
    add("whole call, s", stock.seconds, patched.seconds, 2)
    add("KV, MB", stock.kv_bytes / 1e6, patched.kv_bytes / 1e6, 1)
    table.add_row("identical tokens", "", "yes" if comparison.identical else "no", "")
    return table
