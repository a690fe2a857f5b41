"""The doctor tells the truth: about this machine, and about machines with one thing changed."""

import errno
import importlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from hf_cascade.ops import kernels
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import hf_cascade
from hf_cascade import versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

module = importlib.import_module("hf_cascade.doctor")

in_tested_environment = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the verdict is that of a machine without a GPU"
)


def backends(report):
    return {backend.name: backend for backend in report.backends}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU, its tools, and no library built yet."""
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(kernels, "_found", None)
    monkeypatch.setattr(kernels, "nvcc_release", lambda: "13.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda i=0: (properties.major, properties.minor)
    )
    monkeypatch.setattr(kernels, "library_name", lambda targets=(): "_C_cuda_test.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tools = {"nvcc", "ninja", "g++"}
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in tools else None)
    return SimpleNamespace(properties=properties, tools=tools, cache=tmp_path / "hf_cascade")


# This machine


@in_tested_environment
def test_what_the_tests_run_on_is_ready():
    report = hf_cascade.doctor()
    installed = {r.name: r.installed for r in report.requirements}
    assert installed["transformers"] == transformers.__version__
    assert Requirement(f"torch=={installed['torch']}").specifier.contains(torch.__version__)
    assert all(r.is_tested for r in report.requirements), "a version that nobody tested"
    assert report.is_ready
    assert report.verdict.startswith("ready")
    assert "\n" not in report.verdict
    assert report.devices[0].name == "cpu"
    assert backends(report)["torch/cpu"].is_usable
    assert not backends(report)["kernels/cuda"].is_usable
    assert backends(report)["kernels/cuda"].reason == kernels.status().reason


def test_a_report_is_a_value_that_scripts_and_people_can_read():
    report = hf_cascade.doctor()
    assert report == hf_cascade.doctor()
    assert json.loads(json.dumps(asdict(report)))["verdict"] == report.verdict
    text = str(report)
    assert text.splitlines()[-1] == report.verdict
    for backend in (*report.backends, report.compile):
        assert f"{backend.name} " in text
        assert backend.reason in text


def test_pip_asks_for_what_was_tested():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    asked = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    assert asked["transformers"] == versions.TESTED_TRANSFORMERS
    assert SpecifierSet(project["requires-python"]) == versions.TESTED_PYTHON
    # pip lets newer versions of torch be: they will probably do.
    assert set(asked["torch"]) < set(versions.TESTED_TORCH)
    assert {s.operator for s in set(versions.TESTED_TORCH) - set(asked["torch"])} == {"<"}


# Versions


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that a library has a version; None: it is missing."""
    truth = importlib.metadata.version

    def pretend(name, version):
        def pretended(distribution):
            if distribution != name:
                return truth(distribution)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", pretended)

    return pretend


@pytest.mark.parametrize(
    ("name", "version"),
    [("transformers", "5.24.0"), ("transformers", "5.16.9"), ("torch", "2.10.1"), ("torch", None)],
)
def test_a_version_that_cannot_work_is_named(pretend, name, version):
    pretend(name, version)
    report = hf_cascade.doctor()
    assert not report.is_ready
    assert report.verdict.startswith(f"not ready: {name} {version or 'is missing'}")
    assert "is needed" in report.verdict


def test_a_newer_torch_is_worth_a_note_only(pretend):
    pretend("torch", "2.99.0")
    report = hf_cascade.doctor()
    assert report.is_ready
    assert any("torch 2.99.0 is newer" in note for note in report.notes)
    assert not any("is newer" in note for note in module.doctor().notes if "2.99" not in note)


@pytest.mark.parametrize("broken", ["torch", "hf_cascade.patch"])
def test_a_broken_installation_is_a_verdict_not_a_traceback(monkeypatch, broken):
    truth = importlib.import_module

    def import_module(name, package=None):
        if name == broken:
            raise OSError("libsomething.so.12:\ncannot open shared object file")
        return truth(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    report = module.doctor()
    assert not report.is_ready
    assert report.verdict == (
        f"not ready: {broken} can't be imported: "
        "OSError: libsomething.so.12: cannot open shared object file"
    )
    assert str(report).endswith(report.verdict)
    assert bool(report.devices) == (broken != "torch")


# Kernels


def test_kernels_that_are_there_serve(gpu):
    gpu.cache.mkdir()
    (gpu.cache / "_C_cuda_test.so").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "load_library", lambda path: None)
        report = hf_cascade.doctor()
    assert backends(report)["kernels/cuda"].is_usable
    assert report.verdict.startswith("ready: CUDA kernels")
    assert [device.name for device in report.devices] == ["cpu", "cuda:0"]
    assert "Some GPU, compute capability 9.0, 80 GiB" in report.devices[1].description


def test_kernels_that_can_be_built_are_usable_and_the_wait_is_announced(gpu):
    report = hf_cascade.doctor()
    assert backends(report)["kernels/cuda"].is_usable
    assert "not built yet: the first generate on a GPU builds them" in report.verdict
    assert not gpu.cache.exists(), "the doctor built something"


@pytest.mark.parametrize("tool", ["nvcc", "ninja", "g++"])
def test_a_missing_tool_is_the_reason(gpu, tool):
    gpu.tools.remove(tool)
    report = hf_cascade.doctor()
    assert not backends(report)["kernels/cuda"].is_usable
    assert tool in backends(report)["kernels/cuda"].reason
    assert backends(report)["torch/cuda"].is_usable
    assert report.is_ready
    assert report.verdict.startswith("ready, without CUDA kernels")


def test_an_old_gpu_is_the_reason_even_where_a_library_is(gpu):
    gpu.cache.mkdir()
    (gpu.cache / "_C_cuda_test.so").touch()
    gpu.properties.major = 7
    assert "compute capability 8.0" in hf_cascade.doctor().verdict
    assert kernels.load().library is None


def test_an_nvcc_of_another_cuda_is_noted(gpu, monkeypatch):
    monkeypatch.setattr(kernels, "nvcc_release", lambda: "13.9")
    assert not hf_cascade.doctor().notes
    monkeypatch.setattr(kernels, "nvcc_release", lambda: "12.9")
    (note,) = hf_cascade.doctor().notes
    assert "nvcc is of CUDA 12.9" in note
    assert "torch was built with 13.0" in note


# Building at first use


@pytest.fixture
def builds(gpu, monkeypatch):
    """What was built for `gpu`: its targets."""
    builds = []

    def build(library, *, targets):
        builds.append(targets)
        time.sleep(0.1)  # for others to come
        library.touch()

    monkeypatch.setattr(kernels, "build", build)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    return builds


def test_status_knows_what_load_has_built(gpu, builds):
    assert kernels.status().library is None
    assert kernels.load().library == gpu.cache / "_C_cuda_test.so"
    assert kernels.status().library == gpu.cache / "_C_cuda_test.so"


def test_what_is_loaded_stays_when_the_sources_change(gpu, builds, monkeypatch):
    gpu.cache.mkdir()
    (gpu.cache / "_C_cuda_test.so").touch()
    assert kernels.status().library == gpu.cache / "_C_cuda_test.so"
    # A second library would define the ops again, which torch refuses.
    monkeypatch.setattr(kernels, "library_name", lambda targets=(): "_C_cuda_changed.so")
    assert kernels.load().library == gpu.cache / "_C_cuda_test.so"
    assert not builds


def test_threads_build_once(gpu, builds, monkeypatch):
    monkeypatch.setattr(kernels, "fcntl", None)  # it would part them too, where it is
    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(kernels.load) for _ in range(4)]]
    assert {status.library for status in found} == {gpu.cache / "_C_cuda_test.so"}
    assert len(builds) == 1


@pytest.mark.parametrize("has_built", [True, False])
def test_a_process_waits_for_another_that_builds_and_not_for_a_dead_one(
    gpu, builds, caplog, has_built
):
    gpu.cache.mkdir()
    code = (
        "import fcntl, sys\n"
        "with open(sys.argv[1], 'w') as lock:\n"
        "    fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(gpu.cache / "build.lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ThreadPoolExecutor(1) as pool, subprocess.Popen(command, **pipes) as builder:
        builder.stdout.readline()
        loading = pool.submit(kernels.load)
        deadline = time.monotonic() + 60
        while "another process" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "another process" in caplog.text
        assert not loading.done()
        assert not builds
        if has_built:
            (gpu.cache / "_C_cuda_test.so").touch()
        builder.kill()
    assert loading.result().library == gpu.cache / "_C_cuda_test.so"
    assert len(builds) == (not has_built)


def test_a_cache_that_cannot_be_locked_is_built_in(gpu, builds, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    assert kernels.load().library == gpu.cache / "_C_cuda_test.so"


@pytest.mark.parametrize(
    ("capabilities", "targets"),
    [
        ([(9, 0), (8, 6), (12, 0), (9, 0)], ("80", "90a")),
        ([(8, 0), (9, 0)], ("80", "90a")),
        ([(9, 0), (7, 5)], ("90a",)),
    ],
)
def test_a_build_is_for_every_gpu_that_kernels_serve(
    gpu, builds, monkeypatch, capabilities, targets
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: capabilities[i])
    assert kernels.load().library
    assert builds == [targets]


# Devices


def test_a_gpu_that_this_torch_does_not_serve_is_noted(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    notes = hf_cascade.doctor().notes
    assert notes == ("there is an NVIDIA driver, but this torch is built without CUDA",)


def test_what_torch_says_of_the_driver_is_noted(monkeypatch):
    def is_available():
        if is_available.told:
            return False
        is_available.told = True  # torch says it once
        warnings.warn("The NVIDIA driver is\ntoo old", UserWarning, stacklevel=2)
        return False

    is_available.told = False
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    notes = hf_cascade.doctor().notes
    assert notes.count("The NVIDIA driver is too old") == 1


# Compiling


@pytest.mark.parametrize(
    ("version", "tools", "reason"),
    [
        ("2.13.0", {"clang++"}, "/bin/clang++"),
        ("2.13.0", set(), "no C++ compiler"),
        ("2.10.1", {"g++"}, "or newer"),
    ],
)
def test_compiling_needs_a_compiler_and_a_new_torch(monkeypatch, version, tools, reason):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in tools else None)
    report = hf_cascade.doctor().compile
    assert report.is_usable == ("clang++" in reason)
    assert reason in report.reason


# Importing


def run_python(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_importing_the_package_does_not_wait_for_torch():
    assert run_python("import hf_cascade, sys; print('torch' in sys.modules)") == "False\n"


def test_every_public_name_is_there_whatever_was_imported_before():
    code = (
        "import hf_cascade, types, hf_cascade.patch, hf_cascade.doctor\n"
        "names = hf_cascade.__all__\n"
        "print(sorted(names) == sorted(hf_cascade._HOMES), set(names) <= set(dir(hf_cascade)))\n"
        "print([n for n in names if isinstance(getattr(hf_cascade, n), types.ModuleType)])\n"
    )
    assert run_python(code) == "True True\n[]\n"


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hf_cascade.nonsense
