"""Rank 0 sends a tensor to rank 1, which prints it."""

import torch
import torch.distributed as dist

from start import start


def main(rank, world):
    if rank == 0:
        x = torch.tensor([1.0, -1.0])
        dist.send(x, dst=1)
        print("Rank-0 has sent the following tensor to Rank-1")
        print(x.tolist(), flush=True)
    else:
        z = torch.tensor([0.0, 0.0])
        dist.recv(z, src=0)
        print("Rank-1 has received the following tensor from Rank-0")
        print(z.tolist(), flush=True)
        assert z.tolist() == [1.0, -1.0]


def join(rank, size, url):
    dist.init_process_group(backend="maniple", init_method=url, rank=rank, world_size=size)
    main(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # rank 0 has the store, and others may still be in init_process_group when its message is sent
    print(f"rank {rank} of {size} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    start(join)
