"""Hopper's forward kernel (``kernels_cu/fwd_sm90.cu``): what it takes, its tiles, its program.

Pure: a spec and a device description in, a ``Program`` out. Nothing is compiled or allocated here. The
backward is in ``sm90_backward``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Memset, Program, TensorMap

if TYPE_CHECKING:
    from ..device import Device
    from ..spec import AttentionSpec, Operand

SHARED_MEMORY = 232_448  # bytes a block may have
ROWS_LIMIT = 1 << 29  # rows and offsets beyond this would overflow 32-bit coordinates
SECTION_BYTES = 32 << 20  # keys and values of heads worked on together: about half of L2
STRIDE, SNAKE, COUNTER = 0, 1, 2  # SCHEDULE in fwd_sm90.cu


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration of ``fwd_sm90.cu``; its macros' meaning is told there."""

    head_dim: int  # rounded up
    head_dim_v: int
    block_m: int
    block_n: int
    stages: int
    q_buffers: int
    pingpong: int
    poll: int
    schedule: int

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory, the slack for 1024-byte alignment included."""
        slab, slab_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        q = self.block_m * 128 * (max(slab, slab_v) if self.q_buffers == 2 else slab)
        kv = self.block_n * 128 * (slab + slab_v)
        return 1024 + self.q_buffers * (q + 64) + self.stages * (kv + 32)

    @property
    def threads(self) -> int:
        return 2 * self.block_m + 128


def _rounded(head_dim: int) -> int:
    return next(d for d in (64, 96, 128, 192, 256) if head_dim <= d)


def tile(spec: AttentionSpec) -> Tile:
    """The tile for a spec: registers (64 rows a warpgroup) and 227 KB of shared memory decide."""
    d, dv = _rounded(spec.head_dim), _rounded(spec.head_dim_v)
    lpt = _right(spec) and not _left(spec)
    schedule = SNAKE if lpt else STRIDE
    if d <= 64 and dv <= 64:
        return Tile(d, dv, 192, 128, 2, 2, 1, 1, schedule)  # three warpgroups hide MUFU behind each other
    if d <= 128 and dv <= 128:
        return Tile(d, dv, 128, 128, 2, 2, 1, 1, schedule)
    if d <= 192 and dv <= 128:
        return Tile(d, dv, 128, 128, 2, 1, 1, 1, schedule)  # no room for a second Q
    if d <= 192 and dv <= 192:
        return Tile(d, dv, 128, 112, 2, 1, 1, 1, schedule)
    return Tile(d, dv, 128, 80, 2, 1, 1, 1, schedule)  # O alone takes 128 registers


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why this family cannot take the spec, or None."""
    if device.arch != 90:
        return f"needs compute capability 9.0, the device has {device.arch / 10}"
    if spec.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, got {spec.dtype}"
    for name in ("bias", "mask"):
        if getattr(spec, name) is not None:
            return f"does not take {name}"
    if spec.segments:
        return "does not take segment ids"
    if spec.dropout_p > 0:
        return "does not take dropout"
    if spec.softmax_scale is None or spec.softmax_scale <= 0:
        return "needs a positive softmax_scale known beforehand"
    if spec.head_dim % 8 or spec.head_dim_v % 8:
        return f"TMA needs head dims that are multiples of 8, got {spec.head_dim} and {spec.head_dim_v}"
    if spec.head_dim > 256 or spec.head_dim_v > 256:
        return "takes head dims up to 256"
    for name in ("q", "k", "v"):
        reason = _unaligned(name, getattr(spec, name))
        if reason:
            return reason
    offset = spec.q_offset if isinstance(spec.q_offset, int) else 0
    if max(*(operand.shape[2] for operand in (spec.q, spec.k)), abs(offset)) >= ROWS_LIMIT:
        return f"takes fewer than {ROWS_LIMIT} rows"
    if 0 in spec.q.shape or 0 in spec.k.shape or 0 in spec.v.shape:
        return "needs arrays with elements"
    return None


def _unaligned(name: str, operand: Operand) -> str | None:
    if operand.align < 16:
        return f"TMA needs 16-byte aligned rows, {name}'s are aligned to {operand.align}"
    for size, stride in zip(operand.shape[:3], operand.strides[:3], strict=True):
        if size > 1 and (stride <= 0 or stride * 2 >= 1 << 40):
            return f"TMA needs positive strides, {name} has {operand.strides}"
    return None


def _right(spec: AttentionSpec) -> bool:
    """Whether the window's right side hides anything."""
    if spec.window_right < 0:
        return False
    return spec.variable or spec.seqlen_kv - 1 - _offset(spec) > spec.window_right


def _left(spec: AttentionSpec) -> bool:
    """Whether the window's left side hides anything."""
    if spec.window_left < 0:
        return False
    return spec.variable or spec.seqlen_q - 1 + _offset(spec) > spec.window_left


def _offset(spec: AttentionSpec) -> int:
    return spec.q_offset if isinstance(spec.q_offset, int) else spec.seqlen_kv - spec.seqlen_q


def _visible(spec: AttentionSpec) -> tuple[int, int]:
    """Keys [low, high) outside of which no query sees any; the K and V maps hold only these."""
    if spec.variable:
        return 0, spec.k.shape[2]
    low, high = 0, spec.seqlen_kv
    if _right(spec):
        high = min(high, spec.seqlen_q + _offset(spec) + spec.window_right)
    if _left(spec):
        low = max(low, _offset(spec) - spec.window_left)
    low = min(low, spec.seqlen_kv - 1)
    return low, max(high, low + 1)


def tensor_map(name: str, operand: Operand, rows: tuple[int, int], box_rows: int) -> TensorMap:
    """Map of rows [first, end) of a (batch, heads, rows, columns) operand, boxes of 64 columns."""
    size = 2
    batch, heads, _, columns = operand.shape
    stride_b, stride_h, stride_s, _ = (s * size for s in operand.strides)
    first, end = rows
    extents = ((end - first, stride_s), (heads, stride_h), (batch, stride_b))
    return TensorMap(
        buffer=name,
        dtype=operand.dtype,
        dims=(columns, *(extent for extent, _ in extents)),
        strides=tuple(stride if extent > 1 else 16 for extent, stride in extents),
        box=(64, box_rows, 1, 1),
        swizzle=128,
        offset=first * stride_s,
    )


def out_strides(spec: AttentionSpec) -> tuple[int, int, int]:
    """Batch, head and row strides (elements) of a C-contiguous out in the caller's layout."""
    h, s, d = spec.heads_q, spec.seqlen_q, spec.head_dim_v
    if spec.varlen:
        return 0, d, h * d
    return (h * s * d, s * d, d) if spec.layout == "bhsd" else (s * h * d, d, h * d)


def out_shape(spec: AttentionSpec) -> tuple[int, ...]:
    """Shape of out in the caller's layout."""
    if spec.varlen:
        return (spec.total_q, spec.heads_q, spec.head_dim_v)
    if spec.layout == "bhsd":
        return (spec.batch, spec.heads_q, spec.seqlen_q, spec.head_dim_v)
    return (spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v)


def _out_map(spec: AttentionSpec) -> TensorMap:
    stride_b, stride_h, stride_s = out_strides(spec)
    rows = spec.total_q if spec.varlen else spec.seqlen_q
    extents = (
        (rows, stride_s),
        (spec.heads_q, stride_h),
        (1 if spec.varlen else spec.batch, stride_b),
    )
    return TensorMap(
        buffer="out",
        dtype=spec.dtype,
        dims=(spec.head_dim_v, *(extent for extent, _ in extents)),
        strides=tuple(2 * stride if extent > 1 else 16 for extent, stride in extents),
        box=(64, 64, 1, 1),
        swizzle=128,
    )


def _defines(spec: AttentionSpec, t: Tile) -> tuple[tuple[str, int | str], ...]:
    left, right = _left(spec), _right(spec)
    return (
        ("DTYPE", int(spec.dtype == "bfloat16")),
        ("HEAD_DIM", t.head_dim),
        ("HEAD_DIM_V", t.head_dim_v),
        ("BLOCK_M", t.block_m),
        ("BLOCK_N", t.block_n),
        ("STAGES", t.stages),
        ("Q_BUFFERS", t.q_buffers),
        ("PINGPONG", t.pingpong),
        ("POLL", t.poll),
        ("SCHEDULE", t.schedule),
        ("LPT", int(right and not left)),
        ("HAS_LEFT", int(left)),
        ("HAS_RIGHT", int(right)),
        ("VARIABLE", int(spec.variable)),
        ("VARLEN", int(spec.varlen)),
        ("SOFTCAP", int(spec.softcap > 0)),
        ("ALIBI", int(spec.alibi_slopes is not None)),
        ("SINKS", int(spec.sinks is not None)),
    )


def _section(spec: AttentionSpec) -> int:
    """Query heads (over all entries) whose keys and values fit into a part of L2: a power of two of KV heads."""
    head_bytes = max(1, spec.seqlen_kv * (spec.head_dim + spec.head_dim_v) * 2)
    fitting = max(1, SECTION_BYTES // head_bytes)
    return int(min((1 << (fitting.bit_length() - 1)) * spec.group, spec.batch * spec.heads_q))


def _words(spec: AttentionSpec, t: Tile, tiles: int) -> dict[str, int | float]:
    stride_b, stride_h, stride_s = out_strides(spec)
    if isinstance(spec.q_offset, int):
        mode = params.OFFSET_VALUE
    elif spec.q_offset == "array":
        mode = params.OFFSET_ARRAY
    else:
        mode = params.OFFSET_BOTTOM_RIGHT
    assert spec.softmax_scale is not None
    words: dict[str, int | float] = {
        "batch": spec.batch, "heads_q": spec.heads_q, "heads_kv": spec.heads_kv,
        "seqlen_q": spec.seqlen_q, "seqlen_kv": spec.seqlen_kv,
        "head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v,
        "out_stride_b": stride_b, "out_stride_h": stride_h, "out_stride_s": stride_s,
        "lse_stride_b": 0 if spec.varlen else spec.heads_q * spec.seqlen_q,
        "lse_stride_h": spec.total_q if spec.varlen else spec.seqlen_q,
        "window_left": min(spec.window_left, ROWS_LIMIT), "window_right": min(spec.window_right, ROWS_LIMIT),
        "q_offset_mode": mode, "q_offset_value": 0 if mode == params.OFFSET_ARRAY else _offset(spec),
        "softmax_scale_value": spec.softmax_scale, "softcap": spec.softcap,
        "aux0": -(-spec.seqlen_q // t.block_m), "aux1": _section(spec), "aux2": tiles, "aux3": _visible(spec)[0],
    }  # fmt: skip
    if spec.alibi_slopes is not None:
        words["alibi_slopes_stride_b"] = spec.alibi_slopes.strides[0]
    return words


def _extra_operands(spec: AttentionSpec) -> tuple[str, ...]:
    """Operands that the kernel reads through plain pointers."""
    present = {
        "alibi_slopes": spec.alibi_slopes is not None,
        "sinks": spec.sinks is not None,
        "q_seqlens": spec.q_seqlens,
        "kv_seqlens": spec.kv_seqlens,
        "q_offset": spec.q_offset == "array",
        "cu_seqlens_q": spec.varlen,
        "cu_seqlens_k": spec.varlen,
    }
    return tuple(name for name, there in present.items() if there)


def forward(spec: AttentionSpec, device: Device, t: Tile | None = None) -> Program:
    """The forward program of a spec that ``refuses`` does not refuse; ``t`` overrides the tile."""
    t = t or tile(spec)
    assert t.shared_memory <= SHARED_MEMORY, t
    tiles = -(-spec.seqlen_q // t.block_m) * spec.heads_q * spec.batch
    rows = _visible(spec)
    extra = _extra_operands(spec)
    pointers = (("out", "out"), ("lse", "lse"), *((name, name) for name in extra))
    workspace: tuple[Buffer, ...] = ()
    steps: tuple[Launch | Memset, ...] = ()
    if t.schedule == COUNTER:
        workspace = (Buffer("semaphore", (2,), "int32"),)
        pointers = (*pointers, ("semaphore", "semaphore"))
        steps = (Memset("semaphore"),)
    launch = Launch(
        kernel=Kernel("fwd_sm90", "fwd_sm90", _defines(spec, t)),
        grid=(min(tiles, device.sm_count), 1, 1),
        block=t.threads,
        shared_memory=t.shared_memory,
        block_words=params.pack(_words(spec, t, tiles)),
        pointers=pointers,
        tensor_maps=(
            tensor_map("q", spec.q, (0, spec.q.shape[2]), t.block_m),
            tensor_map("k", spec.k, rows, t.block_n),
            tensor_map("v", spec.v, rows, t.block_n),
            _out_map(spec),
        ),
    )
    lse_shape = (spec.heads_q, spec.total_q) if spec.varlen else (spec.batch, spec.heads_q, spec.seqlen_q)
    return Program(
        inputs=("q", "k", "v", *extra),
        outputs=(Buffer("out", out_shape(spec), spec.dtype), Buffer("lse", lse_shape, "float32")),
        workspace=workspace,
        steps=(*steps, launch),
    )
