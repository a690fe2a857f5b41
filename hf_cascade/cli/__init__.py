"""The command line, `hf-cascade`: a file per command, and what they share.

Nothing here imports torch before a command needs it.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that `sys.argv` names and exit: 0, 1 on failure, 2 on wrong usage, 130 on
    Ctrl-C, 141 if nobody reads stdout any more."""
    try:
        from .app import app

        app(prog_name="hf-cascade")
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(f"error: the command line needs {error.name}: pip install rich typer")
    except KeyboardInterrupt:  # before a command began
        sys.exit(130)
