"""Hopper's backward family without a GPU: its refusals, its tiles, its program, who waits for whom."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cuattn.device import A100, H200
from cuattn.families import sm90_backward as family
from cuattn.families.sm90_dbias import Way
from cuattn.program import Launch, Memset
from cuattn.spec import AttentionSpec, Signature, bind, row_major

ALL = frozenset({"q", "k", "v"})
SUBSETS = [frozenset(x) for n in (1, 2, 3) for x in itertools.combinations("qkv", n)]


def spec_of(
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    lengths: Any = (1000, 1000),
    **options: Any,
) -> AttentionSpec:
    def signature(*shape: int) -> Signature:
        return Signature(dtype, shape, row_major(shape))

    arrays = {
        "q": signature(2, lengths[0], 4, head_dim),
        "k": signature(2, lengths[1], 2, head_dim),
        "v": signature(2, lengths[1], 2, head_dim_v or head_dim),
    }
    for name in ("sinks", "alibi_slopes"):
        if options.pop(name, False):
            arrays[name] = Signature("float32", (4,), (1,))
    if options.pop("kv_seqlens", False):
        arrays["kv_seqlens"] = Signature("int32", (2,), (1,))
    if options.pop("segments", False):
        arrays["q_segment_ids"], arrays["kv_segment_ids"] = (
            Signature("int32", (2, n), (n, 1)) for n in lengths
        )
    if "mask" in options:
        shape = options.pop("mask")
        arrays["mask"] = Signature("bool", shape, row_major(shape))
    if "bias" in options:
        kind, shape = options.pop("bias")
        arrays["bias"] = Signature(kind, shape, row_major(shape))
    if options.get("dropout_p"):
        arrays["dropout_seed"] = Signature("int64", (5,), (1,))
    return bind(arrays, **options)


def packed_spec(head_dim: int = 128, sequences: int = 5, **options: Any) -> AttentionSpec:
    shape = (900, 4, head_dim)
    arrays = {name: Signature("bfloat16", shape, row_major(shape)) for name in "qkv"}
    arrays |= {f"cu_seqlens_{name}": Signature("int32", (sequences + 1,), (1,)) for name in "qk"}
    return bind(arrays, layout="thd", max_seqlen_q=300, max_seqlen_k=300, **options)


def launches(spec: AttentionSpec, wants: frozenset[str] = ALL) -> list[Launch]:
    steps = family.backward(spec, H200, wants).steps
    return [step for step in steps if isinstance(step, Launch)]


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 136, 256])
def test_every_tile_fits(head_dim: int) -> None:
    for softcap in (0.0, 3.0):
        tile = family.tile_of(spec_of(head_dim, softcap=softcap))
        assert all(tile.shared_memory(wants) <= H200.shared_memory_per_block for wants in SUBSETS)
        assert tile.head_dim >= head_dim


@pytest.mark.parametrize(
    ("head_dim", "length", "options", "rows", "cut"),
    [
        (64, 1000, {"causal": True}, 128, 1), (64, 1000, {}, 128, 0),
        (64, 1000, {"window_size": (-1, 50)}, 128, 1), (128, 1000, {"causal": True}, 64, 1),
        (64, 1000, {"causal": True, "deterministic": True}, 128, 0), (128, 2000, {"causal": True}, 64, 0),
        (128, 9000, {"window_size": (600, 0)}, 64, 1), (128, 9000, {"causal": True}, 64, 0),
        (128, 9000, {}, 80, 0), (256, 1000, {"causal": True}, 64, 0),
        (128, 1000, {"causal": True, "deterministic": True}, 80, 0),
    ],
)  # fmt: skip
def test_tiles_of_plain_calls(head_dim: int, length: int, options: Any, rows: int, cut: int) -> None:
    tile = family.tile_of(spec_of(head_dim, lengths=(length, length), **options))
    assert (tile.block_m, tile.cut) == (rows, cut)


FEATURES: list[dict[str, Any]] = [
    {"mask": (2, 4, 1000, 1000)}, {"mask": (2, 1, 1, 1000), "segments": True}, {"dropout_p": 0.1},
    {"bias": ("bfloat16", (4, 1000, 1000))},
    {"bias": ("float32", (4, 1000, 1000)), "dropout_p": 0.1, "segments": True},
    {"softcap": 3.0, "alibi_slopes": True}, {"softcap": 3.0, "kv_seqlens": True},
    {"bias": ("bfloat16", (4, 1000, 1000)), "softcap": 3.0, "alibi_slopes": True},
    {"dropout_p": 0.1, "window_size": (9, 0), "q_offset": 19},
    {"dropout_p": 0.1, "window_size": (9, 0), "kv_seqlens": True, "mask": (2, 4, 1000, 1000)},
]  # fmt: skip


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 64), (64, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("features", FEATURES, ids=lambda x: " ".join(x))
def test_features_are_taken(features: dict[str, Any], dims: tuple[int, int]) -> None:
    spec = spec_of(*dims, **features)
    assert family.refuses(spec, H200) is None
    assert family.tile_of(spec).shared_memory(ALL) <= H200.shared_memory_per_block
    *ahead, prepare, main, convert = launches(spec)
    name = "bwd_sm90_wide" if max(dims) > 128 else "bwd_sm90"
    found = [step.kernel.source for step in (prepare, main, convert)]
    assert found == ["bwd_sm90_delta", name, "bwd_sm90_convert"]
    skipping = "mask" in features or "segments" in features
    assert [step.kernel.source for step in ahead] == ["bwd_sm90_mask"] * skipping
    defines = dict(main.kernel.defines)
    assert defines.get("MASK", 0) == ("mask" in features)
    assert defines.get("DROPOUT", 0) == ("dropout_p" in features)


def test_bias_comes_by_tma_where_it_can() -> None:
    maps = [
        len(launches(spec_of(lengths=(256, n), bias=(kind, (4, 256, n))))[1].tensor_maps)
        for kind, n in (("bfloat16", 256), ("bfloat16", 257), ("float32", 256))
    ]
    assert maps == [5, 4, 4]


def test_a_broadcast_mask_is_packed_once() -> None:
    def words(shape: tuple[int, ...]) -> int:
        program = family.backward(spec_of(mask=shape), H200, ALL)
        return next(b.shape[0] for b in program.workspace if b.name == "mask_bits")

    rows = words((1000, 1000))
    assert rows == 16 * 8 * 256  # blocks of 64 rows by 128 keys, a bit a score
    assert words((2, 4, 1000, 1000)) == 8 * rows
    assert words((2, 1, 1, 1000)) == 2 * rows // 16


FULL_BIAS = (2, 4, 1000, 1000)


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "way"),
    [
        (FULL_BIAS, "bfloat16", {}, Way.STORED), (FULL_BIAS, "bfloat16", {"causal": True}, Way.STORED),
        (FULL_BIAS, "float32", {}, Way.PASS), (FULL_BIAS, "bfloat16", {"head_dim": 256}, Way.OTHER),
        ((4, 1000, 1000), "bfloat16", {}, Way.PASS), ((1000, 1000), "float32", {"segments": True}, Way.PASS),
        ((4, 1000, 1000), "bfloat16", {"causal": True, "kv_seqlens": True}, Way.PASS),
        ((4, 1000, 1000), "bfloat16", {"segments": True, "causal": True, "kv_seqlens": True}, Way.OTHER),
        ((2, 1, 1, 1000), "bfloat16", {"causal": True}, Way.OF_KEYS), ((1000,), "float32", {}, Way.OF_KEYS),
        ((4, 1, 1000), "bfloat16", {}, Way.OTHER), ((4, 1000, 1), "bfloat16", {}, Way.OTHER),
    ],
)  # fmt: skip
def test_who_makes_the_bias_gradient(
    shape: tuple[int, ...], dtype: str, options: dict[str, Any], way: Way
) -> None:
    spec, wants = spec_of(bias=(dtype, shape), **options), ALL | {"bias"}
    assert family._bias_way(spec, family.tile_of(spec), wants) == way
    program = family.backward(spec, H200, wants)
    assert [b.name for b in program.outputs] == ["dq", "dk", "dv", "dbias"]
    assert program.outputs[-1].shape == shape and program.outputs[-1].dtype == dtype
    sources = [step.kernel.source for step in program.steps if isinstance(step, Launch)]
    held = {b.name: b.shape for b in program.workspace}
    assert ("bwd_sm90_dbias" in sources) == (way == Way.PASS)
    assert ("bwd_dbias" in sources) == ("bias_delta" in held) == (way == Way.OTHER)
    main = next(
        step for step in program.steps if isinstance(step, Launch) and step.grid[0] > 1 and step.block == 384
    )
    maps = [m.buffer for m in main.tensor_maps]
    assert ("dbias" in maps) == (way == Way.STORED)
    if way == Way.OF_KEYS:  # a sum for each entry and key/value head
        assert math.prod(held["bias_parts"]) == 4 * 1000
    # what is not stored for every element is set to zero first
    memsets = {step.buffer for step in program.steps if isinstance(step, Memset)}
    assert "dbias" not in memsets


def test_a_stored_bias_gradient_starts_as_zeros_where_tiles_are_left_out() -> None:
    def memsets(**options: Any) -> set[str]:
        steps = family.backward(spec_of(bias=("bfloat16", FULL_BIAS), **options), H200, ALL | {"bias"}).steps
        return {step.buffer for step in steps if isinstance(step, Memset)}

    assert "dbias" not in memsets() | memsets(causal=True)
    assert "dbias" in memsets(window_size=(64, 0)) & memsets(segments=True) & memsets(kv_seqlens=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_the_bias_pass_fits(head_dim: int, dtype: str, dropout_p: float) -> None:
    spec = spec_of(head_dim, bias=(dtype, (4, 1000, 1000)), dropout_p=dropout_p)
    program = family.backward(spec, H200, ALL | {"bias"})
    steps = [step for step in program.steps if isinstance(step, Launch)]
    found = next(step for step in steps if step.kernel.source == "bwd_sm90_dbias")
    assert found.shared_memory <= H200.shared_memory_per_block
    defines = dict(found.kernel.defines)
    assert int(defines["SLOTS"]) >= 5
    assert found.grid[0] <= H200.sm_count


def test_refusals_say_why() -> None:
    assert family.refuses(spec_of(), H200) is None
    assert "sm_90" in str(family.refuses(spec_of(), A100))
    assert "float16" in str(family.refuses(spec_of(dtype="float32"), H200))
    assert "16 bytes" in str(family.refuses(spec_of(100), H200))
    spec = spec_of()
    assert "broadcast" in str(family.refuses(replace(spec, dout=replace(spec.q, strides=(0, 0, 0, 1))), H200))


def test_many_tiny_sequences_are_not_padded() -> None:
    shape = (65536, 4, 8, 64)
    arrays = {name: Signature("bfloat16", shape, row_major(shape)) for name in "qkv"}
    assert "pad" in str(family.refuses(bind(arrays), H200))


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 80), ({"window_size": (1024, -1)}, 80), ({"causal": True, "deterministic": True}, 80),
        ({"causal": True}, 64), ({"window_size": (1024, 0)}, 64), ({"softcap": 1.0}, 64),
    ],
)  # fmt: skip
def test_tiles_of_64_rows_at_edges(options: dict[str, Any], rows: int) -> None:
    assert family.tile_of(spec_of(lengths=(9000, 9000), **options)).block_m == rows
    assert family.tile_of(spec_of(**options)).block_m == (80 if "deterministic" in options else 64)
    assert family.tile_of(spec_of(64, **options)).block_m == (96 if "softcap" in options else 128)


@pytest.mark.parametrize(
    ("head_dim", "length", "options", "leaves"),
    [
        (128, 1024, {"causal": True}, True),
        (128, 1024, {}, False),
        (128, 2048, {"causal": True}, False),
        (64, 2048, {"causal": True}, True),
        (64, 16384, {"window_size": (1024, 0)}, True),
        (64, 1024, {"causal": True, "deterministic": True}, False),
        (256, 64, {}, False),
    ],
)
def test_few_steps_leave_dq_to_the_kernel_after(
    head_dim: int, length: int, options: dict[str, Any], leaves: bool
) -> None:
    spec = replace(spec_of(head_dim, lengths=(length, length), **options), heads_q=2)
    assert spec.group == 1
    assert family._leaves_dq(spec, family.tile_of(spec)) == leaves
    assert not family._leaves_dq(replace(spec, heads_q=32), family.tile_of(spec))


@pytest.mark.parametrize("lengths", [(1000, 1000), (300, 700), (700, 300)])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "q_offset": 0}, {"window_size": (64, 9)}]
)
def test_visible_rows_and_keys(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    spec = spec_of(lengths=lengths, **options)
    offset = int(spec.q_offset)
    seen = [
        (i, j)
        for i in range(lengths[0])
        for j in (
            0,
            max(0, i + offset - 64),
            max(0, i + offset),
            min(lengths[1] - 1, i + offset + 9),
            lengths[1] - 1,
        )
        if 0 <= j < lengths[1]
        and (spec.window_right < 0 or j - i - offset <= spec.window_right)
        and (spec.window_left < 0 or i + offset - j <= spec.window_left)
    ]
    rows, keys = {i for i, _ in seen}, {j for _, j in seen}
    assert family.visible(spec) == (min(rows), max(rows) + 1, min(keys), max(keys) + 1)


@pytest.mark.parametrize(("offset", "first"), [(19, 0), (40, 0), (41, 32), (73, 64), (2000, 0)])
def test_dropout_begins_on_a_group_of_keys(offset: int, first: int) -> None:
    """Of the 32 keys that a Philox call serves in part; a window that begins there, or before it."""
    spec = spec_of(dropout_p=0.1, window_size=(9, 0), q_offset=offset)
    assert family.visible(spec)[2] == first
    main = launches(spec)[1]
    keys = {m.buffer: m for m in main.tensor_maps}["k"]
    assert keys.offset == 2 * first * spec.k.strides[2]
    assert keys.dims[1] == max(1, family.visible(spec)[3] - first)


def test_nothing_visible() -> None:
    spec = spec_of(lengths=(10, 10), causal=True, q_offset=-20)
    assert family.visible(spec) == (0, 0, 0, 0)
    assert [x.grid[0] for x in launches(spec)] == [8, 4, 8]  # zeros are written by the same kernels


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_the_program(head_dim: int, causal: bool) -> None:
    program = family.backward(spec_of(head_dim, causal=causal), H200, ALL)
    assert program.inputs == ("q", "k", "v", "out", "lse", "dout")
    assert [b.name for b in program.outputs] == ["dq", "dk", "dv"]
    main = launches(spec_of(head_dim, causal=causal))[1]
    stored = ["dk", "dv"] if head_dim == 128 else []
    assert [m.buffer for m in main.tensor_maps] == ["q", "k", "v", "dout", *stored]
    for tensor_map in main.tensor_maps:
        assert all(stride % 16 == 0 and stride > 0 for stride in tensor_map.strides)
    floats = sum(b.shape[0] * b.shape[1] * b.shape[2] for b in program.workspace if b.name == "dq_accum")
    assert floats < 1.1 * 2 * 4 * 1000 * head_dim + 2 * 4 * 128 * head_dim


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("wants", SUBSETS, ids=lambda wants: "".join(sorted(wants)))
def test_only_what_is_wanted_is_made(wants: frozenset[str], sinks: bool, head_dim: int) -> None:
    """No other outputs, sums, steps or pointers; the kernels are told."""
    spec = spec_of(head_dim, lengths=(8192, 8192), sinks=sinks)
    program = family.backward(spec, H200, wants | ({"sinks"} if sinks else set()))
    names = [f"d{x}" for x in "qkv" if x in wants] + ["dsinks"] * sinks
    assert [b.name for b in program.outputs] == names
    assert ("sinks" in program.inputs) == sinks
    held = {b.name for b in program.workspace}
    of_dq = {"dq_accum", "turns"} if "q" in wants else set()
    of_rows = {"delta"} if sinks or wants & {"q", "k"} else set()
    assert held == {"lse_log2"} | of_dq | of_rows
    steps = [step for step in program.steps if isinstance(step, Launch)]
    assert [s.kernel.source for s in steps].count("bwd_sm90_convert") == ("q" in wants)
    known = {*program.inputs, *names, *held}
    assert all(buffer in known for step in steps for _, buffer in step.pointers)
    told = dict(steps[1].kernel.defines)
    assert {x for x in "qkv" if told[f"WANT_D{x.upper()}"]} == wants
    tile = family.tile_of(spec)
    assert steps[1].shared_memory <= tile.shared_memory(ALL)
    if "q" not in wants:  # nobody adds to others' sums
        words = family._words(spec, H200, tile, spec.q, wants)
        assert words["aux4"] == 0 and not told["DETERMINISTIC"]


def test_nothing_to_make_is_refused() -> None:
    with pytest.raises(AssertionError):
        family.backward(spec_of(sinks=True), H200, frozenset({"sinks"}))


def test_a_new_length_compiles_nothing() -> None:
    kernels = [
        {step.kernel for step in launches(spec_of(lengths=(n, n), causal=True))} for n in (100, 1000, 1003)
    ]
    assert kernels[0] == kernels[1] == kernels[2]


def test_packed_sequences_start_on_a_block() -> None:
    spec = packed_spec()
    block_m = family.tile_of(spec).block_m
    _, rows = family.sums_shape(spec, block_m)
    starts, lengths = [0, 300, 301, 301, 600], [300, 1, 0, 299, 300]
    at = [(start // block_m + b) * block_m for b, start in enumerate(starts)]
    for b, length in enumerate(lengths):
        end = at[b] + -(-length // block_m) * block_m
        assert end <= (at[b + 1] if b < 4 else rows)


def first_slots(starts: list[int], size: int) -> list[int]:
    """bwd_sm90.cuh's slot_of in Python: the first slot of each packed sequence."""
    return [b and start // size + 2 * b for b, start in enumerate(starts)]


@pytest.mark.parametrize("size", [64, 80, 128])
def test_packed_sequences_have_slots_enough(size: int) -> None:
    """For visible rows and for zeros, each cut into blocks, wherever the sequences lie."""
    spec = packed_spec()
    begin = [*first_slots([3, 300, 301, 301, 600], size), family._slots(size, 900, 900, spec)]
    for first, end, length in zip(begin[:-1], begin[1:], (297, 1, 0, 299, 300), strict=True):
        for seen in range(length + 1):
            assert -(-seen // size) + -(-(length - seen) // size) <= end - first


@dataclass(frozen=True)
class Cta:
    """What a CTA of the main kernel does: a unit's key slot, or a share of a section."""

    role: str
    where: int
    index: int


def ctas(together: int, tiles: int, shares: int, units: int, clears: bool, interleaved: bool) -> list[Cta]:
    """bwd_sm90_block.cuh's job_of in Python, over the grid."""
    found = []
    sections, own = -(-units // together), together * tiles
    late, cleared = own - own // 4, shares if clears else 0
    for index in range(sections * (own + shares + cleared)):
        section, i = divmod(index, own + shares + cleared)
        if i < cleared:
            found += [Cta("clear", section + 1, i)] * (section + 1 < sections)
            continue
        i -= cleared
        if late <= i < late + shares:
            found += [Cta("convert", section - 1, i - late)] * (section > 0)
            continue
        i -= shares if i >= late else 0
        unit = section * together + (i % together if interleaved else i // tiles)
        found += [Cta("tile", unit, i // together if interleaved else i % tiles)] * (unit < units)
    return found


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize(
    ("together", "tiles", "shares", "units"), [(3, 4, 2, 9), (4, 5, 1, 10), (5, 3, 0, 5), (1, 7, 3, 4)]
)
def test_a_cta_waits_for_earlier_ones_alone(
    together: int, tiles: int, shares: int, units: int, clears: bool, interleaved: bool
) -> None:
    order = ctas(together, tiles, shares, units, clears, interleaved)
    at = {cta: i for i, cta in enumerate(order)}
    sections = -(-units // together)
    assert len(at) == len(order) == units * tiles + (sections - 1) * shares * (2 if clears else 1)
    for unit in range(units):
        mine = [at[Cta("tile", unit, n)] for n in range(tiles)]
        assert mine == sorted(mine)  # deterministic turns: in key order
        section = unit // together
        if section > 0 and clears:
            assert all(at[Cta("clear", section, i)] < mine[0] for i in range(shares))
        if section < sections - 1:
            assert all(at[Cta("convert", section, i)] > mine[-1] for i in range(shares))


@pytest.mark.parametrize(
    ("shape", "sections"),
    [((16, 16, 1024), 8), ((4, 16, 4096), 8), ((1, 16, 16384), 8), ((1, 2, 1024), 1), ((1, 1, 65536), 1)],
)
def test_sections_fill_the_gpu(shape: tuple[int, int, int], sections: int) -> None:
    batch, heads, length = shape
    signature = Signature("bfloat16", (batch, length, heads, 128), row_major((batch, length, heads, 128)))
    spec = bind(dict.fromkeys("qkv", signature), causal=True)
    words = family._words(spec, H200, family.tile_of(spec), spec.q, ALL)
    found = family.sections_of(spec, H200, int(words["aux1"]), int(words["aux2"]), ALL)
    assert found.count == sections
    assert found.count * found.together == found.units  # no short section at the end
    leaves = length == 1024  # all of dQ to the kernel after
    assert (found.shares == 0) == (sections == 1 or leaves)
    assert found.left == (found.units if leaves else found.units - (sections - 1) * found.together)
    if sections > 1:
        assert found.together * int(words["aux2"]) >= 1.5 * H200.sm_count
