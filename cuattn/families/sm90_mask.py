"""Mask and segments for Hopper's forward: the pass ahead of it (``kernels_cu/fwd_sm90_mask.cu``), its memory.

Pure. The pass says of each tile whether anything is left to see and whether nothing is hidden, and packs the
mask to a bit a score.
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


def _quads(spec: AttentionSpec) -> bool:
    """Whether four columns of the mask are one aligned word."""
    mask = spec.mask
    if mask is None or mask.strides[3] != 1 or mask.align < 4 or spec.seqlen_kv % 4:
        return False
    return all(stride % 4 == 0 for stride in mask.strides[:3])


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
    names = tuple(n for n in ("mask", "q_segment_ids", "kv_segment_ids") if n in common.operands(spec))
    buffers = [Buffer("live_tiles", (batches * heads * blocks_m * row,), "int32")]
    pointers = [("live_tiles", "live_tiles")]
    if size:
        buffers.append(Buffer("mask_bits", (size,), "int32"))
        pointers.append(("scratch", "mask_bits"))
    defines = (
        ("MASK", int(spec.mask is not None)), ("SEGMENTS", int(spec.segments)),
        ("BLOCK_M", block_m), ("BLOCK_N", block_n), ("QUADS", int(_quads(spec))),
    )  # fmt: skip
    own = {f"aux{i}": stride for i, stride in enumerate(strides)}
    launch = Launch(
        kernel=Kernel("fwd_sm90_mask", "fwd_sm90_mask", defines),
        grid=(batches * heads * blocks_m * blocks_n, 1, 1),
        block=256,
        shared_memory=0,
        block_words=params.pack(
            common.words(spec) | own | {"aux4": heads, "aux5": blocks_m, "aux6": blocks_n}
        ),
        pointers=(*((n, n) for n in names), *pointers),
    )
    words: dict[str, int | float] = {f"aux{4 + i}": stride for i, stride in enumerate(strides)}
    words |= packed
    return MaskPass((Memset("live_tiles"), launch), tuple(buffers), words, tuple(pointers))
