"""Lines that are whole, to stdout or a file: Ctrl-C leaves no half of one."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import Failure

STDOUT = Path("-")


def check_writable(path: Path) -> None:
    """Say what is wrong with a place before time is spent on what is to be written there.

    Raises:
        Failure: it is closed, a folder, or in no folder.
    """
    if path == STDOUT:
        if sys.stdout is None:
            raise Failure("stdout is closed")
    elif path.expanduser().is_dir():
        raise Failure(f"{path} can't be written: it is a folder")
    elif not path.expanduser().absolute().parent.is_dir():
        raise Failure(f"{path} can't be written: there is no such folder")


class ReaderGoneError(Exception):
    """Nobody reads stdout any more."""


class Lines:
    """JSON objects, one a line, in UTF-8.

    Args:
        path: a file, which is written anew; "-" is stdout.
    Raises:
        Failure: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._name = "stdout" if path == STDOUT else str(path)
        self.count = 0
        try:
            self._out: BinaryIO = (
                sys.stdout.buffer if path == STDOUT else path.expanduser().open("wb")
            )
        except OSError as error:
            raise Failure(f"{path} can't be written: {error.strerror}") from error

    @property
    def is_terminal(self) -> bool:
        return self._out.isatty()

    def write(self, value: dict[str, Any]) -> None:
        """Write one line; Ctrl-C waits until it is out.

        Raises:
            ReaderGoneError: stdout is closed.
            Failure: the disk is full, for example.
        """
        line = json.dumps(value, ensure_ascii=False).encode() + b"\n"
        try:
            with _interrupts_waiting():
                self._out.write(line)
                self._out.flush()
                self.count += 1
        except BrokenPipeError as error:
            raise ReaderGoneError from error
        except OSError as error:
            raise Failure(f"{self._name} can't be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; stdout stays open."""
        if self._out is not sys.stdout.buffer:
            self._out.close()


@contextlib.contextmanager
def _interrupts_waiting() -> Iterator[None]:
    """Hold back the first Ctrl-C until the end of this context; a second one does not wait."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # no Ctrl-C comes here, or someone else cares for it
        return
    waiting: list[int] = []

    def wait(signum: int, frame: object) -> None:
        if waiting:
            raise KeyboardInterrupt
        waiting.append(signum)

    before = signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting:
        raise KeyboardInterrupt
