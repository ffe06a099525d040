"""Plain softmax attention and its gradient in float64 NumPy: the oracle, written to be believed.

One head at a time, the whole (seqlen_q, seqlen_kv) score matrix in memory. No tiles, no speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import philox
from ..spec import GRADIENTS, AttentionSpec

Array = NDArray[Any]


@dataclass(frozen=True)
class Arithmetic:
    """The dtype that steps compute in, and the one that their results are rounded to."""

    dtype: Any
    rounded: Any

    def __call__(self, x: Array) -> Array:
        return np.asarray(x, self.rounded).astype(self.dtype, copy=False)


FLOAT64 = Arithmetic(np.float64, np.float64)


def own_arithmetic(dtype: Any) -> Arithmetic:
    """Plain attention in ``dtype`` itself, products summed in float32: what our errors are judged by."""
    return Arithmetic(np.float64 if dtype == np.float64 else np.float32, dtype)


@dataclass(frozen=True)
class _Head:
    """One (batch entry, query head) of a problem, in float64, cut to its real lengths."""

    batch: int
    head: int
    rows: slice  # of the q array's sequence axis
    columns: slice  # of the k array's
    scores: Array  # before softmax: -inf where hidden
    softcap_slope: Array | float  # d(capped score) / d(score)
    keep: Array | float  # dropout: 0 or 1/(1-p)

    @property
    def visible(self) -> Array:
        return np.asarray(self.scores != -np.inf)


def _to_bhsd(spec: AttentionSpec, x: Array) -> Array:
    """A view in (batch, heads, seqlen, dim); packed arrays get a batch of 1."""
    if spec.layout == "thd":
        return x.transpose(1, 0, 2)[None]
    return x.transpose(0, 2, 1, 3) if spec.layout == "bshd" else x


def _from_bhsd(spec: AttentionSpec, x: Array) -> Array:
    if spec.layout == "thd":
        return x[0].transpose(1, 0, 2)
    return x.transpose(0, 2, 1, 3) if spec.layout == "bshd" else x


def _lengths(spec: AttentionSpec, arrays: Mapping[str, Array], b: int) -> tuple[slice, slice]:
    """The rows and keys that batch entry (or packed sequence) b really has."""
    if spec.varlen:
        q0, q1 = (int(x) for x in arrays["cu_seqlens_q"][b : b + 2])
        k0, k1 = (int(x) for x in arrays["cu_seqlens_k"][b : b + 2])
        return slice(q0, q1), slice(k0, k1)
    q_len = int(arrays["q_seqlens"][b]) if spec.q_seqlens else spec.seqlen_q
    kv_len = int(arrays["kv_seqlens"][b]) if spec.kv_seqlens else spec.seqlen_kv
    return slice(0, min(q_len, spec.seqlen_q)), slice(0, min(kv_len, spec.seqlen_kv))


def _offset(spec: AttentionSpec, arrays: Mapping[str, Array], b: int, q_len: int, kv_len: int) -> int:
    if spec.q_offset == "array":
        return int(arrays["q_offset"][b])
    return kv_len - q_len if spec.q_offset == "bottom_right" else int(spec.q_offset)


def _broadcast(x: Array, spec: AttentionSpec) -> Array:
    return np.broadcast_to(x, (spec.batch, spec.heads_q, spec.seqlen_q, spec.seqlen_kv))


def _scale(spec: AttentionSpec, arrays: Mapping[str, Array]) -> float:
    if spec.softmax_scale is not None:
        return spec.softmax_scale
    return float(np.asarray(arrays["softmax_scale"], np.float64).reshape(()))


def _dropout_key(given: Any) -> list[int]:
    """Seed, and the first batch, head, row and column of this part of a whole."""
    found = np.asarray(given).reshape(-1).tolist()
    return found if len(found) == 5 else [found[0], 0, 0, 0, 0]


def _hidden(
    spec: AttentionSpec, arrays: Mapping[str, Array], head: tuple[int, int], distance: Array
) -> Array:
    """Which scores the window, the mask and the segments hide; ``distance`` is key - diagonal."""
    b, h = head
    hidden = np.zeros(distance.shape, bool)
    if spec.window_right >= 0:
        hidden |= distance > spec.window_right
    if spec.window_left >= 0:
        hidden |= -distance > spec.window_left
    rows, columns = distance.shape
    if spec.mask is not None:
        hidden |= ~_broadcast(np.asarray(arrays["mask"], bool), spec)[b, h, :rows, :columns]
    if spec.segments:
        q_ids, kv_ids = arrays["q_segment_ids"][b, :rows], arrays["kv_segment_ids"][b, :columns]
        hidden |= q_ids[:, None] != kv_ids[None, :]
    return hidden


def _heads(spec: AttentionSpec, arrays: Mapping[str, Array], rnd: Arithmetic) -> Iterator[_Head]:
    """The scores of each head, in the contract's order: scale, softcap, bias, ALiBi, masks."""
    q, k = (_to_bhsd(spec, np.asarray(arrays[n], rnd.dtype)) for n in "qk")
    scale = _scale(spec, arrays)
    seed, *first = _dropout_key(arrays["dropout_seed"]) if spec.dropout_p else (0,)
    for b in range(spec.batch):
        rows, columns = _lengths(spec, arrays, b)
        q_len, kv_len = rows.stop - rows.start, columns.stop - columns.start
        keep: Array | float = 1.0
        if spec.dropout_p:
            where = (first[0] + b, first[1], first[2], first[3])
            kept = philox.keep_mask(seed, spec.dropout_p, 1, spec.heads_q, q_len, kv_len, first=where)
            keep = kept[0] / (1.0 - spec.dropout_p)
        offset = _offset(spec, arrays, b, q_len, kv_len)
        distance = np.arange(kv_len)[None, :] - (np.arange(q_len)[:, None] + offset)
        for h in range(spec.heads_q):
            entry = 0 if spec.varlen else b
            scores = rnd(rnd(q[entry, h, rows] @ k[entry, h // spec.group, columns].T) * rnd.dtype(scale))
            slope: Array | float = 1.0
            if spec.softcap:
                tanh = rnd(np.tanh(scores / spec.softcap))
                scores, slope = rnd(spec.softcap * tanh), rnd(1.0 - tanh * tanh)
            if spec.bias is not None:
                bias = _broadcast(np.asarray(arrays["bias"], rnd.dtype), spec)
                bias = bias[b, h, :q_len, :kv_len]
                scores = np.where(bias == -np.inf, bias, rnd(scores + bias))  # hides NaN scores too
            if spec.alibi_slopes is not None:
                slopes = np.broadcast_to(arrays["alibi_slopes"], (spec.batch, spec.heads_q))
                scores = rnd(scores - rnd.dtype(slopes[b, h]) * np.abs(distance))
            scores = np.where(_hidden(spec, arrays, (b, h), distance), rnd.dtype(-np.inf), scores)
            yield _Head(b, h, rows, columns, scores, slope, keep[h] if isinstance(keep, np.ndarray) else keep)


def _softmax(
    spec: AttentionSpec, arrays: Mapping[str, Array], head: _Head, rnd: Arithmetic
) -> tuple[Array, Array]:
    """Weights before dropout and LSE of one head; a row that sees nothing gets zeros and -inf."""
    live = head.visible.any(axis=1)
    top = head.scores.max(axis=1, initial=-np.inf)
    sink = float(arrays["sinks"][head.head]) if spec.sinks is not None else -np.inf
    top = np.where(live, np.maximum(top, rnd.dtype(sink)), rnd.dtype(0))
    exps = np.where(head.visible, rnd(np.exp(rnd(head.scores - top[:, None]))), rnd.dtype(0))
    total = np.where(live, exps.sum(axis=1) + np.exp(rnd.dtype(sink) - top), rnd.dtype(1))
    lse = np.where(live, top + np.log(total), -np.inf)
    return rnd(exps / total[:, None]), lse


def attention(
    spec: AttentionSpec, arrays: Mapping[str, Array], rnd: Arithmetic = FLOAT64
) -> tuple[Array, Array]:
    """Out in the caller's layout and LSE (batch, heads, seqlen_q), or (heads, total_q) packed; float64.

    ``rnd`` other than float64 gives plain attention as that arithmetic does it. A query, key or value that
    nothing sees has no influence, NaN and inf included.
    """
    v = _to_bhsd(spec, np.asarray(arrays["v"], rnd.dtype))
    q_shape = _to_bhsd(spec, np.asarray(arrays["q"])).shape
    out = np.zeros((*q_shape[:3], spec.head_dim_v))
    lse = np.full(q_shape[:3], -np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        for head in _heads(spec, arrays, rnd):
            b = 0 if spec.varlen else head.batch
            weights, lse[b, head.head, head.rows] = _softmax(spec, arrays, head, rnd)
            seen = head.visible.any(axis=0, keepdims=True).T
            values = np.where(seen, v[b, head.head // spec.group, head.columns], rnd.dtype(0))
            out[b, head.head, head.rows] = rnd(rnd(weights * head.keep) @ values)
    return _from_bhsd(spec, out), lse[0] if spec.varlen else lse


def gradients(
    spec: AttentionSpec,
    arrays: Mapping[str, Array],
    dout: Array | None,
    dlse: Array | None = None,
    wants: frozenset[str] = frozenset(GRADIENTS),
    rnd: Arithmetic = FLOAT64,
) -> dict[str, Array]:
    """Gradients of sum(out * dout) + sum(lse * dlse), float64, for those of ``wants`` that the call has."""
    q, k, v = (_to_bhsd(spec, np.asarray(arrays[n], rnd.dtype)) for n in "qkv")
    douts = np.zeros((*q.shape[:3], spec.head_dim_v), rnd.dtype)
    if dout is not None:
        douts = _to_bhsd(spec, np.asarray(dout, rnd.dtype))
    dlses = np.zeros(q.shape[:3]) if dlse is None else np.asarray(dlse, rnd.dtype).reshape(q.shape[:3])
    scale = _scale(spec, arrays)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    bias_shape = spec.bias_shape or ()
    dbias = np.zeros((1,) * (4 - len(bias_shape)) + bias_shape)
    dsinks = np.zeros(spec.heads_q)
    with np.errstate(invalid="ignore", over="ignore"):
        for head in _heads(spec, arrays, rnd):
            b, h = 0 if spec.varlen else head.batch, head.head
            weights, lse = _softmax(spec, arrays, head, rnd)
            rows: Array = np.asarray(head.visible.any(axis=1, keepdims=True))
            columns: Array = np.asarray(head.visible.any(axis=0, keepdims=True)).T
            zero = rnd.dtype(0)
            head_q = np.where(rows, q[b, h, head.rows], zero)
            head_k = np.where(columns, k[b, h // spec.group, head.columns], zero)
            head_v = np.where(columns, v[b, h // spec.group, head.columns], zero)
            head_dout = np.where(rows, douts[b, h, head.rows], zero)
            dweights = rnd(rnd(head_dout @ head_v.T) * head.keep)
            head_out = rnd(rnd(weights * head.keep) @ head_v)
            # sum over keys of weight · its gradient = dout · out
            row_sum = (head_dout * head_out).sum(axis=1) - dlses[b, h, head.rows]
            row_sum = np.where(rows[:, 0], row_sum, 0.0)
            dscores = np.where(head.visible, rnd(weights * (dweights - row_sum[:, None])), zero)
            if spec.bias is not None:
                _add_reduced(dbias, dscores, head)
            if spec.sinks is not None:
                sink = float(arrays["sinks"][h])
                dsinks[h] -= (np.where(rows[:, 0], np.exp(sink - lse), 0.0) * row_sum).sum()
            dscores = np.where(head.visible, rnd(dscores * head.softcap_slope), zero)
            dq[b, h, head.rows] = rnd(scale * (dscores @ head_k))
            dk[b, h // spec.group, head.columns] += scale * (dscores.T @ head_q)
            dv[b, h // spec.group, head.columns] += rnd(weights * head.keep).T @ head_dout
    out = {"q": _from_bhsd(spec, dq), "k": _from_bhsd(spec, rnd(dk)), "v": _from_bhsd(spec, rnd(dv))}
    if spec.bias is not None:
        out["bias"] = dbias.reshape(bias_shape)
    if spec.sinks is not None:
        out["sinks"] = dsinks
    return {name: x for name, x in out.items() if name in wants}


def _add_reduced(dbias: Array, dscores: Array, head: _Head) -> None:
    """Add one head's score gradients to the bias gradient, summed over its broadcast axes."""
    target = dbias[min(head.batch, dbias.shape[0] - 1), min(head.head, dbias.shape[1] - 1)]
    rows, columns = dscores.shape
    if target.shape[0] == 1:
        dscores, rows = dscores.sum(axis=0, keepdims=True), 1
    if target.shape[1] == 1:
        dscores, columns = dscores.sum(axis=1, keepdims=True), 1
    target[:rows, :columns] += dscores


def unavailable() -> None:
    """NumPy is always there."""
    return None


def prepare(spec: AttentionSpec, device: int | None, wants: frozenset[str] | None) -> _Prepared:
    """A forward (``wants`` None) or backward in the caller's dtypes, on NumPy arrays."""
    return _Prepared(spec, wants)


@dataclass(frozen=True)
class _Prepared:
    spec: AttentionSpec
    wants: frozenset[str] | None

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        if self.wants is None:
            out, lse = attention(self.spec, arrays)
            return {
                "out": np.ascontiguousarray(out, arrays["v"].dtype),
                "lse": np.ascontiguousarray(lse, self.spec.accumulator),
            }
        found = gradients(self.spec, arrays, arrays["dout"], arrays.get("dlse"), self.wants)
        return {f"d{name}": np.asarray(x, arrays[name].dtype, order="C") for name, x in found.items()}
