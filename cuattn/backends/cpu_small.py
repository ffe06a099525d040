"""The CPU backend's loop for few query rows and keys, where what surrounds the products is half of the time.

One vector of query rows at a time against the keys that it sees, all at once: nothing is copied, no sums run
along, and the values' product leaves rows as the caller has them. The rules of ``cpu_tiles.py`` hold; who
picks the loop is ``numba.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .cpu_layout import LINE
from .cpu_native import free, get_i64, malloc, put_i64
from .cpu_scores import LOG2E, P, entry, index_of, jit, make_memory, make_rows, scale, up


def make_small(real: Any, simd: Any) -> Callable[..., Any]:
    """``small(params, tile)``: ``aux3`` heads, of whole vectors of query rows and whole groups of keys each.

    No features, lengths or sinks; arrays of the tile's own type; a positive scale.
    """
    memory = make_memory(real, simd)
    block = make_rows(real, simd, memory)
    get_int, put, width, rows, size = simd.get_int, simd.put, simd.width, simd.rows, simd.itemsize
    hidden = real(-np.inf)

    @jit
    def group_ranges(n, kv_len, low, high, groups):
        """First key and end of what each ``rows`` query rows see together."""
        for group in range(n // rows):
            begin, end = kv_len, 0
            for row in range(group * rows, (group + 1) * rows):
                a, z = get_int(low, row), get_int(high, row)
                if a <= z:
                    begin, end = min(begin, a), max(end, z + 1)
            put_i64(groups, 2 * group, begin)
            put_i64(groups, 2 * group + 1, end)

    @jit
    def attend(p, at, panel, q, k, v, out, lse, low, high, limits, groups):
        """One vector of query rows, from the first of its head's ``q``, ``out`` and ``lse`` on."""
        dim, dim_v = get_i64(p, P.head_dim), get_i64(p, P.head_dim_v)
        q_stride, out_stride = get_i64(p, P.q_stride_s), get_i64(p, P.out_stride_s)
        k_stride, v_stride = get_i64(p, P.k_stride_s), get_i64(p, P.v_stride_s)
        low_min, low_max = get_i64(limits, 4 * panel), get_i64(limits, 4 * panel + 1)
        high_min, high_max = get_i64(limits, 4 * panel + 2), get_i64(limits, 4 * panel + 3)
        begin, live = low_min // rows * rows, up(high_max + 1, rows) - low_min // rows * rows
        tops, totals, panel_q = at + LINE, at + LINE + width * size, at + LINE + 2 * width * size
        s, lane = panel_q + dim * width * size, panel * width * size
        memory.fill(tops, width, hidden)
        memory.fill(totals, width, real(0.0))
        if live > 0:
            simd.transpose(q + panel * width * q_stride * size, q_stride, width, dim, panel_q, width)
            clear = 0  # keys from the first on that every row sees
            if low_max <= begin:
                clear = min(live, max(high_min + 1 - begin, 0) // rows * rows)
                simd.scores(k + begin * k_stride * size, k_stride, clear, panel_q, dim, s, tops, 0, 0, 0, 0)
            j = begin + clear
            simd.scores_masked(
                k + j * k_stride * size, k_stride, live - clear, panel_q, dim, s + clear * width * size, tops,
                low + lane, high + lane, j, 0,
            )  # fmt: skip
            simd.softmax_only(s, live, at, tops, 0, totals, 0)
        simd.finish(tops, totals, at, lse + lane)
        for row in range(0, width, rows):
            group = (panel * width + row) // rows
            first, end = get_i64(groups, 2 * group), get_i64(groups, 2 * group + 1)
            weights, target = (first - begin) * width + row, (panel * width + row) * out_stride
            simd.weighted_rows(
                v + first * v_stride * size, v_stride, max(end - first, 0), s + weights * size, dim_v,
                totals + row * size, out + target * size, out_stride,
            )  # fmt: skip

    def small(p, tile):
        n, heads, together = get_i64(p, P.seqlen_q), get_i64(p, P.heads_q), get_i64(p, P.aux3)
        _, q_len, _, kv_len, offset = entry(p, 0)
        words = get_i64(p, P.head_dim) * width + kv_len * width + 2 * width
        base = malloc(words * size + 16 * n + 32 * (n // width) + 16 * (n // rows) + 4 * LINE)
        at = up(base, LINE)
        low = at + LINE + words * size
        high, limits = low + 8 * n, low + 16 * n
        groups = limits + 32 * (n // width)
        block.ranges(p, 0, n, n // width, q_len, kv_len, offset, low, high, limits)
        group_ranges(n, kv_len, low, high, groups)
        put(at, 0, real(scale(p) * LOG2E))
        put(at, 1, real(scale(p)))
        for pair in range(tile * together, min((tile + 1) * together, get_i64(p, P.batch) * heads)):
            b, h = pair // heads, pair % heads
            hk = h // (heads // get_i64(p, P.heads_kv))
            q = index_of(p, P.q_stride_b, P.q_stride_h, P.q_stride_s, b, h, 0) * size
            k = index_of(p, P.k_stride_b, P.k_stride_h, P.k_stride_s, b, hk, 0) * size
            v = index_of(p, P.v_stride_b, P.v_stride_h, P.v_stride_s, b, hk, 0) * size
            out = index_of(p, P.out_stride_b, P.out_stride_h, P.out_stride_s, b, h, 0) * size
            lse = (b * get_i64(p, P.lse_stride_b) + h * get_i64(p, P.lse_stride_h)) * size
            for panel in range(n // width):
                attend(
                    p, at, panel, get_i64(p, P.q) + q, get_i64(p, P.k) + k, get_i64(p, P.v) + v,
                    get_i64(p, P.out) + out, get_i64(p, P.lse) + lse, low, high, limits, groups,
                )  # fmt: skip
        free(base)

    return small
