"""N nodes of G processes: every process finds its global rank, R = n * G + g, and one DDP model trains on all of them.

Without a launcher each node is an mp.spawn of its own: --nodes of them, started here."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from start import free_port, is_launched


def work(g, n, G, N, url):
    W, R = N * G, n * G + g
    dist.init_process_group("maniple", init_method=url, rank=R, world_size=W)
    assert (dist.get_rank(), dist.get_world_size()) == (R, W)
    places = [None] * W
    dist.all_gather_object(places, (n, g))
    assert places == [(r // G, r % G) for r in range(W)], places
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), float(R))).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((1, 3), (W - 1) / 2))
    print(f"rank {R} of {W} is done: process {g} of node {n}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    N, G = arguments.nodes, arguments.processes
    if is_launched():
        G = int(os.environ["LOCAL_WORLD_SIZE"])
        R, g = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        work(g, (R - g) // G, G, int(os.environ["WORLD_SIZE"]) // G, "env://")
    else:
        url = f"tcp://127.0.0.1:{free_port()}"
        nodes = [mp.spawn(work, args=(n, G, N, url), nprocs=G, join=False) for n in range(N)]
        for node in nodes:
            while not node.join():
                pass
