"""The case table: what every backend, the JAX tests and the benchmarks are run on, and how errors are judged.

A case is shapes, operands and options; ``build`` draws its arrays, ``judge`` compares a result with the
float64 oracle: at most twice the error of plain attention in the same dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from cuattn.backends import reference
from cuattn.interop import adapters
from cuattn.spec import AttentionSpec, Signature, bind

NUMPY_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class Case:
    """One problem. ``operands`` maps an operand to how it is drawn: a shape, or a tuple of ints."""

    name: str
    batch: int = 2
    heads_q: int = 4
    heads_kv: int = 2
    seqlen_q: int = 70
    seqlen_kv: int = 90
    head_dim: int = 32
    head_dim_v: int | None = None
    layout: str = "bshd"
    operands: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None
    scale_q: float = 1.0  # multiplies q: sharp or flat softmax

    def __str__(self) -> str:
        return self.name


def _dense(name: str, sq: int, sk: int, d: int = 32, dv: int | None = None, **more: Any) -> Case:
    return Case(name, seqlen_q=sq, seqlen_kv=sk, head_dim=d, head_dim_v=dv, **more)


DENSE = [
    Case("full"),
    Case("causal", options={"causal": True}),
    _dense("causal_square", 130, 130, 64, options={"causal": True}),
    _dense("causal_top_left", 70, 90, options={"causal": True, "q_offset": 0}),
    _dense("causal_empty_rows", 90, 70, options={"causal": True}),
    _dense("causal_offset_past_keys", 33, 40, options={"causal": True, "q_offset": 100}),
    _dense("causal_offset_negative", 65, 65, options={"causal": True, "q_offset": -20}),
    _dense("one_query", 1, 300, 64, options={"causal": True}),
    _dense("one_key", 70, 1),
    _dense("one_one", 1, 1, 16, scale_q=3.0),
    _dense("tile_edges", 128, 256, 64, heads_q=2, heads_kv=2),
    _dense("past_tile_edges", 129, 257, 64, options={"causal": True}),
    _dense("before_tile_edges", 127, 255, 128),
    _dense("long_keys", 40, 700, 64, batch=1),
    _dense("head_dim_1", 40, 50, 1),
    _dense("head_dim_17_by_5", 40, 50, 17, 5),
    _dense("head_dim_40", 70, 90, 40),
    _dense("head_dim_96", 70, 90, 96, options={"causal": True}),
    _dense("head_dim_128_by_64", 100, 90, 128, 64, options={"causal": True}),
    _dense("head_dim_64_by_128", 100, 90, 64, 128),
    _dense("head_dim_192_by_128", 80, 90, 192, 128, options={"causal": True}),
    _dense("head_dim_256", 70, 140, 256, options={"causal": True}),
    _dense("head_dim_255", 33, 65, 255, batch=1),
    _dense("mqa", 70, 90, 64, heads_q=6, heads_kv=1, options={"causal": True}),
    _dense("mha", 70, 90, 64, heads_q=3, heads_kv=3),
    _dense("bhsd", 70, 90, 64, layout="bhsd", options={"causal": True}),
    _dense("scale_given", 70, 90, options={"softmax_scale": 0.5}),
    _dense("scale_negative", 20, 30, options={"softmax_scale": -0.3}),
    _dense("scale_zero", 20, 30, options={"softmax_scale": 0.0}),
    _dense("large_logits", 70, 90, 64, scale_q=30.0),
]

_WINDOWS = ((8, 0), (0, 8), (5, 7), (0, 0), (-1, 3), (3, -1))
FEATURES = [
    *(_dense(f"window_{a}_{b}", 70, 90, options={"window_size": (a, b)}) for a, b in _WINDOWS),
    _dense("window_causal", 150, 150, 64, options={"window_size": (17, 5), "causal": True}),
    _dense("window_rows_empty", 300, 100, options={"window_size": (-1, 350)}, batch=1),
    _dense("softcap", 70, 90, 64, options={"softcap": 2.0, "causal": True}),
    _dense("alibi", 70, 90, 64, operands={"alibi_slopes": (4,)}, options={"causal": True}),
    _dense("alibi_per_batch", 70, 90, operands={"alibi_slopes": (2, 4)}),
    _dense("sinks", 70, 90, 64, operands={"sinks": (4,)}, options={"causal": True}),
    _dense("sinks_empty_rows", 90, 70, operands={"sinks": (4,)}, options={"causal": True}),
    _dense("bias", 70, 90, 64, operands={"bias": (2, 4, 70, 90)}),
    _dense("bias_heads", 70, 90, operands={"bias": (4, 70, 90)}, options={"causal": True}),
    _dense("bias_batch", 70, 90, operands={"bias": (2, 1, 70, 90)}),
    _dense("bias_keys", 70, 90, operands={"bias": (2, 1, 1, 90)}),
    _dense("bias_rows", 70, 90, operands={"bias": (1, 4, 70, 1)}),
    _dense("bias_head_scalar", 70, 90, operands={"bias": (1, 4, 1, 1)}),
    _dense("bias_float32", 70, 90, operands={"bias_float32": (1, 1, 70, 90)}),
    _dense("mask", 70, 90, 64, operands={"mask": (2, 4, 70, 90)}),
    _dense("mask_keys", 70, 90, operands={"mask": (2, 1, 1, 90)}, options={"causal": True}),
    _dense("mask_square", 70, 90, operands={"mask": (70, 90)}),
    _dense("segments", 70, 90, 64, operands={"segments": ()}),
    _dense("segments_causal", 128, 128, operands={"segments": ()}, options={"causal": True}),
    _dense("kv_seqlens", 70, 90, 64, operands={"kv_seqlens": (90, 33)}, options={"causal": True}),
    _dense("q_seqlens", 70, 90, operands={"q_seqlens": (0, 41), "kv_seqlens": (90, 0)}),
    _dense(
        "both_seqlens_causal", 70, 90,
        operands={"q_seqlens": (70, 41), "kv_seqlens": (17, 65)}, options={"causal": True},
    ),
    _dense("q_offset_array", 70, 90, operands={"q_offset": (3, -12)}, options={"causal": True}),
    _dense("dropout", 70, 90, 64, options={"dropout_p": 0.3, "dropout_seed": 1234567890123}),
    _dense("dropout_causal_high", 64, 64, options={"dropout_p": 0.9, "dropout_seed": -5, "causal": True}),
    _dense("deterministic", 150, 300, 64, options={"causal": True, "deterministic": True}),
    _dense(
        "everything", 100, 140, 64,
        operands={"bias": (1, 4, 100, 140), "mask": (2, 1, 100, 140), "alibi_slopes": (4,), "sinks": (4,),
                  "segments": (), "kv_seqlens": (140, 77), "q_seqlens": (90, 100)},
        options={"causal": True, "window_size": (60, 0), "softcap": 5.0, "dropout_p": 0.2, "dropout_seed": 9},
    ),
]  # fmt: skip

_CU_Q, _CU_K = (0, 0, 5, 70, 70, 199), (0, 3, 3, 80, 90, 290)
VARLEN = [
    Case("varlen", layout="thd", head_dim=64, cu_seqlens_q=_CU_Q, cu_seqlens_k=_CU_K),
    Case(
        "varlen_causal", layout="thd", head_dim=64,
        cu_seqlens_q=_CU_Q, cu_seqlens_k=_CU_K, options={"causal": True},
    ),
    Case(
        "varlen_window", layout="thd",
        cu_seqlens_q=_CU_Q, cu_seqlens_k=_CU_K, options={"window_size": (20, 3)},
    ),
    Case(
        "varlen_everything", layout="thd", cu_seqlens_q=_CU_Q, cu_seqlens_k=_CU_K, head_dim=40,
        operands={"alibi_slopes": (4,), "sinks": (4,)},
        options={"causal": True, "softcap": 3.0, "dropout_p": 0.25, "dropout_seed": 77},
    ),
]  # fmt: skip

CASES = [*DENSE, *FEATURES, *VARLEN]
BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Problem:
    """A case's arrays (NumPy), its options, its spec and incoming gradients."""

    case: Case
    arrays: dict[str, Any]
    options: dict[str, Any]
    spec: AttentionSpec
    dout: Any
    dlse: Any

    @property
    def oracle_arrays(self) -> dict[str, Any]:
        """What the reference takes: the arrays, with the seed among them."""
        seed = self.options.get("dropout_seed")
        return self.arrays if seed is None else {**self.arrays, "dropout_seed": seed}


def build(case: Case, dtype: str, seed: int = 0) -> Problem:
    """Draw a case's arrays: normal q, k, v, dout; the rest so that it matters."""
    rng = np.random.default_rng(seed)
    kind = NUMPY_DTYPES[dtype]
    small = np.dtype(np.float64) if dtype == "float64" else np.dtype(np.float32)
    dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v

    def shape(heads: int, seqlen: int, total: int, dim: int) -> tuple[int, ...]:
        if case.layout == "thd":
            return total, heads, dim
        return (case.batch, seqlen, heads, dim) if case.layout == "bshd" else (case.batch, heads, seqlen, dim)

    total_q = case.cu_seqlens_q[-1] if case.cu_seqlens_q else 0
    total_kv = case.cu_seqlens_k[-1] if case.cu_seqlens_k else 0
    q_shape = shape(case.heads_q, case.seqlen_q, total_q, case.head_dim)
    kv_shape = shape(case.heads_kv, case.seqlen_kv, total_kv, case.head_dim)
    arrays = {
        "q": (rng.standard_normal(q_shape) * case.scale_q).astype(kind),
        "k": rng.standard_normal(kv_shape).astype(kind),
        "v": rng.standard_normal((*kv_shape[:-1], dim_v)).astype(kind),
    }
    for name, how in case.operands.items():
        if name == "bias":
            arrays["bias"] = rng.standard_normal(how).astype(kind)
        elif name == "bias_float32":
            arrays["bias"] = rng.standard_normal(how).astype(np.float32)
        elif name == "mask":
            arrays["mask"] = rng.random(how) < 0.7
        elif name == "segments":
            for side, seqlen in (("q", case.seqlen_q), ("kv", case.seqlen_kv)):
                ids = np.sort(rng.integers(0, 3, (case.batch, seqlen)), axis=1)
                arrays[f"{side}_segment_ids"] = ids.astype(np.int32)
        elif name == "alibi_slopes":
            arrays[name] = rng.uniform(0.02, 0.5, how).astype(small)
        elif name == "sinks":
            arrays[name] = rng.standard_normal(how).astype(small)
        else:
            arrays[name] = np.asarray(how, np.int32)
    options = dict(case.options)
    if case.layout == "thd":
        arrays["cu_seqlens_q"] = np.asarray(case.cu_seqlens_q, np.int32)
        arrays["cu_seqlens_k"] = np.asarray(case.cu_seqlens_k, np.int32)
        options["max_seqlen_q"] = int(np.diff(case.cu_seqlens_q or (0,)).max())
        options["max_seqlen_k"] = int(np.diff(case.cu_seqlens_k or (0,)).max())
    spec = spec_of(arrays, options, case.layout)
    dout = rng.standard_normal(spec.out_shape).astype(kind)
    dlse = rng.standard_normal(spec.lse_shape).astype(small)
    return Problem(case, arrays, options, spec, dout, dlse)


def spec_of(arrays: Mapping[str, Any], options: Mapping[str, Any], layout: str) -> AttentionSpec:
    """The spec of NumPy arrays and a call's options."""
    adapter = adapters.load("numpy")
    signatures = {name: adapter.signature(x) for name, x in arrays.items()}
    options = dict(options)
    if options.pop("dropout_seed", None) is not None:
        signatures["dropout_seed"] = Signature("int64", (5,), (1,))
    return bind(signatures, layout=layout, **options)


def tolerance(plain: Any, oracle: Any, dtype: str, relative: float) -> float:
    """Twice the error of plain attention, and a rounding (two of 32 bits or more) of the largest value.

    ``relative``: what is allowed on top, as a part of the largest value.
    """
    finite = np.isfinite(oracle)
    if not finite.any():
        return 0.0
    largest = float(np.abs(oracle[finite]).max())
    eps = float(ml_dtypes.finfo(NUMPY_DTYPES[dtype]).eps) * (1 if NUMPY_DTYPES[dtype].itemsize == 2 else 2)
    error = float(np.abs(np.asarray(plain, np.float64)[finite] - oracle[finite]).max())
    if oracle.size < 64:  # the largest of a few errors can be small by chance
        error += 2 * eps * (largest + 1)
    return 2.0 * error + eps * (largest + 1e-2) + relative * largest


def judge(name: str, got: Any, oracle: Any, plain: Any, dtype: str, relative: float = 0.0) -> None:
    """Assert a result's shape and infinities against the oracle's, no NaN, an error within ``tolerance``."""
    got = np.asarray(got, np.float64)
    assert got.shape == oracle.shape, f"{name}: shape {got.shape}, wanted {oracle.shape}"
    assert not np.isnan(got).any(), f"{name}: {int(np.isnan(got).sum())} NaN of {got.size}"
    infinite = np.isinf(oracle)
    same = (np.isinf(got) == infinite).all() and (got[infinite] == oracle[infinite]).all()
    assert same, f"{name}: infinities differ"
    error = float(np.abs(got[~infinite] - oracle[~infinite]).max(initial=0.0))
    limit = tolerance(plain, oracle, dtype, relative)
    assert error <= limit, f"{name}: error {error:.3e}, limit {limit:.3e}"


def oracle_arithmetic(dtype: str) -> reference.Arithmetic:
    """float64, or for float64 inputs the widest float there is: float64 cannot judge itself."""
    return reference.Arithmetic(np.longdouble, np.longdouble) if dtype == "float64" else reference.FLOAT64


def check_forward(problem: Problem, out: Any, lse: Any) -> None:
    """Judge out and LSE (NumPy) of a problem."""
    dtype = problem.spec.dtype
    arithmetic = reference.own_arithmetic(NUMPY_DTYPES[dtype])
    wide = oracle_arithmetic(dtype)
    oracle_out, oracle_lse = reference.attention(problem.spec, problem.oracle_arrays, wide)
    plain_out, plain_lse = reference.attention(problem.spec, problem.oracle_arrays, arithmetic)
    judge("out", out, oracle_out, plain_out, dtype)
    judge("lse", lse, oracle_lse, plain_lse, problem.spec.accumulator)


def check_backward(problem: Problem, found: Mapping[str, Any], *, dlse: bool = True) -> None:
    """Judge gradients (NumPy, by operand name: q, k, v, bias, sinks) of a problem."""
    spec = problem.spec
    arithmetic = reference.own_arithmetic(NUMPY_DTYPES[spec.dtype])
    wants = frozenset(found)
    incoming = (problem.dout, problem.dlse if dlse else None)
    oracle = reference.gradients(spec, problem.oracle_arrays, *incoming, wants, oracle_arithmetic(spec.dtype))
    plain = reference.gradients(spec, problem.oracle_arrays, *incoming, wants, arithmetic)
    # Row sums are taken from out and weights from LSE, both rounded when stored; where a gradient cancels (a
    # single key) their rounding is all that is left. A mistake is a thousand times larger.
    relative = 16 * float(np.finfo(spec.accumulator).eps)
    for name, got in found.items():
        coarser = max(
            spec.dtype, spec.gradient_dtype(name), key=lambda dtype: ml_dtypes.finfo(NUMPY_DTYPES[dtype]).eps
        )
        judge(f"d{name}", got, oracle[name], plain[name], coarser, relative)
