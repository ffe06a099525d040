"""The mma.sync family's backward as a ``Program``: row sums, the fused kernel, conversions, dbias.

Pure: reads the spec, chooses tiles and grids, compiles and allocates nothing. The kernels are ``bwd*.cu`` of
``kernels_cu``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Memset, Program
from ..tiles import BACKWARD, BACKWARD_BIAS, BACKWARD_BIASED, HEAD_DIMS, BackwardTile
from . import common

if TYPE_CHECKING:
    from ..device import Device
    from ..spec import AttentionSpec

THREADS = 128  # of every kernel but the main one
SECTION_BYTES = 32 << 20  # Q, dO and dQ's sums of heads that run together: about half of a big GPU's L2
ENOUGH_WAVES = 4  # of blocks: rather than fewer, a group's q heads are spread over several blocks


def rounded(head_dim: int) -> int:
    """The compile-time head dim that serves a head dim."""
    return next(d for d in HEAD_DIMS if head_dim <= d)


def _fitting(rows: tuple[BackwardTile, ...], spec: AttentionSpec, device: Device) -> BackwardTile | None:
    """The first row that the head dims and the shared memory allow, ``min_blocks`` of it on an SM."""
    d, dv = rounded(spec.head_dim), rounded(spec.head_dim_v)
    for row in rows:
        size = row.shared_memory(d, dv)
        together = row.min_blocks == 1 or row.min_blocks * (size + 1024) <= device.shared_memory_per_sm
        if max(d, dv) <= row.head_dim and together and size <= device.shared_memory_per_block:
            return row
    return None


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why this family cannot take the spec, or None."""
    if spec.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, got {spec.dtype}"
    if device.arch < 75:
        return f"needs sm_75 or newer, the device is sm_{device.arch}"
    if device.arch < 80 and spec.dtype == "bfloat16":
        return "sm_75 has no bfloat16 products"
    tables = (BACKWARD, BACKWARD_BIAS) if spec.bias is not None else (BACKWARD,)
    if any(_fitting(rows, spec, device) is None for rows in tables):
        dims = f"head dims {spec.head_dim} and {spec.head_dim_v}"
        return f"{dims} need more shared memory than {device.name} has"
    return None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all launches of one backward share."""

    spec: AttentionSpec
    device: Device
    wants: frozenset[str]
    tile: BackwardTile

    @property
    def fused(self) -> bool:
        """Whether the main kernel has anything to do."""
        return bool(self.wants & {"q", "k", "v"})

    @property
    def blocks_m(self) -> int:
        """Blocks of queries of an entry; packed: of the longest sequence."""
        return -(-self.spec.seqlen_q // self.tile.block_m)

    @property
    def blocks_n(self) -> int:
        return -(-self.spec.seqlen_kv // self.tile.block_n)

    @property
    def accumulated_m(self) -> int:
        """Blocks of one head in dq_accum: packed sequences start on a block of their own."""
        spec = self.spec
        return spec.total_q // self.tile.block_m + spec.batch + 1 if spec.varlen else self.blocks_m

    @property
    def total_kv(self) -> int:
        """Rows of one head of k."""
        return self.spec.total_kv if self.spec.varlen else self.spec.seqlen_kv

    @property
    def heads_of_block(self) -> int:
        """q heads that a block of the main kernel serves: a group, or a part whose sums are added later."""
        spec = self.spec
        if not self.wants & {"k", "v"}:
            return 1
        blocks = self.blocks_n * spec.batch * spec.heads_q
        most = blocks // (ENOUGH_WAVES * self.device.sm_count * self.tile.min_blocks)
        return max((n for n in range(1, spec.group + 1) if spec.group % n == 0 and n <= most), default=1)

    @property
    def partial(self) -> bool:
        return self.heads_of_block != self.spec.group

    @property
    def section(self) -> int:
        """Heads whose key blocks run together: all in deterministic mode, so that few wait for a turn."""
        spec, heads = self.spec, self.spec.batch * self.spec.heads_q // self.heads_of_block
        if spec.deterministic:
            return heads
        row = 2 * (spec.head_dim + spec.head_dim_v) + 4 * rounded(spec.head_dim)
        return max(1, min(heads, SECTION_BYTES // max(1, spec.seqlen_q * self.heads_of_block * row)))

    def block_words(self, **more: int) -> bytes:
        shared: dict[str, int | float] = {
            "aux5": self.accumulated_m,
            "aux6": self.total_kv,
            "aux7": self.heads_of_block,
        }
        return params.pack(common.words(self.spec) | shared | more)

    def defines(self, *drop: str, **more: int) -> tuple[tuple[str, int | str], ...]:
        """Defines of a kernel; features named in ``drop``, which it does not look at, are left out."""
        spec = self.spec
        d, dv = rounded(spec.head_dim), rounded(spec.head_dim_v)
        operands = [x for x in (spec.q, spec.k, spec.v, spec.dout) if x is not None]
        whole = spec.head_dim % 8 == 0 and spec.head_dim_v % 8 == 0
        found = {name: value for name, value in common.defines(spec).items() if name not in drop}
        found |= {
            "ALIGNED": int(whole and all(x.align >= 16 for x in operands)),
            "HEAD_DIM": d, "HEAD_DIM_V": dv, "WHOLE_D": int((d, dv) == (spec.head_dim, spec.head_dim_v)),
            "BLOCK_M": self.tile.block_m,
        }  # fmt: skip
        return tuple((found | more).items())

    def pointers(self, *names: str) -> tuple[tuple[str, str], ...]:
        """``names``, with the operands that scores and lengths are made of."""
        operands = (n for n in common.operands(self.spec) if n not in ("q", "k", "v"))
        return tuple((n, n) for n in (*names, *operands))


_SCORES = (
    "SOFTCAP", "BIAS", "MASK", "ALIBI", "SINKS", "SEGMENTS", "DROPOUT", "HAS_LEFT", "HAS_RIGHT", "ANY_SCALE",
)  # fmt: skip


def _delta(plan: _Plan) -> list[Launch]:
    """delta, the zeros of dq_accum, and the sinks' gradient."""
    spec, sinks, dq = plan.spec, "sinks" in plan.wants, "q" in plan.wants
    names = ("out", "dout", "lse", "delta", *(("dlse",) if spec.dlse else ()), *(("dq_accum",) if dq else ()))
    defines = plan.defines(*_SCORES, SINKS=int(sinks), DLSE=int(spec.dlse), WANT_DQ=int(dq))
    words = plan.block_words(aux3=plan.blocks_m)
    scratch = (("scratch", "sink_parts"),) if sinks else ()
    grid = plan.blocks_m * spec.batch * spec.heads_q
    delta = Kernel("bwd_delta", "bwd_delta", defines)
    steps = [Launch(delta, (grid, 1, 1), THREADS, 0, words, (*plan.pointers(*names), *scratch))]
    if sinks:
        dsinks = Kernel("bwd_delta", "bwd_dsinks", defines)
        pointers = (("dsinks", "dsinks"), *scratch)
        steps.append(Launch(dsinks, (spec.heads_q, 1, 1), THREADS, 0, words, pointers))
    return steps


def main_kernel(plan: _Plan) -> Kernel:
    """``bwd.cu`` compiled for a plan."""
    tile, wants = plan.tile, plan.wants
    defines = plan.defines(
        "SINKS", BLOCK_N=tile.block_n, WARPS_N=tile.warps_n, WARPS_M=tile.warps_m, SUB_M=tile.sub_m,
        STAGES=tile.stages, DQ_WARPS_M=tile.dq_warps_m, MIN_BLOCKS=tile.min_blocks,
        DETERMINISTIC=int(plan.spec.deterministic), WANT_DQ=int("q" in wants), WANT_DK=int("k" in wants),
        WANT_DV=int("v" in wants),
    )  # fmt: skip
    return Kernel("bwd", "bwd", defines)


def _main(plan: _Plan) -> list[Launch | Memset]:
    """The fused kernel and the conversions of what it accumulates."""
    spec, tile, wants = plan.spec, plan.tile, plan.wants
    steps: list[Launch | Memset] = []
    live = common.live_tiles(spec, tile.block_m, tile.block_n)
    steps += live.steps
    names = ["q", "k", "v", "dout", "lse", "delta"]
    if "q" in wants:
        names.append("dq_accum")
        if spec.deterministic:
            names.append("semaphore")
            steps.append(Memset("semaphore"))
    suffix = "_accum" if plan.partial else ""
    names += [f"d{x}{suffix}" for x in "kv" if x in wants]
    heads = spec.batch * spec.heads_q // plan.heads_of_block
    words = plan.block_words(**live.words, aux3=plan.blocks_n, aux4=plan.section)  # type: ignore[arg-type]
    shared = tile.shared_memory(rounded(spec.head_dim), rounded(spec.head_dim_v))
    pointers = (*plan.pointers(*names), *live.pointers)
    grid = (plan.blocks_n * heads, 1, 1)
    steps.append(Launch(main_kernel(plan), grid, tile.threads, shared, words, pointers))
    flags = {f"WANT_D{x.upper()}": int(x in wants) for x in "qkv"}
    defines = plan.defines(*_SCORES, **flags)
    if "q" in wants:
        words = plan.block_words(aux3=plan.blocks_m)
        grid = (plan.blocks_m * spec.batch * spec.heads_q, 1, 1)
        kernel = Kernel("bwd_convert", "bwd_dq", defines)
        steps.append(Launch(kernel, grid, THREADS, 0, words, plan.pointers("dq", "dq_accum")))
    if plan.partial:
        for x, dim in (("k", spec.head_dim), ("v", spec.head_dim_v)):
            if x in wants:
                blocks = -(-plan.total_kv * (rounded(dim) // 8) // THREADS)
                grid = (blocks * (1 if spec.varlen else spec.batch) * spec.heads_kv, 1, 1)
                kernel = Kernel("bwd_convert", f"bwd_reduce_d{x}", defines)
                words, pointers = plan.block_words(aux3=blocks), plan.pointers(f"d{x}", f"d{x}_accum")
                steps.append(Launch(kernel, grid, THREADS, 0, words, pointers))
    return steps


def _bias(plan: _Plan) -> tuple[BackwardTile, common.BiasCut]:
    """The tile of the bias's gradient, and how it is cut."""
    tile = _fitting(BACKWARD_BIAS, plan.spec, plan.device)
    assert tile is not None
    return tile, common.cut_bias(plan.spec, plan.device.sm_count, tile.block_m, tile.block_n)


def _dbias(plan: _Plan) -> list[Launch]:
    tile, bias = _bias(plan)
    words = plan.block_words(**bias.words)
    defines = plan.defines("SINKS", BLOCK_M=tile.block_m, BLOCK_N=tile.block_n)
    pointers = (*plan.pointers("q", "k", "v", "dout", "lse", "delta", "dbias"), *bias.scratch)
    shared = tile.shared_memory(rounded(plan.spec.head_dim), rounded(plan.spec.head_dim_v))
    kernel = Kernel("bwd_dbias", "bwd_dbias", defines)
    grid = (bias.tiles * bias.parts, 1, 1)
    return [Launch(kernel, grid, THREADS, shared, words, pointers), *bias.sums(plan.spec)]


def _workspace(plan: _Plan) -> tuple[Buffer, ...]:
    spec, wants = plan.spec, plan.wants
    heads = spec.heads_q if spec.varlen else spec.batch * spec.heads_q
    found = [Buffer("delta", spec.lse_shape, "float32")]
    if "q" in wants:
        tile = plan.tile.block_m * rounded(spec.head_dim)
        found.append(Buffer("dq_accum", (heads * plan.accumulated_m, tile), "float32"))
        if spec.deterministic:
            found.append(Buffer("semaphore", (heads * plan.accumulated_m,), "int32"))
    if plan.fused and plan.partial:
        rows = heads // plan.heads_of_block * plan.total_kv
        for x, dim in (("k", spec.head_dim), ("v", spec.head_dim_v)):
            if x in wants:
                found.append(Buffer(f"d{x}_accum", (rows, rounded(dim)), "float32"))
    if "sinks" in wants:
        found.append(Buffer("sink_parts", (spec.batch * spec.heads_q * plan.blocks_m,), "float32"))
    if "bias" in wants:
        found += _bias(plan)[1].workspace("float32")
    if plan.fused:
        found += common.live_tiles(spec, plan.tile.block_m, plan.tile.block_n).workspace
    return tuple(found)


def backward(
    spec: AttentionSpec, device: Device, wants: frozenset[str], tile: BackwardTile | None = None
) -> Program:
    """The backward program of a spec that ``refuses`` does not refuse; ``tile`` overrides the tile.

    Inputs are the forward's with out, lse, dout and, with ``spec.dlse``, dlse; outputs are d<name> for each
    of ``wants`` (of ``spec.GRADIENTS``), in the caller's layout.
    """
    loads = spec.bias is not None or spec.mask is not None
    tile = tile or _fitting(BACKWARD_BIASED if loads else BACKWARD, spec, device)
    assert tile is not None, "refuses() was not asked"
    plan = _Plan(spec, device, wants, tile)
    names = tuple(x for x in ("q", "k", "v", "bias", "sinks") if x in wants)
    outputs = tuple(Buffer(f"d{x}", spec.gradient_shape(x), spec.gradient_dtype(x)) for x in names)
    inputs = (*common.operands(spec), "out", "lse", "dout", *(("dlse",) if spec.dlse else ()))
    if spec.empty:
        return Program(inputs, outputs, (), tuple(Memset(f"d{x}") for x in names))
    rows = (f"d{x}" for x in names if x in ("q", "k", "v"))
    steps: list[Launch | Memset] = [*common.tail(spec, device, *rows), *_delta(plan)]
    if plan.fused:
        steps += _main(plan)
    if "bias" in wants:
        steps += _dbias(plan)
    return Program(inputs, outputs, _workspace(plan), tuple(steps))
