"""Combinations nobody thought of: all pairs of options, and hypothesis over shapes, strides and options."""

from __future__ import annotations

import itertools
from typing import Any

import cases
import hypothesis.strategies as st
import numpy as np
import pytest
from conftest import Runner
from hypothesis import HealthCheck, given, settings

VALUES: dict[str, list[Any]] = {
    "dtype": ["float32", "float16", "bfloat16"],
    "shape": [(37, 53), (130, 70), (1, 65)],
    "heads": [(2, 2), (4, 1)],
    "head_dim": [(16, 16), (64, 40), (33, 70)],
    "layout": ["bshd", "bhsd"],
    "window": [{}, {"causal": True}, {"window_size": (9, 4)}, {"causal": True, "q_offset": 3}],
    "softcap": [0.0, 3.0],
    "bias": [None, "full", "heads", "keys", "float32"],
    "mask": [None, "full", "keys"],
    "alibi_slopes": [False, True],
    "sinks": [False, True],
    "segments": [False, True],
    "lengths": [None, "q", "kv", "both"],
    "q_offset": [False, True],
    "dropout_p": [0.0, 0.3],
    "deterministic": [False, True],
}


def all_pairs(values: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows that contain every pair of values of every two options: greedy, the same each time."""
    rng = np.random.default_rng(seed)
    names = list(values)
    index = {n: range(len(v)) for n, v in values.items()}
    left = {(a, i, b, j) for a, b in itertools.combinations(names, 2) for i in index[a] for j in index[b]}
    rows = []
    while left:
        best: tuple[int, dict[str, int]] = (-1, {})
        for _ in range(30):
            row = {n: int(rng.integers(len(v))) for n, v in values.items()}
            a, i, b, j = min(left)
            row[a], row[b] = i, j
            covered = sum((x, row[x], y, row[y]) in left for x, y in itertools.combinations(names, 2))
            best = max(best, (covered, row), key=lambda pair: pair[0])
        row = best[1]
        left -= {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
        rows.append({n: values[n][i] for n, i in row.items()})
    return rows


def case_of(row: dict[str, Any]) -> cases.Case:
    """A case from a row of option values."""
    (sq, sk), (hq, hkv), (d, dv) = row["shape"], row["heads"], row["head_dim"]
    batch = 2
    operands: dict[str, Any] = {}
    bias_shapes = {
        "full": (batch, hq, sq, sk),
        "heads": (hq, sq, 1),
        "keys": (batch, 1, 1, sk),
        "float32": (1, 1, sq, sk),
    }
    if row["bias"]:
        operands["bias_float32" if row["bias"] == "float32" else "bias"] = bias_shapes[row["bias"]]
    if row["mask"]:
        operands["mask"] = (batch, hq, sq, sk) if row["mask"] == "full" else (batch, 1, 1, sk)
    for name in ("alibi_slopes", "sinks"):
        if row[name]:
            operands[name] = (hq,)
    if row["segments"]:
        operands["segments"] = ()
    if row["lengths"] in ("q", "both"):
        operands["q_seqlens"] = (sq, sq // 2)
    if row["lengths"] in ("kv", "both"):
        operands["kv_seqlens"] = (sk // 3, sk)
    if row["q_offset"]:
        operands["q_offset"] = (2, -3)
    options: dict[str, Any] = {
        "softcap": row["softcap"],
        "deterministic": row["deterministic"],
        **row["window"],
    }
    if row["q_offset"]:
        options.pop("q_offset", None)
    if row["dropout_p"]:
        options |= {"dropout_p": row["dropout_p"], "dropout_seed": 42}
    return cases.Case(
        "row", batch=batch, heads_q=hq, heads_kv=hkv, seqlen_q=sq, seqlen_kv=sk, head_dim=d, head_dim_v=dv,
        layout=row["layout"], operands=operands, options=options,
    )  # fmt: skip


def check(run: Runner, row: dict[str, Any], seed: int = 0) -> None:
    problem = cases.build(case_of(row), row["dtype"], seed)
    out, lse, found = run(
        problem.arrays, dout=problem.dout, dlse=problem.dlse, layout=problem.case.layout, **problem.options
    )
    cases.check_forward(problem, out, lse)
    cases.check_backward(problem, found)


PAIRS = all_pairs(VALUES)


@pytest.mark.parametrize("row", PAIRS, ids=[str(i) for i in range(len(PAIRS))])
def test_all_pairs(run: Runner, row: dict[str, Any]) -> None:
    check(run, row)


ROWS = st.fixed_dictionaries(
    {
        **{name: st.sampled_from(values) for name, values in VALUES.items()},
        "shape": st.tuples(st.integers(1, 150), st.integers(1, 150)),
        "heads": st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)]),
        "head_dim": st.tuples(st.integers(1, 128), st.integers(1, 128)),
        "window": st.fixed_dictionaries(
            {
                "causal": st.booleans(),
                "window_size": st.none() | st.tuples(st.integers(-1, 160), st.integers(-1, 160)),
                "q_offset": st.none() | st.integers(-160, 160),
            }
        ),
        "softcap": st.sampled_from([0.0, 0.7, 30.0]),
        "dropout_p": st.sampled_from([0.0, 0.1, 0.95]),
        "seed": st.integers(0, 2**32 - 1),
    }
)


@pytest.mark.parametrize("kind", ["numba", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_any_combination(kind: str) -> None:
    """No crash, no NaN, no wrong value."""

    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(ROWS)
    def inner(row: dict[str, Any]) -> None:
        check(Runner(kind), row, row["seed"])

    inner()
