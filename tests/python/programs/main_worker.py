"""main_worker(gpu, ngpus_per_node, args): the form of PyTorch's ImageNet example, with devices that are cores. Seeds, batch size and workers for
each rank, DDP, a checkpoint that all ranks resume from. --world-size counts nodes, --rank is this node's."""

import argparse
import os
import random
import tempfile

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.utils.data.distributed
from torch.utils.data import DataLoader, TensorDataset

from start import accuracy, drawn_digits, free_port, is_launched, network


def main_worker(gpu, ngpus_per_node, args):
    if args.dist_url == "env://" and args.rank == -1:
        args.rank = int(os.environ["RANK"])
    if args.multiprocessing_distributed:
        args.rank = args.rank * ngpus_per_node + gpu
    dist.init_process_group(backend="maniple", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    args.batch_size = int(args.batch_size / ngpus_per_node)
    args.workers = int((args.workers + ngpus_per_node - 1) / ngpus_per_node)
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.5)
    start_epoch = 0
    if args.resume and os.path.isfile(args.resume):
        ckp = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(ckp["state_dict"])
        optimizer.load_state_dict(ckp["optimizer"])
        start_epoch = ckp["epoch"]
    data = TensorDataset(*drawn_digits(480))
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, num_workers=args.workers, sampler=sampler)
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    if args.rank % ngpus_per_node == 0 and args.rank == 0:
        state = {"epoch": args.epochs, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.resume + ".new")
        os.replace(args.resume + ".new", args.resume)
    dist.barrier()
    reached = accuracy(model, *drawn_digits(200, seed=1))
    assert args.epochs < 6 or reached > 0.8, reached
    print(f"rank {args.rank} of {args.world_size} is done, from epoch {start_epoch} to {args.epochs}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--dist-url", default=f"tcp://127.0.0.1:{free_port()}")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--resume", default=os.path.join(tempfile.gettempdir(), f"main_worker.{os.getppid()}.pt"))
    args = parser.parse_args()
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
        cudnn.deterministic = True
    args.multiprocessing_distributed = not is_launched()
    if args.multiprocessing_distributed:
        ngpus_per_node = 2
        args.world_size = ngpus_per_node * args.world_size
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
    else:
        args.rank, args.world_size, args.dist_url = -1, int(os.environ["WORLD_SIZE"]), "env://"
        main_worker(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), args)


if __name__ == "__main__":
    main()
