"""python -m maniple_torch.selftest: tries the backend on this machine, with some ranks as processes.

Says what it found, one line for each operation, and ends with "all is well" or the first error."""

import argparse
import datetime
import os
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import maniple_torch


def _check(name, ours, expected):
    if not torch.equal(ours, expected):
        raise AssertionError(f"{name}: got {ours.flatten()[:4].tolist()} ..., expected {expected.flatten()[:4].tolist()} ...")


def _operations(rank, size):
    everyone = [float(r + 1) for r in range(size)]
    for count in (1, 1000, 300_000):
        x = torch.full((count,), everyone[rank])
        dist.all_reduce(x)
        _check("all_reduce", x, torch.full((count,), sum(everyone)))
    yield "all_reduce"
    x = torch.full((10,), everyone[rank])
    dist.broadcast(x, size - 1)
    _check("broadcast", x, torch.full((10,), everyone[-1]))
    yield "broadcast"
    parts = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(parts, torch.full((3,), everyone[rank]))
    _check("all_gather", torch.stack(parts)[:, 0], torch.tensor(everyone))
    yield "all_gather"
    part = torch.zeros(2)
    dist.reduce_scatter(part, [torch.full((2,), everyone[rank]) for _ in range(size)])
    _check("reduce_scatter", part, torch.full((2,), sum(everyone)))
    yield "reduce_scatter"
    out = torch.zeros(size)
    dist.all_to_all_single(out, torch.full((size,), everyone[rank]))
    _check("all_to_all", out, torch.tensor(everyone))
    yield "all_to_all"
    if size > 1:
        box = torch.zeros(1)
        work = dist.isend(torch.tensor([everyone[rank]]), (rank + 1) % size)
        dist.recv(box, (rank - 1) % size)
        work.wait()
        _check("send and recv", box, torch.tensor([everyone[rank - 1]]))
        yield "send and recv"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.full((2, 4), everyone[rank])).sum().backward()
    _check("DistributedDataParallel", model.module.weight.grad, torch.full((1, 4), 2 * sum(everyone) / size))
    yield "DistributedDataParallel"


def _run(rank, size, path):
    torch.set_num_threads(1)
    dist.init_process_group("maniple", init_method=f"file://{path}", rank=rank, world_size=size,
                            timeout=datetime.timedelta(minutes=2))
    if rank == 0:
        print(f"{size} ranks on {socket.gethostname()}, transport {maniple_torch.transport()}", flush=True)
    for name in _operations(rank, size):
        if rank == 0:
            print(f"ok  {name}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m maniple_torch.selftest", description="Tries the backend on this machine.")
    parser.add_argument("--ranks", type=int, default=min(4, os.cpu_count() or 1), help="how many processes (default: cores, at most 4)")
    arguments = parser.parse_args()
    if arguments.ranks < 1:
        parser.error("--ranks must be at least 1")
    print(f"maniple {maniple_torch.__version__}, PyTorch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, args=(arguments.ranks, os.path.join(folder, "store")), nprocs=arguments.ranks)
    print("all is well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
