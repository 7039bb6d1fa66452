"""What stands on a backend: DDP and its hooks, join, ZeRO, FSDP, DeviceMesh, DTensor, checkpoints. Beside Gloo, step by step."""

import copy
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from cases import main, needs


def model(seed=5):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 40),
                               torch.nn.ReLU(), torch.nn.Linear(40, 4))


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 20, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def train(wrapped, optimizer, steps=5):
    losses = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def both(gloo, hook=None, tolerance=None, **options):
    """Trains one model with each backend and compares losses and weights. (Sums of float16 are rounded once by Maniple, and after each
    addition by Gloo: these need a tolerance.)"""
    results = []
    for group in (None, gloo):
        wrapped = DDP(model(), process_group=group, **options)
        if hook is not None:
            hook(wrapped, group)
        losses = train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9))
        results.append((losses, [p.detach().clone() for p in wrapped.parameters()]))
    mine = torch.cat([p.flatten() for p in results[0][1]])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first), "the weights of the ranks differ"
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def case_ddp(gloo):
    both(gloo)


def case_ddp_small_buckets_and_views(gloo):
    both(gloo, bucket_cap_mb=0.001, gradient_as_bucket_view=True)


def case_ddp_static_graph(gloo):
    both(gloo, static_graph=True)


def case_ddp_find_unused_parameters(gloo):
    both(gloo, find_unused_parameters=True)


def case_ddp_compressing_hooks(gloo):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    both(gloo, hook=lambda wrapped, group: wrapped.register_comm_hook(group, default_hooks.allreduce_hook))
    both(gloo, hook=lambda wrapped, group: wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook), tolerance=0.02)


def case_ddp_power_sgd(gloo):
    """Its callbacks wait for operations inside callbacks of operations."""
    if torch.cuda.is_available():
        return  # this hook of PyTorch then takes every device for a GPU
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    def register(wrapped, group):
        state = power.PowerSGDState(process_group=group, matrix_approximation_rank=2, start_powerSGD_iter=2, random_seed=3)
        wrapped.register_comm_hook(state, power.powerSGD_hook)

    both(gloo, hook=register, tolerance=0.02)


def case_ddp_no_sync(gloo):
    results = []
    for group in (None, gloo):
        wrapped = DDP(model(), process_group=group)
        x, y = batch(0)
        with wrapped.no_sync():
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
        torch.nn.functional.cross_entropy(wrapped(x), y).backward()
        results.append([p.grad.clone() for p in wrapped.parameters()])
    torch.testing.assert_close(results[0], results[1])


def case_ddp_join(gloo):
    """Ranks with different numbers of batches."""
    linear = torch.nn.Linear(4, 1)
    wrapped = DDP(linear)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    with wrapped.join():
        for _ in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            wrapped(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    weights = linear.weight.detach().clone()
    dist.broadcast(weights, 0)
    assert torch.equal(weights, linear.weight)


def case_zero_redundancy_optimizer(gloo):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    results = []
    for group in (None, gloo):
        wrapped = DDP(model(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01, process_group=group)
        train(wrapped, optimizer)
        results.append([p.detach().clone() for p in wrapped.parameters()])
        optimizer.consolidate_state_dict(to=0)
    torch.testing.assert_close(results[0], results[1])


def case_model_averaging(gloo):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    linear = torch.nn.Linear(3, 3)
    with torch.no_grad():
        linear.weight.fill_(float(dist.get_rank()))
    for parameter in linear.parameters():
        parameter.grad = torch.zeros_like(parameter)  # only what has a gradient is averaged
    PeriodicModelAverager(period=2, warmup_steps=0).average_parameters(linear.parameters())
    size = dist.get_world_size()
    torch.testing.assert_close(linear.weight.detach(), torch.full((3, 3), sum(range(size)) / size))


def case_fsdp(gloo):
    needs(2, 1, "FSDP for the CPU")
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    results = []
    for group in (None, gloo):
        wrapped = FSDP(model(), process_group=group, device_id=torch.device("cpu"))
        results.append(train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)))
    torch.testing.assert_close(results[0], results[1])


def case_device_mesh_and_dtensor(gloo):
    needs(2, 6, "torch.distributed.tensor")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    a, b = torch.randn(12, 6), torch.randn(6, 8)
    product = distribute_tensor(a, mesh, [Shard(0)]) @ distribute_tensor(b, mesh, [Replicate()])
    torch.testing.assert_close(product.full_tensor(), a @ b)
    partial = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    torch.testing.assert_close(partial.full_tensor(), a @ b)
    torch.testing.assert_close(partial.redistribute(mesh, [Shard(1)]).full_tensor(), a @ b)


def case_fsdp2(gloo):
    needs(2, 8, "fully_shard for the CPU")
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    plain = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4))
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=mesh)
    reference = DDP(plain)
    losses = train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    torch.testing.assert_close(losses, train(reference, torch.optim.SGD(reference.parameters(), lr=0.1)))


def case_distributed_checkpoint(gloo):
    needs(2, 6, "torch.distributed.checkpoint for any backend")
    import torch.distributed.checkpoint as checkpoint

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    saved = {"weight": torch.arange(10.0), "step": torch.tensor(7)}
    checkpoint.save(saved, checkpoint_id=os.path.join(folder[0], "c"))
    loaded = {"weight": torch.zeros(10), "step": torch.tensor(0)}
    checkpoint.load(loaded, checkpoint_id=os.path.join(folder[0], "c"))
    torch.testing.assert_close(loaded, saved)


if __name__ == "__main__":
    main(globals())
