"""Hopper's forward kernel (``kernels_cu/fwd_sm90.cu``): what it takes, its tiles, its program.

Pure: a spec and a device description in, a ``Program`` out. Nothing is compiled or allocated here. The
backward is in ``sm90_backward``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Program, TensorMap
from . import common
from .sm90_bias import bias_map, fits_tma
from .sm90_mask import keys_only, mask_pass

if TYPE_CHECKING:
    from ..device import Device
    from ..spec import AttentionSpec, Operand

SHARED_MEMORY = 232_448  # bytes a block may have
ROWS_LIMIT = 1 << 29  # rows and offsets beyond this would overflow 32-bit coordinates
STRIDE, COUNTER = 0, 1  # SCHEDULE in fwd_sm90.cu
WIDE_CAP = 30.0  # softcaps from here on: nearly all scores lie within 0.85 of the cap
SHORT_CAUSAL = 1536  # keys; smaller tiles won at 1k and lost at 2k


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
    schedule: int
    early_exps: int = 0
    bias_tiles: int = 0
    mask_first: int = 0
    q_apart: int = 0

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory, the slack for 1024-byte alignment included."""
        slab, slab_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        q = self.block_m * 128 * (max(slab, slab_v) if self.q_buffers > 1 else slab)
        kv = self.block_n * 128 * (slab + slab_v)
        words = (self.stages + 1) * (self.block_m + 8)  # which keys each warp's rows see
        # of 16 bits in each of two stages, or one of float32
        bias = 2 * self.block_m * self.block_n * self.bias_tiles
        words += 64 * self.q_apart + 32 * self.bias_tiles
        return 1024 + self.q_buffers * (q + 64) + self.stages * (kv + bias + 36) + words

    @property
    def threads(self) -> int:
        """A producer warpgroup and a consumer warpgroup for 64 rows each."""
        return 2 * self.block_m + 128


def rounded(head_dim: int) -> int:
    """The head dim that a kernel is compiled for."""
    return next(d for d in (64, 96, 128, 192, 256) if head_dim <= d)


def tile_count(spec: AttentionSpec, block_m: int) -> int:
    """Tiles of ``block_m`` rows of all heads."""
    return -(-spec.seqlen_q // block_m) * spec.heads_q * spec.batch


def _few_rows(spec: AttentionSpec, device: Device) -> bool:
    """Whether 128 rows a tile leave SMs idle, or most of a tile's rows empty; then 64 are better."""
    uneven = common.hides_right(spec) and spec.seqlen_q > 128  # the longest tile then decides
    if max(spec.head_dim, spec.head_dim_v) > 128 and not featured(spec):
        uneven = False  # products decide, and those of 64 rows read as much of K and V
    return spec.seqlen_q <= 64 or tile_count(spec, 128) <= device.sm_count // (1 if uneven else 2)


def tile(spec: AttentionSpec, device: Device) -> Tile:
    """The tile for a spec: registers (64 rows a warpgroup) and 227 KB of shared memory decide.

    What is not forced by them was measured; see docs/performance/hopper_forward.md.
    """
    d, dv = rounded(spec.head_dim), rounded(spec.head_dim_v)
    equal = not (common.hides_right(spec) or common.hides_left(spec) or spec.variable)
    few = _few_rows(spec, device)
    rows, pair = (64, 0) if few else (128, 1)  # where warpgroups come in pairs, they take turns
    early = {64: 0, 96: 2}.get(max(d, dv), 3)  # exponentials that P V, longer with wide heads, hides
    if _cap_terms(spec) == 3:
        early = 1
    if featured(spec):
        found = _featured_tile(spec, d, dv, rows)
    elif max(d, dv) <= 128 and few:
        found = Tile(d, dv, 64, 128, 2, 3, 0, COUNTER, early_exps=early)
    elif max(d, dv) <= 64 and common.hides_right(spec) and spec.seqlen_kv <= SHORT_CAUSAL:
        found = Tile(d, dv, 128, 128, 3, 3, 1, COUNTER, early_exps=1)
    elif max(d, dv) <= 64:  # three warpgroups hide exponentials behind each other
        # where warpgroups leave out blocks some are ahead of others
        stages = 4 if common.hides_right(spec) or common.hides_left(spec) else 3
        found = Tile(d, dv, 192, 128, stages, 3, 1, COUNTER, early_exps=early)
    elif max(d, dv) <= 128:
        found = Tile(d, dv, 128, 128, 2, 3, 0, COUNTER, early_exps=early)
    elif dv <= 128 and d <= 192:
        found = Tile(d, dv, rows, 128, 2, 1, pair, COUNTER, early_exps=1)  # no room for a second Q
    elif max(d, dv) <= 192:
        found = Tile(d, dv, rows, 112, 2, 1, pair, COUNTER, early_exps=1, q_apart=0 if equal else pair)
    else:  # O alone takes 128 registers
        found = Tile(d, dv, rows, 80, 2, 1, pair, COUNTER, early_exps=2, q_apart=pair)
    found = replace(found, mask_first=int(common.hides_left(spec) or 64 < max(d, dv) <= 128))
    if found.block_m == 128 and _alibi_sided(spec, found):
        found = replace(found, pingpong=1)
    if equal or tile_count(spec, found.block_m) <= device.sm_count:  # nothing to balance, or one tile a block
        found = replace(found, schedule=STRIDE)
    return found


def _featured_tile(spec: AttentionSpec, d: int, dv: int, block_m: int) -> Tile:
    """Scores with operands of their own: 160 registers of three warpgroups would be too few."""
    if max(d, dv) > 128:
        return _wide_featured_tile(spec, d, dv, block_m)
    wide = max(d, dv) > 64
    # with 128 head dims a bias leaves room for one Q: in shared memory, or where it lies in registers, there
    q_buffers = 1 if spec.bias is not None and wide and block_m > 64 else 3
    stages = 3 if not wide and spec.bias is None else 2
    early = 3 if wide and spec.mask is None and spec.dropout_p == 0 else 0
    bias_tiles = fits_tma(spec.bias)
    if spec.bias is not None and not bias_tiles:
        early = 0  # registers: the bias is in them
    one = int(q_buffers == 1)
    found = Tile(d, dv, block_m, 128, stages, q_buffers, one, COUNTER, early_exps=early, q_apart=one)
    return replace(found, bias_tiles=int(bias_tiles))


def _wide_featured_tile(spec: AttentionSpec, d: int, dv: int, block_m: int) -> Tile:
    """One Q; 64 keys a step leave room for a bias, and 128 are too many beside it or at 256 head dims."""
    block_n = 128 if d <= 192 and dv <= 128 and spec.bias is None and spec.dropout_p == 0 else 64
    early = 2 if spec.bias is not None and spec.bias.dtype == spec.dtype else 0
    pair = int(block_m > 64)
    found = Tile(d, dv, block_m, block_n, 2, 1, pair, COUNTER, early_exps=early, q_apart=pair)
    return replace(found, bias_tiles=int(fits_tma(spec.bias)))


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why this family cannot take the spec, or None."""
    if device.arch != 90:
        return f"needs compute capability 9.0, the device has {device.arch / 10}"
    if spec.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, got {spec.dtype}"
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


def featured(spec: AttentionSpec) -> bool:
    """Whether scores need operands of their own, or weights random numbers."""
    return spec.bias is not None or spec.mask is not None or spec.segments or spec.dropout_p > 0


def _pairs(spec: AttentionSpec) -> bool:
    """Whether the bias can be read two columns at once."""
    bias = spec.bias
    if bias is None or bias.strides[3] != 1 or spec.seqlen_kv % 2:
        return False
    size = 4 if bias.dtype == "float32" else 2
    return bias.align >= 2 * size and all(stride % 2 == 0 for stride in bias.strides[:3])


def _cap_terms(spec: AttentionSpec) -> int:
    """Terms of softcap's polynomial; a small cap's scores come closer to it and need a wider range.

    None with wide heads, whose products take longer than tanh, nor where lengths vary: which way a warp goes
    depends on all of its rows, and those beyond a length may be anything.
    """
    unfit = max(spec.head_dim, spec.head_dim_v) > 128 or spec.variable
    return 0 if spec.softcap == 0 or unfit else 3 if spec.softcap >= WIDE_CAP else 5


def _bias_of_keys(spec: AttentionSpec) -> bool:
    """Whether the bias is the same for all queries."""
    return spec.bias is not None and spec.bias.strides[2] == 0


def _bias_maps(spec: AttentionSpec, t: Tile) -> tuple[TensorMap, ...]:
    """Map of the bias, if TMA brings it; of float32 by warpgroups."""
    if not t.bias_tiles or spec.bias is None:
        return ()
    return (bias_map("bias", spec.bias, t.block_m if spec.bias.dtype == spec.dtype else 64),)


def visible_keys(spec: AttentionSpec) -> tuple[int, int]:
    """Keys [low, high) outside of which no query sees any; the K and V maps hold only these."""
    if spec.variable:
        return 0, spec.k.shape[2]
    low, high = 0, spec.seqlen_kv
    if common.hides_right(spec):
        high = min(high, spec.seqlen_q + common.offset(spec) + spec.window_right)
    if common.hides_left(spec):
        low = max(low, common.offset(spec) - spec.window_left)
    low = min(low, spec.seqlen_kv - 1)
    return low, max(high, low + 1)


def tensor_map(
    name: str, operand: Operand, rows: tuple[int, int], box_rows: int, box_heads: int = 1
) -> TensorMap:
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
        box=(64, box_rows, box_heads, 1),
        swizzle=128,
        offset=first * stride_s,
    )


def out_map(spec: AttentionSpec) -> TensorMap:
    """Map of out, boxes of 16 rows and 64 columns."""
    stride_b, stride_h, stride_s = spec.strides_of(spec.heads_q, spec.seqlen_q, spec.head_dim_v)
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
        box=(64, 16, 1, 1),
        swizzle=128,
    )


def kernel_defines(spec: AttentionSpec, t: Tile) -> tuple[tuple[str, int | str], ...]:
    """The macros of ``fwd_sm90.cu``."""
    found = {name: value for name, value in common.defines(spec).items() if name != "ANY_SCALE"}
    found |= {"HEAD_DIM": t.head_dim, "HEAD_DIM_V": t.head_dim_v, "BLOCK_M": t.block_m, "BLOCK_N": t.block_n}
    found |= {"STAGES": t.stages, "Q_BUFFERS": t.q_buffers, "PINGPONG": t.pingpong}
    found |= {"SCHEDULE": t.schedule, "LPT": int(common.hides_right(spec) and not common.hides_left(spec))}
    found |= {"EARLY_EXPS": t.early_exps, "MASK_FIRST": t.mask_first, "Q_APART": t.q_apart}
    found |= {"LOOP_MASKS": int(_loop_masks(spec, t)), "PAIRS": int(_pairs(spec)), "BIAS_TILES": t.bias_tiles}
    found |= {"SPLIT": 0}
    found |= {"KEYS_ONLY": int(keys_only(spec)), "BIAS_OF_KEYS": int(_bias_of_keys(spec))}
    found |= {"CAP_TERMS": _cap_terms(spec), "ALIBI_SIDED": int(_alibi_sided(spec, t))}
    return tuple(found.items())


def _loop_masks(spec: AttentionSpec, t: Tile) -> bool:
    """Whether a mask's edge can cross another key block of a tile than the first."""
    if common.hides_left(spec):
        return True
    if not common.hides_right(spec):
        return False
    aligned = isinstance(spec.q_offset, int) and (spec.q_offset + spec.window_right) % t.block_n == 0
    return spec.variable or t.block_n % t.block_m != 0 or not aligned


def _alibi_sided(spec: AttentionSpec, t: Tile) -> bool:
    """Whether a tile's diagonals cross the first key block that it visits alone, and saying so wins."""
    if spec.alibi_slopes is None or featured(spec) or spec.variable or common.hides_left(spec):
        return False
    if not 64 < max(t.head_dim, t.head_dim_v) <= 128 or not isinstance(spec.q_offset, int):
        return False
    ends_there = spec.window_right == 0 or not common.hides_right(spec)
    return ends_there and t.block_n % t.block_m == 0 and spec.q_offset % t.block_n == 0


def parameter_words(spec: AttentionSpec, t: Tile, tiles: int) -> dict[str, int | float]:
    """Parameter words; windows are cut so that sums of two rows, an offset and a window stay in 32 bits."""
    return common.words(spec) | {
        "window_left": min(spec.window_left, ROWS_LIMIT), "window_right": min(spec.window_right, ROWS_LIMIT),
        "aux0": -(-spec.seqlen_q // t.block_m), "aux1": common.section(spec, 2), "aux2": tiles,
        "aux3": visible_keys(spec)[0],
    }  # fmt: skip


def _prepare(spec: AttentionSpec, t: Tile, words: dict[str, int | float]) -> Launch:
    """The launch that zeroes the tile counter and lists packed sequences."""
    names = ("semaphore", "cu_seqlens_q", "cu_seqlens_k", "scratch") if spec.varlen else ("semaphore",)
    defines = (("DTYPE", 1), ("BLOCK_M", t.block_m), ("VARLEN", int(spec.varlen)))
    return Launch(
        kernel=Kernel("fwd_sm90_prepare", "fwd_sm90_prepare", defines),
        grid=(1, 1, 1),
        block=1024,
        shared_memory=0,
        block_words=params.pack(words),
        pointers=tuple((name, name) for name in names),
    )


def forward(spec: AttentionSpec, device: Device, t: Tile | None = None) -> Program:
    """The forward program of a spec that ``refuses`` does not refuse; ``t`` overrides the tile."""
    t = t or tile(spec, device)
    assert t.shared_memory <= SHARED_MEMORY, t
    tiles = tile_count(spec, t.block_m)
    rows = visible_keys(spec)
    inputs = common.operands(spec)
    words = parameter_words(spec, t, tiles)
    ahead = mask_pass(spec, t.block_m, t.block_n)
    words |= ahead.words or {}
    counted = t.schedule == COUNTER or spec.varlen
    own = [Buffer("semaphore", (2,), "int32")] if counted else []
    if spec.varlen:
        own.append(Buffer("scratch", (2 * spec.batch + 1,), "int32"))
    names = ("out", "lse", *inputs[3:], *(b.name for b in own))
    launch = Launch(
        kernel=Kernel("fwd_sm90", "fwd_sm90", kernel_defines(spec, t)),
        grid=(min(tiles, device.sm_count), 1, 1),
        block=t.threads,
        shared_memory=t.shared_memory,
        block_words=params.pack(words),
        pointers=(*((name, name) for name in names), *ahead.pointers),
        tensor_maps=(
            tensor_map("q", spec.q, (0, spec.q.shape[2]), 64 if t.q_apart else t.block_m),
            tensor_map("k", spec.k, rows, t.block_n),
            tensor_map("v", spec.v, rows, t.block_n),
            out_map(spec),
            *_bias_maps(spec, t),
        ),
        dependent=counted,
    )
    before = (*common.tail(spec, device, "out", "lse"), *ahead.steps)
    return Program(
        inputs=inputs,
        outputs=(Buffer("out", spec.out_shape, spec.dtype), Buffer("lse", spec.lse_shape, "float32")),
        workspace=(*ahead.workspace, *own),
        steps=(*before, *((_prepare(spec, t, words),) if counted else ()), launch),
    )
