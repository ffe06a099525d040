"""A place to try a new idea: attention's tile loop in plain Python, forward and backward, on CPU and GPU.

The three functions in ``tile_loops`` are the algorithm; edit them, or hand in a score modification, and
``check`` compares the result with plain float64 attention. Numba compiles them for the CPU (``target="cpu"``)
or as ``numba.cuda`` kernels (``target="cuda"``; with NUMBA_ENABLE_CUDASIM=1 in Numba's simulator).
Written to be read: no tensor cores, one thread per row. Nothing in the package depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, njit  # at the top: the simulator replaces the module's global
from numpy.typing import NDArray

Array = NDArray[Any]
Score = Callable[[float, int, int], float]  # (scaled score, row, column) -> score; -inf hides the key

BLOCK = 32  # rows of queries or keys that a block of threads works on, one thread each


def unchanged(s: float, row: int, column: int) -> float:
    """The score modification that modifies nothing."""
    return s


def ones(s: float, row: int, column: int) -> float:
    """Its derivative with respect to the score."""
    return 1.0


class Loops(NamedTuple):
    """The compiled tile functions."""

    forward: Any
    backward_query: Any
    backward_key: Any


def tile_loops(jit: Callable[[Any], Any], score: Score, slope: Score) -> Loops:
    """The algorithm: what one row does with one tile. ``jit`` compiles each function."""
    modified, derivative = jit(score), jit(slope)

    def forward(q_row, k_tile, v_tile, count, first, row, scale, m, l, acc):  # type: ignore[no-untyped-def]  # noqa: E741
        """Visit a tile's keys with a running maximum m, a running sum l and unscaled output acc."""
        for j in range(count):
            s = 0.0
            for c in range(q_row.shape[0]):
                s += q_row[c] * k_tile[j, c]
            s = modified(s * scale, row, first + j)
            if s == -math.inf:
                continue
            if s > m:  # what was collected so far was relative to the old maximum
                repair = math.exp(m - s)
                l *= repair  # noqa: E741
                for c in range(acc.shape[0]):
                    acc[c] *= repair
                m = s
            p = math.exp(s - m)
            l += p  # noqa: E741
            for c in range(acc.shape[0]):
                acc[c] += p * v_tile[j, c]
        return m, l

    def backward_query(  # type: ignore[no-untyped-def]
        q_row, dout_row, k_tile, v_tile, count, first, row, scale, lse, delta, dq_row
    ):
        """Add a tile of keys to one query's gradient; the weights are computed again from LSE."""
        for j in range(count):
            s, dp = 0.0, 0.0
            for c in range(q_row.shape[0]):
                s += q_row[c] * k_tile[j, c]
            for c in range(dout_row.shape[0]):
                dp += dout_row[c] * v_tile[j, c]
            s *= scale
            changed = modified(s, row, first + j)
            if changed == -math.inf:
                continue
            ds = math.exp(changed - lse) * (dp - delta) * derivative(s, row, first + j) * scale
            for c in range(q_row.shape[0]):
                dq_row[c] += ds * k_tile[j, c]

    def backward_key(  # type: ignore[no-untyped-def]
        k_row, v_row, q_tile, dout_tile, lse_tile, delta_tile, count, first, column, scale, dk_row, dv_row
    ):
        """Add a tile of queries to one key's and one value's gradient."""
        for i in range(count):
            s, dp = 0.0, 0.0
            for c in range(k_row.shape[0]):
                s += q_tile[i, c] * k_row[c]
            for c in range(v_row.shape[0]):
                dp += dout_tile[i, c] * v_row[c]
            s *= scale
            changed = modified(s, first + i, column)
            if changed == -math.inf:
                continue
            p = math.exp(changed - lse_tile[i])
            ds = p * (dp - delta_tile[i]) * derivative(s, first + i, column) * scale
            for c in range(k_row.shape[0]):
                dk_row[c] += ds * q_tile[i, c]
            for c in range(v_row.shape[0]):
                dv_row[c] += p * dout_tile[i, c]

    return Loops(jit(forward), jit(backward_query), jit(backward_key))


class Kernels(NamedTuple):
    """Both passes over (heads, seqlen, dim) arrays; results are written into the last arguments."""

    forward: Callable[..., None]
    backward: Callable[..., None]


# ---- on the CPU ----


@cache
def cpu_kernels(score: Score, slope: Score) -> Kernels:
    """The loops over heads, rows and tiles, compiled for the CPU."""
    loops = tile_loops(njit, score, slope)
    forward_tile, query_tile, key_tile = loops

    @njit
    def forward(q, k, v, scale, out, lse):  # type: ignore[no-untyped-def]
        heads, rows, keys = q.shape[0], q.shape[1], k.shape[1]
        for h in range(heads):
            for row in range(rows):
                m, l = -math.inf, 0.0  # noqa: E741
                acc = np.zeros(v.shape[2])
                for first in range(0, keys, BLOCK):
                    end = min(first + BLOCK, keys)
                    m, l = forward_tile(  # noqa: E741
                        q[h, row], k[h, first:end], v[h, first:end], end - first, first, row, scale, m, l, acc
                    )
                for c in range(v.shape[2]):
                    out[h, row, c] = acc[c] / l if l > 0.0 else 0.0
                lse[h, row] = m + math.log(l) if l > 0.0 else -math.inf

    @njit
    def backward(q, k, v, scale, lse, dout, delta, dq, dk, dv):  # type: ignore[no-untyped-def]
        heads, rows, keys = q.shape[0], q.shape[1], k.shape[1]
        for h in range(heads):
            for row in range(rows):
                for first in range(0, keys, BLOCK):
                    end = min(first + BLOCK, keys)
                    query_tile(
                        q[h, row], dout[h, row], k[h, first:end], v[h, first:end], end - first, first, row,
                        scale, lse[h, row], delta[h, row], dq[h, row],
                    )  # fmt: skip
            for column in range(keys):
                for first in range(0, rows, BLOCK):
                    end = min(first + BLOCK, rows)
                    key_tile(
                        k[h, column], v[h, column], q[h, first:end], dout[h, first:end], lse[h, first:end],
                        delta[h, first:end], end - first, first, column, scale, dk[h, column], dv[h, column],
                    )  # fmt: skip

    return Kernels(forward, backward)


# ---- on a GPU ----


@cache
def cuda_kernels(score: Score, slope: Score, dim: int, dim_v: int) -> Kernels:
    """The same as CUDA kernels: a block of threads shares tiles in shared memory, a thread owns a row.

    NOTE: one shared array per line: the simulator tells them apart by their lines.
    """

    def device(function: Any) -> Any:
        return cuda.jit(device=True)(function)

    forward_tile, query_tile, key_tile = tile_loops(device, score, slope)

    @cuda.jit
    def forward_kernel(q, k, v, scale, out, lse):  # type: ignore[no-untyped-def]
        k_tile = cuda.shared.array((BLOCK, dim), float32)
        v_tile = cuda.shared.array((BLOCK, dim_v), float32)
        acc = cuda.local.array(dim_v, float32)
        own, h = cuda.threadIdx.x, cuda.blockIdx.y
        row = cuda.blockIdx.x * BLOCK + own
        for c in range(dim_v):
            acc[c] = 0.0
        m, l = -math.inf, 0.0  # noqa: E741
        for first in range(0, k.shape[1], BLOCK):
            if first + own < k.shape[1]:  # each thread brings one key and one value
                for c in range(dim):
                    k_tile[own, c] = k[h, first + own, c]
                for c in range(dim_v):
                    v_tile[own, c] = v[h, first + own, c]
            cuda.syncthreads()
            if row < q.shape[1]:
                count = min(BLOCK, k.shape[1] - first)
                m, l = forward_tile(  # noqa: E741
                    q[h, row], k_tile, v_tile, count, first, row, scale, m, l, acc
                )
            cuda.syncthreads()  # nobody overwrites a tile that is still being read
        if row < q.shape[1]:
            for c in range(dim_v):
                out[h, row, c] = acc[c] / l if l > 0.0 else 0.0
            lse[h, row] = m + math.log(l) if l > 0.0 else -math.inf

    @cuda.jit
    def query_kernel(q, k, v, scale, lse, dout, delta, dq):  # type: ignore[no-untyped-def]
        k_tile = cuda.shared.array((BLOCK, dim), float32)
        v_tile = cuda.shared.array((BLOCK, dim_v), float32)
        own, h = cuda.threadIdx.x, cuda.blockIdx.y
        row = cuda.blockIdx.x * BLOCK + own
        for first in range(0, k.shape[1], BLOCK):
            if first + own < k.shape[1]:
                for c in range(dim):
                    k_tile[own, c] = k[h, first + own, c]
                for c in range(dim_v):
                    v_tile[own, c] = v[h, first + own, c]
            cuda.syncthreads()
            if row < q.shape[1]:
                query_tile(
                    q[h, row], dout[h, row], k_tile, v_tile, min(BLOCK, k.shape[1] - first), first, row,
                    scale, lse[h, row], delta[h, row], dq[h, row],
                )  # fmt: skip
            cuda.syncthreads()

    @cuda.jit
    def key_kernel(q, k, v, scale, lse, dout, delta, dk, dv):  # type: ignore[no-untyped-def]
        q_tile, dout_tile = (
            cuda.shared.array((BLOCK, dim), float32),
            cuda.shared.array((BLOCK, dim_v), float32),
        )
        lse_tile = cuda.shared.array(BLOCK, float32)
        delta_tile = cuda.shared.array(BLOCK, float32)
        own, h = cuda.threadIdx.x, cuda.blockIdx.y
        column = cuda.blockIdx.x * BLOCK + own
        for first in range(0, q.shape[1], BLOCK):
            if first + own < q.shape[1]:
                for c in range(dim):
                    q_tile[own, c] = q[h, first + own, c]
                for c in range(dim_v):
                    dout_tile[own, c] = dout[h, first + own, c]
                lse_tile[own], delta_tile[own] = lse[h, first + own], delta[h, first + own]
            cuda.syncthreads()
            if column < k.shape[1]:
                key_tile(
                    k[h, column], v[h, column], q_tile, dout_tile, lse_tile, delta_tile,
                    min(BLOCK, q.shape[1] - first), first, column, scale, dk[h, column], dv[h, column],
                )  # fmt: skip
            cuda.syncthreads()

    def grid(x: Any) -> tuple[int, int]:
        return -(-x.shape[1] // BLOCK), x.shape[0]

    def forward(q: Any, k: Any, v: Any, scale: float, out: Any, lse: Any) -> None:
        forward_kernel[grid(q), BLOCK](q, k, v, scale, out, lse)

    def backward(
        q: Any, k: Any, v: Any, scale: float, lse: Any, dout: Any, delta: Any, *results: Any
    ) -> None:
        dq, dk, dv = results
        query_kernel[grid(q), BLOCK](q, k, v, scale, lse, dout, delta, dq)
        key_kernel[grid(k), BLOCK](q, k, v, scale, lse, dout, delta, dk, dv)

    return Kernels(forward, backward)


# ---- what one calls ----


def _kernels(target: str, score: Score, slope: Score, dim: int, dim_v: int) -> Kernels:
    if target == "cpu":
        return cpu_kernels(score, slope)
    if target == "cuda":
        return cuda_kernels(score, slope, dim, dim_v)
    raise ValueError(f"target: got {target!r}; takes 'cpu' or 'cuda'")


def attention(
    q: Array, k: Array, v: Array, *, score: Score = unchanged, slope: Score = ones,
    softmax_scale: float | None = None, target: str = "cpu",
) -> tuple[Array, Array, Callable[[Array], tuple[Array, Array, Array]]]:  # fmt: skip
    """Attention whose scores pass through ``score(s, row, column)``; forward and backward.

    ``q``, ``k``, ``v``: (heads, seqlen, head_dim) NumPy arrays, float32 or (on the CPU) float64, with as
    many heads in each. ``slope``: the derivative of ``score`` with respect to s; only the backward uses it.
    Both must be functions that Numba compiles. Returns out, LSE and a pullback from dout to (dq, dk, dv).
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    kernels = _kernels(target, score, slope, q.shape[-1], v.shape[-1])
    out, lse = np.zeros((*q.shape[:2], v.shape[-1]), q.dtype), np.zeros(q.shape[:2], q.dtype)
    kernels.forward(q, k, v, scale, out, lse)

    def pullback(dout: Array) -> tuple[Array, Array, Array]:
        delta = (dout * out).sum(axis=-1)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        kernels.backward(q, k, v, scale, lse, np.ascontiguousarray(dout), delta, dq, dk, dv)
        return dq, dk, dv

    return out, lse, pullback


def plain(q: Array, k: Array, v: Array, dout: Array, score: Score, softmax_scale: float) -> list[Array]:
    """out, dq, dk, dv of plain float64 attention; the score's derivative by central differences."""
    step = 1e-5

    def apply(s: Array) -> Array:
        heads, rows, columns = s.shape
        values = [
            score(float(s[h, i, j]), i, j) for h in range(heads) for i in range(rows) for j in range(columns)
        ]
        return np.array(values).reshape(s.shape)

    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    s = np.einsum("hid,hjd->hij", q, k) * softmax_scale
    changed = apply(s)
    top = changed.max(axis=-1, keepdims=True)
    p = np.exp(changed - np.where(np.isfinite(top), top, 0.0))
    total = p.sum(axis=-1, keepdims=True)
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    out = p @ v
    seen = np.isfinite(changed)
    slope = np.zeros_like(s)
    slope[seen] = (apply(s + step)[seen] - apply(s - step)[seen]) / (2 * step)
    ds = p * (dout @ v.swapaxes(1, 2) - (dout * out).sum(axis=-1, keepdims=True)) * slope * softmax_scale
    return [out, ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout]


def check(
    score: Score = unchanged, slope: Score = ones, *, target: str = "cpu", heads: int = 2, seqlen_q: int = 37,
    seqlen_kv: int = 50, head_dim: int = 16, tolerance: float = 1e-4,
) -> dict[str, float]:  # fmt: skip
    """Compare the tile loop under a score modification with plain float64 attention on random inputs.

    Returns the largest difference of out, dq, dk and dv, each relative to its largest value. Raises
    ``AssertionError`` naming the first that exceeds ``tolerance``: dq or dk alone mean a wrong ``slope``.
    """
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((heads, seqlen_q, head_dim), dtype=np.float32) for _ in range(2))
    k, v = (rng.standard_normal((heads, seqlen_kv, head_dim), dtype=np.float32) for _ in range(2))
    out, _, pullback = attention(q, k, v, score=score, slope=slope, target=target)
    want = plain(q, k, v, dout, score, head_dim**-0.5)
    errors = {}
    for name, got, reference in zip(("out", "dq", "dk", "dv"), (out, *pullback(dout)), want, strict=True):
        errors[name] = float(abs(got - reference).max() / max(abs(reference).max(), 1e-12))
        assert errors[name] <= tolerance, f"{name} is off by {errors[name]:.1e}"
    return errors
