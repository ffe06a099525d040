"""The self-check behind ``cuattn verify``: a compact case table against the float64 reference.

It needs nothing but the installed package. Each case runs forward and backward on one array library and
one backend; the error of every result, relative to its largest value, must stay below the dtype's bar.
What the cases need compiled is compiled side by side first. Nothing here prints.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import device as devices
from . import jit, planning
from .api import flash_attention, flash_attention_vjp
from .arrays import adapter
from .program import Host, Kernel
from .spec import AttentionSpec, canonical

Array = Any  # of NumPy, CuPy or JAX

# Relative to the largest value: a few roundings of the dtype, as at most a few hundred keys are summed.
BARS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-13}
# A result whose largest value is below this is compared absolutely, against bar * FLOOR. Inputs are of size
# 1, so what is left that small is a difference of equal terms (one key alone: its weight cannot change).
FLOOR = 0.05


@dataclass(frozen=True)
class Case:
    """One problem: sizes, plain options, and the names of operands to draw."""

    name: str
    batch: int = 2
    seqlen_q: int = 96
    seqlen_kv: int = 96
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    options: tuple[tuple[str, Any], ...] = ()
    operands: tuple[str, ...] = ()  # of bias, mask, alibi_slopes, sinks, segments, lengths


CASES = (
    Case("one query, one key", batch=1, seqlen_q=1, seqlen_kv=1, head_dim=16, head_dim_v=16),
    Case("full"),
    Case("causal", options=(("causal", True),)),
    Case("tails of every tile", seqlen_q=131, seqlen_kv=67, options=(("causal", True), ("q_offset", 0))),
    Case("rows without a key", seqlen_q=80, seqlen_kv=33, options=(("causal", True),)),
    Case("grouped heads", heads_q=6, heads_kv=2, options=(("causal", True),)),
    Case("one key head", heads_q=4, heads_kv=1),
    Case("odd head dim", head_dim=40, head_dim_v=24, seqlen_q=50, seqlen_kv=77),
    Case("head dim 128", head_dim=128, head_dim_v=128, options=(("causal", True),)),
    Case("head dim 256", head_dim=256, head_dim_v=256, heads_q=1, heads_kv=1),
    Case("layout bhsd", options=(("layout", "bhsd"), ("causal", True))),
    Case("window", seqlen_q=200, seqlen_kv=200, options=(("window_size", (30, 5)),)),
    Case("causal window", seqlen_q=130, seqlen_kv=200, options=(("causal", True), ("window_size", (40, 0)))),
    Case("few queries", seqlen_q=3, seqlen_kv=300, heads_q=4, heads_kv=2, options=(("causal", True),)),
    Case("few queries, dropout", seqlen_q=2, seqlen_kv=99, options=(("dropout_p", 0.5), ("dropout_seed", 1))),
    Case("softcap", options=(("softcap", 5.0), ("softmax_scale", 0.5))),
    Case("bias", operands=("bias",)),
    Case("mask", operands=("mask",)),
    Case("ALiBi", options=(("causal", True),), operands=("alibi_slopes",)),
    Case("sinks", operands=("sinks",)),
    Case("segments", options=(("causal", True),), operands=("segments",)),
    Case("lengths", options=(("causal", True),), operands=("lengths",)),
    Case("dropout", options=(("dropout_p", 0.3), ("dropout_seed", 7))),
    Case("deterministic", heads_q=4, options=(("causal", True), ("deterministic", True))),
    Case(
        "everything", seqlen_q=70, seqlen_kv=110, heads_q=4, head_dim=48, head_dim_v=32,
        options=(("window_size", (60, 20)), ("softcap", 8.0), ("dropout_p", 0.1), ("dropout_seed", 3)),
        operands=("bias", "mask", "alibi_slopes", "sinks", "segments", "lengths"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of one case: the worst relative error and its array, or the exception that ended it."""

    case: str
    dtype: str
    error: float
    worst: str
    ok: bool
    note: str = ""


def _dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def draw(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """The case's inputs in host memory, already rounded to ``dtype``: q, k, v, dout and its operands."""
    rng = np.random.default_rng(sum(map(ord, case.name)))
    b, sq, skv = case.batch, case.seqlen_q, case.seqlen_kv
    swap = dict(case.options).get("layout") == "bhsd"

    def normal(length: int, heads: int, dim: int) -> np.ndarray:
        x = rng.standard_normal((b, length, heads, dim)).astype(_dtype(dtype))
        return np.ascontiguousarray(x.swapaxes(1, 2)) if swap else x

    wide = np.float64 if dtype == "float64" else np.float32
    inputs = {
        "q": normal(sq, case.heads_q, case.head_dim),
        "k": normal(skv, case.heads_kv, case.head_dim),
        "v": normal(skv, case.heads_kv, case.head_dim_v),
        "dout": normal(sq, case.heads_q, case.head_dim_v),
    }
    if "bias" in case.operands:
        inputs["bias"] = rng.standard_normal((1, case.heads_q, sq, skv)).astype(_dtype(dtype))
    if "mask" in case.operands:
        inputs["mask"] = rng.random((b, 1, sq, skv)) < 0.8
    if "alibi_slopes" in case.operands:
        inputs["alibi_slopes"] = (2.0 ** -np.arange(1, case.heads_q + 1)).astype(wide)
    if "sinks" in case.operands:
        inputs["sinks"] = rng.standard_normal(case.heads_q).astype(wide)
    if "segments" in case.operands:
        inputs["q_segment_ids"] = np.sort(rng.integers(0, 3, (b, sq)), axis=1).astype(np.int32)
        inputs["kv_segment_ids"] = np.sort(rng.integers(0, 3, (b, skv)), axis=1).astype(np.int32)
    if "lengths" in case.operands:
        inputs["q_seqlens"] = rng.integers(1, sq + 1, b).astype(np.int32)
        inputs["kv_seqlens"] = rng.integers(1, skv + 1, b).astype(np.int32)
    return inputs


def _numbered(outcome: Any) -> dict[str, Array]:
    out, lse, gradients = outcome
    return {"out": out, "lse": lse} | {k: g for k, g in gradients._asdict().items() if g is not None}


def reference(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The float64 result of the reference backend on the rounded inputs."""
    floating = ("q", "k", "v", "dout", "bias", "alibi_slopes", "sinks")
    wide = {n: x.astype(np.float64) if n in floating else x for n, x in inputs.items()}
    dout = wide.pop("dout")
    operands = {**wide, **dict(case.options), "return_lse": True, "backend": "reference"}
    (out, lse), pull = flash_attention_vjp(**operands)
    return _numbered((out, lse, pull(dout)))


def compute(
    case: Case, inputs: dict[str, np.ndarray], arrays: str, backend: str | None
) -> dict[str, np.ndarray]:
    """The same through ``arrays`` ("numpy", "cupy", "jax") and ``backend``, back in host memory."""
    given: dict[str, Any] = {**dict(case.options), "return_lse": True, "backend": backend}
    if arrays == "jax":
        return _compute_jax(given, inputs)
    if arrays == "cupy":
        import cupy

        inputs = {name: cupy.asarray(x) for name, x in inputs.items()}
    dout = inputs["dout"]
    (out, lse), pull = flash_attention_vjp(**{n: x for n, x in inputs.items() if n != "dout"}, **given)
    found = _numbered((out, lse, pull(dout)))
    return {n: x.get() if arrays == "cupy" else x for n, x in found.items()}


def _compute_jax(given: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import jax
    import jax.numpy as jnp

    operands = {name: jnp.asarray(x) for name, x in inputs.items()}
    dout = operands.pop("dout")
    names = [n for n in ("q", "k", "v", "bias", "sinks") if n in operands]
    fixed = {n: x for n, x in operands.items() if n not in names}

    @jax.jit
    def call(*wanted: Any) -> Any:
        return flash_attention(**dict(zip(names, wanted, strict=True)), **fixed, **given)

    (out, lse), pull = jax.vjp(call, *(operands[n] for n in names))
    gradients = pull((dout, jnp.zeros_like(lse)))
    found = {"out": out, "lse": lse} | {f"d{n}": g for n, g in zip(names, gradients, strict=True)}
    return {n: np.asarray(x) for n, x in found.items()}


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference relative to the largest finite value; infinite where infinities or NaN differ."""
    if got.shape != want.shape:
        return float("inf")
    if not want.size:
        return 0.0
    got = got.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]) or not np.isfinite(got[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    return float(abs(got[finite] - want[finite]).max() / max(abs(want[finite]).max(), FLOOR))


def cases(arrays: str, backend: str | None, match: str = "") -> list[Case]:
    """The cases whose name contains ``match``; for the readable kernels only those that they take."""
    found = [case for case in CASES if match in case.name]
    if arrays == "cupy" and backend == "numba":
        found = [case for case in found if not case.operands and "dropout_p" not in dict(case.options)]
    return found


# ---- compiling ahead ----

Calls = list[tuple[AttentionSpec, frozenset[str] | None]]


def calls(arrays: str, chosen: list[Case], dtypes: tuple[str, ...]) -> Calls:
    """The forwards (``None``) and backwards (for all gradients there are) that ``compute`` makes of cases."""
    found: Calls = []
    for case in chosen:
        for dtype in dtypes:
            inputs = draw(case, dtype)
            dout = adapter("numpy").signature(inputs.pop("dout"))
            q, k, v = (inputs.pop(name) for name in "qkv")
            spec = planning.bind_call(q, k, v, {**inputs, **dict(case.options)})
            wants = (
                {"q", "k", "v"} | ({"bias"} if spec.bias else set()) | ({"sinks"} if spec.sinks else set())
            )
            back = replace(spec, dout=canonical(dout, spec.layout), dlse=arrays == "jax")
            found += [(spec, None), (back, frozenset(wants))]
    return found


def compile_kernels(wanted: Calls) -> tuple[int, Iterator[None]]:
    """How many CUDA kernels the calls need on the GPU here, and an iterator that compiles one a step.

    All cores work at once. A kernel that does not compile is left to its case, which will say so.
    """
    where = devices.query(0)
    kernels = planning.kernels_of(wanted, where)

    def one(kernel: Kernel) -> None:
        with suppress(Exception):
            jit.compiled(kernel, where.arch)

    def steps() -> Iterator[None]:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for done in as_completed([pool.submit(one, kernel) for kernel in kernels]):
                yield done.result()

    return len(kernels), steps()


def compile_loops(wanted: Calls) -> tuple[int, Iterator[None]]:
    """The same for the CPU's loops that no file holds yet, a process each: in one, Numba takes turns."""
    cpu = importlib.import_module(".backends.numba", __package__)
    code = importlib.import_module(".backends.cpu_code", __package__)
    names: dict[str, None] = {code.DRAIN: None}
    for spec, wants in wanted:
        program = cpu.forward_program(spec) if wants is None else cpu.backward_program(spec, wants)
        names |= dict.fromkeys(step.entry for step in program.steps if isinstance(step, Host))
    missing = [name for name in names if code.cache_directory() is not None and not code.is_kept(name)]

    def one(name: str) -> None:
        process = code.compile_aside(name, quiet=True)
        if process is not None:
            process.wait()

    def steps() -> Iterator[None]:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for done in as_completed([pool.submit(one, name) for name in missing]):
                yield done.result()

    return len(missing), steps()


def run(arrays: str, backend: str | None, dtypes: tuple[str, ...], match: str = "") -> Iterator[Outcome]:
    """Yield an ``Outcome`` for every case of ``cases`` and every dtype."""
    for case in cases(arrays, backend, match):
        for dtype in dtypes:
            inputs = draw(case, dtype)
            want = reference(case, inputs)
            try:
                got = compute(case, inputs, arrays, backend)
            except Exception as fault:  # the table goes on: one broken kernel must not hide the others
                note = f"{type(fault).__name__}: {fault}".splitlines()[0]
                yield Outcome(case.name, dtype, float("inf"), "", False, note)
                continue
            errors = {name: distance(x, want[name]) for name, x in got.items()}
            worst = max(errors, key=lambda name: errors[name])
            yield Outcome(case.name, dtype, errors[worst], worst, errors[worst] <= BARS[dtype])
