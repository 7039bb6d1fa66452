"""Operations and DDP on tensors of a GPU that all ranks share, compared with Gloo's results on the CPU. MANIPLE_TEST_BACKEND names the engine: host,
cuda or nccl. With the argument "lost" alone: a rank dies while another waits; with "bound": the group has a device."""

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from cases import main, needs

import maniple_torch

ENGINE = os.environ.get("MANIPLE_TEST_BACKEND", "host")
GPU = torch.device("cuda", 0)


def values(shape, dtype):
    generator = torch.Generator().manual_seed(17 * dist.get_rank() + 3)
    numbers = torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator)
    return numbers.to(dtype)


def compare(name, gloo, call, *tensors):
    """The call, of tensors and a group, on the GPU and with Gloo; it changes the tensors in place."""
    ours = [x.to(GPU) for x in tensors]
    call(None, *ours)
    theirs = [x.clone() for x in tensors]
    call(gloo, *theirs)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.cpu(), other, msg=lambda text: f"{name}, {other.dtype} {tuple(other.shape)}: {text}")


def case_all_reduce(gloo):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8):
        for shape in ((0,), (1,), (3, 5), (70_001,), (600_000,)):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
                compare("all_reduce", gloo, lambda group, x, op=op: dist.all_reduce(x, op, group=group), values(shape, dtype))
    x = torch.full((5,), float(dist.get_rank()), dtype=torch.bfloat16, device=GPU)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [sum(range(dist.get_world_size())) / dist.get_world_size()] * 5


def case_strides(gloo):
    for shape in ((4, 6), (300, 500)):
        x = values(shape, torch.float32)
        compare("all_reduce of a transposed tensor", gloo, lambda group, x: dist.all_reduce(x.t(), group=group), x)
        ours, column = x.to(GPU), x[:, 1].contiguous()
        dist.broadcast(ours[:, 1], dist.get_world_size() - 1)
        dist.broadcast(column, dist.get_world_size() - 1, group=gloo)
        x[:, 1] = column
        torch.testing.assert_close(ours.cpu(), x)


def case_parts(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.int64, torch.bool):
        for count in (1, 1000, 100_003):
            x, all_of_it = values((count,), dtype), torch.zeros(size * count, dtype=dtype)
            compare("all_gather", gloo, lambda group, x, out: dist.all_gather(list(out.chunk(size)), x, group=group), x, all_of_it)
            lists = [torch.zeros(count, dtype=dtype) for _ in range(size)]
            compare("all_gather into separate tensors", gloo, lambda group, x, *out: dist.all_gather(list(out), x, group=group), x, *lists)
            compare("broadcast", gloo, lambda group, x: dist.broadcast(x, 0, group=group), x)
            compare("gather", gloo, lambda group, x, *out: dist.gather(x, list(out) if rank == 0 else None, 0, group=group), x, *lists)
            compare("scatter", gloo, lambda group, out, *x: dist.scatter(out, list(x) if rank == 0 else None, 0, group=group),
                    torch.zeros(count, dtype=dtype), *[values((count,), dtype) for _ in range(size)])
    x = values((size * 500,), torch.float32)
    ours = torch.zeros(500, device=GPU)
    dist.reduce_scatter(ours, list(x.to(GPU).chunk(size)))
    dist.all_reduce(x, group=gloo)
    torch.testing.assert_close(ours.cpu(), x[500 * rank:500 * (rank + 1)])
    ours = torch.zeros(500, device=GPU)
    dist._reduce_scatter_base(ours, values((size * 500,), torch.float32).to(GPU))
    torch.testing.assert_close(ours.cpu(), x[500 * rank:500 * (rank + 1)])
    y = torch.zeros(1000 * size, device=GPU)
    dist.all_to_all_single(y, torch.arange(1000.0 * size, device=GPU) + rank)
    expected = torch.cat([torch.arange(1000.0 * rank, 1000.0 * (rank + 1)) + source for source in range(size)])
    torch.testing.assert_close(y.cpu(), expected)
    total = torch.full((10,), float(rank), device=GPU)
    dist.reduce(total, 0)
    if rank == 0:
        assert total.tolist() == [float(sum(range(size)))] * 10


def case_order_of_streams(gloo):
    """Nothing waits on the host; what comes before and after in the stream does."""
    size = dist.get_world_size()
    side = torch.cuda.Stream(GPU)
    # The first time the driver loads kernels, which waits for the GPU.
    for cycles, count in ((0, 1), (0, 300_000), (500_000_000, 1), (500_000_000, 300_000)):
        for stream in (torch.cuda.current_stream(GPU), side):
            with torch.cuda.stream(stream):
                x = torch.zeros(count, device=GPU)
                stream.synchronize()
                dist.barrier()
                torch.cuda._sleep(cycles)
                x.add_(dist.get_rank() + 1)
                work = dist.all_reduce(x, async_op=True)
                work.wait()
                y = x * 2
                after = torch.cuda.Event()
                after.record()
                assert cycles == 0 or not after.query(), "the host has waited for the GPU"
                assert y.eq(size * (size + 1.0)).all().item()
                work.wait(datetime.timedelta(seconds=30))
                assert work.is_completed() and work.is_success()


def case_barrier(gloo):
    dist.all_reduce(torch.zeros(1, device=GPU))
    torch.cuda._sleep(200_000_000)
    after = torch.cuda.Event()
    after.record()
    dist.barrier()
    assert after.query(), "a barrier comes after what the current stream holds"


def case_futures(gloo):
    x = torch.full((1000,), float(dist.get_rank()), device=GPU)
    torch.cuda._sleep(100_000_000)
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert future.wait().eq(2.0 * sum(range(dist.get_world_size()))).all().item()


def case_tensors_that_nobody_holds(gloo):
    """Memory stays until the GPU has done with it."""
    size = dist.get_world_size()
    for turn in range(20):
        torch.cuda._sleep(20_000_000)
        kept = torch.full((1 << 20,), float(turn), device=GPU)
        work = dist.all_reduce(kept, async_op=True)
        dist.all_reduce(torch.full((1 << 20,), 1.0, device=GPU), async_op=True)
        torch.full((1 << 20,), -1.0, device=GPU)
        work.wait()
        assert kept.eq(float(turn * size)).all().item()


def case_messages(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    for count in (1, 1000, 2_000_000):
        box = torch.zeros(count, device=GPU)
        work = dist.isend(torch.full((count,), rank + 1.0, device=GPU), (rank + 1) % size)
        dist.recv(box, (rank - 1) % size)
        work.wait()
        assert box.eq((rank - 1) % size + 1.0).all().item()
    column = torch.zeros(30, 2, device=GPU)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((30,), rank + 1.0, device=GPU), (rank + 1) % size),
                                    dist.P2POp(dist.irecv, column[:, 1], (rank - 1) % size)])
    for work in works:
        work.wait()
    assert column[:, 1].eq((rank - 1) % size + 1.0).all().item() and column[:, 0].eq(0).all().item()


def case_groups(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    for ranks in ([size - 1], list(range(size)), list(range(size))[::-1][:2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            x = torch.full((2000,), float(rank), device=GPU)
            dist.all_reduce(x, group=group)
            assert x.eq(float(sum(ranks))).all().item()


def case_both_devices(gloo):
    """Calls on the CPU and on the GPU keep their order."""
    size = dist.get_world_size()
    for _ in range(20):
        a, b = torch.ones(100), torch.ones(100, device=GPU)
        first = dist.all_reduce(a, async_op=True)
        second = dist.all_reduce(b, async_op=True)
        first.wait()
        second.wait()
        assert a.eq(size).all() and b.eq(size).all().item()
    try:
        dist.all_gather([torch.zeros(1) for _ in range(size)], torch.zeros(1, device=GPU))
    except (maniple_torch.InvalidArgument, RuntimeError) as error:
        assert "device" in str(error)
    else:
        raise AssertionError("an all_gather from the GPU to the CPU was accepted")


def case_registered_memory(gloo):
    if ENGINE == "host":
        return
    x = maniple_torch.allocate((1000, 3), device=GPU)
    x.fill_(dist.get_rank())
    dist.all_reduce(x)
    assert x.eq(float(sum(range(dist.get_world_size())))).all().item()


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(20, 400), torch.nn.ReLU(), torch.nn.Linear(400, 40), torch.nn.ReLU(),
                               torch.nn.Linear(40, 4)).double()


def losses_of(wrapped, device):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(8, 20, generator=generator, dtype=torch.float64).to(device)
        y = torch.randint(0, 4, (8,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def case_ddp(gloo):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    expected = losses_of(DDP(model(), process_group=gloo), "cpu")
    for options in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}, {"static_graph": True}, {"find_unused_parameters": True}):
        torch.testing.assert_close(losses_of(DDP(model().to(GPU), device_ids=[0], **options), GPU), expected)
    wrapped = DDP(model().to(GPU), device_ids=[0])
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    torch.testing.assert_close(losses_of(wrapped, GPU), expected)
    wrapped = DDP(model().to(GPU), device_ids=[0])
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    torch.testing.assert_close(losses_of(wrapped, GPU), expected, rtol=0.02, atol=0.02)


def case_fsdp(gloo):
    needs(2, 6, "FSDP as it is tested here")
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import fully_shard

    expected = losses_of(DDP(model(), process_group=gloo), "cpu")
    torch.testing.assert_close(losses_of(FSDP(model().to(GPU), device_id=GPU), GPU), expected)
    sharded = model().to(GPU)
    fully_shard(sharded, mesh=torch.distributed.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),)))
    torch.testing.assert_close(losses_of(sharded, GPU), expected)


def lose_a_rank():
    dist.init_process_group("maniple", pg_options=maniple_torch.Options(ENGINE, 0), timeout=datetime.timedelta(seconds=60))
    dist.all_reduce(torch.ones(1, device=GPU))
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        dist.all_reduce(torch.ones(1000, device=GPU), async_op=True).wait(datetime.timedelta(seconds=30))
        torch.cuda.synchronize()
        dist.all_reduce(torch.ones(1, device=GPU), async_op=True).wait(datetime.timedelta(seconds=30))
    except maniple_torch.PeerLost as error:
        print(f"PeerLost: {error}", flush=True)
    os._exit(0)


def bind_a_device():
    """PyTorch then splits groups where it would otherwise make new ones."""
    dist.init_process_group("maniple", pg_options=maniple_torch.Options(ENGINE, 0), device_id=GPU, timeout=datetime.timedelta(seconds=60))
    me, size = dist.get_rank(), dist.get_world_size()
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (1, size), mesh_dim_names=("one", "all"))
    for name, expected in (("one", float(me)), ("all", float(sum(range(size))))):
        x = torch.full((3,), float(me), device=GPU)
        dist.all_reduce(x, group=mesh[name].get_group())
        assert x.tolist() == [expected] * 3, (name, x)
    half = dist.split_group(split_ranks=[[0], list(range(1, size))])
    x = torch.ones(1, device=GPU)
    dist.all_reduce(x, group=half)
    assert x.item() == (1 if me == 0 else size - 1)
    first = dist.new_group([0])
    if me == 0:
        dist.all_reduce(x, group=first)
    dist.barrier()  # PyTorch's store is in rank 0, and a group that is split asks it
    print("bound", flush=True)
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    if ENGINE == "nccl":
        # Several ranks on one GPU, which NCCL otherwise refuses.
        os.environ["NCCL_HOSTID"] = "host " + os.environ["RANK"]
    torch.cuda.set_device(0)
    if sys.argv[1:] == ["lost"]:
        lose_a_rank()
    if sys.argv[1:] == ["bound"]:
        bind_a_device()
    main(globals(), pg_options=maniple_torch.Options(ENGINE, 0))
