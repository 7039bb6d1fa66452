"""A training function that mp.spawn runs with a configuration: DDP, DistributedSampler, a DataLoader with workers. The argument is the
address: tcp (the default) or file:///PATH; and with "alone" one process trains without a group.

Called with all arguments of mp.spawn, as its documentation lists them."""

import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from start import accuracy, drawn_digits, free_port, is_launched, network


def train(rank: int, a, h):
    if h.num_gpus > 1:
        init_process_group(
            backend=h.dist_config["dist_backend"],
            init_method=h.dist_config["dist_url"],
            world_size=h.dist_config["world_size"] * h.num_gpus,
            rank=rank,
        )
    torch.manual_seed(h.seed)
    images, labels = drawn_digits(a.samples)
    trainset = [(image.numpy(), int(label)) for image, label in zip(images, labels)]
    train_sampler = DistributedSampler(trainset) if h.num_gpus > 1 else None
    train_loader = DataLoader(trainset, sampler=train_sampler, batch_size=24 // h.num_gpus, num_workers=1)
    model = network()
    if h.num_gpus > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(a.epochs):
        if train_sampler is not None:
            train_sampler.set_epoch(epoch)
        for image, label in train_loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(image), label).backward()
            optimizer.step()
    reached = accuracy(model, *drawn_digits(200, seed=1))
    assert reached > 0.8, reached
    if h.num_gpus > 1:
        same = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        dist.broadcast(same, 0)
        assert torch.equal(same, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        dist.destroy_process_group()
    # DataParallel of one process without GPUs is the module itself.
    plain = torch.nn.DataParallel(network())
    assert plain(images[:3]).shape == (3, 10)
    print(f"rank {rank} of {max(h.num_gpus, 1)} is done", flush=True)


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else f"tcp://127.0.0.1:{free_port()}"
    a = SimpleNamespace(samples=480, epochs=6)
    h = SimpleNamespace(num_gpus=2, seed=1, dist_config={"dist_backend": "maniple", "dist_url": url, "world_size": 1})
    if is_launched():
        h.num_gpus = int(os.environ["WORLD_SIZE"])
        h.dist_config["dist_url"] = "env://"
        train(int(os.environ["RANK"]), a, h)
    elif url == "alone":
        h.num_gpus = 1
        train(0, a, h)
    else:
        mp.spawn(train, args=(a, h), nprocs=h.num_gpus, join=True, daemon=False, start_method="spawn")
