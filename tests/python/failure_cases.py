"""What goes wrong, each in a job of its own: failure_cases.py NAME. Prints "READY" when it is about to wait, and "CAUGHT class: text"."""

import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist

import maniple_torch


def init(seconds=120):
    torch.set_num_threads(1)
    dist.init_process_group("maniple", timeout=datetime.timedelta(seconds=seconds))
    return dist.get_rank(), dist.get_world_size()


def caught(call):
    print("READY", flush=True)
    try:
        call()
    except maniple_torch.Error as error:
        print(f"CAUGHT {type(error).__name__}: {error}", flush=True)
    except RuntimeError as error:
        print(f"CAUGHT RuntimeError: {error}", flush=True)
    else:
        print("NOTHING WAS RAISED", flush=True)


def meet():
    """By the store: until all ranks have left init_process_group, which not all versions make them wait for."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here {dist.get_rank()}", "1")
    store.wait([f"here {rank}" for rank in range(dist.get_world_size())], datetime.timedelta(seconds=100))


def killed():
    """Rank 1 is killed while the others wait for it; what they do next fails at once, too."""
    rank, _ = init()
    meet()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    caught(lambda: dist.all_reduce(torch.ones(4)))
    caught(lambda: dist.all_reduce(torch.ones(4)))


def killed_in_backward(wrapper=torch.nn.parallel.DistributedDataParallel):
    """The same in backward of DDP: the class of the error passes through autograd."""
    rank, _ = init()
    model = wrapper(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    caught(lambda: model(torch.ones(2, 4)).sum().backward())


def killed_in_backward_of_ours():
    killed_in_backward(maniple_torch.DistributedDataParallel)


def mismatched():
    rank, _ = init()
    caught(lambda: dist.all_reduce(torch.ones(4 + rank)))


def mismatched_operations():
    rank, _ = init()
    caught(lambda: dist.all_reduce(torch.ones(4)) if rank == 0 else dist.broadcast(torch.ones(4), 0))


def late():
    rank, _ = init(seconds=10)  # that long the ranks may take to start, too
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        caught(lambda: dist.all_reduce(torch.ones(4)))
        store.set("rank 0 has given up", "1")
    else:
        store.wait(["rank 0 has given up"], datetime.timedelta(seconds=100))
        caught(lambda: dist.all_reduce(torch.ones(4)))


def missing_at_the_monitored_barrier():
    rank, size = init()
    if rank == 0:
        caught(lambda: maniple_torch.monitored_barrier(timeout=datetime.timedelta(seconds=1)))
    dist.barrier()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size  # the group is as good as before


def aborted():
    rank, _ = init()
    meet()
    if rank == 1:
        maniple_torch.abort()
    caught(lambda: dist.all_reduce(torch.ones(4)))


def interrupted(asynchronous=False):
    """Rank 0 waits for rank 1 in vain; the test sends SIGINT to rank 0."""
    rank, _ = init()
    if rank == 1:
        print("READY", flush=True)
        signal.pause()  # until the test kills it
    try:
        work = dist.all_reduce(torch.ones(1_000_000 if asynchronous else 1), async_op=True)
        print("READY", flush=True)
        work.wait()
    except KeyboardInterrupt:
        print("CAUGHT KeyboardInterrupt", flush=True)
        os._exit(0)


def interrupted_asynchronous():
    interrupted(asynchronous=True)


def again():
    """The default group is destroyed and made again, over one server."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = {} if torch.__version__.startswith("1.") else {"use_libuv": False}  # Debian 13's PyTorch has none
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0, **options)
    for turn in range(3):
        dist.init_process_group("maniple", store=dist.PrefixStore(str(turn), store), rank=rank, world_size=size)
        x = torch.full((10,), float(turn))
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((10,), float(turn * size))), x
        group = dist.new_group(list(range(size)))
        dist.all_reduce(x, group=group)
        del group
        dist.barrier()
        dist.destroy_process_group()
    print("OK", flush=True)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def data_loader(method):
    """Workers of a DataLoader while collectives run."""
    rank, size = init()
    dist.all_reduce(torch.ones(1))
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method)
    total = torch.zeros(1)
    for batch in loader:
        total += batch.sum()
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(total)
    assert total.item() == size * sum(range(8)), total
    print("OK", flush=True)


def data_loader_fork():
    data_loader("fork")


def data_loader_spawn():
    data_loader("spawn")


def plugin():
    """A plugin is found, though the program is Python's and not Maniple's."""
    options = maniple_torch.Options()
    options._engine = lambda: os.environ["MANIPLE_TEST_BACKEND"]
    dist.init_process_group("maniple", pg_options=options)
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert x.eq(dist.get_world_size()).all()
    dist.barrier()
    dist.destroy_process_group()
    print("OK", flush=True)


def threads():
    """The interpreter is free while a thread waits: the other one sends what the first waits for."""
    import threading

    rank, size = init()
    group = dist.new_group()
    box = torch.zeros(1)
    if rank == 0:
        waiting = threading.Thread(target=lambda: dist.recv(box, 1))
        waiting.start()
        dist.all_reduce(torch.ones(1), group=group)  # rank 1 sends after it
        waiting.join()
        assert box.item() == 7
    else:
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 1:
            dist.send(torch.tensor([7.0]), 0)
    print("OK", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
