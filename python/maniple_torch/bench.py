"""python -m maniple_torch.bench: Maniple compared with Gloo, in one run, through torch.distributed.

Two groups of the same processes take turns, so both see the same machine. Times are medians."""

import argparse
import contextlib
import copy
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


def _join(rank, size, path):
    """With a share of the cores for each rank, as `maniple run` gives it."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // size)
    if len(cores) >= size:
        os.sched_setaffinity(0, cores[rank * share:(rank + 1) * share])
    torch.set_num_threads(share)
    dist.init_process_group("maniple", init_method=f"file://{path}", rank=rank, world_size=size,
                            timeout=datetime.timedelta(minutes=10))
    return dist.distributed_c10d._get_default_group(), dist.new_group(backend="gloo")


# ---- all_reduce ------------------------------------------------------------------------------------------------------


def _all_reduce(rank, size, path, turns):
    ours, gloo = _join(rank, size, path)
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


# ---- DDP -------------------------------------------------------------------------------------------------------------


class _Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 256)
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 6)
        self.head = torch.nn.Linear(256, 256)

    def forward(self, x):
        return self.head(self.layers(self.embedding(x))).flatten(0, 1)


def _deep(layers, width, inputs, outputs):
    parts, before = [], inputs
    for _ in range(layers):
        parts += [torch.nn.Linear(before, width), torch.nn.ReLU()]
        before = width
    return torch.nn.Sequential(*parts, torch.nn.Linear(before, outputs))


def _models():
    """Name, model, input and labels of a step; the same four as in docs/benchmarks_training.md."""
    nn = torch.nn
    cnn = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                        nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
    yield "MNIST CNN, batch 32", cnn, torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
    yield "MLP 6 x 2048, batch 32", _deep(5, 2048, 2048, 2048), torch.randn(32, 2048), torch.randint(0, 2048, (32,))
    yield "transformer 6 x 256, 4 x 128", _Transformer(), torch.randint(0, 256, (4, 128)), torch.randint(0, 256, (512,))
    yield "MLP 50 x 32, batch 16", _deep(49, 32, 32, 32), torch.randn(16, 32), torch.randint(0, 32, (16,))


def _ddp(rank, size, path, turns):
    ours, gloo = _join(rank, size, path)
    torchs = torch.nn.parallel.DistributedDataParallel
    if rank == 0:
        print(f"a step of DDP, {size} ranks x {torch.get_num_threads()} threads, medians in ms; then the step without gradient sync over each")
        print(f"{'model':<30} {'no sync':>8} {'DDP of maniple_torch':>21} {'PyTorch, maniple':>17} {'PyTorch, gloo':>14}")
    for name, model, x, y in _models():
        wrapped = [kind(copy.deepcopy(model), process_group=group)
                   for kind, group in ((maniple_torch.DistributedDataParallel, ours), (torchs, ours), (torchs, gloo))]
        optimizers = [torch.optim.SGD(each.parameters(), lr=1e-4) for each in wrapped]

        def step(which, sync):
            optimizers[which].zero_grad()
            with contextlib.nullcontext() if sync else wrapped[which].no_sync():
                torch.nn.functional.cross_entropy(wrapped[which](x), y).backward()
            optimizers[which].step()

        kinds = ((0, False), (0, True), (1, True), (2, True))
        for kind in kinds * 3:
            step(*kind)
        times = {kind: [] for kind in kinds}
        for _ in range(max(5, min(200, turns // 20))):
            for kind in kinds:
                dist.barrier()
                start = time.perf_counter()
                step(*kind)
                times[kind].append(time.perf_counter() - start)
        medians = torch.tensor([statistics.median(times[kind]) * 1e3 for kind in kinds], dtype=torch.float64)
        dist.all_reduce(medians, dist.ReduceOp.MAX)
        if rank == 0:
            plain, *others = medians.tolist()
            texts = [f"{other:.2f} ({plain / other:.3f})" for other in others]
            print(f"{name:<30} {plain:>8.2f} {texts[0]:>21} {texts[1]:>17} {texts[2]:>14}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ---- Start-up --------------------------------------------------------------------------------------------------------


def _join_once(rank, size, path, backend):
    start = time.perf_counter()
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
    dist.barrier()
    if rank == 0:
        with open(path + ".time", "w") as file:
            file.write(str(time.perf_counter() - start))
    dist.destroy_process_group()


def _startup(size, folder, turns):
    """init_process_group and one barrier, in processes that have imported PyTorch and never had a group."""
    times = {"maniple": [], "gloo": []}
    for turn in range(max(1, min(5, turns // 100))):
        for backend, measured in times.items():
            path = os.path.join(folder, f"{backend}.{turn}")
            mp.spawn(_join_once, args=(size, path, backend), nprocs=size)
            with open(path + ".time") as file:
                measured.append(float(file.read()) * 1e3)
    print(f"start-up, {size} ranks: init_process_group and a barrier, in new processes, median of {len(times['gloo'])}: "
          + ", ".join(f"{backend} {statistics.median(measured):.1f} ms" for backend, measured in times.items()), flush=True)


def _spawn(body):
    return lambda size, folder, turns: mp.spawn(body, args=(size, os.path.join(folder, "store"), turns), nprocs=size)


MEASURES = {"all_reduce": _spawn(_all_reduce), "ddp": _spawn(_ddp), "startup": _startup}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m maniple_torch.bench", description="Compares Maniple with Gloo through torch.distributed.")
    parser.add_argument("what", nargs="*", help=f"{', '.join(MEASURES)}; all where none is given")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=1000, help="most repetitions of one size")
    arguments = parser.parse_args()
    for what in arguments.what:
        if what not in MEASURES:
            parser.error(f"{what} is not one of {', '.join(MEASURES)}")
    for what in arguments.what or MEASURES:
        with tempfile.TemporaryDirectory() as folder:
            MEASURES[what](arguments.ranks, folder, arguments.turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
