"""Hopper's forward for few query rows against many keys: packed query heads, and keys cut into parts.

The same kernel as ``sm90``'s (``kernels_cu/fwd_sm90.cu``, SPLIT), with other tiles: a tile's rows are those
of several query heads that share a KV head, so keys and values are read once; where that leaves SMs idle,
each tile's keys are cut into parts and ``fwd_merge.cu`` combines them. Pure: shapes decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import params
from ..program import Buffer, Kernel, Launch, Program
from . import common, sm90

if TYPE_CHECKING:
    from ..device import Device
    from ..spec import AttentionSpec

MOST_PARTS = 256
SCRATCH_BYTES = 64 << 20  # of all parts: what L2 holds
# Fitted to an H200, in microseconds; see docs/performance/hopper_forward.md.
STEP = {64: 1.0, 128: 1.35, 192: 1.9}  # a tile of so many rows against 128 keys, head_dim 128
TILE = 3.0  # a tile's start and end, or the launch
MERGE, MERGE_MB = 4.0, 0.7  # the second launch; writing and reading a megabyte of parts
MEMORY = 4.2e6  # bytes of keys and values
HIDDEN = 0.85  # share of the lesser of arithmetic and memory that goes on beside the greater
GAIN, LEAST = 0.9, 3.0  # parts must come below this share of the estimate without them, and win as much


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows are packed and keys are cut."""

    tile: sm90.Tile
    rows: int  # of a head in a tile, a power of two
    heads: int  # of a group in a tile
    blocks: int  # tiles of a KV head and part
    parts: int

    def tiles(self, spec: AttentionSpec) -> int:
        return self.blocks * self.parts * spec.heads_kv * spec.batch


def _tile(spec: AttentionSpec, block_m: int) -> sm90.Tile:
    """What fits beside one Q; a third stage at 128 head dims made nothing faster."""
    d, dv = sm90.rounded(spec.head_dim), sm90.rounded(spec.head_dim_v)
    if max(d, dv) <= 128:
        return sm90.Tile(d, dv, block_m, 128, 4 if max(d, dv) <= 64 else 2, 1, 0, sm90.STRIDE, early_exps=4)
    if dv <= 128 and d <= 192:
        return sm90.Tile(d, dv, block_m, 128, 2, 1, 0, sm90.STRIDE)
    if max(d, dv) <= 192:
        return sm90.Tile(d, dv, block_m, 112, 2, 1, 0, sm90.STRIDE)
    return sm90.Tile(d, dv, block_m, 80, 2, 1, 0, sm90.STRIDE, early_exps=2)


def cut(spec: AttentionSpec, device: Device, parts: int | None = None, block_m: int | None = None) -> Cut:
    """The cut of a spec; ``parts`` and ``block_m`` override what shapes decide."""
    packed = spec.seqlen_q * spec.group
    t = _tile(spec, block_m or (64 if packed <= 64 else 128))
    rows = min(t.block_m, 1 << (spec.seqlen_q - 1).bit_length())
    heads = min(spec.group, t.block_m // rows)
    blocks = -(-spec.seqlen_q // rows) * -(-spec.group // heads)
    found = Cut(t, rows, heads, blocks, 1)
    return replace(found, parts=parts or _parts(spec, device, found))


def _parts(spec: AttentionSpec, device: Device, one: Cut) -> int:
    """The number of parts with the smallest estimate; of equals the fewest."""
    bytes_a_part = 4 * spec.batch * spec.heads_q * spec.seqlen_q * (spec.head_dim_v + 1)
    steps = -(-spec.seqlen_kv // one.tile.block_n)
    most = max(1, min(MOST_PARTS, steps, SCRATCH_BYTES // bytes_a_part))
    return min(range(1, most + 1), key=lambda parts: estimate(spec, device, replace(one, parts=parts)))


def _microseconds(spec: AttentionSpec, t: sm90.Tile, waves: float, steps: int) -> float:
    """Waves of tiles of ``steps`` key blocks each on all SMs, keys and values read once."""
    step = STEP[t.block_m] * t.block_n / 128 * max(0.75, (spec.head_dim + spec.head_dim_v) / 256)
    arithmetic = waves * (steps * step + TILE)
    keys = 2 * spec.batch * spec.heads_kv * spec.seqlen_kv * (spec.head_dim + spec.head_dim_v)
    memory = keys / MEMORY
    return max(arithmetic, memory) + (1 - HIDDEN) * min(arithmetic, memory) + TILE * (waves - 1)


def estimate(spec: AttentionSpec, device: Device, c: Cut) -> float:
    """Microseconds of a cut, roughly: as if masks hid nothing."""
    waves = -(-c.tiles(spec) // device.sm_count)
    blocks = -(-spec.seqlen_kv // c.tile.block_n)
    steps = -(-blocks // c.parts)
    megabytes = 4e-6 * c.parts * spec.batch * spec.heads_q * spec.seqlen_q * spec.head_dim_v
    return _microseconds(spec, c.tile, waves, steps) + MERGE + MERGE_MB * megabytes


def plain_estimate(spec: AttentionSpec, device: Device) -> float:
    """The same without packed heads and parts: ``sm90``'s, whose many unequal tiles are dealt out evenly."""
    t = sm90.tile(spec, device)
    waves: float = -(-sm90.tile_count(spec, t.block_m) // device.sm_count)
    if common.hides_right(spec) and waves > 1:
        visible = 1 - min(spec.seqlen_q, spec.seqlen_kv) / (2 * spec.seqlen_kv)
        waves = max(1.0, sm90.tile_count(spec, t.block_m) * visible / device.sm_count)
    return _microseconds(spec, t, waves, -(-spec.seqlen_kv // t.block_n))


def cannot(spec: AttentionSpec, device: Device) -> str | None:
    """Why this family cannot take the spec, or None."""
    reason = sm90.refuses(spec, device)
    if reason is not None:
        return reason
    if spec.varlen or sm90.featured(spec):
        return "takes no packed sequences, bias, mask, segments or dropout"
    return None


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why this family cannot take the spec, or would not be faster, or None."""
    reason = cannot(spec, device)
    if reason is not None:
        return reason
    chosen = cut(spec, device)
    if chosen.parts == chosen.heads == 1:
        return "gains too little: neither heads nor keys would be shared"
    found, before = estimate(spec, device, chosen), plain_estimate(spec, device)
    if found < GAIN * before and before - found > LEAST:
        return None
    return f"gains too little: {found:.0f} us estimated instead of {before:.0f}"


def _defines(spec: AttentionSpec, t: sm90.Tile) -> tuple[tuple[str, int | str], ...]:
    masks = int(common.hides_right(spec) or common.hides_left(spec))
    found = dict(sm90.kernel_defines(spec, t)) | {"SPLIT": 1, "LPT": 0, "LOOP_MASKS": masks, "ALIBI_SIDED": 0}
    return tuple(found.items())


def _merge(spec: AttentionSpec, words: dict[str, int | float]) -> Launch:
    defines = {name: value for name, value in common.defines(spec).items() if name in ("DTYPE", "SINKS")}
    names = ("scratch", "out", "lse", *(("sinks",) if spec.sinks is not None else ()))
    return Launch(
        kernel=Kernel("fwd_merge", "fwd_merge", tuple(defines.items())),
        grid=(-(-spec.batch * spec.heads_q * spec.seqlen_q // 4), 1, 1),
        block=128,
        shared_memory=0,
        block_words=params.pack(words),
        pointers=tuple((name, name) for name in names),
        dependent=True,
    )


def forward(spec: AttentionSpec, device: Device, c: Cut | None = None) -> Program:
    """The forward program of a spec that ``refuses`` does not refuse; ``c`` overrides the cut."""
    c = c or cut(spec, device)
    t, tiles = c.tile, c.tiles(spec)
    assert t.shared_memory <= sm90.SHARED_MEMORY, t
    rows = sm90.visible_keys(spec)
    inputs = common.operands(spec)
    words = sm90.parameter_words(spec, t, tiles) | {
        "aux0": c.blocks, "aux4": c.parts, "aux5": c.rows.bit_length() - 1, "aux6": c.heads,
    }  # fmt: skip
    scratch = Buffer(
        "scratch", (c.parts * spec.batch * spec.heads_q * spec.seqlen_q * (spec.head_dim_v + 1),), "float32"
    )
    launch = Launch(
        kernel=Kernel("fwd_sm90", "fwd_sm90", _defines(spec, t)),
        grid=(min(tiles, device.sm_count), 1, 1),
        block=t.threads,
        shared_memory=t.shared_memory,
        block_words=params.pack(words),
        pointers=tuple((name, name) for name in ("scratch", *inputs[3:])),
        tensor_maps=(
            sm90.tensor_map("q", spec.q, (0, spec.q.shape[2]), c.rows, c.heads),
            sm90.tensor_map("k", spec.k, rows, t.block_n),
            sm90.tensor_map("v", spec.v, rows, t.block_n),
            sm90.out_map(spec),
        ),
    )
    return Program(
        inputs=inputs,
        outputs=(Buffer("out", spec.out_shape, spec.dtype), Buffer("lse", spec.lse_shape, "float32")),
        workspace=(scratch,),
        steps=(launch, _merge(spec, words)),
    )
