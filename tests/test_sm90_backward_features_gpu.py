"""Hopper's backward kernel on a GPU: score features and head dims of two classes, over many tiles.

Outputs and workspace hold NaN before a program runs. Plain calls are in the case table (test_cuda_gpu.py).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import cases
import numpy as np
import pytest
from test_mma_backward_gpu import check, check_dropout_of_shards, problem_arrays, run, same, unseen, wants_of

from cuattn import device
from cuattn.backends import reference
from cuattn.families import sm90_backward as family
from cuattn.spec import AttentionSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")

SQ, SK = 333, 450
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"mask": (2, 1, SQ, SK)},
    "mask of heads": {"mask": (1, 4, SQ, SK)},
    "mask of keys": {"mask": (2, 1, 1, SK)},
    "segments": {"segments": ()},
    "bias": {"bias": (2, 4, SQ, SK)},
    "bias for TMA": {"bias": (1, 4, SQ, 448)},
    "bias of keys": {"bias": (2, 1, 1, SK)},
    "float32 bias": {"bias_float32": (1, 4, SQ, SK)},
    "dropout": {},
    "softcap": {},
    "ALiBi": {"alibi_slopes": (4,)},
    "softcap and bias": {"bias": (2, 4, SQ, SK)},
    "softcap and float32 bias": {"bias_float32": (1, 4, SQ, SK), "alibi_slopes": (4,)},
    "everything": {
        "bias": (1, 4, SQ, SK), "mask": (2, 1, SQ, SK), "alibi_slopes": (4,), "sinks": (4,), "segments": (),
        "kv_seqlens": (SK, 177), "q_seqlens": (290, SQ),
    },
}  # fmt: skip
DIMS = ((40, 40), (64, 64), (128, 128), (128, 64), (64, 128), (192, 128))
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (96, 30)},
    "late window": {"window_size": (96, 30), "q_offset": 177},  # of which no row sees the first 81 keys
}


def case_of(feature: str, dims: tuple[int, int], options: str) -> cases.Case:
    more: dict[str, Any] = {}
    if feature in ("dropout", "everything"):
        more |= {"dropout_p": 0.2, "dropout_seed": 7}
    if feature.startswith("softcap") or feature == "everything":
        more["softcap"] = 2.0
    keys = 448 if feature == "bias for TMA" else SK
    return cases.Case(
        f"{feature} {dims[0]}x{dims[1]} {options}", seqlen_q=SQ, seqlen_kv=keys,
        head_dim=dims[0], head_dim_v=dims[1], operands=FEATURES[feature], options=OPTIONS[options] | more,
    )  # fmt: skip


TRANSFORMS = ("softcap", "ALiBi", "softcap and bias", "softcap and float32 bias")
GRID = itertools.product((x for x in FEATURES if x not in TRANSFORMS), DIMS, ("full", "causal"))
CASES = [("bfloat16", case_of(*x)) for x in GRID if x[0] != "plain" or x[1][0] != x[1][1]]
SQUARE = ((64, 64), (128, 128), (256, 256))
CASES += [("bfloat16", case_of(*x)) for x in itertools.product(TRANSFORMS, SQUARE, ("full", "causal"))]
CASES += [("bfloat16", case_of(x, d, "late window")) for x in ("dropout", "everything") for d in SQUARE]
CASES += [("float16", case_of(x, (128, 128), "causal")) for x in FEATURES]
CASES += [("bfloat16", case_of(x, (64, 64), "window")) for x in FEATURES]
PACKED = {
    "layout": "thd", "heads_kv": 4, "head_dim": 64, "cu_seqlens_q": (0, 90, 91, 91, 300),
    "cu_seqlens_k": (0, 290, 295, 310, 700),
}  # fmt: skip
WINDOWED = {"window_size": (70, 9), "dropout_p": 0.2, "dropout_seed": 7}
CASES += [("bfloat16", cases.Case("packed dropout window", options=WINDOWED, **PACKED))]
SMALL = ("mask_square", "bias_rows", "bias_head_scalar", "dropout_causal_high", "varlen_everything")
CASES += [("bfloat16", cases.BY_NAME[name]) for name in SMALL]


def built(case: cases.Case, dtype: str) -> cases.Problem:
    """A case's problem; tiles of its mask are empty or whole, some rows and keys see nothing."""
    problem = cases.build(case, dtype)
    mask = problem.arrays.get("mask")
    if mask is not None and mask.ndim == 4:
        rows = mask.shape[2] > 1
        mask[:, :, 64 * rows : 192 if rows else 1, 128:300] = True
        mask[:, :, 192 * rows : 321 if rows else 1, :256] = False
        mask[:, :, :, 380:400] = False
        if rows:
            mask[:, :, 20:23] = False
    if "q_segment_ids" in problem.arrays:
        problem.arrays["q_segment_ids"][:, 40:50] = 60
        problem.arrays["kv_segment_ids"][:, 200:230] = 50
    return problem


def taken(case: cases.Case, dtype: str) -> tuple[cases.Problem, AttentionSpec]:
    problem = built(case, dtype)
    spec = replace(problem.spec, dlse=True)
    reason = family.refuses(spec, device.query(0))
    if reason is not None:
        pytest.skip(reason)
    return problem, spec


@pytest.mark.parametrize(("dtype", "case"), CASES, ids=str)
def test_features(dtype: str, case: cases.Case) -> None:
    problem, spec = taken(case, dtype)
    check(problem, run(spec, wants_of(spec), problem_arrays(problem), family))


HIDING = [*itertools.product(("mask", "mask of keys", "segments", "bias", "everything"), ("full", "causal"))]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("feature", "options"), [*HIDING, ("dropout", "late window")])
def test_nan_where_nothing_looks(feature: str, head_dim: int, options: str) -> None:
    problem, spec = taken(case_of(feature, (head_dim, head_dim), options), "bfloat16")
    if "bias" in problem.arrays:
        problem.arrays["bias"][..., 130:140] = -np.inf
    arrays = problem_arrays(problem)
    q, k = unseen(problem)
    assert q.any() or k.any()
    dirty = dict(arrays)
    for name, hidden in (("q", q), ("k", k), ("v", k), ("dout", q)):
        x = reference._to_bhsd(spec, problem.dout if name == "dout" else problem.arrays[name]).copy()
        x[hidden] = np.nan
        dirty[name] = cupy.asarray(np.ascontiguousarray(reference._from_bhsd(spec, x)))
    clean, found = (run(spec, wants_of(spec), x, family) for x in (arrays, dirty))
    check(problem, found)
    assert same({n: clean[n] for n in ("dk", "dv")}, {n: found[n] for n in ("dk", "dv")})


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nothing_is_seen(head_dim: int) -> None:
    """A mask that leaves nothing at all, and one that leaves a single score."""
    problem, spec = taken(case_of("mask", (head_dim, head_dim), "full"), "bfloat16")
    for some in (False, True):
        problem.arrays["mask"][...] = False
        problem.arrays["mask"][0, 0, 77, 201] = some
        found = run(spec, wants_of(spec), problem_arrays(problem), family)
        check(problem, found)
        assert bool((found["dq"][1].astype(cupy.float32) == 0).all())


@pytest.mark.parametrize("deterministic", [False, True])
def test_dropout_of_a_shard(deterministic: bool) -> None:
    check_dropout_of_shards(family, deterministic)


@pytest.mark.parametrize(
    "feature", ["plain", "mask", "segments", "bias", "dropout", "softcap", "softcap and bias"]
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_repeats(head_dim: int, feature: str) -> None:
    problem, spec = taken(case_of(feature, (head_dim, head_dim), "causal"), "bfloat16")
    arrays, spec = problem_arrays(problem), replace(spec, deterministic=True)
    first = run(spec, wants_of(spec), arrays, family)
    check(problem, first)
    for _ in range(10):
        assert same(first, run(spec, wants_of(spec), arrays, family))
