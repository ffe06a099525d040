"""The mma.sync family: float16 and bfloat16 on sm_75 and newer, every feature; the forward (``fwd.cu``).

Pure: a spec and a device description in, a ``Program`` out. The backward's program is ``mma_backward``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Program
from ..tiles import FORWARD, FORWARD_FEATURED, HEAD_DIMS, Tile
from . import common

if TYPE_CHECKING:
    from ..device import Device
    from ..spec import AttentionSpec


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why this family cannot take the spec, or None."""
    if spec.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, got {spec.dtype}"
    if device.arch < 75:
        return f"needs sm_75 or newer, the device is sm_{device.arch}"
    if device.arch < 80 and spec.dtype == "bfloat16":
        return "sm_75 has no bfloat16 products"
    return None


def rounded(head_dim: int) -> int:
    """The compile-time head dim that serves a head dim."""
    return next(d for d in HEAD_DIMS if head_dim <= d)


def featured(spec: AttentionSpec) -> bool:
    """Whether scores need more than positions: see ``tiles.FORWARD_FEATURED``."""
    extra = (spec.bias, spec.mask, spec.alibi_slopes)
    return any(x is not None for x in extra) or spec.segments or spec.softcap > 0 or spec.dropout_p > 0


def tile(spec: AttentionSpec, device: Device) -> Tile:
    """The first row of the table that is for the call and fits into the device's shared memory."""
    d, dv = rounded(spec.head_dim), rounded(spec.head_dim_v)
    masked = spec.variable or common.hides_left(spec) or common.hides_right(spec)
    reserved = 1024 if device.arch >= 80 else 0  # bytes of a block's shared memory that the system takes
    for row in FORWARD_FEATURED if featured(spec) else FORWARD:
        for_call = max(d, dv) <= row.head_dim and row.masked in (None, masked)
        size = row.shared_memory(d, dv)
        together = row.min_blocks == 1 or row.min_blocks * (size + reserved) <= device.shared_memory_per_sm
        fits = together and size <= device.shared_memory_per_block
        if for_call and fits and (not row.archs or device.arch in row.archs):
            return row
    raise AssertionError(f"no tile for head dims {d}, {dv} on {device.name}")


def kernel(spec: AttentionSpec, t: Tile) -> Kernel:
    """``fwd.cu`` compiled for a spec and a tile."""
    d, dv = rounded(spec.head_dim), rounded(spec.head_dim_v)
    defines = common.defines(spec) | {
        "ALIGNED": int(common.aligned(spec, "q", "k", "v")),
        "HEAD_DIM": d, "HEAD_DIM_V": dv, "WHOLE_D": int((d, dv) == (spec.head_dim, spec.head_dim_v)),
        "BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "NUM_WARPS": t.num_warps, "STAGES": t.stages,
        "Q_IN_REGISTERS": int(t.q_in_registers), "TIE_SUMS": t.tie if t.block_m > 16 * t.num_warps else 0,
        "MIN_BLOCKS": t.min_blocks,
    }  # fmt: skip
    return Kernel("fwd", "fwd", tuple(defines.items()))


def forward(spec: AttentionSpec, device: Device, t: Tile | None = None) -> Program:
    """The forward program of a spec that ``refuses`` does not refuse; ``t`` overrides the tile."""
    t = t or tile(spec, device)
    live = common.live_tiles(spec, t.block_m, t.block_n)
    inputs = common.operands(spec)
    heavy_last = common.hides_right(spec) and not common.hides_left(spec)
    launch = Launch(
        kernel=kernel(spec, t),
        grid=(-(-spec.seqlen_q // t.block_m) * spec.batch * spec.heads_q, 1, 1),
        block=32 * t.num_warps,
        shared_memory=t.shared_memory(rounded(spec.head_dim), rounded(spec.head_dim_v)),
        block_words=params.pack(
            common.words(spec) | live.words | {"aux3": common.section(spec, 2) if heavy_last else 1}
        ),
        pointers=(*((name, name) for name in (*inputs, "out", "lse")), *live.pointers),
    )
    return Program(
        inputs=inputs,
        outputs=(Buffer("out", spec.out_shape, spec.dtype), Buffer("lse", spec.lse_shape, spec.accumulator)),
        workspace=live.workspace,
        steps=(*common.tail(spec, device, "out", "lse"), *live.steps, launch),
    )
