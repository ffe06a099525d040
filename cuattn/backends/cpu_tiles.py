"""The CPU backend's tiles: flash attention's forward loop with its online softmax, in plain Numba.

``build`` gives the loop bodies by name. Each is ``body(params, tile)``: ``params`` is the address of a
parameter block, ``tile`` a number that it turns into a batch entry, a head and a block of rows. They allocate
their scratch, share nothing, raise nothing and never touch Python, so that any thread may run any tile. A
body named ``....features`` takes bias, mask, segments, ALiBi, softcap and dropout too.

Layout of scratch: rows are padded to ``padding`` elements; panels and scores as ``cpu_scores.py`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import cpu_simd
from .cpu_backward import make_backward, make_bias_gradient, make_reduce, make_sinks_gradient
from .cpu_decode import make_combine, make_decode
from .cpu_layout import GROUP
from .cpu_scores import (
    LINE,
    LOG2E,
    P,
    entry,
    index_of,
    jit,
    make_features,
    make_memory,
    make_rows,
    scale,
    seed,
    up,
)
from .cpu_simd import free, get_f64, get_i64, malloc


def make_forward(real: Any, simd: Any, features: bool) -> Callable[..., Any]:
    """``forward(params, tile)``: one block of query rows of one head against all keys it sees."""
    memory = make_memory(real, simd)
    score = make_features(real, simd, memory)
    block = make_rows(real, simd, memory)
    get, put, width, size = simd.get, simd.put, simd.width, simd.itemsize
    padding, step = max(simd.lanes, simd.rows), simd.rows
    hidden = real(-np.inf)

    @jit
    def place(p, tile):
        """Batch entry, head, entry of the arrays, first row and number of rows of a tile."""
        rows, heads, length = get_i64(p, P.aux1), get_i64(p, P.heads_q), get_i64(p, P.seqlen_q)
        blocks = (length + rows - 1) // rows
        b, h = tile // (blocks * heads), tile // blocks % heads
        first = (blocks - 1 - tile % blocks) * rows  # long causal rows first
        if get_i64(p, P.cu_seqlens_q) == 0:
            return b, h, b, first, min(rows, length - first)
        q0, q_len, _, _, _ = entry(p, b)
        if first == 0 and b == get_i64(p, P.batch) - 1:  # rows after the last sequence
            lse = get_i64(p, P.lse) + h * get_i64(p, P.lse_stride_h) * size
            for row in range(q0 + q_len, get_i64(p, P.aux6)):
                put(lse, row, hidden)
        return b, h, 0, first, min(rows, q_len - first)

    @jit
    def finish(p, n, h, packed, row, acc, rows, padded, unit, tops, totals):
        """Divide, add the sink, and store out and LSE of a tile; ``unit`` is what scores are counted in."""
        kind, dim, stride = get_i64(p, P.aux0), get_i64(p, P.head_dim_v), get_i64(p, P.out_stride_s)
        index = index_of(p, P.out_stride_b, P.out_stride_h, P.out_stride_s, packed, h, row)
        lse = packed * get_i64(p, P.lse_stride_b) + h * get_i64(p, P.lse_stride_h) + row
        for i in range(n):
            if i % width == 0:
                simd.transpose(acc + i * padded * size, width, padded, width, rows, padded)
            memory.store_result(
                kind, get_i64(p, P.out), index + i * stride, dim, rows + i % width * padded * size,
                np.float64(get(tops, i)) * unit, np.float64(get(totals, i)), get_i64(p, P.sinks), h,
                get_i64(p, P.lse), lse + i,
            )  # fmt: skip

    def forward(p, tile):
        b, h, packed, first, n = place(p, tile)
        if n <= 0:
            return
        q0, q_len, k0, kv_len, offset = entry(p, b)
        kind, keys = get_i64(p, P.aux0), get_i64(p, P.aux2)
        dim, dim_v = get_i64(p, P.head_dim), get_i64(p, P.head_dim_v)
        dp, dv = up(dim, padding), up(dim_v, padding)
        panels = (n + width - 1) // width
        lanes = panels * width
        area = panels * keys * width if features else 0
        words = lanes * (dp + dv + max(dp, dv) + 6) + keys * (dp + dv + width) + 2 * area + 2 * width
        base = malloc(words * size + 32 * panels + keys + 16 * LINE)
        q_rows = up(base, LINE)
        q = q_rows + up(lanes * max(dp, dv) * size, LINE)
        acc = q + up(lanes * dp * size, LINE)
        k = acc + up(lanes * dv * size, LINE)
        v = k + up(keys * dp * size, LINE)
        s = v + up(keys * dv * size, LINE)
        terms = s + up(keys * width * size, LINE)
        keep = terms + up(area * size, LINE)
        tops = keep + up(area * size, LINE)
        formers, totals = tops + lanes * size, tops + 2 * lanes * size
        low, high = tops + 3 * lanes * size, tops + 4 * lanes * size
        decay = tops + 5 * lanes * size
        factor = decay + width * size
        limits = up(factor + size, LINE)
        seen = limits + 32 * panels
        begin, end = block.ranges(p, first, n, panels, q_len, kv_len, offset, low, high, limits)
        memory.fill(tops, 2 * lanes, hidden)
        memory.fill(totals, lanes, real(0.0))
        memory.fill(acc, lanes * dv, real(0.0))
        # without features scores are q . k alone: the scale is inside the exponential, its sign in q
        scale_ = scale(p)
        unit = 1.0 if features or scale_ == 0.0 else abs(scale_)
        put(factor, 0, real(unit * LOG2E))
        index = index_of(p, P.q_stride_b, P.q_stride_h, P.q_stride_s, packed, h, q0 + first)
        block.load_rows(kind, get_i64(p, P.q), index, get_i64(p, P.q_stride_s), n, lanes, dim, dp, q_rows)
        block.to_panels(q_rows, panels, dp, q)
        if not features:
            block.take_sign(scale_, lanes * dp, q)
        hk = h // (get_i64(p, P.heads_q) // get_i64(p, P.heads_kv))
        k_index = index_of(p, P.k_stride_b, P.k_stride_h, P.k_stride_s, packed, hk, k0)
        v_index = index_of(p, P.v_stride_b, P.v_stride_h, P.v_stride_s, packed, hk, k0)
        k_stride, v_stride = get_i64(p, P.k_stride_s), get_i64(p, P.v_stride_s)
        for j0 in range(begin // GROUP * GROUP, end, keys):
            early, count = max(begin - j0, 0), min(keys, end - j0)
            padded = up(count, step)
            mark = 0
            if features:
                mark = seen
                if not score.terms_of(
                    p, b, h, first, n, panels, j0, keys, count, padded, offset, low, high, terms, seen
                ):
                    continue
            memory.load_block(
                kind,
                get_i64(p, P.k),
                k_index + j0 * k_stride,
                k_stride,
                early,
                count,
                padded,
                dim,
                k,
                dp,
                mark,
            )
            memory.load_block(
                kind,
                get_i64(p, P.v),
                v_index + j0 * v_stride,
                v_stride,
                early,
                count,
                padded,
                dim_v,
                v,
                dv,
                mark,
            )
            for panel in range(panels):
                first_row, last_row = (
                    panel * keys // panels,
                    min((panel + 1) * keys // panels, end - j0 - keys),
                )
                memory.ask_for(
                    kind,
                    get_i64(p, P.k),
                    k_index + (j0 + keys) * k_stride,
                    k_stride,
                    first_row,
                    last_row,
                    dim,
                )
                memory.ask_for(
                    kind,
                    get_i64(p, P.v),
                    v_index + (j0 + keys) * v_stride,
                    v_stride,
                    first_row,
                    last_row,
                    dim_v,
                )
                at = panel * width * size
                low_min, low_max = get_i64(limits, 4 * panel), get_i64(limits, 4 * panel + 1)
                high_min, high_max = get_i64(limits, 4 * panel + 2), get_i64(limits, 4 * panel + 3)
                skip = 0 if features else max(low_min - j0, 0) // step * step
                live = padded if features else min(padded, up(high_max + 1 - j0, step)) - skip
                if live <= 0:
                    continue
                j, kk = j0 + skip, k + skip * dp * size
                if features:  # top is found with the terms
                    simd.scores(kk, dp, live, q + at * dp, dim, s, decay, 0, 0, 0)
                    cap = real(get_f64(p, P.softcap))
                    score.apply_terms(
                        s, terms + panel * keys * width * size, live, real(scale_), cap, 0, tops + at
                    )
                elif low_max <= j and j + live - 1 <= high_min:
                    simd.scores(kk, dp, live, q + at * dp, dim, s, tops + at, 0, 0, 0)
                else:
                    simd.scores_masked(kk, dp, live, q + at * dp, dim, s, tops + at, low + at, high + at, j)
                simd.softmax(s, live, factor, tops + at, formers + at, totals + at, decay)
                if features and get_f64(p, P.dropout_scale) > 0.0:
                    score.keep_of(p, b, h, first + panel * width, j0, live, seed(p), keep)
                    score.multiply(s, keep, live)
                simd.values(v + skip * dv * size, dv, live, s, dv, acc + at * dv, decay)
        finish(p, n, h, packed, q0 + first, acc, q_rows, dv, unit, tops, totals)
        free(base)

    return forward


def build(name: str, isa: Any) -> Callable[..., Any]:
    """The loop body of an entry, to be compiled: ``loop.float32``, ``loop.float64``, and ``.features``."""
    loop, _, rest = name.partition(".")
    real_name, _, tail = rest.partition(".")
    real, simd, features = np.dtype(real_name).type, cpu_simd.make(real_name, isa), tail == "features"
    if loop == "forward":
        return make_forward(real, simd, features)
    if loop == "backward":
        return make_backward(real, simd, features)
    makers = {
        "decode": make_decode,
        "combine": make_combine,
        "reduce": make_reduce,
        "sinks_gradient": make_sinks_gradient,
        "bias_gradient": make_bias_gradient,
    }
    return makers[loop](real, simd)
