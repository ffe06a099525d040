"""The prototyping loops against plain attention, on the CPU and in Numba's CUDA simulator."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cuattn
from cuattn import prototype

ROOT = Path(__file__).resolve().parent.parent


def distance(s: float, row: int, column: int) -> float:
    return s - 0.1 * abs(row - column)


def capped(s: float, row: int, column: int) -> float:
    return 2.0 * math.tanh(s / 2.0)


def capped_slope(s: float, row: int, column: int) -> float:
    return 1.0 - math.tanh(s / 2.0) ** 2


def causal(s: float, row: int, column: int) -> float:
    return s if column <= row else -math.inf


@pytest.mark.parametrize(
    ("score", "slope"),
    [
        (prototype.unchanged, prototype.ones),
        (distance, prototype.ones),
        (capped, capped_slope),
        (causal, prototype.ones),
    ],
)
def test_score_modifications(score: prototype.Score, slope: prototype.Score) -> None:
    assert max(prototype.check(score, slope).values()) < 1e-5


def test_a_wrong_slope_is_found() -> None:
    with pytest.raises(AssertionError, match="dq"):
        prototype.check(capped, prototype.ones)


def test_rows_that_see_nothing() -> None:
    def later(s: float, row: int, column: int) -> float:
        return s if column > row + 20 else -math.inf

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 30, 8), dtype=np.float32) for _ in range(3))
    out, lse, pullback = prototype.attention(q, k, v, score=later)
    assert np.all(out[0, 10:] == 0)
    assert np.all(lse[0, 10:] == -np.inf)
    assert all(np.isfinite(x).all() for x in pullback(np.ones_like(out)))


def test_agrees_with_the_package() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 70, 16), dtype=np.float32) for _ in range(3))
    out, lse, _ = prototype.attention(q, k, v, score=causal)
    want = cuattn.flash_attention(q[None], k[None], v[None], causal=True, layout="bhsd", return_lse=True)
    np.testing.assert_allclose(out, want[0][0], atol=1e-5)
    np.testing.assert_allclose(lse, want[1][0], atol=1e-5)


def test_cuda_kernels_in_the_simulator() -> None:
    code = (
        "from cuattn import prototype; import tests.test_prototype as t\n"
        "for score, slope in ((t.causal, prototype.ones), (t.capped, t.capped_slope)):\n"
        "    sizes = {'heads': 1, 'seqlen_q': 35, 'seqlen_kv': 33, 'head_dim': 4}\n"
        "    print(prototype.check(score, slope, target='cuda', **sizes))\n"
    )
    environment = {
        **os.environ,
        "NUMBA_ENABLE_CUDASIM": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dq") == 2


@pytest.mark.gpu
def test_cuda_kernels_on_a_gpu() -> None:
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("numba.cuda finds no CUDA toolkit: pip install numba-cuda")
    assert max(prototype.check(causal, target="cuda").values()) < 1e-5
