"""DDP and what else PyTorch builds on a backend."""

import pytest

from ranks import run


@pytest.mark.parametrize("size", [2, 3])
def test_training(size):
    output = run("training_cases.py", size)[0].output
    assert output.count("ok case_") >= 10, output
