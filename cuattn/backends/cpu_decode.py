"""The CPU backend's loops for few query rows (decoding): keys and values are read once, at memory's speed.

``decode`` attends the query rows of one key/value head to one part of its keys, ``combine`` puts the parts
together. Vectors run along the head dimension here, not along query rows as in ``cpu_tiles.py``. No
features: calls that have some take the tiles.
"""

# mypy: ignore-errors
# (Numba types what it compiles.)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .cpu_layout import KIND_REAL
from .cpu_scores import LINE, LOG2E, P, entry, index_of, jit, make_memory, make_rows, scale, up, visible
from .cpu_simd import free, get_i64, malloc


def make_decode(real: Any, simd: Any) -> Callable[..., Any]:
    """``decode(params, tile)``: tile is (batch entry, ``aux4`` key/value heads, part of ``aux3``).

    Heads whose rows are neighbours in memory go together, so that pages are read whole. Leaves in
    ``scratch``, for each [batch entry][key/value head][part][head of the group][query row], the unscaled sums
    of values (padded), then maximum, total and a spare word.
    """
    memory = make_memory(real, simd)
    block = make_rows(real, simd, memory)
    put, size, lanes = simd.put, simd.itemsize, simd.lanes
    padding = max(lanes, simd.rows)
    hidden = real(-np.inf)

    @jit
    def keys_of(p, part, parts, q_len, kv_len, offset):
        """First key and end of a part of the keys that the entry's rows see."""
        begin, end = kv_len, 0
        for i in range(q_len):
            low, high = visible(p, i, q_len, kv_len, offset)
            if low <= high:
                begin, end = min(begin, low), max(end, high + 1)
        share = up((max(end - begin, 0) + parts - 1) // parts, 16)
        return begin + part * share, min(end, begin + (part + 1) * share)

    @jit
    def attend(p, entry_, j0, count, dims, k, k_stride, v, v_stride, ahead, q, s, factor, stats):
        """The rows of a group against one block of keys."""
        q_len, kv_len, offset = entry_
        dim, dim_v, dp, record, rows = dims
        length, padded = get_i64(p, P.seqlen_q), up(count, lanes)
        for t in range(rows):
            if t % length >= q_len:
                continue
            low, high = visible(p, t % length, q_len, kv_len, offset)
            simd.dots(q + t * dp * size, k, k_stride, padded, dim, s, ahead * k_stride)
            for j in range(min(low - j0, padded)):
                put(s, j, hidden)
            for j in range(max(high + 1 - j0, 0), padded):
                put(s, j, hidden)
            acc = stats + t * record * size
            simd.row_softmax(s, padded, factor, acc + (record - 3) * size)
            simd.row_values(v, v_stride, count, s, dim_v, acc, acc + (record - 1) * size, ahead * v_stride)

    @jit
    def start(p, hk, packed, q0, q_len, dims, q, stats):
        """Load the query rows of a group and clear its sums."""
        _, _, dp, record, rows = dims
        length = get_i64(p, P.seqlen_q)
        for t in range(rows):
            memory.fill(stats + t * record * size, record, real(0.0))
            put(stats, t * record + record - 3, hidden)
        for g in range(rows // length):
            index = index_of(
                p, P.q_stride_b, P.q_stride_h, P.q_stride_s, packed, hk * (rows // length) + g, q0
            )
            block.load_rows(
                get_i64(p, P.aux0), get_i64(p, P.q), index, get_i64(p, P.q_stride_s), q_len, length,
                get_i64(p, P.head_dim), dp, q + g * length * dp * size,
            )  # fmt: skip
        block.take_sign(scale(p), rows * dp, q)

    def decode(p, tile):
        parts, keys, together, kind = (
            get_i64(p, P.aux3), get_i64(p, P.aux2), get_i64(p, P.aux4), get_i64(p, P.aux0)
        )  # fmt: skip
        heads, length = get_i64(p, P.heads_kv), get_i64(p, P.seqlen_q)
        b, first_head, part = (
            tile // (heads // together * parts),
            tile // parts * together % heads,
            tile % parts,
        )
        q0, q_len, k0, kv_len, offset = entry(p, b)
        packed = 0 if get_i64(p, P.cu_seqlens_q) else b
        dim, dim_v = get_i64(p, P.head_dim), get_i64(p, P.head_dim_v)
        dp, dv = up(dim, padding), up(dim_v, padding)
        rows, record = get_i64(p, P.heads_q) // heads * length, dv + 3
        base = malloc((together * rows * dp + keys * (dp + dv + 1) + 1) * size + 8 * LINE)
        q = up(base, LINE)
        k_rows = q + up(together * rows * dp * size, LINE)
        v_rows = k_rows + up(keys * dp * size, LINE)
        s = v_rows + up(keys * dv * size, LINE)
        factor = s + up(keys * size, LINE)
        put(factor, 0, real(LOG2E if scale(p) == 0.0 else abs(scale(p)) * LOG2E))
        stats = get_i64(p, P.scratch) + ((b * heads + first_head) * parts + part) * rows * record * size
        head_step = parts * rows * record * size
        for i in range(together):
            start(
                p, first_head + i, packed, q0, q_len, (dim, dim_v, dp, record, rows),
                q + i * rows * dp * size, stats + i * head_step,
            )  # fmt: skip
        k_stride, v_stride = get_i64(p, P.k_stride_s), get_i64(p, P.v_stride_s)
        whole = kind == KIND_REAL and dim % lanes == 0 and dim_v % lanes == 0
        first, last = keys_of(p, part, parts, q_len, kv_len, offset)
        for j0 in range(first, last, keys):
            count = min(keys, last - j0)
            ahead = min(keys, last - j0 - keys)
            for i in range(together):
                k = index_of(p, P.k_stride_b, P.k_stride_h, P.k_stride_s, packed, first_head + i, k0 + j0)
                v = index_of(p, P.v_stride_b, P.v_stride_h, P.v_stride_s, packed, first_head + i, k0 + j0)
                k_at, k_step, dim_k = get_i64(p, P.k) + k * size, k_stride, dim
                v_at, v_step, dim_w = get_i64(p, P.v) + v * size, v_stride, dim_v
                next_ = keys  # the next block's rows, from within the kernels
                if not whole or count % lanes:
                    next_ = 0
                    memory.ask_for(kind, get_i64(p, P.k), k + keys * k_stride, k_stride, 0, ahead, dim)
                    memory.ask_for(kind, get_i64(p, P.v), v + keys * v_stride, v_stride, 0, ahead, dim_v)
                    padded = up(count, lanes)
                    memory.load_block(
                        kind, get_i64(p, P.k), k, k_stride, 0, count, padded, dim, k_rows, dp, 0
                    )
                    memory.load_block(
                        kind, get_i64(p, P.v), v, v_stride, 0, count, padded, dim_v, v_rows, dv, 0
                    )
                    k_at, k_step, dim_k, v_at, v_step, dim_w = k_rows, dp, dp, v_rows, dv, dv
                attend(
                    p, (q_len, kv_len, offset), j0, count, (dim_k, dim_w, dp, record, rows), k_at, k_step,
                    v_at, v_step, next_, q + i * rows * dp * size, s, factor, stats + i * head_step,
                )  # fmt: skip
        free(base)

    return decode


def make_combine(real: Any, simd: Any) -> Callable[..., Any]:
    """``combine(params, tile)``: out and LSE of a (batch entry, query head) from the parts in ``scratch``."""
    memory = make_memory(real, simd)
    get, put, size = simd.get, simd.put, simd.itemsize
    padding = max(simd.lanes, simd.rows)

    @jit
    def join(source, step, parts, padded, unit, acc):
        """Sum of the parts' values over their common maximum, which comes back with the total."""
        top = -np.inf
        for part in range(parts):
            top = max(top, np.float64(get(source, part * step + padded)))
        total = 0.0
        memory.fill(acc, padded, real(0.0))
        for part in range(parts):
            at = part * step
            if get(source, at + padded + 1) == real(0.0):
                continue
            weight = math.exp((np.float64(get(source, at + padded)) - top) * unit)
            total += weight * np.float64(get(source, at + padded + 1))
            for d in range(padded):
                put(acc, d, get(acc, d) + real(weight) * get(source, at + d))
        return top * unit, total

    def combine(p, tile):
        parts, kind, heads = get_i64(p, P.aux3), get_i64(p, P.aux0), get_i64(p, P.heads_q)
        length, dim = get_i64(p, P.seqlen_q), get_i64(p, P.head_dim_v)
        group = heads // get_i64(p, P.heads_kv)
        b, h = tile // heads, tile % heads
        q0, q_len, _, _, _ = entry(p, b)
        packed, n = b, length
        if get_i64(p, P.cu_seqlens_q):
            packed, n = 0, q_len
        padded = up(dim, padding)
        step = group * length * (padded + 3)
        base = malloc(padded * size + LINE)
        acc = up(base, LINE)
        unit = 1.0 if scale(p) == 0.0 else abs(scale(p))
        index = index_of(p, P.out_stride_b, P.out_stride_h, P.out_stride_s, packed, h, q0)
        lse = packed * get_i64(p, P.lse_stride_b) + h * get_i64(p, P.lse_stride_h) + q0
        for i in range(n):
            source = (tile // group * parts * step + (h % group * length + i) * (padded + 3)) * size
            top, total = join(get_i64(p, P.scratch) + source, step, parts, padded, unit, acc)
            at = index + i * get_i64(p, P.out_stride_s)
            memory.store_result(kind, get_i64(p, P.out), at, dim, acc, top, total, get_i64(p, P.sinks), h,
                                get_i64(p, P.lse), lse + i)  # fmt: skip
        if get_i64(p, P.cu_seqlens_q) and b == get_i64(p, P.batch) - 1:
            memory.fill(get_i64(p, P.lse) + (lse + n) * size, get_i64(p, P.aux6) - q0 - n, real(-np.inf))
        free(base)

    return combine
