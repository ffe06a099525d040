"""The CPU backend's score pipeline in plain Numba: windows, bias, masks, softcap, dropout; rows in memory.

Scores of a block are kept transposed, [panel][key][lane], one lane a query row. Without features a score is
q . k alone (the scale is inside the exponential), masked by a range of keys per row. With features a block of
*terms* is made first: what is added to each scaled score, -inf where it is hidden. The loops over blocks are
``cpu_tiles.py``'s and ``cpu_backward.py``'s, the products ``cpu_simd.py``'s.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from .. import params
from .cpu_layout import (
    EACH,
    GROUP,
    IN_USE,
    KIND_BFLOAT16,
    KIND_FLOAT16,
    KIND_FLOAT32,
    KIND_REAL,
    LEFT,
    SIZE,
    SOURCE,
    STRIDE,
    TARGET,
    TARGET_STRIDE,
)
from .cpu_native import (
    bits_of_float,
    float_of_bits,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    get_u8,
    get_u16,
    namespace,
    put_f32,
    put_i64,
    put_u8,
    put_u16,
)

LOG2E = 1.4426950408889634

Words = namedtuple("Words", params.FIELDS)  # type: ignore[misc]
P = Words(*range(params.WORDS))
OPTIONS: dict[str, Any] = {
    "error_model": "numpy", "fastmath": {"contract"}, "no_cpython_wrapper": True, "no_cfunc_wrapper": True
}  # fmt: skip


def jit(function: Callable[..., Any]) -> Any:
    return njit(**OPTIONS)(function)


# ------------------------------------------------------------------------------------------------
# Numbers in memory
# ------------------------------------------------------------------------------------------------


@jit
def _from_half(h):
    x = np.uint32(h)
    bits = bits_of_float(
        float_of_bits(np.uint32((x & np.uint32(0x7FFF)) << np.uint32(13))) * np.float32(2.0**112)
    )
    if x & np.uint32(0x7C00) == np.uint32(0x7C00):
        bits = np.uint32(bits | np.uint32(0x7F800000))
    return float_of_bits(np.uint32(bits | np.uint32((x & np.uint32(0x8000)) << np.uint32(16))))


@jit
def _to_half(f):
    bits = bits_of_float(f)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    x = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if x > np.uint32(0x7F800000):
        h = np.uint32(0x7E00)
    elif x >= np.uint32(0x477FF000):  # rounds beyond the largest
        h = np.uint32(0x7C00)
    elif x < np.uint32(0x38800000):  # subnormal: the adder rounds at the right bit
        h = np.uint32(bits_of_float(np.float32(float_of_bits(x) + np.float32(0.5))) - np.uint32(0x3F000000))
    else:
        h = np.uint32(
            (x - np.uint32(0x38000000) + np.uint32(0xFFF) + ((x >> np.uint32(13)) & np.uint32(1))) >> 13
        )
    return np.uint16(h | sign)


@jit
def _from_bfloat(h):
    return float_of_bits(np.uint32(np.uint32(h) << np.uint32(16)))


@jit
def _to_bfloat(f):
    x = bits_of_float(f)
    if np.uint32(x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16((x >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@jit
def up(n, step):
    return (n + step - 1) // step * step


@jit
def entry(p, b):
    """Of batch entry b: first row and number of rows of q, the same of k, and the diagonal's offset."""
    q0, k0 = 0, 0
    q_len, kv_len = get_i64(p, P.seqlen_q), get_i64(p, P.seqlen_kv)
    if get_i64(p, P.cu_seqlens_q):
        q0 = np.int64(get_i32(get_i64(p, P.cu_seqlens_q), b))
        k0 = np.int64(get_i32(get_i64(p, P.cu_seqlens_k), b))
        q_len = np.int64(get_i32(get_i64(p, P.cu_seqlens_q), b + 1)) - q0
        kv_len = np.int64(get_i32(get_i64(p, P.cu_seqlens_k), b + 1)) - k0
    if get_i64(p, P.q_seqlens):
        q_len = max(0, min(q_len, np.int64(get_i32(get_i64(p, P.q_seqlens), b))))
    if get_i64(p, P.kv_seqlens):
        kv_len = max(0, min(kv_len, np.int64(get_i32(get_i64(p, P.kv_seqlens), b))))
    mode = get_i64(p, P.q_offset_mode)
    offset = get_i64(p, P.q_offset_value)
    if mode == params.OFFSET_ARRAY:
        offset = np.int64(get_i32(get_i64(p, P.q_offset), b))
    elif mode == params.OFFSET_BOTTOM_RIGHT:
        offset = kv_len - q_len
    return q0, q_len, k0, kv_len, offset


@jit
def visible(p, row, q_len, kv_len, offset):
    """First and last key that the window and the lengths let a row see; last < first when there is none."""
    if row >= q_len:
        return 0, -1
    low, high = 0, kv_len - 1
    left, right = get_i64(p, P.window_left), get_i64(p, P.window_right)
    if left >= 0:
        low = max(low, row + offset - left)
    if right >= 0:
        high = min(high, row + offset + right)
    return (low, high) if low <= high else (0, -1)


@jit
def scale(p):
    if get_i64(p, P.softmax_scale):
        return np.float64(get_f32(get_i64(p, P.softmax_scale), 0))
    return get_f64(p, P.softmax_scale_value)


@jit
def seed(p):
    if get_i64(p, P.dropout_seed):
        return np.uint64(get_i64(get_i64(p, P.dropout_seed), 0))
    return np.uint64(get_i64(p, P.dropout_seed_value))


@jit
def index_of(p, stride_b, stride_h, stride_s, b, h, row):
    """Index of a row's first element; for packed sequences b is 0."""
    return b * get_i64(p, stride_b) + h * get_i64(p, stride_h) + row * get_i64(p, stride_s)


@jit
def _philox(c0, c1, c2, c3, seed):
    """Seven rounds of Philox4x32 on words held in 64 bits; see ``cuattn/philox.py``."""
    low = np.uint64(0xFFFFFFFF)
    k0, k1 = seed & low, seed >> np.uint64(32)
    for _ in range(7):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & low
        c2, c3 = (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


def make_memory(real: Any, simd: Any) -> Any:
    """Rows of the caller's arrays to and from scratch, in the tile's own type ``real``."""
    get, put = simd.get, simd.put

    @jit
    def value(kind, address, index):
        if kind == KIND_FLOAT16:
            return real(_from_half(get_u16(address, index)))
        if kind == KIND_BFLOAT16:
            return real(_from_bfloat(get_u16(address, index)))
        if kind == KIND_FLOAT32:
            return real(get_f32(address, index))
        return get(address, index)

    @jit
    def set_value(kind, address, index, x):
        if kind == KIND_FLOAT16:
            put_u16(address, index, _to_half(np.float32(x)))
        elif kind == KIND_BFLOAT16:
            put_u16(address, index, _to_bfloat(np.float32(x)))
        elif kind == KIND_FLOAT32:
            put_f32(address, index, np.float32(x))
        else:
            put(address, index, x)

    @jit
    def fill(address, count, x):
        for i in range(count):
            put(address, i, x)

    @jit
    def load_row(kind, address, index, dim, padded, target):
        if kind == KIND_REAL:
            for d in range(dim):
                put(target, d, get(address, index + d))
        elif kind == KIND_FLOAT16:
            for d in range(dim):
                put(target, d, real(_from_half(get_u16(address, index + d))))
        else:
            for d in range(dim):
                put(target, d, real(_from_bfloat(get_u16(address, index + d))))
        for d in range(dim, padded):
            put(target, d, real(0.0))

    @jit
    def dot(x, y, count):
        """In eight partial sums."""
        sums = real(0.0)
        for start in range(0, count, 8):
            part = real(0.0)
            for i in range(start, min(start + 8, count)):
                part += get(x, i) * get(y, i)
            sums += part
        return sums

    @jit
    def store_row(kind, address, index, dim, source, factor):
        if kind == KIND_REAL:
            for d in range(dim):
                put(address, index + d, get(source, d) * factor)
        elif kind == KIND_FLOAT16:
            for d in range(dim):
                put_u16(address, index + d, _to_half(np.float32(get(source, d) * factor)))
        else:
            for d in range(dim):
                put_u16(address, index + d, _to_bfloat(np.float32(get(source, d) * factor)))

    @jit
    def zero_row(kind, address, index, dim):
        if kind == KIND_REAL:
            for d in range(dim):
                put(address, index + d, real(0.0))
        else:
            for d in range(dim):
                put_u16(address, index + d, np.uint16(0))

    @jit
    def load_block(kind, address, index, stride, first, count, padded, dim, target, target_stride, seen):
        """Keys [first, count) of a block into scratch; zeros before, up to ``padded``, or not seen."""
        for j in range(padded):
            row = target + j * target_stride * simd.itemsize
            if j < first or j >= count or (seen and get_u8(seen, j) == 0):
                fill(row, target_stride, real(0.0))
            else:
                load_row(kind, address, index + j * stride, dim, target_stride, row)

    @jit
    def fetch(record, rows, after, target):
        """Have the products that take a record prefetch the next block's rows, a few at each of their steps.

        Rows may lie pages apart, where no hardware looks ahead; asked for all at once they stall. With a
        ``target`` they are copied there on the way, if copying is all they need. ``rows``: how they are
        stored, address, index of this block's first, stride, dim, and how long they are in scratch;
        ``after``: keys of a block, of the next one, and the steps that there are.
        """
        kind, address, index, stride, dim, width = rows
        keys, more, steps = after
        itemsize, more = simd.itemsize if kind == KIND_REAL else 2, max(more, 0)
        put_i64(record, SOURCE, address + (index + keys * stride) * itemsize)
        put_i64(record, STRIDE, stride * itemsize)
        put_i64(record, SIZE, dim * itemsize)
        put_i64(record, LEFT, more)
        put_i64(record, EACH, up(more, steps) // steps)
        put_i64(record, TARGET, target if kind == KIND_REAL and dim == width and more > 0 else 0)
        put_i64(record, TARGET_STRIDE, width * simd.itemsize)

    @jit
    def ready(record, rows, early, count, padded, buffers, seen, after, copy):
        """Address of a block's rows in one of two adjacent buffers; into the other the next block's come.

        Loads what is not copied yet, as ``load_block`` does. ``copy``: whether the next ones may be copied.
        """
        kind, address, index, stride, dim, width = rows
        done, place = 0, buffers
        if get_i64(record, TARGET):
            done = count - get_i64(record, LEFT)
            place = get_i64(record, TARGET) - done * width * simd.itemsize
        load_block(
            kind, address, index + done * stride, stride, max(early - done, 0), count - done, padded - done,
            dim, place + done * width * simd.itemsize, width, seen,
        )  # fmt: skip
        put_i64(record, IN_USE, place)
        fetch(record, rows, after, 2 * buffers + after[0] * width * simd.itemsize - place if copy else 0)
        return place

    @jit
    def store_result(kind, out, index, dim, values, top, total, sinks, h, lse, lse_index):
        """Out and LSE of a row from its sums over 2^(score - top): the sink added, one division."""
        if total == 0.0:  # it saw nothing
            zero_row(kind, out, index, dim)
            put(lse, lse_index, real(-np.inf))
            return
        factor = 1.0
        if sinks:
            sink = np.float64(get(sinks, h))
            if sink > top:
                factor = math.exp(top - sink)
                total = total * factor + 1.0
                top = sink
            else:
                total += math.exp(sink - top)
        store_row(kind, out, index, dim, values, real(factor / total))
        put(lse, lse_index, real(top + math.log(total)))

    return namespace(
        "memory", value=value, set_value=set_value, fill=fill, dot=dot, load_row=load_row,
        store_row=store_row, zero_row=zero_row, load_block=load_block, store_result=store_result,
        fetch=fetch, ready=ready,
    )  # fmt: skip


def make_features(real: Any, simd: Any, memory: Any) -> Any:
    """Bias, ALiBi, masks, segments, softcap and dropout on one block of scores."""
    get, put, get_int, width = simd.get, simd.put, simd.get_int, simd.width
    value = memory.value
    hidden = real(-np.inf)

    @jit
    def add_position(p, b, h, first, n, panels, k0, keys, padded, offset, low, high, terms):
        """Start the terms: ALiBi where the window and the lengths let a row see a key, -inf elsewhere."""
        slope = real(0.0)
        if get_i64(p, P.alibi_slopes):
            slope = get(get_i64(p, P.alibi_slopes), b * get_i64(p, P.alibi_slopes_stride_b) + h)
        for panel in range(panels):
            diagonal = first + panel * width + offset - k0
            for j in range(padded):
                at = (panel * keys + j) * width
                for lane in range(width):
                    row, key = panel * width + lane, k0 + j
                    seen = (row < n) & (get_int(low, row) <= key) & (key <= get_int(high, row))
                    x = -slope * real(abs(diagonal + lane - j))
                    put(terms, at + lane, x if seen else hidden)

    @jit
    def hide_segments(p, b, first, n, k0, keys, count, terms):
        q_ids = get_i64(p, P.q_segment_ids) + 4 * (b * get_i64(p, P.seqlen_q) + first)
        kv_ids = get_i64(p, P.kv_segment_ids) + 4 * (b * get_i64(p, P.seqlen_kv) + k0)
        for panel in range((n + width - 1) // width):
            lanes = min(width, n - panel * width)
            for j in range(count):
                at = (panel * keys + j) * width
                for lane in range(lanes):
                    if get_i32(q_ids, panel * width + lane) != get_i32(kv_ids, j):
                        put(terms, at + lane, hidden)

    @jit
    def hide_masked(p, b, h, first, n, k0, keys, count, terms):
        step_q, step_k = get_i64(p, P.mask_stride_q), get_i64(p, P.mask_stride_k)
        base = (
            b * get_i64(p, P.mask_stride_b) + h * get_i64(p, P.mask_stride_h) + first * step_q + k0 * step_k
        )
        mask = get_i64(p, P.mask) + base
        for i in range(n):
            at = i // width * keys * width + i % width
            for j in range(count):
                if get_u8(mask, i * step_q + j * step_k) == 0:
                    put(terms, at + j * width, hidden)

    @jit
    def add_bias(p, b, h, first, n, k0, keys, count, terms):
        kind, bias = get_i64(p, P.aux5), get_i64(p, P.bias)
        step_q, step_k = get_i64(p, P.bias_stride_q), get_i64(p, P.bias_stride_k)
        base = (
            b * get_i64(p, P.bias_stride_b) + h * get_i64(p, P.bias_stride_h) + first * step_q + k0 * step_k
        )
        for i in range(n):
            at = i // width * keys * width + i % width
            for j in range(count):
                x = get(terms, at + j * width)
                if x != hidden:
                    put(terms, at + j * width, x + value(kind, bias, base + i * step_q + j * step_k))

    @jit
    def find_seen(panels, keys, count, terms, seen):
        """Mark the keys of the block that some row sees; whether there is any."""
        found = False
        for j in range(count):
            live = False
            for panel in range(panels):
                at = (panel * keys + j) * width
                for lane in range(width):
                    live |= get(terms, at + lane) != hidden
            put_u8(seen, j, np.uint8(live))
            found |= live
        return found

    @jit
    def terms_of(p, b, h, first, n, panels, k0, keys, count, padded, offset, low, high, terms, seen):
        """What is added to each score of a block, -inf where it is hidden; whether anything is seen."""
        add_position(p, b, h, first, n, panels, k0, keys, padded, offset, low, high, terms)
        if get_i64(p, P.q_segment_ids):
            hide_segments(p, b, first, n, k0, keys, count, terms)
        if get_i64(p, P.mask):
            hide_masked(p, b, h, first, n, k0, keys, count, terms)
        if get_i64(p, P.bias):
            add_bias(p, b, h, first, n, k0, keys, count, terms)
        return find_seen(panels, keys, count, terms, seen)

    @jit
    def apply_terms(s, terms, count, factor, cap, slope, top, less):
        """s = softcap(factor * s) + terms - less, top = max(top, s); softcap's derivative into ``slope``.

        ``less``: one number a row, or 0 for none.
        """
        if cap > real(0.0):
            simd.tanh(s, count * width, factor / cap)
            if slope:
                for i in range(count * width):
                    put(slope, i, real(1.0) - get(s, i) * get(s, i))
            for i in range(count * width):
                put(s, i, cap * get(s, i))
            factor = real(1.0)
        for j in range(count):
            for lane in range(width):
                at = j * width + lane
                term = get(terms, at)
                x = hidden if term == hidden else factor * get(s, at) + term
                if less:
                    x -= get(less, lane)
                put(s, at, x)
                m = get(top, lane)
                put(top, lane, x if x > m else m)

    @jit
    def keep_of(p, b, h, row, k0, count, seed, keep):
        """The factors, 0 or 1/(1-p), of dropout for one panel of a block."""
        threshold = np.uint64(get_i64(p, P.dropout_threshold))
        factor = real(get_f64(p, P.dropout_scale))
        half = np.uint64(0xFFFF)
        whole = get_i64(p, P.dropout_seed)  # after the seed: where this part of the whole begins
        if whole:
            b, h, row, k0 = (
                b + get_i64(whole, 1),
                h + get_i64(whole, 2),
                row + get_i64(whole, 3),
                k0 + get_i64(whole, 4),
            )
        for call in range((count + GROUP - 1) // GROUP * 4):
            counter = np.uint64(k0 // GROUP * 4 + call)
            column = call // 4 * GROUP + call % 4 * 2
            for lane in range(width):
                w0, w1, w2, w3 = _philox(counter, np.uint64(row + lane), np.uint64(h), np.uint64(b), seed)
                at = column * width + lane
                put(keep, at, factor if w0 & half < threshold else real(0.0))
                put(keep, at + width, factor if w0 >> np.uint64(16) < threshold else real(0.0))
                put(keep, at + 8 * width, factor if w1 & half < threshold else real(0.0))
                put(keep, at + 9 * width, factor if w1 >> np.uint64(16) < threshold else real(0.0))
                put(keep, at + 16 * width, factor if w2 & half < threshold else real(0.0))
                put(keep, at + 17 * width, factor if w2 >> np.uint64(16) < threshold else real(0.0))
                put(keep, at + 24 * width, factor if w3 & half < threshold else real(0.0))
                put(keep, at + 25 * width, factor if w3 >> np.uint64(16) < threshold else real(0.0))

    @jit
    def multiply(s, keep, count):
        for i in range(count * width):
            put(s, i, get(s, i) * get(keep, i))

    @jit
    def gradient(s, dp, keep, slope, count, delta):
        """s: weights, dp: their gradients -> s: weights after dropout, dp: gradients of the raw scores."""
        for j in range(count):
            for lane in range(width):
                at = j * width + lane
                weight, d = get(s, at), get(dp, at)
                if keep:
                    d *= get(keep, at)
                    put(s, at, weight * get(keep, at))
                d = real(0.0) if weight == real(0.0) else weight * (d - get(delta, lane))
                if slope:
                    d = real(0.0) if weight == real(0.0) else d * get(slope, at)
                put(dp, at, d)

    return namespace(
        "features",
        terms_of=terms_of,
        apply_terms=apply_terms,
        keep_of=keep_of,
        multiply=multiply,
        gradient=gradient,
    )


def make_rows(real: Any, simd: Any, memory: Any) -> Any:
    """A block of query rows: what each may see, and rows into panels."""
    put_int, width, itemsize = simd.put_int, simd.width, simd.itemsize

    @jit
    def ranges(p, first, n, panels, q_len, kv_len, offset, low, high, limits):
        """low and high for every lane, their extremes per panel in ``limits``; the first key and the end.

        Lanes beyond the last row repeat it, so that a full panel of keys stays unmasked.
        """
        begin, end = kv_len, 0
        for panel in range(panels):
            low_min, low_max, high_min, high_max = kv_len, 0, kv_len, -1
            for lane in range(panel * width, (panel + 1) * width):
                a, z = visible(p, first + min(lane, n - 1), q_len, kv_len, offset)
                put_int(low, lane, a)
                put_int(high, lane, z)
                low_max, high_min = max(low_max, a), min(high_min, z)
                if a <= z:
                    low_min, high_max = min(low_min, a), max(high_max, z)
            put_i64(limits, 4 * panel, low_min)
            put_i64(limits, 4 * panel + 1, low_max)
            put_i64(limits, 4 * panel + 2, high_min)
            put_i64(limits, 4 * panel + 3, high_max)
            begin, end = min(begin, low_min), max(end, high_max + 1)
        return begin, end

    @jit
    def load_rows(kind, address, index, stride, n, total, dim, padded, rows):
        """n rows of the caller's, then zero rows up to ``total``, each padded."""
        for i in range(n):
            memory.load_row(kind, address, index + i * stride, dim, padded, rows + i * padded * itemsize)
        memory.fill(rows + n * padded * itemsize, (total - n) * padded, real(0.0))

    @jit
    def to_panels(rows, panels, padded, out):
        for panel in range(panels):
            at = panel * width * padded * itemsize
            simd.transpose(rows + at, padded, width, padded, out + at, width)

    @jit
    def take_sign(scale_, count, q):
        """Multiply q by the sign of the scale, so that the exponential's factor is positive."""
        if scale_ <= 0.0:
            for i in range(count):
                simd.put(q, i, -simd.get(q, i) if scale_ < 0.0 else real(0.0))

    return namespace("rows", take_sign=take_sign, ranges=ranges, load_rows=load_rows, to_panels=to_panels)
