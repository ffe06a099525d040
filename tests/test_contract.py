"""The whole case table, forward and every gradient, on every backend."""

from __future__ import annotations

from typing import Any

import cases
import pytest
from conftest import Runner

FAST = ("float16", "bfloat16", "float32")


def check(run: Runner, case: cases.Case, dtype: str) -> None:
    problem = cases.build(case, dtype)
    options = {**problem.options} if case.layout == "thd" else {**problem.options, "layout": case.layout}
    out, lse, found = run(problem.arrays, dout=problem.dout, dlse=problem.dlse, **options)
    cases.check_forward(problem, out, lse)
    cases.check_backward(problem, found)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_float32(run: Runner, case: cases.Case) -> None:
    check(run, case, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_other_dtypes(run: Runner, case: cases.Case, dtype: str, request: Any) -> None:
    if run.kind == "jax" and dtype == "float64":
        pytest.skip("JAX has float64 only with jax_enable_x64: tests/test_jax.py")
    check(run, case, dtype)
