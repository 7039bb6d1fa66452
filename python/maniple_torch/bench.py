"""python -m maniple_torch.bench: Maniple beside Gloo, in one run, through torch.distributed.

Two groups of the same processes take turns, so both see the same machine. Times are medians."""

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import maniple_torch


def _median_us(call, group, turns):
    times = []
    for _ in range(turns):
        dist.barrier(group=group)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    worst = torch.tensor([statistics.median(times)], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item() * 1e6


def _run(rank, size, path, turns):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group("maniple", init_method=f"file://{path}", rank=rank, world_size=size,
                            timeout=datetime.timedelta(minutes=10))
    gloo = dist.new_group(backend="gloo")
    ours = dist.distributed_c10d._get_default_group()
    if rank == 0:
        print(f"all_reduce of float32, {size} ranks, PyTorch {torch.__version__}, medians of {turns}")
        print(f"{'bytes':>10} {'maniple us':>12} {'registered us':>14} {'gloo us':>12} {'faster':>8} {'registered':>11}")
    for count in (1, 1 << 8, 1 << 14, 1 << 18, 1 << 20, 1 << 24):
        plain, registered = torch.ones(count), maniple_torch.allocate(count)
        turns_here = max(5, min(turns, (1 << 26) // (4 * count)))
        results = []
        for tensor, group in ((plain, ours), (registered, ours), (plain, gloo)):
            for _ in range(3):
                dist.all_reduce(tensor, group=group)
            results.append(_median_us(lambda: dist.all_reduce(tensor, group=group), group, turns_here))
        if rank == 0:
            maniple, in_place, other = results
            print(f"{4 * count:>10} {maniple:>12.1f} {in_place:>14.1f} {other:>12.1f} {other / maniple:>7.1f}x {other / in_place:>10.1f}x",
                  flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m maniple_torch.bench", description="Maniple beside Gloo through torch.distributed.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=1000, help="most repetitions of one size")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, args=(arguments.ranks, os.path.join(folder, "store"), arguments.turns), nprocs=arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
