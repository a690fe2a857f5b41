"""Copies of a function that torch.compile keeps apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

_numbers = itertools.count()


def with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with a code object and a name of its own.

    torch.compile limits recompilations per code object; models that shared one would use up each
    other's limit. It also remembers, by file, line and name, which sizes varied.
    """
    code = function.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    return FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
