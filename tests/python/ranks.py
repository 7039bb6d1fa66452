"""Runs programs as ranks: real processes, each with a limit of time, ended together."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = 240.0
# Debian 13's PyTorch was built without libuv, but asks for it; others do without it as well.
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "USE_LIBUV": "0"}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Result:
    def __init__(self, rank, code, output):
        self.rank, self.code, self.output = rank, code, output

    def __repr__(self):
        return f"rank {self.rank}: exit code {self.code}\n{self.output}"


class Ranks:
    """Processes of one job, as somebody would start them by hand: with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    def __init__(self, program, size, *arguments, env=None):
        self.processes, self.files = [], []
        port = str(free_port())
        for rank in range(size):
            variables = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                             MASTER_PORT=port, **SETTINGS, **(env or {}))
            file = tempfile.TemporaryFile("w+")
            self.files.append(file)
            self.processes.append(subprocess.Popen([sys.executable, os.path.join(HERE, program), *map(str, arguments)],
                                                   stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables))

    def output(self, rank):
        self.files[rank].seek(0)
        return self.files[rank].read()

    def wait_for(self, rank, text):
        """Until the rank has printed the text."""
        end = time.monotonic() + LIMIT
        while text not in self.output(rank):
            if self.processes[rank].poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError(f'rank {rank} did not print "{text}":\n{self.output(rank)}')
            time.sleep(0.02)

    def signal(self, rank, number):
        self.processes[rank].send_signal(number)

    def kill(self):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def wait(self):
        end = time.monotonic() + LIMIT
        try:
            for rank, process in enumerate(self.processes):
                try:
                    process.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"rank {rank} did not end within {LIMIT} s; it printed\n{self.output(rank)}") from None
        finally:
            self.kill()
        return [Result(rank, process.returncode, self.output(rank)) for rank, process in enumerate(self.processes)]


def run(program, size, *arguments, env=None):
    """All ranks must succeed. Returns their results."""
    results = Ranks(program, size, *arguments, env=env).wait()
    assert all(result.code == 0 for result in results), "\n".join(map(repr, results))
    return results


def usable_backends():
    """What `maniple backends` says is here."""
    output = subprocess.run([os.environ.get("PROGRAM_UNDER_TEST", "maniple"), "backends"], stdout=subprocess.PIPE, text=True).stdout
    return {line.split()[0] for line in output.splitlines() if line.split()[1:2] == ["here"]}


def launch(command, env=None):
    """Any command, which must succeed. Returns its output."""
    variables = dict(os.environ, **SETTINGS, **(env or {}))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if env is None or name not in env:
            variables.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:  # torchrun leaves its logs there
        # A session of its own, so that what it started ends with it.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
                                   env=dict(variables, TMPDIR=folder), start_new_session=True, cwd=HERE)
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{command} did not end within {LIMIT} s; it printed\n{output}") from None
    assert process.returncode == 0, f"{command}: exit code {process.returncode}\n{output}"
    return output
