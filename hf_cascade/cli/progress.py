"""What a person sees on stderr while samples are drawn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .errors import one_line


class Display:
    """A progress bar and messages, on stderr.

    Args:
        title: what is counted.
        total: how many there are.
        is_quiet: no bar; there is none either where stderr is not a terminal.
    """

    def __init__(self, title: str, total: int, *, is_quiet: bool) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._progress = Progress(
            TextColumn(title),
            TextColumn("{task.fields[ended]}/" + str(total)),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=is_quiet or not self._console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total, ended=0)
        self._ended = 0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar, and warnings as one line each, within this context."""
        with self._progress, warnings.catch_warnings():
            warnings.showwarning = self._show_warning
            yield

    def print(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False)

    def end_sample(self) -> None:
        self._ended += 1
        self._progress.update(self._task, ended=self._ended)

    def update(self, share_of_running: float) -> None:
        """Move the bar: samples that have ended count whole, those that run by this share."""
        self._progress.update(self._task, completed=self._ended + share_of_running)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the bar away: something else writes to the terminal."""
        self._progress.stop()
        yield
        self._progress.start()

    def _show_warning(self, message: Any, *args: Any, **kwargs: Any) -> None:
        self.print(f"warning: {one_line(message)}")
