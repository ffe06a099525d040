"""Faults that attention libraries shipped, as small inputs: each must be right on every backend.

The numbers in the test names are reports against other libraries, named in the docstrings.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import cases
import ml_dtypes
import numpy as np
import pytest
from conftest import Runner

import cuattn
from cuattn.backends import reference

Normal = Callable[..., Any]


def oracle(
    arrays: dict[str, Any], dout: Any, dlse: Any = None, **options: Any
) -> tuple[Any, Any, dict[str, Any]]:
    layout = options.pop("layout", "thd" if "cu_seqlens_q" in arrays else "bshd")
    spec = cases.spec_of(arrays, options, layout)
    full = arrays if "dropout_seed" not in options else {**arrays, "dropout_seed": options["dropout_seed"]}
    return (*reference.attention(spec, full), reference.gradients(spec, full, dout, dlse))


def close(got: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def test_rows_that_a_mask_empties(run: Runner, normal: Normal) -> None:
    """pytorch#103963: fully masked rows were NaN, and NaN gradients spread from them."""
    q, k, v, dout = (normal(1, 8, 1, 8) for _ in range(4))
    mask = np.zeros((8, 8), bool)
    mask[:4, :4] = True
    out, lse, grads = run({"q": q, "k": k, "v": v, "mask": mask}, dout=dout)
    assert (out[:, 4:] == 0).all() and (lse[..., 4:] == -np.inf).all()
    wanted, _, wanted_grads = oracle({"q": q[:, :4], "k": k[:, :4], "v": v[:, :4]}, dout[:, :4])
    close(out[:, :4], wanted)
    for name in "qkv":
        assert (grads[name][:, 4:] == 0).all()
        close(grads[name][:, :4], wanted_grads[name])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("how", ["mask", "bias", "causal", "length", "segments", "window"])
def test_a_nan_that_nothing_sees(run: Runner, how: str, where: str, bad: float) -> None:
    """pytorch#101967: NaN behind the mask reached the output."""
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4)
    arrays: dict[str, Any] = {"q": x, "k": x.copy(), "v": x.copy()}
    options: dict[str, Any] = {}
    if how == "mask":
        arrays["mask"] = np.array([[True, False], [True, False]])
    elif how == "bias":
        arrays["bias"] = np.array([[0, -np.inf], [0, -np.inf]], np.float32)
    elif how == "causal":
        options = {"causal": True, "q_offset": -1}
    elif how == "length":
        arrays["kv_seqlens"] = np.array([1], np.int32)
    elif how == "segments":
        arrays |= {
            "q_segment_ids": np.zeros((1, 2), np.int32),
            "kv_segment_ids": np.array([[0, 1]], np.int32),
        }
    else:
        options = {"window_size": (-1, 0), "q_offset": -1}
    clean = run(arrays, dout=np.ones_like(x), **options)
    arrays[where] = arrays[where].copy()
    arrays[where][0, 1] = bad
    dirty = run(arrays, dout=np.ones_like(x), **options)
    for a, b in zip(clean[:2], dirty[:2], strict=True):
        np.testing.assert_array_equal(a, b)
    for name in "qkv":
        np.testing.assert_array_equal(clean[2][name], dirty[2][name])
    assert (dirty[2]["k"][0, 1] == 0).all() and (dirty[2]["v"][0, 1] == 0).all()


@pytest.mark.parametrize("how", ["causal", "length", "segments", "mask"])
def test_a_query_that_sees_nothing_spreads_no_nan(run: Runner, normal: Normal, how: str) -> None:
    """The same for a NaN query and its incoming gradient."""
    arrays: dict[str, Any] = {n: normal(1, 6, 2, 8) for n in "qkv"}
    dout = normal(1, 6, 2, 8)
    options: dict[str, Any] = {}
    if how == "causal":
        options = {"causal": True, "q_offset": -1}  # row 0 sees nothing
        row = 0
    elif how == "length":
        arrays["q_seqlens"] = np.array([5], np.int32)
        row = 5
    elif how == "segments":
        ids = np.array([[0, 0, 1, 0, 0, 0]], np.int32)
        arrays |= {"q_segment_ids": ids, "kv_segment_ids": np.zeros((1, 6), np.int32)}
        row = 2
    else:
        arrays["mask"] = np.ones((6, 6), bool)
        arrays["mask"][3] = False
        row = 3
    clean = run(arrays, dout=dout, **options)
    arrays["q"] = arrays["q"].copy()
    arrays["q"][0, row] = np.nan
    dout = dout.copy()
    dout[0, row] = np.nan
    dirty = run(arrays, dout=dout, **options)
    assert (dirty[0][0, row] == 0).all() and (dirty[2]["q"][0, row] == 0).all()
    for name in "qkv":
        np.testing.assert_array_equal(clean[2][name], dirty[2][name])


def test_a_first_tile_that_is_masked_and_very_negative_logits(run: Runner) -> None:
    """flash-attention#2082: the running maximum was reset to 0 and the head came out zero."""
    q = np.full((1, 88, 14, 64), 7.7 / 8, np.float32).astype(ml_dtypes.bfloat16)
    k = np.full((1, 448, 2, 64), -7.7, np.float32).astype(ml_dtypes.bfloat16)
    v = np.random.default_rng(0).standard_normal((1, 448, 2, 64)).astype(ml_dtypes.bfloat16)
    out, lse, grads = run({"q": q, "k": k, "v": v}, dout=np.ones_like(q), causal=True)
    wanted, wanted_lse, _ = oracle({"q": q, "k": k, "v": v}, None, causal=True)
    assert wanted_lse.max() < -40
    close(out, wanted, 1e-2)
    close(lse, wanted_lse, 1e-4)
    assert (np.abs(out.astype(np.float32)).max(axis=-1) > 0).all()
    assert all(np.isfinite(x.astype(np.float32)).all() for x in grads.values())


def test_length_one(run: Runner) -> None:
    """flash-attention#334: dQ was NaN for length 1."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        q, k, v = ((3 * rng.standard_normal((1, 1, 1, 16))).astype(np.float16) for _ in range(3))
        dout = rng.standard_normal((1, 1, 1, 16)).astype(np.float16)
        out, lse, grads = run({"q": q, "k": k, "v": v}, dout=dout)
        np.testing.assert_array_equal(out, v)
        close(lse[0, 0, 0], (q.astype(np.float64) * k).sum() / 4, 1e-3)
        np.testing.assert_array_equal(grads["v"], dout)
        close(grads["q"], np.zeros_like(q), 2e-2)
        close(grads["k"], np.zeros_like(q), 2e-2)


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (300, 150), (2048, 1024)])
@pytest.mark.parametrize("corner", ["bottom_right", "top_left"])
def test_the_causal_corner_is_explicit(
    run: Runner, normal: Normal, lengths: tuple[int, int], corner: str
) -> None:
    """pytorch#108108, flash-attention#1778: two libraries, two answers."""
    sq, sk = lengths
    q, k, v = normal(1, sq, 1, 16), normal(1, sk, 1, 16), normal(1, sk, 1, 16)
    offset = sk - sq if corner == "bottom_right" else 0
    q_offset = None if corner == "bottom_right" else 0
    out, lse, _ = run({"q": q, "k": k, "v": v}, gradients=False, causal=True, q_offset=q_offset)
    mask = np.arange(sk)[None] <= np.arange(sq)[:, None] + offset
    wanted, wanted_lse, _ = oracle({"q": q, "k": k, "v": v, "mask": mask}, None)
    close(out, wanted)
    np.testing.assert_array_equal(np.isinf(lse), np.isinf(wanted_lse))
    assert np.isinf(lse).sum() == (sq - sk if sq > sk and corner == "bottom_right" else 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_sequences_of_one_and_of_none(run: Runner, normal: Normal, dtype: str) -> None:
    """flash-attention#1537: a length-1 shortcut reshaped as if every sequence had one query."""
    kind, tolerance = cases.NUMPY_DTYPES[dtype], 1e-4 if dtype == "float32" else 1e-1
    arrays = {
        "q": normal(2, 9, 64, dtype=kind),
        "k": normal(8, 3, 64, dtype=kind), "v": normal(8, 3, 64, dtype=kind),
        "cu_seqlens_q": np.array([0, 1, 1, 2], np.int32), "cu_seqlens_k": np.array([0, 3, 3, 8], np.int32),
    }  # fmt: skip
    dout = normal(2, 9, 64, dtype=kind)
    out, _, grads = run(arrays, dout=dout, causal=True, softmax_scale=1.0, max_seqlen_q=1, max_seqlen_k=5)
    for token, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        one = {
            "q": arrays["q"][None, token : token + 1],
            "k": arrays["k"][None, keys],
            "v": arrays["v"][None, keys],
        }
        wanted, _, wanted_grads = oracle(one, dout[None, token : token + 1], softmax_scale=1.0)
        close(out[token : token + 1], wanted[0], tolerance / 5)
        close(grads["k"][keys], wanted_grads["k"][0], tolerance)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "ends"),
    [
        ("float32", 64, (0, 70, 70, 133)),
        ("bfloat16", 64, (0, 70, 70, 133)),
        ("bfloat16", 36, (0, 1, 133)),
        ("float16", 128, (0, 133)),
        ("float64", 33, (0, 3, 133)),
        ("float32", 64, (0, 0, 0)),
        ("bfloat16", 64, (0,)),
    ],
    ids=str,
)
def test_packed_arrays_longer_than_their_sequences(
    run: Runner, normal: Normal, dtype: str, head_dim: int, ends: tuple[int, ...]
) -> None:
    """Rows behind the last sequence, whatever is in them: out 0, LSE -inf, gradients 0."""
    if run.kind == "jax" and dtype == "float64":
        pytest.skip("JAX has float64 only with jax_enable_x64")
    kind, last = cases.NUMPY_DTYPES[dtype], ends[-1]
    drawn = {n: normal(150, h, head_dim) for n, h in (("q", 4), ("k", 2), ("v", 2), ("dout", 4))}
    for x in drawn.values():
        x[last:] = np.nan
    dout = drawn.pop("dout").astype(kind)
    small = np.float64 if dtype == "float64" else np.float32
    dlse = normal(4, 150, dtype=small)
    dlse[:, last:] = np.nan
    cu = np.array(ends, np.int32)
    arrays: dict[str, Any] = {n: x.astype(kind) for n, x in drawn.items()}
    arrays |= {"sinks": normal(4, dtype=small), "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    out, lse, grads = run(arrays, dout=dout, dlse=dlse, causal=True)
    assert (out[last:] == 0).all() and (lse[:, last:] == -np.inf).all()
    assert all((grads[n][last:] == 0).all() for n in "qkv")
    cut = {n: x[:last] if n in "qkv" else x for n, x in arrays.items()}
    wanted, wanted_lse, wanted_grads = oracle(cut, dout[:last], dlse[:, :last], causal=True)
    tolerance = 2e-5 if dtype in ("float32", "float64") else 3e-2
    close(out[:last], wanted, tolerance)
    close(lse[:, :last], wanted_lse, tolerance)
    for name in "qkv":
        close(grads[name][:last], wanted_grads[name], 3 * tolerance)
    close(grads["sinks"], wanted_grads["sinks"], 3 * tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 0), (2, 0, 7), (0, 4, 4), (0, 0, 0)])
def test_nothing_to_do(run: Runner, normal: Normal, shape: tuple[int, int, int], causal: bool) -> None:
    """flash-attention#2470, pytorch#141219: empty inputs crashed."""
    b, sq, sk = shape
    arrays = {"q": normal(b, sq, 2, 64), "k": normal(b, sk, 2, 64), "v": normal(b, sk, 2, 32)}
    out, lse, grads = run(arrays, dout=normal(b, sq, 2, 32), causal=causal)
    assert out.shape == (b, sq, 2, 32) and (out == 0).all()
    assert lse.shape == (b, 2, sq) and (lse == -np.inf).all()
    for name in "qkv":
        assert grads[name].shape == arrays[name].shape and (grads[name] == 0).all()


def _views(x: Any) -> list[Any]:
    """The same values under other strides."""
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 3), x.dtype)
    wide[..., 1 : x.shape[-1] + 1] = x
    return [
        np.ascontiguousarray(x.swapaxes(0, x.ndim - 2)).swapaxes(0, x.ndim - 2),
        wide[..., 1 : x.shape[-1] + 1],
        np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    ]


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "mask", "dout"])
def test_strides_of_each_operand_alone(run: Runner, normal: Normal, which: str) -> None:
    """flash-attention#355, ROCm/pytorch#3230, FlagGems#5896: strides of dout or v ignored."""
    if run.kind == "jax":
        pytest.skip("JAX arrays have no strides")
    arrays: dict[str, Any] = {
        "q": normal(2, 32, 4, 128), "k": normal(2, 32, 1, 128), "v": normal(2, 32, 1, 128),
        "bias": normal(2, 4, 32, 32), "mask": np.random.default_rng(1).random((2, 4, 32, 32)) < 0.7,
        "dout": normal(2, 32, 4, 128),
    }  # fmt: skip
    arrays = {n: x if n == "mask" else x.astype(np.float16) for n, x in arrays.items()}

    def call(given: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        given = dict(given)
        return run({n: x for n, x in given.items() if n != "dout"}, dout=given["dout"])

    wanted = call(arrays)
    views = _views(arrays[which])
    if which == "dout":
        row = arrays["dout"][:, :1]
        wanted_row = call(
            {**arrays, "dout": np.ascontiguousarray(np.broadcast_to(row, arrays["dout"].shape))}
        )
        found_row = call({**arrays, "dout": np.broadcast_to(row, arrays["dout"].shape)})
        for name in "qkv":
            close(found_row[2][name], wanted_row[2][name], 2e-3)
    for view in views:
        found = call({**arrays, which: view})
        close(found[0], wanted[0], 1e-3)
        for name in ("q", "k", "v", "bias"):
            close(found[2][name], wanted[2][name], 2e-3)


def test_a_broadcast_bias_view_and_a_broadcast_mask(run: Runner, normal: Normal) -> None:
    """pytorch#139424, jax#28974: refused unless expanded."""
    s = 40
    q, k, v = (normal(2, s, 32, 16) for _ in range(3))
    bias = normal(2, 1, s, s)
    seen = np.broadcast_to(bias, (2, 32, s, s))
    close(
        run({"q": q, "k": k, "v": v, "bias": seen}, gradients=False)[0],
        oracle({"q": q, "k": k, "v": v, "bias": bias}, None)[0],
    )
    q, k, v = (normal(4, 4, 32, 16, dtype=ml_dtypes.bfloat16) for _ in range(3))
    mask = np.random.default_rng(2).random((4, 1, 1, 4)) < 0.7
    arrays = {"q": q, "k": k, "v": v, "mask": mask}
    close(run(arrays, gradients=False)[0], oracle(arrays, None)[0], 2e-2)


@pytest.mark.parametrize("width", [77, 43])
def test_a_bias_of_any_width(run: Runner, normal: Normal, width: int) -> None:
    """xformers#808, #813: the user had to allocate a wider bias and slice it."""
    q, k, v = normal(3, 77, 2, 64), normal(3, width, 2, 64), normal(3, width, 2, 64)
    arrays = {
        n: x.astype(np.float16) for n, x in (("q", q), ("k", k), ("v", v), ("bias", normal(3, 2, 77, width)))
    }
    close(run(arrays, gradients=False)[0], oracle(arrays, None)[0], 2e-3)


@pytest.mark.parametrize(
    "shape", [(2, 8, 33, 33), (1, 8, 33, 33), (2, 1, 33, 33), (1, 1, 1, 33), (1, 8, 1, 1), (33,)]
)
def test_the_bias_gradient_has_the_shape_of_the_bias(
    run: Runner, normal: Normal, shape: tuple[int, ...]
) -> None:
    """jax#30593, #27184: ValueError for batch above 1, or no gradient."""
    arrays = {
        "q": normal(2, 33, 8, 16),
        "k": normal(2, 33, 8, 16),
        "v": normal(2, 33, 8, 16),
        "bias": normal(*shape),
    }
    dout = normal(2, 33, 8, 16)
    close(run(arrays, dout=dout)[2]["bias"], oracle(arrays, dout)[2]["bias"], 1e-4)


def test_the_right_side_of_a_window_is_not_cut(run: Runner, normal: Normal) -> None:
    """flash-attention#895: the bound was cut to seqlen_k, so rows saw nothing."""
    q, k, v = normal(1, 300, 1, 16), normal(1, 100, 1, 16), normal(1, 100, 1, 16)
    out, _, _ = run({"q": q, "k": k, "v": v}, gradients=False, window_size=(-1, 350))
    close(out, oracle({"q": q, "k": k, "v": v}, None)[0])


def test_a_window_as_wide_as_causal(run: Runner, normal: Normal) -> None:
    """flash-attention#1133."""
    arrays = {n: normal(1, 64, 2, 16) for n in "qkv"}
    close(
        run(arrays, gradients=False, window_size=(63, 0))[0],
        run(arrays, gradients=False, causal=True)[0],
        1e-6,
    )


@pytest.mark.parametrize("left", [3, 4])
def test_left_counts_earlier_keys(run: Runner, normal: Normal, left: int) -> None:
    """transformers#39408: one library counts the own token, one does not."""
    arrays = {
        "q": normal(1, 8, 1, 8),
        "k": normal(1, 8, 1, 8),
        "v": np.eye(8, dtype=np.float32)[None, :, None],
    }
    out, _, _ = run(arrays, gradients=False, window_size=(left, 0))
    assert (np.flatnonzero(out[0, 7, 0]) == np.arange(7 - left, 8)).all()


NAMES = ("q", "k", "v", "bias")


@pytest.mark.parametrize("wants", [c for n in range(1, 5) for c in combinations(NAMES, n)], ids="".join)
def test_any_subset_of_gradients(run: Runner, normal: Normal, wants: tuple[str, ...]) -> None:
    """pytorch#148476: LSE was not saved when only the mask needed a gradient."""
    arrays = {
        "q": normal(1, 20, 2, 16),
        "k": normal(1, 24, 2, 16),
        "v": normal(1, 24, 2, 16),
        "bias": normal(2, 20, 24),
    }
    dout = normal(1, 20, 2, 16)
    found = run(arrays, dout=dout, wants=wants)[2]
    wanted = oracle(arrays, dout)[2]
    assert set(found) == set(wants)
    for name in wants:
        close(found[name], wanted[name], 1e-4)


def test_softcap_backward_is_finite(run: Runner, normal: Normal) -> None:
    """flash-attention#2466: softcap's backward hung."""
    arrays = {n: normal(1, 64, 2, 128) for n in "qkv"}
    dout = normal(1, 64, 2, 128)
    found = run(arrays, dout=dout, causal=True, softcap=10.0)[2]
    wanted = oracle(arrays, dout, causal=True, softcap=10.0)[2]
    for name in "qkv":
        close(found[name], wanted[name], 1e-4)


def test_dropout_comes_after_softmax(run: Runner, normal: Normal) -> None:
    """nki-samples#80: the denominator was taken after dropout: NaN where a row lost every key."""
    arrays = {n: normal(1, 16, 1, 16) for n in "qkv"}
    dout = normal(1, 16, 1, 16)
    options = {"causal": True, "dropout_p": 0.9, "dropout_seed": 3}
    out, lse, grads = run(arrays, dout=dout, **options)
    wanted, wanted_lse, wanted_grads = oracle(arrays, dout, **options)
    assert (np.abs(wanted).max(axis=-1) == 0).any(), "some row must lose every key for this to test anything"
    close(out, wanted)
    close(lse, wanted_lse)
    for name in "qkv":
        close(grads[name], wanted_grads[name], 1e-4)
    np.testing.assert_array_equal(out, run(arrays, gradients=False, **options)[0])


def test_packed_segments_are_separate_calls(run: Runner, normal: Normal) -> None:
    """maxtext#4476: segment ids were accepted and ignored."""
    ids = np.repeat([[0, 1]], 32, axis=1).astype(np.int32)
    arrays: dict[str, Any] = {n: normal(1, 64, 2, 16) for n in "qkv"}
    arrays |= {"q_segment_ids": ids, "kv_segment_ids": ids}
    dout = normal(1, 64, 2, 16)
    out, _, grads = run(arrays, dout=dout, causal=True)
    for part in (slice(0, 32), slice(32, 64)):
        wanted, _, wanted_grads = oracle({n: arrays[n][:, part] for n in "qkv"}, dout[:, part], causal=True)
        close(out[:, part], wanted)
        for name in "qkv":
            close(grads[name][:, part], wanted_grads[name], 1e-4)
    changed = {**arrays, "k": arrays["k"].copy()}
    changed["k"][:, :32] += 1
    again, _, grads_again = run(changed, dout=dout, causal=True)
    np.testing.assert_array_equal(out[:, 32:], again[:, 32:])
    np.testing.assert_array_equal(grads["v"][:, 32:], grads_again["v"][:, 32:])


def test_merging_nothing_and_merging_halves(run: Runner, normal: Normal) -> None:
    """flashinfer#4051, vllm#27491, sglang#35045: NaN from two empty parts; base-2 LSE in a base-e merge."""
    zero, minus = np.zeros((1, 1, 1, 64), np.float16), np.full((1, 1, 1), -np.inf, np.float32)
    out, lse = cuattn.merge_attention([run.to(zero)] * 2, [run.to(minus)] * 2)
    assert (run.back(out) == 0).all() and (run.back(lse) == -np.inf).all()
    one, two = np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32)
    lses = [np.full((1, 1, 1), x, np.float32) for x in (1.3, 2.9)]
    weight, _ = cuattn.merge_attention([run.to(one), run.to(two)], [run.to(x) for x in lses])
    close(run.back(weight), np.full((1, 1, 1, 1), 0.168), 1e-3)
    arrays = {"q": normal(1, 5, 2, 32), "k": normal(1, 4200, 2, 32), "v": normal(1, 4200, 2, 32)}
    whole = run(arrays, gradients=False)
    parts = [
        run({**arrays, **{n: arrays[n][:, p] for n in "kv"}}, gradients=False)
        for p in (slice(0, 4096), slice(4096, 4200))
    ]
    out, lse = cuattn.merge_attention([run.to(p[0]) for p in parts], [run.to(p[1]) for p in parts])
    close(run.back(out), whole[0], 1e-5)
    close(run.back(lse), whole[1], 1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_one_query_of_each_sequence(run: Runner, normal: Normal, parts: int) -> None:
    """pytorch#194167: with two parts of the keys the second sequence's row was never written."""
    arrays = {n: normal(2, 1 if n == "q" else 1024, 4, 64, dtype=ml_dtypes.bfloat16) for n in "qkv"}
    wanted = oracle(arrays, None, causal=True)[:2]
    found = []
    for part in np.split(np.arange(1024), parts):
        given = {"q": arrays["q"], **{n: arrays[n][:, part] for n in "kv"}}
        found.append(run(given, gradients=False, causal=True, q_offset=len(part) - 1))
    out, lse = cuattn.merge_attention([run.to(f[0]) for f in found], [run.to(f[1]) for f in found])
    assert run.back(out).shape == (2, 1, 4, 64)
    close(run.back(out), wanted[0], 1e-2)
    close(run.back(lse), wanted[1], 1e-4)


@pytest.mark.parametrize("slots", [3, 128])
def test_unused_slots_are_not_read(run: Runner, normal: Normal, slots: int) -> None:
    """flash-attention#1745, #2374: a NaN in a slot beyond a sequence's length, times weight 0."""
    lengths = [1, 3] if slots == 3 else [32, 64, 96, 48]
    dtype, heads = (np.float16, 1) if slots == 3 else (ml_dtypes.bfloat16, 8)
    q = np.full((len(lengths), 1, heads, 64), 0.5, dtype)
    k, v = (normal(len(lengths), slots, heads, 64, dtype=dtype) for _ in range(2))
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = np.nan
    given = {"q": q, "k": k, "v": v, "kv_seqlens": np.array(lengths, np.int32)}
    out, lse, grads = run(given, dout=q)
    for b, length in enumerate(lengths):
        cut = {"q": q[b : b + 1], "k": k[b : b + 1, :length], "v": v[b : b + 1, :length]}
        wanted, wanted_lse, wanted_grads = oracle(cut, q[b : b + 1])
        close(out[b], wanted[0], 1e-2)
        close(lse[b], wanted_lse[0], 1e-3)
        for name in "kv":
            close(grads[name][b, :length], wanted_grads[name][0], 1e-2)
            assert not np.any(grads[name][b, length:])


@pytest.mark.parametrize("shift", [-1e3, -1e6, -1e8, 1e6])
def test_a_bias_that_is_large_everywhere(run: Runner, normal: Normal, shift: float) -> None:
    """A finite bias hides nothing: softmax of the rounded scores, at most twice plain attention's error."""
    arrays = {n: normal(1, 70, 2, 32) for n in "qkv"}
    arrays["bias"] = (normal(1, 2, 70, 70) + shift).astype(np.float32)
    out, lse, grads = run(arrays, dout=normal(1, 70, 2, 32))
    q, k, v = (arrays[n].transpose(0, 2, 1, 3) for n in "qkv")
    results = []
    for kind in (np.float32, np.float64):
        scores = (q.astype(kind) @ k.astype(kind).swapaxes(2, 3)) * kind(32**-0.5) + arrays["bias"].astype(
            kind
        )
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        results.append((weights / weights.sum(-1, keepdims=True) @ v.astype(kind)).transpose(0, 2, 1, 3))
    plain, exact = results
    assert np.abs(out - exact).max() <= 2 * np.abs(plain - exact).max() + 1e-6
    assert np.isfinite(lse).all()
    assert all(np.isfinite(x).all() for x in grads.values())


def test_vmap_over_a_bias_and_not_over_a_mask(normal: Normal) -> None:
    """jax#23701, #36702: a crash with a mapped bias beside a mask that is not; a bias of one head refused."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    x = jnp.asarray(normal(4, 2, 32, 4, 48), jnp.bfloat16)
    bias, mask = jnp.asarray(normal(4, 2, 4, 32, 32), jnp.bfloat16), jnp.arange(32)[None, None] < 29

    def call(x: Any, bias: Any, mask: Any) -> Any:
        return cuattn.flash_attention(x, x, x, bias=bias, mask=mask).astype(jnp.float32)

    def check(function: Any, *arrays: Any, axes: Any) -> None:
        def at(given: Any, i: int) -> list[Any]:
            return [y if axis is None else y[i] for y, axis in zip(given, axes, strict=True)]

        mapped, pullback = jax.vjp(jax.vmap(function, axes), *arrays)
        looped, wanted = jax.vjp(lambda *a: jnp.stack([function(*at(a, i)) for i in range(len(x))]), *arrays)
        close(mapped, looped, 1e-6)
        for a, b in zip(pullback(mapped), wanted(mapped), strict=True):
            if a.dtype != jax.dtypes.float0:
                close(a, b, 1e-2)

    check(call, x, bias, mask, axes=(0, 0, None))
    check(call, x, bias[:, :, :1], mask, axes=(0, 0, None))
