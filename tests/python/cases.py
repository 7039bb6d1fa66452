"""Runs functions named case_... of a module on the ranks of one job, one after the other, and prints "ok NAME", "skip NAME: why" or
"FAILED NAME" and a traceback. So PyTorch is imported once for many tests."""

import datetime
import sys
import traceback

import torch
import torch.distributed as dist

import maniple_torch  # noqa: F401  (registers the backend)

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Skip(Exception):
    pass


def needs(major, minor, what):
    if VERSION < (major, minor):
        raise Skip(f"PyTorch {torch.__version__} has no {what}")


def main(cases, **options):
    torch.set_num_threads(1)
    dist.init_process_group("maniple", timeout=datetime.timedelta(seconds=120), **options)
    gloo = dist.new_group(backend="gloo")
    chosen, failed = sys.argv[1:], False
    for name, case in list(cases.items()):
        if not name.startswith("case_") or (chosen and name not in chosen):
            continue
        torch.manual_seed(1000 + dist.get_rank())
        try:
            case(gloo)
            print("ok", name, flush=True)
        except Skip as reason:
            print(f"skip {name}: {reason}", flush=True)
        except BaseException:
            print("FAILED", name, flush=True)
            traceback.print_exc()
            failed = True
        dist.barrier()  # fails if only some of the ranks have failed in the middle of it
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)
