"""What is asked of one attention call: validated once, canonical, hashable, free of arrays and devices.

Every later layer (plan, backends, JAX) reads an ``AttentionSpec`` and trusts it: it asserts, never repairs.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int32": 4, "int64": 8}
PRECISIONS = ("highest", "tf32", "bf16")
GRADIENTS = ("q", "k", "v", "bias", "sinks")  # operands that can want a gradient


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
    q_offset: int | str  # a value, "array" (operand "q_offset"), or "bottom_right" (kv length - q length, per entry)
    dropout_p: float
    dropout_seed: int | None  # None with dropout_p > 0: read from the operand "dropout_seed" (int64, one element)
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
