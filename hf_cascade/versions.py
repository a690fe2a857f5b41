"""The versions that hf_cascade was tested with.

pyproject.toml has the same ranges but no upper bound on torch.
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import Version

TESTED_PYTHON = SpecifierSet(">=3.10")
TESTED_TORCH = SpecifierSet(">=2.11,<2.14")
# `compat` overrides private hooks of transformers, so only tested versions are allowed.
TESTED_TRANSFORMERS = SpecifierSet(">=5.17,<5.24")

# torch.compile is tested from the oldest supported torch on.
LOWEST_TORCH_TO_COMPILE = Version("2.11.0")
