"""The oracle against finite differences in float64, and against sums written out by hand."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest

from cuattn.backends import reference


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_gradients_against_finite_differences(case: cases.Case) -> None:
    problem = cases.build(case, "float64")
    spec, arrays = problem.spec, problem.oracle_arrays
    rng = np.random.default_rng(1)

    def loss(changed: dict[str, Any]) -> float:
        out, lse = reference.attention(spec, {**arrays, **changed})
        finite = np.isfinite(lse)
        return float((out * problem.dout).sum() + (lse[finite] * problem.dlse[finite]).sum())

    found = reference.gradients(spec, arrays, problem.dout, problem.dlse)
    for name, gradient in found.items():
        direction = rng.standard_normal(gradient.shape)
        step = 1e-6 * direction
        numeric = (loss({name: arrays[name] + step}) - loss({name: arrays[name] - step})) / 2e-6
        scale = float(np.abs(gradient * direction).sum()) + 1.0
        assert abs(numeric - float((gradient * direction).sum())) < 1e-6 * scale, name


def test_two_keys_by_hand() -> None:
    q, k = np.array([[[[2.0]]]]), np.array([[[[0.5]], [[-1.0]]]])
    v = np.array([[[[10.0]], [[20.0]]]])
    spec = cases.spec_of({"q": q, "k": k, "v": v}, {"softmax_scale": 1.0}, "bshd")
    out, lse = reference.attention(spec, {"q": q, "k": k, "v": v})
    a, b = np.exp(1.0), np.exp(-2.0)
    assert out[0, 0, 0, 0] == pytest.approx((10 * a + 20 * b) / (a + b), rel=1e-14)
    assert lse[0, 0, 0] == pytest.approx(np.log(a + b), rel=1e-14)


def test_a_sink_takes_mass() -> None:
    x = np.zeros((1, 1, 1, 4))
    arrays = {"q": x, "k": x, "v": x + 1, "sinks": np.array([np.log(3.0)])}
    spec = cases.spec_of(arrays, {}, "bshd")
    out, lse = reference.attention(spec, arrays)
    assert out == pytest.approx(0.25)
    assert lse == pytest.approx(np.log(4.0))
