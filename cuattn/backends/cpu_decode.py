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

from .cpu_layout import KIND_REAL, LINE
from .cpu_native import free, get_i64, malloc
from .cpu_scores import LOG2E, P, entry, index_of, jit, make_memory, make_rows, scale, up, visible
from .cpu_simd import BESIDE

AHEAD = 1024  # bytes from where keys are read to where they are asked for: the hardware does the rest


def make_decode(real: Any, simd: Any) -> Callable[..., Any]:
    """``decode(params, tile)``: tile is (batch entry, ``aux4`` key/value heads, part of ``aux3``).

    Heads whose rows are neighbours in memory go together, so that memory is read from end to end. Leaves in
    ``scratch``, for each [batch entry][key/value head][part][head of the group][query row], the unscaled sums
    of values (padded), then maximum, total and a spare word.
    """
    memory = make_memory(real, simd)
    block = make_rows(real, simd, memory)
    get, put, size, lanes = simd.get, simd.put, simd.itemsize, simd.lanes
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
    def attend(p, entry_, j0, padded, dims, heads, k, k_step, k_stride, v, v_step, v_stride, q, at):
        """The query rows of neighbouring heads against one block of their keys."""
        q_len, kv_len, offset = entry_
        dim, dim_v, dp, dv, rows = dims
        s, sums, factor, states, acc = at
        length = get_i64(p, P.seqlen_q)
        for t in range(rows):
            if t % length >= q_len:
                continue
            low, high = visible(p, t % length, q_len, kv_len, offset)
            query, state = q + t * dp * size, states + t * 5 * lanes * size
            simd.dots(query, rows * dp, k, k_step, k_stride, heads, padded, dim, s, sums, AHEAD // size)
            memory.fill(s, min(max(low - j0, 0), padded) * heads, hidden)
            after = min(max(high + 1 - j0, 0), padded) * heads
            memory.fill(s + after * size, padded * heads - after, hidden)
            simd.row_softmax(s, padded * heads, heads, factor, state)
            values = acc + t * heads * dv * size
            simd.row_scale(values, dv, heads, dv, state + 2 * lanes * size)
            simd.row_values(v, v_step, v_stride, heads, padded, s, dim_v, values, dv, AHEAD // size)

    @jit
    def attend_row(keys, count, dim, heads, k, k_step, k_stride, v, v_step, v_stride, q, at):
        """One query row of neighbouring heads, which sees all of ``count`` keys, ``keys`` at a time.

        A block's values are summed beside the products with the next block's keys.
        """
        s, sums, factor, state, acc = at
        k_row, v_row = k_stride * size, v_stride * size
        line = lanes * size
        shifted = int(k % line == 16 and v % line == 16)
        if (k_row | v_row | k_step * size | v_step * size) % line:
            shifted = 0
        now, then, padded = s, s + keys * heads * size, min(keys, count)
        simd.dots(q, dim, k, k_step, k_stride, heads, padded, dim, now, sums, AHEAD // size)
        while padded > 0:
            k, count = k + padded * k_row, count - padded
            more = min(keys, count)
            simd.row_softmax(now, padded * heads, heads, factor, state)
            simd.row_scale(acc, dim, heads, dim, state + 2 * lanes * size)
            simd.dots_beside(
                q, dim, k, k_step, k_stride, heads, more, dim, then, sums, v, v_step, v_stride, now, acc, dim,
                AHEAD // size, shifted,
            )  # fmt: skip
            v, rest = v + more * v_row, padded - more
            simd.row_values(
                v, v_step, v_stride, heads, rest, now + more * heads * size, dim, acc, dim, AHEAD // size
            )
            v, now, then, padded = v + rest * v_row, then, now, more

    @jit
    def load_queries(p, hk, packed, q0, q_len, rows, dp, q):
        """The query rows of one head's group."""
        length = get_i64(p, P.seqlen_q)
        for g in range(rows // length):
            index = index_of(
                p, P.q_stride_b, P.q_stride_h, P.q_stride_s, packed, hk * (rows // length) + g, q0
            )
            block.load_rows(
                get_i64(p, P.aux0), get_i64(p, P.q), index, get_i64(p, P.q_stride_s), q_len, length,
                get_i64(p, P.head_dim), dp, q + g * length * dp * size,
            )  # fmt: skip
        block.take_sign(scale(p), rows * dp, q)

    @jit
    def load(kind, address, index, stride, step, heads, count, dim, padded, target):
        """``lanes`` keys of some heads, from ``count`` on zeros: [key][head][padded]."""
        for j in range(lanes):
            for i in range(heads):
                row = target + (j * heads + i) * padded * size
                if j < count:
                    memory.load_row(kind, address, index + j * stride + i * step, dim, padded, row)
                else:
                    memory.fill(row, padded, real(0.0))

    @jit
    def store(acc, states, heads, rows, dv, stats, stats_step):
        """What ``combine`` wants to know."""
        for t in range(rows):
            state = states + t * 5 * lanes * size
            for h in range(heads):
                target, total = h * stats_step + t * (dv + 3), real(0.0)
                for d in range(dv):
                    put(stats, target + d, get(acc, (t * heads + h) * dv + d))
                for lane in range(h, lanes, heads):
                    total += get(state, lanes + lane)
                put(stats, target + dv, get(state, h))
                put(stats, target + dv + 1, total)

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
        rows = get_i64(p, P.heads_q) // heads * length
        q_size, s_size = up(together * rows * dp * size, LINE), 2 * up(keys * together * size, LINE)
        k_size, v_size = up(lanes * together * dp * size, LINE), up(lanes * together * dv * size, LINE)
        acc_size = up(together * rows * dv * size, LINE)
        base = malloc(
            q_size + s_size + k_size + v_size + acc_size + (lanes + 5 * rows) * lanes * size + 3 * LINE
        )
        q = up(base, LINE)
        s = q + q_size
        k_rows = s + s_size
        v_rows = k_rows + k_size
        acc = v_rows + v_size
        sums = acc + acc_size
        states = sums + lanes * lanes * size
        factor = states + 5 * rows * lanes * size
        put(factor, 0, real(LOG2E if scale(p) == 0.0 else abs(scale(p)) * LOG2E))
        memory.fill(states, 5 * rows * lanes, real(0.0))
        for t in range(rows):
            memory.fill(states + t * 5 * lanes * size, lanes, hidden)
        memory.fill(acc, together * rows * dv, real(0.0))
        for i in range(together):
            load_queries(p, first_head + i, packed, q0, q_len, rows, dp, q + i * rows * dp * size)
        k = index_of(p, P.k_stride_b, P.k_stride_h, P.k_stride_s, packed, first_head, k0)
        v = index_of(p, P.v_stride_b, P.v_stride_h, P.v_stride_s, packed, first_head, k0)
        k_stride, v_stride = get_i64(p, P.k_stride_s), get_i64(p, P.v_stride_s)
        k_step, v_step = get_i64(p, P.k_stride_h), get_i64(p, P.v_stride_h)
        whole = kind == KIND_REAL and dim % lanes == 0 and dim_v % lanes == 0
        j, last = keys_of(p, part, parts, q_len, kv_len, offset)
        entry_, at, dims = (q_len, kv_len, offset), (s, sums, factor, states, acc), (dim, dim_v, dp, dv, rows)
        if rows == 1 and whole and dim == dim_v and (dim == BESIDE[0] * lanes or dim == BESIDE[1] * lanes):
            count = max(last - j, 0) // lanes * lanes
            attend_row(
                keys, count, dim, together, get_i64(p, P.k) + (k + j * k_stride) * size, k_step, k_stride,
                get_i64(p, P.v) + (v + j * v_stride) * size, v_step, v_stride, q, at,
            )  # fmt: skip
            j += count
        while j < last:
            count = min(keys, last - j)
            k_at, v_at = k + j * k_stride, v + j * v_stride
            if whole and count >= lanes:
                count = count // lanes * lanes
                k_at, v_at = get_i64(p, P.k) + k_at * size, get_i64(p, P.v) + v_at * size
                attend(
                    p, entry_, j, count, dims, together, k_at, k_step, k_stride, v_at, v_step, v_stride, q, at
                )
            else:
                count = min(count, lanes)
                load(kind, get_i64(p, P.k), k_at, k_stride, k_step, together, count, dim, dp, k_rows)
                load(kind, get_i64(p, P.v), v_at, v_stride, v_step, together, count, dim_v, dv, v_rows)
                attend(
                    p, entry_, j, lanes, (dp, dv, dp, dv, rows), together, k_rows, dp, together * dp, v_rows,
                    dv, together * dv, q, at,
                )  # fmt: skip
            j += count
        record = rows * (dv + 3)
        stats = get_i64(p, P.scratch) + ((b * heads + first_head) * parts + part) * record * size
        store(acc, states, together, rows, dv, stats, parts * record)
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
