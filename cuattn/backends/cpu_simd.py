"""Vector micro-kernels of the CPU backend: a tile's products, exp2, softmax, transposes, as LLVM vectors.

Everything works on 64-bit addresses of scratch memory. A *panel* is ``width`` query rows laid side by side in
vector lanes, so a score tile is stored transposed, ``tile[key][lane]``: softmax is vertical, keys and values
are broadcast scalars that need no packing. No strides of the caller, no masks but a range of keys per
lane, no features: ``cpu_tiles.py`` has those.

NOTE: no fast-math flag but ``contract``: ``ninf`` breaks the tests for -inf and ``reassoc`` the rounding of
exp2. A contracted multiply-add is one instruction with FMA and, unlike ``llvm.fma``, no libm call without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .cpu_layout import (
    EACH,
    LEFT,
    LINE,
    ROWS_AHEAD,
    SIZE,
    SOURCE,
    STRIDE,
    TARGET,
    TARGET_STRIDE,
    Isa,
)
from .cpu_native import (
    I8,
    I32,
    I64,
    emit_prefetch,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    namespace,
    put_f32,
    put_f64,
    put_i32,
    put_i64,
)

UNROLL = 4
BESIDE = (4, 8)  # vectors of a row whose products run beside others
LN2 = 0.6931471805599453
SQRT_HALF_BITS, MAGIC_BITS = (int(np.float64(x).view(np.int64)) for x in (0.5**0.5, 1.5 * 2.0**52))

# 2^f for |f| <= 1/2. float32: minimax of degree 6 (at most 1 ulp in all, tested); float64: Taylor.
EXP2_FLOAT32 = (
    1.0, 0.6931471824645996, 0.24022647738456726, 0.055503323674201965, 0.00961843691766262,
    0.0013398875016719103, 0.00015353360504377633,
)  # fmt: skip
EXP2_FLOAT64 = (
    1.0, 0.6931471805599453, 0.2402265069591007, 0.055504108664821576, 0.009618129107628477,
    0.0013333558146428441, 0.00015403530393381606, 1.5252733804059838e-05, 1.3215486790144305e-06,
    1.0178086009239696e-07, 7.054911620801121e-09, 4.44553827187081e-10, 2.5678435993488196e-11,
    1.3691488853904124e-12,
)  # fmt: skip


# tanh(x) = x + x z P(z) / Q(z) with z = x^2 for |x| < 0.625 (Moshier's Cephes library), highest power first
TANH_FLOAT32 = (
    (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1), (1.0,)
)  # fmt: skip
TANH_FLOAT64 = (
    (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3),
    (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3),
)  # fmt: skip
TANH_SMALL = 0.625


def _i64(n: int) -> Any:
    return ir.Constant(I64, n)


class _Loop:
    """A counted loop with carried values: ``for i in range(start, stop, step)``, which may be empty."""

    def __init__(self, b: Any, start: Any, stop: Any, step: int, carried: Sequence[Any]) -> None:
        self.b, self.step = b, step
        before = b.block
        self.head, body, self.end = (b.append_basic_block(name) for name in ("head", "body", "end"))
        b.branch(self.head)
        b.position_at_end(self.head)
        self.i = b.phi(I64)
        self.i.add_incoming(start, before)
        self.carried = []
        for value in carried:
            phi = b.phi(value.type)
            phi.add_incoming(value, before)
            self.carried.append(phi)
        b.cbranch(b.icmp_signed("<", self.i, stop), body, self.end)
        b.position_at_end(body)

    def close(self, values: Sequence[Any]) -> list[Any]:
        """End the body with the next iteration's values; the values after the loop come back."""
        b = self.b
        self.i.add_incoming(b.add(self.i, _i64(self.step)), b.block)
        for phi, value in zip(self.carried, values, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(self.head)
        b.position_at_end(self.end)
        return self.carried


class _Vectors:
    """LLVM idioms for vectors of one real type; ``b`` is an IR builder throughout."""

    def __init__(self, real: str, isa: Isa) -> None:
        double = real == "float64"
        self.scalar = ir.DoubleType() if double else ir.FloatType()
        self.itemsize = 8 if double else 4
        self.lanes = isa.lanes(self.itemsize)
        self.type = ir.VectorType(self.scalar, self.lanes)
        self.int = I64 if double else I32
        self.ints = ir.VectorType(self.int, self.lanes)
        self.doubles = ir.VectorType(ir.DoubleType(), self.lanes)
        self.coefficients = EXP2_FLOAT64 if double else EXP2_FLOAT32
        self.tanh_small = TANH_FLOAT64 if double else TANH_FLOAT32
        self.number = types.float64 if double else types.float32
        self.magic = 1.5 * 2.0**52 if double else 1.5 * 2.0**23
        self.smallest = -1022.0 if double else -126.0
        self.mantissa = 52 if double else 23
        self.zero = self.constant(0.0)

    def constant(self, x: float) -> Any:
        value = x if self.itemsize == 8 else float(np.float32(x))
        return ir.Constant(self.type, [value] * self.lanes)

    def pointer(self, b: Any, address: Any) -> Any:
        return b.inttoptr(address, self.scalar.as_pointer())

    def at(self, b: Any, pointer: Any, offset: Any) -> Any:
        return b.gep(pointer, [_i64(offset) if isinstance(offset, int) else offset], inbounds=True)

    def splat(self, b: Any, x: Any) -> Any:
        kind = ir.VectorType(x.type, self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        return b.shuffle_vector(
            b.insert_element(undefined, x, ir.Constant(I32, 0)), undefined,
            ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes),
        )  # fmt: skip

    def load(self, b: Any, pointer: Any, offset: Any = 0, kind: Any = None) -> Any:
        address = b.bitcast(self.at(b, pointer, offset), (kind or self.type).as_pointer())
        value = b.load(address)
        value.align = self.itemsize
        return value

    def store(self, b: Any, value: Any, pointer: Any, offset: Any = 0) -> None:
        b.store(value, b.bitcast(self.at(b, pointer, offset), self.type.as_pointer())).align = self.itemsize

    def prefetch(self, b: Any, pointer: Any, ahead: Any, level: int) -> None:
        emit_prefetch(b, b.bitcast(self.at(b, pointer, ahead), I8.as_pointer()), level)

    def fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        return b.fadd(b.fmul(x, y, flags=("contract",)), z, flags=("contract",))

    def max(self, b: Any, x: Any, top: Any) -> Any:
        """The larger; a NaN in x leaves top."""
        return b.select(b.fcmp_ordered(">", x, top), x, top)

    def exp2(self, b: Any, x: Any, factor: Any, smallest: Any) -> Any:
        """2^(factor * x), the product unrounded, for products up to 126: Cody-Waite, at most 1 ulp.

        0 where x < ``smallest`` (the normal range's end over factor), NaN for NaN.
        """
        low = b.fcmp_ordered("<", x, smallest)
        x = b.select(low, smallest, x)
        shifted = self.fma(b, x, factor, self.constant(self.magic))
        n = b.fsub(shifted, self.constant(self.magic))
        f = self.fma(b, x, factor, b.fneg(n))
        p = self.constant(self.coefficients[-1])
        for c in self.coefficients[-2::-1]:
            p = self.fma(b, p, f, self.constant(c))
        exponent = b.shl(b.bitcast(shifted, self.ints), ir.Constant(self.ints, [self.mantissa] * self.lanes))
        scaled = b.bitcast(b.add(b.bitcast(p, self.ints), exponent), self.type)
        return b.select(low, self.zero, scaled)

    def polynomial(self, b: Any, z: Any, coefficients: Sequence[float]) -> Any:
        p = self.constant(coefficients[0])
        for c in coefficients[1:]:
            p = self.fma(b, p, z, self.constant(c))
        return p

    def tanh(self, b: Any, x: Any) -> Any:
        """tanh, at most 3 ulp."""
        z = b.fmul(x, x)
        numerator, denominator = (self.polynomial(b, z, c) for c in self.tanh_small)
        small = self.fma(b, b.fmul(x, z), b.fdiv(numerator, denominator), x)
        size = b.select(b.fcmp_ordered("<", x, self.zero), b.fneg(x), x)
        factor = -2.0 / LN2
        e = self.exp2(b, b.fneg(size), self.constant(-factor), self.constant(self.smallest / -factor))
        one = self.constant(1.0)
        large = b.fsub(one, b.fdiv(b.fadd(e, e), b.fadd(one, e)))
        large = b.select(b.fcmp_ordered("<", x, self.zero), b.fneg(large), large)
        return b.select(b.fcmp_ordered("<", size, self.constant(TANH_SMALL)), small, large)

    def log(self, b: Any, x: Any) -> Any:
        """The natural logarithm of positive normal float64: 3 ulp at most, 1e-10 for float32's LSE."""
        longs = ir.VectorType(I64, self.lanes)

        def many(n: Any, kind: Any = self.doubles) -> Any:
            return ir.Constant(kind, [n] * self.lanes)

        # x = 2^e m, m in [sqrt(1/2), sqrt(2)): bits above those of sqrt(1/2) count e
        bits = b.sub(b.bitcast(x, longs), many(SQRT_HALF_BITS, longs))
        e = b.ashr(bits, many(52, longs))
        m = b.bitcast(
            b.add(b.and_(bits, many((1 << 52) - 1, longs)), many(SQRT_HALF_BITS, longs)), self.doubles
        )
        e = b.fsub(b.bitcast(b.add(e, many(MAGIC_BITS, longs)), self.doubles), many(1.5 * 2.0**52))
        s = b.fdiv(b.fsub(m, many(1.0)), b.fadd(m, many(1.0)))  # log(m) = 2 atanh(s), |s| < 0.172
        z = b.fmul(s, s)
        terms = 11 if self.itemsize == 8 else 6
        p = many(2.0 / (2 * terms - 1))
        for n in range(terms - 2, -1, -1):
            p = self.fma(b, p, z, many(2.0 / (2 * n + 1)))
        value = self.fma(b, e, many(LN2), b.fmul(p, s))
        return b.select(b.fcmp_unordered("uno", x, x), x, value)

    def factor(self, b: Any, address: Any) -> tuple[Any, Any]:
        """exp2's last two arguments from a positive number in memory."""
        factor = self.splat(b, b.load(self.pointer(b, address)))
        return factor, b.fdiv(self.constant(self.smallest), factor)

    def subtrahend(self, b: Any, top: Any) -> Any:
        """The running maximum, 0 where nothing was seen yet."""
        return b.select(b.fcmp_ordered("==", top, self.constant(-np.inf)), self.zero, top)

    def _interleaved(self) -> tuple[Any, Any]:
        """Shuffles of two vectors: their first halves interleaved, and their second ones."""
        n, kind = self.lanes, ir.VectorType(I32, self.lanes)
        low = [i // 2 + n * (i % 2) for i in range(n)]
        return ir.Constant(kind, low), ir.Constant(kind, [n // 2 + i for i in low])

    def transpose(self, b: Any, rows: list[Any]) -> list[Any]:
        """A square of vectors: interleaved within 16 bytes, which are then dealt out."""
        n, kind, part = self.lanes, ir.VectorType(I32, self.lanes), 16 // self.itemsize
        distance = 1
        while distance < n:
            if distance < part:  # runs of ``distance`` from the lower or upper halves of x's and y's 16 bytes
                starts = [j for i in range(0, n, part) for j in range(i, i + part // 2, distance)]
                low = [j + n * y + i for j in starts for y in (0, 1) for i in range(distance)]
                masks = [low, [i + part // 2 for i in low]]
            else:
                masks = [[i for i in range(2 * n) if i // part % 2 == odd] for odd in (0, 1)]
            for i in range(n):
                if not i & distance:
                    x, y = rows[i], rows[i + distance]
                    rows[i], rows[i + distance] = (
                        b.shuffle_vector(x, y, ir.Constant(kind, m)) for m in masks
                    )
            distance *= 2
        if part == 4:  # two bits of a row's number have changed places
            rows = [rows[i & ~3 | (i & 1) << 1 | (i & 2) >> 1] for i in range(n)]
        return rows

    def row_sums(self, b: Any, rows: list[Any]) -> Any:
        """The sum of each of ``lanes`` vectors, as one vector: folded while they are interleaved."""
        low, high = self._interleaved()
        while len(rows) > 1:
            half = len(rows) // 2
            pairs = [(rows[i], rows[i + half]) for i in range(half)]
            rows = [b.fadd(b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)) for x, y in pairs]
        return rows[0]


def _rank_1(
    v: _Vectors, b: Any, acc: Sequence[Any], a: Any, panel: Any, count: Any, a_step: Any, panel_step: Any,
    a_offset: Callable[[int, int], Any], vectors: int,
) -> tuple[list[Any], Any, Any]:  # fmt: skip
    """acc[r][lane] += sum over ``count`` steps of a[offset(u, r)] * panel[lane]; both pointers advance."""
    main = b.and_(count, _i64(-UNROLL))
    state = [*acc, a, panel]
    start = _i64(0)
    for unroll, stop in ((UNROLL, main), (1, count)):
        loop = _Loop(b, start, stop, unroll, state)
        *acc, a, panel = loop.carried
        for u in range(unroll):
            step = b.mul(panel_step, _i64(u))
            lanes = [v.load(b, panel, b.add(step, _i64(i * v.lanes))) for i in range(vectors)]
            for r in range(len(acc) // vectors):
                x = v.splat(b, b.load(v.at(b, a, a_offset(u, r))))
                for i in range(vectors):
                    acc[r * vectors + i] = v.fma(b, x, lanes[i], acc[r * vectors + i])
        advance = [v.at(b, p, b.mul(s, _i64(unroll))) for p, s in ((a, a_step), (panel, panel_step))]
        state = loop.close([*acc, *advance])
        start = main
    *acc, a, panel = state
    return list(acc), a, panel


def _fetch(v: _Vectors, b: Any, record: Any) -> None:
    """Prefetch a record's next rows; copy those that were prefetched before, if it has a place for them."""

    def word(i: int) -> Any:
        return b.gep(b.inttoptr(record, I64.as_pointer()), [_i64(i)], inbounds=True)

    left, most, stride, size = (b.load(word(i)) for i in (LEFT, EACH, STRIDE, SIZE))
    target, target_stride = b.load(word(TARGET)), b.load(word(TARGET_STRIDE))
    count = b.select(b.icmp_signed("<", left, most), left, most)
    copies = b.icmp_signed("!=", target, _i64(0))
    ahead = b.select(copies, b.mul(stride, _i64(ROWS_AHEAD)), _i64(0))
    rows = _Loop(b, _i64(0), count, 1, [b.load(word(SOURCE)), target])
    source, place = rows.carried
    lines = _Loop(b, _i64(0), size, LINE, [])
    emit_prefetch(b, b.inttoptr(b.add(b.add(source, ahead), lines.i), I8.as_pointer()), 1)
    lines.close([])
    vectors = _Loop(b, _i64(0), b.select(copies, size, _i64(0)), v.lanes * v.itemsize, [])
    x = v.load(b, v.pointer(b, b.add(source, vectors.i)))
    v.store(b, x, v.pointer(b, b.add(place, vectors.i)))
    vectors.close([])
    after = rows.close([b.add(source, stride), b.add(place, b.select(copies, target_stride, _i64(0)))])
    for i, value in ((SOURCE, after[0]), (TARGET, after[1]), (LEFT, b.sub(left, count))):
        b.store(value, word(i))


def _void(arity: int) -> Any:
    return types.void(*[types.int64] * arity)


def _make_scores(v: _Vectors, isa: Isa, masked: bool, fetches: bool) -> Any:
    width, rows, vectors = isa.width(v.itemsize), isa.rows, isa.vectors

    @intrinsic
    def scores(
        ctx: Any,
        k: Any,
        k_stride: Any,
        keys: Any,
        q: Any,
        dim: Any,
        s: Any,
        top: Any,
        low: Any,
        high: Any,
        first: Any,
        fetch: Any,
    ) -> Any:
        """s[key][lane] = k[key] . q[.][lane] and top = max(top, s); ``keys`` is a multiple of ``rows``.

        Masked: -inf unless low[lane] <= first + key <= high[lane]. ``fetch``: record of what is read next.
        """

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            k, k_stride, keys, q, dim, s, top, low, high, first, fetch = args
            k, q, s, top = (v.pointer(b, x) for x in (k, q, s, top))
            bounds = []
            if masked:
                for x in (low, high):
                    pointer = b.inttoptr(x, v.int.as_pointer())
                    bounds.append([v.load(b, pointer, i * v.lanes, v.ints) for i in range(vectors)])
            tops = [v.load(b, top, i * v.lanes) for i in range(vectors)]
            loop = _Loop(b, _i64(0), keys, rows, [*tops, k, s])
            *tops, k, s = loop.carried
            if fetches:
                _fetch(v, b, fetch)
            offsets = [b.mul(k_stride, _i64(r)) for r in range(rows)]
            acc, _, _ = _rank_1(
                v, b, [v.zero] * (rows * vectors), k, q, dim, _i64(1), _i64(width),
                lambda u, r: b.add(offsets[r], _i64(u)), vectors,
            )  # fmt: skip
            for r in range(rows):
                if masked:
                    key = b.add(b.add(first, loop.i), _i64(r))
                    key = v.splat(b, key if v.itemsize == 8 else b.trunc(key, I32))
                for i in range(vectors):
                    x = acc[r * vectors + i]
                    if masked:
                        seen = b.and_(
                            b.icmp_signed("<=", bounds[0][i], key), b.icmp_signed("<=", key, bounds[1][i])
                        )
                        x = b.select(seen, x, v.constant(-np.inf))
                    v.store(b, x, s, r * width + i * v.lanes)
                    tops[i] = v.max(b, x, tops[i])
            done = loop.close([*tops, v.at(b, k, b.mul(k_stride, _i64(rows))), v.at(b, s, rows * width)])
            for i in range(vectors):
                v.store(b, done[i], top, i * v.lanes)
            return context.get_dummy_value()

        return _void(11), codegen

    return scores


def _make_softmax(v: _Vectors, isa: Isa, only: bool) -> Any:
    width, vectors = isa.width(v.itemsize), isa.vectors

    @intrinsic
    def softmax(
        ctx: Any, s: Any, keys: Any, factor: Any, top: Any, former: Any, total: Any, decay: Any
    ) -> Any:
        """s = 2^(factor * (s - top)) in place, decay likewise of former; total = total * decay + sum of s.

        ``keys`` is even. former becomes top. A top of -inf counts as 0: nothing was seen. ``only``: no block
        was before; former and decay are not used.
        """

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            s, top, former, total, decay = (v.pointer(b, args[i]) for i in (0, 3, 4, 5, 6))
            factor = v.factor(b, args[2])
            subtrahends, totals = [], []
            for i in range(vectors):
                at = i * v.lanes
                m = v.load(b, top, at)
                subtrahends.append(v.subtrahend(b, m))
                if only:
                    totals.append(v.zero)
                    continue
                change = v.exp2(b, b.fsub(v.load(b, former, at), subtrahends[i]), *factor)
                v.store(b, change, decay, at)
                v.store(b, m, former, at)
                totals.append(b.fmul(v.load(b, total, at), change))
            loop = _Loop(b, _i64(0), args[1], 2, [v.zero] * vectors + [s])  # a block's sum apart: exacter
            *sums, s = loop.carried
            for i in range(vectors):
                pair = []
                for at in (i * v.lanes, width + i * v.lanes):
                    pair.append(v.exp2(b, b.fsub(v.load(b, s, at), subtrahends[i]), *factor))
                    v.store(b, pair[-1], s, at)
                sums[i] = b.fadd(sums[i], b.fadd(*pair))
            done = loop.close([*sums, v.at(b, s, 2 * width)])
            for i in range(vectors):
                v.store(b, b.fadd(totals[i], done[i]), total, i * v.lanes)
            return context.get_dummy_value()

        return _void(7), codegen

    return softmax


def _make_values(v: _Vectors, isa: Isa) -> Any:
    width, rows, vectors = isa.width(v.itemsize), isa.rows, isa.vectors

    @intrinsic
    def values(
        ctx: Any, x: Any, x_stride: Any, keys: Any, p: Any, dim: Any, acc: Any, decay: Any, fetch: Any
    ) -> Any:
        """acc[d][lane] = acc * decay[lane] + sum of x[key][d] * p[key][lane]; dim a multiple of rows."""

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, p, acc, decay = (v.pointer(b, args[i]) for i in (0, 3, 5, 6))
            x_stride, keys, dim = args[1], args[2], args[4]
            decays = [v.load(b, decay, i * v.lanes) for i in range(vectors)]
            loop = _Loop(b, _i64(0), dim, rows, [x, acc])
            x, acc = loop.carried
            _fetch(v, b, args[7])
            places = [(r * vectors + i, r * width + i * v.lanes) for r in range(rows) for i in range(vectors)]
            offsets = [b.mul(x_stride, _i64(u)) for u in range(UNROLL)]
            sums, _, _ = _rank_1(
                v, b, [v.zero] * len(places), x, p, keys, x_stride, _i64(width),
                lambda u, r: b.add(offsets[u], _i64(r)), vectors,
            )  # fmt: skip
            for n, at in places:
                v.store(b, v.fma(b, v.load(b, acc, at), decays[n % vectors], sums[n]), acc, at)
            loop.close([v.at(b, x, rows), v.at(b, acc, rows * width)])
            return context.get_dummy_value()

        return _void(8), codegen

    return values


def _make_normalise(v: _Vectors, isa: Isa) -> Any:
    width, vectors = isa.width(v.itemsize), isa.vectors

    @intrinsic
    def normalise(ctx: Any, acc: Any, dim: Any, total: Any) -> Any:
        """acc[d][lane] /= total[lane]; 0 where the total is 0."""

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            acc, total = v.pointer(b, args[0]), v.pointer(b, args[2])
            totals = [v.load(b, total, i * v.lanes) for i in range(vectors)]
            nothing = [b.fcmp_ordered("==", x, v.zero) for x in totals]
            factors = [b.fdiv(v.constant(1.0), x) for x in totals]
            loop = _Loop(b, _i64(0), args[1], 1, [acc])
            row = loop.carried[0]
            for i in range(vectors):
                x = b.fmul(v.load(b, row, i * v.lanes), factors[i])
                v.store(b, b.select(nothing[i], v.zero, x), row, i * v.lanes)
            loop.close([v.at(b, row, width)])
            return context.get_dummy_value()

        return _void(3), codegen

    return normalise


def _make_finish(v: _Vectors) -> Any:
    @intrinsic
    def finish(ctx: Any, top: Any, total: Any, factor: Any, lse: Any) -> Any:
        """lse = top * scale + log(total), total = 1 / total; -inf and 0 where the total is 0.

        One vector of each; the scale is the second number at ``factor``.
        """

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            top, total, factor, lse = (v.pointer(b, x) for x in args)
            x = v.load(b, total)
            nothing = b.fcmp_ordered("==", x, v.zero)
            scale = v.splat(b, b.fpext(b.load(v.at(b, factor, 1)), v.doubles.element))
            wide = [y if v.itemsize == 8 else b.fpext(y, v.doubles) for y in (v.load(b, top), x)]
            value = b.fadd(b.fmul(wide[0], scale), v.log(b, wide[1]))
            value = value if v.itemsize == 8 else b.fptrunc(value, v.type)
            v.store(b, b.select(nothing, v.constant(-np.inf), value), lse)
            v.store(b, b.select(nothing, v.zero, b.fdiv(v.constant(1.0), x)), total)
            return context.get_dummy_value()

        return _void(4), codegen

    return finish


def _make_weighted_rows(v: _Vectors, isa: Isa) -> Any:
    width, rows = isa.width(v.itemsize), isa.rows

    @intrinsic
    def weighted_rows(
        ctx: Any, x: Any, x_stride: Any, keys: Any, p: Any, dim: Any, factor: Any, out: Any, out_stride: Any
    ) -> Any:
        """out[row][d] = factor[row] * sum of p[key][row] * x[key][d] for ``rows`` rows; 0 where factor is 0.

        dim is a multiple of the lanes.
        """

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, p, factor, out = (v.pointer(b, args[i]) for i in (0, 3, 5, 6))
            x_stride, keys, dim, out_stride = (args[i] for i in (1, 2, 4, 7))
            loop = _Loop(b, _i64(0), dim, v.lanes, [x, out])
            x, out = loop.carried
            sums, _, _ = _rank_1(
                v, b, [v.zero] * rows, p, x, keys, _i64(width), x_stride, lambda u, r: u * width + r, 1
            )
            for r, value in enumerate(sums):
                scale = v.splat(b, b.load(v.at(b, factor, r)))
                value = b.select(b.fcmp_unordered("!=", scale, v.zero), b.fmul(value, scale), v.zero)
                v.store(b, value, out, b.mul(out_stride, _i64(r)))
            loop.close([v.at(b, x, v.lanes), v.at(b, out, v.lanes)])
            return context.get_dummy_value()

        return _void(8), codegen

    return weighted_rows


def _make_outer(v: _Vectors, isa: Isa) -> Any:
    width, rows = isa.width(v.itemsize), isa.rows

    @intrinsic
    def outer(ctx: Any, p: Any, p_stride: Any, panels: Any, keys: Any, x: Any, dim: Any, acc: Any) -> Any:
        """acc[key][d] += sum over panels and lanes of p[panel][key][lane] * x[panel * width + lane][d].

        Rows of x and acc are ``dim`` long, a multiple of the lanes; ``keys`` is a multiple of ``rows``.
        """

        def block(b: Any, args: Any, p: Any, acc: Any, column: Any, vectors: int) -> None:
            _, p_stride, panels, _, x, dim, _ = args
            places = [(r, i) for r in range(rows) for i in range(vectors)]
            at = [b.add(b.add(b.mul(dim, _i64(r)), _i64(i * v.lanes)), column) for r, i in places]
            x = v.at(b, v.pointer(b, x), column)
            for offset in at:  # a head's sums lie far away
                v.prefetch(b, acc, offset, 1)
            loop = _Loop(b, _i64(0), panels, 1, [v.zero] * len(places) + [p, x])
            *sums, panel, x = loop.carried
            sums, _, x = _rank_1(
                v, b, sums, panel, x, _i64(width), _i64(1), dim, lambda u, r: r * width + u, vectors
            )
            sums = loop.close([*sums, v.at(b, panel, p_stride), x])[: len(places)]
            for offset, value in zip(at, sums, strict=True):
                v.store(b, b.fadd(v.load(b, acc, offset), value), acc, offset)

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            dim, step = args[5], isa.vectors * v.lanes
            loop = _Loop(b, _i64(0), args[3], rows, [v.pointer(b, args[0]), v.pointer(b, args[6])])
            p, acc = loop.carried
            main = b.sub(dim, b.urem(dim, _i64(step)))
            start = _i64(0)
            for vectors, stop in ((isa.vectors, main), (1, dim)):
                columns = _Loop(b, start, stop, vectors * v.lanes, [])
                block(b, args, p, acc, columns.i, vectors)
                columns.close([])
                start = main
            loop.close([v.at(b, p, rows * width), v.at(b, acc, b.mul(dim, _i64(rows)))])
            return context.get_dummy_value()

        return _void(7), codegen

    return outer


def _make_weights(v: _Vectors, isa: Isa, gradient: bool) -> Any:
    width, vectors = isa.width(v.itemsize), isa.vectors

    @intrinsic
    def weights(ctx: Any, s: Any, dp: Any, keys: Any, factor: Any, lse: Any, rest: Any, delta: Any) -> Any:
        """s = 2^(factor * s - lse) in place and, for the gradient, dp = s * (dp - delta), 0 where s is 0.

        factor and lse are sums of two numbers each: factor and the positive number behind it, lse and rest.
        """

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            s, dp, factor, lse, rest, delta = (v.pointer(b, args[i]) for i in (0, 1, 3, 4, 5, 6))
            factors = [v.splat(b, b.load(v.at(b, factor, i))) for i in range(2)]
            one, smallest = v.constant(1.0), v.constant(v.smallest)
            lses, rests = ([b.fneg(v.load(b, x, i * v.lanes)) for i in range(vectors)] for x in (lse, rest))
            deltas = [v.load(b, delta, i * v.lanes) for i in range(vectors)]
            loop = _Loop(b, _i64(0), args[2], 1, [s, dp])
            s, dp = loop.carried
            for i in range(vectors):
                at = i * v.lanes
                x = v.load(b, s, at)
                x = b.fadd(v.fma(b, x, factors[0], lses[i]), v.fma(b, x, factors[1], rests[i]))
                p = v.exp2(b, x, one, smallest)
                v.store(b, p, s, at)
                if gradient:
                    d = b.fmul(p, b.fsub(v.load(b, dp, at), deltas[i]))
                    v.store(b, b.select(b.fcmp_ordered("==", p, v.zero), v.zero, d), dp, at)
            loop.close([v.at(b, s, width), v.at(b, dp, width)])
            return context.get_dummy_value()

        return _void(7), codegen

    return weights


def _make_transpose(v: _Vectors) -> Any:
    n = v.lanes

    @intrinsic
    def transpose(ctx: Any, x: Any, x_stride: Any, rows: Any, columns: Any, y: Any, y_stride: Any) -> Any:
        """y[column][row] = x[row][column]; rows and columns are multiples of the lanes."""

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, x_stride, rows, columns, y, y_stride = args
            x, y = v.pointer(b, x), v.pointer(b, y)
            down = _Loop(b, _i64(0), rows, n, [])
            right = _Loop(b, _i64(0), columns, n, [])
            source = v.at(b, x, b.add(b.mul(down.i, x_stride), right.i))
            target = v.at(b, y, b.add(b.mul(right.i, y_stride), down.i))
            square = [v.load(b, source, b.mul(x_stride, _i64(r))) for r in range(n)]
            for r, row in enumerate(v.transpose(b, square)):
                v.store(b, row, target, b.mul(y_stride, _i64(r)))
            right.close([])
            down.close([])
            return context.get_dummy_value()

        return _void(6), codegen

    return transpose


def _make_tanh(v: _Vectors) -> Any:
    @intrinsic
    def tanh(ctx: Any, x: Any, count: Any, factor: Any) -> Any:
        """x = tanh(factor * x) in place; ``count`` is a multiple of the lanes."""

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            pointer, factor = v.pointer(b, args[0]), v.splat(b, args[2])
            loop = _Loop(b, _i64(0), args[1], v.lanes, [])
            v.store(b, v.tanh(b, b.fmul(v.load(b, pointer, loop.i), factor)), pointer, loop.i)
            loop.close([])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, v.number), codegen

    return tanh


def _columns(
    v: _Vectors, b: Any, dim: Any, carried: Sequence[Any],
    body: Callable[[Any, int, list[Any]], Sequence[Any]],
) -> Sequence[Any]:  # fmt: skip
    """body(column, vectors, carried) -> carried over ``dim`` elements: 8 vectors at once, then 4, then 1."""
    start = _i64(0)
    for vectors in (8, 4, 1):
        stop = b.sub(dim, b.urem(b.sub(dim, start), _i64(vectors * v.lanes)))
        loop = _Loop(b, start, stop, vectors * v.lanes, carried)
        carried = loop.close(body(loop.i, vectors, list(loop.carried)))
        start = stop
    return carried


def _make_dots(v: _Vectors) -> Any:
    n = v.lanes

    @intrinsic
    def dots(
        ctx: Any, q: Any, q_step: Any, k: Any, k_step: Any, k_stride: Any, heads: Any, keys: Any, dim: Any,
        s: Any, sums: Any, ahead: Any,
    ) -> Any:  # fmt: skip
        """s[key][head] = k[key][head] . q[head] for one query; steps are between heads.

        ``heads`` divides the lanes, which divide ``keys`` and ``dim``. Reads memory from end to end where the
        heads' rows are neighbours; asks for what is ``ahead`` elements on. ``sums``: scratch, lanes x lanes.
        """

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            q, k, s, sums = (v.pointer(b, args[i]) for i in (0, 2, 8, 9))
            q_step, k_step, k_stride, heads, keys, dim = (args[i] for i in (1, 3, 4, 5, 6, 7))
            outer = _Loop(b, _i64(0), b.mul(keys, heads), n, [k])
            row = _Loop(b, _i64(0), b.udiv(_i64(n), heads), 1, [outer.carried[0], sums])
            head = _Loop(b, _i64(0), heads, 1, [row.carried[0], q, row.carried[1]])
            key, query, target = head.carried

            def body(column: Any, vectors: int, acc: list[Any]) -> list[Any]:
                x, y, total = v.at(b, query, column), v.at(b, key, column), acc[0]
                for i in range(vectors):
                    v.prefetch(b, v.at(b, y, i * n), args[10], 2)
                    total = v.fma(b, v.load(b, y, i * n), v.load(b, x, i * n), total)
                return [total]

            (total,) = _columns(v, b, dim, [v.zero], body)
            v.store(b, total, target)
            done = head.close([v.at(b, key, k_step), v.at(b, query, q_step), v.at(b, target, n)])
            done = row.close([v.at(b, row.carried[0], k_stride), done[2]])
            v.store(b, v.row_sums(b, [v.load(b, sums, i * n) for i in range(n)]), s, outer.i)
            outer.close([done[0]])
            return context.get_dummy_value()

        return _void(11), codegen

    return dots


def _make_row_softmax(v: _Vectors) -> Any:
    n = v.lanes

    @intrinsic
    def row_softmax(ctx: Any, s: Any, count: Any, heads: Any, factor: Any, state: Any) -> Any:
        """``softmax`` for one query of several heads, ``count`` scores in all, as ``dots`` leaves them.

        state: vectors of top, total and decay, lane by lane as scores lie (totals of a head are still to be
        added up), and two vectors of scratch.
        """

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            s, state = v.pointer(b, args[0]), v.pointer(b, args[4])
            factor = v.factor(b, args[3])
            former = v.load(b, state)
            loop = _Loop(b, _i64(0), args[1], n, [former])
            (top,) = loop.close([v.max(b, v.load(b, s, loop.i), loop.carried[0])])
            for copy in (3, 4):
                v.store(b, top, state, copy * n)
            turn = _Loop(b, _i64(1), b.udiv(_i64(n), args[2]), 1, [top])  # lanes of one head share a maximum
            turned = v.load(b, v.at(b, state, b.mul(turn.i, args[2])), 3 * n)
            (top,) = turn.close([v.max(b, turned, turn.carried[0])])
            subtrahend = v.subtrahend(b, top)
            decay = v.exp2(b, b.fsub(former, subtrahend), *factor)
            loop = _Loop(b, _i64(0), args[1], n, [v.zero])
            p = v.exp2(b, b.fsub(v.load(b, s, loop.i), subtrahend), *factor)
            v.store(b, p, s, loop.i)
            (total,) = loop.close([b.fadd(loop.carried[0], p)])
            total = b.fadd(b.fmul(v.load(b, state, n), decay), total)
            for i, value in enumerate((top, total, decay)):
                v.store(b, value, state, i * n)
            return context.get_dummy_value()

        return _void(5), codegen

    return row_softmax


def _make_row_scale(v: _Vectors) -> Any:
    @intrinsic
    def row_scale(ctx: Any, acc: Any, acc_step: Any, heads: Any, dim: Any, factor: Any) -> Any:
        """acc[head][d] *= factor[head]; ``dim`` is a multiple of the lanes."""

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            acc, factor = v.pointer(b, args[0]), v.pointer(b, args[4])
            head = _Loop(b, _i64(0), args[2], 1, [acc])
            times, sums = v.splat(b, b.load(v.at(b, factor, head.i))), head.carried[0]

            def scale(column: Any, vectors: int, _: list[Any]) -> list[Any]:
                place = v.at(b, sums, column)
                for i in range(vectors):
                    v.store(b, b.fmul(v.load(b, place, i * v.lanes), times), place, i * v.lanes)
                return []

            _columns(v, b, args[3], [], scale)
            head.close([v.at(b, sums, args[1])])
            return context.get_dummy_value()

        return _void(5), codegen

    return row_scale


def _make_row_values(v: _Vectors) -> Any:
    n = v.lanes

    @intrinsic
    def row_values(
        ctx: Any, x: Any, x_step: Any, x_stride: Any, heads: Any, keys: Any, p: Any, dim: Any, acc: Any,
        acc_step: Any, ahead: Any,
    ) -> Any:  # fmt: skip
        """acc[head][d] += sum of p[key][head] * x[key][head][d] for one query.

        ``dim`` is a multiple of the lanes; the rest as in ``dots``.
        """

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, p, acc = (v.pointer(b, args[i]) for i in (0, 5, 7))
            x_step, x_stride, heads, keys, dim, acc_step = (args[i] for i in (1, 2, 3, 4, 6, 8))
            key = _Loop(b, _i64(0), keys, 1, [x, p])
            head = _Loop(b, _i64(0), heads, 1, [key.carried[0], acc, key.carried[1]])
            row, target, weights = head.carried
            weight = v.splat(b, b.load(weights))

            def add(column: Any, vectors: int, _: list[Any]) -> list[Any]:
                place, y = v.at(b, target, column), v.at(b, row, column)
                for i in range(vectors):
                    v.prefetch(b, v.at(b, y, i * n), args[9], 2)
                    total = v.fma(b, weight, v.load(b, y, i * n), v.load(b, place, i * n))
                    v.store(b, total, place, i * n)
                return []

            _columns(v, b, dim, [], add)
            done = head.close([v.at(b, row, x_step), v.at(b, target, acc_step), v.at(b, weights, 1)])
            key.close([v.at(b, key.carried[0], x_stride), done[2]])
            return context.get_dummy_value()

        return _void(10), codegen

    return row_values


def _make_dots_beside(v: _Vectors) -> Any:
    n, part = v.lanes, 16 // v.itemsize

    @intrinsic
    def dots_beside(
        ctx: Any, q: Any, q_step: Any, k: Any, k_step: Any, k_stride: Any, heads: Any, keys: Any, dim: Any,
        s: Any, sums: Any, x: Any, x_step: Any, x_stride: Any, p: Any, acc: Any, acc_step: Any, ahead: Any,
        shifted: Any,
    ) -> Any:  # fmt: skip
        """``dots`` of some keys beside ``row_values`` of as many others, so that memory is read all the time.

        dim is one of ``BESIDE`` vectors. ``shifted``: the rows begin 16 bytes behind a multiple of a vector's
        size, as large arrays of NumPy's do, and aligned loads are put together.
        """

        def rows(b: Any, y: Any, vectors: int, shifted: bool) -> Iterator[Any]:
            """The vectors of a row, each loaded when it is asked for."""
            if shifted:
                y = v.at(b, y, -part)
                former = v.load(b, y)
                joined = ir.Constant(ir.VectorType(I32, n), list(range(part, part + n)))
                for i in range(vectors):
                    current = v.load(b, y, (i + 1) * n)
                    yield b.shuffle_vector(former, current, joined)
                    former = current
            else:
                yield from (v.load(b, y, i * n) for i in range(vectors))

        def block(b: Any, args: Any, vectors: int, shifted: bool) -> None:
            q, k, s, sums, x, p, acc = (v.pointer(b, args[i]) for i in (0, 2, 8, 9, 10, 13, 14))
            q_step, k_step, k_stride, heads, keys = (args[i] for i in (1, 3, 4, 5, 6))
            x_step, x_stride, acc_step, ahead = (args[i] for i in (11, 12, 15, 16))
            outer = _Loop(b, _i64(0), b.mul(keys, heads), n, [k, x, p])
            row = _Loop(b, _i64(0), b.udiv(_i64(n), heads), 1, [*outer.carried, sums])
            head = _Loop(b, _i64(0), heads, 1, [*row.carried, q, acc])
            key, value, weights, target, query, place = head.carried
            weight, total = v.splat(b, b.load(weights)), v.zero
            pairs = zip(*(rows(b, x, vectors, shifted) for x in (key, value)), strict=True)
            for i, (y, z) in enumerate(pairs):
                for pointer in (key, value):
                    v.prefetch(b, v.at(b, pointer, i * n), ahead, 2)
                total = v.fma(b, y, v.load(b, query, i * n), total)
                v.store(b, v.fma(b, weight, z, v.load(b, place, i * n)), place, i * n)
            v.store(b, total, target)
            steps = (k_step, x_step, 1, n, q_step, acc_step)
            done = head.close([v.at(b, at, step) for at, step in zip(head.carried, steps, strict=True)])
            places = [v.at(b, at, step) for at, step in zip(row.carried, (k_stride, x_stride), strict=False)]
            done = row.close([*places, done[2], done[3]])
            v.store(b, v.row_sums(b, [v.load(b, sums, i * n) for i in range(n)]), s, outer.i)
            outer.close(done[:3])

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            for vectors, shifted in itertools.product(BESIDE, (False, True)):
                this = [
                    b.icmp_signed("==", args[i], _i64(x)) for i, x in ((7, vectors * n), (17, int(shifted)))
                ]
                with b.if_then(b.and_(*this)):
                    block(b, args, vectors, shifted)
            return context.get_dummy_value()

        return _void(18), codegen

    return dots_beside


def make(real: str, isa: Isa, fetches: bool = True) -> Any:
    """The micro-kernels for "float32" or "float64", as Numba intrinsics over addresses.

    ``fetches``: whether scores take their record of rows that are read next.
    """
    v = _Vectors(real, isa)
    double = real == "float64"
    return namespace(
        "simd", lanes=v.lanes, rows=isa.rows, width=isa.width(v.itemsize), itemsize=v.itemsize,
        scores=_make_scores(v, isa, False, fetches), scores_masked=_make_scores(v, isa, True, fetches),
        softmax=_make_softmax(v, isa, False), softmax_only=_make_softmax(v, isa, True),
        values=_make_values(v, isa), outer=_make_outer(v, isa),
        normalise=_make_normalise(v, isa), finish=_make_finish(v), weighted_rows=_make_weighted_rows(v, isa),
        weights=_make_weights(v, isa, False), score_gradient=_make_weights(v, isa, True),
        transpose=_make_transpose(v), tanh=_make_tanh(v),
        dots=_make_dots(v), row_softmax=_make_row_softmax(v), row_values=_make_row_values(v),
        row_scale=_make_row_scale(v), dots_beside=_make_dots_beside(v),
        get=get_f64 if double else get_f32, put=put_f64 if double else put_f32,
        get_int=get_i64 if double else get_i32, put_int=put_i64 if double else put_i32,
    )  # fmt: skip
