"""Hopper's backward on a GPU: every subset of gradients, also with the head dims of the wide kernel.

Outputs and workspace hold NaN before a program runs.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import cases
import pytest
from test_mma_backward_gpu import check, problem_arrays, run, same, wants_of

from cuattn import device, jit
from cuattn.families import sm90_backward as family
from cuattn.program import Launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
pytest.importorskip("cupy")

SINKS = {"sinks": (4,)}
CASES = [
    cases._dense("causal", 300, 400, 64, options={"causal": True}),
    cases._dense("window_and_sinks", 300, 400, 128, operands=SINKS, options={"window_size": (100, 20)}),
    cases._dense("softcap", 200, 300, 128, options={"softcap": 3.0}),
    cases._dense("long_rows", 4200, 130, 128, batch=1),  # tiles of 80 rows
    cases._dense("wide", 200, 300, 256, operands=SINKS, options={"causal": True}),
    cases._dense(
        "rows_and_keys_without_partners", 200, 160, 128, options={"window_size": (30, 10), "q_offset": -40}
    ),
    replace(cases.BY_NAME["varlen_causal"], name="packed"),
    replace(cases.BY_NAME["varlen_causal"], name="packed_wide", head_dim=256),
    replace(cases.BY_NAME["q_seqlens"], name="lengths", head_dim=128),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_subset_of_gradients(case: cases.Case, deterministic: bool) -> None:
    """Right, and the same bits as with all of them, but for sums that come in another order."""
    problem, model = cases.build(case, "bfloat16"), device.query(0)
    arrays, spec = problem_arrays(problem), replace(problem.spec, dlse=True, deterministic=deterministic)
    if (reason := family.refuses(spec, model)) is not None:
        pytest.skip(reason)
    names = wants_of(spec)
    subsets = [wants for n in range(1, len(names) + 1) for wants in itertools.combinations(names, n)]
    subsets = [wants for wants in subsets if set(wants) & set("qkv")]
    programs = [family.backward(spec, model, frozenset(wants)) for wants in subsets]
    kernels = {step.kernel for what in programs for step in what.steps if isinstance(step, Launch)}
    jit.compile_all((kernel, model.arch) for kernel in kernels)
    whole = run(spec, names, arrays, family)
    check(problem, whole)
    for wants in subsets:
        found = run(spec, wants, arrays, family)
        assert set(found) == {f"d{name}" for name in wants}
        exact = [n for n in wants if n == "sinks" or (("q" in wants) if deterministic else n != "q")]
        assert same(whole, {f"d{n}": found[f"d{n}"] for n in exact}), wants
        rest = {name: x for name, x in found.items() if name[1:] not in exact}
        if rest:
            check(problem, rest)


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
def test_a_sink_that_takes_everything(case: cases.Case) -> None:
    """LSE is then infinite in base 2."""
    problem = cases.build(case, "bfloat16")
    problem.arrays["sinks"][:2] = 3e38, -3e38
    spec = replace(problem.spec, dlse=True)
    check(problem, run(spec, wants_of(spec), problem_arrays(problem), family))
