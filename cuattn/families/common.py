"""What every CUDA family says of a spec alike: parameter words, defines, operands, the live-tile bitmap.

Pure. Tiles, grids and what a family refuses are its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Memset
from ..spec import ITEMSIZE

if TYPE_CHECKING:
    from ..device import Device
    from ..spec import AttentionSpec

DTYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
FAR = 1 << 30  # beyond every sequence: a window this wide hides nothing
SECTION_BYTES = 32 << 20  # keys and values of heads that are worked on together: about half of a big GPU's L2


def offset(spec: AttentionSpec) -> int:
    """Query row 0's position among the keys, where it is one number for all entries."""
    return spec.q_offset if isinstance(spec.q_offset, int) else spec.seqlen_kv - spec.seqlen_q


def hides_right(spec: AttentionSpec) -> bool:
    """Whether the window's right side hides a key from some row."""
    if spec.window_right < 0:
        return False
    return spec.variable or spec.seqlen_kv - 1 - offset(spec) > spec.window_right


def hides_left(spec: AttentionSpec) -> bool:
    """Whether the window's left side hides a key from some row."""
    if spec.window_left < 0:
        return False
    return spec.variable or spec.seqlen_q - 1 + offset(spec) > spec.window_left


def any_scale(spec: AttentionSpec) -> bool:
    """Whether softmax_scale may be negative, as far as is known before the call."""
    return spec.softmax_scale is None or spec.softmax_scale < 0


def defines(spec: AttentionSpec) -> dict[str, int]:
    """The switches of ``config.cuh``."""
    return {
        "DTYPE": DTYPE_CODES[spec.dtype],
        "HAS_LEFT": int(hides_left(spec)),
        "HAS_RIGHT": int(hides_right(spec)),
        "VARIABLE": int(spec.variable),
        "VARLEN": int(spec.varlen),
        "ANY_SCALE": int(any_scale(spec)),
        "SOFTCAP": int(spec.softcap > 0),
        "BIAS": 0 if spec.bias is None else 1 if spec.bias.dtype == spec.dtype else 2,
        "MASK": int(spec.mask is not None),
        "ALIBI": int(spec.alibi_slopes is not None),
        "SINKS": int(spec.sinks is not None),
        "SEGMENTS": int(spec.segments),
        "DROPOUT": int(spec.dropout_p > 0),
    }


def words(spec: AttentionSpec) -> dict[str, int | float]:
    """Parameter words that the spec alone decides, for a forward or a backward."""
    from ..philox import threshold

    strides = {
        "q": spec.q.strides, "k": spec.k.strides, "v": spec.v.strides,
        "out": spec.strides_of(spec.heads_q, spec.seqlen_q, spec.head_dim_v),
        "dq": spec.strides_of(spec.heads_q, spec.seqlen_q, spec.head_dim),
        "dk": spec.strides_of(spec.heads_kv, spec.seqlen_kv, spec.head_dim),
        "dv": spec.strides_of(spec.heads_kv, spec.seqlen_kv, spec.head_dim_v),
    }  # fmt: skip
    strides["dout"] = spec.dout.strides if spec.dout is not None else strides["out"]
    found: dict[str, int | float] = {}
    for name, of in strides.items():
        found |= {f"{name}_stride_{axis}": s for axis, s in zip("bhs", of[:3], strict=True)}
    for name in ("bias", "mask"):
        operand = getattr(spec, name)
        if operand is not None:
            found |= {f"{name}_stride_{axis}": s for axis, s in zip("bhqk", operand.strides, strict=True)}
    if spec.alibi_slopes is not None:
        found["alibi_slopes_stride_b"] = spec.alibi_slopes.strides[0]
    modes = {"array": params.OFFSET_ARRAY, "bottom_right": params.OFFSET_BOTTOM_RIGHT}
    mode, value = params.OFFSET_VALUE, 0
    if isinstance(spec.q_offset, int):
        value = max(-(1 << 62), min(spec.q_offset, 1 << 62))
    else:
        mode = modes[spec.q_offset]
    kept = threshold(spec.dropout_p)
    return found | {
        "lse_stride_b": 0 if spec.varlen else spec.heads_q * spec.seqlen_q,
        "lse_stride_h": spec.total_q if spec.varlen else spec.seqlen_q,
        "batch": spec.batch, "heads_q": spec.heads_q, "heads_kv": spec.heads_kv,
        "seqlen_q": spec.seqlen_q, "seqlen_kv": spec.seqlen_kv,
        "head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v,
        "window_left": min(spec.window_left, FAR), "window_right": min(spec.window_right, FAR),
        "q_offset_mode": mode, "q_offset_value": value,
        "softmax_scale_value": 0.0 if spec.softmax_scale is None else spec.softmax_scale,
        "softcap": spec.softcap, "dropout_threshold": kept, "dropout_scale": 1.0 / (1.0 - spec.dropout_p),
    }  # fmt: skip


def operands(spec: AttentionSpec) -> tuple[str, ...]:
    """The forward's input operands, in a fixed order; each is also the name of its parameter word."""
    present = {
        "bias": spec.bias is not None,
        "mask": spec.mask is not None,
        "alibi_slopes": spec.alibi_slopes is not None,
        "sinks": spec.sinks is not None,
        "q_segment_ids": spec.segments,
        "kv_segment_ids": spec.segments,
        "q_seqlens": spec.q_seqlens,
        "kv_seqlens": spec.kv_seqlens,
        "q_offset": spec.q_offset == "array",
        "cu_seqlens_q": spec.varlen,
        "cu_seqlens_k": spec.varlen,
        "dropout_seed": spec.dropout_p > 0,
        "softmax_scale": spec.softmax_scale is None,
    }
    return ("q", "k", "v", *(name for name, there in present.items() if there))


def aligned(spec: AttentionSpec, *names: str) -> bool:
    """Whether rows of the named operands start on 16 bytes."""
    return all(getattr(spec, name) is None or getattr(spec, name).align >= 16 for name in names)


def section(spec: AttentionSpec, itemsize: int) -> int:
    """Query heads, over all entries, whose keys and values fit into a part of L2 together."""
    head_bytes = max(1, spec.seqlen_kv * (spec.head_dim + spec.head_dim_v) * itemsize)
    fitting = max(1, SECTION_BYTES // head_bytes)
    return min((1 << (fitting.bit_length() - 1)) * spec.group, spec.batch * spec.heads_q)


@dataclass(frozen=True, slots=True)
class LiveTiles:
    """The bitmap of ``live_tiles.cu``: the steps that fill it, and what its readers are given."""

    steps: tuple[Memset | Launch, ...]
    workspace: tuple[Buffer, ...]
    words: dict[str, int | float]
    pointers: tuple[tuple[str, str], ...]


def live_tiles(spec: AttentionSpec, block_m: int, block_n: int) -> LiveTiles:
    """Steps ahead of a kernel that skips (block_m, block_n) tiles emptied by mask or segments, or none."""
    if spec.mask is None and not spec.segments:
        return LiveTiles((), (), {}, ())
    # an axis along which neither mask nor segments change is kept once
    by_batch = spec.segments or (spec.mask is not None and spec.mask.strides[0] != 0)
    by_head = spec.mask is not None and spec.mask.strides[1] != 0
    batches, heads = spec.batch if by_batch else 1, spec.heads_q if by_head else 1
    blocks_m, blocks_n = -(-spec.seqlen_q // block_m), -(-spec.seqlen_kv // block_n)
    row = -(-blocks_n // 32)
    strides: dict[str, int | float] = {
        "aux0": heads * blocks_m * row if by_batch else 0,
        "aux1": blocks_m * row if by_head else 0,
        "aux2": row,
    }
    tiles = batches * heads * blocks_m * blocks_n
    names = tuple(n for n in ("mask", "q_segment_ids", "kv_segment_ids") if n in operands(spec))
    chosen = {k: v for k, v in defines(spec).items() if k in ("MASK", "SEGMENTS")}
    chosen |= {"BLOCK_M": block_m, "BLOCK_N": block_n}
    launch = Launch(
        kernel=Kernel("live_tiles", "live_tiles", tuple(chosen.items())),
        grid=(-(-tiles // 4), 1, 1),
        block=128,
        shared_memory=0,
        block_words=params.pack(
            words(spec) | strides | {"aux4": heads, "aux5": blocks_m, "aux6": blocks_n, "aux7": tiles}
        ),
        pointers=(*((n, n) for n in names), ("live_tiles", "live_tiles")),
    )
    bitmap = Buffer("live_tiles", (batches * heads * blocks_m * row,), "int32")
    return LiveTiles((Memset("live_tiles"), launch), (bitmap,), strides, (("live_tiles", "live_tiles"),))


def tail(spec: AttentionSpec, device: Device, *names: str) -> tuple[Launch, ...]:
    """The step that fills rows of no sequence in those of out, lse, dq, dk and dv that are named.

    Packed arrays may be longer than their sequences: out and gradients are 0 there, LSE is -inf. No step for
    dense arrays, which have no such rows.
    """
    if not spec.varlen or not names:
        return ()
    block_words = params.pack(words(spec) | {"aux0": spec.total_q, "aux1": spec.total_kv})
    pointers = tuple((n, n) for n in ("cu_seqlens_q", "cu_seqlens_k", *names))
    kernel = Kernel("tail", "tail", (("DTYPE", DTYPE_CODES[spec.dtype]),))
    return (Launch(kernel, (device.sm_count, 1, 1), 256, 0, block_words, pointers),)


@dataclass(frozen=True, slots=True)
class BiasCut:
    """How the bias's gradient is cut: its shape with all four axes, blocks of it, parts of a block's sum."""

    shape: tuple[int, int, int, int]
    tiles: int
    parts: int

    @property
    def elements(self) -> int:
        b, h, m, n = self.shape
        return b * h * m * n

    @property
    def words(self) -> dict[str, int]:
        """The parameter words of ``bwd_dbias.cu`` and ``bwd_wide_dbias.cu``."""
        b, h, m, n = self.shape
        return {
            "dbias_stride_b": 0 if b == 1 else h * m * n, "dbias_stride_h": 0 if h == 1 else m * n,
            "dbias_stride_q": 0 if m == 1 else n, "dbias_stride_k": 0 if n == 1 else 1,
            "aux0": self.parts, "aux1": b, "aux2": h, "aux4": self.elements,
        }  # fmt: skip

    @property
    def scratch(self) -> tuple[tuple[str, str], ...]:
        """The pointer to the parts' sums, where there is more than one."""
        return (("scratch", "bias_parts"),) if self.parts > 1 else ()

    def workspace(self, accumulator: str) -> tuple[Buffer, ...]:
        """The parts' sums, where there is more than one."""
        return (Buffer("bias_parts", (self.parts, self.elements), accumulator),) if self.parts > 1 else ()

    def sums(self, spec: AttentionSpec) -> tuple[Launch, ...]:
        """The step that adds the parts up, where there is more than one."""
        return (bias_sum(spec, self.parts, self.elements),) if self.parts > 1 else ()


def bias_sum(spec: AttentionSpec, parts: int, elements: int) -> Launch:
    """The bias's gradient out of ``bias_parts``."""
    switches = defines(spec)
    chosen = (("DTYPE", switches["DTYPE"]), ("BIAS", switches["BIAS"]))
    return Launch(
        kernel=Kernel("bwd_dbias_sum", "bwd_dbias_sum", chosen),
        grid=(-(-elements // 128), 1, 1),
        block=128,
        shared_memory=0,
        block_words=params.pack({"aux0": parts, "aux4": elements}),
        pointers=(("dbias", "dbias"), ("scratch", "bias_parts")),
    )


def cut_bias(spec: AttentionSpec, sm_count: int, block_m: int, block_n: int) -> BiasCut:
    """Blocks of the bias's gradient; as many parts of each as fill the GPU, their sums within 64 MB."""
    assert spec.bias_shape is not None
    b, h, m, n = (1,) * (4 - len(spec.bias_shape)) + spec.bias_shape
    all_m, all_n = -(-spec.seqlen_q // block_m), -(-spec.seqlen_kv // block_n)
    tiles = b * h * (1 if m == 1 else all_m) * (1 if n == 1 else all_n)
    summed = spec.batch * spec.heads_q * all_m * all_n // tiles
    room = max(1, (64 << 20) // (ITEMSIZE[spec.accumulator] * max(1, b * h * m * n)))
    return BiasCut((b, h, m, n), tiles, max(1, min(summed, -(-2 * sm_count // tiles), room)))
