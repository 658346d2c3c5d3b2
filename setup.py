"""A wheel with the C library in it: `make wheel`. All else is in pyproject.toml.

Without SPECROUTER_LIBRARY=1 a wheel is for every platform, and compiles the library on first use.
"""

import os
import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_KERNELS = "modelpool/kernels"


class WithLibrary(build_py):
    def run(self) -> None:
        super().run()
        own = runpy.run_path(f"{_KERNELS}/compiler.py")
        folder = Path(self.build_lib) / _KERNELS
        own["compile_library"](own["find_compiler"](), folder)
        (folder / own["NAME"]).chmod(0o755)


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", platform


class OnePlatform(Distribution):
    def has_ext_modules(self) -> bool:
        return True


if os.environ.get("SPECROUTER_LIBRARY") == "1":
    commands = {"build_py": WithLibrary, "bdist_wheel": AnyPython}
    setup(distclass=OnePlatform, cmdclass=commands)
else:
    setup()
