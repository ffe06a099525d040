"""The CPU backend's tiles: flash attention's forward loop with its online softmax, in plain Numba.

``build`` gives the loop bodies by name. Each is ``body(params, tile)``: ``params`` is the address of a
parameter block, ``tile`` a number that it turns into a batch entry, a head and a block of rows. They allocate
their scratch, share nothing, raise nothing and never touch Python, so that any thread may run any tile. A
body named ``....features`` takes bias, mask, segments, ALiBi, softcap and dropout too.

Layout of scratch: rows are padded to ``padding`` elements; panels and scores as ``cpu_scores.py`` says.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np

from . import cpu_simd
from .cpu_backward import make_backward, make_bias_gradient, make_reduce, make_sinks_gradient
from .cpu_decode import make_combine, make_decode
from .cpu_layout import GROUP, KIND_REAL, LINE, TARGET
from .cpu_native import free, get_f64, get_i64, malloc, put_i64
from .cpu_scores import (
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
from .cpu_small import make_small

IN_PLACE = 2  # panels of a tile up to which keys and values are read where they lie: copying costs more

# Addresses of a tile's scratch
Scratch = namedtuple(
    "Scratch",
    (
        "base", "q_rows", "q", "acc", "k", "v", "s", "terms", "keep", "tops", "formers", "totals",
        "low", "high", "decay", "factor", "limits", "seen",
        "fetch_k", "fetch_v",  # records of what the products fetch
    ),
)  # fmt: skip


def make_forward(real: Any, simd: Any, features: bool) -> Callable[..., Any]:
    """``forward(params, tile)``: ``aux3`` blocks of query rows, each of one head, against all they see."""
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
        blocks, pairs = (length + rows - 1) // rows, get_i64(p, P.batch) * heads
        pair, after = tile // blocks, tile % blocks
        if get_i64(p, P.aux4):
            pair, after = tile % pairs, tile // pairs
        b, h = pair // heads, pair % heads
        first = (blocks - 1 - after) * rows  # long causal rows first
        if get_i64(p, P.cu_seqlens_q) == 0:
            return b, h, b, first, min(rows, length - first)
        q0, q_len, _, _, _ = entry(p, b)
        if first == 0 and b == get_i64(p, P.batch) - 1:  # rows after the last sequence
            lse = get_i64(p, P.lse) + h * get_i64(p, P.lse_stride_h) * size
            for row in range(q0 + q_len, get_i64(p, P.aux6)):
                put(lse, row, hidden)
        return b, h, 0, first, min(rows, q_len - first)

    @jit
    def load_queries(p, index, n, panels, dp, q_rows, q):
        """A tile's query rows into panels, from where they lie if nothing has to be converted or padded."""
        kind, dim, stride = get_i64(p, P.aux0), get_i64(p, P.head_dim), get_i64(p, P.q_stride_s)
        done = 0
        if kind == KIND_REAL and dim == dp:
            done = n // width
            for panel in range(done):
                source = get_i64(p, P.q) + (index + panel * width * stride) * size
                simd.transpose(source, stride, width, dim, q + panel * width * dp * size, width)
        if done < panels:
            rest, first = n - done * width, done * width
            block.load_rows(
                kind, get_i64(p, P.q), index + first * stride, stride, rest, (panels - done) * width, dim, dp,
                q_rows,
            )  # fmt: skip
            block.to_panels(q_rows, panels - done, dp, q + first * dp * size)

    @jit
    def finish(p, n, h, packed, row, acc, rows, padded, unit, tops, totals):
        """Divide, add the sink, and store out and LSE of a tile; ``unit`` is what scores are counted in."""
        kind, dim, stride = get_i64(p, P.aux0), get_i64(p, P.head_dim_v), get_i64(p, P.out_stride_s)
        index = index_of(p, P.out_stride_b, P.out_stride_h, P.out_stride_s, packed, h, row)
        lse = packed * get_i64(p, P.lse_stride_b) + h * get_i64(p, P.lse_stride_h) + row
        whole = kind == KIND_REAL and dim == padded and get_i64(p, P.sinks) == 0
        for first in range(0, n, width):
            panel = acc + first * padded * size
            if whole and first + width <= n:
                simd.normalise(panel, dim, totals + first * size)
                target = get_i64(p, P.out) + (index + first * stride) * size
                simd.transpose(panel, width, dim, width, target, stride)
                for i in range(first, first + width):
                    top, total = np.float64(get(tops, i)) * unit, np.float64(get(totals, i))
                    put(get_i64(p, P.lse), lse + i, real(top + math.log(total)) if total > 0.0 else hidden)
                continue
            simd.transpose(panel, width, padded, width, rows, padded)
            for i in range(first, min(first + width, n)):
                memory.store_result(
                    kind, get_i64(p, P.out), index + i * stride, dim, rows + (i - first) * padded * size,
                    np.float64(get(tops, i)) * unit, np.float64(get(totals, i)), get_i64(p, P.sinks), h,
                    get_i64(p, P.lse), lse + i,
                )  # fmt: skip

    @jit
    def scratch(p):
        """Memory for a tile, as ``Scratch`` says."""
        rows, keys = get_i64(p, P.aux1), get_i64(p, P.aux2)
        dp, dv = up(get_i64(p, P.head_dim), padding), up(get_i64(p, P.head_dim_v), padding)
        lanes = up(rows, width)
        panels = lanes // width
        area = panels * keys * width if features else 0
        words = lanes * (dp + dv + max(dp, dv) + 6) + keys * (2 * dp + 2 * dv + width) + 2 * area + 2 * width
        base = malloc(words * size + 32 * panels + keys + 20 * LINE)
        q_rows = up(base, LINE)
        q = q_rows + up(lanes * max(dp, dv) * size, LINE)
        acc = q + up(lanes * dp * size, LINE)
        k = acc + up(lanes * dv * size, LINE)
        v = up(k + 2 * keys * dp * size, LINE)
        s = up(v + 2 * keys * dv * size, LINE)
        terms = s + up(keys * width * size, LINE)
        keep = terms + up(area * size, LINE)
        tops = keep + up(area * size, LINE)
        decay = tops + 5 * lanes * size
        limits = up(decay + (width + 1) * size, LINE)
        seen = limits + 32 * panels
        fetch = up(seen + keys, LINE)
        put_i64(fetch, TARGET, 0)
        put_i64(fetch + LINE, TARGET, 0)
        return Scratch(
            base, q_rows, q, acc, k, v, s, terms, keep, tops, tops + lanes * size, tops + 2 * lanes * size,
            tops + 3 * lanes * size, tops + 4 * lanes * size, decay, decay + width * size, limits,
            seen, fetch, fetch + LINE,
        )  # fmt: skip

    @jit
    def keys_and_values(p, at, k, v, early, count, padded, more, panels, in_place, mark):
        """Make a block's rows ready and have ``more`` of the next fetched: addresses and steps of both."""
        kind, keys = get_i64(p, P.aux0), get_i64(p, P.aux2)
        dim, dim_v = get_i64(p, P.head_dim), get_i64(p, P.head_dim_v)
        dp, dv = up(dim, padding), up(dim_v, padding)
        k_rows = (kind, get_i64(p, P.k), k, get_i64(p, P.k_stride_s), dim, dp)
        v_rows = (kind, get_i64(p, P.v), v, get_i64(p, P.v_stride_s), dim_v, dv)
        steps = max(panels - 1, 1)  # what the last panel fetches would come late
        k_after, v_after = (
            (keys, more, steps * (keys // step)),
            (keys, more, steps * (up(dim_v, step) // step)),
        )
        if in_place and early == 0 and count == padded:
            memory.fetch(at.fetch_k, k_rows, k_after, 0)
            memory.fetch(at.fetch_v, v_rows, v_after, 0)
            return k_rows[1] + k * size, k_rows[3], v_rows[1] + v * size, v_rows[3]
        copy = not features and not in_place
        k_at = memory.ready(at.fetch_k, k_rows, early, count, padded, at.k, mark, k_after, copy)
        v_at = memory.ready(at.fetch_v, v_rows, early, count, padded, at.v, mark, v_after, copy)
        return k_at, dp, v_at, dv

    @jit
    def attend(p, b, h, at, panel, first, j0, end, padded, k, k_stride, v, v_stride):
        """One panel of query rows against one block of keys."""
        keys, dim = get_i64(p, P.aux2), get_i64(p, P.head_dim)
        dp, dv = up(dim, padding), up(get_i64(p, P.head_dim_v), padding)
        low_min, low_max = get_i64(at.limits, 4 * panel), get_i64(at.limits, 4 * panel + 1)
        high_min, high_max = get_i64(at.limits, 4 * panel + 2), get_i64(at.limits, 4 * panel + 3)
        skip = 0 if features else max(low_min - j0, 0) // step * step
        live = padded if features else min(padded, up(high_max + 1 - j0, step)) - skip
        if live <= 0:
            return
        lane = panel * width * size
        j, k, v = j0 + skip, k + skip * k_stride * size, v + skip * v_stride * size
        q, top = at.q + lane * dp, at.tops + lane
        if features:  # top is found with the terms
            simd.scores(k, k_stride, live, q, dim, at.s, at.decay, 0, 0, 0, at.fetch_k)
            cap, terms = real(get_f64(p, P.softcap)), at.terms + lane * keys
            score.apply_terms(at.s, terms, live, real(scale(p)), cap, 0, top, 0)
        elif low_max <= j and j + live - 1 <= high_min:
            simd.scores(k, k_stride, live, q, dim, at.s, top, 0, 0, 0, at.fetch_k)
        else:
            low, high = at.low + lane, at.high + lane
            simd.scores_masked(k, k_stride, live, q, dim, at.s, top, low, high, j, at.fetch_k)
        simd.softmax(at.s, live, at.factor, top, at.formers + lane, at.totals + lane, at.decay)
        if features and get_f64(p, P.dropout_scale) > 0.0:
            score.keep_of(p, b, h, first + panel * width, j0, live, seed(p), at.keep)
            score.multiply(at.s, at.keep, live)
        dim_v, acc = up(get_i64(p, P.head_dim_v), step), at.acc + lane * dv
        simd.values(v, v_stride, live, at.s, dim_v, acc, at.decay, at.fetch_v)

    @jit
    def run(p, tile, at):
        """One block of query rows of one head against all keys it sees."""
        b, h, packed, first, n = place(p, tile)
        if n <= 0:
            return
        q0, q_len, k0, kv_len, offset = entry(p, b)
        kind, keys = get_i64(p, P.aux0), get_i64(p, P.aux2)
        dim, dim_v = get_i64(p, P.head_dim), get_i64(p, P.head_dim_v)
        dp, dv = up(dim, padding), up(dim_v, padding)
        panels = (n + width - 1) // width
        lanes = panels * width
        begin, end = block.ranges(p, first, n, panels, q_len, kv_len, offset, at.low, at.high, at.limits)
        memory.fill(at.tops, lanes, hidden)
        memory.fill(at.formers, lanes, hidden)
        memory.fill(at.totals, lanes, real(0.0))
        memory.fill(at.acc, lanes * dv, real(0.0))
        # without features scores are q . k alone: the scale is inside the exponential, its sign in q
        scale_ = scale(p)
        unit = 1.0 if features or scale_ == 0.0 else abs(scale_)
        put(at.factor, 0, real(unit * LOG2E))
        index = index_of(p, P.q_stride_b, P.q_stride_h, P.q_stride_s, packed, h, q0 + first)
        load_queries(p, index, n, panels, dp, at.q_rows, at.q)
        if not features:
            block.take_sign(scale_, lanes * dp, at.q)
        hk = h // (get_i64(p, P.heads_q) // get_i64(p, P.heads_kv))
        k_index = index_of(p, P.k_stride_b, P.k_stride_h, P.k_stride_s, packed, hk, k0)
        v_index = index_of(p, P.v_stride_b, P.v_stride_h, P.v_stride_s, packed, hk, k0)
        k_stride, v_stride = get_i64(p, P.k_stride_s), get_i64(p, P.v_stride_s)
        in_place = not features and kind == KIND_REAL and panels <= IN_PLACE and dim_v % step == 0
        for j0 in range(begin // GROUP * GROUP, end, keys):
            early, count = max(begin - j0, 0), min(keys, end - j0)
            padded = up(count, step)
            mark = 0
            if features:
                mark = at.seen
                if not score.terms_of(
                    p, b, h, first, n, panels, j0, keys, count, padded, offset, at.low, at.high, at.terms,
                    at.seen,
                ):  # fmt: skip
                    continue
            k, v = k_index + j0 * k_stride, v_index + j0 * v_stride
            k_at, k_step, v_at, v_step = keys_and_values(
                p, at, k, v, early, count, padded, min(keys, end - j0 - keys), panels, in_place, mark
            )
            for panel in range(panels):
                attend(p, b, h, at, panel, first, j0, end, padded, k_at, k_step, v_at, v_step)
        finish(p, n, h, packed, q0 + first, at.acc, at.q_rows, dv, unit, at.tops, at.totals)

    def forward(p, tile):
        at, together = scratch(p), get_i64(p, P.aux3)
        rows = get_i64(p, P.aux1)
        tiles = get_i64(p, P.batch) * get_i64(p, P.heads_q) * ((get_i64(p, P.seqlen_q) + rows - 1) // rows)
        for one in range(tile * together, min((tile + 1) * together, tiles)):
            run(p, one, at)
        free(at.base)

    return forward


def build(name: str, isa: Any) -> Callable[..., Any]:
    """The loop body of an entry, to be compiled: ``loop.float32``, ``loop.float64``, and ``.features``."""
    loop, _, rest = name.partition(".")
    real_name, _, tail = rest.partition(".")
    real, simd, features = np.dtype(real_name).type, cpu_simd.make(real_name, isa), tail == "features"
    if loop == "forward":
        return make_forward(real, simd, features)
    if loop == "small":
        return make_small(real, cpu_simd.make(real_name, isa.narrow(), fetches=False))
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
