"""The programs that introductions to torch.distributed show, under each launcher."""

import os
import sys

import pytest

from ranks import HERE, free_port, launch

MANIPLE = os.environ.get("PROGRAM_UNDER_TEST", "maniple")
LAUNCHERS = {
    "torchrun": lambda: [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                         # Without these, that of PyTorch 1.13 fails under Python 3.11.
                         "--redirects=1", "--tee=1", f"--master_port={free_port()}"],
    "maniple run": lambda: [MANIPLE, "run", "-n", "2", sys.executable],
}


def command_of(launcher):
    """Skips where torchrun itself can start nothing: Debian 13's PyTorch has no libuv, and its torchrun insists on it."""
    if launcher == "torchrun":
        try:
            launch(LAUNCHERS[launcher]() + ["--no_python", "true"])
        except AssertionError as error:
            if "without libuv support" not in str(error):
                raise
            pytest.skip("the torchrun of this PyTorch needs libuv, and PyTorch was built without")
    return LAUNCHERS[launcher]()


def program(name):
    return os.path.join(HERE, "programs", name)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_send_and_receive(launcher):
    output = launch(command_of(launcher) + [program("send_and_receive.py")])
    assert "rank 1 has received [1.0, -1.0]" in output, output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_data_parallel(launcher):
    output = launch(command_of(launcher) + [program("data_parallel.py")])
    assert output.count("has trained") == 2, output


def test_data_parallel_with_spawn_over_tcp():
    output = launch([sys.executable, program("data_parallel.py"), "--spawn", f"tcp://127.0.0.1:{free_port()}"])
    assert output.count("has trained") == 2, output


def test_data_parallel_with_spawn_over_a_file(tmp_path):
    output = launch([sys.executable, program("data_parallel.py"), "--spawn", f"file://{tmp_path}/store", "--ranks", "3"])
    assert output.count("has trained") == 3, output


def test_synchronous_sgd_in_forked_processes():
    output = launch([sys.executable, program("synchronous_sgd.py"), str(free_port())])
    assert output.count("agrees") == 2, output


def test_selftest():
    assert "all is well" in launch([sys.executable, "-m", "maniple_torch.selftest", "--ranks", "2"])
