"""Mask and segments for Hopper's forward: the pass ahead of it (``kernels_cu/fwd_sm90_mask.cu``), its memory.

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


@dataclass(frozen=True, slots=True)
class MaskPass:
    """Steps ahead of the kernel, their buffers, and the words and pointers that the kernel gets."""

    steps: tuple[Memset | Launch, ...] = ()
    workspace: tuple[Buffer, ...] = ()
    words: dict[str, int | float] | None = None
    pointers: tuple[tuple[str, str], ...] = ()


def _packed(spec: AttentionSpec, block_m: int, blocks_m: int, blocks_n: int) -> tuple[int, dict[str, int]]:
    """Words that the packed mask takes, and its strides: no axis along which the mask is the same."""
    if spec.mask is None:
        return 0, {}
    by_batch, by_head, by_row = (stride != 0 for stride in spec.mask.strides[:3])
    per_n = 4 * (block_m if by_row else 1)
    per_head = (blocks_m if by_row else 1) * blocks_n * per_n
    per_batch = (spec.heads_q if by_head else 1) * per_head
    strides = {
        "mask_stride_b": per_batch if by_batch else 0, "mask_stride_h": per_head if by_head else 0,
        "mask_stride_q": blocks_n * per_n if by_row else 0, "mask_stride_k": per_n,
        "aux7": 4 if by_row else 0,
    }  # fmt: skip
    return (spec.batch if by_batch else 1) * per_batch, strides


def _wide(spec: AttentionSpec) -> bool:
    """Whether 16 columns of the mask lie on 16 bytes."""
    mask = spec.mask
    if mask is None or mask.strides[3] != 1 or mask.align < 16:
        return False
    return all(stride % 16 == 0 for stride in mask.strides[:3])


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
    blocks_m, blocks_n = -(-spec.seqlen_q // block_m), -(-spec.seqlen_kv // block_n)
    row = 2 * -(-blocks_n // 32)
    strides = (heads * blocks_m * row if by_batch else 0, blocks_m * row if by_head else 0, row)
    size, packed = _packed(spec, block_m, blocks_m, blocks_n)
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
        ("BLOCK_M", block_m), ("BLOCK_N", block_n), ("WIDE", int(_wide(spec))),
        ("HAS_LEFT", int(common.hides_left(spec) and not spec.variable)),
        ("HAS_RIGHT", int(common.hides_right(spec) and not spec.variable)),
        ("DTYPE", common.DTYPE_CODES[spec.dtype]), ("V_CHUNKS", spec.head_dim_v // 8 if scans else 0),
    )  # fmt: skip
    tiles = batches * heads * blocks_m * blocks_n
    own = {f"aux{i}": stride for i, stride in enumerate(strides)} | {"aux3": bits}
    launch = Launch(
        kernel=Kernel("fwd_sm90_mask", "fwd_sm90_mask", defines),
        grid=(-(-(tiles + scans * blocks_n) // 4), 1, 1),
        block=128,
        shared_memory=0,
        block_words=params.pack(
            common.words(spec) | own | {"aux4": heads, "aux5": blocks_m, "aux6": blocks_n, "aux7": tiles}
        ),
        pointers=(*((n, n) for n in names), *pointers),
    )
    words: dict[str, int | float] = {f"aux{4 + i}": stride for i, stride in enumerate(strides)}
    words |= packed
    return MaskPass((Memset("live_tiles"), launch), tuple(buffers), words, tuple(pointers))
