"""Hopper's backward pass as a ``Program``: row sums, the fused wgmma kernel, conversion of dQ.

Pure: reads the spec, chooses tiles and grids, compiles and allocates nothing. The kernels are
``kernels_cu/bwd_sm90*.cu``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Memset, Program, TensorMap
from ..spec import AttentionSpec, Operand
from . import common, mma_backward, sm90_dbias
from .sm90_bias import bias_map, fits_tma
from .sm90_dbias import Way
from .sm90_mask import MaskPass, backward_mask_pass

if TYPE_CHECKING:
    from ..device import Device

THREADS = 384
MUCH_MEMORY = 1 << 30  # bytes of dQ sums that may be mostly padding
SECTION_BYTES = 40 << 20  # of one L2: units whose key blocks are scheduled together
SECTION_WAVES = 1.5  # of CTAs at least: the section before is then done
WAITING_WAVES = 4  # the same where groups of query heads wait for each other's turns: fewer wait at once
SHARE_BYTES = 1 << 20  # of dQ sums that a CTA of the main kernel makes dQ
SHARED_MEMORY = 232448  # bytes a block of Hopper may have
SUM_ROWS = 2048  # divided by v's head dim: rows of a warp's row sums; four warps a CTA


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration of the main kernel ``source``; its macros' meaning is told there."""

    source: str
    head_dim: int  # rounded up
    block_m: int
    block_n: int
    stages: int
    stages_do: int
    dq_tiles: int  # of dQ in shared memory, where P does not pass through it; or 0
    pingpong: int
    v_regs: int
    lse_ahead: int
    bias_tiles: int = 0  # whether the bias comes by TMA
    skipping: int = 0  # whether mask or segments empty tiles
    dropout: int = 0
    own_dim_v: int = 0  # rounded up, where it is another than ``head_dim``
    cut: int = 0  # whether the first step on an edge leaves out what no row sees

    @property
    def head_dim_v(self) -> int:
        return self.own_dim_v or self.head_dim

    def shared_memory(self, wants: frozenset[str]) -> int:
        """Bytes of dynamic shared memory for the gradients ``wants``, the slack for alignment included."""
        operands = 2 * self.head_dim * (self.block_n + self.block_m * self.stages)
        operands += 2 * self.head_dim_v * (self.block_n + self.block_m * self.stages_do)
        tiles = 2 * ("q" in wants if self.dq_tiles else ("v" in wants) + bool(wants & {"q", "k"}))  # P and dS
        exchanged = 2 * tiles * self.block_m * self.block_n
        sums = 4 * self.block_m * self.head_dim * self.dq_tiles * ("q" in wants)
        rows = (4 * self.block_m + 16) * (self.stages + self.stages_do) + 16
        bias = 2 * self.block_m * self.block_n * self.stages * self.bias_tiles
        features = 16 * self.stages * self.skipping + 32 * self.block_m * (
            self.dropout and self.block_n == 128
        )
        return 1024 + operands + exchanged + sums + rows + bias + features


# 80 rows at D 128 move less shared memory a product than 64 and fit the registers; 128 at D 64 for the same
# reason. Above 128 both warpgroups share 64 keys, or dK and dV would not fit.
TILES = {
    64: Tile("bwd_sm90", 64, 128, 128, 2, 2, 1, 0, 2, 4),
    128: Tile("bwd_sm90", 128, 80, 128, 2, 2, 1, 1, 1, 2),
    256: Tile("bwd_sm90_wide", 256, 64, 64, 2, 2, 0, 0, 0, 0),
}
# 64 rows at D 128 waste less at an edge and leave room for half of V in registers and two tiles of dQ: better
# for all but long sequences without an edge, where they are level (docs/performance/hopper_backward.md).
SHORT = Tile("bwd_sm90", 128, 64, 128, 2, 2, 2, 1, 4, 4)
SHORT_ROWS = 4096
CUT_ROWS = 2048  # that a key/value head's keys see at most: more steps gain nothing from one that is cut
FEW_STEPS = 10  # of a CTA of the main kernel: it ends without waiting for its sums of dQ


def compiled_dim(dim: int) -> int:
    """Head dim that a kernel is compiled for."""
    return next(d for d in TILES if dim <= d)


def tile_of(spec: AttentionSpec) -> Tile:
    """The main kernel's tile."""
    d, dv = compiled_dim(spec.head_dim), compiled_dim(spec.head_dim_v)
    tile = TILES[max(d, dv)]
    if d != dv and tile.head_dim <= 128:
        tile = replace(tile, head_dim=d, own_dim_v=dv, block_m=64, v_regs=0, lse_ahead=0)
        return _featured_tile(spec, tile) if _featured(spec) else tile
    if _featured(spec):
        return _featured_tile(spec, tile)
    if _transformed(spec):
        return _transformed_tile(spec, tile)
    return tile if spec.deterministic or tile.head_dim > 128 else _plain_tile(spec, tile)


def _plain_tile(spec: AttentionSpec, tile: Tile) -> Tile:
    """For sums in any order, up to 128 head dims."""
    rows, right = _rows_of_a_key(spec), common.hides_right(spec)
    if tile.head_dim == SHORT.head_dim and (right or rows <= SHORT_ROWS):
        tile = SHORT
    few = rows * spec.group <= CUT_ROWS and not spec.variable
    return replace(tile, cut=1) if right and few else tile


def _transformed_tile(spec: AttentionSpec, tile: Tile) -> Tile:
    """As many query rows, and as much of V in registers, as softcap and ALiBi leave room for."""
    if tile.head_dim == 64:
        return replace(tile, block_m=96 if spec.softcap > 0 else 128, v_regs=0, lse_ahead=0)
    if tile.head_dim == SHORT.head_dim and not (spec.softcap > 0 or spec.deterministic):
        return replace(SHORT, lse_ahead=2)
    return replace(tile, block_m=64, v_regs=0, lse_ahead=0)


def _rows_of_a_key(spec: AttentionSpec) -> int:
    """Query rows that see one key, at most."""
    left, right = spec.window_left, spec.window_right
    return min(spec.seqlen_q, left + right + 1) if left >= 0 and right >= 0 else spec.seqlen_q


def _transformed(spec: AttentionSpec) -> bool:
    return spec.softcap > 0 or spec.alibi_slopes is not None


def _featured(spec: AttentionSpec) -> bool:
    return spec.bias is not None or spec.mask is not None or spec.segments or spec.dropout_p > 0


def _featured_tile(spec: AttentionSpec, tile: Tile) -> Tile:
    """Whole words of 32 scores a thread; the bias by TMA where its rows and the shared memory allow."""
    skipping, dropout = int(spec.mask is not None or spec.segments), int(spec.dropout_p > 0)
    plain = not (_transformed(spec) or dropout or spec.bias is not None)
    rows = 64
    if max(tile.head_dim, tile.head_dim_v) == 64:
        rows = _rows_of_64(spec, skipping)
    v_regs = 3 if min(tile.head_dim, tile.head_dim_v) == 128 and plain else 0  # four spill
    found = replace(tile, block_m=rows, v_regs=v_regs, lse_ahead=0, skipping=skipping, dropout=dropout)
    tiles = replace(found, bias_tiles=1)
    return tiles if _bias_tiles(spec) and tiles.shared_memory(frozenset("qkv")) <= SHARED_MEMORY else found


def _rows_of_64(spec: AttentionSpec, skipping: int) -> int:
    """Query rows at 64 head dims: as many as the registers, and the bias's tiles, allow."""
    if spec.bias is not None:
        return 64 if skipping or spec.dropout_p > 0 else 96
    return 64 if _transformed(spec) or (skipping and spec.dropout_p > 0) else 128


def _bias_tiles(spec: AttentionSpec) -> bool:
    """Whether TMA brings the bias: of 16 bits, from a key on at which boxes can begin."""
    if spec.bias is None or spec.bias.dtype != spec.dtype or not fits_tma(spec.bias):
        return False
    return not (common.hides_left(spec) and (spec.variable or visible(spec)[2] % 8))


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why this family does not take the call, or None."""
    if device.arch != 90:
        return "needs sm_90"
    if spec.dtype not in ("float16", "bfloat16"):
        return "takes float16 and bfloat16"
    if spec.softmax_scale is None or spec.softmax_scale <= 0:
        return "needs a positive softmax_scale known beforehand"
    operands = [x for x in (spec.q, spec.k, spec.v, spec.dout) if x is not None]
    if spec.head_dim % 8 or spec.head_dim_v % 8 or any(x.align < 16 for x in operands):
        return "takes rows that start on 16 bytes"
    if any(n > 1 and stride <= 0 for x in operands for n, stride in zip(x.shape, x.strides, strict=True)):
        return "takes no broadcast or reversed q, k, v or dout"
    heads, rows = sums_shape(spec, tile_of(spec).block_m)
    if rows > 4 * spec.seqlen_q and heads * rows * spec.head_dim * 4 > MUCH_MEMORY and not spec.varlen:
        return f"would pad {heads} heads of {spec.seqlen_q} rows to {rows}"
    return None


def visible(spec: AttentionSpec) -> tuple[int, int, int, int]:
    """First and end query row that see a key, first and end key that is seen; all 0 if there is none.

    With dropout the first key may be an earlier one: a multiple of 32, the keys that a Philox call serves in
    part. Whole lengths where they vary between entries: the kernels then look themselves.
    """
    row_begin, row_end, key_begin, key_end = 0, spec.q.shape[2], 0, spec.k.shape[2]
    if spec.variable:
        return row_begin, row_end, key_begin, key_end
    offset = int(spec.q_offset)
    if spec.window_right >= 0:
        row_begin = max(row_begin, -offset - spec.window_right)
        key_end = min(key_end, spec.seqlen_q + offset + spec.window_right)
    if spec.window_left >= 0:
        row_end = min(row_end, spec.seqlen_kv + spec.window_left - offset)
        key_begin = max(key_begin, offset - spec.window_left)
        key_begin -= key_begin % 32 if spec.dropout_p > 0 else 0
    if row_begin >= row_end or key_begin >= key_end:
        return 0, 0, 0, 0
    return row_begin, row_end, key_begin, key_end


def _slots(size: int, total: int, seen: int, spec: AttentionSpec) -> int:
    """Slots of ``size`` rows: blocks of visible rows, then of zeros; for all packed sequences together."""
    if spec.varlen:
        return total // size + 2 * spec.batch + 1
    if spec.variable:
        return -(-total // size) + 1
    return -(-seen // size) + -(-(total - seen) // size)


def tensor_map(name: str, operand: Operand, begin: int, end: int, rows: int) -> TensorMap:
    """Boxes of 64 columns by ``rows`` over rows [begin, end) of a (batch, heads, seqlen, dim) operand."""
    batch, heads, _, dim = operand.shape
    stride_b, stride_h, stride_s, _ = operand.strides
    return TensorMap(
        buffer=name,
        dtype=operand.dtype,
        dims=(dim, end - begin, heads, batch),
        strides=tuple(
            2 * stride if size > 1 else 16
            for stride, size in ((stride_s, end - begin), (stride_h, heads), (stride_b, batch))
        ),
        box=(64, rows, 1, 1),
        swizzle=128,
        offset=2 * stride_s * begin,
    )


@dataclass(frozen=True, slots=True)
class Sections:
    """How the main kernel goes through the units: key/value heads of an entry, or of all packed sequences."""

    units: int
    together: int  # units of a section
    shares: int  # CTAs that make a section's sums dQ, or zero; 0 where the kernel after makes all of dQ

    @property
    def count(self) -> int:
        return -(-self.units // self.together)

    @property
    def left(self) -> int:
        """Units whose sums are left to the kernel after: of the last section, or all."""
        return self.units - (self.count - 1) * self.together if self.shares else self.units


def sections_of(
    spec: AttentionSpec, device: Device, query_slots: int, key_slots: int, wants: frozenset[str]
) -> Sections:
    """Sections that fill an L2, and the GPU some waves of CTAs."""
    units = spec.heads_kv * (1 if spec.varlen else spec.batch)
    rows = spec.total_q if spec.varlen else spec.seqlen_q
    unit_bytes = spec.group * rows * (2 * (spec.head_dim + spec.head_dim_v) + 4 * spec.head_dim)
    waves = WAITING_WAVES if spec.deterministic and spec.group > 1 else SECTION_WAVES
    enough = math.ceil(waves * device.sm_count / max(1, key_slots))
    most = min(units, max(1, enough, SECTION_BYTES // max(1, unit_bytes)))
    least = max(-(-most // 2), min(most, enough))
    # A short last section would wait for its longest CTAs on an empty GPU.
    together = min(range(most, least - 1, -1), key=lambda size: -units % size)
    tile = tile_of(spec)
    share_slots = SHARE_BYTES // (4 * tile.block_m * tile.head_dim)
    shares = -(-together * spec.group * query_slots // share_slots)
    alone = together == units or "q" not in wants or _leaves_dq(spec, tile)
    return Sections(units, together, 0 if alone else shares)


def _leaves_dq(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether CTAs, as they have few steps, end before their sums of dQ are there, and make none of it."""
    share = 0.5 if common.hides_right(spec) and spec.window_left < 0 else 1
    few = share * spec.group * _rows_of_a_key(spec) <= FEW_STEPS * tile.block_m
    return few and tile.dq_tiles > 0 and not (spec.deterministic or _featured(spec))


def _strides(name: str, strides: tuple[int, ...]) -> dict[str, int]:
    return {f"{name}_stride_{axis}": stride for axis, stride in zip("bhs", strides[:3], strict=True)}


def backward(spec: AttentionSpec, device: Device, wants: frozenset[str]) -> Program:
    """The backward program: from q, k, v, out, lse, dout and more to those of dq, dk, dv, dsinks wanted.

    Not for calls that want none of dq, dk and dv.
    """
    assert refuses(spec, device) is None
    assert wants & {"q", "k", "v"}
    tile = tile_of(spec)
    way = _bias_way(spec, tile, wants)
    if way == Way.OTHER:
        return _with_dbias(backward(spec, device, wants - {"bias"}), spec, device)
    sum_heads, sum_rows = sums_shape(spec, tile.block_m)
    outputs = tuple(Buffer(f"d{x}", spec.gradient_shape(x), spec.dtype) for x in "qkv" if x in wants)
    workspace = [Buffer("lse_log2", (sum_heads, sum_rows), "float32")]
    if _needs_delta(wants):
        workspace.append(Buffer("delta", (sum_heads, sum_rows), "float32"))
    if "q" in wants:
        units = spec.heads_kv * (1 if spec.varlen else spec.batch)  # not fewer than sections
        workspace += [
            Buffer("dq_accum", (sum_heads, sum_rows, tile.head_dim), "float32"),
            Buffer("turns", (_turns(spec, tile.block_m) + 2 * units,), "int32"),
        ]
    if "bias" in wants:
        assert spec.bias is not None
        outputs += (Buffer("dbias", spec.gradient_shape("bias"), spec.bias.dtype),)
        workspace += sm90_dbias.workspace(spec, device, way)
    if "sinks" in wants:
        outputs += (Buffer("dsinks", spec.gradient_shape("sinks"), "float32"),)
    operands = _operands(spec)
    sinks = ("sinks",) if "sinks" in wants else ()
    row_begin, row_end, key_begin, key_end = visible(spec)
    ahead = backward_mask_pass(spec, tile.block_m, tile.block_n, row_end - row_begin, key_end - key_begin)
    own = tuple(x for x in common.operands(spec) if x in ("bias", "mask", "q_segment_ids", "kv_segment_ids"))
    seed = ("dropout_seed",) if spec.dropout_p > 0 else ()
    inputs = ("q", "k", "v", "out", "lse", "dout", *(("dlse",) if spec.dlse else ()), *operands, *own, *seed)
    empty: dict[Way, str] = {Way.OF_KEYS: "bias_parts"}
    if not _stores_all(spec):
        empty[Way.STORED] = "dbias"
    zeros = (Memset(empty[way]),) if way in empty else ()
    steps = (*ahead.steps, *zeros, *_launches(spec, device, tile, operands, wants, ahead))
    return Program((*inputs, *sinks), outputs, (*workspace, *ahead.workspace), steps)


def _bias_way(spec: AttentionSpec, tile: Tile, wants: frozenset[str]) -> Way:
    row_begin, _, key_begin, _ = visible(spec)
    return sm90_dbias.way_of(spec, wants, (tile.head_dim, tile.head_dim_v), (row_begin, key_begin))


def _stores_all(spec: AttentionSpec) -> bool:
    """Whether every element of dS is stored: all tiles are visited, or those above are filled with zeros."""
    if spec.variable or spec.mask is not None or spec.segments or common.hides_left(spec):
        return False
    return visible(spec)[3] == spec.seqlen_kv


def _with_dbias(program: Program, spec: AttentionSpec, device: Device) -> Program:
    """The program, then the bias's gradient by the mma.sync family, with row sums of its own."""
    bias = mma_backward.backward(spec, device, frozenset({"bias"}))
    names = {b.name: f"bias_{b.name}" if b.name == "delta" else b.name for b in bias.workspace}
    steps = [
        replace(step, pointers=tuple((field, names.get(name, name)) for field, name in step.pointers))
        for step in bias.steps
        if isinstance(step, Launch)
    ]
    return Program(
        inputs=tuple(dict.fromkeys((*program.inputs, *bias.inputs))),
        outputs=(*program.outputs, *bias.outputs),
        workspace=(*program.workspace, *(replace(b, name=names[b.name]) for b in bias.workspace)),
        steps=(*program.steps, *steps),
    )


def _needs_delta(wants: frozenset[str]) -> bool:
    return bool(wants & {"q", "k", "bias", "sinks"})


def sums_shape(spec: AttentionSpec, block_m: int) -> tuple[int, int]:
    """(heads, rows) of delta, LSE and dQ sums: whole query blocks; packed sequences begin on one."""
    if spec.varlen:
        return spec.heads_q, (spec.total_q // block_m + spec.batch) * block_m
    row_begin, row_end, _, _ = visible(spec)
    return spec.batch * spec.heads_q, max(1, -(-(row_end - row_begin) // block_m)) * block_m


def _turns(spec: AttentionSpec, block_m: int) -> int:
    heads, rows = sums_shape(spec, block_m)
    return heads * (rows // block_m) * 2


def _operands(spec: AttentionSpec) -> tuple[str, ...]:
    """Small operands that say who sees whom, and the scale."""
    names = {
        "softmax_scale": spec.softmax_scale is None,
        "alibi_slopes": spec.alibi_slopes is not None,
        "q_seqlens": spec.q_seqlens,
        "kv_seqlens": spec.kv_seqlens,
        "q_offset": spec.q_offset == "array",
        "cu_seqlens_q": spec.varlen,
        "cu_seqlens_k": spec.varlen,
    }
    return tuple(name for name, used in names.items() if used)


def _words(
    spec: AttentionSpec, device: Device, tile: Tile, dout: Operand, wants: frozenset[str]
) -> dict[str, int | float]:
    row_begin, row_end, key_begin, key_end = visible(spec)
    rows, keys = (spec.total_q, spec.total_kv) if spec.varlen else (spec.seqlen_q, spec.seqlen_kv)
    query_slots = _slots(tile.block_m, rows, row_end - row_begin, spec)
    key_slots = _slots(tile.block_n, keys, key_end - key_begin, spec)
    sections = sections_of(spec, device, query_slots, key_slots, wants)
    modes = {"array": params.OFFSET_ARRAY, "bottom_right": params.OFFSET_BOTTOM_RIGHT}
    fixed = isinstance(spec.q_offset, int)
    return {
        **{
            name: word
            for name, word in common.words(spec).items()
            if name.startswith(("bias", "mask", "dropout"))
        },
        **_strides("out", spec.strides_of(spec.heads_q, spec.seqlen_q, spec.head_dim_v)),
        **_strides("dout", dout.strides),
        **_strides("dq", spec.strides_of(spec.heads_q, spec.seqlen_q, spec.head_dim)),
        **_strides("dk", spec.strides_of(spec.heads_kv, spec.seqlen_kv, spec.head_dim)),
        **_strides("dv", spec.strides_of(spec.heads_kv, spec.seqlen_kv, spec.head_dim_v)),
        "lse_stride_b": 0 if spec.varlen else spec.heads_q * spec.seqlen_q,
        "lse_stride_h": spec.total_q if spec.varlen else spec.seqlen_q,
        "batch": spec.batch,
        "heads_q": spec.heads_q,
        "heads_kv": spec.heads_kv,
        "seqlen_q": spec.seqlen_q,
        "seqlen_kv": spec.seqlen_kv,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "window_left": spec.window_left,
        "window_right": spec.window_right,
        "q_offset_mode": params.OFFSET_VALUE if fixed else modes[str(spec.q_offset)],
        "q_offset_value": int(spec.q_offset) if fixed else 0,
        "softmax_scale_value": spec.softmax_scale or 0.0,
        "softcap": spec.softcap,
        "alibi_slopes_stride_b": spec.alibi_slopes.strides[0] if spec.alibi_slopes is not None else 0,
        "aux0": sums_shape(spec, tile.block_m)[1],
        "aux1": query_slots,
        "aux2": key_slots,
        "aux3": sections.together,
        "aux4": sections.shares,
        "aux5": spec.total_q,
        "aux6": spec.total_kv,
        "aux7": _turns(spec, tile.block_m),
    }


def _defines(spec: AttentionSpec, tile: Tile, wants: frozenset[str]) -> tuple[tuple[str, int], ...]:
    """What all kernels are compiled with."""
    return (
        ("DTYPE", 0 if spec.dtype == "float16" else 1),
        ("HEAD_DIM", tile.head_dim),
        ("HEAD_DIM_V", tile.head_dim_v),
        ("BLOCK_M", tile.block_m),
        ("HAS_LEFT", int(common.hides_left(spec))),
        ("HAS_RIGHT", int(common.hides_right(spec))),
        ("VARIABLE", int(spec.variable)),
        ("VARLEN", int(spec.varlen)),
        ("DETERMINISTIC", int(spec.deterministic and "q" in wants)),
        ("SOFTCAP", int(spec.softcap > 0)),
        ("ALIBI", int(spec.alibi_slopes is not None)),
        *((f"WANT_D{x.upper()}", int(x in wants)) for x in "qkv"),
    )


def _features(spec: AttentionSpec, tile: Tile) -> tuple[tuple[str, int], ...]:
    """Of the main kernel: none that a call does not have, so that plain calls share their programs."""
    of_keys = spec.bias is not None and spec.bias.strides[2] == 0
    wanted = {**common.defines(spec), "BIAS_TILES": tile.bias_tiles, "BIAS_OF_KEYS": int(of_keys)}
    names = ("MASK", "SEGMENTS", "DROPOUT", "BIAS", "BIAS_TILES", "BIAS_OF_KEYS")
    return tuple((name, wanted[name]) for name in names if wanted[name])


def _own_pointers(spec: AttentionSpec, ahead: MaskPass) -> tuple[tuple[str, str], ...]:
    """The main kernel's operands of its own."""
    names = {"bias": spec.bias is not None, "dropout_seed": spec.dropout_p > 0}
    ids = ("q_segment_ids", "kv_segment_ids") if spec.segments else ()
    return (*((n, n) for n in (*(n for n, used in names.items() if used), *ids)), *ahead.pointers)


def _gradient_maps(
    spec: AttentionSpec, tile: Tile, wants: frozenset[str], begin: int, end: int
) -> tuple[TensorMap, ...]:
    """Boxes of a warp's 16 keys of dk and dv, where they go out by TMA."""
    if spec.variable or _featured(spec) or (tile.head_dim, tile.head_dim_v) != (128, 128):
        return ()

    def found(name: str, given: Operand) -> TensorMap:
        strides = spec.strides_of(spec.heads_kv, spec.seqlen_kv, given.shape[-1])
        own = Operand(spec.dtype, given.shape, (*strides, 1))
        return tensor_map(f"d{name}", own, begin, end, 16)

    return tuple(found(n, x) for n, x in (("k", spec.k), ("v", spec.v)) if n in wants)


def _launches(
    spec: AttentionSpec,
    device: Device,
    tile: Tile,
    operands: tuple[str, ...],
    wants: frozenset[str],
    ahead: MaskPass,
) -> tuple[Launch | Memset, ...]:
    out_strides = spec.strides_of(spec.heads_q, spec.seqlen_q, spec.head_dim_v)
    out_shape = (spec.q.shape[0], spec.heads_q, spec.q.shape[2], spec.head_dim_v)
    dout = spec.dout or Operand(spec.dtype, out_shape, (*out_strides, 1))
    words = _words(spec, device, tile, dout, wants)
    way = _bias_way(spec, tile, wants)
    if way in (Way.STORED, Way.OF_KEYS):
        words |= sm90_dbias.strides(spec) if way == Way.STORED else sm90_dbias.of_keys(spec)[2]
    query_slots, key_slots = int(words["aux1"]), int(words["aux2"])
    sections = sections_of(spec, device, query_slots, key_slots, wants)
    block_words = params.pack(words | (ahead.words or {}))
    row_begin, row_end, key_begin, key_end = visible(spec)
    row_end, key_end = max(row_end, row_begin + 1), max(key_end, key_begin + 1)  # a map is never empty
    defines = _defines(spec, tile, wants)
    features = _features(spec, tile)
    if way == Way.OF_KEYS:
        features += (("DBIAS_SUMS", 1),)
    if way == Way.STORED:
        zeros = _stores_all(spec) and common.hides_right(spec)
        features += (("DBIAS_TILES", 1), *((("DBIAS_ZEROS", 1),) if zeros else ()))
    bias = (("BIAS", dict(features)["BIAS"]),) if spec.bias is not None else ()
    skipping = (("MASK", 1),) if tile.skipping else ()
    pipeline = (
        ("STAGES", tile.stages),
        ("STAGES_DO", tile.stages_do),
        ("PINGPONG", tile.pingpong),
        ("DQ_TILES", tile.dq_tiles),
        ("LSE_AHEAD", tile.lse_ahead),
        ("V_REGS", tile.v_regs if "q" in wants else tile.v_regs // 2),  # else dK and dV spill
        *((("CUT", 1),) if tile.cut and "q" in wants else ()),  # else a few registers spill
    )
    shared = [(x, x) for x in operands]
    if "q" in wants:
        shared += [("dq_accum", "dq_accum"), ("semaphore", "turns")]
    read = ("out", "dout", "lse", "dlse") if spec.dlse else ("out", "dout", "lse")
    rows = [("scratch", "lse_log2")]
    if _needs_delta(wants):
        rows.append(("delta", "delta"))
    row_defines = (*defines, ("WANT_DELTA", int(_needs_delta(wants))), *bias, *skipping)
    pieces = spec.group * sections.units * query_slots * (tile.block_m * tile.head_dim_v // SUM_ROWS)
    prepare = Launch(
        kernel=Kernel("bwd_sm90_delta", "attention_backward_sm90_delta", row_defines),
        grid=(-(-pieces // 4), 1, 1),
        block=128,
        shared_memory=0,
        block_words=block_words,
        pointers=(*((x, x) for x in read), *rows, *shared),
    )
    own_bias = {Way.STORED: (("dbias", "dbias"),), Way.OF_KEYS: (("dbias", "bias_parts"),)}
    main = Launch(
        kernel=Kernel(
            tile.source, tile.source.replace("bwd", "attention_backward"), defines + pipeline + features
        ),
        grid=(
            sections.count
            * (sections.together * key_slots + sections.shares * (2 if tile.head_dim > 128 else 1)),
            1,
            1,
        ),
        block=THREADS,
        shared_memory=tile.shared_memory(wants),
        block_words=block_words,
        pointers=(
            *((f"d{x}", f"d{x}") for x in "qkv" if x in wants),
            *own_bias.get(way, ()),
            *rows,
            *shared,
            *_own_pointers(spec, ahead),
        ),
        dependent=True,
        tensor_maps=(
            tensor_map("q", spec.q, row_begin, row_end, tile.block_m),
            tensor_map("k", spec.k, key_begin, key_end, tile.block_n),
            tensor_map("v", spec.v, key_begin, key_end, tile.block_n),
            tensor_map("dout", dout, row_begin, row_end, tile.block_m),
            *((bias_map("bias", spec.bias, tile.block_m),) if tile.bias_tiles and spec.bias else ()),
            *((sm90_dbias.gradient_map(spec, tile.block_m),) if way == Way.STORED else ()),
            *_gradient_maps(spec, tile, wants, key_begin, key_end),
        ),
    )
    convert = Launch(
        kernel=Kernel("bwd_sm90_convert", "attention_backward_sm90_convert", defines + skipping),
        grid=(sections.left * spec.group * query_slots, 1, 1),
        block=256,
        shared_memory=0,
        block_words=block_words,
        pointers=(("dq", "dq"), *shared),
        dependent=True,
    )
    steps: tuple[Launch | Memset, ...] = (prepare, main, convert) if "q" in wants else (prepare, main)
    if way == Way.OF_KEYS:
        steps += (common.bias_sum(spec, *sm90_dbias.of_keys(spec)[:2]),)
    if way == Way.PASS:
        whole = zip("qkv", (spec.q, spec.k, spec.v), strict=True)
        steps += sm90_dbias.launches(
            spec,
            device,
            (tile.head_dim, tile.head_dim_v),
            words | (ahead.words or {}),
            (*((x, x) for x in operands), *_own_pointers(spec, ahead)),
            tuple(
                tensor_map(name, operand, 0, operand.shape[2], sm90_dbias.BLOCK)
                for name, operand in (*whole, ("dout", dout))
            ),
        )
    if "sinks" not in wants:
        return steps
    dsinks = Launch(
        kernel=Kernel("bwd_sm90_delta", "attention_backward_sm90_dsinks", row_defines),
        grid=(spec.heads_q, 1, 1),
        block=256,
        shared_memory=0,
        block_words=block_words,
        pointers=(("sinks", "sinks"), ("dsinks", "dsinks"), ("lse", "lse"), *rows, *shared),
    )
    return (*steps, dsinks)
