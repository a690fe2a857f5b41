"""The versions that hf_cascade was tested with.

pyproject.toml asks pip for the same, but for the newest torch: it need not be the one of this list.
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import Version

TESTED_PYTHON = SpecifierSet(">=3.10")
TESTED_TORCH = SpecifierSet(">=2.11,<2.14")
# The hooks of `compat` are private to transformers: only what was tested can work.
TESTED_TRANSFORMERS = SpecifierSet(">=5.17,<5.24")

# torch.compile is tested from the first of them on.
LOWEST_TORCH_TO_COMPILE = Version("2.11.0")
