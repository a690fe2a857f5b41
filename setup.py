"""Packaging: pyproject.toml says what; this adds the CUDA sources and, where torch can use them,
the compiled kernels. torch is not a build requirement (an isolated build would fetch gigabytes):
`pip install --no-build-isolation .` compiles ahead of time, an isolated build leaves that to the
first use."""

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def compile_kernels(folder: Path) -> None:
    """Put the library into `folder`, if this Python has a torch with CUDA and there is an nvcc."""
    try:
        spec = importlib.util.spec_from_file_location("kernels", ROOT / "ops" / "kernels.py")
        kernels = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = kernels  # its dataclass looks for its module there
        spec.loader.exec_module(kernels)
    except (ImportError, OSError) as error:  # no torch, or one whose libraries can't be loaded
        return print(f"hf_cascade: CUDA kernels are left to the first use ({error})")
    if kernels.torch.version.cuda is None:
        return print("hf_cascade: no CUDA kernels, torch is built without CUDA")
    library = folder / kernels.library_name()
    if library.exists():
        return None
    try:
        kernels.build(library)
    except RuntimeError as error:
        print(f"hf_cascade: CUDA kernels are left to the first use ({error})")


class BuildWithKernels(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return compile_kernels(ROOT / "ops")
        ops = Path(self.build_lib) / "hf_cascade" / "ops"
        shutil.copytree(ROOT / "csrc", ops / "csrc", dirs_exist_ok=True)
        compile_kernels(ops)
        if any(ops.glob("*.so")):
            self.distribution.has_ext_modules = lambda: True


class WheelWithKernels(bdist_wheel):
    """For one platform if a library is in it, and even then for every Python."""

    def run_command(self, command):
        super().run_command(command)
        if command == "build":  # only now is it known
            self.root_is_pure = not self.distribution.has_ext_modules()

    def get_tag(self):
        _, _, platform = super().get_tag()
        return self.python_tag, "none", platform


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
