"""The CUDA sources compile where there is no GPU, and where nothing compiles torch serves."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch
from hf_cascade.ops import kernels

ROOT = Path(__file__).parents[1]
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


def test_the_key_follows_the_machine(monkeypatch):
    name = kernels.library_name()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert kernels.library_name() != name


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
    assert list(tmp_path.iterdir()) == [broken]


def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch):
    def run(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(kernels.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        kernels.build(tmp_path / "library.so")
    assert not list(tmp_path.iterdir())


def test_an_nvcc_under_cuda_home_is_taken_before_one_on_path(tmp_path, monkeypatch):
    for folder, release in (("home/bin", "12.9"), ("path", "13.0")):
        nvcc = tmp_path / folder / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V0\n")
        nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert kernels.nvcc_release() == "12.9"
    (tmp_path / "home/bin/nvcc").unlink()
    assert kernels.nvcc_release() == "13.0"


def test_head_dims_are_those_of_the_dispatch():
    dispatch = (SOURCES / "cascade_attention.cu").read_text()
    found = re.findall(r"launch_attention<(\d+)>", dispatch)
    assert tuple(map(int, found)) == kernels.HEAD_DIMS


def test_an_install_that_sees_torch_leaves_what_it_cannot_compile(tmp_path, monkeypatch, capsys):
    pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml asks for
    monkeypatch.setattr("setuptools.setup", lambda **options: None)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    monkeypatch.setattr(torch.version, "cuda", None)
    setup["compile_kernels"](tmp_path)
    assert "torch is built without CUDA" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# Stands in for ops/kernels.py: what setup.py needs of it.
KERNELS_THAT_BUILD = """
from types import SimpleNamespace
torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0"))
library_name = lambda: "_C_cuda_test.so"
build = lambda library: library.touch()
"""
KERNELS_WITHOUT_TORCH = "raise OSError('libcudart.so.13: cannot open shared object file')"


@pytest.mark.parametrize(
    ("kernels_source", "platform", "libraries"),
    [
        (KERNELS_THAT_BUILD, sysconfig.get_platform(), ["hf_cascade/ops/_C_cuda_test.so"]),
        (KERNELS_WITHOUT_TORCH, "any", []),
    ],
    ids=["kernels", "broken torch"],
)
def test_a_wheel_names_the_platform_of_its_library(tmp_path, kernels_source, platform, libraries):
    pytest.importorskip("setuptools", minversion="77")
    for folder in ("hf_cascade", "ops", "csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "ops" / "kernels.py").write_text(kernels_source)
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith(f"-py3-none-{re.sub('[-.]', '_', platform)}.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == libraries
        (about,) = (name for name in archive.namelist() if name.endswith("/WHEEL"))
        is_pure = b"Root-Is-Purelib: true" in archive.read(about)
    assert is_pure == (not libraries)
