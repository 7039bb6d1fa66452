"""Tensors of a GPU, through each engine that is built: several ranks share GPU 0."""

import pytest
import torch

from ranks import Ranks, run, usable_backends

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CASES = 13


def needs_engine(engine):
    if engine != "host" and engine not in usable_backends():
        pytest.skip(f"maniple backends: {engine} is not usable here")


@pytest.mark.parametrize("engine,size", [("host", 2), ("cuda", 1), ("cuda", 2), ("cuda", 3), ("nccl", 1), ("nccl", 2)])
def test_operations_and_training(engine, size):
    needs_engine(engine)
    output = run("gpu_cases.py", size, env={"MANIPLE_TEST_BACKEND": engine})[0].output
    assert output.count("ok case_") == CASES, output


@pytest.mark.parametrize("engine", ["host", "cuda"])
def test_a_rank_is_lost(engine):
    needs_engine(engine)
    results = Ranks("gpu_cases.py", 2, "lost", env={"MANIPLE_TEST_BACKEND": engine}).wait()
    assert "PeerLost: " in results[0].output and "rank 1" in results[0].output, results


@pytest.mark.parametrize("engine", ["host", "cuda", "nccl"])
def test_a_group_that_is_bound_to_a_device(engine):
    needs_engine(engine)
    results = run("gpu_cases.py", 3, "bound", env={"MANIPLE_TEST_BACKEND": engine})
    assert all("bound" in each.output for each in results), results
