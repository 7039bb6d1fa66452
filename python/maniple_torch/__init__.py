"""Maniple as a backend of torch.distributed.

    import torch.distributed as dist, maniple_torch
    dist.init_process_group("maniple")

Ranks may be started by torchrun, `maniple run`, torch.multiprocessing.spawn, or by hand. See docs/python.md.
"""

import atexit
import datetime
import os
from typing import Optional, Sequence, Union

import torch
import torch.distributed as _dist

if not _dist.is_available():
    raise ImportError("maniple_torch: this PyTorch was built without torch.distributed")

__all__ = [
    "Error", "InvalidArgument", "Timeout", "PeerLost", "Aborted", "Mismatch", "ProtocolError", "SystemError", "Unsupported",
    "DistributedDataParallel", "Options", "abort", "allocate", "monitored_barrier", "transport", "__version__",
]

# ---- Errors: the classes of maniple/comm/error.h ---------------------------------------------------------------------


class Error(getattr(_dist, "DistBackendError", RuntimeError)):
    """Every failure that Maniple reports. The text says who, with whom, how far, how long and what to do."""


class InvalidArgument(Error, ValueError):
    """The caller passed something that can never work. Nothing was done, and the group stays usable."""


class Timeout(Error):
    """The operation's time passed; the text names the ranks that were awaited."""


class PeerLost(Error):
    """Another rank's process ended, stopped or became unreachable."""


class Aborted(Error):
    """The group had failed before this call, or was aborted; the text repeats the first cause."""


class Mismatch(Error):
    """Ranks called different things: another operation, dtype, count, root or order."""


class ProtocolError(Error):
    """A peer sent bytes that Maniple never sends."""


class SystemError(Error):  # noqa: A001  (its name in C++)
    """The operating system refused something."""


class Unsupported(Error):
    """This backend cannot do it; the text says what can."""


def _built_for_another_torch(built_for: str) -> bool:
    return built_for.split(".")[:2] != torch.__version__.split(".")[:2]


try:
    from . import _shim
except ImportError as error:
    raise ImportError(
        f"maniple_torch: its module for this PyTorch ({torch.__version__}) cannot be loaded: {error}. It is compiled for one "
        "version of PyTorch and Python: build it again, with this python3 (docs/python.md)") from error
if _built_for_another_torch(_shim.built_for()):
    raise ImportError(f"maniple_torch: it was built for PyTorch {_shim.built_for()}, and this is {torch.__version__}: build it "
                      "again, with this python3 (docs/python.md)")

_shim.set_error_classes([InvalidArgument, Timeout, PeerLost, Aborted, Mismatch, ProtocolError, SystemError, Unsupported])
__version__ = _shim.version()

# ---- Groups ----------------------------------------------------------------------------------------------------------


class Options:
    """How the default group communicates tensors of GPUs: init_process_group("maniple", pg_options=maniple_torch.Options(cuda="cuda")).

    cuda    "host": through host memory, on any GPU. "cuda": ranks that share a GPU, or GPUs of one host that reach each other.
            "nccl": a GPU for each rank. All ranks pass the same.
    device  the GPU of this rank, for "cuda" and "nccl". None: the current one if CUDA is in use already, otherwise LOCAL_RANK, otherwise
            the rank on this host, modulo the number of GPUs."""

    def __init__(self, cuda: str = "host", device: Union[None, int, str, torch.device] = None):
        if cuda not in ("host", "cuda", "nccl"):
            raise InvalidArgument(f'maniple_torch.Options: cuda is "{cuda}"; expected "host", "cuda" or "nccl"')
        if isinstance(device, (str, torch.device)):
            device = torch.device(device)
            if device.type != "cuda":
                raise InvalidArgument(f"maniple_torch.Options: device is {device}; expected a GPU")
            device = torch.cuda.current_device() if device.index is None else device.index
        self.cuda = cuda
        self.device = device

    def _engine(self) -> str:
        return "native" if self.cuda == "host" else f"cpu:native,cuda:{self.cuda}"

    def _device(self) -> int:
        if self.cuda == "host" or self.device is not None:
            return -1 if self.device is None else self.device
        if torch.cuda.is_initialized():
            return torch.cuda.current_device()
        local = os.environ.get("LOCAL_RANK", "")
        return int(local) % max(1, torch.cuda.device_count()) if local.isdigit() else -1


def _underlying(store):
    while True:
        inner = getattr(store, "underlying_store", None)
        if inner is None:
            return store
        store = inner


def _master_of(store) -> str:
    """A host that all ranks reach: the store's, or the one the launcher set; empty if unknown."""
    host = getattr(_underlying(store), "host", None)
    return host or os.environ.get("MASTER_ADDR", "")


def _describe(store) -> str:
    inner = _underlying(store)
    kind = type(inner).__name__
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    if host:
        return f"{kind} at {host}:{port}"
    path = getattr(inner, "path", None)
    return f"{kind} in {path}" if path else kind


def _create(options, chosen=None):
    """Called by torch.distributed for each group that this process is in. `chosen` is what was passed as pg_options."""
    if chosen is not None and not isinstance(chosen, Options):
        raise InvalidArgument(f"maniple_torch: pg_options is a {type(chosen).__name__}; expected maniple_torch.Options")
    ranks = list(options.global_ranks_in_group)
    timeout = options.timeout
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    seconds = min(max(seconds, 0.001), 1e9)
    name = f"group {options.group_id}" if ranks else "world"
    if chosen is not None and ranks:
        raise InvalidArgument("maniple_torch: pg_options of new_group; a group has the options of the default group")
    group = _shim.make_subgroup(ranks, seconds, name) if ranks else None
    chosen = chosen if chosen is not None else Options()
    # The default group; or one next to a default group of another backend, which then counts its ranks by itself.
    if group is None:
        group = _shim.make_world(options.store, options.group_rank, options.group_size, seconds, name, _master_of(options.store),
                                 _describe(options.store), not ranks, chosen._engine(), chosen._device())
    return group


def _register() -> None:
    register = _dist.Backend.register_backend
    if torch.__version__.startswith("1."):
        register("maniple", _create, extended_api=True)
    else:
        register("maniple", _create, extended_api=True, devices=["cpu", "cuda"] if _shim.built_for_cuda() else ["cpu"])


_register()


def _leave_all(process: int) -> None:
    if os.getpid() == process:  # a child that was forked has no part in the groups
        _shim.leave_all()


atexit.register(_leave_all, os.getpid())  # for programs that end without destroy_process_group()


def _backend_of(group) -> "_shim.Backend":
    group = group if group is not None else _dist.distributed_c10d._get_default_group()
    backend = group
    for device in ("cpu", "cuda"):
        if isinstance(backend, _shim.Backend):
            break
        try:
            backend = group._get_backend(torch.device(device))
        except (AttributeError, RuntimeError):
            pass  # PyTorch 1, or a group that has no backend for it
    if not isinstance(backend, _shim.Backend):
        raise InvalidArgument(f"maniple_torch: the group's backend is {type(backend).__name__}, not maniple")
    return backend


def allocate(size: Union[int, Sequence[int]], dtype: Optional[torch.dtype] = None, group=None,
             device: Union[str, torch.device] = "cpu") -> torch.Tensor:
    """A tensor of zeros in memory that all ranks of this host map: collectives on it copy less. All ranks of the group call it. On a GPU,
    in a group with an engine for it (Options)."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    like = torch.empty(0, dtype=dtype if dtype is not None else torch.get_default_dtype(), device=device)
    count = 1
    for length in shape:
        count *= length
    return _backend_of(group).allocate_(count, like).view(shape)


def monitored_barrier(group=None, timeout: datetime.timedelta = datetime.timedelta(minutes=30)) -> None:
    """A barrier that names every rank that does not come in time, and leaves the group usable. (torch.distributed.monitored_barrier
    insists on Gloo.)"""
    _backend_of(group).monitored_barrier_(timeout)


def transport(group=None) -> str:
    """How bytes travel in the group: "shm", "tcp", "shm+tcp", or "none" for one rank."""
    return _backend_of(group).transport()


def abort(group=None) -> None:
    """Makes every rank's current and later calls on the group fail with Aborted."""
    _backend_of(group).abort()


# ---- DDP -------------------------------------------------------------------------------------------------------------


class _Averaging:
    """What the hook of one model keeps. Every rank calls the hook equally often for every bucket, also one that has joined early, so counts
    of calls decide what is collective."""

    def __init__(self, group, moves_at):
        self.group = group
        self.backend = _backend_of(group)
        self.calls = {}
        self.moves_at = moves_at  # the call in which a bucket moves to registered memory
        self.has_spare_core = self._has_spare_core()

    def _has_spare_core(self) -> bool:
        """Whether the group's thread finds a core while this rank computes. Otherwise both would only take turns."""
        mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
        if mine == all_cores:  # not bound to some of them: the ranks of the host share them
            local = os.environ.get("LOCAL_WORLD_SIZE", "")
            mine //= max(1, int(local) if local.isdigit() else _dist.get_world_size(self.group))
        return mine > torch.get_num_threads()


def _average(state: _Averaging, bucket: _dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A comm hook of DDP: the average in one pass, without the division before it that DDP does by default."""
    tensor = bucket.buffer()
    if tensor.device.type != "cpu" or tensor.is_sparse:
        work = _dist.all_reduce(tensor, op=_dist.ReduceOp.AVG, group=state.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])
    calls = state.calls[bucket.index()] = state.calls.get(bucket.index(), 0) + 1
    if calls == state.moves_at:
        state.backend.move_to_registered_(tensor)
    if state.has_spare_core and not bucket.is_last():  # after the last there is nothing to compute
        work = _dist.all_reduce(tensor, op=_dist.ReduceOp.AVG, group=state.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])
    state.backend.average_here_(tensor)
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """PyTorch's, with gradients that are views of buckets, buckets in registered memory, and a comm hook that averages them in one pass; in
    the thread that computes, where no core is free for another. Same arguments, same results to rounding."""

    def __init__(self, module, *args, gradient_as_bucket_view: bool = True, **kwargs):
        super().__init__(module, *args, gradient_as_bucket_view=gradient_as_bucket_view, **kwargs)
        # DDP forms its buckets anew before the second step, unless it looks for unused parameters. They move when
        # no gradient in them has been read yet: pointers into their old memory, such as p.grad.numpy(), would
        # dangle.
        stay = self.find_unused_parameters and not getattr(self, "static_graph", False)
        self._averaging = _Averaging(self.process_group, 1 if stay else 2)
        self.register_comm_hook(self._averaging, _average)

    def join_hook(self, **kwargs):
        if not kwargs.get("divide_by_initial_world_size", True):
            raise InvalidArgument("maniple_torch.DistributedDataParallel: join(divide_by_initial_world_size=False); gradients are averaged "
                                  "over all ranks of the group here: use torch.nn.parallel.DistributedDataParallel for that")
        return super().join_hook(**kwargs)
