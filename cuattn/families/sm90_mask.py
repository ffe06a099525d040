"""Mask and segments for Hopper's kernels: the pass ahead of them (``kernels_cu/*_sm90_mask.cu``), its memory.

Pure. The pass says of each tile whether anything is left to see and whether nothing is hidden, and packs the
mask to a bit a score. Of a mask of keys it also says in which key blocks V is finite: what is hidden there
need not become zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Memset
from . import common

if TYPE_CHECKING:
    from ..spec import AttentionSpec

PACKED_KEYS = 128  # of a mask, that a warp of the forward's pass packs


@dataclass(frozen=True, slots=True)
class MaskPass:
    """Steps ahead of the kernel, their buffers, and the words and pointers that the kernel gets."""

    steps: tuple[Memset | Launch, ...] = ()
    workspace: tuple[Buffer, ...] = ()
    words: dict[str, int | float] | None = None
    pointers: tuple[tuple[str, str], ...] = ()


def _packed(spec: AttentionSpec, block_m: int, blocks_m: int, warps_n: int) -> tuple[int, dict[str, int]]:
    """Words that the packed mask takes, and its strides: no axis along which the mask is the same."""
    if spec.mask is None:
        return 0, {}
    by_batch, by_head, by_row = (stride != 0 for stride in spec.mask.strides[:3])
    per_n = 4 * (block_m if by_row else 1)
    per_head = (blocks_m if by_row else 1) * warps_n * per_n
    per_batch = (spec.heads_q if by_head else 1) * per_head
    strides = {
        "mask_stride_b": per_batch if by_batch else 0, "mask_stride_h": per_head if by_head else 0,
        "mask_stride_q": warps_n * per_n if by_row else 0, "mask_stride_k": per_n,
        "aux7": 4 if by_row else 0,
    }  # fmt: skip
    return (spec.batch if by_batch else 1) * per_batch, strides


def _aligned(spec: AttentionSpec, columns: int) -> bool:
    """Whether so many columns of the mask, counted from 0, lie on as many aligned bytes."""
    mask = spec.mask
    if mask is None or mask.strides[3] != 1 or mask.align < columns:
        return False
    return all(stride % columns == 0 for stride in mask.strides[:3])


def keys_only(spec: AttentionSpec) -> bool:
    """Whether the mask is the same for all queries, so that it hides keys from whole tiles."""
    return spec.mask is not None and spec.mask.strides[2] == 0


def mask_pass(spec: AttentionSpec, block_m: int, block_n: int) -> MaskPass:
    """What goes ahead of a kernel with (block_m, block_n) tiles; nothing without mask and segments."""
    if spec.mask is None and not spec.segments:
        return MaskPass()
    by_batch = spec.segments or (spec.mask is not None and spec.mask.strides[0] != 0)
    by_head = spec.mask is not None and spec.mask.strides[1] != 0
    batches, heads = spec.batch if by_batch else 1, spec.heads_q if by_head else 1
    keys = PACKED_KEYS if spec.mask is not None else block_n  # of a warp
    blocks_m, warps_n = -(-spec.seqlen_q // block_m), -(-spec.seqlen_kv // keys)
    blocks_n = warps_n * (keys // block_n)
    row = 2 * -(-blocks_n // 32)
    strides = (heads * blocks_m * row if by_batch else 0, blocks_m * row if by_head else 0, row)
    size, packed = _packed(spec, block_m, blocks_m, warps_n)
    bits, scans = batches * heads * blocks_m * row, spec.batch * spec.heads_kv if keys_only(spec) else 0
    wanted = {"mask", "q_segment_ids", "kv_segment_ids", *(("v",) if scans else ())}
    names = tuple(n for n in common.operands(spec) if n in wanted)
    buffers = [Buffer("live_tiles", (bits + scans * row // 2,), "int32")]
    pointers = [("live_tiles", "live_tiles")]
    if size:
        buffers.append(Buffer("mask_bits", (size,), "int32"))
        pointers.append(("scratch", "mask_bits"))
    defines = (
        ("MASK", int(spec.mask is not None)), ("SEGMENTS", int(spec.segments)),
        ("BLOCK_M", block_m), ("BLOCK_N", block_n), ("WIDE", int(_aligned(spec, 16))),
        ("HAS_LEFT", int(common.hides_left(spec) and not spec.variable)),
        ("HAS_RIGHT", int(common.hides_right(spec) and not spec.variable)),
        ("DTYPE", common.DTYPE_CODES[spec.dtype]), ("V_CHUNKS", spec.head_dim_v // 8 if scans else 0),
    )  # fmt: skip
    tiles = batches * heads * blocks_m * warps_n
    own = {f"aux{i}": stride for i, stride in enumerate(strides)} | {"aux3": bits}
    launch = Launch(
        kernel=Kernel("fwd_sm90_mask", "fwd_sm90_mask", defines),
        grid=(-(-(tiles + scans * blocks_n) // 4), 1, 1),
        block=128,
        shared_memory=0,
        block_words=params.pack(
            common.words(spec) | own | {"aux4": heads, "aux5": blocks_m, "aux6": warps_n, "aux7": tiles}
        ),
        pointers=(*((n, n) for n in names), *pointers),
    )
    words: dict[str, int | float] = {f"aux{4 + i}": stride for i, stride in enumerate(strides)}
    words |= packed
    return MaskPass((Memset("live_tiles"), launch), tuple(buffers), words, tuple(pointers))


def backward_mask_pass(spec: AttentionSpec, block_m: int, block_n: int, rows: int, keys: int) -> MaskPass:
    """What goes ahead of the backward's kernel; nothing without mask and segments.

    Its tiles are ``block_m`` of the ``rows`` visible rows by ``block_n`` of the ``keys`` visible keys.
    """
    if spec.mask is None and not spec.segments:
        return MaskPass()
    windowed = common.hides_left(spec) or common.hides_right(spec)
    places = spec.variable and windowed  # entries have their first visible row and key at other places
    steps = (0, 0, 0, 0) if spec.mask is None else spec.mask.strides
    by_batch, by_head, by_row = steps[0] != 0 or places, steps[1] != 0, steps[2] != 0 or places
    batches, heads = spec.batch if by_batch or spec.segments else 1, spec.heads_q if by_head else 1
    blocks_m, blocks_n = max(1, -(-rows // block_m)), max(1, -(-keys // block_n))
    column, row = 2 * -(-blocks_m // 32), -(-blocks_n // 32)
    region = blocks_n * column + blocks_m * row
    words: dict[str, int | float] = {
        "q_stride_b": heads * region if batches > 1 else 0,
        "q_stride_h": region if by_head else 0,
        "q_stride_s": column,
        "v_stride_h": blocks_n * column,
        "v_stride_s": row,
    }
    buffers = [Buffer("live_tiles", (batches * heads * region,), "int32")]
    bits: list[tuple[str, str]] = []
    if spec.mask is not None:
        block = blocks_n * 4 * block_m
        head = (blocks_m if by_row else 1) * block
        words |= {
            "k_stride_b": heads * head if by_batch else 0,
            "k_stride_h": head if by_head else 0,
            "k_stride_s": block if by_row else 0,
        }
        buffers.append(Buffer("mask_bits", ((spec.batch if by_batch else 1) * heads * head,), "int32"))
        bits = [("scratch", "mask_bits")]
    names = [n for n in common.operands(spec) if n in ("mask", "q_segment_ids", "kv_segment_ids")]
    names += [n for n in common.operands(spec) if n in ("q_seqlens", "kv_seqlens", "q_offset")]
    quads = int(_aligned(spec, 4) and spec.seqlen_kv % 4 == 0 and not common.hides_left(spec))
    defines = common.defines(spec)
    chosen = tuple((n, defines[n]) for n in ("HAS_LEFT", "HAS_RIGHT", "VARIABLE", "MASK", "SEGMENTS"))
    chosen += (("BLOCK_M", block_m), ("BLOCK_N", block_n), ("QUADS", quads))
    chosen += (("DETERMINISTIC", int(spec.deterministic)),)
    if spec.dropout_p > 0 and common.hides_left(spec):
        chosen += (("DROPOUT", 1),)
    launch = Launch(
        kernel=Kernel("bwd_sm90_mask", "attention_backward_sm90_mask", chosen),
        grid=(batches * heads * blocks_m * blocks_n, 1, 1),
        block=256,
        shared_memory=0,
        block_words=params.pack(
            common.words(spec) | words | {"aux0": heads, "aux1": blocks_m, "aux2": blocks_n}
        ),
        pointers=(*((n, n) for n in names), ("live_tiles", "live_tiles"), *bits),
    )
    pointers = (("live_tiles", "live_tiles"), *((("mask", "mask_bits"),) if bits else ()))
    return MaskPass((Memset("live_tiles"), launch), tuple(buffers), words, pointers)
