"""A place to try a new idea: attention's tile loop in plain Python, forward and backward, on CPU and GPU.

The three functions in ``tile_loops`` are the algorithm; edit them, or hand in a score modification, and
``check`` compares the result with plain float64 attention. Numba compiles them for the CPU (``target="cpu"``)
or as ``numba.cuda`` kernels (``target="cuda"``; with NUMBA_ENABLE_CUDASIM=1 in Numba's simulator).
Written to be read: no tensor cores, one thread per row. ``backend="numba"`` on CuPy arrays runs them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numba import (
    config,
    cuda,
    float32,
    float64,
    njit,
)  # at the top: the simulator replaces the module's global
from numpy.typing import NDArray

Array = NDArray[Any]
Score = Callable[[float, int, int], float]  # (scaled score, row, column) -> score; -inf hides the key

BLOCK = 32  # rows of queries or keys that a block of threads works on at most, one thread each
SHARED = 48 << 10  # bytes of shared memory that every GPU gives a block without being asked


def block_rows(dim: int, dim_v: int, itemsize: int) -> int:
    """Rows of a tile: as many as fit, two rows of a tile and two numbers each, into shared memory."""
    rows = BLOCK
    while rows * (dim + dim_v + 2) * itemsize > SHARED:
        rows //= 2
    return rows


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
    """The passes over (heads, seqlen, dim) arrays; results are written or added to the last arguments.

    k and v may have fewer heads: query head h belongs to key head h // (heads of q / heads of k). ``offset``
    is added to the rows that scores are told, so that row + offset is the key on the diagonal.
    """

    forward: Callable[..., None]
    backward_query: Callable[..., None]  # dq
    backward_key: Callable[..., None]  # dk and dv


# ---- on the CPU ----


@cache
def cpu_kernels(score: Score, slope: Score) -> Kernels:
    """The loops over heads, rows and tiles, compiled for the CPU."""
    loops = tile_loops(njit, score, slope)
    forward_tile, query_tile, key_tile = loops

    @njit
    def forward(q, k, v, scale, offset, out, lse):  # type: ignore[no-untyped-def]
        heads, rows, keys, group = q.shape[0], q.shape[1], k.shape[1], q.shape[0] // k.shape[0]
        for h in range(heads):
            for row in range(rows):
                m, l = -math.inf, 0.0  # noqa: E741
                acc = np.zeros(v.shape[2])
                for first in range(0, keys, BLOCK):
                    end = min(first + BLOCK, keys)
                    m, l = forward_tile(  # noqa: E741
                        q[h, row], k[h // group, first:end], v[h // group, first:end], end - first, first,
                        row + offset, scale, m, l, acc,
                    )  # fmt: skip
                for c in range(v.shape[2]):
                    out[h, row, c] = acc[c] / l if l > 0.0 else 0.0
                lse[h, row] = m + math.log(l) if l > 0.0 else -math.inf

    @njit
    def backward_query(q, k, v, scale, offset, lse, dout, delta, dq):  # type: ignore[no-untyped-def]
        heads, rows, keys, group = q.shape[0], q.shape[1], k.shape[1], q.shape[0] // k.shape[0]
        for h in range(heads):
            own = h // group
            for row in range(rows):
                for first in range(0, keys, BLOCK):
                    end = min(first + BLOCK, keys)
                    query_tile(
                        q[h, row], dout[h, row], k[own, first:end], v[own, first:end], end - first, first,
                        row + offset, scale, lse[h, row], delta[h, row], dq[h, row],
                    )  # fmt: skip

    @njit
    def backward_key(q, k, v, scale, offset, lse, dout, delta, dk, dv):  # type: ignore[no-untyped-def]
        heads, rows, keys, group = q.shape[0], q.shape[1], k.shape[1], q.shape[0] // k.shape[0]
        for h in range(heads):
            own = h // group
            for column in range(keys):
                for first in range(0, rows, BLOCK):
                    end = min(first + BLOCK, rows)
                    key_tile(
                        k[own, column], v[own, column], q[h, first:end], dout[h, first:end],
                        lse[h, first:end], delta[h, first:end], end - first, first + offset, column, scale,
                        dk[own, column], dv[own, column],
                    )  # fmt: skip

    return Kernels(forward, backward_query, backward_key)


# ---- on a GPU ----


@cache
def load_numba_cuda() -> None:
    """Have numba-cuda load under NumPy 2.5: up to 0.30 it names ``np.row_stack``, which is gone there."""
    if hasattr(np, "row_stack") or config.ENABLE_CUDASIM or find_spec("numba_cuda") is None:
        return
    np.row_stack = np.vstack
    try:
        import_module("numba.cuda.np.arrayobj")
    finally:
        del np.row_stack


@cache
def cuda_kernels(score: Score, slope: Score, dim: int, dim_v: int, dtype: str = "float32") -> Kernels:
    """The same as CUDA kernels: a block of threads shares tiles in shared memory, a thread owns a row.

    Arrays are of ``dtype``, float32 or float64; sums in registers are float64, as Python's are. The keyword
    ``stream`` (of ``numba.cuda``; 0 is the default one) says where a pass runs.

    NOTE: one shared array per line: the simulator tells them apart by their lines.
    """
    load_numba_cuda()
    real, rows = (float64, block_rows(dim, dim_v, 8)) if dtype == "float64" else (
        float32, block_rows(dim, dim_v, 4)
    )  # fmt: skip

    def device(function: Any) -> Any:
        return cuda.jit(device=True)(function)

    forward_tile, query_tile, key_tile = tile_loops(device, score, slope)

    @cuda.jit
    def forward_kernel(q, k, v, scale, offset, out, lse):  # type: ignore[no-untyped-def]
        k_tile = cuda.shared.array((rows, dim), real)
        v_tile = cuda.shared.array((rows, dim_v), real)
        acc = cuda.local.array(dim_v, real)
        own, h = cuda.threadIdx.x, cuda.blockIdx.x
        row, hk = cuda.blockIdx.y * rows + own, h // (q.shape[0] // k.shape[0])
        for c in range(dim_v):
            acc[c] = 0.0
        m, l = -math.inf, 0.0  # noqa: E741
        for first in range(0, k.shape[1], rows):
            if first + own < k.shape[1]:  # each thread brings one key and one value
                for c in range(dim):
                    k_tile[own, c] = k[hk, first + own, c]
                for c in range(dim_v):
                    v_tile[own, c] = v[hk, first + own, c]
            cuda.syncthreads()
            if row < q.shape[1]:
                count = min(rows, k.shape[1] - first)
                m, l = forward_tile(  # noqa: E741
                    q[h, row], k_tile, v_tile, count, first, row + offset, scale, m, l, acc
                )
            cuda.syncthreads()  # nobody overwrites a tile that is still being read
        if row < q.shape[1]:
            for c in range(dim_v):
                out[h, row, c] = acc[c] / l if l > 0.0 else 0.0
            lse[h, row] = m + math.log(l) if l > 0.0 else -math.inf

    @cuda.jit
    def query_kernel(q, k, v, scale, offset, lse, dout, delta, dq):  # type: ignore[no-untyped-def]
        k_tile = cuda.shared.array((rows, dim), real)
        v_tile = cuda.shared.array((rows, dim_v), real)
        own, h = cuda.threadIdx.x, cuda.blockIdx.x
        row, hk = cuda.blockIdx.y * rows + own, h // (q.shape[0] // k.shape[0])
        for first in range(0, k.shape[1], rows):
            if first + own < k.shape[1]:
                for c in range(dim):
                    k_tile[own, c] = k[hk, first + own, c]
                for c in range(dim_v):
                    v_tile[own, c] = v[hk, first + own, c]
            cuda.syncthreads()
            if row < q.shape[1]:
                query_tile(
                    q[h, row], dout[h, row], k_tile, v_tile, min(rows, k.shape[1] - first), first,
                    row + offset, scale, lse[h, row], delta[h, row], dq[h, row],
                )  # fmt: skip
            cuda.syncthreads()

    @cuda.jit
    def key_kernel(q, k, v, scale, offset, lse, dout, delta, dk, dv):  # type: ignore[no-untyped-def]
        q_tile = cuda.shared.array((rows, dim), real)
        dout_tile = cuda.shared.array((rows, dim_v), real)
        lse_tile = cuda.shared.array(rows, real)
        delta_tile = cuda.shared.array(rows, real)
        own, hk, group = cuda.threadIdx.x, cuda.blockIdx.x, q.shape[0] // k.shape[0]
        column = cuda.blockIdx.y * rows + own
        for h in range(hk * group, hk * group + group):  # all query heads that share this key head
            for first in range(0, q.shape[1], rows):
                if first + own < q.shape[1]:
                    for c in range(dim):
                        q_tile[own, c] = q[h, first + own, c]
                    for c in range(dim_v):
                        dout_tile[own, c] = dout[h, first + own, c]
                    lse_tile[own], delta_tile[own] = lse[h, first + own], delta[h, first + own]
                cuda.syncthreads()
                if column < k.shape[1]:
                    key_tile(
                        k[hk, column], v[hk, column], q_tile, dout_tile, lse_tile, delta_tile,
                        min(rows, q.shape[1] - first), first + offset, column, scale,
                        dk[hk, column], dv[hk, column],
                    )  # fmt: skip
                cuda.syncthreads()

    def launcher(kernel: Any, over: int) -> Callable[..., None]:
        def launch(*arguments: Any, stream: Any = 0) -> None:
            heads, length = arguments[over].shape[:2]
            with warnings.catch_warnings():  # small grids and arrays of the host are what one tries first
                warnings.filterwarnings("ignore", "(?s).*(Grid size|Host array used)")
                kernel[(heads, -(-length // rows)), rows, stream](*arguments)

        return launch

    return Kernels(launcher(forward_kernel, 0), launcher(query_kernel, 0), launcher(key_kernel, 1))


# ---- what one calls ----


def _kernels(target: str, score: Score, slope: Score, q: Array, v: Array) -> Kernels:
    if target == "cpu":
        return cpu_kernels(score, slope)
    if target == "cuda":
        return cuda_kernels(score, slope, q.shape[-1], v.shape[-1], q.dtype.name)
    raise ValueError(f"target: got {target!r}; takes 'cpu' or 'cuda'")


def attention(
    q: Array, k: Array, v: Array, *, score: Score = unchanged, slope: Score = ones,
    softmax_scale: float | None = None, offset: int = 0, target: str = "cpu",
) -> tuple[Array, Array, Callable[[Array], tuple[Array, Array, Array]]]:  # fmt: skip
    """Attention whose scores pass through ``score(s, row, column)``; forward and backward.

    ``q``, ``k``, ``v``: (heads, seqlen, head_dim) NumPy arrays, float32 or float64; the heads of k and v
    divide q's. ``slope``: the derivative of ``score`` with respect to s; only the backward uses it. Both must
    be functions that Numba compiles. ``offset`` is added to the rows that they see. Returns out, LSE and a
    pullback from dout to (dq, dk, dv).
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    kernels = _kernels(target, score, slope, q, v)
    out, lse = np.zeros((*q.shape[:2], v.shape[-1]), q.dtype), np.zeros(q.shape[:2], q.dtype)
    kernels.forward(q, k, v, scale, offset, out, lse)

    def pullback(dout: Array) -> tuple[Array, Array, Array]:
        delta = (dout * out).sum(axis=-1)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        given = (q, k, v, scale, offset, lse, np.ascontiguousarray(dout), delta)
        kernels.backward_query(*given, dq)
        kernels.backward_key(*given, dk, dv)
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
