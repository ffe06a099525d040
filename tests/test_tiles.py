"""The mma.sync family's choice of tiles: every call on every GPU model finds one that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import pytest

from cuattn import device
from cuattn.families import mma
from cuattn.program import Launch
from cuattn.spec import AttentionSpec
from cuattn.tiles import FORWARD, FORWARD_FEATURED, HEAD_DIMS

MODELS = list(device.MODELS.values())


def spec(head_dim: int, head_dim_v: int | None = None, **more: Any) -> AttentionSpec:
    case = cases.Case("one", seqlen_q=64, seqlen_kv=64, head_dim=head_dim, head_dim_v=head_dim_v, **more)
    return cases.build(case, "float16").spec


FEATURES = {"full": {}, "causal": {"options": {"causal": True}}, "bias": {"operands": {"bias": (64, 64)}}}


@pytest.mark.parametrize("model", MODELS, ids=lambda d: f"sm_{d.arch}")
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("head_dim", [1, 32, 33, 64, 80, 96, 128, 192, 256])
def test_every_call_finds_a_tile_that_fits(model: device.Device, features: str, head_dim: int) -> None:
    for head_dim_v in (head_dim, 32, 256):
        asked = spec(head_dim, head_dim_v, **FEATURES[features])
        tile = mma.tile(asked, model)
        size = tile.shared_memory(mma.rounded(head_dim), mma.rounded(head_dim_v))
        assert size <= model.shared_memory_per_block
        assert tile.min_blocks * 32 * tile.num_warps <= model.threads_per_sm
        assert tile.block_m % (16 * tile.num_warps) == 0
        launch = mma.forward(asked, model).steps[-1]
        assert isinstance(launch, Launch) and launch.shared_memory == size


@pytest.mark.parametrize("model", MODELS, ids=lambda d: f"sm_{d.arch}")
def test_two_blocks_an_sm_where_a_row_says_so(model: device.Device) -> None:
    tile = mma.tile(spec(64), model)
    reserved = 1024 if model.arch >= 80 else 0
    assert tile.min_blocks == 2
    assert 2 * (tile.shared_memory(64, 64) + reserved) <= model.shared_memory_per_sm


def test_tuned_rows_of_the_h200() -> None:
    """What docs/performance/mma_forward.md measured."""
    calls = [(d, name) for d in (64, 128) for name in ("full", "causal")]
    chosen = {(d, name): mma.tile(spec(d, **FEATURES[name]), device.H200) for d, name in calls}
    blocks = {key: (tile.block_m, tile.block_n, tile.stages) for key, tile in chosen.items()}
    assert blocks[64, "full"] == blocks[64, "causal"] == (128, 96, 2)
    assert blocks[128, "full"] == (128, 64, 2) and blocks[128, "causal"] == (128, 48, 2)


def test_the_tables_are_in_order() -> None:
    """Smaller head dims come first, or their rows are never reached; the last row fits the smallest GPU."""
    for table in (FORWARD, FORWARD_FEATURED):
        dims = [row.head_dim for row in table]
        assert dims == sorted(dims) and dims[-1] == HEAD_DIMS[-1]
        assert table[-1].shared_memory(256, 256) <= device.T4.shared_memory_per_block


def test_dropout_takes_whole_philox_calls() -> None:
    assert all(row.block_n % 32 == 0 for row in FORWARD_FEATURED)


@pytest.mark.parametrize(
    ("asked", "model", "says"),
    [
        ("float32", device.H200, "float16 and bfloat16"),
        ("bfloat16", device.T4, "no bfloat16"),
        ("float16", replace(device.T4, arch=70), "sm_75"),
        ("float16", device.T4, None),
        ("bfloat16", device.A100, None),
    ],
)
def test_refuses(asked: str, model: device.Device, says: str | None) -> None:
    reason = mma.refuses(cases.build(cases.BY_NAME["causal"], asked).spec, model)
    assert reason is None if says is None else says in (reason or "")
