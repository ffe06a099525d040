"""The CPU backend's tiles: flash attention's loops, online softmax and recomputing backward, in plain Numba.

``build`` gives the loop bodies by name. Each is ``body(params, tile)``: ``params`` is the address of a
``params`` block, ``tile`` a number that it turns into a batch entry, a head and a block of rows. Bodies allocate
their scratch, share nothing, raise nothing and never touch Python, so that any thread may run any tile. A
body named ``..._features`` takes bias, mask, segments, ALiBi, softcap and dropout too.

Layout of scratch: rows are padded to ``padding`` elements; panels and scores as ``cpu_scores.py`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import cpu_simd
from .cpu_decode import make_combine, make_decode
from .cpu_layout import GROUP, WANT_K, WANT_Q, WANT_V
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
from .cpu_simd import free, get_f64, get_i64, malloc, put_f64



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
                kind, get_i64(p, P.k), k_index + j0 * k_stride, k_stride, early, count, padded, dim, k, dp, mark
            )
            memory.load_block(
                kind, get_i64(p, P.v), v_index + j0 * v_stride, v_stride, early, count, padded, dim_v, v, dv, mark
            )
            for panel in range(panels):
                first_row, last_row = panel * keys // panels, min((panel + 1) * keys // panels, end - j0 - keys)
                memory.ask_for(
                    kind, get_i64(p, P.k), k_index + (j0 + keys) * k_stride, k_stride, first_row, last_row, dim
                )
                memory.ask_for(
                    kind, get_i64(p, P.v), v_index + (j0 + keys) * v_stride, v_stride, first_row, last_row, dim_v
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


def make_gradients(real: Any, simd: Any, features: bool) -> Any:
    """What the backward bodies share: a block of query rows made ready, and the gradient of a block of scores."""
    memory = make_memory(real, simd)
    score = make_features(real, simd, memory)
    block = make_rows(real, simd, memory)
    get, put, width, size = simd.get, simd.put, simd.width, simd.itemsize
    padding = max(simd.lanes, simd.rows)

    @jit
    def sizes(p, rows):
        """Padded dims, and words and bytes of scratch for a block of ``rows`` query rows."""
        dp, dv = up(get_i64(p, P.head_dim), padding), up(get_i64(p, P.head_dim_v), padding)
        keys = get_i64(p, P.aux2)
        area = rows * keys
        words = rows * (2 * dp + 2 * dv + max(dp, dv) + 4) + keys * (dp + dv) + 2 * area + 2 * width
        if features:
            words += 3 * area
        return dp, dv, words * size + 32 * (rows // width) + keys + 20 * LINE

    @jit
    def layout(p, base, rows):
        """Addresses: q and dout as rows, as panels; stats per row; keys and values; scores; features' blocks."""
        dp, dv, _ = sizes(p, rows)
        keys = get_i64(p, P.aux2)
        q_rows = up(base, LINE)
        d_rows = q_rows + up(rows * dp * size, LINE)
        q = d_rows + up(rows * dv * size, LINE)
        d = q + up(rows * dp * size, LINE)
        k = d + up(rows * dv * size, LINE)
        v = k + up(keys * dp * size, LINE)
        s = v + up(keys * dv * size, LINE)
        ds = s + up(rows * keys * size, LINE)
        terms = ds + up(rows * keys * size, LINE)
        blocks = 3 if features else 0
        stats = terms + blocks * up(rows * keys * size, LINE)
        work = stats + up(4 * rows * size, LINE)
        limits = work + up((rows * max(dp, dv) + 2 * width) * size, LINE)
        return q_rows, d_rows, q, d, k, v, s, ds, terms, stats, work, limits

    @jit
    def load(p, base, rows, b, h, packed, q0, q_len, kv_len, offset, first, n):
        """Load q and dout of a block of rows; stats: LSE in base 2 (+inf: the row sees nothing), delta, ranges.

        After ``work``'s rows and a panel's width stands the factor that takes scores to base 2.
        """
        dp, dv, _ = sizes(p, rows)
        q_rows, d_rows, q, d, _, _, _, _, _, stats, work, limits = layout(p, base, rows)
        kind, dim, dim_v = get_i64(p, P.aux0), get_i64(p, P.head_dim), get_i64(p, P.head_dim_v)
        panels = (n + width - 1) // width
        begin, end = block.ranges(
            p, first, n, panels, q_len, kv_len, offset, stats + 2 * rows * size, stats + 3 * rows * size, limits
        )
        row = q0 + first
        q_index = index_of(p, P.q_stride_b, P.q_stride_h, P.q_stride_s, packed, h, row)
        d_index = index_of(p, P.dout_stride_b, P.dout_stride_h, P.dout_stride_s, packed, h, row)
        o_index = index_of(p, P.out_stride_b, P.out_stride_h, P.out_stride_s, packed, h, row)
        q_stride, d_stride = get_i64(p, P.q_stride_s), get_i64(p, P.dout_stride_s)
        o_stride = get_i64(p, P.out_stride_s)
        lse_index = packed * get_i64(p, P.lse_stride_b) + h * get_i64(p, P.lse_stride_h) + row
        scale_ = scale(p)  # as in ``forward``: its size in the exponential, its sign in q's panels
        put(work, rows * max(dp, dv) + width, real(LOG2E if features or scale_ == 0.0 else abs(scale_) * LOG2E))
        block.load_rows(kind, get_i64(p, P.q), q_index, q_stride, n, panels * width, dim, dp, q_rows)
        block.load_rows(kind, get_i64(p, P.dout), d_index, d_stride, n, panels * width, dim_v, dv, d_rows)
        for i in range(panels * width):
            lse = get(get_i64(p, P.lse), lse_index + min(i, n - 1))
            if i >= n or lse == real(-np.inf):
                memory.fill(q_rows + i * dp * size, dp, real(0.0))
                memory.fill(d_rows + i * dv * size, dv, real(0.0))
                put(stats, i, real(np.inf))
                put(stats, rows + i, real(0.0))
                continue
            memory.load_row(kind, get_i64(p, P.out), o_index + i * o_stride, dim_v, dv, work)
            delta = real(0.0)
            for c in range(dv):
                delta += get(work, c) * get(d_rows, i * dv + c)
            if get_i64(p, P.dlse):
                delta -= get(get_i64(p, P.dlse), lse_index + i)
            put(stats, i, real(np.float64(lse) * LOG2E))
            put(stats, rows + i, delta)
        block.to_panels(q_rows, panels, dp, q)
        block.to_panels(d_rows, panels, dv, d)
        if not features:
            block.take_sign(scale_, panels * width * dp, q)
        return begin, end

    @jit
    def load_keys(p, base, rows, b, h, packed, k0, first, n, begin, end, j0, offset):
        """Load the keys and values of a block; its padded number of keys, 0 when nothing in it is seen."""
        dp, dv, _ = sizes(p, rows)
        _, _, _, _, k, v, _, _, terms, stats, _, limits = layout(p, base, rows)
        kind, keys = get_i64(p, P.aux0), get_i64(p, P.aux2)
        panels = (n + width - 1) // width
        hk = h // (get_i64(p, P.heads_q) // get_i64(p, P.heads_kv))
        early, count = max(begin - j0, 0), min(keys, end - j0)
        padded = up(count, simd.rows)
        mark = 0
        if features:
            mark = limits + 32 * (rows // width)
            low, high = stats + 2 * rows * size, stats + 3 * rows * size
            if not score.terms_of(
                p, b, h, first, n, panels, j0, keys, count, padded, offset, low, high, terms, mark
            ):
                return 0
        k_index = index_of(p, P.k_stride_b, P.k_stride_h, P.k_stride_s, packed, hk, k0 + j0)
        v_index = index_of(p, P.v_stride_b, P.v_stride_h, P.v_stride_s, packed, hk, k0 + j0)
        memory.load_block(
            kind, get_i64(p, P.k), k_index, get_i64(p, P.k_stride_s), early, count, padded,
            get_i64(p, P.head_dim), k, dp, mark,
        )  # fmt: skip
        memory.load_block(
            kind, get_i64(p, P.v), v_index, get_i64(p, P.v_stride_s), early, count, padded,
            get_i64(p, P.head_dim_v), v, dv, mark,
        )  # fmt: skip
        return padded

    @jit
    def live_keys(p, base, rows, panel, j0, padded):
        """First and number of the keys of a block that a panel may see, in whole register tiles."""
        _, _, _, _, _, _, _, _, _, _, _, limits = layout(p, base, rows)
        low_min, high_max = get_i64(limits, 4 * panel), get_i64(limits, 4 * panel + 3)
        skip = max(low_min - j0, 0) // simd.rows * simd.rows
        return skip, max(0, min(padded, up(high_max + 1 - j0, simd.rows)) - skip)

    @jit
    def panel_gradient(p, base, rows, b, h, first, panel, j0, padded, skip, live, need_scores, raw):
        """One panel of a block: s becomes the weights after dropout, ds the gradient of the scores.

        Zeros for keys outside of the ``live`` ones from ``skip`` on. ``raw``: the gradient of the scores as q . k
        has them (behind softcap); else of those that bias is added to.
        """
        dp, dv, _ = sizes(p, rows)
        _, _, q, d, k, v, s, ds, terms, stats, work, limits = layout(p, base, rows)
        keys, lane, area = get_i64(p, P.aux2), panel * width, rows * get_i64(p, P.aux2)
        at = panel * keys * width * size
        lse, delta = stats + lane * size, stats + (rows + lane) * size
        low, high = stats + (2 * rows + lane) * size, stats + (3 * rows + lane) * size
        ignored = work + (rows * max(dp, dv)) * size
        factor = ignored + width * size
        dim = get_i64(p, P.head_dim)
        s, ds = s + at, ds + at
        if features:
            simd.scores(k, dp, padded, q + lane * dp * size, dim, s, ignored, 0, 0, 0)
            slope = terms + up(area * size, LINE) + at
            cap = real(get_f64(p, P.softcap))
            score.apply_terms(s, terms + at, padded, real(scale(p)), cap, slope, ignored)
            simd.weights(s, ds, padded, factor, lse, delta)
            keep = 0
            if get_f64(p, P.dropout_scale) > 0.0:
                keep = terms + 2 * up(area * size, LINE) + at
                score.keep_of(p, b, h, first + lane, j0, padded, seed(p), keep)
            if need_scores:
                simd.scores(v, dv, padded, d + lane * dv * size, dv, ds, ignored, 0, 0, 0)
            score.gradient(s, ds, keep, slope if raw and cap > real(0.0) else 0, padded, delta)
            return
        for target in (s, ds):
            memory.fill(target, skip * width, real(0.0))
            memory.fill(target + (skip + live) * width * size, (padded - skip - live) * width, real(0.0))
        s, ds, k, v, j0 = s + skip * width * size, ds + skip * width * size, k + skip * dp * size, v + skip * dv * size, j0 + skip
        low_max, high_min = get_i64(limits, 4 * panel + 1), get_i64(limits, 4 * panel + 2)
        if low_max <= j0 and j0 + live - 1 <= high_min:
            simd.scores(k, dp, live, q + lane * dp * size, dim, s, ignored, 0, 0, 0)
        else:
            simd.scores_masked(k, dp, live, q + lane * dp * size, dim, s, ignored, low, high, j0)
        if need_scores:
            simd.scores(v, dv, live, d + lane * dv * size, dv, ds, ignored, 0, 0, 0)
            simd.score_gradient(s, ds, live, factor, lse, delta)
        else:
            simd.weights(s, ds, live, factor, lse, delta)

    return cpu_simd.namespace(
        "gradients", sizes=sizes, layout=layout, load=load, load_keys=load_keys, live_keys=live_keys, panel_gradient=panel_gradient,
        memory=memory, padding=padding,
    )  # fmt: skip


def make_backward(real: Any, simd: Any, features: bool) -> Callable[..., Any]:
    """``backward(params, tile)``: dq of some query rows, and their part of dk and dv of one key/value head.

    Tile: (batch entry, key/value head, part). The query rows of the head's group are dealt block by block
    to ``aux3`` parts, so that a causal triangle is shared evenly. One part: dk and dv are stored; several:
    each leaves its sums in dk_accum and dv_accum, [tile][key][padded dim], for ``reduce`` to add up.
    """
    common = make_gradients(real, simd, features)
    memory = common.memory
    put, width, size = simd.put, simd.width, simd.itemsize

    @jit
    def store_dq(p, base, rows, n, h, packed, row, dq):
        dp, dv, _ = common.sizes(p, rows)
        _, _, _, _, _, _, _, _, _, stats, work, _ = common.layout(p, base, rows)
        kind, dim, stride = get_i64(p, P.aux0), get_i64(p, P.head_dim), get_i64(p, P.dq_stride_s)
        index = index_of(p, P.dq_stride_b, P.dq_stride_h, P.dq_stride_s, packed, h, row)
        factor = real(scale(p))
        for panel in range((n + width - 1) // width):
            simd.transpose(dq + panel * width * dp * size, width, dp, width, work, dp)
            for lane in range(min(width, n - panel * width)):
                i = panel * width + lane
                if simd.get(stats, i) == real(np.inf):
                    memory.zero_row(kind, get_i64(p, P.dq), index + i * stride, dim)
                else:
                    source = work + lane * dp * size
                    memory.store_row(kind, get_i64(p, P.dq), index + i * stride, dim, source, factor)

    @jit
    def rows_of(p, base, rows, b, h, packed, q0, q_len, k0, kv_len, offset, first, n, dq, dk, dv):
        """Add one block of query rows: dq whole, its share of dk and dv."""
        wants, keys = get_i64(p, P.aux4), get_i64(p, P.aux2)
        dim_k, dim_v, _ = common.sizes(p, rows)
        q_rows, d_rows, _, _, k, _, s, ds, _, _, _, _ = common.layout(p, base, rows)
        panels = (n + width - 1) // width
        begin, end = common.load(p, base, rows, b, h, packed, q0, q_len, kv_len, offset, first, n)
        ones = dq + rows * dim_k * size
        memory.fill(dq, panels * width * dim_k, real(0.0))
        memory.fill(ones, width, real(1.0))
        for j0 in range(begin // GROUP * GROUP, end, keys):
            padded = common.load_keys(p, base, rows, b, h, packed, k0, first, n, begin, end, j0, offset)
            if padded == 0:
                continue
            begin_panel, end_panel = panels, 0
            for panel in range(panels):
                skip, live = common.live_keys(p, base, rows, panel, j0, padded)
                if live == 0:
                    continue
                begin_panel, end_panel = min(begin_panel, panel), panel + 1
                need_scores = wants & (WANT_Q | WANT_K) != 0
                common.panel_gradient(
                    p, base, rows, b, h, first, panel, j0, padded, skip, live, need_scores, True
                )
                if wants & WANT_Q:
                    at = (panel * keys + skip) * width * size
                    simd.values(
                        k + skip * dim_k * size, dim_k, live, ds + at, dim_k, dq + panel * width * dim_k * size, ones
                    )
            at, lane = begin_panel * keys * width * size, begin_panel * width
            panels_live = end_panel - begin_panel  # they are neighbours: ranges move with the row
            if wants & WANT_V:
                simd.outer(
                    s + at, keys * width, panels_live, padded, d_rows + lane * dim_v * size, dim_v, dv + j0 * dim_v * size
                )
            if wants & WANT_K:
                simd.outer(
                    ds + at, keys * width, panels_live, padded, q_rows + lane * dim_k * size, dim_k, dk + j0 * dim_k * size
                )
        if wants & WANT_Q:
            store_dq(p, base, rows, n, h, packed, q0 + first, dq)

    def backward(p, tile):
        rows, parts, wants = get_i64(p, P.aux1), get_i64(p, P.aux3), get_i64(p, P.aux4)
        heads = get_i64(p, P.heads_kv)
        b, hk, part = tile // (heads * parts), tile // parts % heads, tile % parts
        group = get_i64(p, P.heads_q) // heads
        q0, q_len, k0, kv_len, offset = entry(p, b)
        packed, length, capacity = b, get_i64(p, P.seqlen_q), get_i64(p, P.seqlen_kv)
        if get_i64(p, P.cu_seqlens_q):
            packed, length, capacity = 0, q_len, kv_len
        dim_k, dim_v, bytes_ = common.sizes(p, rows)
        held = up(capacity, GROUP) + GROUP
        own = parts == 1
        sums = up(held * (dim_k + dim_v) * size, LINE) if own else 0
        base = malloc(bytes_ + (rows * dim_k + width) * size + sums + 4 * LINE)
        dq = up(base + bytes_, LINE)
        dk = up(dq + (rows * dim_k + width) * size, LINE)
        dv = dk + held * dim_k * size
        if not own:
            held = up(get_i64(p, P.seqlen_kv), GROUP) + GROUP
            dk = get_i64(p, P.dk_accum) + tile * held * dim_k * size
            dv = get_i64(p, P.dv_accum) + tile * held * dim_v * size
        if wants & WANT_K:
            memory.fill(dk, held * dim_k, real(0.0))
        if wants & WANT_V:
            memory.fill(dv, held * dim_v, real(0.0))
        blocks = (length + rows - 1) // rows
        for unit in range(part, group * blocks, parts):
            h, first = hk * group + unit // blocks, unit % blocks * rows
            n = min(rows, length - first)
            rows_of(p, base, rows, b, h, packed, q0, q_len, k0, kv_len, offset, first, n, dq, dk, dv)
        if own:
            kind = get_i64(p, P.aux0)
            if wants & WANT_K:
                index = index_of(p, P.dk_stride_b, P.dk_stride_h, P.dk_stride_s, packed, hk, k0)
                for j in range(capacity):
                    memory.store_row(
                        kind, get_i64(p, P.dk), index + j * get_i64(p, P.dk_stride_s), get_i64(p, P.head_dim),
                        dk + j * dim_k * size, real(scale(p)),
                    )  # fmt: skip
            if wants & WANT_V:
                index = index_of(p, P.dv_stride_b, P.dv_stride_h, P.dv_stride_s, packed, hk, k0)
                for j in range(capacity):
                    memory.store_row(
                        kind, get_i64(p, P.dv), index + j * get_i64(p, P.dv_stride_s), get_i64(p, P.head_dim_v),
                        dv + j * dim_v * size, real(1.0),
                    )  # fmt: skip
        free(base)

    return backward


def make_reduce(real: Any, simd: Any) -> Callable[..., Any]:
    """``reduce(params, tile)``: add up the parts of dk and dv for one block of keys of one head, in order."""
    memory = make_memory(real, simd)
    get, put, size = simd.get, simd.put, simd.itemsize
    padding = max(simd.lanes, simd.rows)

    @jit
    def add_up(p, parts, partial, tile, held, padded, j, row):
        memory.fill(row, padded, real(0.0))
        for part in range(parts):
            source = partial + ((tile + part) * held + j) * padded * size
            for c in range(padded):
                put(row, c, get(row, c) + get(source, c))

    def reduce(p, tile):
        parts, wants, keys = get_i64(p, P.aux3), get_i64(p, P.aux4), get_i64(p, P.aux2)
        heads, capacity, kind = get_i64(p, P.heads_kv), get_i64(p, P.seqlen_kv), get_i64(p, P.aux0)
        blocks = (capacity + keys - 1) // keys
        b, hk, first = tile // (heads * blocks), tile // blocks % heads, tile % blocks * keys
        _, _, k0, kv_len, _ = entry(p, b)
        packed, length = b, capacity
        if get_i64(p, P.cu_seqlens_q):
            packed, length = 0, kv_len
        held = up(capacity, GROUP) + GROUP
        dim, dim_v = get_i64(p, P.head_dim), get_i64(p, P.head_dim_v)
        base = malloc(up(max(dim, dim_v), padding) * size + LINE)
        row = up(base, LINE)
        start = (b * heads + hk) * parts
        for j in range(first, min(first + keys, length)):
            if wants & WANT_K:
                index = index_of(p, P.dk_stride_b, P.dk_stride_h, P.dk_stride_s, packed, hk, k0 + j)
                add_up(p, parts, get_i64(p, P.dk_accum), start, held, up(dim, padding), j, row)
                memory.store_row(kind, get_i64(p, P.dk), index, dim, row, real(scale(p)))
            if wants & WANT_V:
                index = index_of(p, P.dv_stride_b, P.dv_stride_h, P.dv_stride_s, packed, hk, k0 + j)
                add_up(p, parts, get_i64(p, P.dv_accum), start, held, up(dim_v, padding), j, row)
                memory.store_row(kind, get_i64(p, P.dv), index, dim_v, row, real(1.0))
        free(base)

    return reduce


def make_sinks_gradient(real: Any, simd: Any) -> Callable[..., Any]:
    """``sinks_gradient(params, tile)``: dsinks of one query head: -sum of exp(sink - lse) * delta over its rows."""
    memory = make_memory(real, simd)
    get, put, size = simd.get, simd.put, simd.itemsize
    padding = max(simd.lanes, simd.rows)

    def sinks_gradient(p, h):
        dim, kind = get_i64(p, P.head_dim_v), get_i64(p, P.aux0)
        padded = up(dim, padding)
        base = malloc(2 * padded * size + LINE)
        out, dout = base, base + padded * size
        sink = get(get_i64(p, P.sinks), h)
        total = 0.0
        for b in range(get_i64(p, P.batch)):
            q0, q_len, _, _, _ = entry(p, b)
            packed = 0 if get_i64(p, P.cu_seqlens_q) else b
            o = index_of(p, P.out_stride_b, P.out_stride_h, P.out_stride_s, packed, h, q0)
            d = index_of(p, P.dout_stride_b, P.dout_stride_h, P.dout_stride_s, packed, h, q0)
            index = packed * get_i64(p, P.lse_stride_b) + h * get_i64(p, P.lse_stride_h) + q0
            for i in range(q_len):
                lse = get(get_i64(p, P.lse), index + i)
                if lse == real(-np.inf):
                    continue
                memory.load_row(kind, get_i64(p, P.out), o + i * get_i64(p, P.out_stride_s), dim, padded, out)
                memory.load_row(kind, get_i64(p, P.dout), d + i * get_i64(p, P.dout_stride_s), dim, padded, dout)
                delta = real(0.0)
                for c in range(padded):
                    delta += get(out, c) * get(dout, c)
                if get_i64(p, P.dlse):
                    delta -= get(get_i64(p, P.dlse), index + i)
                total -= math.exp(np.float64(sink) - np.float64(lse)) * np.float64(delta)
        put(get_i64(p, P.dsinks), h, real(total))
        free(base)

    return sinks_gradient


def make_bias_gradient(real: Any, simd: Any) -> Callable[..., Any]:
    """``bias_gradient(params, tile)``: one block of dbias, summed over the axes that bias is broadcast over.

    Tile: (batch entry, head, block of rows, block of keys) of the gradient; an axis with stride 0 counts 1
    and is looped over inside. Scores are computed again here, so that no two tiles write to one place.
    """
    common = make_gradients(real, simd, True)
    memory = common.memory
    get, put, width, size = simd.get, simd.put, simd.width, simd.itemsize

    @jit
    def add_block(p, ds, rows, n, count, sums):
        """Add a block of score gradients to sums[row or 0][key or 0]."""
        keys = get_i64(p, P.aux2)
        step_q = 0 if get_i64(p, P.dbias_stride_q) == 0 else keys
        step_k = 0 if get_i64(p, P.dbias_stride_k) == 0 else 1
        for i in range(n):
            source = i // width * keys * width + i % width
            for j in range(count):
                at = i * step_q + j * step_k
                put_f64(sums, at, get_f64(sums, at) + np.float64(get(ds, source + j * width)))

    @jit
    def add_rows(p, base, rows, b, h, first, j_first, j_last, sums):
        """Add what one block of rows of one head has for the keys in [j_first, j_last)."""
        q0, q_len, k0, kv_len, offset = entry(p, b)
        n = min(rows, get_i64(p, P.seqlen_q) - first)
        begin, end = common.load(p, base, rows, b, h, b, q0, q_len, kv_len, offset, first, n)
        _, _, _, _, _, _, _, ds, _, _, _, _ = common.layout(p, base, rows)
        keys = get_i64(p, P.aux2)
        for j0 in range(j_first, min(j_last, end), keys):
            padded = common.load_keys(p, base, rows, b, h, b, k0, first, n, begin, end, j0, offset)
            if padded == 0:
                continue
            for panel in range((n + width - 1) // width):
                skip, live = common.live_keys(p, base, rows, panel, j0, padded)
                if live > 0:
                    common.panel_gradient(p, base, rows, b, h, first, panel, j0, padded, skip, live, True, False)
                else:
                    memory.fill(ds + panel * keys * width * size, padded * width, real(0.0))
            add_block(p, ds, rows, n, min(keys, end - j0), sums)

    def bias_gradient(p, tile):
        rows, keys, kind = get_i64(p, P.aux1), get_i64(p, P.aux2), get_i64(p, P.aux5)
        step_b, step_h = get_i64(p, P.dbias_stride_b), get_i64(p, P.dbias_stride_h)
        step_q, step_k = get_i64(p, P.dbias_stride_q), get_i64(p, P.dbias_stride_k)
        seqlen_q, seqlen_kv = get_i64(p, P.seqlen_q), get_i64(p, P.seqlen_kv)
        batch, heads = get_i64(p, P.batch), get_i64(p, P.heads_q)
        row_blocks, key_blocks = (seqlen_q + rows - 1) // rows, (seqlen_kv + keys - 1) // keys
        nh, nq, nk = (heads if step_h else 1), (row_blocks if step_q else 1), (key_blocks if step_k else 1)
        b, h = tile // (nh * nq * nk), tile // (nq * nk) % nh
        q_block, k_block = tile // nk % nq, tile % nk
        j_first, j_last = (k_block * keys, min((k_block + 1) * keys, seqlen_kv)) if step_k else (0, seqlen_kv)
        _, _, bytes_ = common.sizes(p, rows)
        base = malloc(bytes_ + rows * keys * 8 + 2 * LINE)
        sums = up(base + bytes_, LINE)
        for i in range(rows * keys):
            put_f64(sums, i, 0.0)
        for bb in range(b if step_b else 0, b + 1 if step_b else batch):
            for hh in range(h if step_h else 0, h + 1 if step_h else heads):
                for qq in range(q_block if step_q else 0, q_block + 1 if step_q else row_blocks):
                    add_rows(p, base, rows, bb, hh, qq * rows, j_first, j_last, sums)
        first = q_block * rows if step_q else 0
        for i in range(min(rows, seqlen_q - first) if step_q else 1):
            for j in range(j_last - j_first if step_k else 1):
                at = b * step_b + h * step_h + (first + i) * step_q + (j_first + j) * step_k
                memory.set_value(kind, get_i64(p, P.dbias), at, real(get_f64(sums, i * keys + j)))
        free(base)

    return bias_gradient


def build(name: str, isa: Any) -> Callable[..., Any]:
    """The loop body of an entry, ``loop.float32`` or ``loop.float64`` with ``.features`` or without, to be compiled as a C callback."""
    loop, _, rest = name.partition(".")
    real_name, _, tail = rest.partition(".")
    real, simd, features = np.dtype(real_name).type, cpu_simd.make(real_name, isa), tail == "features"
    if loop == "forward":
        return make_forward(real, simd, features)
    if loop == "backward":
        return make_backward(real, simd, features)
    makers = {"decode": make_decode, "combine": make_combine, "reduce": make_reduce, "sinks_gradient": make_sinks_gradient, "bias_gradient": make_bias_gradient}
    return makers[loop](real, simd)
