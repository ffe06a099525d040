"""The mma.sync family's backward on a GPU, whether or not a call would choose it: beyond the case table.

Outputs and workspace hold NaN before a program runs.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import cases
import numpy as np
import pytest

import cuattn
from cuattn import device, jit
from cuattn.backends import cuda, reference
from cuattn.families import mma, mma_backward
from cuattn.interop import adapters
from cuattn.program import Launch, Program
from cuattn.spec import GRADIENTS, AttentionSpec, Signature, bind, canonical

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

CASES = [
    cases.BY_NAME["everything"],
    cases.BY_NAME["varlen_everything"],
    cases.BY_NAME["causal_empty_rows"],
    cases.BY_NAME["causal_offset_negative"],
    cases.BY_NAME["q_seqlens"],
    cases._dense("gqa_many_tiles", 300, 400, 64, heads_q=16, heads_kv=2, options={"causal": True}),
    cases._dense("bias_many_tiles", 300, 400, 128, operands={"bias": (1, 4, 300, 400), "sinks": (4,)}),
    cases._dense("dropout_many_tiles", 300, 400, 128, options={"dropout_p": 0.2, "dropout_seed": 7}),
]
BY_NAME = {case.name: case for case in CASES}


def poison(program: Program) -> None:
    """Fill the memory that the program's buffers will get with NaN."""
    sizes = [cuda._bytes(b) for b in program.outputs]
    sizes.append(sum(-(-cuda._bytes(b) // 256) * 256 for b in program.workspace))
    held = [cupy.full((size,), 0xFF, cupy.uint8) for size in sizes if size]
    del held


def run(
    spec: AttentionSpec, wants: Any, arrays: dict[str, Any], family: Any = mma_backward
) -> dict[str, Any]:
    program = family.backward(spec, device.query(0), frozenset(wants))
    prepared = cuda.prepare_program(program, 0)
    poison(program)
    return prepared(arrays)


def problem_arrays(problem: cases.Problem) -> dict[str, Any]:
    """A problem's arrays on the GPU, with the oracle's out and LSE."""
    out, lse = reference.attention(problem.spec, problem.oracle_arrays)
    arrays = {n: cupy.asarray(x) for n, x in problem.arrays.items()}
    if "dropout_seed" in problem.options:
        arrays["dropout_seed"] = problem.options["dropout_seed"]
    return arrays | {
        "out": cupy.asarray(out.astype(problem.arrays["q"].dtype)),
        "lse": cupy.asarray(lse.astype(np.float32)),
        "dout": cupy.asarray(problem.dout),
        "dlse": cupy.asarray(problem.dlse),
    }


def wants_of(spec: AttentionSpec) -> tuple[str, ...]:
    return tuple(name for name in GRADIENTS if getattr(spec, name) is not None)


def check(problem: cases.Problem, found: dict[str, Any]) -> None:
    cases.check_backward(problem, {n[1:]: np.asarray(cupy.asnumpy(x), np.float64) for n, x in found.items()})


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(x.tobytes() == a[name].tobytes() for name, x in b.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["everything", "varlen_everything", "gqa_many_tiles", "bias_many_tiles"])
def test_every_subset_of_gradients(name: str) -> None:
    problem = cases.build(BY_NAME[name], "bfloat16")
    arrays, spec = problem_arrays(problem), replace(problem.spec, dlse=True, deterministic=True)
    names, model = wants_of(spec), device.query(0)
    subsets = [wants for n in range(1, len(names) + 1) for wants in itertools.combinations(names, n)]
    programs = [mma_backward.backward(spec, model, frozenset(wants)) for wants in subsets]
    kernels = {step.kernel for what in programs for step in what.steps if isinstance(step, Launch)}
    jit.compile_all((kernel, model.arch) for kernel in kernels)
    whole = run(spec, names, arrays)
    check(problem, whole)
    for wants in subsets:
        assert same(whole, run(spec, wants, arrays)), wants


@pytest.mark.parametrize("case", CASES, ids=str)
def test_deterministic_repeats(case: cases.Case) -> None:
    problem = cases.build(case, "bfloat16")
    arrays, spec = problem_arrays(problem), replace(problem.spec, dlse=True, deterministic=True)
    first = run(spec, wants_of(spec), arrays)
    for _ in range(30):
        assert same(first, run(spec, wants_of(spec), arrays))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_a_group_in_parts(heads: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.build(BY_NAME["gqa_many_tiles"], "bfloat16")
    monkeypatch.setattr(mma_backward._Plan, "heads_of_block", heads)
    spec = replace(problem.spec, dlse=True, deterministic=deterministic)
    check(problem, run(spec, "qkv", problem_arrays(problem)))


def padded(x: Any) -> Any:
    """x with rows that start anywhere, in (batch, head, row) order in memory."""
    batch, rows, heads, columns = x.shape
    memory = cupy.empty((batch, heads, rows, columns + 3), x.dtype)
    y = memory.transpose(0, 2, 1, 3)[..., 1 : 1 + columns]
    y[...] = x
    return y


@pytest.mark.parametrize("case", [c for c in CASES if c.layout == "bshd"], ids=str)
def test_strides_and_unaligned_rows(case: cases.Case) -> None:
    problem = cases.build(case, "bfloat16")
    arrays = problem_arrays(problem)
    wanted = run(replace(problem.spec, dlse=True, deterministic=True), "qkv", arrays)
    arrays |= {name: padded(arrays[name]) for name in ("q", "k", "v", "dout")}
    adapter = adapters.load("cupy")
    extra = ("dropout_seed", "out", "lse", "dout", "dlse")
    signatures = {n: adapter.signature(x) for n, x in arrays.items() if n not in extra}
    options = dict(problem.options)
    if options.pop("dropout_seed", None) is not None:
        signatures["dropout_seed"] = Signature("int64", (5,), (1,))
    options["deterministic"] = True
    dout = canonical(adapter.signature(arrays["dout"]), "bshd")
    spec = replace(bind(signatures, layout="bshd", **options), dlse=True, dout=dout)
    assert spec.q.align < 16
    assert same(wanted, run(spec, "qkv", arrays))


def unseen(problem: cases.Problem) -> tuple[Any, Any]:
    """Query rows that see nothing and key rows that nothing sees, (batch, head, row)."""
    spec = problem.spec
    q = np.ones((spec.q.shape[0], spec.heads_q, spec.q.shape[2]), bool)
    k = np.ones((spec.k.shape[0], spec.heads_kv, spec.k.shape[2]), bool)
    for head in reference._heads(spec, problem.oracle_arrays, reference.FLOAT64):
        entry = 0 if spec.varlen else head.batch
        q[entry, head.head, head.rows] &= ~head.visible.any(axis=1)
        k[entry, head.head // spec.group, head.columns] &= ~head.visible.any(axis=0)
    return q, k


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_nan_where_nothing_looks(case: cases.Case) -> None:
    problem = cases.build(case, "bfloat16")
    arrays, spec = problem_arrays(problem), replace(problem.spec, dlse=True, deterministic=True)
    q, k = unseen(problem)
    assert q.any() or k.any()
    dirty = dict(arrays)
    for name, hidden in (("q", q), ("k", k), ("v", k), ("dout", q)):
        x = reference._to_bhsd(spec, problem.dout if name == "dout" else problem.arrays[name]).copy()
        x[hidden] = np.nan
        dirty[name] = cupy.asarray(np.ascontiguousarray(reference._from_bhsd(spec, x)))
    assert same(run(spec, wants_of(spec), arrays), run(spec, wants_of(spec), dirty))


def check_dropout_of_shards(family: Any, deterministic: bool = True) -> None:
    """Entries, heads, rows and keys worked on apart get the whole's gradients: the bits, if deterministic."""
    case = cases._dense("shards", 256, 256, 64, heads_kv=4, options={"dropout_p": 0.3, "dropout_seed": 11})
    problem = cases.build(case, "bfloat16")
    arrays = problem_arrays(problem)
    spec = replace(problem.spec, deterministic=deterministic)
    whole = run(spec, "qkv", arrays | {"dropout_seed": cupy.asarray([11, 0, 0, 0, 0])}, family)
    every = slice(None)
    parts = {  # part of (batch, rows, heads, keys), what it begins at, and the gradients that it has whole
        "batch": ((slice(1, 2), every, every, every), (1, 0, 0, 0), "qkv"),
        "head": ((every, every, slice(2, 4), every), (0, 2, 0, 0), "qkv"),
        "row": ((every, slice(128, 256), every, every), (0, 0, 128, 0), "q"),
        "key": ((every, every, every, slice(128, 256)), (0, 0, 0, 128), "kv"),
    }
    adapter = adapters.load("cupy")
    for axis, ((b, rows, heads, keys), first, wants) in parts.items():
        cut = {n: cupy.ascontiguousarray(arrays[n][b, rows, heads]) for n in ("q", "out", "dout")}
        cut |= {n: cupy.ascontiguousarray(arrays[n][b, keys, heads]) for n in "kv"}
        cut["lse"] = cupy.ascontiguousarray(arrays["lse"][b, heads, rows])
        cut["dropout_seed"] = cupy.asarray([11, *first])
        signatures = {n: adapter.signature(cut[n]) for n in ("q", "k", "v", "dropout_seed")}
        options = {"dropout_p": 0.3, "softmax_scale": 64**-0.5, "deterministic": deterministic}
        found = run(bind(signatures, layout="bshd", **options), "qkv", cut, family)
        for name in wants:
            wanted = whole[f"d{name}"][b, rows if name == "q" else keys, heads].astype(cupy.float32)
            error = cupy.abs(found[f"d{name}"].astype(cupy.float32) - wanted).max()
            assert float(error) <= (0 if deterministic else 2e-2), (axis, name)


def test_dropout_of_a_shard() -> None:
    check_dropout_of_shards(mma_backward)


def test_rows_of_no_sequence() -> None:
    """Packed arrays that are longer than their sequences: gradients there are 0, whatever is in the rows."""
    ends = cupy.asarray([7, 150, 380], np.int32)
    drawn = []
    for heads in (8, 2, 2):
        x = cupy.random.RandomState(heads).standard_normal((400, heads, 64), dtype=cupy.float32)
        x[:7] = x[380:] = np.nan
        drawn.append(x.astype(cases.NUMPY_DTYPES["bfloat16"]))
    q, k, v = drawn
    adapter = adapters.load("cupy")
    arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    signatures = {n: adapter.signature(x) for n, x in arrays.items()}
    spec = bind(signatures, layout="thd", max_seqlen_q=230, max_seqlen_k=230, causal=True)
    arrays |= cuda.prepare_program(mma.forward(spec, device.query(0)), 0)(arrays) | {"dout": q}
    for name, x in run(spec, "qkv", arrays).items():
        rows = x.astype(cupy.float32)
        assert bool((rows[:7] == 0).all() and (rows[380:] == 0).all() and cupy.isfinite(rows).all()), name


def draw(*shape: int, seed: int = 0) -> Any:
    x = cupy.random.RandomState(seed).standard_normal(shape, dtype=cupy.float32)
    return x.astype(cases.NUMPY_DTYPES["bfloat16"])


def dense(q: Any, k: Any, v: Any, **options: Any) -> tuple[AttentionSpec, dict[str, Any]]:
    """The spec of a dense bshd call and its arrays, with the mma forward's out and LSE; dout is q."""
    adapter = adapters.load("cupy")
    spec = bind({"q": adapter.signature(q), "k": adapter.signature(k), "v": adapter.signature(v)}, **options)
    arrays = {"q": q, "k": k, "v": v, "dout": q}
    return spec, arrays | cuda.prepare_program(mma.forward(spec, device.query(0)), 0)(arrays)


def test_dq_sums_past_2_31_elements() -> None:
    q, k, v = draw(1, 8, 1, 128), draw(1, 200, 1, 128, seed=1), draw(1, 200, 1, 128, seed=2)
    batch = (1 << 31) // (64 * 128) + 10  # blocks of 64 rows of dq's sums
    many = (cupy.ascontiguousarray(cupy.broadcast_to(x, (batch, *x.shape[1:]))) for x in (q, k, v))
    spec, arrays = dense(*many)
    found = run(replace(spec, deterministic=True), "q", arrays)["dq"]
    bits = found.view(cupy.uint16)
    assert bool((bits == bits[:1]).all())
    wanted = cuattn.flash_attention_vjp(q, k, v)[1](q).dq
    assert float(cupy.abs(found[:1].astype(cupy.float32) - wanted.astype(cupy.float32)).max()) < 2e-2
