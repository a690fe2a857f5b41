"""What goes wrong in a command, as one line."""

from __future__ import annotations

import textwrap

import typer


class Failure(typer.TyperException):
    """A command can't do what it was asked to, for a reason outside it; the exit code is 1."""


class WrongUsageError(Failure):
    """A command was asked for what makes no sense, in no option alone; the exit code is 2."""

    exit_code = 2


def one_line(message: object, width: int = 400) -> str:
    """A message without line breaks, cut if it is very long."""
    return textwrap.shorten(str(message), width, placeholder=" ..")


def described(error: BaseException) -> str:
    """An error as one line, with its type where the message alone would not tell."""
    message, name = one_line(error), type(error).__name__
    if message and isinstance(error, OSError | ValueError):
        return message
    return f"{name}: {message}" if message else name
