"""Failures: the class and the text that Python sees, and that nothing hangs."""

import signal

import pytest

from ranks import Ranks, run, usable_backends


def lines(result, word):
    return [line for line in result.output.splitlines() if line.startswith(word)]


def test_a_killed_rank_is_named():
    results = Ranks("failure_cases.py", 3, "killed").wait()
    assert results[1].code == -signal.SIGKILL
    for rank in (0, 2):
        first, second = lines(results[rank], "CAUGHT")
        assert first.startswith("CAUGHT PeerLost:") and "rank 1" in first, results[rank]
        assert second.startswith("CAUGHT Aborted:") and "rank 1" in second, results[rank]


@pytest.mark.parametrize("case", ["killed_in_backward", "killed_in_backward_of_ours"])
def test_a_killed_rank_in_backward_of_ddp(case):
    """PyTorch 1.13 makes a RuntimeError of what a comm hook raises, with its text."""
    import torch

    results = Ranks("failure_cases.py", 2, case).wait()
    in_hook = case.endswith("ours") and torch.__version__.startswith("1.")
    assert lines(results[0], "CAUGHT RuntimeError: PeerLost:" if in_hook else "CAUGHT PeerLost:"), results


@pytest.mark.parametrize("name", ["mismatched", "mismatched_operations"])
def test_ranks_that_call_different_things(name):
    for result in run("failure_cases.py", 2, name):
        assert lines(result, "CAUGHT Mismatch:"), result


def test_a_late_rank_is_named():
    results = run("failure_cases.py", 2, "late")
    assert "rank 1" in lines(results[0], "CAUGHT Timeout:")[0], results
    assert lines(results[1], "CAUGHT "), results


def test_monitored_barrier_names_the_missing():
    results = run("failure_cases.py", 3, "missing_at_the_monitored_barrier")
    assert "ranks 1, 2" in lines(results[0], "CAUGHT Timeout:")[0], results


def test_abort_reaches_all():
    for result in run("failure_cases.py", 2, "aborted"):
        assert lines(result, "CAUGHT Aborted:"), result


@pytest.mark.parametrize("name", ["interrupted", "interrupted_asynchronous"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_control_c_interrupts_a_waiting_collective(name, transport):
    ranks = Ranks("failure_cases.py", 2, name, env={"MANIPLE_TRANSPORT": transport})
    ranks.wait_for(0, "READY")
    ranks.wait_for(1, "READY")
    ranks.signal(0, signal.SIGINT)
    ranks.wait_for(0, "CAUGHT KeyboardInterrupt")
    ranks.kill()


@pytest.mark.parametrize("name", ["again", "data_loader_fork", "data_loader_spawn", "threads"])
def test_it_goes_well(name):
    for result in run("failure_cases.py", 2, name):
        assert lines(result, "OK"), result


def test_a_plugin_is_found():
    if "gloo" not in usable_backends():
        pytest.skip("maniple backends: gloo is not usable here")
    for result in run("failure_cases.py", 2, "plugin", env={"MANIPLE_TEST_BACKEND": "gloo"}):
        assert lines(result, "OK"), result
