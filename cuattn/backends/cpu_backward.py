"""The CPU backend's backward in plain Numba: weights computed again from LSE, block by block.

One pass over blocks of query rows: each row's dq is whole when its block is done, dk and dv of a
key/value head grow in sums of their own. Five products, no atomics: the same inputs give the same bits.
Scores and scratch are laid out as in ``cpu_scores.py``.
"""

# mypy: ignore-errors
# (Numba types what it compiles.)
from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np

from .cpu_layout import EACH, GROUP, IN_USE, LEFT, LINE, TARGET, WANT_K, WANT_Q, WANT_V
from .cpu_native import free, get_f64, get_i64, malloc, namespace, put_f64, put_i64
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

# Addresses of a tile's scratch, and its sizes
Scratch = namedtuple(
    "Scratch",
    (
        "base", "rows", "keys", "dim_k", "dim_v",  # dims are padded
        "q_rows", "dout_rows",  # as rows
        "q", "dout",  # as panels
        "k", "v",  # two blocks of each
        "s", "ds",
        "terms", "slope", "keep",  # features' blocks
        # per row; LSE is +inf where the row sees nothing, and in base 2; with features in base e, subtracted
        # from scores first, since finfo.min as a bias must not overflow, and without a rest
        "lse", "lse_rest", "delta", "low", "high",
        "work", "ignored", "factor", "ones", "limits", "seen",
        "fetch_k", "fetch_v", "idle",  # records of what the products fetch
        "dq",
    ),
)  # fmt: skip
# One head of one batch entry: ``array`` is its entry of the arrays, 0 for packed sequences
Head = namedtuple("Head", ("b", "h", "array", "q0", "q_len", "k0", "kv_len", "offset"))


def make_gradients(real: Any, simd: Any, features: bool) -> Any:
    """What the bodies share: a block of query rows made ready, the gradient of a block of scores."""
    memory = make_memory(real, simd)
    score = make_features(real, simd, memory)
    block = make_rows(real, simd, memory)
    get, put, width, size = simd.get, simd.put, simd.width, simd.itemsize
    padding = max(simd.lanes, simd.rows)

    @jit
    def scratch(p, rows, more):
        """Allocate for blocks of ``rows`` query rows; ``more`` bytes lie behind dq."""
        keys = get_i64(p, P.aux2)
        dim_k, dim_v = up(get_i64(p, P.head_dim), padding), up(get_i64(p, P.head_dim_v), padding)
        step_k, step_v = up(rows * dim_k * size, LINE), up(rows * dim_v * size, LINE)
        area = up(rows * keys * size, LINE)
        extra = area if features else 0
        stat, panel = up(rows * size, LINE), up(width * size, LINE)
        keys_k, keys_v = up(2 * keys * dim_k * size, LINE), up(2 * keys * dim_v * size, LINE)
        limit = up(32 * (rows // width), LINE)
        total = 3 * step_k + 2 * step_v + max(step_k, step_v) + keys_k + keys_v + 2 * area + 3 * extra
        base = malloc(total + 5 * stat + 2 * panel + 5 * LINE + limit + up(keys, LINE) + more)
        q_rows = up(base, LINE)
        dout_rows = q_rows + step_k
        q = dout_rows + step_v
        dout = q + step_k
        k = dout + step_v
        v = k + keys_k
        s = v + keys_v
        ds = s + area
        terms = ds + area
        lse = terms + 3 * extra
        work = lse + 5 * stat
        ignored = work + max(step_k, step_v)
        factor = ignored + panel
        ones = factor + LINE
        limits = ones + panel
        seen = limits + limit
        fetch = seen + up(keys, LINE)
        for record in range(3):
            for word in (LEFT, EACH, TARGET):
                put_i64(fetch + record * LINE, word, 0)
        memory.fill(ones, width, real(1.0))
        exact = LOG2E if features or scale(p) == 0.0 else abs(scale(p)) * LOG2E
        # rounded down, so that the rest behind it is positive and -inf stays -inf
        put(factor, 0, real(exact * (1.0 - 2.0**-24)))
        put(factor, 1, real(max(exact - np.float64(get(factor, 0)), 1e-37)))
        return Scratch(
            base, rows, keys, dim_k, dim_v, q_rows, dout_rows, q, dout, k, v, s, ds, terms, terms + extra,
            terms + 2 * extra, lse, lse + stat, lse + 2 * stat, lse + 3 * stat, lse + 4 * stat,
            work, ignored, factor, ones,
            limits, seen, fetch, fetch + LINE, fetch + 2 * LINE, fetch + 3 * LINE,
        )  # fmt: skip

    @jit
    def load(p, at, head, first, n):
        """Load a block of n rows of q and dout with what each row needs; its first key and its end."""
        kind, dim_v = get_i64(p, P.aux0), get_i64(p, P.head_dim_v)
        panels = (n + width - 1) // width
        begin, end = block.ranges(
            p, first, n, panels, head.q_len, head.kv_len, head.offset, at.low, at.high, at.limits
        )
        row = head.q0 + first
        q = index_of(p, P.q_stride_b, P.q_stride_h, P.q_stride_s, head.array, head.h, row)
        dout = index_of(p, P.dout_stride_b, P.dout_stride_h, P.dout_stride_s, head.array, head.h, row)
        out = index_of(p, P.out_stride_b, P.out_stride_h, P.out_stride_s, head.array, head.h, row)
        lse = head.array * get_i64(p, P.lse_stride_b) + head.h * get_i64(p, P.lse_stride_h) + row
        block.load_rows(
            kind, get_i64(p, P.q), q, get_i64(p, P.q_stride_s), n, panels * width, get_i64(p, P.head_dim),
            at.dim_k, at.q_rows,
        )  # fmt: skip
        block.load_rows(
            kind, get_i64(p, P.dout), dout, get_i64(p, P.dout_stride_s), n, panels * width, dim_v, at.dim_v,
            at.dout_rows,
        )  # fmt: skip
        for i in range(panels * width):
            x = get(get_i64(p, P.lse), lse + min(i, n - 1))
            if i >= n or x == real(-np.inf):
                memory.fill(at.q_rows + i * at.dim_k * size, at.dim_k, real(0.0))
                memory.fill(at.dout_rows + i * at.dim_v * size, at.dim_v, real(0.0))
                put(at.lse, i, real(np.inf))
                put(at.lse_rest, i, real(0.0))
                put(at.delta, i, real(0.0))
                continue
            source = out + i * get_i64(p, P.out_stride_s)
            memory.load_row(kind, get_i64(p, P.out), source, dim_v, at.dim_v, at.work)
            delta = memory.dot(at.work, at.dout_rows + i * at.dim_v * size, at.dim_v)
            if get_i64(p, P.dlse):
                delta -= get(get_i64(p, P.dlse), lse + i)
            exponent = np.float64(x) if features else np.float64(x) * LOG2E
            put(at.lse, i, real(exponent))
            rest = exponent - np.float64(get(at.lse, i))
            put(at.lse_rest, i, real(rest) if rest > -np.inf else real(0.0))  # a sink near the largest number
            put(at.delta, i, delta)
        block.to_panels(at.q_rows, panels, at.dim_k, at.q)
        block.to_panels(at.dout_rows, panels, at.dim_v, at.dout)
        if not features:  # as in the forward: the scale's size is in the exponential, its sign in q
            block.take_sign(scale(p), panels * width * at.dim_k, at.q)
        return begin, end

    @jit
    def load_keys(p, at, head, first, n, begin, end, j0):
        """Load keys and values of the block at j0; its padded number of keys, 0 when none is seen."""
        kind = get_i64(p, P.aux0)
        early, count = max(begin - j0, 0), min(at.keys, end - j0)
        padded = up(count, simd.rows)
        mark = 0
        if features:
            mark = at.seen
            if not score.terms_of(
                p, head.b, head.h, first, n, (n + width - 1) // width, j0, at.keys, count, padded,
                head.offset, at.low, at.high, at.terms, at.seen,
            ):  # fmt: skip
                return 0
        hk = head.h // (get_i64(p, P.heads_q) // get_i64(p, P.heads_kv))
        k = index_of(p, P.k_stride_b, P.k_stride_h, P.k_stride_s, head.array, hk, head.k0 + j0)
        v = index_of(p, P.v_stride_b, P.v_stride_h, P.v_stride_s, head.array, hk, head.k0 + j0)
        k_rows = (kind, get_i64(p, P.k), k, get_i64(p, P.k_stride_s), get_i64(p, P.head_dim), at.dim_k)
        v_rows = (kind, get_i64(p, P.v), v, get_i64(p, P.v_stride_s), get_i64(p, P.head_dim_v), at.dim_v)
        # what the last panel fetches would come late
        steps = max((n - 1) // width, 1) * (at.keys // simd.rows)
        after = (at.keys, min(at.keys, end - j0 - at.keys), steps)
        memory.ready(at.fetch_k, k_rows, early, count, padded, at.k, mark, after, not features)
        memory.ready(at.fetch_v, v_rows, early, count, padded, at.v, mark, after, not features)
        return padded

    @jit
    def live_keys(at, panel, j0, padded):
        """First and number of the keys of a block that a panel may see, in whole register tiles."""
        low_min, high_max = get_i64(at.limits, 4 * panel), get_i64(at.limits, 4 * panel + 3)
        skip = max(low_min - j0, 0) // simd.rows * simd.rows
        return skip, max(0, min(padded, up(high_max + 1 - j0, simd.rows)) - skip)

    @jit
    def with_features(p, at, head, first, panel, j0, padded, need_scores, raw):
        """``panel_gradient`` for scores with terms, softcap and dropout."""
        lane = panel * width
        block_at = lane * at.keys * size
        s, ds, terms = at.s + block_at, at.ds + block_at, at.terms + block_at
        cap = real(get_f64(p, P.softcap))
        dim, q = get_i64(p, P.head_dim), at.q + lane * at.dim_k * size
        k, v = get_i64(at.fetch_k, IN_USE), get_i64(at.fetch_v, IN_USE)
        simd.scores(k, at.dim_k, padded, q, dim, s, at.ignored, 0, 0, 0, at.fetch_k)
        slope = at.slope + block_at if cap > real(0.0) else 0
        score.apply_terms(s, terms, padded, real(scale(p)), cap, slope, at.ignored, at.lse + lane * size)
        zero = at.lse_rest + lane * size
        simd.weights(s, ds, padded, at.factor, zero, zero, at.delta)
        keep = 0
        if get_f64(p, P.dropout_scale) > 0.0:
            keep = at.keep + block_at
            score.keep_of(p, head.b, head.h, first + lane, j0, padded, seed(p), keep)
        if need_scores:
            dout = at.dout + lane * at.dim_v * size
            simd.scores(v, at.dim_v, padded, dout, at.dim_v, ds, at.ignored, 0, 0, 0, at.fetch_v)
        score.gradient(s, ds, keep, slope if raw else 0, padded, at.delta + lane * size)

    @jit
    def panel_gradient(p, at, head, first, panel, j0, padded, skip, live, need_scores, raw):
        """One panel of a block: s becomes the weights after dropout, ds the gradient of the scores.

        Zeros for keys outside of the ``live`` ones from ``skip`` on. ``raw``: the gradient of the scores as
        q . k has them (behind softcap); else of those that bias is added to.
        """
        if features:
            with_features(p, at, head, first, panel, j0, padded, need_scores, raw)
            return
        lane = panel * width
        s, ds = at.s + lane * at.keys * size, at.ds + lane * at.keys * size
        for target in (s, ds):
            memory.fill(target, skip * width, real(0.0))
            memory.fill(target + (skip + live) * width * size, (padded - skip - live) * width, real(0.0))
        s, ds = s + skip * width * size, ds + skip * width * size
        k, q = get_i64(at.fetch_k, IN_USE) + skip * at.dim_k * size, at.q + lane * at.dim_k * size
        lse, rest, delta = at.lse + lane * size, at.lse_rest + lane * size, at.delta + lane * size
        low_max, high_min = get_i64(at.limits, 4 * panel + 1), get_i64(at.limits, 4 * panel + 2)
        j, dim = j0 + skip, get_i64(p, P.head_dim)
        if low_max <= j and j + live - 1 <= high_min:
            simd.scores(k, at.dim_k, live, q, dim, s, at.ignored, 0, 0, 0, at.fetch_k)
        else:
            low, high = at.low + lane * size, at.high + lane * size
            simd.scores_masked(k, at.dim_k, live, q, dim, s, at.ignored, low, high, j, at.fetch_k)
        if need_scores:
            v, dout = get_i64(at.fetch_v, IN_USE) + skip * at.dim_v * size, at.dout + lane * at.dim_v * size
            simd.scores(v, at.dim_v, live, dout, at.dim_v, ds, at.ignored, 0, 0, 0, at.fetch_v)
            simd.score_gradient(s, ds, live, at.factor, lse, rest, delta)
        else:
            simd.weights(s, ds, live, at.factor, lse, rest, delta)

    return namespace(
        "gradients", scratch=scratch, load=load, load_keys=load_keys, live_keys=live_keys,
        panel_gradient=panel_gradient, memory=memory, padding=padding,
    )  # fmt: skip


def make_backward(real: Any, simd: Any, features: bool) -> Callable[..., Any]:
    """``backward(params, tile)``: dq of some query rows, and their part of dk and dv of one key/value head.

    Tile: (batch entry, key/value head, part). The query rows of the head's group are dealt block by block
    to ``aux3`` parts, so that a causal triangle is shared evenly. One part: dk and dv are stored; several:
    each leaves its sums in dk_accum and dv_accum, [tile][key][padded dim], for ``reduce`` to add up. With a
    pointer to dbias, the score gradients are stored there: the bias is broadcast over nothing.
    """
    common = make_gradients(real, simd, features)
    memory = common.memory
    get, width, size = simd.get, simd.width, simd.itemsize

    @jit
    def store_dq(p, at, head, n, row):
        kind, dim, stride = get_i64(p, P.aux0), get_i64(p, P.head_dim), get_i64(p, P.dq_stride_s)
        index = index_of(p, P.dq_stride_b, P.dq_stride_h, P.dq_stride_s, head.array, head.h, row)
        for i in range(n):
            if i % width == 0:
                simd.transpose(at.dq + i * at.dim_k * size, width, at.dim_k, width, at.work, at.dim_k)
            if get(at.lse, i) == real(np.inf):
                memory.zero_row(kind, get_i64(p, P.dq), index + i * stride, dim)
            else:
                source = at.work + i % width * at.dim_k * size
                memory.store_row(kind, get_i64(p, P.dq), index + i * stride, dim, source, real(scale(p)))

    @jit
    def store_dbias(p, at, head, first, n, j0, count):
        kind, dbias = get_i64(p, P.aux5), get_i64(p, P.dbias)
        step_q, step_k = get_i64(p, P.dbias_stride_q), get_i64(p, P.dbias_stride_k)
        index = head.b * get_i64(p, P.dbias_stride_b) + head.h * get_i64(p, P.dbias_stride_h)
        index += first * step_q + j0 * step_k
        for i in range(n):
            source = i // width * at.keys * width + i % width
            for j in range(count):
                memory.set_value(kind, dbias, index + i * step_q + j * step_k, get(at.ds, source + j * width))

    @jit
    def block_products(p, at, head, first, n, j0, padded, dk, dv):
        """One block of rows against one of keys: its share of dq, dk and dv."""
        wants = get_i64(p, P.aux4)
        begin, end = (n + width - 1) // width, 0  # the panels that see something: neighbours
        for panel in range(begin):
            skip, live = common.live_keys(at, panel, j0, padded)
            if live == 0:
                if features:
                    memory.fill(at.ds + panel * at.keys * width * size, padded * width, real(0.0))
                continue
            begin, end = min(begin, panel), panel + 1
            common.panel_gradient(
                p, at, head, first, panel, j0, padded, skip, live, wants & (WANT_Q | WANT_K) != 0, True
            )
            if wants & WANT_Q:
                ds = at.ds + (panel * at.keys + skip) * width * size
                dq = at.dq + panel * width * at.dim_k * size
                k = get_i64(at.fetch_k, IN_USE) + skip * at.dim_k * size
                simd.values(k, at.dim_k, live, ds, at.dim_k, dq, at.ones, at.idle)
        lane, panels = begin * width, end - begin
        offset, step = lane * at.keys * size, at.keys * width
        if wants & WANT_V:
            dout = at.dout_rows + lane * at.dim_v * size
            simd.outer(at.s + offset, step, panels, padded, dout, at.dim_v, dv + j0 * at.dim_v * size)
        if wants & WANT_K:
            q = at.q_rows + lane * at.dim_k * size
            simd.outer(at.ds + offset, step, panels, padded, q, at.dim_k, dk + j0 * at.dim_k * size)

    @jit
    def add_rows(p, at, head, first, n, dk, dv):
        """One block of query rows: dq whole, its share of dk and dv."""
        begin, end = common.load(p, at, head, first, n)
        memory.fill(at.dq, (n + width - 1) // width * width * at.dim_k, real(0.0))
        for j0 in range(begin // GROUP * GROUP, end, at.keys):
            padded = common.load_keys(p, at, head, first, n, begin, end, j0)
            if padded == 0:
                continue
            block_products(p, at, head, first, n, j0, padded, dk, dv)
            if features and get_i64(p, P.dbias):
                store_dbias(p, at, head, first, n, j0, min(at.keys, end - j0))
        if get_i64(p, P.aux4) & WANT_Q:
            store_dq(p, at, head, n, head.q0 + first)

    def backward(p, tile):
        rows, parts, wants = get_i64(p, P.aux1), get_i64(p, P.aux3), get_i64(p, P.aux4)
        kind, heads = get_i64(p, P.aux0), get_i64(p, P.heads_kv)
        b, hk, part = tile // (heads * parts), tile // parts % heads, tile % parts
        group = get_i64(p, P.heads_q) // heads
        q0, q_len, k0, kv_len, offset = entry(p, b)
        array, length, capacity = b, get_i64(p, P.seqlen_q), get_i64(p, P.seqlen_kv)
        if get_i64(p, P.cu_seqlens_q):
            array, length, capacity = 0, q_len, kv_len
        held = up(get_i64(p, P.seqlen_kv), GROUP) + GROUP  # what ``reduce`` counts with
        if parts == 1:
            held = up(capacity, GROUP) + GROUP
        dim_k = up(get_i64(p, P.head_dim), common.padding)
        dim_v = up(get_i64(p, P.head_dim_v), common.padding)
        sums = held * (dim_k + dim_v) * size if parts == 1 else 0
        at = common.scratch(p, rows, up(rows * dim_k * size, LINE) + sums)
        dk = at.dq + up(rows * dim_k * size, LINE)
        dv = dk + held * dim_k * size
        if parts > 1:
            dk = get_i64(p, P.dk_accum) + tile * held * dim_k * size
            dv = get_i64(p, P.dv_accum) + tile * held * dim_v * size
        if wants & WANT_K:
            memory.fill(dk, held * dim_k, real(0.0))
        if wants & WANT_V:
            memory.fill(dv, held * dim_v, real(0.0))
        blocks = (length + rows - 1) // rows
        for unit in range(part, group * blocks, parts):
            head = Head(b, hk * group + unit // blocks, array, q0, q_len, k0, kv_len, offset)
            first = unit % blocks * rows
            add_rows(p, at, head, first, min(rows, length - first), dk, dv)
        if parts == 1 and wants & WANT_K:
            index = index_of(p, P.dk_stride_b, P.dk_stride_h, P.dk_stride_s, array, hk, k0)
            stride, dim = get_i64(p, P.dk_stride_s), get_i64(p, P.head_dim)
            for j in range(capacity):
                source = dk + j * dim_k * size
                memory.store_row(kind, get_i64(p, P.dk), index + j * stride, dim, source, real(scale(p)))
        if parts == 1 and wants & WANT_V:
            index = index_of(p, P.dv_stride_b, P.dv_stride_h, P.dv_stride_s, array, hk, k0)
            stride, dim = get_i64(p, P.dv_stride_s), get_i64(p, P.head_dim_v)
            for j in range(capacity):
                source = dv + j * dim_v * size
                memory.store_row(kind, get_i64(p, P.dv), index + j * stride, dim, source, real(1.0))
        free(at.base)

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
    """``sinks_gradient(params, tile)``: dsinks of a query head, -sum of exp(sink - lse) * delta over rows."""
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
                memory.load_row(
                    kind, get_i64(p, P.dout), d + i * get_i64(p, P.dout_stride_s), dim, padded, dout
                )
                delta = memory.dot(out, dout, padded)
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
    get, width = simd.get, simd.width

    @jit
    def add_block(p, at, n, count, sums):
        """Add a block of score gradients to sums[row or 0][key or 0]."""
        step_q = 0 if get_i64(p, P.dbias_stride_q) == 0 else at.keys
        step_k = 0 if get_i64(p, P.dbias_stride_k) == 0 else 1
        for i in range(n):
            source = i // width * at.keys * width + i % width
            for j in range(count):
                place = i * step_q + j * step_k
                put_f64(sums, place, get_f64(sums, place) + np.float64(get(at.ds, source + j * width)))

    @jit
    def add_rows(p, at, b, h, first, j_first, j_last, sums):
        """Add what one block of rows of one head has for the keys in [j_first, j_last)."""
        q0, q_len, k0, kv_len, offset = entry(p, b)
        head = Head(b, h, b, q0, q_len, k0, kv_len, offset)
        n = min(at.rows, get_i64(p, P.seqlen_q) - first)
        begin, end = common.load(p, at, head, first, n)
        for j0 in range(j_first, min(j_last, end), at.keys):
            padded = common.load_keys(p, at, head, first, n, begin, end, j0)
            if padded == 0:
                continue
            for panel in range((n + width - 1) // width):
                common.panel_gradient(p, at, head, first, panel, j0, padded, 0, padded, True, False)
            add_block(p, at, n, min(at.keys, end - j0), sums)

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
        at = common.scratch(p, rows, rows * keys * 8)
        sums = at.dq
        for i in range(rows * keys):
            put_f64(sums, i, 0.0)
        for bb in range(b if step_b else 0, b + 1 if step_b else batch):
            for hh in range(h if step_h else 0, h + 1 if step_h else heads):
                for qq in range(q_block if step_q else 0, q_block + 1 if step_q else row_blocks):
                    add_rows(p, at, bb, hh, qq * rows, j_first, j_last, sums)
        first = q_block * rows if step_q else 0
        for i in range(min(rows, seqlen_q - first) if step_q else 1):
            for j in range(j_last - j_first if step_k else 1):
                place = b * step_b + h * step_h + (first + i) * step_q + (j_first + j) * step_k
                memory.set_value(kind, get_i64(p, P.dbias), place, real(get_f64(sums, i * keys + j)))
        free(at.base)

    return bias_gradient
