"""What stands on a backend: DDP and its hooks, join, ZeRO, FSDP, DeviceMesh, DTensor, checkpoints. Compared with Gloo, step by step."""

import copy
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import maniple_torch
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
    return torch.tensor(losses)  # as precise as they were computed


def both(gloo, hook=None, tolerance=None, ours=DDP, **options):
    """Trains one model with each backend and compares losses and weights. (Sums of float16 are rounded once by Maniple, and after each
    addition by Gloo: these need a tolerance.)"""
    results = []
    for group in (None, gloo):
        wrapped = (ours if group is None else DDP)(model(), process_group=group, **options)
        if hook is not None:
            hook(wrapped, group)
        losses = train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9))
        results.append((losses, [p.detach().clone() for p in wrapped.parameters()]))
    mine = torch.cat([p.flatten() for p in results[0][1]])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first), "the weights of the ranks differ"
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def case_ddp(gloo):
    both(gloo)


def case_ddp_sparse_gradients(gloo):
    """An embedding whose gradient names the rows that were used; beside it dense layers."""

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.EmbeddingBag(500, 12, mode="sum", sparse=True)
            self.head = torch.nn.Linear(12, 4)

        def forward(self, words):
            return self.head(self.embedding(words))

    results = []
    for group, kind in ((None, DDP), (None, maniple_torch.DistributedDataParallel), (gloo, DDP)):
        torch.manual_seed(3)
        wrapped = kind(Words(), process_group=group)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(5):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            words = torch.randint(0, 500, (8, 2 + dist.get_rank()), generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(words), torch.randint(0, 4, (8,), generator=generator)).backward()
            assert wrapped.module.embedding.weight.grad.is_sparse
            optimizer.step()
        results.append([p.detach().clone() for p in wrapped.parameters()])
        mine = torch.cat([p.flatten() for p in results[-1]])
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(mine, first), "the weights of the ranks differ"
    for other in results[:2]:
        torch.testing.assert_close(other, results[2])


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


def case_ddp_other_hooks(gloo):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post

    if torch.version.cuda is not None:  # otherwise PyTorch refuses this hook
        plain, rounded = DDP(model()), DDP(model())
        rounded.register_comm_hook(None, default_hooks.bf16_compress_hook)
        losses = [train(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (plain, rounded)]
        torch.testing.assert_close(losses[0], losses[1], rtol=0.05, atol=0.05)

    def register(wrapped, group):
        group = group or dist.distributed_c10d._get_default_group()  # None would be for subgroups of the GPUs of a host
        wrapped.register_comm_hook(post.PostLocalSGDState(group, group, start_localSGD_iter=2), post.post_localSGD_hook)

    both(gloo, hook=register)


def case_ddp_own_hook(gloo):
    """A hook written by the user, with callbacks that follow one another."""
    def register(wrapped, group):
        def hook(state, bucket):
            size = dist.get_world_size()
            return (dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
                    .then(lambda done: done.value()[0]).then(lambda done: done.value().div_(size)))

        wrapped.register_comm_hook(None, hook)

    both(gloo, hook=register, tolerance=1e-5)


def case_ddp_without_buffers_and_with_frozen_parameters(gloo):
    both(gloo, broadcast_buffers=False)
    frozen = model()
    for parameter in frozen[0].parameters():
        parameter.requires_grad = False
    wrapped = DDP(frozen)
    train(wrapped, torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1))
    assert frozen[0].weight.grad is None


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


def is_shared(tensor):
    """Whether it lies in memory that other processes can map."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return "s" in line.split()[1]
    raise AssertionError("a tensor outside all mappings")


def case_ddp_of_maniple(gloo):
    """maniple_torch.DistributedDataParallel: computing and communicating in one thread, and in two."""
    ours = maniple_torch.DistributedDataParallel
    for has_spare_core in (False, True):
        def overlap(wrapped, group):
            if group is None:
                wrapped._averaging.has_spare_core = has_spare_core

        both(gloo, ours=ours, hook=overlap)
        both(gloo, ours=ours, hook=overlap, bucket_cap_mb=0.001)
        both(gloo, ours=ours, hook=overlap, gradient_as_bucket_view=False, broadcast_buffers=False)
        both(gloo, ours=ours, hook=overlap, static_graph=True)
        both(gloo, ours=ours, hook=overlap, find_unused_parameters=True)


def case_ddp_of_maniple_uses_registered_memory(gloo):
    wrapped = maniple_torch.DistributedDataParallel(model(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    # New buckets may be more than the first ones were; then the last move in the third step.
    train(wrapped, optimizer, steps=3)
    before = [p.grad.clone() for p in wrapped.parameters()]
    assert all(is_shared(p.grad) for p in wrapped.parameters())
    torch.testing.assert_close(before, [p.grad for p in wrapped.parameters()])
    del wrapped, optimizer, before
    # Its first buckets are its last.
    stays = maniple_torch.DistributedDataParallel(model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(stays.parameters(), lr=0.1)
    train(stays, optimizer, steps=1)
    seen = [p.grad for p in stays.parameters()]
    assert all(is_shared(grad) for grad in seen)
    places = [grad.data_ptr() for grad in seen]
    train(stays, optimizer, steps=2)
    assert places == [grad.data_ptr() for grad in seen], "memory of gradients that were seen has moved"
    small = maniple_torch.DistributedDataParallel(torch.nn.Linear(3, 2))
    for parameter in small.parameters():
        parameter.grad = None
    for step in range(3):  # gradients that are removed between steps
        small(torch.full((1, 3), float(dist.get_rank() + step))).sum().backward()
        average = sum(range(dist.get_world_size())) / dist.get_world_size() + step
        torch.testing.assert_close(small.module.weight.grad, torch.full((2, 3), average))
        for parameter in small.parameters():
            parameter.grad = None


def case_ddp_of_maniple_refuses(gloo):
    try:
        maniple_torch.DistributedDataParallel(model(), process_group=gloo)
        raise AssertionError("a group of Gloo was taken")
    except maniple_torch.InvalidArgument as error:
        assert "not maniple" in str(error), error
    wrapped = maniple_torch.DistributedDataParallel(model())
    try:
        with wrapped.join(divide_by_initial_world_size=False):
            raise AssertionError("it was not refused")
    except maniple_torch.InvalidArgument as error:
        assert "torch.nn.parallel.DistributedDataParallel" in str(error), error


def train_ones(wrapped, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def expect_same_weights(linear):
    weights = linear.weight.detach().clone()
    dist.broadcast(weights, 0)
    assert torch.equal(weights, linear.weight)


def case_ddp_join(gloo):
    """Ranks with different numbers of batches."""
    for wrapper in (DDP, maniple_torch.DistributedDataParallel):
        # A rank that has joined takes part in what the others do in their first and second steps.
        for shortest in (0, 1, 2):
            linear = torch.nn.Linear(4, 1)
            wrapped = wrapper(linear)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
            with wrapped.join():
                train_ones(wrapped, optimizer, shortest + 2 * dist.get_rank())
            expect_same_weights(linear)


def case_join_of_ddp_and_zero(gloo):
    """Join of several: DDP and an optimizer whose state is divided among the ranks."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    linear = torch.nn.Linear(4, 1)
    wrapped = DDP(linear)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.01)
    with Join([wrapped, optimizer]):
        train_ones(wrapped, optimizer, 2 + dist.get_rank())
    expect_same_weights(linear)


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
