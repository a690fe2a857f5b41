"""Shared-prefix attention for Hugging Face models.

`patch(model)` makes `model.generate` compute a shared prompt once, store its KV once, and read it
once per decode step for all the sequences that share it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .doctor import doctor
    from .errors import (
        CascadeError,
        CascadeFallbackWarning,
        OutOfPagesError,
        UnsupportedCallError,
        UnsupportedModelError,
    )
    from .fuse import fuse_pass
    from .patch import patch, unpatch
    from .self_consistency import self_consistency
    from .stats import GenerateStats
    from .vote import Consensus, Sample

__all__ = [
    "CascadeError",
    "CascadeFallbackWarning",
    "Consensus",
    "GenerateStats",
    "OutOfPagesError",
    "Sample",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "doctor",
    "fuse_pass",
    "patch",
    "self_consistency",
    "unpatch",
]

# Which module each of these names comes from. It is imported when the name is first asked for:
# `hf-cascade --help` need not wait for torch.
_HOMES = {
    "CascadeError": "errors",
    "CascadeFallbackWarning": "errors",
    "Consensus": "vote",
    "GenerateStats": "stats",
    "OutOfPagesError": "errors",
    "Sample": "vote",
    "UnsupportedCallError": "errors",
    "UnsupportedModelError": "errors",
    "doctor": "doctor",
    "fuse_pass": "fuse",
    "patch": "patch",
    "self_consistency": "self_consistency",
    "unpatch": "patch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the submodule `patch` must not hide the function `patch`.
        is_own_module = isinstance(value, ModuleType) and _HOMES.get(name) == name
        super().__setattr__(name, getattr(value, name) if is_own_module else value)


sys.modules[__name__].__class__ = _Package
