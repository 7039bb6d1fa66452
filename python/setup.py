"""pip install --no-build-isolation ./python: builds libmaniple.so and the module for the PyTorch of this interpreter, with CMake.

Without build isolation, as the module is compiled for the PyTorch that is installed, and not for one that pip would fetch."""

import os
import re
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)


class CMakeBuild(build_ext):
    def run(self):
        if shutil.which("cmake") is None:
            sys.exit("maniple_torch: cmake is not there; it builds the module (Debian: apt-get install cmake ninja-build g++)")
        build = os.path.abspath(os.path.join(self.build_temp, "cmake"))
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        subprocess.run(["cmake", "-S", ROOT, "-B", build, *generator, "-DCMAKE_BUILD_TYPE=Release", "-DMANIPLE_TRAIN=OFF",
                        "-DMANIPLE_TESTS=OFF", "-DMANIPLE_EXAMPLES=OFF", "-DMANIPLE_BENCH=OFF", "-DMANIPLE_PYTHON=ON",
                        f"-DMANIPLE_PYTHON_EXECUTABLE={sys.executable}"], check=True)
        subprocess.run(["cmake", "--build", build, "--target", "maniple_torch", "maniple_plugins", "--parallel"], check=True)
        # The module finds the library beside itself, and the library its plugins in libexec/maniple beside it.
        target = os.path.join(os.path.abspath(self.build_lib), "maniple_torch")
        if self.inplace:
            target = os.path.join(HERE, "maniple_torch")
        staging = os.path.join(build, "staging")
        shutil.rmtree(staging, ignore_errors=True)
        subprocess.run(["cmake", "--install", build, "--component", "python", "--prefix", staging], check=True)
        os.makedirs(target, exist_ok=True)
        for folder, _, files in os.walk(staging):
            for name in files:
                path = os.path.join(folder, name)
                if name.startswith("libmaniple_"):
                    os.makedirs(os.path.join(target, "libexec", "maniple"), exist_ok=True)
                    shutil.copy2(path, os.path.join(target, "libexec", "maniple", name))
                elif name.startswith("_shim") or name.startswith("libmaniple.so"):
                    if not os.path.islink(path):
                        name = re.sub(r"^(libmaniple\.so\.\d+\.\d+).*", r"\1", name)
                        shutil.copy2(path, os.path.join(target, name))


with open(os.path.join(ROOT, "include", "maniple", "version.h")) as header:
    version = re.search(r'VERSION_STRING "([^"]+)"', header.read()).group(1)

setup(
    name="maniple_torch",
    version=version,
    description="Maniple as a backend of torch.distributed",
    packages=["maniple_torch"],
    package_data={"maniple_torch": ["*.pyi", "py.typed"]},
    ext_modules=[Extension("maniple_torch._shim", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    python_requires=">=3.8",
    zip_safe=False,
)
