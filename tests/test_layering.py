"""Who may know whom: tests, benchmarks and examples -> hf_cascade -> hf_cascade.ops -> torch."""

import ast
import re
import sys
from collections.abc import Collection
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STANDARD = sys.stdlib_module_names
KNOW_TRANSFORMERS = (
    "patch.py",
    "compat.py",
    "attention.py",
    "cache.py",
    "returned_cache.py",
    "loops.py",
    "prefill.py",
    "loading.py",
)


def over_files(pattern: str) -> pytest.MarkDecorator:
    paths = sorted(ROOT.glob(pattern))
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


@over_files("ops/**/*.py")
def test_ops_know_torch_and_each_other(path):
    assert not outside({*STANDARD, "torch", "hf_cascade.ops"}, imports(path, "hf_cascade.ops"))


@over_files("hf_cascade/tree*.py")
def test_the_tree_knows_the_standard_library_and_itself(path):
    own = {"hf_cascade.tree", "hf_cascade.tree_text"}
    assert not outside({*STANDARD, *own}, imports(path, "hf_cascade"))


@over_files("hf_cascade/**/*.py")
def test_the_package_does_not_know_who_uses_it(path):
    assert not within({"tests", "benchmarks", "examples"}, imports(path, package_of(path)))


@over_files("hf_cascade/**/*.py")
def test_few_know_transformers(path):
    if path.name not in KNOW_TRANSFORMERS:
        assert not within({"transformers"}, imports(path, package_of(path)))


@over_files("csrc/**/*.cuh")
def test_device_code_does_not_know_torch(path):
    assert not [name for name in includes(path) if re.match(r"(torch|ATen|c10|caffe2)\b", name)]


@pytest.mark.parametrize(
    "source",
    [
        "import transformers",
        "import transformers.cache_utils as torch",
        "from transformers import Cache",
        "def late():\n    from transformers.cache_utils import Cache",
        "if TYPE_CHECKING:\n    import torch, transformers",
        "from .. import patch",
        "from ..patch import patch",
        "from hf_cascade import patch",
        "import hf_cascade.patch",
        "import torchvision",
    ],
)
def test_an_import_cannot_hide(source, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert outside({"torch", "hf_cascade.ops"}, imports(path, "hf_cascade.ops"))


def test_an_include_cannot_hide(tmp_path):
    (tmp_path / "tile.cuh").write_text('#include <cuda_bf16.h>\n#include "shape.h"\n')
    (tmp_path / "shape.h").write_text("#pragma once\n#  include  <torch/csrc/stable/tensor.h>\n")
    assert "torch/csrc/stable/tensor.h" in includes(tmp_path / "tile.cuh")


def package_of(path: Path) -> str:
    """`hf_cascade` or a package in it."""
    return ".".join(path.relative_to(ROOT).parent.parts)


def imports(path: Path, package: str) -> set[str]:
    """The modules that a file of `package` imports, by full name, wherever it does so."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(resolve_name("." * node.level + (node.module or ""), package))
    return names


def includes(path: Path) -> set[str]:
    """What a CUDA file includes, itself or by way of its neighbours."""
    names = set(re.findall(r'^\s*#\s*include\s*[<"](.+?)[>"]', path.read_text(), re.MULTILINE))
    neighbours = [path.parent / name for name in names if (path.parent / name).is_file()]
    return names.union(*(includes(neighbour) for neighbour in neighbours))


def within(packages: Collection[str], names: set[str]) -> set[str]:
    """Those of `names` that are one of `packages` or lie in one."""
    return {name for name in names if any(f"{name}.".startswith(f"{p}.") for p in packages)}


def outside(packages: Collection[str], names: set[str]) -> set[str]:
    return names - within(packages, names)
