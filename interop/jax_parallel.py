"""Attention over a sequence that is split across devices, inside ``jax.shard_map``: ring and Ulysses.

The transfers are JAX's collectives. What each device computes is the primitives' (``jax_primitives.py``);
here is only which part of the keys meets which part of the queries, and how parts are combined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ..errors import argument_error
from . import jax_primitives as primitives
from .jax_operands import canonical
from .jax_sharding import axes_of, shift_dropout
from .jaxcompat import vary_alike, varying_over

_MOVING = ("k", "v", "kv_segment_ids")  # what goes round the ring
_POSITIONAL = ("q_segment_ids", "kv_segment_ids")
DROPOUT_COLUMNS = 32  # dropout's counters are shared by so many columns: parts begin at a multiple
TURN_BYTES = 32 << 20  # of q: what a ring works on at a time, for what it needs on the way to be small


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: Any,
    zigzag: bool = False,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softmax_scale: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    batch_axis: Any = None,
    head_axis: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> Any:
    """``cuattn.flash_attention`` of a sequence split over the mesh axis ``axis_name``, in ``jax.shard_map``.

    Arguments are this device's parts, (batch, seqlen / n, heads, head_dim) and so on, and mean what they mean
    in ``flash_attention`` for the whole sequence, of as many keys as queries where position matters. Keys and
    values go round the ring while attention to those at hand is computed; memory per device is that of its
    part.

    With ``zigzag`` device r holds parts r and 2 n - 1 - r of 2 n (``zigzag_order``): causal attention is then
    the same work on all. A window visits the neighbours that it reaches only; for one leave ``zigzag`` off.
    ``batch_axis`` and ``head_axis``: the mesh axes, if any, that split batch and heads, for dropout to draw
    the bits of the whole problem. Differentiable in q, k, v, sinks and softmax_scale.

    Returns out, or (out, lse): this device's rows. Raises ``ValueError`` or ``TypeError`` naming the
    argument.

    Algorithm: Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers", 2023.
    """
    given = {
        "q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "sinks": sinks, "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids, "dropout_seed": dropout_seed if dropout_p else None,
    }  # fmt: skip
    options = {
        "causal": causal, "window_size": window_size, "softmax_scale": softmax_scale, "softcap": softcap,
        "dropout_p": dropout_p, "layout": layout, "deterministic": deterministic, "precision": precision,
        "q_offset": 0, "backend": backend,
    }  # fmt: skip
    arrays, call = canonical({n: x for n, x in given.items() if x is not None}, options)
    size = _axis_size(axis_name)
    named = dict(zip(call.names, arrays, strict=True))
    ring = _Ring(axis_name, size, zigzag, call, call.spec(arrays).window_left, call.spec(arrays).window_right)
    ring.check(named)
    if "dropout_seed" in named:
        named["dropout_seed"] = _shift_entries(named, batch_axis, head_axis, layout)
    named = dict(zip(named, varying_over(vary_alike(list(named.values())), axis_name), strict=True))
    out, lse = _attend(ring, named)
    return (out, lse) if return_lse else out


def zigzag_order(seqlen: int, size: int) -> np.ndarray[Any, Any]:
    """Rows of a sequence in the order in which ``ring_attention(zigzag=True)`` wants it split over devices.

    With ``order = zigzag_order(seqlen, size)``, ``x[:, order]`` goes in, and ``out[:, numpy.argsort(order)]``
    is in the sequence's order.
    """
    if seqlen % (2 * size):
        raise argument_error("seqlen", str(seqlen), f"a multiple of 2 * size, {2 * size}")
    parts = np.arange(seqlen).reshape(2 * size, -1)
    return np.concatenate([parts[p] for r in range(size) for p in (r, 2 * size - 1 - r)])


def _axis_size(axis_name: Any) -> int:
    try:
        return int(jax.lax.psum(1, axis_name))
    except NameError:
        raise argument_error(
            "axis_name", repr(axis_name), "an axis of the mesh of a surrounding jax.shard_map"
        ) from None


def _shift_entries(named: Mapping[str, Any], batch_axis: Any, head_axis: Any, layout: str) -> Any:
    """Dropout's seed for this device's batch entries and heads."""
    heads = named["q"].shape[2 if layout == "bshd" else 1]
    first = {}
    if batch_axis is not None:
        first["batch"] = jax.lax.axis_index(batch_axis) * named["q"].shape[0]
    if head_axis is not None:
        first["head"] = jax.lax.axis_index(head_axis) * heads
    return shift_dropout(named["dropout_seed"], **first)


# ---------------------------------------------------------------------------------------- which parts meet
@dataclass(frozen=True)
class _Pair:
    """Rows and keys of this device that meet: ranges of the local arrays, or one of two by ``choose``."""

    rows: tuple[slice, ...]
    keys: tuple[slice, ...]
    offset: Any = None  # None: all keys are seen; else the diagonal, an int or a traced one
    choose: Any = None  # traced bool: the first of two ranges, or the second
    home: Any = None  # what ``choose`` is on the device that has this one's keys
    start: tuple[Any, Any] = (0, 0)  # row and key at which the ranges begin, in the whole


@dataclass(frozen=True)
class _Ring:
    """What of a ring call is known while tracing."""

    axis_name: Any
    size: int
    zigzag: bool
    call: primitives.Call
    left: int  # window, -1: open
    right: int

    @property
    def layout(self) -> str:
        return str(dict(self.call.options)["layout"])

    @property
    def axis(self) -> int:
        """The sequence's axis in q, k and v."""
        return 1 if self.layout == "bshd" else 2

    @property
    def positional(self) -> bool:
        """Whether a score depends on where its row and key are."""
        return self.left >= 0 or self.right >= 0 or "alibi_slopes" in self.call.names

    @property
    def halves(self) -> bool:
        """Zigzag causal attention: each pair of halves is all seen, all hidden, or the diagonal."""
        return self.zigzag and self.left < 0 and self.right == 0 and "alibi_slopes" not in self.call.names

    def check(self, named: Mapping[str, Any]) -> None:
        """Raise for parts that do not fit together."""
        rows, keys = (named[n].shape[self.axis] for n in "qk")
        if (self.positional or self.zigzag) and rows != keys:
            raise argument_error(
                "k", f"{keys} keys on a device", f"as many as q's {rows} with a window, ALiBi or zigzag"
            )
        if self.zigzag and rows % 2:
            raise argument_error("q", f"{rows} rows on a device", "an even number, with zigzag")
        part = keys // 2 if self.zigzag else keys
        if "dropout_seed" in named and part % DROPOUT_COLUMNS:
            raise argument_error(
                "k", f"{part} keys in a part", f"a multiple of {DROPOUT_COLUMNS}, with dropout"
            )

    def turns(self, named: Mapping[str, Any]) -> tuple[int, int]:
        """Into how many parts the batch and the heads are cut, each going round the ring in its turn."""
        q, k = named["q"], named["k"]
        batch, heads = q.shape[0], k.shape[3 - self.axis]
        wanted = max(1, -(-q.size * q.dtype.itemsize // TURN_BYTES))
        of_batch = _divisor(batch, wanted)
        return of_batch, _divisor(heads, -(-wanted // of_batch))

    def shifts(self, keys: int) -> list[int]:
        """From how many devices back, in turn, keys are wanted: 0 first, those out of reach never."""
        if self.zigzag:
            return list(range(self.size))
        back = self.size - 1 if self.left < 0 else min(self.size - 1, -(-self.left // max(keys, 1)))
        ahead = self.size - 1 if self.right < 0 else min(self.size - 1, -(-self.right // max(keys, 1)))
        return [i for i in range(self.size) if i <= back or self.size - i <= ahead]

    def pairs(self, shift: int, rows: int, keys: int) -> list[_Pair]:
        """What meets when the keys of the device ``shift`` back are at hand."""
        here = jax.lax.axis_index(self.axis_name)
        source = (here - shift) % self.size
        dropout = "dropout_seed" in self.call.names
        if not self.positional and not (dropout and self.zigzag):
            return [_Pair((slice(0, rows),), (slice(0, keys),), start=(here * rows, source * keys))]
        if not self.zigzag:
            start = here * rows, source * keys
            offset = 0 if shift == 0 else start[0] - start[1]
            return [_Pair((slice(0, rows),), (slice(0, keys),), offset, start=start)]
        if self.halves and shift == 0 and not dropout:
            return [_Pair((slice(0, rows),), (slice(0, keys),), 0)]
        ranges = slice(0, rows // 2), slice(rows // 2, rows)
        starts = [(d * (rows // 2), (2 * self.size - 1 - d) * (rows // 2)) for d in (here, source)]
        if not self.halves:
            return [
                _Pair(
                    (ranges[i],), (ranges[j],), starts[0][i] - starts[1][j] if self.positional else None,
                    start=(starts[0][i], starts[1][j]),
                )
                for i in (0, 1) for j in (0, 1)
            ]  # fmt: skip
        both = _Pair((ranges[1],), (ranges[0],), start=(starts[0][1], starts[1][0]))
        if shift == 0:
            diagonals = [_Pair((r,), (r,), 0, start=(s, s)) for r, s in zip(ranges, starts[0], strict=True)]
            return [*diagonals, both]
        behind = here >= shift  # the keys come from before this device: both halves see the first of them
        other = _Pair(
            ranges, ranges, choose=behind, home=(here + shift) % self.size >= shift,
            start=tuple(jnp.where(behind, a, b) for a, b in starts),
        )  # fmt: skip
        return [both, other]

    def one(self, named: Mapping[str, Any], pair: _Pair) -> tuple[dict[str, Any], primitives.Call]:
        """Operands of a pair, and what to bind the primitives with."""
        axes = {"q": self.axis, "q_segment_ids": 1} | dict.fromkeys("kv", self.axis) | {"kv_segment_ids": 1}
        parts = {}
        for name, x in named.items():
            if name in ("sinks", *(("alibi_slopes",) if pair.offset is None else ())):
                continue
            if name in axes:
                x = take(
                    x, pair.rows if name in ("q", "q_segment_ids") else pair.keys, pair.choose, axes[name]
                )
            if name == "dropout_seed":
                x = shift_dropout(x, row=pair.start[0], column=pair.start[1])
            parts[name] = x
        options = dict(self.call.options)
        if pair.offset is None:
            options |= {"causal": False, "window_size": None}
        elif not isinstance(pair.offset, int):
            batch = named["q"].shape[0]
            parts["q_offset"] = jnp.broadcast_to(pair.offset, (batch,)).astype(jnp.int32)
            options["q_offset"] = None
        names = tuple(n for n in primitives.OPERANDS if n in parts)
        parts = dict(zip(names, vary_alike([parts[n] for n in names]), strict=True))
        return parts, primitives.Call(names, tuple(sorted(options.items())), self.call.backend)

    def move(self, arrays: dict[str, Any], places: int) -> dict[str, Any]:
        """Send arrays to the device that is so many places ahead: one transfer for all of one dtype."""
        order = [(d, (d + places) % self.size) for d in range(self.size)]
        moved: dict[str, Any] = {}
        for dtype in dict.fromkeys(x.dtype for x in arrays.values()):
            some = {n: x for n, x in arrays.items() if x.dtype == dtype}
            flat = jnp.concatenate([x.reshape(-1) for x in some.values()])
            flat = jax.lax.ppermute(flat, self.axis_name, order)
            parts = jnp.split(flat, np.cumsum([x.size for x in some.values()])[:-1])
            moved |= {n: p.reshape(x.shape) for p, (n, x) in zip(parts, some.items(), strict=True)}
        return moved


def _divisor(number: int, least: int) -> int:
    """The smallest divisor that is at least ``least``, or the number itself."""
    return next((d for d in range(least, number) if number % d == 0), max(1, number))


def _in_turns(
    ring: _Ring,
    function: Callable[[dict[str, Any]], tuple[Any, ...]],
    named: Mapping[str, Any],
    results: Mapping[str, tuple[tuple[int, ...], Any]],
) -> tuple[Any, ...]:
    """``function`` of operands by role, some batch entries and heads at a time; results by (shape, dtype).

    A loop, so that what one turn needs beside operands and results is free again for the next.
    """
    turns = ring.turns(named)
    if turns == (1, 1):
        return function(dict(named))
    cut = {"b": turns[0], "h": turns[1], "n": turns[1]}
    made = vary_alike([named["q"], *(jnp.zeros(*x) for x in results.values())])[1:]
    places = [axes_of(role, x.shape, ring.layout) for role, x in zip(results, made, strict=True)]

    def starts(shape: tuple[int, ...], axes: str, turn: Any) -> list[Any]:
        at = {"b": turn // turns[1], "h": turn % turns[1], "n": turn % turns[1]}
        return [at[a] * (n // cut[a]) if a in cut else 0 for a, n in zip(axes, shape, strict=True)]

    def part(role: str, x: Any, turn: Any) -> Any:
        if role == "dropout_seed":
            first = starts(named["q"].shape, axes_of("q", named["q"].shape, ring.layout), turn)
            return shift_dropout(x, batch=first[0], head=first[3 - ring.axis])
        axes = axes_of(role, x.shape, ring.layout)
        sizes = [n // cut.get(a, 1) for a, n in zip(axes, x.shape, strict=True)]
        return jax.lax.dynamic_slice(x, starts(x.shape, axes, turn), sizes)

    def one(turn: Any, made: list[Any]) -> list[Any]:
        found = function({role: part(role, x, turn) for role, x in named.items()})
        return [
            jax.lax.dynamic_update_slice(whole, x, starts(whole.shape, axes, turn))
            for whole, x, axes in zip(made, found, places, strict=True)
        ]

    return tuple(jax.lax.fori_loop(0, turns[0] * turns[1], one, made))


def take(x: Any, ranges: tuple[slice, ...], choose: Any, axis: int) -> Any:
    """A range of an axis, or one of two."""
    lead = (slice(None),) * axis
    if choose is None:
        return x[(*lead, ranges[0])]
    return jnp.where(choose, x[(*lead, ranges[0])], x[(*lead, ranges[1])])


def add(total: Any, x: Any, ranges: tuple[slice, ...], choose: Any, axis: int) -> Any:
    """``total`` with x added where ``take`` took."""
    x = x.astype(total.dtype)
    if choose is None:
        return put(total, take(total, ranges, None, axis) + x, ranges[0], axis)
    zero = jnp.zeros_like(x)
    for i, part in enumerate((jnp.where(choose, x, zero), jnp.where(choose, zero, x))):
        total = put(total, take(total, ranges[i:], None, axis) + part, ranges[i], axis)
    return total


def put(total: Any, part: Any, rows: slice, axis: int) -> Any:
    """``total`` with a range of an axis replaced."""
    if part.shape == total.shape:
        return part
    total, part = vary_alike([total, part])
    return jax.lax.dynamic_update_slice_in_dim(total, part, rows.start, axis)


# ------------------------------------------------------------------------------------------------- forward
def _to_rows(x: Any, layout: str) -> Any:
    """A (batch, heads, seqlen) array as a factor of out's rows."""
    return (x.swapaxes(1, 2) if layout == "bshd" else x)[..., None]


def _combine(ring: _Ring, total: tuple[Any, Any], part: tuple[Any, Any], pair: _Pair) -> tuple[Any, Any]:
    """Running (out, lse) with a pair's merged in; out is in LSE's dtype."""
    out, lse = total
    for i, rows in enumerate(pair.rows):
        new_lse = part[1]
        if pair.choose is not None:
            new_lse = jnp.where(pair.choose if i == 0 else ~pair.choose, new_lse, -jnp.inf)
        old_lse = lse[:, :, rows]
        top = jnp.maximum(old_lse, new_lse)
        top = jnp.where(jnp.isneginf(top), 0.0, top)
        old, new = jnp.exp(old_lse - top), jnp.exp(new_lse - top)
        mass = old + new
        safe = jnp.where(mass == 0, 1.0, mass)
        old_out = take(out, (rows,), None, ring.axis) * _to_rows(old / safe, ring.layout)
        new_out = part[0].astype(out.dtype) * _to_rows(new / safe, ring.layout)
        out = put(out, old_out + new_out, rows, ring.axis)
        lse = put(lse, jnp.where(mass == 0, -jnp.inf, top + jnp.log(safe)), rows, 2)
    return out, lse


def _forward(ring: _Ring, named: dict[str, Any]) -> tuple[Any, Any]:
    q, heads = named["q"], 3 - ring.axis
    shape = q.shape[0], q.shape[heads], q.shape[ring.axis]
    wide = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    results = {"out": ((*q.shape[:3], named["v"].shape[3]), q.dtype), "lse": (shape, wide)}
    out, lse = _in_turns(ring, functools.partial(_forward_turn, ring), named, results)
    return out, lse


def _forward_turn(ring: _Ring, named: dict[str, Any]) -> tuple[Any, Any]:
    rows, keys = (named[n].shape[ring.axis] for n in "qk")
    moving = {n: named[n] for n in _MOVING if n in named}
    total = None
    shifts = ring.shifts(keys)
    for shift, following in zip(shifts, [*shifts[1:], None], strict=True):
        coming = {} if following is None else ring.move(moving, following - shift)
        for pair in ring.pairs(shift, rows, keys):
            parts, call = ring.one({**named, **moving}, pair)
            coming, found = _together(coming, primitives.attend(list(parts.values()), call))
            if total is None and pair.choose is None and pair.rows == (slice(0, rows),):
                total = found[0].astype(found[1].dtype), found[1]
                continue
            if total is None:
                total = _nothing(ring, named, found)
            total = _combine(ring, total, found, pair)
        moving = coming
    assert total is not None
    out, lse = total
    if "sinks" in named:
        sinks = named["sinks"][None, :, None]
        with_sink = jnp.where(jnp.isneginf(lse), -jnp.inf, jnp.logaddexp(lse, sinks))
        share = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - jnp.where(jnp.isneginf(lse), 0.0, with_sink)))
        out, lse = out * _to_rows(share, ring.layout), with_sink
    return out.astype(named["q"].dtype), lse


def _together(coming: dict[str, Any], found: Any) -> tuple[dict[str, Any], Any]:
    """Both as they are; XLA has the transfer run while ``found`` is computed, for neither is there before."""
    return jax.lax.optimization_barrier((coming, found)) if coming else (coming, found)


def _nothing(ring: _Ring, named: Mapping[str, Any], like: tuple[Any, Any]) -> tuple[Any, Any]:
    """(out, lse) of rows that have seen no key yet."""
    out, lse = like
    rows = named["q"].shape[ring.axis]
    shape = tuple(rows if i == ring.axis else n for i, n in enumerate(out.shape))
    empty = jnp.full((*lse.shape[:2], rows), -jnp.inf, lse.dtype)
    zero, empty, _ = vary_alike([jnp.zeros(shape, lse.dtype), empty, lse])
    return zero, empty


# ------------------------------------------------------------------------------------------------ backward
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, named: dict[str, Any]) -> tuple[Any, Any]:
    return _forward(ring, named)


def _attend_forward(ring: _Ring, named: dict[str, Any]) -> tuple[Any, Any]:
    wanted = {n: () for n, x in named.items() if x.perturbed}
    if "alibi_slopes" in wanted:
        raise argument_error(
            "alibi_slopes", "a value that is differentiated", "constants; wrap it in jax.lax.stop_gradient",
            kind=NotImplementedError,
        )  # fmt: skip
    values = {n: x.value for n, x in named.items()}
    out, lse = _forward(ring, values)
    out = checkpoint_name(out, primitives.OUT_NAME)
    lse = checkpoint_name(lse, primitives.LSE_NAME)
    return (out, lse), (wanted, values, out, lse)


def _attend_backward(ring: _Ring, residuals: Any, cotangents: Any) -> tuple[dict[str, Any]]:
    wanted, named, out, lse = residuals
    dout, dlse = (None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents)
    found: dict[str, Any] = dict.fromkeys(named)
    if dout is None and dlse is None:
        return (found,)
    dout = jnp.zeros_like(out) if dout is None else dout
    if wanted.keys() & {"q", "k", "v", "softmax_scale"}:
        asked = {n for n in "qkv" if n in wanted} | ({"q"} if "softmax_scale" in wanted else set())
        found |= _gradients(ring, named, out, lse, dout, dlse, tuple(n for n in "qkv" if n in asked))
    if "softmax_scale" in wanted:  # as in ``jax_primitives``
        q, scale = named["q"].astype(lse.dtype), named["softmax_scale"]
        found["softmax_scale"] = jnp.sum(q * found["q"].astype(lse.dtype)).astype(scale.dtype) / scale
    if "sinks" in wanted:
        delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), -1)
        delta = delta.swapaxes(1, 2) if ring.layout == "bshd" else delta
        delta = delta if dlse is None else delta - dlse
        empty = jnp.isneginf(lse)
        weight = jnp.where(empty, 0.0, jnp.exp(named["sinks"][None, :, None] - jnp.where(empty, 0.0, lse)))
        found["sinks"] = -jnp.sum(weight * delta, (0, 2)).astype(named["sinks"].dtype)
    return ({n: x if n in wanted else None for n, x in found.items()},)


def _gradients(
    ring: _Ring, named: dict[str, Any], out: Any, lse: Any, dout: Any, dlse: Any, wants: tuple[str, ...]
) -> dict[str, Any]:
    """Gradients of q, k and v: keys go round once more, what a device finds for others' goes home at once."""
    incoming = {"out": out, "lse": lse, "dout": dout} | ({} if dlse is None else {"dlse": dlse})
    results = {n: (named[n].shape, named[n].dtype) for n in wants}
    function = functools.partial(_gradients_turn, ring, wants)
    return dict(zip(wants, _in_turns(ring, function, named | incoming, results), strict=True))


def _gradients_turn(ring: _Ring, wants: tuple[str, ...], given: dict[str, Any]) -> tuple[Any, ...]:
    named = {n: x for n, x in given.items() if n not in ("out", "lse", "dout", "dlse")}
    rows, keys = (named[n].shape[ring.axis] for n in "qk")
    moving = {n: named[n] for n in _MOVING if n in named}
    sums = {n: jnp.zeros_like(named[n], given["lse"].dtype) for n in wants}
    shifts = ring.shifts(keys)
    for shift, following in zip(shifts, [*shifts[1:], None], strict=True):
        coming = {} if following is None else ring.move(moving, following - shift)
        for pair in ring.pairs(shift, rows, keys):
            parts, call = ring.one({**named, **moving}, pair)
            results = [take(given[n], pair.rows, pair.choose, ring.axis) for n in ("out", "dout")]
            along = [take(given[n], pair.rows, pair.choose, 2) for n in ("lse", "dlse") if n in given]
            everything = [*vary_alike([*parts.values(), *results, *along]), None]
            *operands, out, dout, lse, dlse = everything[: len(parts) + 4]
            found = primitives.pull_back(operands, out, lse, dout, dlse, call, wants)
            coming, found = _together(coming, found)
            gradients = dict(zip(wants, found, strict=True))
            if "q" in wants:
                dq = gradients.pop("q")
                sums["q"] = add(sums["q"], dq, pair.rows, pair.choose, ring.axis)
            if shift:
                gradients = ring.move(gradients, -shift)
            for name, x in gradients.items():
                sums[name] = add(sums[name], x, pair.keys, pair.home, ring.axis)
        moving = coming
    return tuple(sums[n].astype(named[n].dtype) for n in wants)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


# ------------------------------------------------------------------------------------------------- Ulysses
def ulysses_attention(q: Any, k: Any, v: Any, *, axis_name: Any, **options: Any) -> Any:
    """``cuattn.flash_attention`` of a sequence split over ``axis_name``, exchanged for a split of heads.

    Inside ``jax.shard_map``; arguments are this device's parts, as in ``ring_attention``, with the options of
    that function but ``zigzag``. An all-to-all gives each device the whole sequence of some of the heads
    (their number a multiple of the devices'; fewer heads of k and v are repeated), another brings out back.

    Returns out, or (out, lse) with ``return_lse``: this device's rows. Differentiable by JAX.

    Algorithm: Jacobs et al., "DeepSpeed Ulysses", 2023.
    """
    return_lse = options.pop("return_lse", False)
    batch_axis, head_axis = options.pop("batch_axis", None), options.pop("head_axis", None)
    layout = options.setdefault("layout", "bshd")
    names = ("alibi_slopes", "sinks", "q_segment_ids", "kv_segment_ids", "dropout_seed")
    named = {n: x for n in names if (x := options.pop(n, None)) is not None}
    if not options.get("dropout_p"):
        named.pop("dropout_seed", None)
    size = _axis_size(axis_name)
    rows, heads = (1, 2) if layout == "bshd" else (2, 1)
    count, count_kv = q.shape[heads], k.shape[heads]
    if count % size or (count_kv % size and size % count_kv):
        raise argument_error(
            "q" if count % size else "k",
            f"{count if count % size else count_kv} heads",
            f"a multiple of the {size} devices of {axis_name!r}; for others there is ring_attention",
        )
    if count_kv % size:
        k, v = (jnp.repeat(x, size // count_kv, heads) for x in (k, v))
    exchange = functools.partial(jax.lax.all_to_all, axis_name=axis_name, tiled=True)
    q, k, v = (exchange(x, split_axis=heads, concat_axis=rows) for x in (q, k, v))
    mine = count // size
    first = jax.lax.axis_index(axis_name) * mine
    for name in ("alibi_slopes", "sinks"):
        if name in named:
            named[name] = jax.lax.dynamic_slice_in_dim(named[name], first, mine, named[name].ndim - 1)
    for name in _POSITIONAL:
        if name in named:
            named[name] = jax.lax.all_gather(named[name], axis_name, axis=1, tiled=True)
    arrays, call = canonical({"q": q, "k": k, "v": v, **named}, {"q_offset": 0, **options})
    if "dropout_seed" in call.names:
        at = call.names.index("dropout_seed")
        whole = dict(zip(call.names, arrays, strict=True))
        seed = shift_dropout(_shift_entries(whole, batch_axis, None, layout), head=first)
        if head_axis is not None:
            seed = shift_dropout(seed, head=jax.lax.axis_index(head_axis) * count)
        arrays[at] = seed
        arrays = vary_alike(arrays)
    out, lse = primitives.attend(arrays, call)
    out = exchange(out, split_axis=rows, concat_axis=heads)
    if not return_lse:
        return out
    return out, exchange(lse, split_axis=2, concat_axis=1)
