#!/usr/bin/env python3
"""Runs PyTorch's own tests of backends and DDP against Maniple: python3 scripts/pytorch_tests.py CHECKOUT [PATTERN...]

CHECKOUT is a checkout of the installed PyTorch version (git clone --branch v1.13.1 https://github.com/pytorch/pytorch).
The script does not change it. If CHECKOUT is -, only the tests in the installed package run (test_distributed_spawn).

PyTorch runs these tests with Gloo on a CPU. Here Maniple replaces Gloo but keeps the name "gloo", so that the tests
take the same branches. Ranks are forked instead of spawned, which saves each rank an import of PyTorch. PATTERN
selects tests: MODULE.CLASS.test, with * as a wildcard.

Prints one line per test. KNOWN below lists expected failures with reasons; any other failure makes the exit status 1.
"""

import argparse
import fnmatch
import importlib
import importlib.util
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import unittest

# Modules, and their classes that run without a GPU. The tests of test_distributed_spawn are in torch.testing, which is
# installed.
SUITES = {
    "test_distributed_spawn": ["TestDistBackendWithSpawn"],
    "test_c10d_gloo": ["RendezvousEnvTest", "TimeoutTest", "ProcessGroupGlooTest", "DistributedDataParallelTest", "ReducerTest", "CommTest",
                       "GlooProcessGroupWithDispatchedCollectivesTests", "CompilerTest", "LargeCommTest"],
    "test_c10d_common": ["ComputeBucketAssignmentTest", "CommTest", "ReduceOpTest", "PythonProcessGroupExtensionTest"],
    "test_c10d_spawn_gloo": ["DistributedDataParallelSingleProcessTest", "TestDistributedNNFunctionsGloo"],
    "test_c10d_object_collectives": ["TestObjectCollectives"],
}

TEXT = "it compares the error text with Gloo's"
NAME = "it compares the name of the backend, which is not gloo"
PICKLE = "it compares the error text with the text of Python before 3.13"
SEVERAL = "it passes several tensors of one process to a call, which PyTorch 2 has given up"
KNOWN = {
    "test_barrier_timeout_*": TEXT,
    "test_monitored_barrier_*": TEXT,
    "ProcessGroupGlooTest.test_*_checks": TEXT,
    "test_ddp_logging_data_cpu": NAME,
    "test_init_process_group_for_all_backends": NAME,
    "test_gather_object*": PICKLE,
    "test_send_recv_any_source_*_profiler": "the profiler's event is called recv, and not recvAnySource",
    "test_allreduce_op_timeout": TEXT,
    "test_allreduce_overall_timeout": TEXT,
    "test_gloo_set_pg_timeout_api": TEXT,
    "GlooProcessGroupWithDispatchedCollectivesTests.test_all_to_all_single": "it expects that strided tensors are refused; here they work",
    "test_allgather_inference_mode": SEVERAL,
    "test_sparse_allreduce_basics": SEVERAL,
    "test_allgather_basics": SEVERAL,
    "test_allgather_noncontiguous_input": SEVERAL,
    "test_allreduce_basics*": SEVERAL,
    "test_broadcast_basics": SEVERAL,
    "CompilerTest.test_allgather_work_wait_cpu": "CommTensor, a prototype of PyTorch 1.13 alone, cannot be copied to outside of Python",
}

LIMIT = 90  # seconds for one test


# ---- In the process that runs the tests of one class -----------------------------------------------------------------


def without_packages():
    """Replaces missing packages that PyTorch's helpers import but these tests do not use."""
    for name in ("expecttest", "hypothesis"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].TestCase = unittest.TestCase
            sys.modules[name].ACCEPT = False


def disguise():
    """Makes torch.distributed return Maniple when a test requests Gloo."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal import common_distributed

    import maniple_torch

    gloo = dist.ProcessGroupGloo

    class Kind(type):
        def __instancecheck__(cls, group):
            return isinstance(group, maniple_torch._shim.Backend)

    class Disguised(metaclass=Kind):
        """Replaces ProcessGroupGloo(store, rank, size, options or timeout)."""

        def __new__(cls, store, rank, size, options=None, timeout=None):
            if timeout is None:
                timeout = getattr(options, "_timeout", c10d.default_pg_timeout if options is None else options)
            return maniple_torch._shim.make_world(store, rank, size, timeout.total_seconds(), "group", "", "the test's store", False,
                                                  "native", -1)

    for name in dir(gloo):
        if not name.startswith("__"):
            setattr(Disguised, name, inspect.getattr_static(gloo, name))
    for name in ("create_device", "create_default_device"):
        setattr(maniple_torch._shim.Backend, name, inspect.getattr_static(gloo, name))
    dist.ProcessGroupGloo = c10d.ProcessGroupGloo = Disguised

    helper = c10d._new_process_group_helper
    place = list(inspect.signature(helper).parameters).index("backend")

    def make_group(*arguments, **named):
        arguments = list(arguments)
        asked = arguments[place] if len(arguments) > place else named.get("backend")
        if str(asked).lower() not in ("gloo", "cpu:gloo"):
            return helper(*arguments, **named)
        if len(arguments) > place:
            arguments[place] = c10d.Backend("maniple")
        else:
            named["backend"] = c10d.Backend("maniple")
        result = helper(*arguments, **named)
        group = result[0] if isinstance(result, tuple) else result
        groups = c10d._world.pg_map if hasattr(c10d, "_world") else c10d._pg_map
        if group in groups:
            groups[group] = (c10d.Backend("gloo"), groups[group][1])
        if hasattr(c10d, "_world") and group in getattr(c10d._world, "pg_backend_config", {}):
            c10d._world.pg_backend_config[group] = "cpu:gloo"
        return result

    c10d._new_process_group_helper = make_group

    import torch.multiprocessing

    def fork(self):
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = fork
    common_distributed.TIMEOUT_OVERRIDE.clear()
    try:  # PyTorch 1.13 has a variant of DDP's parameters, used only in tests, that Python 3.11 cannot import
        from torch.nn.parallel import _replicated_tensor_ddp_utils
    except ImportError:
        pass
    else:
        _replicated_tensor_ddp_utils._set_ddp_with_replicated_tensor = lambda value: None
    if "BACKEND" in os.environ:
        from torch.testing._internal.distributed import distributed_test

        find_events = distributed_test.get_profiling_event

        def events_of(postfix, *rest, **named):
            """Finds events by the backend's name, which their names begin with."""
            found = find_events(postfix.replace("gloo:", "maniple:"), *rest, **named)
            for event in found:
                event.name = event.name.replace("maniple:", "gloo:")
            return found

        distributed_test.get_profiling_event = events_of


class Result(unittest.TextTestResult):
    """Prints one line as each test ends: result, name, duration and reason."""

    def startTest(self, test):
        super().startTest(test)
        self.began, self.outcome = time.monotonic(), None

    def note(self, kind, reason=""):
        if self.outcome is None or self.outcome[0] == "ok":
            self.outcome = (kind, reason)

    def addSuccess(self, test):
        self.note("ok")

    def addSkip(self, test, reason):
        self.note("skip", reason)

    def addError(self, test, error):
        self.note("FAILED", reason_of(error))

    addFailure = addError

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.addError(test, error)

    def addExpectedFailure(self, test, error):
        self.note("ok")

    def stopTest(self, test):
        super().stopTest(test)
        kind, reason = self.outcome or ("FAILED", "it ended without a result")
        print(f"@{kind}\t{test.id().split('.')[-1]}\t{time.monotonic() - self.began:.1f}\t{reason}", file=sys.__stdout__, flush=True)


def reason_of(error):
    """Returns the last line of the rank's own traceback, which the parent's error text contains."""
    kind, value, _ = error
    lines = [line for line in str(value).splitlines() if re.match(r"[A-Za-z_.]*(Error|Exception|Lost|Timeout|Mismatch|Argument|Aborted|"
                                                                  r"Unsupported|Failure)\b.*", line)]
    text = lines[-1] if lines else f"{kind.__name__}: {str(value).strip().splitlines()[0] if str(value).strip() else ''}"
    return text[:300].replace("\t", " ")


def class_of_package():
    """Returns the class of test_distributed_spawn for the tests in torch.testing."""
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._spawn_processes()

    return TestDistBackendWithSpawn


def run_class(checkout, module_name, class_name, patterns):
    sys.path.insert(0, os.path.join(checkout, "test", "distributed"))
    sys.path.insert(0, os.path.join(checkout, "test"))
    sys.argv = [module_name]  # PyTorch's tests read it when they are imported
    without_packages()
    disguise()
    if module_name == "test_distributed_spawn":
        kind = class_of_package()
    else:
        kind = getattr(importlib.import_module(module_name), class_name, None)
    if kind is None:
        return
    suite = unittest.TestSuite()
    for name in unittest.defaultTestLoader.getTestCaseNames(kind):
        full = f"{module_name}.{class_name}.{name}"
        if not patterns or any(fnmatch.fnmatch(full, f"*{pattern}*") for pattern in patterns):
            suite.addTest(kind(name))
    unittest.TextTestRunner(resultclass=Result, stream=io.StringIO()).run(suite)


# ---- In the main process ---------------------------------------------------------------------------------------------


def results_of(process, errors):
    """Yields results as the process prints them, and a failure if it ends abnormally."""
    for line in process.stdout:
        if line.startswith("@"):
            yield line[1:].rstrip("\n").split("\t", 3)
    if process.wait() != 0:
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["nothing"])[-1]
        yield "FAILED", "(the class)", "0", f"exit code {process.returncode}: {last}"


def main():
    parser = argparse.ArgumentParser(description="PyTorch's tests of backends and DDP, against Maniple.")
    parser.add_argument("checkout", help="checkout of the installed PyTorch version; -: only the tests in the installed package")
    parser.add_argument("pattern", nargs="*", help="tests to run (default: all)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of test_distributed_spawn (default: 4)")
    parser.add_argument("--class", dest="one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return run_class(arguments.checkout, *arguments.one.split("."), arguments.pattern)
    only_package = arguments.checkout == "-"
    if not only_package and not os.path.exists(os.path.join(arguments.checkout, "test", "distributed", "test_c10d_common.py")):
        parser.error(f"{arguments.checkout} is not a checkout of PyTorch: test/distributed/test_c10d_common.py is not there")
    totals, surprises = {"ok": 0, "skip": 0, "FAILED": 0}, []
    for module, classes in SUITES.items():
        if only_package and module != "test_distributed_spawn":
            continue
        if not only_package and not os.path.exists(os.path.join(arguments.checkout, "test", "distributed", module + ".py")):
            print(f"{module}: this version of PyTorch does not have it")
            continue
        for name in classes:
            with tempfile.TemporaryDirectory() as folder:
                os.makedirs(os.path.join(folder, "barrier"))
                variables = dict(os.environ, BACKEND="gloo", WORLD_SIZE=str(arguments.ranks), TEMP_DIR=folder, OMP_NUM_THREADS="1",
                                 DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(LIMIT), USE_LIBUV="0")
                command = [sys.executable, os.path.abspath(__file__), "--class", f"{module}.{name}", os.path.abspath(arguments.checkout),
                           *arguments.pattern]
                errors = tempfile.TemporaryFile("w+", errors="replace")
                process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder, errors="replace")
                for kind, test, seconds, reason in results_of(process, errors):
                    full = f"{module}.{name}.{test}"
                    known = next((why for pattern, why in KNOWN.items() if fnmatch.fnmatch(full, f"*.{pattern}")), None)
                    totals[kind] += 1
                    if kind == "FAILED":
                        surprises += [] if known else [full]
                        reason = f"{'known: ' + known if known else 'UNEXPECTED'} [{reason}]"
                    print(f"{kind:6} {full} ({seconds} s){': ' + reason if reason else ''}", flush=True)
    print(f"{totals['ok']} passed, {totals['FAILED'] - len(surprises)} failed as known, {len(surprises)} failed unexpectedly, "
          f"{totals['skip']} skipped")
    return 1 if surprises or totals["ok"] == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
