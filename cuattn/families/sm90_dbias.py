"""Hopper's gradient of the bias: who makes it, and the pass behind the backward's main kernel.

Pure. The pass is ``kernels_cu/bwd_sm90_dbias.cu``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Memset, TensorMap
from ..spec import ITEMSIZE, Operand
from . import common
from .sm90_bias import bias_map, fits_tma

if TYPE_CHECKING:
    from ..device import Device
    from ..spec import AttentionSpec

BLOCK = 128  # rows and keys of a tile
SHARED_MEMORY = 232448  # bytes a block of Hopper may have
FEWEST_SLOTS, MOST_SLOTS = 5, 12  # tiles of operands in shared memory; a step needs four


class Way(Enum):
    """How the gradient is made, where it is wanted."""

    NONE = 0
    STORED = 1  # by the main kernel, whose dS it is: the bias is broadcast nowhere
    OF_KEYS = 2  # by the main kernel, which sums dS over queries
    PASS = 3
    OTHER = 4  # by the mma.sync family


def way_of(
    spec: AttentionSpec, wants: frozenset[str], head_dims: tuple[int, int], first: tuple[int, int]
) -> Way:
    """Who makes it for compiled head dims; ``first`` are the first visible row and key."""
    if "bias" not in wants:
        return Way.NONE
    assert spec.bias is not None
    if max(head_dims) > 128 or spec.softcap > 0:  # whose slope the main kernel's dS has already
        return Way.OTHER
    b, h, m, n = shape_of(spec)
    whole, keys = (spec.batch, spec.heads_q, spec.seqlen_q, spec.seqlen_kv), spec.seqlen_kv
    left = common.hides_left(spec)
    boxes = keys % 8 == 0 and not (left and (spec.variable or first[1] % 8))  # of 16 bytes
    if (b, h, m, n) == whole and spec.bias.dtype == spec.dtype and boxes and "q" in wants:
        return Way.STORED
    of_keys = m == 1 and n == keys and spec.bias.strides[2] == 0
    if of_keys and (h == 1 or spec.group == 1) and wants & {"q", "k"}:
        return Way.OF_KEYS
    if (m, n) != whole[2:] or 1 in (m, n):
        return Way.OTHER
    # the mask's pass counts visible rows and keys, this one all
    moved = any(first) or (spec.variable and (left or common.hides_right(spec)))
    return Way.OTHER if moved and (spec.mask is not None or spec.segments) else Way.PASS


def shape_of(spec: AttentionSpec) -> tuple[int, int, int, int]:
    """The bias's own shape, with all four axes."""
    b, h, m, n = (1, 1, 1, 1, *(spec.bias_shape or ()))[-4:]
    return b, h, m, n


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the kernel is compiled for a call."""

    spec: AttentionSpec
    head_dims: tuple[int, int]  # rounded up

    @property
    def slot_bytes(self) -> int:
        return 2 * BLOCK * max(self.head_dims)

    @property
    def others(self) -> int:
        """Bytes beside the slots and the tile of the bias: rows, steps, dropped weights, barriers."""
        return 16 * BLOCK + 192 + (32 * BLOCK if self.spec.dropout_p > 0 else 0) + 16 * (MOST_SLOTS + 8)

    @property
    def tile_bytes(self) -> int:
        assert self.spec.bias is not None
        return BLOCK * BLOCK * ITEMSIZE[self.spec.bias.dtype]

    @property
    def bias_tiles(self) -> bool:
        """Whether TMA brings the bias, and the slots fit beside it."""
        room = SHARED_MEMORY - self.others - self.tile_bytes
        return fits_tma(self.spec.bias) and room >= FEWEST_SLOTS * self.slot_bytes

    @property
    def slots(self) -> int:
        room = SHARED_MEMORY - self.others - self.tile_bytes * self.bias_tiles
        return min(MOST_SLOTS, room // self.slot_bytes)

    @property
    def shared_memory(self) -> int:
        return self.others + self.tile_bytes * self.bias_tiles + self.slots * self.slot_bytes


def _cut(spec: AttentionSpec, sm_count: int) -> common.BiasCut:
    """As many parts as keep resident CTAs busy for the shortest time, within the memory they may take."""
    cut = common.cut_bias(spec, 1 << 30, BLOCK, BLOCK)  # as many parts as there may be
    heads = spec.batch * spec.heads_q // (cut.shape[0] * cut.shape[1])

    def time(parts: int) -> tuple[float, int]:
        return -(-cut.tiles * parts // sm_count) * (-(-heads // parts) + 0.5 * (parts > 1)), parts

    return replace(cut, parts=min(range(1, min(cut.parts, heads) + 1), key=time))


def strides(spec: AttentionSpec) -> dict[str, int]:
    """The gradient's strides as parameter words, 0 along an axis of one element."""
    cut = common.cut_bias(spec, 1, BLOCK, BLOCK)
    return {name: word for name, word in cut.words.items() if name.startswith("dbias")}


def gradient_map(spec: AttentionSpec, rows: int) -> TensorMap:
    """Boxes of 64 keys by ``rows`` of the gradient."""
    assert spec.bias is not None
    full = (spec.batch, spec.heads_q, spec.seqlen_q, spec.seqlen_kv)
    return bias_map("dbias", Operand(spec.bias.dtype, full, tuple(strides(spec).values())), rows)


def of_keys(spec: AttentionSpec) -> tuple[int, int, dict[str, int]]:
    """Parts whose sum is the gradient, elements of each, and strides by entry and key/value head in them."""
    b, h, _, n = shape_of(spec)
    batches, heads = spec.batch if b == 1 else 1, spec.heads_kv if h == 1 else 1
    elements = b * h * n
    own = {
        "dbias_stride_b": heads * elements if b == 1 else h * n,
        "dbias_stride_h": elements if h == 1 else n,
    }
    return batches * heads, elements, own


def workspace(spec: AttentionSpec, device: Device, way: Way) -> tuple[Buffer, ...]:
    """The parts' sums, if any."""
    if way == Way.OF_KEYS:
        return (Buffer("bias_parts", of_keys(spec)[:2], "float32"),)
    counter = Buffer("bias_items", (1,), "int32")
    return (counter, *_cut(spec, device.sm_count).workspace("float32")) if way == Way.PASS else ()


def launches(
    spec: AttentionSpec,
    device: Device,
    head_dims: tuple[int, int],
    words: dict[str, int | float],
    pointers: tuple[tuple[str, str], ...],
    maps: tuple[TensorMap, ...],
) -> tuple[Launch | Memset, ...]:
    """The steps, with the main kernel's words and pointers and maps of all of q, k, v and dout."""
    assert spec.bias is not None
    shape, cut = _Shape(spec, head_dims), _cut(spec, device.sm_count)
    items = cut.tiles * cut.parts
    own = {"aux1": cut.shape[0], "aux2": cut.shape[1], "aux3": cut.parts, "aux4": cut.elements, "aux5": items}
    found = common.defines(spec)
    names = ("DTYPE", "HAS_LEFT", "HAS_RIGHT", "VARIABLE", "BIAS", "MASK", "ALIBI", "SEGMENTS", "DROPOUT")
    stores = shape.bias_tiles and cut.parts == 1 and spec.seqlen_kv * ITEMSIZE[spec.bias.dtype] % 16 == 0
    defines = (
        *((name, found[name]) for name in names),
        ("HEAD_DIM", head_dims[0]), ("HEAD_DIM_V", head_dims[1]), ("BLOCK_M", BLOCK),
        ("WANT_DQ", 0), ("WANT_DK", 1), ("WANT_DV", 0), ("SLOTS", shape.slots),
        ("BIAS_TILES", int(shape.bias_tiles)), ("STORE_TILES", int(stores)),
        ("PARTS", int(cut.parts > 1)),
    )  # fmt: skip
    own_maps: tuple[TensorMap, ...] = ()
    if shape.bias_tiles:
        own_maps += (bias_map("bias", spec.bias, BLOCK),)
    if stores:
        own_maps += (gradient_map(spec, BLOCK),)
    rows = (("lse", "lse_log2"), ("delta", "delta"))
    launch = Launch(
        kernel=Kernel("bwd_sm90_dbias", "attention_backward_sm90_dbias", defines),
        grid=(min(device.sm_count, items), 1, 1),
        block=384,
        shared_memory=shape.shared_memory,
        block_words=params.pack(words | strides(spec) | own),
        pointers=(*rows, *pointers, ("dbias", "dbias"), ("semaphore", "bias_items"), *cut.scratch),
        tensor_maps=(*maps, *own_maps),
    )
    return (Memset("bias_items"), launch, *cut.sums(spec))
