"""The CPU backend's loop for few query rows and keys, where what surrounds the products is half of the time.

One vector of query rows at a time against the keys that it sees, all at once: nothing is copied, no sums run
along, and the values' product leaves rows as the caller has them. The rules of ``cpu_tiles.py`` hold; who
picks the loop is ``numba.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..interop.native import atomic_add
from .cpu_drain import offer, withdraw
from .cpu_layout import LINE
from .cpu_native import free, get_i64, malloc, places, put_i64
from .cpu_scores import LOG2E, P, entry, index_of, jit, make_memory, make_rows, scale, up
from .cpu_team import (
    OFFERED_DONE,
    OFFERED_END,
    OFFERED_FUNCTION,
    OFFERED_NEXT,
    OFFERED_PARAMS,
    OFFERED_SCRATCH,
    OFFERED_WORDS,
    PLACE_SMALL,
    PLACE_TEAM,
)


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

    @jit
    def bytes_of(p):
        """Of one thread's scratch, in whole lines."""
        return up((get_i64(p, P.head_dim) + get_i64(p, P.seqlen_kv) + 2) * width * size, LINE) + LINE

    @jit
    def work(p, job, at):
        """Vectors of query rows, as long as there is one that nobody has claimed; ``at``: own scratch."""
        n, heads = get_i64(p, P.seqlen_q), get_i64(p, P.heads_q)
        low = get_i64(job, OFFERED_SCRATCH)
        high, limits, panels = low + 8 * n, low + 16 * n, n // width
        groups = limits + 32 * panels
        put(at, 0, real(scale(p) * LOG2E))
        put(at, 1, real(scale(p)))
        end, group = get_i64(job, OFFERED_END), heads // get_i64(p, P.heads_kv)
        one = atomic_add(job + 8 * OFFERED_NEXT, 1)
        while one < end:
            pair, panel = one // panels, one % panels
            b, h = pair // heads, pair % heads
            hk = h // group
            q = index_of(p, P.q_stride_b, P.q_stride_h, P.q_stride_s, b, h, 0) * size
            k = index_of(p, P.k_stride_b, P.k_stride_h, P.k_stride_s, b, hk, 0) * size
            v = index_of(p, P.v_stride_b, P.v_stride_h, P.v_stride_s, b, hk, 0) * size
            out = index_of(p, P.out_stride_b, P.out_stride_h, P.out_stride_s, b, h, 0) * size
            lse = (b * get_i64(p, P.lse_stride_b) + h * get_i64(p, P.lse_stride_h)) * size
            attend(
                p, at, panel, get_i64(p, P.q) + q, get_i64(p, P.k) + k, get_i64(p, P.v) + v,
                get_i64(p, P.out) + out, get_i64(p, P.lse) + lse, low, high, limits, groups,
            )  # fmt: skip
            one = atomic_add(job + 8 * OFFERED_NEXT, 1)

    def small(p, tile):
        if tile < 0:  # a job that another thread has offered
            params = get_i64(p, OFFERED_PARAMS)
            work(params, p, get_i64(p, OFFERED_SCRATCH) - bytes_of(params))
            return
        n, together = get_i64(p, P.seqlen_q), get_i64(p, P.aux3)
        panels, one = n // width, bytes_of(p)
        _, q_len, _, kv_len, offset = entry(p, 0)
        base = malloc(2 * one + 16 * n + 32 * panels + 16 * (n // rows) + 8 * OFFERED_WORDS + LINE)
        job = up(base, LINE)
        at = job + 8 * OFFERED_WORDS
        low = at + 2 * one
        high, limits = low + 8 * n, low + 16 * n
        block.ranges(p, 0, n, panels, q_len, kv_len, offset, low, high, limits)
        group_ranges(n, kv_len, low, high, limits + 32 * panels)
        put_i64(job, OFFERED_SCRATCH, low)
        put_i64(job, OFFERED_NEXT, tile * together * panels)
        put_i64(
            job, OFFERED_END,
            min((tile + 1) * together, get_i64(p, P.batch) * get_i64(p, P.heads_q)) * panels,
        )  # fmt: skip
        team, offered = get_i64(places(), PLACE_TEAM), False
        if get_i64(p, P.aux4) and team:
            put_i64(job, OFFERED_FUNCTION, get_i64(places(), PLACE_SMALL + size // 8))
            put_i64(job, OFFERED_PARAMS, p)
            put_i64(job, OFFERED_DONE, 0)
            offered = offer(team, job)
        work(p, job, at)
        if offered:
            withdraw(team, job)
        free(base)

    return small
