"""Every operation of the backend, compared with Gloo's result where Gloo has the operation, otherwise with its definition."""

import datetime

import torch
import torch.distributed as dist

import maniple_torch
from cases import Skip, main, needs

FLOATS = [torch.float16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
SIZES = [0, 1, 7, 1000, 70_000]  # the last is larger than what is deferred


def values(dtype, count, seed=0):
    """Small whole numbers: sums and products of a few ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(17 * (dist.get_rank() + 1) + seed)
    return torch.randint(1, 4, (count,), generator=generator).to(dtype)


def everyone():
    return range(dist.get_world_size())


def values_of(rank, dtype, count, seed=0):
    generator = torch.Generator().manual_seed(17 * (rank + 1) + seed)
    return torch.randint(1, 4, (count,), generator=generator).to(dtype)


def same(ours, theirs):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (ours.dtype, theirs.dtype, ours.shape, theirs.shape)
    assert torch.equal(ours, theirs), (ours, theirs)


def case_all_reduce(gloo):
    operations = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    for dtype in FLOATS + INTEGERS:
        bits = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR] if dtype in INTEGERS else []
        for op in operations + bits:
            for count in SIZES:
                ours, theirs = values(dtype, count), values(dtype, count)
                dist.all_reduce(ours, op)
                dist.all_reduce(theirs, op, group=gloo) if count else None
                same(ours, theirs)


def case_all_reduce_bfloat16_and_bool(gloo):
    ours = values(torch.bfloat16, 100)
    dist.all_reduce(ours)
    same(ours, sum(values_of(r, torch.float32, 100) for r in everyone()).to(torch.bfloat16))
    flags = torch.tensor([dist.get_rank() == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    same(flags, torch.tensor([True, True, False]))


def case_average_and_premultiplied(gloo):
    x = values(torch.float32, 1000)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    torch.testing.assert_close(x, sum(values_of(r, torch.float32, 1000) for r in everyone()) / dist.get_world_size())
    make = getattr(dist, "_make_nccl_premul_sum", None) or dist.distributed_c10d._make_nccl_premul_sum
    x = values(torch.float32, 1000)
    dist.all_reduce(x, make(0.5))
    torch.testing.assert_close(x, 0.5 * sum(values_of(r, torch.float32, 1000) for r in everyone()))


def case_complex(gloo):
    x = torch.complex(values(torch.float32, 9), values(torch.float32, 9, 1))
    expected = sum(torch.complex(values_of(r, torch.float32, 9), values_of(r, torch.float32, 9, 1)) for r in everyone())
    ours = x.clone()
    dist.all_reduce(ours)
    torch.testing.assert_close(ours, expected)
    refused(lambda: dist.all_reduce(x.clone(), dist.ReduceOp.MAX), (RuntimeError, ValueError))


def refused(call, kind=maniple_torch.InvalidArgument, text=""):
    """The call is refused, with this in the message, and the group stays usable."""
    try:
        call()
    except kind as error:
        assert str(error) and text in str(error), error
    else:
        raise AssertionError("it was not refused")
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size()


def case_not_contiguous(gloo):
    for make in (lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:, 1:]):
        base_ours, base_theirs = values(torch.float32, 60).view(6, 10), values(torch.float32, 60).view(6, 10)
        ours, theirs = make(base_ours), make(base_theirs)
        copy = theirs.contiguous()
        dist.all_reduce(ours)
        dist.all_reduce(copy, group=gloo)
        theirs.copy_(copy)
        same(base_ours, base_theirs)  # the rest is untouched
    picture = values(torch.float32, 2 * 3 * 4 * 5).view(2, 3, 4, 5)
    ours = picture.to(memory_format=torch.channels_last) if dist.get_rank() == 0 else picture.clone()
    dist.all_reduce(ours)  # elements go together by index, not by address
    dist.all_reduce(picture, group=gloo)
    same(ours.contiguous(), picture)


def case_parameters_that_require_gradients(gloo):
    weight = torch.nn.Parameter(values(torch.float32, 12).view(3, 4))
    with torch.no_grad():
        dist.all_reduce(weight)
        dist.broadcast(weight.t(), 0)
    assert weight.requires_grad


def case_broadcast(gloo):
    for dtype in FLOATS + INTEGERS + [torch.bool, torch.bfloat16, torch.int16, torch.complex64]:
        for root in everyone():
            for count in SIZES:
                x = values(dtype, count)
                dist.broadcast(x, root)
                same(x, values_of(root, dtype, count))
    x = values(torch.float32, 12).view(3, 4).t()
    dist.broadcast(x, 0)
    same(x.contiguous(), values_of(0, torch.float32, 12).view(3, 4).t().contiguous())


def case_reduce(gloo):
    for root in everyone():
        for count in SIZES:
            ours, theirs = values(torch.float32, count), values(torch.float32, count)
            dist.reduce(ours, root)
            dist.reduce(theirs, root, group=gloo) if count else None
            if dist.get_rank() == root:
                same(ours, theirs)
            else:
                same(ours, values(torch.float32, count))


def case_all_gather(gloo):
    for dtype in FLOATS + INTEGERS + [torch.bool]:
        for count in SIZES:
            ours = [torch.zeros(count, dtype=dtype) for _ in everyone()]
            dist.all_gather(ours, values(dtype, count))
            for r in everyone():
                same(ours[r], values_of(r, dtype, count))
    whole = torch.zeros(dist.get_world_size(), 5)  # views of one tensor
    dist.all_gather(list(whole), values(torch.float32, 5))
    same(whole, torch.stack([values_of(r, torch.float32, 5) for r in everyone()]))
    uneven = [torch.zeros(r + 1) for r in everyone()]
    dist.all_gather(uneven, values(torch.float32, dist.get_rank() + 1))
    for r in everyone():
        same(uneven[r], values_of(r, torch.float32, r + 1))


def case_all_gather_into_tensor(gloo):
    gather = getattr(dist, "all_gather_into_tensor", None) or dist._all_gather_base
    for count in SIZES:
        out = torch.zeros(dist.get_world_size() * count)
        gather(out, values(torch.float32, count))
        same(out, torch.cat([values_of(r, torch.float32, count) for r in everyone()]))


def case_coalesced(gloo):
    tensors = [values(torch.float32, 5), values(torch.float32, 0), values(torch.float32, 40_000), values(torch.float32, 12).view(3, 4).t()]
    expected = [t.contiguous() for t in tensors]
    for tensor in expected:
        dist.all_reduce(tensor, group=gloo) if tensor.numel() else None
    dist.all_reduce_coalesced(tensors)
    for ours, theirs in zip(tensors, expected):
        same(ours.contiguous(), theirs)
    if not hasattr(dist, "all_gather_coalesced"):
        return
    out = [[torch.zeros(5), torch.zeros(2, 2)] for _ in everyone()]
    dist.all_gather_coalesced(out, [values(torch.float32, 5), values(torch.float32, 4).view(2, 2)])
    for r in everyone():
        same(out[r][0], values_of(r, torch.float32, 5))
        same(out[r][1], values_of(r, torch.float32, 4).view(2, 2))


def case_coalescing_manager(gloo):
    needs(2, 6, "coalescing manager for any backend")
    size, me = dist.get_world_size(), dist.get_rank()
    a, b = torch.ones(3), torch.full((5,), 2.0)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    same(a, torch.full((3,), float(size)))
    same(b, torch.full((5,), 2.0 * size))
    wide, narrow = torch.zeros(2 * size), torch.zeros(4 * size)
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(wide, torch.full((2,), float(me)))
        dist.all_gather_into_tensor(narrow, torch.full((4,), float(me)))
    same(wide, torch.arange(float(size)).repeat_interleave(2))
    same(narrow, torch.arange(float(size)).repeat_interleave(4))
    part, other = torch.zeros(2), torch.zeros(3)
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(part, torch.ones(2 * size))
        dist.reduce_scatter_tensor(other, torch.ones(3 * size))
    same(part, torch.full((2,), float(size)))
    same(other, torch.full((3,), float(size)))


def case_gather_and_scatter(gloo):
    for root in everyone():
        for count in SIZES:
            here = dist.get_rank() == root
            out = [torch.zeros(count) for _ in everyone()] if here else None
            dist.gather(values(torch.float32, count), out, dst=root)
            for r in everyone() if here else []:
                same(out[r], values_of(r, torch.float32, count))
            mine = torch.zeros(count)
            dist.scatter(mine, [values(torch.float32, count, r) for r in everyone()] if here else None, src=root)
            same(mine, values_of(root, torch.float32, count, dist.get_rank()))


def case_reduce_scatter(gloo):
    me = dist.get_rank()
    for count in SIZES:
        expected = sum(values_of(r, torch.float32, count, me) for r in everyone()) if count else torch.zeros(0)
        out = torch.zeros(count)
        dist.reduce_scatter(out, [values(torch.float32, count, r) for r in everyone()])
        same(out, expected)
        out = torch.zeros(count)
        scatter = getattr(dist, "reduce_scatter_tensor", None) or dist._reduce_scatter_base
        scatter(out, torch.cat([values(torch.float32, count, r) for r in everyone()]))
        same(out, expected)
    out = torch.zeros(me + 1)
    dist.reduce_scatter(out, [values(torch.float32, r + 1, r) for r in everyone()])  # parts of different sizes
    same(out, sum(values_of(r, torch.float32, me + 1, me) for r in everyone()))


def case_all_to_all(gloo):
    me, size = dist.get_rank(), dist.get_world_size()
    for count in SIZES:
        out = torch.zeros(size * count)
        dist.all_to_all_single(out, torch.cat([values(torch.float32, count, r) for r in everyone()]))
        same(out, torch.cat([values_of(r, torch.float32, count, me) for r in everyone()]))
    # Rank r sends (r + s) rows of 3 to rank s.
    send = [me + s for s in everyone()]
    receive = [r + me for r in everyone()]
    source = torch.arange(3 * sum(send), dtype=torch.float32).view(-1, 3) + 1000 * me
    ours, theirs = torch.zeros(sum(receive), 3), torch.zeros(sum(receive), 3)
    dist.all_to_all_single(ours, source, receive, send)
    dist.all_to_all_single(theirs, source, receive, send, group=gloo)
    same(ours, theirs)
    out = [torch.zeros(r + me) for r in everyone()]
    dist.all_to_all(out, [torch.full((me + s,), float(10 * me + s)) for s in everyone()])
    for r in everyone():
        same(out[r], torch.full((r + me,), float(10 * r + me)))
    refused(lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [5] * size, [5] * size))


def case_messages(gloo):
    me, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    after, before = (me + 1) % size, (me - 1) % size
    for count in SIZES:
        inbox = torch.zeros(count)
        work = dist.isend(values(torch.float32, count), after)
        dist.recv(inbox, before)
        work.wait()
        same(inbox, values_of(before, torch.float32, count))
    # Tags tell messages apart, whatever their order.
    first, second = torch.zeros(1), torch.zeros(1)
    works = [dist.isend(torch.tensor([1.0]), after, tag=1), dist.isend(torch.tensor([2.0]), after, tag=2)]
    dist.recv(second, before, tag=2)
    dist.recv(first, before, tag=1)
    assert (first.item(), second.item()) == (1, 2)
    for work in works:
        work.wait()
    if me == 0:
        seen = set()
        for _ in range(size - 1):
            box = torch.zeros(2, 3).t()  # not contiguous
            source = dist.recv(box, tag=5)  # a tag of its own: what ranks send next may be here first
            assert torch.equal(box, torch.full((3, 2), float(source))), (box, source)
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.full((3, 2), float(me)), 0, tag=5)
    box = torch.zeros(3)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((3,), float(me)), after),
                                        dist.P2POp(dist.irecv, box, before)]):
        work.wait()
    same(box, torch.full((3,), float(before)))


def case_objects(gloo):
    me = dist.get_rank()
    out = [None for _ in everyone()]
    dist.all_gather_object(out, {"rank": me, "text": "x" * me})
    assert out == [{"rank": r, "text": "x" * r} for r in everyone()]
    things = ["a", {"b": 1}] if me == 0 else [None, None]
    dist.broadcast_object_list(things, src=0)
    assert things == ["a", {"b": 1}]
    out = [None for _ in everyone()] if me == 0 else None
    dist.gather_object(me, out, dst=0)
    assert me != 0 or out == list(everyone())
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in everyone()] if me == 0 else None, src=0)
    assert mine == [f"for {me}"]


def case_asynchronous(gloo):
    """Operations run in the order of the calls, however they are waited for."""
    size = dist.get_world_size()
    for count in (1, 100_000):
        x = torch.ones(count)
        works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
        works[4].wait()
        assert all(work.is_completed() for work in works)
        same(x, torch.full((count,), float(size**5)))
    x = torch.ones(3)
    dist.all_reduce(x, async_op=True)  # without a wait
    y = torch.ones(3)
    dist.all_reduce(y)
    same(x, torch.full((3,), float(size)))
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    same(x, torch.full((3,), float(size)))


def case_never_waited_for(gloo):
    """An operation without a wait is started all the same: here by the timer, as rank 0 goes on with a message."""
    me, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    x = torch.ones(1)
    if me == 0:
        work = dist.all_reduce(x, async_op=True)
        box = torch.zeros(1)
        dist.recv(box, 1)  # sent after the all_reduce
        work.wait()
    else:
        dist.all_reduce(x)
        if me == 1:
            dist.send(torch.ones(1), 0)
    assert x.item() == size


def case_futures(gloo):
    size = dist.get_world_size()
    x = torch.ones(4)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    same(doubled.wait(), torch.full((4,), 2.0 * size))

    def again(done):  # waits for another operation inside a callback
        y = done.value()[0].clone()
        return dist.all_reduce(y, async_op=True).get_future().wait()[0]

    x = torch.ones(4)
    same(dist.all_reduce(x, async_op=True).get_future().then(again).wait(), torch.full((4,), float(size * size)))


def case_groups(gloo):
    me, size = dist.get_rank(), dist.get_world_size()
    evens, odds = list(range(0, size, 2)), list(range(1, size, 2))
    groups = [dist.new_group(ranks) for ranks in (evens, odds) if ranks]
    mine = groups[me % 2]
    x = torch.tensor([float(me)])
    dist.all_reduce(x, group=mine)
    assert x.item() == sum(evens if me % 2 == 0 else odds)
    pair = [size - 1, 0] if size > 1 else [0]
    backwards = dist.new_group(sorted(pair))
    if me in pair:
        x = torch.tensor([float(me)])
        dist.broadcast(x, size - 1, group=backwards)  # src is a rank of the world
        assert x.item() == size - 1
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size


def case_split_of_a_backend(gloo):
    """As PyTorch 2.9 and later call it."""
    backend = maniple_torch._backend_of(dist.distributed_c10d._get_default_group())
    me, size = dist.get_rank(), dist.get_world_size()
    mine, limit = list(range(me % 2, size, 2)), datetime.timedelta(seconds=20)
    for turn in range(2):  # the same ranks once more
        store = dist.HashStore()
        half = backend.split_(store, mine, limit)
        assert backend.split_(store, mine, limit) is half  # for another type of device
        assert (half.rank(), half.size(), "again" in half.group_name()) == (me // 2, len(mine), turn == 1)
        x = torch.tensor([float(me)])
        half.allreduce([x]).wait()
        assert x.item() == sum(mine)
    assert half.split_(dist.HashStore(), [half.rank()], limit).size() == 1  # a group of a group
    assert (backend.split_(dist.HashStore(), [0], limit) is None) == (me != 0)


def case_split(gloo):
    backend = maniple_torch._backend_of(dist.distributed_c10d._get_default_group())
    if not getattr(backend, "supports_splitting", False):
        raise Skip(f"PyTorch {torch.__version__} does not split groups by their backends")
    world, me, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    mine = list(range(me % 2, size, 2))
    for _ in range(2):  # the same ranks once more
        half = world.split_group(mine, timeout=datetime.timedelta(seconds=20))
        assert (half.rank(), half.size()) == (me // 2, len(mine))
        x = torch.tensor([float(me)])
        half.allreduce([x]).wait()
        assert x.item() == sum(mine)
        assert maniple_torch._backend_of(half).options._timeout == datetime.timedelta(seconds=20)
    alone = half.split_group([half.rank()])  # a group of a group
    assert alone.size() == 1
    first = world.split_group([0])
    assert (first is None) == (me != 0)


def merge_twice(name, merge):
    """Groups of the odd and the even ranks become one again. Returns the second of these."""
    me, size = dist.get_rank(), dist.get_world_size()
    for turn in range(2):
        store = dist.PrefixStore(f"{name} {turn}", dist.distributed_c10d._get_default_store())
        merged = merge(store, me, size)
        assert merged.size() == size
        x = torch.tensor([float(me), 1.0])
        merged.allreduce([x]).wait()
        assert x.tolist() == [sum(range(size)), size]
        ranks = torch.zeros(size, dtype=torch.int64)
        ranks[merged.rank()] = 1
        merged.allreduce([ranks]).wait()
        assert ranks.tolist() == [1] * size
    return merged


def case_merge_of_a_backend(gloo):
    """As PyTorch 2.10 and later call it."""
    backend = maniple_torch._backend_of(dist.distributed_c10d._get_default_group())
    limit = datetime.timedelta(seconds=20)
    half = backend.split_(dist.HashStore(), list(range(dist.get_rank() % 2, dist.get_world_size(), 2)), limit)

    def merge(store, me, size):
        merged = half.merge_(store, me, size, limit)
        assert merged is half.merge_(store, me, size, limit)  # for another type of device
        return merged

    merged = merge_twice("backend", merge)
    assert merged.split_(dist.HashStore(), [merged.rank()], limit).size() == 1
    try:  # ranks that do not come are named
        half.merge_(dist.PrefixStore("alone", dist.HashStore()), 0, 2, datetime.timedelta(milliseconds=200))
        raise AssertionError("a group of which half is missing")
    except maniple_torch.Error as error:
        assert "1 of 2" in str(error) or "rank 1" in str(error), error


def case_merge(gloo):
    world, me = dist.group.WORLD, dist.get_rank()
    if not hasattr(world, "merge_remote_group"):
        raise Skip(f"PyTorch {torch.__version__} does not merge groups")
    limit = datetime.timedelta(seconds=20)
    half = world.split_group(list(range(me % 2, dist.get_world_size(), 2)), timeout=limit)
    merged = merge_twice("group", lambda store, _, size: half.merge_remote_group(store, size, limit, "all again"))
    assert maniple_torch._backend_of(merged).options._timeout == limit
    assert merged.group_name == "all again"


def case_options(gloo):
    needs(2, 6, "options of a group that was made")
    group = dist.new_group(timeout=datetime.timedelta(seconds=50))  # its own, as it is aborted in the end
    backend = maniple_torch._backend_of(group)
    assert backend.options._timeout == datetime.timedelta(seconds=50)
    backend._set_default_timeout(datetime.timedelta(seconds=23))
    assert backend.options._timeout == datetime.timedelta(seconds=23)
    dist.all_reduce(torch.ones(1), group=group)
    backend.options._timeout = datetime.timedelta(milliseconds=100)
    if dist.get_world_size() > 1 and dist.get_rank() == 0:
        try:
            dist.recv(torch.ones(1), 1, group=group)
            raise AssertionError("a message that was not sent")
        except maniple_torch.Timeout as error:
            assert "0.1 s" in str(error), error
    dist.barrier()


def case_sequence_numbers(gloo):
    group = dist.distributed_c10d._get_default_group()
    backend = maniple_torch._backend_of(group)
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    assert backend._get_sequence_number_for_group() == before + 2


def case_registered_memory(gloo):
    x = maniple_torch.allocate((3, 50_000))
    assert x.shape == (3, 50_000) and torch.count_nonzero(x) == 0
    x += dist.get_rank() + 1
    dist.all_reduce(x)
    assert torch.equal(x, torch.full_like(x, float(sum(r + 1 for r in everyone()))))
    same(maniple_torch.allocate(0), torch.zeros(0))


def case_monitored_barrier(gloo):
    maniple_torch.monitored_barrier()


def case_sparse(gloo):
    rank, size = dist.get_rank(), dist.get_world_size()

    def rows(dtype, where, dense_dims):  # some of them twice
        generator = torch.Generator().manual_seed(rank)
        shape = (len(where), *([3] * dense_dims))
        elements = torch.randint(-9, 9, shape, generator=generator).to(dtype)
        places = torch.tensor([where, [at % 4 for at in where]], dtype=torch.int64).view(2, len(where))
        return torch.sparse_coo_tensor(places, elements, (10, 4, *([3] * dense_dims)), dtype=dtype)

    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        for dense_dims in (0, 1, 2):
            for where in ([rank, 9, rank, 5], [], [7] * (rank + 1), list(range(10)) if rank == size - 1 else []):
                ours = rows(dtype, where, dense_dims)
                expected = ours.to_dense().to(torch.float64)
                dist.all_reduce(expected, group=gloo)
                dist.all_reduce(ours)
                assert ours.is_sparse and ours.is_coalesced()
                same(ours.to_dense().to(torch.float64), expected)
    ours = rows(torch.float32, [rank, rank, 2], 1)
    expected = ours.to_dense() / size
    dist.all_reduce(expected, group=gloo)
    work = dist.all_reduce(ours, dist.ReduceOp.AVG, async_op=True)
    torch.testing.assert_close(work.get_future().wait()[0].to_dense(), expected)
    torch.testing.assert_close(ours.to_dense(), expected)


def case_refusals(gloo):
    sparse = (maniple_torch.Unsupported, NotImplementedError)  # PyTorch 2 refuses most of these by itself
    refused(lambda: dist.broadcast(torch.ones(3).to_sparse(), 0), sparse)
    refused(lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX), maniple_torch.Unsupported)
    refused(lambda: dist.all_reduce(torch.ones(3, 3).to_sparse_csr()), sparse)
    if dist.get_world_size() > 1:
        refused(lambda: dist.all_reduce(torch.ones(3 + dist.get_rank()).to_sparse()), text="has the shape [4] with 1 sparse, on rank 0 [3]")
    refused(lambda: dist.all_gather([torch.ones(1)] * (dist.get_world_size() + 1), torch.ones(1)))
    refused(lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND))
    assert issubclass(maniple_torch.InvalidArgument, ValueError) and issubclass(maniple_torch.PeerLost, RuntimeError)


def case_functional_collectives(gloo):
    needs(2, 6, "functional collectives that a third backend can be tested with")
    import torch.distributed._functional_collectives as functional

    size = dist.get_world_size()
    group = dist.group.WORLD
    x = values(torch.float32, 2 * size)
    total = sum(values_of(r, torch.float32, 2 * size) for r in everyone())
    same(functional.all_reduce(x, "sum", group) + 0, total)
    same(functional.all_gather_tensor(x, 0, group) + 0, torch.cat([values_of(r, torch.float32, 2 * size) for r in everyone()]))
    me = dist.get_rank()
    same(functional.reduce_scatter_tensor(x, "sum", 0, group) + 0, total[2 * me:2 * me + 2])
    same(functional.all_to_all_single(x, None, None, group) + 0,
         torch.cat([values_of(r, torch.float32, 2 * size)[2 * me:2 * me + 2] for r in everyone()]))


if __name__ == "__main__":
    main(globals())
