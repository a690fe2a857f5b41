"""Things to run with hf_cascade on real input; `python -m examples.demo` shows them all."""

import sys
from importlib.util import find_spec

# What the extra `demo` installs for the examples, as modules.
NEEDS = (
    "torch",
    "transformers",
    "hf_cascade.ops",  # hf_cascade itself is found in a clone, installed or not
    "accelerate",
    "gguf",
    "matplotlib",
    "rich",
    "safetensors",
)

# What runs with -m is called so until it is found: an example is the program, and not imported by
# a test or a benchmark, which may need less.
if sys.argv[:1] == ["-m"] and (missing := [name for name in NEEDS if find_spec(name) is None]):
    sys.exit(
        f"error: the examples need {', '.join(missing)}, which {sys.executable} does not find: "
        "pip install -e '.[demo]', or `make demo`, which sets up .venv/bin/python for them"
    )
