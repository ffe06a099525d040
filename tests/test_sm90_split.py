"""Packed query heads and keys cut into parts, without a GPU: who gets which rows, when, and the program."""

from __future__ import annotations

from typing import Any

import pytest

from cuattn.device import A100, H200
from cuattn.families import sm90, sm90_split
from cuattn.spec import AttentionSpec, Signature, bind, row_major


def spec_of(
    sq: int, sk: int, heads: int = 32, heads_kv: int = 8, batch: int = 1, dim: int = 128, **options: Any
) -> AttentionSpec:
    arrays = {
        name: Signature("bfloat16", shape, row_major(shape))
        for name, shape in (
            ("q", (batch, sq, heads, dim)),
            ("k", (batch, sk, heads_kv, dim)),
            ("v", (batch, sk, heads_kv, dim)),
        )
    }
    return bind(arrays, **options)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 12, 64, 100])
@pytest.mark.parametrize("sq", [1, 2, 3, 8, 15, 16, 17, 63, 64, 65, 128, 129, 1000])
def test_every_row_of_every_head_has_one_tile(sq: int, group: int) -> None:
    """The kernel's own arithmetic: block m of a KV head holds heads m % head_blocks, rows m / head_blocks."""
    for block_m in (64, 128):
        c = sm90_split.cut(spec_of(sq, 1000, group, 1), H200, 1, block_m)
        assert c.rows & (c.rows - 1) == 0 and c.rows * c.heads <= c.tile.block_m
        head_blocks = -(-group // c.heads)
        found = []
        for m in range(c.blocks):
            first_head, first_row = m % head_blocks * c.heads, m // head_blocks * c.rows
            for line in range(c.tile.block_m):
                head, row = line // c.rows, first_row + line % c.rows
                if head < c.heads and first_head + head < group and row < sq:
                    found.append((first_head + head, row))
        assert sorted(found) == [(h, i) for h in range(group) for i in range(sq)]


@pytest.mark.parametrize("dim", [40, 64, 96, 128, 192, 256])
def test_tiles_fit(dim: int) -> None:
    for sq in (1, 100):
        c = sm90_split.cut(spec_of(sq, 10000, dim=dim), H200)
        assert c.tile.shared_memory <= sm90.SHARED_MEMORY


def test_parts_fill_the_gpu() -> None:
    """Decoding with a long cache uses nearly all SMs; enough heads need no parts."""
    for heads_kv in (1, 2, 8):
        c = sm90_split.cut(spec_of(1, 131072, 4 * heads_kv, heads_kv), H200)
        waves = c.tiles(spec_of(1, 131072, 4 * heads_kv, heads_kv)) / H200.sm_count
        assert waves / -(-c.tiles(spec_of(1, 131072, 4 * heads_kv, heads_kv)) // H200.sm_count) > 0.95
    assert sm90_split.cut(spec_of(1, 4096, batch=128), H200).parts == 1
    assert sm90_split.cut(spec_of(1, 100), H200).parts == 1


def test_scratch_stays_small() -> None:
    for sq in (1, 64, 512, 4096):
        spec = spec_of(sq, 65536, 4, 1)
        (scratch,) = sm90_split.forward(spec, H200).workspace
        rows = 4 * sq
        assert scratch.shape[0] <= max(sm90_split.SCRATCH_BYTES // 4, rows * 129)


def test_who_takes_what() -> None:
    assert sm90_split.refuses(spec_of(1, 32768), H200) is None
    assert sm90_split.refuses(spec_of(16, 32768, causal=True), H200) is None
    assert "gains too little" in str(sm90_split.refuses(spec_of(4096, 4096, batch=4), H200))
    assert "9.0" in str(sm90_split.refuses(spec_of(1, 32768), A100))
    masked = {"q": (1, 1, 4, 64), "k": (1, 9999, 4, 64), "v": (1, 9999, 4, 64)}
    arrays = {name: Signature("bfloat16", shape, row_major(shape)) for name, shape in masked.items()}
    arrays["mask"] = Signature("bool", (1, 1, 1, 9999), (9999, 9999, 9999, 1))
    assert "mask" in str(sm90_split.refuses(bind(arrays), H200))


def test_the_program() -> None:
    program = sm90_split.forward(spec_of(3, 32768, causal=True), H200)
    launch, merge = program.steps
    assert [step.kernel.source for step in program.steps] == ["fwd_sm90", "fwd_merge"]
    queries = next(m for m in launch.tensor_maps if m.buffer == "q")
    assert queries.box == (64, 4, 4, 1)  # rows rounded up to a power of two, all heads of a group
    assert launch.grid[0] <= H200.sm_count and merge.grid[0] == 3 * 32 // 4
    assert merge.dependent and not launch.dependent
