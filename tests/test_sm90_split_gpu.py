"""Packed query heads and keys cut into parts on Hopper: every row of every head, whatever the cut."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest

from cuattn import device
from cuattn.backends import cuda, reference
from cuattn.families import sm90_split
from cuattn.spec import AttentionSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")
plain = pytest.importorskip("test_sm90_gpu")

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (300, 7)},
}
PARTS = (1, 2, 3, 7, 40)  # 40: more than there are key blocks


def prepare(spec: AttentionSpec, parts: int | None = None, block_m: int | None = None) -> cuda.Prepared:
    found = device.query(0)
    assert sm90_split.cannot(spec, found) is None
    cut = sm90_split.cut(spec, found, parts, block_m)
    return cuda.prepare_program(sm90_split.forward(spec, found, cut), 0)


def inputs(
    sq: int, sk: int, heads: int, heads_kv: int, dim: int, dim_v: int, batch: int = 2, dtype: str = "bfloat16"
) -> dict[str, Any]:
    return {
        "q": plain.draw(batch, sq, heads, dim, dtype=dtype, seed=sq),
        "k": plain.draw(batch, sk, heads_kv, dim, dtype=dtype, seed=sk + 1),
        "v": plain.draw(batch, sk, heads_kv, dim_v, dtype=dtype, seed=sk + 2),
    }


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("group", [1, 3, 4, 12, 70])
@pytest.mark.parametrize("sq", [1, 2, 5, 8, 9, 16, 33, 64, 65, 130])
def test_rows_of_groups(sq: int, group: int, mask: str) -> None:
    arrays = inputs(sq, 700, 2 * group, 2, 128, 128)
    spec = plain.spec_of(arrays, MASKS[mask], "bshd")
    cuts = [(parts, block_m) for parts in (1, 3) for block_m in (64, 128)]
    plain.check(spec, arrays, *(plain.run(prepare(spec, *cut), arrays) for cut in cuts))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sk", [1, 127, 128, 129, 640, 1000, 5000])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_parts_of_keys(head_dim: int, sk: int, mask: str) -> None:
    arrays = inputs(6, sk, 8, 2, head_dim, head_dim)
    spec = plain.spec_of(arrays, MASKS[mask], "bshd")
    plain.check(spec, arrays, *(plain.run(prepare(spec, parts), arrays) for parts in (None, *PARTS)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("dim", "dim_v"), [(8, 8), (40, 72), (96, 96), (64, 128), (192, 128), (192, 192), (64, 256)]
)
def test_head_dims(dim: int, dim_v: int, dtype: str) -> None:
    arrays = inputs(20, 900, 6, 2, dim, dim_v, dtype=dtype)
    for options in MASKS.values():
        spec = plain.spec_of(arrays, options, "bshd")
        plain.check(spec, arrays, *(plain.run(prepare(spec, parts), arrays) for parts in (1, 5)))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sq", [1, 7, 70])
def test_features_and_lengths(sq: int, causal: bool, block_m: int, layout: str) -> None:
    """Softcap, ALiBi, sinks and lengths at once against the oracle; then NaN beyond them, bit for bit."""
    lengths = {"q_seqlens": [sq, 0, 1, sq], "kv_seqlens": [5, 600, 0, 333]}
    arrays = inputs(sq, 600, 6, 2, 128, 128, batch=4)
    arrays |= {name: cupy.asarray(x, cupy.int32) for name, x in lengths.items()}
    arrays["alibi_slopes"] = cupy.linspace(0.01, 0.3, 6, dtype=cupy.float32)
    arrays["sinks"] = cupy.linspace(-1, 2, 6, dtype=cupy.float32)
    if layout == "bhsd":
        arrays |= {n: cupy.ascontiguousarray(arrays[n].transpose(0, 2, 1, 3)) for n in "qkv"}
    spec = plain.spec_of(arrays, {"causal": causal, "softcap": 5.0}, layout)
    host = {n: x.get() for n, x in arrays.items()}
    out, lse = reference.attention(spec, host)
    own = reference.own_arithmetic(cases.NUMPY_DTYPES[spec.dtype])
    bar = 2 * float(np.abs(reference.attention(spec, host, own)[0] - out).max()) + 1e-3
    for parts in (1, 2, 9):
        prepared = prepare(spec, parts, block_m)
        found = plain.run(prepared, arrays)
        assert float(np.abs(found["out"].get().astype(np.float64) - out).max()) <= bar
        assert np.allclose(found["lse"].get(), lse, rtol=0, atol=2e-3)
        poisoned = {n: x.copy() for n, x in arrays.items()}
        for name in "qkv":
            for b, n in enumerate(lengths["q_seqlens" if name == "q" else "kv_seqlens"]):
                poisoned[name][
                    (b, slice(n, None)) if layout == "bshd" else (b, slice(None), slice(n, None))
                ] = np.nan
        again = plain.run(prepared, poisoned)
        for name, x in found.items():
            assert bool((x.view(cupy.uint8) == again[name].view(cupy.uint8)).all()), name


def test_keys_that_no_query_sees_may_be_nan() -> None:
    arrays = inputs(3, 2000, 8, 2, 128, 128)
    spec = plain.spec_of(arrays, {"window_size": (500, 0), "q_offset": 1500}, "bshd")
    clean = plain.run(prepare(spec, 4), arrays)
    for name in "kv":
        arrays[name][:, :1000] = np.nan
        arrays[name][:, 1503:] = np.nan
    found = plain.run(prepare(spec, 4), arrays)
    for name, x in clean.items():
        assert bool((x.view(cupy.uint8) == found[name].view(cupy.uint8)).all()), name


def test_a_hundred_runs_are_the_same() -> None:
    arrays = inputs(2, 20000, 8, 2, 128, 128)
    prepared = prepare(plain.spec_of(arrays, {"causal": True}, "bshd"))
    first = plain.run(prepared, arrays)
    for _ in range(100):
        again = plain.run(prepared, arrays)
        for name, x in first.items():
            assert bool((x.view(cupy.uint8) == again[name].view(cupy.uint8)).all()), name
