"""Everything about the CUDA kernels that needs a GPU, in one call: are they right, are they fast.

    python benchmarks/gpu_check.py [--tests] [--bench quick|full [--peers]] [--sanitize]

Runs from a checkout without installing it, next to a library that was built elsewhere
(`python ops/kernels.py`). Results go to $OUT if set, else to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="tests/test_kernels*.py")
    parser.add_argument("--bench", choices=("quick", "full"), help="benchmarks/bench_attention.py")
    parser.add_argument("--peers", action="store_true", help="time FlashInfer in the same run")
    parser.add_argument("--sanitize", action="store_true", help="tests under compute-sanitizer")
    arguments = parser.parse_args()
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
    paths = [folder, str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": ":".join(paths), "PYTHONUNBUFFERED": "1"}
    tests = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    tests += ["-c", os.devnull]  # the repository's settings put its root on the path
    tests += [str(path) for path in sorted((ROOT / "tests").glob("test_kernels*.py"))]
    commands = []
    if arguments.tests:
        commands.append(tests)
    if arguments.bench:
        bench = ROOT / "benchmarks" / "bench_attention.py"
        commands.append([sys.executable, str(bench), "--grid", arguments.bench])
        commands[-1] += ["--peers"] if arguments.peers else []
    if arguments.sanitize:
        for tool in ("memcheck", "racecheck", "synccheck", "initcheck"):
            commands.append(["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *tests])
            commands[-1] += ["-k", "sanitized"]
    failed = [
        c for c in commands if subprocess.run(c, env=environment, cwd=ROOT / "tests").returncode
    ]
    for command in failed:
        print("FAILED:", " ".join(command))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
