# The peer of ddp_worker: PyTorch's DistributedDataParallel on Gloo, the same models by the same method.
#
#   ddp_torch.py MODEL RANK RANKS INIT_METHOD STEPS SECONDS      rank 0 prints one JSON object
import contextlib
import json
import os
import platform
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn

WIDTH, HEADS, VOCABULARY = 256, 8, 256


class MnistCnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.f1, self.f2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = torch.relu(self.c2(torch.relu(self.c1(x))))
        return self.f2(torch.relu(self.f1(torch.max_pool2d(x, 2).flatten(1))))


def mlp(layers, width):
    inner = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(width, 10))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q.matmul(k.transpose(-2, -1)) * (HEADS / WIDTH) ** 0.5, -1)
        x = x + self.out(weights.matmul(v).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.Sequential(*[Block() for _ in range(6)])

    def forward(self, tokens):
        return self.h(self.blocks(self.e(tokens))).flatten(0, 1)


MODELS = {
    "mnist_cnn": lambda: (MnistCnn(), torch.randn(32, 1, 28, 28), torch.randint(10, (32,))),
    "mlp25m": lambda: (mlp(6, 2048), torch.randn(32, 2048), torch.randint(10, (32,))),
    "gpt5m": lambda: (Transformer(), torch.randint(VOCABULARY, (4, 128)), torch.randint(VOCABULARY, (512,))),
    "tiny50": lambda: (mlp(50, 32), torch.randn(16, 32), torch.randint(10, (16,))),
}


def largest(value):
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def main():
    name, rank, ranks, init_method = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    wanted_steps, seconds = int(sys.argv[5]), float(sys.argv[6])
    with contextlib.suppress(OSError):
        each = max(1, os.cpu_count() // ranks)
        os.sched_setaffinity(0, {(rank * each + i) % os.cpu_count() for i in range(each)})
    torch.set_num_threads(1)
    if platform.machine() == "aarch64":
        torch.backends.mkldnn.enabled = False
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=ranks)
    torch.manual_seed(1)
    net, x, y = MODELS[name]()
    ddp = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()

    def block(sync, steps):
        dist.barrier()
        start = time.perf_counter()
        with contextlib.nullcontext() if sync else ddp.no_sync():
            for _ in range(steps):
                step()
        return largest(time.perf_counter() - start) / steps

    for _ in range(3):
        block(True, 1)
        block(False, 1)
    guess = min(block(True, 2), block(False, 2))
    steps = min(20, max(2, int(0.1 / guess)))
    blocks = max(5, wanted_steps // steps if wanted_steps > 0 else int(seconds / (guess * steps)))
    without, with_sync = [], []
    for _ in range(blocks):
        without.append(block(False, steps))
        with_sync.append(block(True, steps))
    peak = largest(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    nosync_ms, ddp_ms = statistics.median(without) * 1e3, statistics.median(with_sync) * 1e3
    if rank == 0:
        print(json.dumps({"system": "torch", "model": name, "ranks": ranks, "nosync_ms": nosync_ms, "ddp_ms": ddp_ms,
                          "efficiency": nosync_ms / ddp_ms, "peak_rss_mb": peak, "overlap": "thread"}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
