"""Rank 0 sends a tensor to rank 1: the first program of most introductions."""

import torch
import torch.distributed as dist

import maniple_torch  # noqa: F401


def main(rank, world):
    if rank == 0:
        x = torch.tensor([1.0, -1.0])
        dist.send(x, dst=1)
        print("rank 0 has sent", x.tolist(), flush=True)
    elif rank == 1:
        z = torch.tensor([0.0, 0.0])
        dist.recv(z, src=0)
        print("rank 1 has received", z.tolist(), flush=True)


if __name__ == "__main__":
    dist.init_process_group(backend="maniple")
    main(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # rank 0 has the store, and others may still be in init_process_group when its message is sent
    dist.destroy_process_group()
