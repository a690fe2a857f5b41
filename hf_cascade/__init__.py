"""Shared-prefix attention for Hugging Face models.

`patch(model)` makes `model.generate` compute a shared prompt once, store its KV once, and read it
once per decode step for all the sequences that share it.
"""

from .errors import (
    CascadeError,
    CascadeFallbackWarning,
    OutOfPagesError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from .fuse import fuse_pass
from .patch import patch, unpatch
from .stats import GenerateStats

__all__ = [
    "CascadeError",
    "CascadeFallbackWarning",
    "GenerateStats",
    "OutOfPagesError",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "fuse_pass",
    "patch",
    "unpatch",
]
