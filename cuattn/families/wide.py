"""The wide family (``kernels_cu/*_wide*``), its forward: float32 and float64, sm_75 and newer, every feature.

Pure: a spec and a device description in, a ``Program`` out. The backward's program is ``wide_backward``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Program
from ..spec import ITEMSIZE
from . import common

if TYPE_CHECKING:
    from ..device import Device
    from ..spec import AttentionSpec

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # compile-time head dims; others round up
RESERVED = 1024  # bytes of a block's shared memory that the system takes
PRODUCTS = {"highest": 4, "tf32": 1, "bf16": 2}  # wide.cuh's WIDE for float32


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration of ``fwd_wide.cu``, whose head says what the fields do, up to a head dim.

    ``tie``: column tiles whose sums ptxas may put off together (``wide.cuh``), 0 for all. ``plain``: only for
    calls without bias, mask and the like, and only where float32 is three f16 products.
    """

    head_dim: int
    block_m: int
    block_n: int
    stages: int
    min_blocks: int = 1
    parts: int = 1
    side: int = 2
    plain: bool = False
    tie: int = 0

    @property
    def num_warps(self) -> int:
        """Each owns 16 rows."""
        return self.block_m // 16

    def serves(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether the row is for calls like this and fits into the device's shared memory."""
        size = self.shared_memory(spec, device)
        if max(spec.head_dim, spec.head_dim_v) > self.head_dim or size > device.shared_memory_per_block:
            return False
        together = self.min_blocks * (size + RESERVED) <= device.shared_memory_per_sm or self.min_blocks == 1
        return together and (not self.plain or plain(spec, device))

    def shared_memory(self, spec: AttentionSpec, device: Device) -> int:
        """Bytes of dynamic shared memory: Q, stages of K and of a part's columns of V, their rows' scales."""
        d, dv = rounded(spec.head_dim), rounded(spec.head_dim_v, self.parts) // self.parts
        tiles = self.block_m * d + self.stages * self.block_n * (d + dv)
        scales = self.block_m + 2 * self.stages * self.block_n if scaled(spec, device) else 0
        return ITEMSIZE[spec.dtype] * (tiles + scales)


# float32: a thread keeps head_dim_v / 2 sums and block_n / 2 scores beside its operands. What was measured:
# docs/performance/float32.md.
FLOAT32 = (
    Tile(64, 128, 32, 2, 2, plain=True, tie=4),  # 65 KB, 128 registers: two blocks an SM outweigh what spills
    Tile(64, 128, 64, 2),  # 98 KB
    Tile(64, 64, 32, 2),  # sm_75: 48 KB
    Tile(128, 128, 32, 2),  # 129 KB
    Tile(128, 64, 32, 1),  # sm_86, sm_89: 64 KB; sm_75 has just that
    Tile(192, 64, 32, 1),
    Tile(192, 32, 16, 1),  # sm_75
    Tile(256, 64, 32, 1),
    Tile(256, 32, 32, 1),  # sm_86, sm_89: 96 KB
    Tile(256, 32, 16, 1),  # sm_75: 64 KB
)

# float64: twice the registers of everything, so the columns of V are shared out from head dim 128 on.
FLOAT64 = (
    Tile(64, 64, 32, 1),
    Tile(64, 32, 16, 1),  # sm_75
    Tile(128, 64, 16, 1, parts=2),
    Tile(128, 16, 16, 1, parts=2),  # sm_75: 40 KB
    Tile(256, 32, 16, 1, parts=4),
    Tile(256, 16, 16, 1, parts=4),  # sm_86, sm_89: 72 KB
)


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why this family cannot take the spec, or None."""
    if spec.dtype not in ("float32", "float64"):
        return f"takes float32 and float64, got {spec.dtype}"
    if device.arch < 75:
        return f"needs sm_75 or newer, the device is sm_{device.arch}"
    if device.arch < 80 and spec.precision != "highest":
        return f"sm_75 has no {spec.precision} products"
    if fitting(spec, device) is None:
        return f"head dims {spec.head_dim} and {spec.head_dim_v} need more shared memory than {device.name}'s"
    return None


def rounded(head_dim: int, parts: int = 1) -> int:
    """The compile-time head dim that serves a head dim; each of its parts is whole lines of 128 bytes."""
    found, line = next(d for d in HEAD_DIMS if head_dim <= d), 16 * parts
    return -(-found // line) * line


def product(spec: AttentionSpec, device: Device) -> int:
    """What multiplies: wide.cuh's WIDE."""
    return PRODUCTS[spec.precision] if spec.dtype == "float32" and device.arch >= 80 else 0


def scaled(spec: AttentionSpec, device: Device) -> bool:
    """Whether tiles are scaled row by row: wide.cuh's SCALED."""
    return product(spec, device) == 4


def plain(spec: AttentionSpec, device: Device) -> bool:
    """Whether scores are q.k by halves, scaled, and hidden by position alone."""
    operands = (spec.bias, spec.mask, spec.alibi_slopes)
    more = spec.segments or spec.softcap > 0 or spec.dropout_p > 0 or any(x is not None for x in operands)
    return scaled(spec, device) and not more


def fitting(spec: AttentionSpec, device: Device) -> Tile | None:
    """The first row of the table that the head dims and the device's shared memory allow."""
    rows = FLOAT32 if spec.dtype == "float32" else FLOAT64
    return next((row for row in rows if row.serves(spec, device)), None)


def defines(spec: AttentionSpec, device: Device) -> dict[str, int]:
    """What forward and backward kernels are both compiled with."""
    arrays = [x for x in (spec.q, spec.k, spec.v, spec.dout) if x is not None]
    return common.defines(spec) | {
        "WIDE": product(spec, device),
        "ALIGNED": int(all(x.align >= 16 for x in arrays)),
    }


def kernel(spec: AttentionSpec, device: Device, t: Tile) -> Kernel:
    """``fwd_wide.cu`` compiled for a spec and a tile."""
    found = defines(spec, device) | {
        "HEAD_DIM": rounded(spec.head_dim), "HEAD_DIM_V": rounded(spec.head_dim_v, t.parts) // t.parts,
        "BLOCK_M": t.block_m, "BLOCK_N": t.block_n,
        "NUM_WARPS": t.num_warps, "STAGES": t.stages, "MIN_BLOCKS": t.min_blocks, "PARTS": t.parts,
        "SIDE": t.side, "TIE": t.tie,
    }  # fmt: skip
    return Kernel("fwd_wide", "fwd_wide", tuple(found.items()))


def forward(spec: AttentionSpec, device: Device, t: Tile | None = None) -> Program:
    """The forward program of a spec that ``refuses`` does not refuse; ``t`` overrides the tile."""
    t = t or fitting(spec, device)
    assert t is not None, "refuses() was not asked"
    live = common.live_tiles(spec, t.block_m, t.block_n)
    inputs = common.operands(spec)
    heavy_last = common.hides_right(spec) and not common.hides_left(spec)
    section = common.section(spec, ITEMSIZE[spec.dtype]) if heavy_last else 1
    launch = Launch(
        kernel=kernel(spec, device, t),
        grid=(-(-spec.seqlen_q // t.block_m) * t.parts * spec.batch * spec.heads_q, 1, 1),
        block=32 * t.num_warps,
        shared_memory=t.shared_memory(spec, device),
        block_words=params.pack(common.words(spec) | live.words | {"aux3": section}),
        pointers=(*((name, name) for name in (*inputs, "out", "lse")), *live.pointers),
    )
    return Program(
        inputs=inputs,
        outputs=(Buffer("out", spec.out_shape, spec.dtype), Buffer("lse", spec.lse_shape, spec.accumulator)),
        workspace=live.workspace,
        steps=(*common.tail(spec, device, "out", "lse"), *live.steps, launch),
    )
