"""Sources of the kernels that run on the CPU, for tests without a GPU (host_cuda.h)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hf_cascade.ops import kernels

COMPILER = shutil.which("c++") or shutil.which("g++")


def _find_cuda_headers() -> Path | None:
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    if nvcc := shutil.which("nvcc"):
        homes.append(Path(nvcc).resolve().parents[1])
    return next((h / "include" for h in homes if (h / "include/cuda_fp16.h").is_file()), None)


CUDA_HEADERS = _find_cuda_headers()

can_compile = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine"),
    pytest.mark.skipif(sys.platform != "linux", reason="fibers are those of Linux"),
]


def compile_host(source: str, folder: Path) -> ctypes.CDLL:
    """A library of tests/<source>, which includes csrc/, built in `folder`."""
    tests = Path(__file__).parent
    for header in (*kernels.source_folder().iterdir(), tests / "host_cuda.h"):
        if header.suffix in (".cuh", ".h"):
            shutil.copy(header, folder)
    (folder / "ptx.cuh").write_text("")  # beside those who include it
    library = folder / f"{Path(source).stem}.so"
    flags = ["-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", f"-I{folder}"]
    if CUDA_HEADERS:
        flags += ["-isystem", str(CUDA_HEADERS)]
    command = [str(COMPILER), *flags, str(tests / source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))
