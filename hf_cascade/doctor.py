"""`doctor`: what hf_cascade finds on this machine, and whether it can work with it.

It imports torch and transformers only when called, and survives both being broken.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import warnings
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .versions import (
    LOWEST_TORCH_TO_COMPILE,
    TESTED_PYTHON,
    TESTED_TORCH,
    TESTED_TRANSFORMERS,
)


@dataclass(frozen=True)
class Requirement:
    """A program or library that hf_cascade stands on.

    Attributes:
        installed: its version, None if it is missing.
        tested: the versions that hf_cascade was tested with, as pip writes a range.
        is_tested: whether `installed` is one of them.
    """

    name: str
    installed: str | None
    tested: str
    is_tested: bool


@dataclass(frozen=True)
class Device:
    """A device that torch can use, by torch's name for it."""

    name: str
    description: str


@dataclass(frozen=True)
class Backend:
    """A way to compute, named as in `GenerateStats.backend`; `reason` says why or why not."""

    name: str
    is_usable: bool
    reason: str


@dataclass(frozen=True)
class Report:
    """What `doctor` found.

    Attributes:
        version: that of hf_cascade, None if it is not installed.
        requirements: python, torch and transformers.
        devices: what torch can compute on, the CPU first; empty if torch can't be imported.
        backends: what can compute attention, the fastest first.
        compile: whether `patch(compile=True)` can be used.
        notes: what may go wrong all the same, a line each.
        is_ready: `patch` and `generate` can work here.
        verdict: all of it in one line.
    """

    version: str | None
    requirements: tuple[Requirement, ...]
    devices: tuple[Device, ...]
    backends: tuple[Backend, ...]
    compile: Backend
    notes: tuple[str, ...]
    is_ready: bool
    verdict: str

    def __str__(self) -> str:
        rows = ((r.name, r.installed or "missing", r.tested) for r in self.requirements)
        usable = [
            (backend.name, "yes" if backend.is_usable else "no", backend.reason)
            for backend in (*self.backends, self.compile)
        ]
        return "\n".join(
            [
                f"hf_cascade {self.version or 'is not installed'}",
                *_table("needs", "installed", "tested with", rows=rows),
                *_table("device", "", rows=((d.name, d.description) for d in self.devices)),
                *_table("computes with", "usable", "because", rows=usable),
                "",
                *(f"note: {note}" for note in self.notes),
                self.verdict,
            ]
        )


def doctor() -> Report:
    """Look at versions, devices and backends; builds and downloads nothing.

    Returns:
        A Report; print it, or read its `verdict`, one line.
    """
    requirements = (
        _requirement("python", platform.python_version(), TESTED_PYTHON),
        _requirement("torch", _installed("torch"), TESTED_TORCH),
        _requirement("transformers", _installed("transformers"), TESTED_TRANSFORMERS),
    )
    broken = [
        f"{r.name} {r.installed or 'is missing'}, {r.tested} is needed"
        for r in requirements
        if not r.is_tested and not _is_newer_torch(r)
    ]
    notes = [
        f"torch {r.installed} is newer than those that were tested ({r.tested})"
        for r in requirements
        if _is_newer_torch(r)
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch warns of drivers that are too old, for example
        torch = _imported("torch", broken)
        devices = () if torch is None else _devices(torch)
    notes += dict.fromkeys(_one_line(w.message) for w in caught if w.category is UserWarning)
    # Other versions of transformers may lack what `patch` imports: ask only the tested ones.
    if not broken:
        _imported("hf_cascade.patch", broken)
    backends = () if torch is None else _backends(torch)
    notes += () if torch is None else _misfits(torch)
    return Report(
        version=_installed("hf-cascade"),
        requirements=requirements,
        devices=devices,
        backends=backends,
        compile=_compile(torch),
        notes=tuple(notes),
        is_ready=not broken,
        verdict=f"not ready: {'; '.join(broken)}" if broken else _verdict(backends),
    )


def _requirement(name: str, installed: str | None, tested: SpecifierSet) -> Requirement:
    is_tested = installed is not None and tested.contains(installed, prereleases=True)
    # Lower bound first, as people write it.
    tested_range = ",".join(sorted(map(str, tested), reverse=True))
    return Requirement(name, installed, tested_range, is_tested)


def _is_newer_torch(requirement: Requirement) -> bool:
    """Whether this is a torch that will probably do: hf_cascade uses its public interface."""
    if requirement.name != "torch" or requirement.installed is None or requirement.is_tested:
        return False
    version = Version(requirement.installed)
    return all(version >= Version(s.version) for s in TESTED_TORCH if s.operator == ">=")


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _imported(module: str, broken: list[str]) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever a broken installation raises
        broken.append(f"{module} can't be imported: {type(error).__name__}: {_one_line(error)}")
        return None


def _devices(torch: Any) -> tuple[Device, ...]:
    cpu = Device("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads in torch")
    if not torch.cuda.is_available():
        return (cpu,)
    return cpu, *(_cuda_device(torch, index) for index in range(torch.cuda.device_count()))


def _cuda_device(torch: Any, index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        f"cuda:{index}",
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda} in torch",
    )


def _backends(torch: Any) -> tuple[Backend, ...]:
    from .ops import kernels

    status = kernels.status()
    reason = status.reason
    if status.is_buildable:
        reason += ": the first generate on a GPU builds them, which takes minutes, once"
    is_usable = status.library is not None or status.is_buildable
    has_cuda = torch.cuda.is_available()
    head_dims = ", ".join(map(str, kernels.HEAD_DIMS))
    return (
        Backend("kernels/cuda", is_usable, reason),
        Backend(
            "torch/cuda",
            has_cuda,
            f"torch operators, for what kernels don't serve: float32, head_dim not in {head_dims}"
            if has_cuda
            else "torch finds no CUDA device",
        ),
        Backend("torch/cpu", True, "torch operators; sharing pays from about 4 samples on"),
    )


def _misfits(torch: Any) -> tuple[str, ...]:
    """Notes on what there is of CUDA that does not fit this torch."""
    from .ops import kernels

    if torch.version.cuda is None:
        note = "there is an NVIDIA driver, but this torch is built without CUDA"
        return (note,) if shutil.which("nvidia-smi") else ()
    release = kernels.nvcc_release()
    if release is None or Version(release).major == Version(torch.version.cuda).major:
        return ()
    return (
        f"nvcc is of CUDA {release}, but torch was built with {torch.version.cuda}: kernels that it"
        " builds may not work (set CUDA_HOME to name another)",
    )


def _compile(torch: Any) -> Backend:
    name = "compile=True"
    if torch is None:
        return Backend(name, False, "torch can't be imported")
    if Version(torch.__version__) < LOWEST_TORCH_TO_COMPILE:
        return Backend(name, False, f"it needs torch {LOWEST_TORCH_TO_COMPILE} or newer")
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        return Backend(name, False, "triton is not installed")
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        return Backend(name, False, f"no C++ compiler ({', '.join(compilers)}) is on PATH")
    return Backend(name, True, f"torch.compile finds {compiler}")


def _verdict(backends: tuple[Backend, ...]) -> str:
    served, on_cuda, _ = backends
    if served.is_usable:
        return f"ready: CUDA kernels for float16 and bfloat16 ({served.reason})"
    if on_cuda.is_usable:
        return f"ready, without CUDA kernels: torch operators serve ({served.reason})"
    return f"ready, on the CPU ({served.reason})"


def _table(*header: str, rows: Any) -> list[str]:
    """An empty line, the header, and the rows, in aligned columns."""
    lines = [header, *((f"  {name}", *others) for name, *others in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in lines)
    return ["", *("  ".join(line).rstrip() for line in padded)]


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
