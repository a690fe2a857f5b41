"""Functions that the compiler keeps apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

_numbers = itertools.count()


def with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with a code object of its own.

    The compiler's limit of recompilations is one of a code object, so what many models have in
    common they would use up together. By file, line and name it also recalls which sizes of a
    function have varied.
    """
    code = function.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    return FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
