"""Data-parallel training with DDP and DistributedSampler, and a checkpoint that all ranks resume from.

Started by a launcher (torchrun, maniple run) it uses env://. With --spawn URL it starts its own processes by mp.spawn."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import maniple_torch  # noqa: F401


def train(rank, size, url):
    dist.init_process_group(backend="maniple", init_method=url, world_size=size, rank=rank)
    torch.manual_seed(0)
    inputs = torch.randn(64, 5)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16 // size, sampler=sampler)
    model = DDP(torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses

    path = [tempfile.mktemp() if rank == 0 else None]
    dist.broadcast_object_list(path, src=0)
    if rank == 0:
        torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, path[0])
    dist.barrier()
    resumed = DDP(torch.nn.Linear(5, 1))
    state = torch.load(path[0], map_location="cpu")
    resumed.load_state_dict(state["state_dict"])
    assert torch.equal(resumed.module.weight, model.module.weight)
    dist.barrier()
    if rank == 0:
        os.remove(path[0])
    print(f"rank {rank} of {size} has trained", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--spawn", metavar="URL", help="tcp://127.0.0.1:PORT or file:///PATH")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.spawn:
        mp.spawn(train, nprocs=arguments.ranks, args=(arguments.ranks, arguments.spawn))
    else:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
