# The peer of ddp_gpu_worker: PyTorch's DistributedDataParallel (NCCL, one rank), the same models by the same method.
#
#   ddp_gpu_torch.py MODEL ROUNDS      prints one JSON object for each kind of step: plain, DDP, DDP best
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn

BEST = {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False}
KINDS = {"plain": None, "DDP": {}, "DDP best": BEST}


class Bottleneck(nn.Module):
    def __init__(self, entering, width, stride):
        super().__init__()
        leaving = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(entering, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, leaving, 1, bias=False), nn.BatchNorm2d(leaving))
        self.shortcut = None
        if entering != leaving or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving))

    def forward(self, x):
        return torch.relu(self.body(x) + (x if self.shortcut is None else self.shortcut(x)))


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    entering = 64
    for stride, width, blocks in ((1, 64, 3), (2, 128, 4), (2, 256, 6), (2, 512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(entering, width, stride if block == 0 else 1))
            entering = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (part.view(*part.shape[:2], self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return y + self.down(nn.functional.gelu(self.up(self.norm2(y))))


class Gpt2(nn.Module):
    def __init__(self, words=50257, width=768):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*[Block(width, 12) for _ in range(12)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x):
        at = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.words(x) + self.places(at))))


def mlp():
    inner = [module for _ in range(50) for module in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(64, 10))


def task(model):
    """The module's maker, inputs, targets, bfloat16, steps of a round, items of a step."""
    if model == "resnet50":
        x = torch.randn(128, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        return resnet50, x, torch.randint(0, 1000, (128,), device="cuda"), True, 10, 128
    if model == "gpt2":
        text = torch.randint(0, 50257, (16, 1024), device="cuda")
        return Gpt2, text, text, True, 5, 16 * 1024
    if model == "mlp":
        return mlp, torch.randn(32, 64, device="cuda"), torch.randint(0, 10, (32,), device="cuda"), False, 40, 32
    sys.exit(f'ddp_gpu_torch.py: no model "{model}"; expected resnet50, gpt2 or mlp')


def main():
    model, rounds = sys.argv[1], int(sys.argv[2])
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(1)
    make, x, y, bf16, steps, items = task(model)

    def prepare(options):
        net = make().cuda()
        if x.dim() == 4:
            net = net.to(memory_format=torch.channels_last)
        if options is not None:
            net = nn.parallel.DistributedDataParallel(net, device_ids=[0], **options)
        return net, torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, foreach=True)

    def timed(net, optimizer):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                loss = nn.functional.cross_entropy(net(x).flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps * 1e6

    nets = {kind: prepare(options) for kind, options in KINDS.items()}
    results = {kind: [] for kind in KINDS}
    for number in range(-2, rounds):  # two to warm up
        for kind, (net, optimizer) in nets.items():
            result = timed(net, optimizer)
            if number >= 0:
                results[kind].append(result)
    for kind, times in results.items():
        print(json.dumps({"case": model, "system": "torch", "kind": kind, "ranks": 1, "us": statistics.median(times),
                          "items": items, "note": f"PyTorch {torch.__version__}, nccl, SGD foreach"}), flush=True)
    dist.destroy_process_group()


main()
