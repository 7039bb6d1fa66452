"""The programs that introductions to torch.distributed show, under each launcher."""

import concurrent.futures
import os
import sys

import pytest

from ranks import HERE, free_port, launch

MANIPLE = os.environ.get("PROGRAM_UNDER_TEST", "maniple")
LAUNCHERS = {
    "torchrun": lambda: [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                         # Without these, PyTorch 1.13's fails under Python 3.11.
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


# Every Python program of five introductions to distributed training, completed where they leave a gap, with
# backend="maniple". "done": how many ranks print it.
#
#   introduction                              its program                                          here
#   Distributed Computing with PyTorch        the call of torch.multiprocessing.spawn              spawn_with_config.py,
#                                             its last line
#   Distributed training in pytorch           send and recv between two ranks                      send_and_receive.py
#                                             init_process with torch.multiprocessing.Process      synchronous_sgd.py
#                                             sync_gradients, sync_hyperparameters                 synchronous_sgd.py
#   Distributed training with PyTorch         init_process_group(backend, rank, world_size)        synchronous_sgd.py,
#                                             init_process
#                                             train(rank, a, h) by mp.spawn, or alone              spawn_with_config.py
#                                             DistributedSampler and DataLoader; DataParallel      spawn_with_config.py
#   Learning parallelism in pytorch           main_worker(gpu, ngpus_per_node, args): mp.spawn,    main_worker.py
#                                             seeds, DDP, resuming from a checkpoint
#   Distributed Training in Deep Learning     ranks of N nodes with G processes; DDP on them       nodes.py
#                                             (it has no program: its figures and steps are one)
PROGRAMS = ("send_and_receive.py", "synchronous_sgd.py", "spawn_with_config.py", "main_worker.py", "nodes.py")


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_program(launcher, name, tmp_path):
    extra = ["--resume", str(tmp_path / "checkpoint.pt")] if name == "main_worker.py" else []
    output = launch(command_of(launcher) + [program(name)] + extra)
    assert output.count("is done") == 2, output


@pytest.mark.parametrize("name,arguments,ranks", [
    ("send_and_receive.py", [], 2),
    ("synchronous_sgd.py", ["--spawn"], 2),
    ("synchronous_sgd.py", [], 2),  # forked processes
    ("spawn_with_config.py", [], 2),
    ("spawn_with_config.py", ["file://FOLDER/store"], 2),
    ("spawn_with_config.py", ["alone"], 1),
    ("nodes.py", ["--nodes", "2", "--processes", "2"], 4),
])
def test_program_with_mp_spawn(name, arguments, ranks, tmp_path):
    output = launch([sys.executable, program(name)] + [each.replace("FOLDER", str(tmp_path)) for each in arguments])
    assert output.count("is done") == ranks, output


def test_training_resumes_from_a_checkpoint(tmp_path):
    command = [sys.executable, program("main_worker.py"), "--resume", str(tmp_path / "checkpoint.pt"), "--epochs"]
    assert launch(command + ["2"]).count("is done, from epoch 0 to 2") == 2
    assert launch(command + ["6"]).count("is done, from epoch 2 to 6") == 2


def test_two_nodes_of_two_processes(tmp_path):
    """Two launchers, as on two machines, with one secret."""
    secret = tmp_path / "secret"
    secret.write_text(os.urandom(32).hex() + "\n")
    secret.chmod(0o600)
    master = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor() as threads:
        nodes = [threads.submit(launch, [MANIPLE, "run", "--nnodes", "2", "--node-rank", str(n), "--master", master, "-n", "2",
                                         sys.executable, program("nodes.py")], {"MANIPLE_SECRET_FILE": str(secret)}) for n in range(2)]
        output = "".join(node.result() for node in nodes)
    assert output.count("is done") == 4, output


def test_selftest():
    assert "all is well" in launch([sys.executable, "-m", "maniple_torch.selftest", "--ranks", "2"])
