"""Everything about the CUDA kernels that needs a GPU, in one call: are they right, are they fast.

    python benchmarks/gpu_check.py [--tests] [--bench quick|full [--peers]] [--dram]
                                    [--sanitize [TOOL ...]]

Runs from a checkout without installing it, next to a library that was built elsewhere
(`python ops/kernels.py`). Results go to $OUT if set, else to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIRE_KERNELS = """
from hf_cascade.ops import kernels
status = kernels.load()
if not status.library:
    raise SystemExit(f"no kernels to check: {status.reason}")
"""
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="tests/test_kernels*.py")
    parser.add_argument("--bench", choices=("quick", "full"), help="benchmarks/bench_attention.py")
    parser.add_argument("--peers", action="store_true", help="time FlashInfer in the same run")
    parser.add_argument("--dram", action="store_true", help="benchmarks/dram_bytes.py, under ncu")
    parser.add_argument(
        "--sanitize",
        nargs="*",
        choices=SANITIZERS,
        metavar="TOOL",
        help=f"small tests under compute-sanitizer: {', '.join(SANITIZERS)}, or all of them",
    )
    arguments = parser.parse_args()
    if not (arguments.tests or arguments.bench or arguments.dram or arguments.sanitize is not None):
        parser.error("nothing to do: give --tests, --bench, --dram or --sanitize")
    if arguments.peers and not arguments.bench:
        parser.error("--peers goes with --bench")
    if arguments.sanitize is not None and not shutil.which("compute-sanitizer"):
        parser.error("--sanitize needs compute-sanitizer, of the CUDA toolkit, on PATH")
    if arguments.dram and not shutil.which("ncu"):
        parser.error("--dram needs ncu, of the CUDA toolkit, on PATH")
    with tempfile.TemporaryDirectory() as folder:
        link_package(Path(folder) / "hf_cascade")
        return run_checks(arguments, folder)


def link_package(package: Path) -> None:
    """hf_cascade.ops is the folder ops/: a link in a scratch package gives it that name."""
    package.mkdir()
    for source in (ROOT / "hf_cascade").glob("*"):
        (package / source.name).symlink_to(source)
    (package / "ops").symlink_to(ROOT / "ops")
    (package / "csrc").symlink_to(ROOT / "csrc")


def run_checks(arguments: argparse.Namespace, folder: str) -> int:
    """Run what was asked for with the package in `folder`; 1 if anything failed, else 0."""
    # The root is there for `benchmarks`: last of ours, or its hf_cascade would win.
    paths = [folder, str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": ":".join(paths), "PYTHONUNBUFFERED": "1"}
    if "OUT" in environment:  # what runs does so in another folder
        environment["OUT"] = os.path.abspath(environment["OUT"])
    # Without kernels every test would be skipped, which looks like success.
    # (Not from the checkout's root: there the folder hf_cascade would win over the linked package.)
    found = subprocess.run([sys.executable, "-c", REQUIRE_KERNELS], env=environment, cwd=folder)
    if found.returncode:
        return 1
    tests = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    tests += ["-c", os.devnull]  # the repository's settings put its root on the path
    tests += [str(path) for path in sorted((ROOT / "tests").glob("test_kernels*.py"))]
    # With PyTorch's allocator between them, a sanitizer would not see where a tensor ends.
    uncached = environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    runs = []
    if arguments.tests:
        runs.append((tests, environment))
    if arguments.bench:
        bench = ROOT / "benchmarks" / "bench_attention.py"
        command = [sys.executable, str(bench), "--grid", arguments.bench]
        runs.append((command + ["--peers"] * arguments.peers, environment))
    if arguments.dram:
        runs.append(([sys.executable, "-m", "benchmarks.dram_bytes"], environment))
    if arguments.sanitize is not None:
        for tool in arguments.sanitize or SANITIZERS:
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *tests]
            runs.append(([*command, "-k", "sanitized"], uncached))
    failed = [c for c, env in runs if subprocess.run(c, env=env, cwd=ROOT / "tests").returncode]
    for command in failed:
        print("FAILED:", " ".join(command))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
