"""The application: its commands, and how it ends."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .demo import demo
from .doctor import doctor
from .errors import described, one_line
from .generate import generate


class OneLineErrors(TyperGroup):
    """Errors are one line on stderr; what is not foreseen keeps its traceback, for a bug report."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False})
        except typer.TyperException as error:
            if message := one_line(error.format_message()):  # none where help was shown instead
                print(f"error: {message}", file=sys.stderr)
            sys.exit(error.exit_code)
        except typer.Abort:
            sys.exit(1)
        except OSError as error:
            print(f"error: {described(error)}", file=sys.stderr)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=OneLineErrors,
    help="Shared-prefix attention for Hugging Face models: a prompt is computed, stored and read "
    "once, however many samples of it are drawn.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(demo)
app.command()(doctor)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"hf-cascade {importlib.metadata.version('hf-cascade')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """What stands before the command."""
