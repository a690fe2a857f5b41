"""`hf-cascade doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at versions, devices and backends, and say whether hf_cascade can work here.

    The exit code is 0 if it can, 1 if not.
    """
    from ..doctor import doctor

    report = doctor()
    print(json.dumps(asdict(report), indent=2) if as_json else report, flush=True)
    raise typer.Exit(0 if report.is_ready else 1)
