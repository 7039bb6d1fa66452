"""`pip install ./python`, as a user would: nothing is fetched, nothing but PyTorch, CMake and a compiler is needed."""

import os
import subprocess
import sys

import pytest

from ranks import HERE, SETTINGS

SOURCES = os.path.join(os.path.dirname(os.path.dirname(HERE)), "python")
# Without the module of the build folder; compiled in less time, and slow.
PLAIN = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
PLAIN["CMAKE_ARGS"] = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"


def run(*command, env=PLAIN):
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    before = sorted(os.listdir(SOURCES))
    code, output = run(sys.executable, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", "--target", str(target), SOURCES)
    assert code == 0, output
    assert sorted(os.listdir(SOURCES)) == before, "building left something behind in the sources"
    return target


def test_the_package_works(installed):
    code, output = run(sys.executable, "-m", "maniple_torch.selftest", env=dict(PLAIN, PYTHONPATH=str(installed), **SETTINGS))
    assert code == 0 and "all is well" in output, output
    where = "import maniple_torch; print(maniple_torch.__file__)"
    code, output = run(sys.executable, "-c", where, env=dict(PLAIN, PYTHONPATH=str(installed)))
    assert output.strip().startswith(str(installed)), output


def test_pip_knows_it(installed):
    code, output = run(sys.executable, "-m", "pip", "list", "--path", str(installed), "--disable-pip-version-check")
    assert "maniple" in output, output
    assert any(name.startswith("libmaniple_") for name in os.listdir(installed / "maniple_torch" / "libexec" / "maniple"))
    for name in ("__init__.pyi", "py.typed"):
        assert (installed / "maniple_torch" / name).exists()


def test_without_pytorch_it_says_so(tmp_path):
    """In one line, and not by what CMake prints."""
    program = f"import sys; sys.path.insert(0, {SOURCES!r}); import build_package; build_package.build_wheel({str(tmp_path)!r})"
    code, output = run(sys.executable, "-S", "-c", program.replace("import sys;", "import sys; sys.executable = '/bin/false';"))
    assert code == 1 and "has no PyTorch" in output and "Traceback" not in output, output
