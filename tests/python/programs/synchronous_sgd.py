"""Synchronous SGD by hand, in processes of torch.multiprocessing: rank 0 sends its weights, gradients are summed."""

import os
import sys

import torch
import torch.distributed as dist
from torch.multiprocessing import Process

import maniple_torch  # noqa: F401


def sync_parameters(model, rank, size):
    for parameter in model.parameters():
        if rank == 0:
            for sibling in range(1, size):
                dist.send(parameter.data, dst=sibling)
        else:
            dist.recv(parameter.data, src=0)


def sync_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)


def run(rank, size):
    torch.manual_seed(rank)  # weights differ until rank 0 has sent its own
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync_parameters(model, rank, size)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(rank + step))).pow(2).mean().backward()
        sync_gradients(model)
        optimizer.step()
    everyone = [torch.zeros_like(model.weight) for _ in range(size)]
    dist.all_gather(everyone, model.weight.data)
    assert all(torch.equal(weight, model.weight.data) for weight in everyone)
    print(f"rank {rank} of {size} agrees", flush=True)


def init_process(rank, size, port, body):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("maniple", rank=rank, world_size=size)
    body(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    size = 2
    processes = [Process(target=init_process, args=(rank, size, sys.argv[1], run)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))
