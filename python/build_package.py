"""What `pip install ./python` runs (PEP 517): builds libmaniple.so and the module for the PyTorch of this interpreter with CMake, and packs
both into a wheel. Needs no other Python package, and no network. CMAKE_ARGS in the environment holds more arguments for CMake."""

import base64
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
NAME = "maniple_torch"


class UnsupportedOperation(Exception):
    """PEP 517: a package that cannot be built this way."""


def fail(reason):
    sys.exit(f"{NAME}: {reason}")


def version():
    with open(os.path.join(ROOT, "include", "maniple", "version.h")) as header:
        return re.search(r'VERSION_STRING "([^"]+)"', header.read()).group(1)


def wheel_name():
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    return f"{NAME}-{version()}-{python}-{python}-{platform}.whl"


def environment_with_torch():
    """pip hides what is installed from builds, unless --no-build-isolation is given. The module is compiled for the PyTorch that
    is installed, and not for one that pip would fetch."""
    seen = dict(os.environ)
    hidden = {key: value for key, value in seen.items() if key not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    reason = ""
    for environment in (seen, hidden):
        tried = subprocess.run([sys.executable, "-c", "import torch"], env=environment, stderr=subprocess.PIPE, text=True)
        if tried.returncode == 0:
            return environment
        reason = "".join(f" ({line})" for line in tried.stderr.strip().splitlines()[-1:])
    return fail(f"{sys.executable} has no PyTorch{reason}; install that first")


def build(folder):
    """Leaves the package in a folder of that name in `folder`."""
    if not os.path.exists(os.path.join(ROOT, "CMakeLists.txt")):
        fail("the sources of Maniple are not beside this folder: install from a clone, with pip 21.3 or later")
    if shutil.which("cmake") is None:
        fail("cmake is not there; it builds the module (Debian: apt-get install cmake ninja-build g++)")
    environment = environment_with_torch()
    compiled, staging = os.path.join(folder, "cmake"), os.path.join(folder, "staging")
    # ccache finds what it compiled before in a folder of another name; precompiled headers would keep it from that.
    environment = {"CCACHE_BASEDIR": folder, "CCACHE_NOHASHDIR": "1", **environment}

    def cmake(*arguments):
        if subprocess.run(["cmake", *arguments], env=environment).returncode != 0:
            fail("CMake failed, see above; docs/python.md says what it needs")

    cmake("-S", ROOT, "-B", compiled, *(["-G", "Ninja"] if shutil.which("ninja") else []), "-DCMAKE_BUILD_TYPE=Release", "-DMANIPLE_TRAIN=OFF",
          "-DMANIPLE_TESTS=OFF", "-DMANIPLE_EXAMPLES=OFF", "-DMANIPLE_BENCH=OFF", "-DMANIPLE_PYTHON=ON",
          f"-DMANIPLE_PYTHON_EXECUTABLE={sys.executable}", "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON",
          *shlex.split(environment.get("CMAKE_ARGS", "")))
    cmake("--build", compiled, "--target", NAME, "maniple_plugins", "--parallel", str(os.cpu_count()))
    cmake("--install", compiled, "--component", "python", "--prefix", staging)

    # The module finds the library beside itself, and the library its plugins in libexec/maniple beside it.
    package = os.path.join(folder, NAME)
    os.makedirs(os.path.join(package, "libexec", "maniple"))
    for place, _, files in os.walk(staging):
        for name in files:
            path = os.path.join(place, name)
            if os.path.islink(path):
                continue
            if name.startswith("libmaniple_"):
                name = os.path.join("libexec", "maniple", name)
            name = re.sub(r"^(libmaniple\.so\.\d+\.\d+).*", r"\1", name)  # what the module asks for
            shutil.copy2(path, os.path.join(package, name))
    return package


def metadata():
    information = f"{NAME}-{version()}.dist-info"
    return {
        f"{information}/METADATA":
            f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version()}\nSummary: Maniple as a backend of torch.distributed\n"
            "License: Apache-2.0\nRequires-Python: >=3.8\n",
        f"{information}/WHEEL":
            f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\nTag: {'-'.join(wheel_name()[:-4].split('-')[2:])}\n",
    }


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    record = f"{NAME}-{version()}.dist-info/RECORD"
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        package = build(folder)
        with zipfile.ZipFile(os.path.join(wheel_directory, wheel_name()), "w", zipfile.ZIP_DEFLATED) as wheel:

            def add(name, content):
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                lines.append(f"{name},sha256={digest},{len(content)}")
                wheel.writestr(name, content)

            for place, _, files in os.walk(package):
                for file in sorted(files):
                    path = os.path.join(place, file)
                    with open(path, "rb") as content:
                        add(os.path.relpath(path, folder).replace(os.sep, "/"), content.read())
            for name, text in metadata().items():
                add(name, text.encode())
            wheel.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    return wheel_name()


def build_sdist(sdist_directory, config_settings=None):
    raise UnsupportedOperation("the package is built from a clone of Maniple: pip install ./python")
