"""Finding, building and loading the CUDA kernels of csrc/.

One shared library per state of the sources: its name carries a key made of the sources, the flags,
the targets and the machine's architecture, so a stale library is never loaded. It is looked for
beside this file (made ahead of time, by setup.py or by `python ops/kernels.py`), then in the user's
cache; where neither has it, the first op that meets a CUDA tensor builds it into the cache with
nvcc and ninja, while other threads and processes that want it wait. Where that fails, the ops run
composed of torch operators, and `status().reason` says why.

The library uses torch's stable ABI only: built once, against any torch from 2.11 on, with or
without CUDA, it serves them all and every Python.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# As in csrc/cascade_attention.cu.
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16)
FLAGS = ("-std=c++17", "-O3", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000")
WARNINGS = ("-Wall", "-Wextra", "-Werror")
TARGETS = ("80", "90a")  # what a library made ahead of time runs on; newer GPUs take 80 as PTX

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """Whether CUDA kernels serve the ops: `library` is None where not, and `reason` says why.

    `is_buildable`: they are missing, and nothing is known to keep `load` from building them.
    """

    library: Path | None
    reason: str
    is_buildable: bool = False


def status() -> Status:
    """The kernels loaded by now; loads a library that is already built, builds none.

    Where another thread is building one it waits for it.
    """
    return _find(build_missing=False)


def load() -> Status:
    """Load the kernels, building them if they are missing. Tries once a process."""
    return _find(build_missing=True)


def serve(pool: torch.Tensor) -> bool:
    """Whether kernels, not torch operators, compute attention over this K or V pool."""
    _, _, page_size, head_dim = pool.shape
    fits = pool.dtype in DTYPES and head_dim in HEAD_DIMS and page_size in PAGE_SIZES
    return pool.is_cuda and fits and load().library is not None


def source_folder() -> Path:
    """csrc/, beside ops/ in the repository and inside it in a wheel."""
    here = Path(__file__).resolve().parent
    return next((p for p in (here / "csrc", here.parent / "csrc") if p.is_dir()), here / "csrc")


def nvcc_release() -> str | None:
    """The CUDA release, such as "13.0", of the nvcc that `build` takes; None if there is none."""
    try:
        command = [_find_nvcc(), "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except (RuntimeError, OSError):
        return None
    release = re.search(r"release (\d+\.\d+)", said)
    return release[1] if release else None


def library_name(targets: Sequence[str] = TARGETS) -> str:
    """Name of the library that the sources would give on this machine for these targets."""
    key = (FLAGS, HEAD_DIMS, tuple(targets), platform.machine())
    digest = hashlib.sha256(repr(key).encode())
    for source in sorted(source_folder().iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return f"_C_cuda_{digest.hexdigest()[:16]}.so"


def build(
    library: Path,
    *,
    targets: Sequence[str] = TARGETS,
    head_dims: Sequence[int] = HEAD_DIMS,
    jobs: int | None = None,
) -> str:
    """Compile csrc/ and link `library`; returns what the compilers had to say.

    Args:
        targets: compute capabilities without the dot, such as "80" and "90a".
        head_dims: compile the attention kernels of these only (the library then can't be linked
            unless they are all of HEAD_DIMS: use it to check that the sources compile).
        jobs: compilers at a time; None lets ninja choose.
    Raises:
        RuntimeError: a tool is missing, or the compiler's output.
    """
    nvcc, ninja = _find_nvcc(), _find_ninja()
    # Built aside and moved into place: nobody sees half a library, and an end of any kind leaves
    # nothing. Compilers that outlive an interrupt may still write there.
    with TemporaryDirectory(
        prefix=f"{library.stem}.", suffix=".build", dir=library.parent, ignore_cleanup_errors=True
    ) as folder:
        aside = Path(folder) / library.name
        rules = _ninja_file(aside.name, nvcc, targets, head_dims)
        aside.with_name("build.ninja").write_text(rules)
        command = [ninja, "-C", folder, *([] if jobs is None else ["-j", str(jobs)])]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            said = f"{result.stdout}{result.stderr}"
            raise RuntimeError(f"building the CUDA kernels failed:\n{said}")
        if aside.exists():  # not linked for some of HEAD_DIMS
            aside.replace(library)
    return result.stdout


_finding = Lock()  # one thread looks, builds and loads, and the others wait
_found: Status | None = None  # what is so until the process ends: a library, or why there is none


def _find(build_missing: bool) -> Status:
    global _found
    with _finding:
        if _found is not None:
            return _found
        status = _load(build_missing)
        if status.library or build_missing:
            _found = status
        return status


def _load(build_missing: bool) -> Status:
    try:
        if torch.version.cuda is None:
            return Status(None, "this torch is built without CUDA")
        if not torch.cuda.is_available():
            return Status(None, "torch finds no CUDA device")
        targets = _device_targets()
        if not source_folder().is_dir():
            return Status(None, f"the sources are missing from {source_folder()}")
        # Ahead of time for all targets; at first use for those of this machine.
        places = [
            Path(__file__).resolve().parent / library_name(),
            _cache_folder() / library_name(targets),
        ]
        library = next((place for place in places if place.is_file()), None)
        if library is None:
            if not build_missing:
                return _missing()
            library = places[-1]
            library.parent.mkdir(parents=True, exist_ok=True)
            with _alone(library.with_name("build.lock")):
                if not library.is_file():  # nobody built it meanwhile
                    _log.warning("building the CUDA kernels into %s: minutes, once", library)
                    build(library, targets=targets)
        torch.ops.load_library(str(library))
        return Status(library, f"loaded {library.name}")
    except (RuntimeError, OSError) as error:
        if build_missing:
            _log.warning("no CUDA kernels, torch operators serve instead: %s", error)
        return Status(None, str(error))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time holds the lock at `path`; the system takes it from one that died."""
    if fcntl is None:
        yield
        return
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("another process builds CUDA kernels: waiting until it unlocks %s", path)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # some network file systems have no locks: there every process builds
        try:
            yield
        finally:
            # Closing is not enough where another thread has forked: its child holds `lock` too.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def _missing() -> Status:
    """What `status` is where there is no library: can it be built?"""
    try:
        _find_nvcc()
        _find_ninja()
        _find_host_compiler()
    except RuntimeError as error:
        return Status(None, f"not built, and they can't be: {error}")
    return Status(None, "not built yet", is_buildable=True)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hf_cascade"


def _device_targets() -> tuple[str, ...]:
    """Of all visible devices that kernels can serve; the current one has to be among them."""
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise RuntimeError(
            f"the kernels need compute capability 8.0, the device has {major}.{minor}"
        )
    majors = {torch.cuda.get_device_capability(i)[0] for i in range(torch.cuda.device_count())}
    return tuple(sorted({"90a" if major == 9 else "80" for major in majors if major >= 8}))


def _find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    chosen = [f"{home}/bin/nvcc"] if home else []
    places = [*chosen, "nvcc", "/usr/local/cuda/bin/nvcc"]
    nvcc = next(filter(None, map(shutil.which, places)), None)
    if nvcc is None:
        raise RuntimeError("nvcc is not under CUDA_HOME, on PATH or in /usr/local/cuda")
    return nvcc


def _find_ninja() -> str:
    beside_python = Path(sysconfig.get_path("scripts")) / "ninja"
    ninja = shutil.which("ninja") or shutil.which(str(beside_python))
    if ninja is None:
        raise RuntimeError("ninja is not installed (pip install ninja)")
    return ninja


def _find_host_compiler() -> str:
    compiler = shutil.which(os.environ.get("NVCC_CCBIN", "g++"))
    if compiler is None:
        raise RuntimeError("nvcc finds no C++ compiler (g++ is not on PATH)")
    return compiler


def _ninja_file(library: str, nvcc: str, targets: Sequence[str], head_dims: Sequence[int]) -> str:
    sources, torch_folder = source_folder(), Path(torch.__file__).parent
    includes = f"-isystem {torch_folder / 'include'}"
    flags = " ".join(FLAGS)
    # PTX of the oldest target is what GPUs newer than all of them compile at load.
    gencode = " ".join(
        f"-gencode=arch=compute_{t},code=[sm_{t}{',compute_80' if t == '80' else ''}]"
        for t in targets
    )
    warnings = "-Werror=all-warnings " + " ".join(f"-Xcompiler={w}" for w in WARNINGS)
    lines = [
        "rule nvcc",
        f"  command = {nvcc} {flags} {gencode} {warnings} -Xcompiler=-fPIC {includes} "
        "$defines -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "rule stub",
        "  command = echo | c++ -shared -x c - -o $out -Wl,-soname,libtorch_cuda.so",
        "rule link",
        f"  command = {nvcc} -shared $in -o $out -L$torch_cuda -L{torch_folder / 'lib'} "
        "-Xlinker --no-as-needed -ltorch_cpu -ltorch_cuda",
    ]
    objects = []
    for source in sorted(sources.glob("*.cu")):
        if source.stem == "attention_instance":
            for head_dim in head_dims:
                objects.append(f"{source.stem}_{head_dim}.o")
                lines += [
                    f"build {objects[-1]}: nvcc {source}",
                    f"  defines = -DHF_CASCADE_HEAD_DIM={head_dim}",
                ]
        else:
            objects.append(f"{source.stem}.o")
            lines.append(f"build {objects[-1]}: nvcc {source}")
    objects.append("bindings.o")
    lines.append(f"build bindings.o: nvcc {sources / 'bindings.cpp'}")
    # A torch without CUDA has no libtorch_cuda to link against: the name is all the linker needs.
    torch_cuda, stub = torch_folder / "lib", ""
    if not (torch_cuda / "libtorch_cuda.so").exists():
        torch_cuda, stub = Path(), " | libtorch_cuda.so"
        lines.append("build libtorch_cuda.so: stub")
    lines += [f"build {library}: link {' '.join(objects)}{stub}", f"  torch_cuda = {torch_cuda}"]
    complete = set(head_dims) == set(HEAD_DIMS)
    lines.append(f"default {library if complete else ' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _main() -> None:
    parser = argparse.ArgumentParser(description="Build the CUDA kernels beside this file.")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--jobs", type=int)
    arguments = parser.parse_args()
    library = Path(__file__).resolve().parent / library_name(arguments.targets)
    build(library, targets=arguments.targets, jobs=arguments.jobs)
    print(library)


if __name__ == "__main__":
    _main()
