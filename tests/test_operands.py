"""Bias and mask in every shape that broadcasts, what hides a key, offsets of packed sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import cases
import numpy as np
import pytest
from conftest import Runner

import cuattn
from cuattn.backends import reference

Normal = Callable[..., Any]
FULL = (2, 4, 9, 11)
SHAPES = [
    tuple(1 if one else n for one, n in zip(ones, FULL, strict=True))
    for ones in itertools.product([False, True], repeat=4)
] + [FULL[1:], FULL[2:], FULL[3:], (4, 1, 11), (9, 1), (1,), ()]


def qkv(normal: Normal, dtype: Any = np.float32, head_dim: int = 16) -> dict[str, Any]:
    return {n: normal(2, 9 if n == "q" else 11, 4, head_dim, dtype=dtype) for n in "qkv"}


def check(run: Runner, arrays: dict[str, Any], dtype: str = "float32", **options: Any) -> None:
    spec = cases.spec_of(arrays, options, "thd" if "cu_seqlens_q" in arrays else "bshd")
    rng = np.random.default_rng(5)
    dout = rng.standard_normal(spec.out_shape).astype(cases.NUMPY_DTYPES[dtype])
    dlse = rng.standard_normal(spec.lse_shape).astype(np.float32)
    problem = cases.Problem(cases.Case("call"), arrays, options, spec, dout, dlse)
    out, lse, found = run(arrays, dout=dout, dlse=dlse, **options)
    cases.check_forward(problem, out, lse)
    cases.check_backward(problem, found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_broadcast_shape(run: Runner, normal: Normal, shape: tuple[int, ...]) -> None:
    """Out, and the bias's gradient in its own shape."""
    mask = np.asarray(np.random.default_rng(1).random(shape) < 0.7)
    check(run, {**qkv(normal), "bias": np.asarray(normal(*shape))})
    check(run, {**qkv(normal), "bias": np.asarray(normal(*shape)), "mask": mask}, causal=True)


@pytest.mark.parametrize("axes", list(itertools.permutations(range(4)))[1::3], ids=str)
def test_every_order_in_memory(run: Runner, normal: Normal, axes: tuple[int, ...]) -> None:
    """Axes in any order, every second element of a wider array: no copy is asked for."""
    if run.kind == "jax":
        pytest.skip("JAX arrays have no strides")

    def view(x: Any) -> Any:
        wide = np.repeat(x.transpose(axes), 2, axis=-1)
        return wide[..., ::2].transpose(np.argsort(axes))

    mask = np.random.default_rng(1).random(FULL) < 0.7
    check(run, {**qkv(normal), "bias": view(normal(*FULL)), "mask": view(mask)})


def test_a_broadcast_bias_is_read_in_place() -> None:
    """A view that would fill a petabyte."""
    q, row = np.ones((1, 40_000, 1, 1), np.float32), np.zeros(40_000, np.float32)
    row[7:] = -np.inf
    huge = np.broadcast_to(row, (1, 1, 40_000, 40_000))
    out = cuattn.flash_attention(q[:, :3], q, q * 5, bias=huge[:, :, :3], mask=huge[:, :, :3] == 0)
    assert (out == 5).all()
    one = np.broadcast_to(np.float32(0), (10**5, 10**5, 3, 40_000))[:1, :1]
    assert (cuattn.flash_attention(q[:, :3], q, q, bias=one) == 1).all()


@pytest.mark.parametrize("head_dim", [16, 12])  # on a GPU two families
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_only_minus_infinity_hides(run: Runner, normal: Normal, dtype: str, head_dim: int) -> None:
    """The most negative finite bias leaves a row its keys where it has no others."""
    kind = cases.NUMPY_DTYPES[dtype]
    arrays = qkv(normal, kind, head_dim)
    bias = np.zeros((9, 11), np.float32)
    bias[2], bias[3] = np.float32(cases.ml_dtypes.finfo(kind).min), -np.inf
    bias[4, :5] = np.float32(cases.ml_dtypes.finfo(kind).min)
    out, lse, found = run({**arrays, "bias": bias.astype(kind)}, dout=np.ones_like(arrays["q"]))
    assert (out[:, 3] == 0).all() and (lse[..., 3] == -np.inf).all() and (found["q"][:, 3] == 0).all()
    assert np.isfinite(lse[..., 2]).all() and np.isfinite(out.astype(np.float32)).all()
    if dtype != "float16":  # whose most negative bias leaves something of the scores
        mean, tolerance = arrays["v"].astype(np.float32).mean(axis=1), 1e-6 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(out[:, 2].astype(np.float32), mean, atol=tolerance)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in found.values())


@pytest.mark.parametrize("how", ["int", "array", "slopes"])
def test_packed_sequences_with_offsets(run: Runner, normal: Normal, how: str) -> None:
    """q_offset of all sequences or of each, slopes of each."""
    arrays: dict[str, Any] = {"q": normal(40, 4, 16), "k": normal(57, 2, 16), "v": normal(57, 2, 16)}
    arrays |= {
        "cu_seqlens_q": np.array([0, 7, 7, 23, 40], np.int32),
        "cu_seqlens_k": np.array([0, 12, 20, 20, 57], np.int32),
    }
    options: dict[str, Any] = {"causal": True, "max_seqlen_q": 17, "max_seqlen_k": 37}
    if how == "int":
        options["q_offset"] = 3
    if how == "array":
        arrays["q_offset"] = np.array([2, 0, -5, 11], np.int32)
    if how == "slopes":
        arrays["alibi_slopes"] = np.abs(normal(4, 4)) * 0.3
    check(run, arrays, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_every_head_dim(normal: Normal, causal: bool) -> None:
    """1 to 256 for q and k, 256 to 1 for v."""
    run = Runner("numba")
    for head_dim in range(1, 257):
        arrays = {"q": normal(1, 9, 2, head_dim), "k": normal(1, 11, 1, head_dim)}
        arrays["v"], dout = normal(1, 11, 1, 257 - head_dim), normal(1, 9, 2, 257 - head_dim)
        out, lse, found = run(arrays, dout=dout, causal=causal)
        spec = cases.spec_of(arrays, {"causal": causal}, "bshd")
        wanted = dict(zip(("out", "lse"), reference.attention(spec, arrays), strict=True))
        wanted |= reference.gradients(spec, arrays, dout)
        for name, x in {"out": out, "lse": lse, **found}.items():
            np.testing.assert_allclose(x, wanted[name], rtol=1e-4, atol=1e-4, err_msg=f"{name} of {head_dim}")
