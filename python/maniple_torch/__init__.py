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
    "abort", "allocate", "monitored_barrier", "transport", "__version__",
]

# ---- Errors: the classes of maniple/comm/error.h -------------------------------------------------------------------------------------


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

# ---- Groups --------------------------------------------------------------------------------------------------------------------------

def _underlying(store):
    while True:
        inner = getattr(store, "underlying_store", None)
        if inner is None:
            return store
        store = inner


def _master_of(store) -> str:
    """A host that all ranks reach: that of the store, or what the launcher says; empty where nobody knows."""
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


def _create(options, _backend_options=None):
    """Called by torch.distributed for each group that this process is in."""
    ranks = list(options.global_ranks_in_group)
    timeout = options.timeout
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    seconds = min(max(seconds, 0.001), 1e9)
    name = f"group {options.group_id}" if ranks else "world"
    group = _shim.make_subgroup(ranks, seconds, name) if ranks else None
    if group is None:  # the default group; or one beside a default group of another backend, which then counts its ranks by itself
        group = _shim.make_world(options.store, options.group_rank, options.group_size, seconds, name, _master_of(options.store),
                                 _describe(options.store), not ranks)
    return group


def _register() -> None:
    register = _dist.Backend.register_backend
    if torch.__version__.startswith("1."):
        register("maniple", _create, extended_api=True)
    else:
        register("maniple", _create, extended_api=True, devices=["cpu"])


_register()


def _leave_all(process: int) -> None:
    if os.getpid() == process:  # a child that was forked has no part in the groups
        _shim.leave_all()


atexit.register(_leave_all, os.getpid())  # for programs that end without destroy_process_group()


def _backend_of(group) -> "_shim.Backend":
    group = group if group is not None else _dist.distributed_c10d._get_default_group()
    backend = group
    if not isinstance(backend, _shim.Backend) and hasattr(group, "_get_backend"):
        backend = group._get_backend(torch.device("cpu"))
    if not isinstance(backend, _shim.Backend):
        raise InvalidArgument(f"maniple_torch: the group's backend for the CPU is {type(backend).__name__}, not maniple")
    return backend


def allocate(size: Union[int, Sequence[int]], dtype: Optional[torch.dtype] = None, group=None) -> torch.Tensor:
    """A tensor of zeros in memory that all ranks of this host map: collectives on it copy less. All ranks of the group call it."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    like = torch.empty(0, dtype=dtype if dtype is not None else torch.get_default_dtype())
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
