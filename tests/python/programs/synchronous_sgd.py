"""Synchronous SGD by hand: rank 0 sends its weights to the others, gradients are summed. Without a launcher the ranks are processes of
torch.multiprocessing (--spawn: of mp.spawn)."""

import os
import sys

import torch
import torch.distributed as dist
from torch.multiprocessing import Process

from start import accuracy, drawn_digits, free_port, is_launched, network, spawn


def sync_gradients(model, rank, world_size):
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)


def sync_hyperparameters(model, rank, world_size):
    for param in model.parameters():
        if rank == 0:
            for sibling in range(1, world_size):
                dist.send(param.data, dst=sibling)
        else:
            dist.recv(param.data, src=0)


def run(rank, size):
    torch.manual_seed(rank)  # weights differ until rank 0 has sent its own
    images, labels = drawn_digits(480)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 / size)
    sync_hyperparameters(model, rank, size)
    for epoch in range(6):
        for first in range(0, len(images), 24):
            mine = slice(first + 24 // size * rank, first + 24 // size * (rank + 1))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            sync_gradients(model, rank, size)
            optimizer.step()
    for param in model.parameters():
        everyone = [torch.zeros_like(param) for _ in range(size)]
        dist.all_gather(everyone, param.data)
        assert all(torch.equal(other, param.data) for other in everyone), "the weights of the ranks differ"
    reached = accuracy(model, *drawn_digits(200, seed=1))
    assert reached > 0.8, reached
    print(f"rank {rank} of {size} is done", flush=True)


def init_process(rank, size, fn, port, backend="maniple"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)
    dist.destroy_process_group()


def spawned(rank, size, url):
    init_process(rank, size, run, url.rsplit(":", 1)[1])


if __name__ == "__main__":
    if is_launched():
        dist.init_process_group("maniple")
        run(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    elif "--spawn" in sys.argv:
        spawn(spawned, 2)
    else:
        size, port = 2, str(free_port())
        processes = []
        for rank in range(size):
            p = Process(target=init_process, args=(rank, size, run, port))
            p.start()
            processes.append(p)
        for p in processes:
            p.join()
        sys.exit(max(abs(p.exitcode) for p in processes))
