"""What is asked of one attention call: validated once, canonical, hashable, free of arrays and devices.

``bind`` turns array signatures and options into an ``AttentionSpec``. Every later layer (plan, backends,
JAX) reads the spec and trusts it: it asserts, never repairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .errors import argument_error

DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int32": 4, "int64": 8}
PRECISIONS = ("highest", "tf32", "bf16")
LAYOUTS = ("bshd", "bhsd")
GRADIENTS = ("q", "k", "v", "bias", "sinks")  # operands that can want a gradient
MAX_HEAD_DIM = 256


class Signature(NamedTuple):
    """What ``bind`` needs to know of an array: strides in elements, ``align`` as in ``Operand``."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    align: int = 16


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Operand:
    """One array as kernels see it, in canonical axis order.

    q and k are (batch, heads, seqlen, head_dim), v likewise with head_dim_v; packed (varlen) ones have
    batch 1. bias and mask are (batch, heads_q, seqlen_q, seqlen_kv) where a broadcast axis keeps its full
    size and stride 0. ``strides`` count elements. ``align`` is the largest power of two, 16 at most, that
    divides the address and every stride but the last axis's, in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    align: int = 16


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention problem. ``None`` in an operand's place means that the call does not have it."""

    dtype: str
    batch: int  # varlen: number of sequences
    heads_q: int
    heads_kv: int
    seqlen_q: int  # varlen: the longest sequence
    seqlen_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float | None  # None: read from the operand "softmax_scale" (float32, one element)
    window_left: int  # keys seen before the diagonal's; -1: open
    window_right: int  # keys seen after it; causal is 0; -1: open
    softcap: float
    q_offset: (
        int | str
    )  # a value, "array" (operand "q_offset"), or "bottom_right" (kv length - q length, per entry)
    dropout_p: float  # above 0 there is the operand "dropout_seed": int64 words, see philox.cuh
    deterministic: bool
    precision: str
    layout: str  # "bshd", "bhsd", or "thd" for packed sequences
    q: Operand
    k: Operand
    v: Operand
    bias: Operand | None = None
    bias_shape: tuple[int, ...] | None = None  # as given, before broadcasting
    mask: Operand | None = None
    alibi_slopes: Operand | None = None  # (batch, heads_q); stride 0 over batch for (heads_q,)
    sinks: Operand | None = None
    segments: bool = False
    q_seqlens: bool = False
    kv_seqlens: bool = False
    varlen: bool = False
    total_q: int = 0  # varlen: rows in the packed arrays
    total_kv: int = 0
    dout: Operand | None = (
        None  # backward: the incoming gradient's layout; None: C-contiguous in the caller's layout
    )
    dlse: bool = False  # backward: LSE has an incoming gradient (C-contiguous, LSE's shape)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def accumulator(self) -> str:
        """dtype of LSE, sinks, slopes and sums: float64 for float64 inputs, float32 otherwise."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def masked(self) -> bool:
        """Whether a window (causal included) hides keys by position."""
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def variable(self) -> bool:
        """Whether lengths or offsets differ between batch entries and are read from arrays."""
        return self.varlen or self.q_seqlens or self.kv_seqlens or self.q_offset == "array"

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no query rows, or no keys for them to see."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_kv, self.heads_q)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out in the caller's layout."""
        return self.shape_of(self.heads_q, self.seqlen_q, self.total_q, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, heads_q, seqlen_q), or (heads_q, total_q) for packed sequences."""
        return (self.heads_q, self.total_q) if self.varlen else (self.batch, self.heads_q, self.seqlen_q)

    def gradient_shape(self, name: str) -> tuple[int, ...]:
        """Shape, in the caller's layout, of the gradient of ``name`` (one of ``GRADIENTS``)."""
        if name == "bias":
            assert self.bias_shape is not None
            return self.bias_shape
        if name == "sinks":
            return (self.heads_q,)
        if name == "q":
            return self.shape_of(self.heads_q, self.seqlen_q, self.total_q, self.head_dim)
        dim = self.head_dim if name == "k" else self.head_dim_v
        return self.shape_of(self.heads_kv, self.seqlen_kv, self.total_kv, dim)

    def gradient_dtype(self, name: str) -> str:
        """dtype of the gradient of ``name``: the operand's own."""
        operand: Operand | None = getattr(self, name)
        assert operand is not None, name
        return operand.dtype

    def shape_of(self, heads: int, seqlen: int, total: int, dim: int) -> tuple[int, ...]:
        """A q-like array's shape in the caller's layout."""
        if self.layout == "thd":
            return (total, heads, dim)
        if self.layout == "bshd":
            return (self.batch, seqlen, heads, dim)
        return (self.batch, heads, seqlen, dim)

    def strides_of(self, heads: int, seqlen: int, dim: int) -> tuple[int, int, int]:
        """(batch, head, sequence) strides, in elements, of a C-contiguous q-like array in the layout."""
        if self.layout == "thd":
            return 0, dim, heads * dim
        if self.layout == "bshd":
            return seqlen * heads * dim, dim, heads * dim
        return heads * seqlen * dim, seqlen * dim, dim


def canonical(signature: Signature, layout: str) -> Operand:
    """q, k, v or dout in (batch, heads, seqlen, dim) order."""
    dtype, shape, strides, align = signature
    if layout == "thd":
        shape, strides, order = (1, *shape), (0, *strides), (0, 2, 1, 3)
    else:
        order = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
    return Operand(dtype, tuple(shape[i] for i in order), tuple(strides[i] for i in order), align)


def _broadcast(name: str, signature: Signature, target: tuple[int, ...]) -> Operand:
    """``signature`` broadcast to ``target`` by strides of 0."""
    shape, strides = signature.shape, signature.strides
    if len(shape) > len(target) or any(
        n not in (1, m) for n, m in zip(shape[::-1], target[::-1], strict=False)
    ):
        raise argument_error(
            name,
            f"shape {shape}",
            f"a shape that broadcasts to (batch, heads_q, seqlen_q, seqlen_kv) = {target}",
        )
    lead = len(target) - len(shape)
    full = [0] * lead + [
        0 if n == 1 and m != 1 else s for n, s, m in zip(shape, strides, target[lead:], strict=True)
    ]
    return Operand(signature.dtype, target, tuple(full), signature.align)


def _qkv(arrays: Mapping[str, Signature], layout: str) -> tuple[Operand, Operand, Operand]:
    """q, k and v, checked against each other."""
    axes = {"thd": "(total, heads, head_dim)", "bshd": "(batch, seqlen, heads, head_dim)"}
    wanted = axes.get(layout, "(batch, heads, seqlen, head_dim)")
    for name in "qkv":
        signature = arrays[name]
        if signature.dtype not in DTYPES:
            raise argument_error(name, f"dtype {signature.dtype}", " or ".join(DTYPES), kind=TypeError)
        if len(signature.shape) != (3 if layout == "thd" else 4):
            raise argument_error(name, f"shape {signature.shape}", wanted)
        if signature.dtype != arrays["q"].dtype:
            raise argument_error(
                name, f"dtype {signature.dtype}", f"q's dtype {arrays['q'].dtype}", kind=TypeError
            )
    q, k, v = (canonical(arrays[name], layout) for name in "qkv")
    for name, operand in (("k", k), ("v", v)):
        if operand.shape[0] != q.shape[0]:
            raise argument_error(name, f"batch {operand.shape[0]}", f"q's batch {q.shape[0]}")
    if v.shape[1] != k.shape[1]:
        raise argument_error("v", f"{v.shape[1]} heads", f"k's {k.shape[1]} heads")
    if v.shape[2] != k.shape[2]:
        raise argument_error("v", f"sequence length {v.shape[2]}", f"k's sequence length {k.shape[2]}")
    if q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise argument_error("k", f"{k.shape[1]} heads", f"a number of heads that divides q's {q.shape[1]}")
    if k.shape[3] != q.shape[3]:
        raise argument_error("k", f"head_dim {k.shape[3]}", f"q's head_dim {q.shape[3]}")
    for name, dim in (("q", q.shape[3]), ("v", v.shape[3])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise argument_error(name, f"head_dim {dim}", f"1 to {MAX_HEAD_DIM}")
    return q, k, v


def _window(causal: bool, window_size: object) -> tuple[int, int]:
    """(left, right) with -1 for an open side."""
    left, right = -1, -1
    if window_size is not None:
        takes = "None or (left, right): key counts from 0 on, -1 or None for an open side"
        if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
            raise argument_error("window_size", repr(window_size), takes)
        sides = []
        for side in window_size:
            side = -1 if side is None else side
            if not _is_int(side) or side < -1:
                raise argument_error("window_size", repr(window_size), takes)
            sides.append(int(side))
        left, right = sides
    return left, 0 if causal else right


def _is_int(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _number(name: str, value: object, takes: str, low: float, high: float) -> float:
    """A finite Python float in [low, high)."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise argument_error(name, repr(value), takes, kind=TypeError) from None
    if not math.isfinite(number) or not low <= number < high:
        raise argument_error(name, repr(value), takes)
    return number


def _check_vector(
    arrays: Mapping[str, Signature], name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]
) -> bool:
    """Check an optional small operand's shape and dtype; whether the call has it."""
    if name not in arrays:
        return False
    signature = arrays[name]
    if signature.shape not in shapes:
        raise argument_error(name, f"shape {signature.shape}", " or ".join(str(s) for s in shapes))
    if signature.dtype not in dtypes:
        raise argument_error(name, f"dtype {signature.dtype}", " or ".join(dtypes), kind=TypeError)
    return True


def _lengths(
    arrays: Mapping[str, Signature], layout: str, q: Operand, k: Operand, max_q: int | None, max_k: int | None
) -> tuple[int, int, int]:
    """(batch, seqlen_q, seqlen_kv); for packed arrays from cu_seqlens and the longest sequences."""
    if layout != "thd":
        return q.shape[0], q.shape[2], k.shape[2]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        signature = arrays[name]
        if len(signature.shape) != 1 or signature.shape[0] < 1:
            raise argument_error(name, f"shape {signature.shape}", "(batch + 1,)")
        if signature.dtype != "int32":
            raise argument_error(name, f"dtype {signature.dtype}", "int32", kind=TypeError)
    batch = arrays["cu_seqlens_q"].shape[0] - 1
    if arrays["cu_seqlens_k"].shape != (batch + 1,):
        raise argument_error(
            "cu_seqlens_k", f"shape {arrays['cu_seqlens_k'].shape}", f"cu_seqlens_q's ({batch + 1},)"
        )
    longest = []
    for name, value, total in (("max_seqlen_q", max_q, q.shape[2]), ("max_seqlen_k", max_k, k.shape[2])):
        if value is not None and (not _is_int(value) or value < 0):
            raise argument_error(name, repr(value), "an int from 0 on, or None", kind=TypeError)
        longest.append(total if value is None else min(int(value), total))
    return batch, longest[0], longest[1]


def bind(
    arrays: Mapping[str, Signature],
    *,
    causal: bool = False,
    window_size: object = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    q_offset: int | None = None,
    dropout_p: float = 0.0,
    layout: str = "bshd",
    deterministic: bool = False,
    precision: str | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> AttentionSpec:
    """Validate a call and make it canonical.

    ``arrays`` holds a signature for each array operand under its name, the canonical dtypes already in
    place (int32 for lengths, offsets and segment ids; bool for the mask); "softmax_scale", "q_offset" and
    "dropout_seed" are there when they are arrays. ``layout`` "thd" means packed sequences with
    ``cu_seqlens_q`` and ``cu_seqlens_k`` in ``arrays``.

    Raises ``ValueError`` or ``TypeError`` that names the argument, what it got and what it takes.
    """
    if layout not in (*LAYOUTS, "thd"):
        raise argument_error("layout", repr(layout), " or ".join(map(repr, LAYOUTS)))
    q, k, v = _qkv(arrays, layout)
    batch, seqlen_q, seqlen_kv = _lengths(arrays, layout, q, k, max_seqlen_q, max_seqlen_k)
    heads_q, heads_kv = q.shape[1], k.shape[1]
    dtype = q.dtype
    accumulator = "float64" if dtype == "float64" else "float32"
    left, right = _window(causal, window_size)
    if precision is not None and precision not in PRECISIONS:
        raise argument_error("precision", repr(precision), "None or " + " or ".join(map(repr, PRECISIONS)))
    if precision not in (None, "highest") and dtype != "float32":
        raise argument_error(
            "precision", repr(precision), f"'highest' for {dtype} inputs (others are for float32)"
        )
    softcap = _number("softcap", softcap, "a finite float from 0 on (0: no cap)", 0.0, math.inf)
    dropout_p = _number("dropout_p", dropout_p, "a float in [0, 1)", 0.0, 1.0)
    if dropout_p and "dropout_seed" not in arrays:
        raise argument_error("dropout_seed", "None", "an int, since dropout_p is above 0")
    scale: float | None
    if "softmax_scale" in arrays:
        _check_vector(arrays, "softmax_scale", ((), (1,)), ("float32",))
        scale = None
    elif softmax_scale is None:
        scale = 1.0 / math.sqrt(q.shape[3])
    else:
        scale = _number("softmax_scale", softmax_scale, "a finite float", -math.inf, math.inf)
    offset: int | str = "bottom_right"
    if _check_vector(arrays, "q_offset", ((batch,),), ("int32",)):
        offset = "array"
    elif q_offset is not None:
        if not _is_int(q_offset):
            raise argument_error("q_offset", repr(q_offset), "an int, (batch,) ints or None", kind=TypeError)
        offset = int(q_offset)
    q_seqlens = _check_vector(arrays, "q_seqlens", ((batch,),), ("int32",))
    kv_seqlens = _check_vector(arrays, "kv_seqlens", ((batch,),), ("int32",))
    if offset == "bottom_right" and not (q_seqlens or kv_seqlens or layout == "thd"):
        offset = seqlen_kv - seqlen_q
    if not (left >= 0 or right >= 0 or "alibi_slopes" in arrays):
        offset = 0  # nothing depends on it: one spec, one kernel
    segments = _check_vector(arrays, "q_segment_ids", ((batch, seqlen_q),), ("int32",))
    if segments != _check_vector(arrays, "kv_segment_ids", ((batch, seqlen_kv),), ("int32",)):
        missing = "kv_segment_ids" if segments else "q_segment_ids"
        raise argument_error(missing, "None", "an array: q_segment_ids and kv_segment_ids come together")
    target = (batch, heads_q, seqlen_q, seqlen_kv)
    bias = mask = alibi = sinks = None
    if "bias" in arrays:
        if arrays["bias"].dtype not in (dtype, "float32"):
            raise argument_error(
                "bias", f"dtype {arrays['bias'].dtype}", f"q's {dtype} or float32", kind=TypeError
            )
        bias = _broadcast("bias", arrays["bias"], target)
    if "mask" in arrays:
        if arrays["mask"].dtype != "bool":
            raise argument_error(
                "mask", f"dtype {arrays['mask'].dtype}", "bool (True = attend)", kind=TypeError
            )
        mask = _broadcast("mask", arrays["mask"], target)
    if _check_vector(arrays, "alibi_slopes", ((heads_q,), (batch, heads_q)), (accumulator,)):
        shape, strides = arrays["alibi_slopes"].shape, arrays["alibi_slopes"].strides
        stride_b = strides[0] if len(shape) == 2 else 0
        alibi = Operand(accumulator, (batch, heads_q), (stride_b, strides[-1]))
    if _check_vector(arrays, "sinks", ((heads_q,),), (accumulator,)):
        sinks = Operand(accumulator, (heads_q,), arrays["sinks"].strides)
    return AttentionSpec(
        dtype=dtype, batch=batch, heads_q=heads_q, heads_kv=heads_kv, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv,
        head_dim=q.shape[3], head_dim_v=v.shape[3], softmax_scale=scale, window_left=left, window_right=right,
        softcap=softcap, q_offset=offset, dropout_p=dropout_p, deterministic=bool(deterministic),
        precision=precision or "highest", layout=layout, q=q, k=k, v=v, bias=bias,
        bias_shape=arrays["bias"].shape if bias is not None else None,
        mask=mask, alibi_slopes=alibi, sinks=sinks,
        segments=segments, q_seqlens=q_seqlens, kv_seqlens=kv_seqlens, varlen=layout == "thd",
        total_q=q.shape[2] if layout == "thd" else 0, total_kv=k.shape[2] if layout == "thd" else 0,
    )  # fmt: skip
