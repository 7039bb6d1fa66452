"""Prints what a C++ module needs to know about this interpreter and its PyTorch, as lines NAME=VALUE; lists are divided by "|"."""

import os
import sys
import sysconfig

try:
    import torch
    import torch.distributed
except ImportError as error:
    sys.exit(f"{sys.executable}: {error}")
if not torch.distributed.is_available():
    sys.exit(f"{sys.executable}: its PyTorch was built without torch.distributed")

version = tuple(int(part) for part in torch.__version__.split(".")[:2])
if version < (1, 13):
    sys.exit(f"{sys.executable}: PyTorch {torch.__version__} is older than 1.13")

# Next to a wheel's module, or Debian's place, which the compiler searches, but not for the C++ API.
roots = [os.path.join(os.path.dirname(torch.__file__), "include"), "/usr/include"]
includes = [roots[0], os.path.join(roots[0], "torch/csrc/api/include"), os.path.join(roots[1], "torch/csrc/api/include")]
includes = [path for path in includes if os.path.isdir(path)] + [sysconfig.get_paths()["include"]]
for header, package in (("torch/csrc/distributed/c10d/Store.hpp", "libtorch-dev"), ("pybind11/pybind11.h", "pybind11-dev")):
    if not any(os.path.exists(os.path.join(path, header)) for path in roots):
        sys.exit(f"{sys.executable}: {header} is missing; Debian has it in {package}")
if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    sys.exit(f"{sys.executable}: Python.h is missing; Debian has it in python3-dev")

definitions = [f"_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
# pybind11 shares types between modules that were built alike; PyTorch says how it was built.
for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
    value = getattr(torch._C, f"_PYBIND11_{name}", None)
    if value is not None:
        definitions.append(f'PYBIND11_{name}="{value}"')

print(f"version={sys.version_info[0]}.{sys.version_info[1]}")
print(f"suffix={sysconfig.get_config_var('EXT_SUFFIX')}")
print(f"torch={torch.__version__.split('+')[0]}")
print(f"cuda={torch.version.cuda or ''}")
print(f"torch_lib={os.path.join(os.path.dirname(torch.__file__), 'lib')}")
print("includes=" + "|".join(includes))
print("definitions=" + "|".join(definitions))
