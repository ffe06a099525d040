"""The wide family's backward as a ``Program``: row sums, the main kernel, the gradients of sinks and bias.

Pure: reads the spec, chooses tiles and grids, compiles and allocates nothing. The kernels are
``kernels_cu/bwd_wide*.cu``; the main one adds to dq and writes dk and dv, so nothing is converted afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Memset, Program
from ..spec import ITEMSIZE
from . import common, wide
from .wide import rounded

if TYPE_CHECKING:
    from ..device import Device
    from ..spec import AttentionSpec

THREADS = 128  # of bwd_wide_delta.cu
SECTION_BYTES = 32 << 20  # Q, dO and dQ of heads that are worked on together: about half of a big GPU's L2
ENOUGH_WAVES = 2  # of blocks: fewer, and the q heads of a group are spread over blocks of their own


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration of ``bwd_wide.cu``, whose head says what the fields do, up to a head dim.

    ``apart``: dV in a launch of its own, when dK and dV together do not fit into registers. ``plain`` and
    ``tie``: as in ``wide.Tile``.
    """

    head_dim: int
    block_m: int
    block_n: int
    stages: int
    min_blocks: int = 1
    parts: int = 1
    apart: bool = False
    side: int = 4
    plain: bool = False
    tie: int = 0

    @property
    def num_warps(self) -> int:
        """Each owns 16 keys."""
        return self.block_n // 16

    def serves(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether the row is for calls like this and fits into the device's shared memory."""
        dim = max(spec.head_dim, spec.head_dim_v)
        wanted = dim <= self.head_dim and (not self.plain or wide.plain(spec, device))
        return wanted and self.shared_memory(spec, device) <= device.shared_memory_per_block

    def shared_memory(self, spec: AttentionSpec, device: Device) -> int:
        """Bytes of dynamic shared memory: K, V, stages of Q, dO, LSE and delta, dS, and rows' scales."""
        columns = rounded(spec.head_dim, self.parts) + rounded(spec.head_dim_v, self.parts)
        rows = self.block_n + self.stages * self.block_m
        scores = 2 * self.stages * self.block_m + self.block_n * (self.block_m + 8)
        if wide.scaled(spec, device):
            scores += 2 * rows + self.num_warps - 8 * self.block_n
        return ITEMSIZE[spec.dtype] * (rows * columns + scores)


# float32: a thread keeps (head_dim + head_dim_v) / 2 sums and block_m scores and their gradients, and spills
# none of them where they are tied.
# What was measured: docs/performance/float32.md.
FLOAT32 = (
    Tile(64, 64, 128, 2, plain=True, tie=4),  # 163 KB
    Tile(64, 32, 64, 2, 2),  # 75 KB: two blocks an SM
    Tile(128, 32, 128, 2, side=2, plain=True, tie=4),  # 210 KB
    Tile(128, 32, 128, 2),
    Tile(128, 32, 64, 1),  # sm_80: 105 KB
    Tile(128, 32, 32, 1),  # sm_86, sm_89: 69 KB
    Tile(192, 32, 64, 1, apart=True),  # 153 KB
    Tile(192, 32, 16, 1, apart=True),  # sm_86, sm_89: 75 KB
    Tile(256, 32, 64, 1, apart=True),  # 202 KB
    Tile(256, 32, 32, 1, apart=True),  # sm_80: 133 KB
    Tile(256, 32, 16, 1, apart=True),  # sm_86, sm_89: 99 KB, all but 400 bytes
)
# sm_75
FLOAT32_FMA = (
    Tile(64, 32, 64, 1),  # 58 KB
    Tile(128, 16, 32, 1),  # 51 KB
    Tile(192, 16, 16, 1, apart=True),  # 50 KB
)

# float64: twice the registers of everything.
FLOAT64 = (
    Tile(64, 16, 64, 1),  # 92 KB
    Tile(64, 16, 16, 1),  # sm_75: 35 KB
    Tile(128, 16, 64, 1, parts=2),  # 172 KB
    Tile(128, 16, 16, 1, parts=2),  # sm_86, sm_89: 67 KB
    Tile(256, 16, 32, 1, parts=4),  # 198 KB
    Tile(256, 16, 16, 1, parts=4),  # sm_80: 131 KB
)


def _fitting(spec: AttentionSpec, device: Device) -> Tile | None:
    rows = FLOAT64 if spec.dtype == "float64" else FLOAT32 if device.arch >= 80 else FLOAT32_FMA
    return next((row for row in rows if row.serves(spec, device)), None)


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why this family cannot take the spec, or None."""
    reason = wide.refuses(spec, device)
    if reason is None and _fitting(spec, device) is None:
        reason = (
            f"head dims {spec.head_dim} and {spec.head_dim_v} need more shared memory than {device.name}'s"
        )
    return reason


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all launches of one backward share."""

    spec: AttentionSpec
    device: Device
    wants: frozenset[str]
    tile: Tile

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.spec.dtype]

    @property
    def blocks_m(self) -> int:
        """Blocks of queries of an entry; packed: of the longest sequence."""
        return -(-self.spec.seqlen_q // self.tile.block_m)

    @property
    def blocks_n(self) -> int:
        return -(-self.spec.seqlen_kv // self.tile.block_n)

    @property
    def split_group(self) -> bool:
        """Whether each q head has blocks of its own, which add to dK and dV."""
        spec = self.spec
        if spec.group == 1:
            return False
        blocks = self.blocks_n * self.tile.parts * spec.batch * spec.heads_kv
        return blocks < ENOUGH_WAVES * self.device.sm_count * self.tile.min_blocks

    @property
    def launches(self) -> tuple[frozenset[str], ...]:
        """Those of q, k and v that each launch of the main kernel serves."""
        wants = self.wants & {"q", "k", "v"}
        found = (wants & {"q", "k"}, wants & {"v"}) if self.tile.apart else (wants,)
        return tuple(some for some in found if some)

    @property
    def turns(self) -> tuple[int, int]:
        """Words of the semaphore: for query blocks, and for each launch's key blocks, as far as they wait."""
        spec, tile, wants = self.spec, self.tile, self.wants
        if not spec.deterministic:
            return 0, 0
        queries = spec.heads_q * self.blocks_m if "q" in wants else 0
        keys = spec.heads_kv * self.blocks_n if self.split_group and wants & {"k", "v"} else 0
        return spec.batch * queries * tile.parts, spec.batch * keys * tile.parts

    @property
    def section(self) -> int:
        """Heads whose key blocks run together: all of them where blocks wait for their turn."""
        spec = self.spec
        heads = spec.batch * (spec.heads_q if self.split_group else spec.heads_kv)
        if spec.deterministic:
            return heads
        row = self.itemsize * (2 * spec.head_dim + spec.head_dim_v)
        group = 1 if self.split_group else spec.group
        return max(1, min(heads, SECTION_BYTES // max(1, spec.seqlen_q * group * row)))

    def defines(self) -> dict[str, int]:
        spec, tile = self.spec, self.tile
        return wide.defines(spec, self.device) | {
            "HEAD_DIM": rounded(spec.head_dim, tile.parts),
            "HEAD_DIM_V": rounded(spec.head_dim_v, tile.parts),
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "NUM_WARPS": tile.num_warps, "SIDE": tile.side,
        }  # fmt: skip

    def pointers(self, *names: str) -> tuple[tuple[str, str], ...]:
        """``names``, with the operands that scores and lengths are made of."""
        operands = (n for n in common.operands(self.spec) if n not in ("q", "k", "v"))
        return tuple((n, n) for n in (*names, *operands))


def _delta(plan: _Plan) -> list[Launch]:
    """delta and the sinks' gradient."""
    spec = plan.spec
    rows, batch = (spec.total_q, 1) if spec.varlen else (spec.seqlen_q, spec.batch)
    defines = tuple({"DTYPE": common.DTYPE_CODES[spec.dtype], "DLSE": int(spec.dlse)}.items())
    words = params.pack(common.words(spec) | {"aux4": rows, "aux5": batch})
    names = ("out", "dout", "lse", "delta", *(("dlse",) if spec.dlse else ()))
    grid = -(-rows * batch * spec.heads_q // (THREADS // 32))
    kernel = Kernel("bwd_wide_delta", "bwd_wide_delta", defines)
    steps = [Launch(kernel, (grid, 1, 1), THREADS, 0, words, tuple((n, n) for n in names))]
    if "sinks" in plan.wants:
        kernel = Kernel("bwd_wide_delta", "bwd_wide_dsinks", defines)
        pointers = tuple((n, n) for n in ("sinks", "lse", "delta", "dsinks"))
        steps.append(Launch(kernel, (spec.heads_q, 1, 1), THREADS, 0, words, pointers))
    return steps


def main_kernel(plan: _Plan, wants: frozenset[str]) -> Kernel:
    """``bwd_wide.cu`` compiled for a plan, for those of q, k and v that one launch serves."""
    tile = plan.tile
    defines = plan.defines() | {
        "STAGES": tile.stages, "MIN_BLOCKS": tile.min_blocks, "PARTS": tile.parts,
        "DETERMINISTIC": int(plan.spec.deterministic), "SPLIT_GROUP": int(plan.split_group), "TIE": tile.tie,
        "WANT_DQ": int("q" in wants), "WANT_DK": int("k" in wants), "WANT_DV": int("v" in wants),
    }  # fmt: skip
    return Kernel("bwd_wide", "bwd_wide", tuple(defines.items()))


def _main(plan: _Plan) -> list[Launch | Memset]:
    spec, tile = plan.spec, plan.tile
    live = common.live_tiles(spec, tile.block_m, tile.block_n)
    steps: list[Launch | Memset] = list(live.steps)
    of_queries, of_keys = plan.turns
    if of_queries or of_keys:
        steps.append(Memset("semaphore"))
    heads = spec.batch * (spec.heads_q if plan.split_group else spec.heads_kv)
    shared = tile.shared_memory(spec, plan.device)
    for i, some in enumerate(plan.launches):
        start = of_queries + i * of_keys
        words = params.pack(common.words(spec) | live.words | {"aux3": plan.section, "aux4": start})
        names = ["q", "k", "v", "dout", "lse", "delta", *(f"d{x}" for x in "qkv" if x in some)]
        if of_queries or of_keys:
            names.append("semaphore")
        grid = plan.blocks_n * tile.parts * heads
        pointers = (*plan.pointers(*names), *live.pointers)
        kernel, threads = main_kernel(plan, some), 32 * tile.num_warps
        steps.append(Launch(kernel, (grid, 1, 1), threads, shared, words, pointers))
    return steps


def _bias(plan: _Plan) -> common.BiasCut:
    return common.cut_bias(plan.spec, plan.device.sm_count, plan.tile.block_m, plan.tile.block_n)


def _dbias(plan: _Plan) -> list[Launch]:
    bias, tile, spec = _bias(plan), plan.tile, plan.spec
    words = params.pack(common.words(spec) | bias.words)
    defines = tuple((plan.defines() | {"STAGES": 1}).items())
    pointers = (*plan.pointers("q", "k", "v", "dout", "lse", "delta", "dbias"), *bias.scratch)
    shared = tile.shared_memory(spec, plan.device)
    threads = 32 * tile.num_warps
    kernel = Kernel("bwd_wide_dbias", "bwd_wide_dbias", defines)
    return [
        Launch(kernel, (bias.tiles * bias.parts, 1, 1), threads, shared, words, pointers),
        *bias.sums(spec),
    ]


def _workspace(plan: _Plan) -> tuple[Buffer, ...]:
    spec, tile = plan.spec, plan.tile
    found = [Buffer("delta", spec.lse_shape, spec.accumulator)]
    if plan.wants & {"q", "k", "v"}:
        found += common.live_tiles(spec, tile.block_m, tile.block_n).workspace
    of_queries, of_keys = plan.turns
    if of_queries or of_keys:
        found.append(Buffer("semaphore", (of_queries + len(plan.launches) * of_keys,), "int32"))
    if "bias" in plan.wants:
        found += _bias(plan).workspace(spec.accumulator)
    return tuple(found)


def backward(spec: AttentionSpec, device: Device, wants: frozenset[str], tile: Tile | None = None) -> Program:
    """The backward program of a spec that ``refuses`` does not refuse; ``tile`` overrides the tile.

    Inputs are the forward's with out, lse, dout and, with ``spec.dlse``, dlse; outputs are d<name> for each
    of ``wants`` (of ``spec.GRADIENTS``), in the caller's layout.
    """
    tile = tile or _fitting(spec, device)
    assert tile is not None, "refuses() was not asked"
    plan = _Plan(spec, device, wants, tile)
    names = tuple(x for x in ("q", "k", "v", "bias", "sinks") if x in wants)
    outputs = tuple(Buffer(f"d{x}", spec.gradient_shape(x), spec.gradient_dtype(x)) for x in names)
    inputs = (*common.operands(spec), "out", "lse", "dout", *(("dlse",) if spec.dlse else ()))
    if spec.empty:
        return Program(inputs, outputs, (), tuple(Memset(f"d{x}") for x in names))
    added = ("q", "k", "v") if plan.split_group else ("q",)  # to zeros, by several blocks
    steps: list[Launch | Memset] = [Memset(f"d{x}") for x in names if x in added]
    steps += common.tail(spec, device, *(f"d{x}" for x in names if x in ("k", "v") and x not in added))
    steps += _delta(plan)
    if wants & {"q", "k", "v"}:
        steps += _main(plan)
    if "bias" in wants:
        steps += _dbias(plan)
    return Program(inputs, outputs, _workspace(plan), tuple(steps))
