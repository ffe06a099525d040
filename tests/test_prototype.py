"""The prototyping loops against plain attention, on the CPU and in Numba's CUDA simulator."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import planning, prototype
from cuattn.backends import numba_cuda, reference, select

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


def test_offsets_and_grouped_heads() -> None:
    rng = np.random.default_rng(2)
    q, dout = (rng.standard_normal((4, 40, 8), dtype=np.float32) for _ in range(2))
    k, v = (rng.standard_normal((2, 50, 8), dtype=np.float32) for _ in range(2))
    out, lse, pullback = prototype.attention(q, k, v, score=causal, offset=10)
    (want, want_lse), pull = cuattn.flash_attention_vjp(
        q[None], k[None], v[None], causal=True, layout="bhsd", return_lse=True, backend="reference"
    )
    np.testing.assert_allclose(out, want[0], atol=1e-6)
    np.testing.assert_allclose(lse, want_lse[0], atol=1e-6)
    for got, expected in zip(pullback(dout), pull(dout[None])[:3], strict=True):
        np.testing.assert_allclose(got, expected[0], atol=5e-6)


def test_tiles_fit_into_shared_memory() -> None:
    assert prototype.block_rows(64, 64, 4) == prototype.BLOCK
    for dim, itemsize in ((256, 4), (256, 8), (193, 4)):
        rows = prototype.block_rows(dim, dim, itemsize)
        assert 8 <= rows < prototype.BLOCK
        assert rows * (2 * dim + 2) * itemsize <= prototype.SHARED


def simulate(code: str) -> str:
    """What a program prints whose numba.cuda kernels run in Numba's simulator."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cuda_kernels_in_the_simulator() -> None:
    code = (
        "from cuattn import prototype; import tests.test_prototype as t\n"
        "for score, slope in ((t.causal, prototype.ones), (t.capped, t.capped_slope)):\n"
        "    sizes = {'heads': 1, 'seqlen_q': 35, 'seqlen_kv': 33, 'head_dim': 4}\n"
        "    print(prototype.check(score, slope, target='cuda', **sizes))\n"
    )
    assert simulate(code).count("dq") == 2


# ---- backend="numba" on arrays of a GPU ----

CALLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("float32", "bshd", {"causal": True}),
    ("float64", "bhsd", {"window_size": (3, 1), "q_offset": 5, "softcap": 2.0}),
    ("float16", "bshd", {"causal": True, "q_offset": -4, "softmax_scale": 0.7}),
)
BOUNDS = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 4e-15}


def drawn(dtype: str, layout: str, lengths: tuple[int, int], heads: tuple[int, int]) -> dict[str, Any]:
    """q, k, v and dout of head dims 8 and 4; batch 2."""
    rng = np.random.default_rng(3)
    (rows, keys), (many, few) = lengths, heads
    sizes = {"q": (rows, many, 8), "k": (keys, few, 8), "v": (keys, few, 4), "dout": (rows, many, 4)}
    found = {name: rng.standard_normal((2, *size)).astype(dtype) for name, size in sizes.items()}
    return (
        found if layout == "bshd" else {n: np.ascontiguousarray(x.swapaxes(1, 2)) for n, x in found.items()}
    )


def backend_in_simulator() -> int:
    """Check out, LSE and gradients of the GPU backend, its arrays NumPy's, against the reference."""
    for dtype, layout, options in CALLS:
        arrays = drawn(dtype, layout, (9, 12), (4, 2))
        spec = planning.bind_call(arrays["q"], arrays["k"], arrays["v"], {**options, "layout": layout})
        want = reference.prepare(spec, None, None)(arrays)
        got = numba_cuda.Prepared(spec, None, np, 0)(arrays)
        spec = replace(spec, dlse=True)
        arrays |= {**got, "dlse": np.linspace(-1, 1, got["lse"].size).astype(spec.accumulator)}
        arrays["dlse"] = arrays["dlse"].reshape(got["lse"].shape)
        for wants in (frozenset("qkv"), frozenset("q"), frozenset("v")):
            want |= reference.prepare(spec, None, wants)(arrays)
            found = numba_cuda.Prepared(spec, wants, np, 0)(arrays)
            assert found.keys() == {f"d{name}" for name in wants}
            got |= found
        for name, x in got.items():
            assert (x.shape, x.dtype) == (want[name].shape, want[name].dtype), name
            finite = np.isfinite(want[name])
            assert np.array_equal(x[~finite], want[name][~finite]), name
            bound = BOUNDS[dtype] if name != "lse" else BOUNDS[spec.accumulator]
            np.testing.assert_allclose(x[finite], want[name][finite], rtol=bound, atol=bound, err_msg=name)
    return len(CALLS)


def test_backend_on_gpu_arrays_in_the_simulator() -> None:
    assert int(simulate("import tests.test_prototype as t; print(t.backend_in_simulator())")) == len(CALLS)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bias", {"bias": np.zeros((5, 5), np.float32)}),
        ("mask", {"mask": np.ones((5, 5), bool)}),
        ("alibi_slopes", {"alibi_slopes": np.zeros(2, np.float32)}),
        ("sinks", {"sinks": np.zeros(2, np.float32)}),
        ("q_segment_ids", {f"{side}_segment_ids": np.zeros((1, 5), np.int32) for side in ("q", "kv")}),
        ("q_seqlens", {"q_seqlens": np.full(1, 3, np.int32)}),
        ("kv_seqlens", {"kv_seqlens": np.full(1, 3, np.int32)}),
        ("q_offset", {"causal": True, "q_offset": np.zeros(1, np.int32)}),
        ("dropout_p", {"dropout_p": 0.5, "dropout_seed": 1}),
        ("precision", {"precision": "tf32"}),
    ],
)
def test_what_the_loops_do_not_express_is_refused_by_name(name: str, options: dict[str, Any]) -> None:
    x = np.zeros((1, 5, 2, 8), np.float32)
    with pytest.raises(ValueError, match=f"^{name}: .*numba"):
        numba_cuda.check(planning.bind_call(x, x, x, options))


def test_numba_on_gpu_arrays_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_cuda, "unavailable", lambda: None)
    assert select("numba", "cupy") is numba_cuda
    assert select("numba", "numpy") is not numba_cuda
    monkeypatch.setattr(numba_cuda, "unavailable", lambda: "nothing here: pip install 'numba-cuda[cu13]'")
    with pytest.raises(cuattn.BackendUnavailable, match="numba-cuda"):
        select("numba", "cupy")


def native() -> Any:
    """CuPy, where numba.cuda works too."""
    reason = numba_cuda.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return pytest.importorskip("cupy")


@pytest.mark.gpu
def test_cuda_kernels_on_a_gpu() -> None:
    native()
    for score, slope in ((causal, prototype.ones), (capped, capped_slope)):
        assert max(prototype.check(score, slope, target="cuda").values()) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_backend_on_a_gpu(dtype: str, layout: str) -> None:
    cupy = native()
    host = drawn("float32", layout, (150, 170), (4, 2))
    named = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    host = {name: x.astype(named) for name, x in host.items()}
    wide = {name: x.astype(np.float64) for name, x in host.items()}
    for options in ({"causal": True}, {"window_size": (30, 9), "softcap": 3.0, "q_offset": 7}, {}):
        given = {**options, "layout": layout, "return_lse": True}
        stream = cupy.cuda.Stream(non_blocking=True)
        device = {name: cupy.asarray(x) for name, x in host.items()}
        cupy.cuda.Device().synchronize()
        with stream:
            busy = cupy.ones(1 << 26, "float32")
            for _ in range(20):
                busy += 1.0
            dout = device.pop("dout") * 1  # ready only when the stream has come here
            (out, lse), pull = cuattn.flash_attention_vjp(**device, **given, backend="numba")
            gradients = pull(dout)
            got = [x.get() for x in (out, lse, *gradients[:3])]
        dout_wide = wide["dout"]
        operands = {name: x for name, x in wide.items() if name != "dout"}
        (out, lse), pull = cuattn.flash_attention_vjp(**operands, **given, backend="reference")
        want = [out, lse, *pull(dout_wide)[:3]]
        for name, x, reference_x in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            error = abs(x.astype(np.float64) - reference_x).max() / abs(reference_x).max()
            assert error < {**BOUNDS, "float64": 1e-13}[dtype] * 2, (name, options, error)


@pytest.mark.gpu
def test_backend_on_a_gpu_refuses_by_name() -> None:
    cupy = native()
    x = cupy.zeros((1, 5, 2, 8), cupy.float32)
    with pytest.raises(ValueError, match="sinks"):
        cuattn.flash_attention(x, x, x, sinks=cupy.zeros(2, cupy.float32), backend="numba")
    out = cuattn.flash_attention(x[:, :0], x, x, backend="numba")
    assert out.shape == (1, 0, 2, 8)
