"""Operations on 1, 2 and 3 ranks; over shared memory, and over TCP."""

import pytest

from ranks import run


def ok_cases(results):
    return [line for line in results[0].output.splitlines() if line.startswith("ok case_")]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_operations(size):
    assert len(ok_cases(run("operation_cases.py", size))) >= 22


def test_operations_over_tcp():
    cases = ["case_all_reduce_bfloat16_and_bool", "case_all_to_all", "case_messages", "case_asynchronous", "case_groups"]
    assert len(ok_cases(run("operation_cases.py", 2, *cases, env={"MANIPLE_TRANSPORT": "tcp"}))) == len(cases)
