"""Hopper's forward family without a GPU: what it refuses, its tiles, its program, what ptxas makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cuattn import params
from cuattn.device import A100, H200
from cuattn.families import sm90
from cuattn.program import Launch
from cuattn.spec import AttentionSpec, Operand, Signature, bind, row_major

DIMS = (8, 40, 64, 72, 96, 128, 136, 192, 200, 256)
# bytes stored and loaded by the producer thread (32 registers with three consumer warpgroups), once a tile
PRODUCER_SPILLS = 192
SEGMENTS = ("q_segment_ids", "kv_segment_ids")


def spec_of(
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    seqlen: int = 1000,
    extra: tuple[str, ...] = (),
    **options: Any,
) -> AttentionSpec:
    def signature(*shape: int) -> Signature:
        return Signature(dtype, shape, row_major(shape))

    arrays = {
        "q": signature(2, seqlen, 4, head_dim),
        "k": signature(2, seqlen, 2, head_dim),
        "v": signature(2, seqlen, 2, head_dim_v or head_dim),
    }
    if "dropout_p" in options:
        arrays["dropout_seed"] = Signature("int64", (5,), (1,))
    scores = (2, 4, seqlen, seqlen)
    operands = {
        "bias": (dtype, scores),
        "mask": ("bool", (1, 1, *scores[2:])),
        "alibi_slopes": ("float32", (4,)),
        "q_segment_ids": ("int32", (2, seqlen)),
        "kv_segment_ids": ("int32", (2, seqlen)),
    }
    for name in extra:
        kind, shape = operands[name]
        arrays[name] = Signature(kind, shape, row_major(shape))
    return bind(arrays, **options)


def long_spec(*dims: int, **options: Any) -> AttentionSpec:
    """Enough rows to fill a GPU with the largest tiles."""
    return spec_of(*dims, seqlen=5000, **options)


def packed_spec(head_dim: int, sequences: int = 5, **options: Any) -> AttentionSpec:
    shape = (900, 4, head_dim)
    arrays = {name: Signature("bfloat16", shape, row_major(shape)) for name in "qkv"}
    arrays |= {f"cu_seqlens_{name}": Signature("int32", (sequences + 1,), (1,)) for name in "qk"}
    return bind(arrays, layout="thd", max_seqlen_q=300, max_seqlen_k=300, **options)


@pytest.mark.parametrize("head_dim_v", DIMS)
@pytest.mark.parametrize("head_dim", DIMS)
def test_every_tile_fits(head_dim: int, head_dim_v: int) -> None:
    t = sm90.tile(long_spec(head_dim, head_dim_v), H200)
    assert t.shared_memory <= H200.shared_memory_per_block
    assert head_dim <= t.head_dim and head_dim_v <= t.head_dim_v
    # a consumer thread holds scores, weights (half as many registers) and outputs of 64 rows a warpgroup
    most = 160 if t.block_m == 192 else 232
    assert t.block_n // 2 + t.block_n // 4 + t.head_dim_v // 2 < most


@pytest.mark.parametrize(
    "extra",
    [("bias",), ("mask",), SEGMENTS, ("bias", "mask", *SEGMENTS), ()],
    ids=["bias", "mask", "segments", "all", "dropout"],
)
@pytest.mark.parametrize("seqlen", [64, 5000])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(128, 128), (192, 128), (64, 192), (192, 192), (256, 64), (256, 256)]
)
def test_tiles_of_scores_with_operands_fit(
    head_dim: int, head_dim_v: int, seqlen: int, extra: tuple[str, ...]
) -> None:
    options = {} if extra else {"dropout_p": 0.1}
    spec = spec_of(head_dim, head_dim_v, seqlen=seqlen, extra=extra, **options)
    assert sm90.refuses(spec, H200) is None
    t = sm90.tile(spec, H200)
    assert t.shared_memory <= H200.shared_memory_per_block
    assert t.block_m == (64 if seqlen == 64 else 128)
    assert t.block_n % 32 == 0  # columns that a call of the random numbers serves
    assert spec.mask is None or 128 % t.block_n == 0  # keys that are packed together
    held = t.block_n // (2 if spec.bias is not None and not t.bias_tiles else 4)  # bias or weights
    assert t.block_n // 2 + held + t.head_dim_v // 2 < 232


def test_refusals_say_why() -> None:
    assert sm90.refuses(spec_of(), H200) is None
    assert "9.0" in str(sm90.refuses(spec_of(), A100))
    assert "float32" in str(sm90.refuses(spec_of(dtype="float32"), H200))
    assert "multiples of 8" in str(sm90.refuses(spec_of(100), H200))
    assert "softmax_scale" in str(sm90.refuses(spec_of(softmax_scale=-1.0), H200))
    spec = spec_of()
    shifted = replace(spec, k=replace(spec.k, align=8))
    assert "k's are aligned to 8" in str(sm90.refuses(shifted, H200))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_program(head_dim: int, causal: bool) -> None:
    spec = long_spec(head_dim, causal=causal)
    program = sm90.forward(spec, H200)
    launch = program.steps[-1]
    assert program.inputs == ("q", "k", "v")
    assert [m.buffer for m in launch.tensor_maps] == ["q", "k", "v", "out"]
    for tensor_map in launch.tensor_maps:
        assert all(stride % 16 == 0 and stride > 0 for stride in tensor_map.strides)
        assert tensor_map.box[0] * 2 <= tensor_map.swizzle
    assert len(launch.block_words) == 8 * len(params.FIELDS)
    assert launch.grid[0] <= H200.sm_count
    # tiles of equal work, or few of them, need no counter, and with it no second launch
    assert len(program.steps) == (2 if causal else 1)
    assert launch.dependent == causal
    assert len(sm90.forward(spec_of(head_dim, causal=causal), H200).steps) == 1


def test_tiles_follow_the_work() -> None:
    """64 rows a tile where 128 would leave SMs idle; three warpgroups where exponentials decide."""
    assert sm90.tile(spec_of(128, seqlen=64), H200).block_m == 64
    assert sm90.tile(spec_of(128, seqlen=1000, causal=True), H200).block_m == 64
    assert sm90.tile(long_spec(128, causal=True), H200).block_m == 128
    assert sm90.tile(long_spec(64), H200).block_m == 192


@pytest.mark.parametrize(
    ("offset", "options", "sided"),
    [
        *((offset, {}, offset % 128 == 0) for offset in (0, 128, -256, 64, 1)),
        *((offset, {"causal": True}, offset % 128 == 0) for offset in (0, 128, -256, 64, 1)),
        (0, {"window_size": (100, 0)}, False),
        (0, {"window_size": (100, 1)}, False),
        (0, {"window_size": (100, -1)}, False),
    ],
)
def test_alibi_asks_for_sides_where_diagonals_cross_many_blocks(
    offset: int, options: dict[str, Any], sided: bool
) -> None:
    spec = long_spec(128, extra=("alibi_slopes",), q_offset=offset, **options)
    assert dict(sm90.forward(spec, H200).steps[-1].kernel.defines)["ALIBI_SIDED"] == sided


def test_packed_sequences_are_listed_first() -> None:
    program = sm90.forward(packed_spec(128, causal=True), H200)
    names = {b.name: b.shape for b in program.workspace}
    assert names == {"semaphore": (2,), "scratch": (11,)}
    assert [step.kernel.source for step in program.steps] == ["tail", "fwd_sm90_prepare", "fwd_sm90"]


def test_maps_hold_visible_keys_only() -> None:
    """NaN in a key that no query sees must not be loaded: 0 * NaN is NaN."""
    program = sm90.forward(spec_of(causal=True, q_offset=-300), H200)
    keys = next(m for m in program.steps[-1].tensor_maps if m.buffer == "k")
    assert keys.dims[1] == 700


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("full", long_spec()),
        ("causal", long_spec(causal=True)),
        ("window", long_spec(causal=True, window_size=(100, 0))),
        ("softcap", long_spec(causal=True, softcap=20.0)),
        ("float16", long_spec(dtype="float16")),
        ("packed", packed_spec(128, causal=True)),
        ("few rows", spec_of(causal=True)),
        ("dropout", long_spec(dropout_p=0.1)),
        ("bias", long_spec(extra=("bias",))),
        ("bias of 64", long_spec(64, extra=("bias",), causal=True)),
        ("mask", long_spec(extra=("mask",), causal=True)),
        ("segments", long_spec(extra=SEGMENTS)),
        ("dropout of 256", long_spec(256, dropout_p=0.1, causal=True)),
        ("bias of 256", long_spec(256, extra=("bias",))),
        ("mask of 256", long_spec(256, extra=("mask",), causal=True)),
        ("all of 256", long_spec(256, extra=("bias", "mask", *SEGMENTS), dropout_p=0.1)),
        ("segments of 192 and 128", long_spec(192, 128, extra=SEGMENTS, causal=True)),
        ("bias of 192", long_spec(192, extra=("bias",), causal=True)),
        ("alibi", long_spec(extra=("alibi_slopes",), causal=True)),
        ("64", long_spec(64)),
        ("64 causal", long_spec(64, causal=True)),
        ("96", long_spec(96)),
        ("192 and 128", long_spec(192, 128)),
        ("256", long_spec(256)),
        ("256 causal", long_spec(256, causal=True)),
    ],
)
def test_ptxas_neither_serialises_nor_spills(name: str, spec: AttentionSpec) -> None:
    """C75xx: wgmmas wait for each other or registers are not handed over; either halves the speed."""
    pytest.importorskip("cupy")
    from cuattn import device, jit

    try:
        device.import_nvrtc()
    except Exception as fault:
        pytest.skip(f"no NVRTC: {fault}")
    for step in sm90.forward(spec, H200).steps:
        if not isinstance(step, Launch):
            continue
        found = jit.build(step.kernel, 90)
        assert found.warnings == ()
        assert found.spill_bytes <= PRODUCER_SPILLS


def test_scores_with_operands() -> None:
    """TMA brings a 16-bit bias whose rows allow it; a pass ahead packs masks and marks tiles for segments."""
    bias = sm90.forward(long_spec(extra=("bias",)), H200)
    assert [m.buffer for m in bias.steps[-1].tensor_maps] == ["q", "k", "v", "out", "bias"]
    odd = sm90.forward(spec_of(seqlen=4999, extra=("bias",)), H200)
    assert len(odd.steps[-1].tensor_maps) == 4
    masked = sm90.forward(long_spec(extra=("mask", *SEGMENTS)), H200)
    assert [getattr(s, "buffer", None) or s.kernel.source for s in masked.steps][:2] == [
        "live_tiles",
        "fwd_sm90_mask",
    ]
    sizes = {b.name: b.shape[0] for b in masked.workspace}
    rows, words = -(-5000 // 128) * 128, 4 * -(-5000 // 128)
    assert sizes["mask_bits"] == rows * words  # of one head and entry: the mask has one
    for spec in (long_spec(extra=("bias",)), long_spec(64, extra=("bias", "mask")), spec_of(extra=("bias",))):
        assert sm90.tile(spec, H200).shared_memory <= H200.shared_memory_per_block


def test_blocks_of_64_keys_have_bits_of_their_own() -> None:
    """The mask is packed by 128 keys; which of its halves are empty or whole is known apart."""
    program = sm90.forward(long_spec(256, extra=("mask",)), H200)
    sizes = {b.name: b.shape[0] for b in program.workspace}
    rows, halves = -(-5000 // 128), 2 * -(-5000 // 128)
    assert sizes["mask_bits"] == rows * 128 * 4 * halves // 2
    assert sizes["live_tiles"] == rows * 2 * -(-halves // 32)


def test_a_mask_of_keys_is_packed_once() -> None:
    spec = long_spec(extra=("mask",))
    keys = replace(spec, mask=Operand("bool", spec.mask.shape, (5000, 0, 0, 1)))
    (bits,) = (b for b in sm90.forward(keys, H200).workspace if b.name == "mask_bits")
    assert bits.shape == (2 * 4 * -(-5000 // 128),)


def test_where_keys_are_masked_v_is_looked_at() -> None:
    """A bit for each key block of each KV head, behind the bitmap; no other mask needs V."""
    pairs = long_spec(extra=("mask",))
    keys = replace(pairs, mask=Operand("bool", pairs.mask.shape, (5000, 0, 0, 1)))
    blocks = -(-5000 // 128)
    words = -(-blocks // 32)
    for spec, heads in ((pairs, 0), (keys, 2 * 2)):
        program = sm90.forward(spec, H200)
        (ahead,) = (s for s in program.steps if isinstance(s, Launch) and s.kernel.source == "fwd_sm90_mask")
        assert (("v", "v") in ahead.pointers) == (heads > 0)
        (bitmap,) = (b for b in program.workspace if b.name == "live_tiles")
        batches = 2 if heads else 1  # the mask of pairs is one for all
        assert bitmap.shape == (batches * blocks * 2 * words + heads * words,)
        assert 4 * ahead.grid[0] >= blocks * (batches * blocks + heads)


@pytest.mark.parametrize(("cap", "terms"), [(0.0, 0), (8.0, 5), (30.0, 3), (50.0, 3)])
def test_a_small_cap_needs_a_longer_polynomial(cap: float, terms: int) -> None:
    (*_, launch) = sm90.forward(long_spec(softcap=cap), H200).steps
    assert dict(launch.kernel.defines)["CAP_TERMS"] == terms
    for other in (long_spec(256, softcap=cap), packed_spec(128, softcap=cap)):
        assert dict(sm90.forward(other, H200).steps[-1].kernel.defines)["CAP_TERMS"] == 0
