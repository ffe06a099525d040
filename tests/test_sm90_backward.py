"""Hopper's backward family without a GPU: its refusals, its tiles, its program, the turns that CTAs take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cuattn.device import A100, H200
from cuattn.families import sm90_backward as family
from cuattn.program import Launch
from cuattn.spec import AttentionSpec, Signature, bind, row_major

ALL = frozenset({"q", "k", "v"})


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
    if options.pop("sinks", False):
        arrays["sinks"] = Signature("float32", (4,), (1,))
    if options.pop("kv_seqlens", False):
        arrays["kv_seqlens"] = Signature("int32", (2,), (1,))
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
        assert tile.shared_memory <= H200.shared_memory_per_block
        assert tile.head_dim >= head_dim


def test_refusals_say_why() -> None:
    assert family.refuses(spec_of(), H200) is None
    assert "sm_90" in str(family.refuses(spec_of(), A100))
    assert "float16" in str(family.refuses(spec_of(dtype="float32"), H200))
    assert "16 bytes" in str(family.refuses(spec_of(100), H200))
    assert "class" in str(family.refuses(spec_of(128, 64), H200))
    assert "deterministic" in str(family.refuses(spec_of(256, deterministic=True), H200))
    spec = spec_of()
    assert "broadcast" in str(family.refuses(replace(spec, dout=replace(spec.q, strides=(0, 0, 0, 1))), H200))


def test_many_tiny_sequences_are_not_padded() -> None:
    shape = (65536, 4, 8, 64)
    arrays = {name: Signature("bfloat16", shape, row_major(shape)) for name in "qkv"}
    assert "pad" in str(family.refuses(bind(arrays), H200))


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
    assert [m.buffer for m in main.tensor_maps] == ["q", "k", "v", "dout"]
    for tensor_map in main.tensor_maps:
        assert all(stride % 16 == 0 and stride > 0 for stride in tensor_map.strides)
    floats = sum(b.shape[0] * b.shape[1] * b.shape[2] for b in program.workspace if b.name == "dq_accum")
    assert floats < 1.1 * 2 * 4 * 1000 * head_dim + 2 * 4 * 128 * head_dim


def test_only_what_is_wanted_comes_back() -> None:
    program = family.backward(spec_of(sinks=True), H200, frozenset({"k", "sinks"}))
    assert [b.name for b in program.outputs] == ["dk", "dsinks"]
    assert {"dq", "dv"} <= {b.name for b in program.workspace}
    assert "sinks" in program.inputs


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


def turns(blocks_n: int, blocks_m: int, width: int) -> dict[int, list[tuple[int, int]]]:
    """For each query block (turn, key block) of a full call: bwd_sm90.cu's turn_of in Python."""
    found: dict[int, list[tuple[int, int]]] = {}
    for m in range(blocks_m):
        for n in range(blocks_n):
            first = n // width * width
            size = min(first + width, blocks_n) - first
            lead = first + -(-((m + 1) * size) // blocks_m) - 1
            if lead < n:
                lead += size
            found.setdefault(m, []).append((first + lead - n, n))
    return found


@pytest.mark.parametrize(
    ("blocks_n", "blocks_m", "width"), [(8, 13, 64), (7, 3, 4), (9, 20, 4), (1, 5, 64), (5, 1, 2)]
)
def test_turns_are_a_permutation_and_never_a_cycle(blocks_n: int, blocks_m: int, width: int) -> None:
    order = turns(blocks_n, blocks_m, width)
    for taken in order.values():
        assert sorted(turn for turn, _ in taken) == list(range(blocks_n))
    # run it: a CTA goes through its query blocks in order and waits for its turn
    place, done = dict.fromkeys(range(blocks_n), 0), dict.fromkeys(range(blocks_m), 0)
    moved = True
    while moved:
        moved = False
        for n in range(blocks_n):
            first = n // width * width
            size = min(first + width, blocks_n) - first
            while place[n] < blocks_m:
                m = ((n - first) * blocks_m // size + place[n]) % blocks_m
                if {x: t for t, x in order[m]}[n] != done[m]:
                    break
                done[m] += 1
                place[n] += 1
                moved = True
    assert all(x == blocks_m for x in place.values())
