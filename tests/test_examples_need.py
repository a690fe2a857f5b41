"""What the examples need is asked for in one line, named whole, and brought by their extra."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import examples
from tests.test_layering import STANDARD, imports, outside

ROOT = Path(__file__).parents[1]


def run_example(name, *python_options, path):
    """`python -m examples.NAME` as a process, with `path` in front of its own modules."""
    return subprocess.run(
        [sys.executable, *python_options, "-m", f"examples.{name}", "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["demo", "document_qa", "self_consistency", "skeleton_of_thought"])
def test_an_example_without_its_libraries_is_one_line_with_the_way_out(name, tmp_path):
    ended = run_example(name, "-S", path=tmp_path)  # a Python without what pip installs
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert re.fullmatch(r"error: the examples need torch, .*\n", ended.stderr)
    for word in (*examples.NEEDS, "pip install -e '.[demo]'", "`make demo`", sys.executable):
        assert word in ended.stderr


def test_only_what_is_missing_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['gguf'] = None")
    ended = run_example("document_qa", path=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: the examples need gguf, which ")


def test_all_that_the_examples_import_is_asked_for():
    folder = Path(examples.__file__).parent
    imported = set().union(*(imports(path, "examples") for path in folder.glob("*.py")))
    own = {*STANDARD, "examples", "hf_cascade", "tokenizers"}  # transformers brings tokenizers
    assert not outside({*own, *examples.NEEDS}, imported)


def test_the_extra_brings_what_the_examples_ask_for():
    needed = map(Requirement, metadata.requires("hf-cascade"))
    brought = {r.name for r in needed if not r.marker or r.marker.evaluate({"extra": "demo"})}
    assert {name.partition(".")[0] for name in examples.NEEDS} - {"hf_cascade"} <= brought
