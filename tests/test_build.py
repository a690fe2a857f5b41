"""The CUDA sources compile where there is no GPU, and where nothing compiles torch serves."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hf_cascade.ops import kernels

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
SOURCES = kernels.source_folder()

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
clang_format = shutil.which("clang-format")


@needs_nvcc
@pytest.mark.skipif(
    not os.environ.get("CI") and not os.environ.get("HF_CASCADE_COMPILE"),
    reason="takes a minute or two: set CI or HF_CASCADE_COMPILE",
)
@pytest.mark.parametrize("target", kernels.TARGETS)
def test_every_source_compiles_without_warnings(target, tmp_path):
    said = kernels.build(tmp_path / "library.so", targets=[target], head_dims=[128], jobs=2)
    # No flag makes these errors: wgmma where ptxas waits for each product (C7510 and its like).
    assert "Potential Performance Loss" not in said


@pytest.mark.skipif(clang_format is None, reason="no clang-format on this machine")
def test_sources_are_formatted():
    files = [str(path) for path in sorted(SOURCES.iterdir())]
    subprocess.run([clang_format, "--dry-run", "-Werror", "--style=file", *files], check=True)


def test_the_key_follows_the_sources(tmp_path, monkeypatch):
    name = kernels.library_name()
    assert name == kernels.library_name()
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    monkeypatch.setattr(kernels, "source_folder", lambda: copy)
    assert kernels.library_name() == name
    (copy / "merge_states.cu").write_text("// another state of the sources\n")
    assert kernels.library_name() != name
    assert kernels.library_name(("90a",)) != kernels.library_name(("80",))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_says_so():
    assert kernels.load() == kernels.Status(None, "this torch is built without CUDA")


def test_missing_tools_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="nvcc"):
        kernels.build(tmp_path / "library.so")


@needs_nvcc
def test_a_compile_error_is_shown(tmp_path, monkeypatch):
    broken = tmp_path / "csrc"
    broken.mkdir()
    (broken / "merge_states.cu").write_text("int main() { return nonsense; }\n")
    (broken / "bindings.cpp").write_text("")
    monkeypatch.setattr(kernels, "source_folder", lambda: broken)
    with pytest.raises(RuntimeError, match="nonsense"):
        kernels.build(tmp_path / "library.so", targets=["80"], jobs=1)


def test_head_dims_are_those_of_the_dispatch():
    dispatch = (SOURCES / "cascade_attention.cu").read_text()
    found = re.findall(r"launch_attention<(\d+)>", dispatch)
    assert tuple(map(int, found)) == kernels.HEAD_DIMS


def test_an_install_that_sees_torch_leaves_what_it_cannot_compile(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("setuptools.setup", lambda **options: None)
    setup = runpy.run_path(str(Path(kernels.__file__).resolve().parents[1] / "setup.py"))
    monkeypatch.setattr(torch.version, "cuda", None)
    setup["compile_kernels"](tmp_path)
    assert "torch is built without CUDA" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
