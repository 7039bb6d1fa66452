"""Operations on 1, 2 and 3 ranks; over shared memory, and over TCP. And the stubs that tell types to editors."""

import ast
import inspect
import os

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


def test_stubs_list_what_there_is():
    """Names, and the parameters of functions."""
    import maniple_torch

    def name_of(base):
        return ast.unparse(base).rpartition(".")[2]

    with open(os.path.join(os.path.dirname(maniple_torch.__file__), "__init__.pyi")) as file:
        stubs = {node.name: node for node in ast.parse(file.read()).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert set(stubs) | {"__version__"} == set(maniple_torch.__all__)
    for name, node in stubs.items():
        thing = getattr(maniple_torch, name)
        if isinstance(node, ast.FunctionDef):
            assert [each.arg for each in node.args.args] == list(inspect.signature(thing).parameters), name
        else:
            assert inspect.isclass(thing) and [base for base in map(name_of, node.bases) if base != "RuntimeError"] == [
                base.__name__ for base in thing.__bases__ if base.__name__ not in ("RuntimeError", "DistBackendError", "object")], name
