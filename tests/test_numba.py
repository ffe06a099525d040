"""The CPU backend's own promises: tiles, parts, threads, the code cache, arithmetic. Not its meaning."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn.backends import cpu_code, cpu_team, reference
from cuattn.backends import numba as backend
from cuattn.backends.cpu_layout import lanes_of
from cuattn.program import Host
from cuattn.spec import Signature, bind

ROOT = Path(__file__).parent.parent
SMALL = "reduce.float32"  # quick to compile


def draw(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def signature(x: Any) -> Signature:
    return Signature(x.dtype.name, x.shape, tuple(s // x.itemsize for s in x.strides))


def both(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> list[tuple[str, Any, Any]]:
    """(name, numba's, oracle's) of out, LSE and the gradients."""
    found = []
    for name in ("numba", "reference"):
        (out, lse), pullback = cuattn.flash_attention_vjp(q, k, v, backend=name, return_lse=True, **options)
        gradients = pullback(dout)
        found.append({"out": out, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv})
    return [(name, found[0][name], found[1][name]) for name in found[0]]


def assert_close(results: list[tuple[str, Any, Any]], bound: float) -> None:
    """Errors below ``bound`` times the largest value."""
    for name, got, wanted in results:
        finite = np.isfinite(wanted)
        assert np.array_equal(np.isfinite(got), finite), name
        error = np.abs(got[finite] - wanted[finite]).max(initial=0.0)
        assert error <= bound * np.abs(wanted[finite]).max(initial=1.0), f"{name}: {error}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlens", [(513, 600), (31, 1000), (700, 33), (9, 64)])
def test_tile_edges(seqlens: tuple[int, int], causal: bool) -> None:
    """Lengths around the tile, the block, the panel and the register tile."""
    q, dout = draw(0, 1, seqlens[0], 3, 40), draw(1, 1, seqlens[0], 3, 24)
    k, v = draw(2, 1, seqlens[1], 3, 40), draw(3, 1, seqlens[1], 3, 24)
    assert_close(both(q, k, v, dout, causal=causal), 5e-6)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (90, 20), "q_offset": 0}, {}])
@pytest.mark.parametrize("seqlens", [(330, 700), (700, 330), (100, 391)])
def test_rows_copied_on_the_side(seqlens: tuple[int, int], options: Any, layout: str) -> None:
    """Rows of whole vectors, which the products copy for the next block, wherever that begins and ends."""
    shapes = [(1, seqlens[i], 2, dim) for i, dim in ((0, 64), (1, 64), (1, 32), (0, 32))]
    arrays = [draw(i, *shape) for i, shape in enumerate(shapes)]
    if layout == "bhsd":
        arrays = [x.swapaxes(1, 2) for x in arrays]
    clean = both(*arrays, **options, layout=layout)
    assert_close(clean, 5e-6)
    position = np.arange(seqlens[0])[:, None] - np.arange(seqlens[1])
    left, right = options.get("window_size", (10000, 10000))
    hidden = ~((position <= left) & (-position <= right)).any(0)
    for x in arrays[1:3]:
        np.copyto(x if layout == "bshd" else x.swapaxes(1, 2), np.nan, where=hidden[:, None, None])
    for (name, got, _), (_, wanted, _) in zip(both(*arrays, **options, layout=layout), clean, strict=True):
        np.testing.assert_array_equal(got, wanted, err_msg=name)


SHORT = {  # rows, keys, head dims, heads, options
    "whole": (32, 32, (32, 32), (4, 4), {}),
    "causal": (32, 32, (32, 32), (4, 4), {"causal": True}),
    "grouped": (64, 64, (64, 32), (6, 2), {"causal": True}),
    "more_keys": (32, 120, (16, 64), (4, 1), {"causal": True}),
    "more_rows": (128, 24, (32, 16), (2, 2), {"causal": True}),
    "window": (64, 128, (32, 32), (2, 2), {"window_size": (5, 3)}),
    "rows_without_keys": (64, 40, (32, 32), (2, 2), {"window_size": (4, 2), "q_offset": -30}),
    "beyond_the_keys": (64, 40, (32, 32), (2, 2), {"window_size": (3, 1), "q_offset": 20}),
    "heads_first": (32, 32, (32, 32), (4, 2), {"layout": "bhsd", "softmax_scale": 0.5}),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", SHORT)
def test_short_sequences(case: str, dtype: str) -> None:
    """A loop of their own; what nothing sees is NaN and changes no bit."""
    rows, keys, (dim, dim_v), (heads, heads_kv), options = SHORT[case]
    shapes = {"q": (2, rows, heads, dim), "k": (2, keys, heads_kv, dim), "v": (2, keys, heads_kv, dim_v)}
    arrays = {n: draw(i, *shape, dtype=np.dtype(dtype)) for i, (n, shape) in enumerate(shapes.items())}
    if options.get("layout") == "bhsd":
        arrays = {n: x.swapaxes(1, 2) for n, x in arrays.items()}
    spec = bind({n: signature(x) for n, x in arrays.items()}, **options)
    (step,) = backend.forward_program(spec, 2).steps
    loop = "small" if lanes_of(dtype) >= 8 else "forward"
    assert isinstance(step, Host) and step.entry == f"{loop}.{dtype}"
    run = functools.partial(cuattn.flash_attention, **options, return_lse=True)
    out, lse = run(**arrays)
    wanted = run(**{n: x.astype(np.float64) for n, x in arrays.items()}, backend="reference")
    assert_close([("out", out, wanted[0]), ("lse", lse, wanted[1])], 2e-6 if dtype == "float32" else 4e-15)
    if "window_size" in options:
        position = np.arange(rows)[:, None] + options.get("q_offset", keys - rows) - np.arange(keys)
        left, right = options["window_size"]
        hidden = ~((position <= left) & (-position <= right)).any(0)
        assert hidden.any()
        dirty = {n: x.copy() for n, x in arrays.items()}
        dirty["k"][:, hidden], dirty["v"][:, hidden] = np.nan, np.inf
        for got, clean in zip(run(**dirty), (out, lse), strict=True):
            np.testing.assert_array_equal(got, clean)


def offered(team: Any, run: Any, until: Any) -> bool:
    """Call until it is so; every call that nobody helps with wakes a helper for the next."""
    stop = time.monotonic() + 20
    while time.monotonic() < stop:
        team._words[cpu_team.EVERY] = 1
        run()
        if until():
            return True
    return False


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_short_call_is_shared(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a helper that looks for work anyway, to the same bits; not a call that may use one thread."""
    if lanes_of(dtype) < 8:
        pytest.skip("no loop for short calls")
    monkeypatch.setenv("CUATTN_NUM_THREADS", "2")
    arrays = {name: draw(i, 2, 64, 4, 32, dtype=np.dtype(dtype)) for i, name in enumerate("qkv")}
    spec = cases.spec_of(arrays, {"causal": True}, "bshd")
    shared, team = backend.prepare(spec, None, None), backend._team()
    monkeypatch.setenv("CUATTN_NUM_THREADS", "1")
    alone = backend.prepare(spec, None, None)
    wanted = alone(arrays)

    def check() -> None:
        for name, found in shared(arrays).items():
            np.testing.assert_array_equal(found, wanted[name])

    assert offered(team, check, lambda: team._words[cpu_team.EVERY] == cpu_team.OFTEN)
    team._words[cpu_team.EVERY] = 1
    for _ in range(50):
        alone(arrays)
    assert team._words[cpu_team.EVERY] == 1


def test_helpers_take_offers_and_leave() -> None:
    """What is offered runs on a helper, once; whoever finds none there goes on alone."""
    team, found = backend._team(), []
    q = draw(0, 1, 64, 4, 32)
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(
        lambda job, tile: found.append((threading.current_thread().name, tile))
    )
    job = np.zeros(cpu_team.OFFERED_WORDS, np.int64)
    job[cpu_team.OFFERED_FUNCTION] = ctypes.cast(function, ctypes.c_void_p).value
    words = team._words
    run = functools.partial(cuattn.flash_attention, q, q, q)
    run()
    if cpu_team.thread_count() < 2 or lanes_of("float32") < 8:
        pytest.skip("nobody to help")
    assert offered(team, run, lambda: words[cpu_team.OFFER] == cpu_team.WAITING)
    words[cpu_team.OFFER] = job.ctypes.data
    stop = time.monotonic() + 20
    while not job[cpu_team.OFFERED_DONE] and time.monotonic() < stop:
        time.sleep(0.001)
    assert found == [("cuattn", -1)] and job[cpu_team.OFFERED_DONE] == 1
    while words[cpu_team.OFFER] != cpu_team.NOBODY and time.monotonic() < stop:
        time.sleep(0.001)
    assert words[cpu_team.OFFER] == cpu_team.NOBODY


def test_long_or_odd_sequences_are_cut_into_tiles() -> None:
    """What ``cpu_small.py`` cannot do, or few heads of many rows, which threads would share badly."""
    for rows, keys, dim, heads, options in (
        (33, 32, 32, 4, {}), (32, 33, 32, 4, {}), (32, 32, 40, 4, {}), (32, 32, 128, 4, {}),
        (256, 256, 64, 16, {}), (128, 128, 64, 3, {}), (32, 32, 32, 4, {"softmax_scale": -1.0}),
        (32, 32, 32, 4, {"softcap": 2.0}),
    ):  # fmt: skip
        q, k = draw(0, 1, rows, heads, dim), draw(1, 1, keys, heads, dim)
        spec = bind({"q": signature(q), "k": signature(k), "v": signature(k)}, **options)
        (step,) = backend.forward_program(spec, 2).steps
        assert isinstance(step, Host) and step.entry.startswith("forward"), (rows, keys, dim, heads, options)


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_thread_counts_agree(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key/value head on several threads: its query rows are dealt to parts, whose sums are added."""
    monkeypatch.setenv("CUATTN_NUM_THREADS", threads)
    assert backend.thread_count() == int(threads)
    lengths = {"q": (500, 2), "k": (450, 1), "v": (450, 1), "dout": (500, 2)}
    arrays = {name: draw(i, 1, n, h, 32) for i, (name, (n, h)) in enumerate(lengths.items())}
    dout = arrays.pop("dout")
    spec = cases.spec_of(arrays, {"softmax_scale": 0.2, "window_size": (200, 100)}, "bshd")
    found = backend.prepare(spec, None, None)(arrays)
    pullback = backend.prepare(spec, None, frozenset("qkv"))
    gradients = pullback({**arrays, **found, "dout": dout})
    wanted = reference.gradients(spec, arrays, dout)
    assert_close([(name, gradients[f"d{name}"], wanted[name]) for name in "qkv"], 5e-6)
    again = pullback({**arrays, **found, "dout": dout})
    assert all(np.array_equal(gradients[name], again[name]) for name in again)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize(
    ("rows", "heads", "dim"), [(1, 4, 48), (3, 2, 48), (8, 2, 48), (1, 24, 40), (2, 3, 64)]
)
def test_decoding(rows: int, heads: int, dim: int, dtype: Any) -> None:
    """Few rows take loops of their own: parts of the keys, groups, windows, lengths, sinks."""
    small = np.float64 if dtype is np.float64 else np.float32
    q, k, v = (
        draw(i, 2, n, h, dim, dtype=dtype)
        for i, (n, h) in enumerate([(rows, 2 * heads), (3000, heads), (3000, heads)])
    )
    options = {
        "kv_seqlens": [3000, 2100], "window_size": (2500, 0), "sinks": draw(9, 2 * heads, dtype=small)
    }  # fmt: skip
    spec_steps = []
    for name in ("numba", "reference"):
        spec_steps.append(cuattn.flash_attention(q, k, v, backend=name, return_lse=True, **options))
    bound = 2e-3 if dtype is np.float16 else 2e-6
    for got, wanted in zip(*spec_steps, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("heads", "vectors"), [(8, 4), (8, 8), (3, 8), (32, 4)])
def test_decoding_one_row_of_whole_vectors(heads: int, vectors: int, dtype: Any) -> None:
    """Values beside the next keys' products, wherever rows begin; a NaN stays in its head."""
    dim = vectors * lanes_of(np.dtype(dtype).name)
    q, k, v = (draw(i, 3, n, heads, dim, dtype=dtype) for i, n in enumerate((1, 1500, 1500)))
    k[1, 900, 0], v[1, 901, heads - 1] = np.nan, np.inf
    lengths, found = [1500, 1400, 5], []
    for offset in (0, 16, 8):  # bytes behind a multiple of a vector's
        room = [np.empty(x.nbytes + 192, np.uint8) for x in (k, v)]
        starts = [-place.ctypes.data % 64 + offset for place in room]
        moved = [
            place[at : at + x.nbytes].view(dtype).reshape(x.shape)
            for x, place, at in zip((k, v), room, starts, strict=True)
        ]
        for x, y in zip(moved, (k, v), strict=True):
            x[...] = y
        found.append(cuattn.flash_attention(q, *moved, kv_seqlens=lengths, return_lse=True))
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(x, y)
    wanted = cuattn.flash_attention(q, k, v, kv_seqlens=lengths, return_lse=True, backend="reference")
    bound = 2e-6 if dtype is np.float32 else 4e-15
    for x, y in zip(found[0], wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=bound, atol=bound)


def test_layouts_and_strides_change_no_bit() -> None:
    """A strided view is read in place, to the same bits as its copy."""
    wide = draw(0, 2, 70, 4, 3, 64)
    views = [wide[:, :, :, i] for i in range(3)]
    out, pullback = cuattn.flash_attention_vjp(*views, causal=True)
    dense, dense_pullback = cuattn.flash_attention_vjp(*(x.copy() for x in views), causal=True)
    assert np.array_equal(out, dense)
    dout = draw(1, 2, 4, 70, 64).transpose(0, 2, 1, 3)
    for got, wanted in zip(pullback(dout), dense_pullback(dout.copy()), strict=True):
        assert (got is None and wanted is None) or np.array_equal(got, wanted)


def test_the_same_bits_on_every_run() -> None:
    q, k, v, dout = (draw(i, 1, 300, 2, 64) for i in range(4))
    bias = draw(5, 1, 2, 1, 300)
    first = None
    for _ in range(10):
        out, pullback = cuattn.flash_attention_vjp(q, k, v, bias=bias, causal=True)
        found = [x.tobytes() for x in (out, *pullback(dout)) if x is not None]
        first = first or found
        assert found == first


@pytest.mark.parametrize(("shape", "calls"), [((1, 900, 2, 64), 5), ((1, 64, 8, 32), 2000)])
def test_python_threads_at_once(shape: tuple[int, ...], calls: int) -> None:
    """Callers share the team without waiting for each other's tiles, and each gets its own result."""
    q = [draw(i, *shape) for i in range(4)]
    wanted = [cuattn.flash_attention(x, x, x) for x in q]
    wrong = []

    def call(i: int) -> None:
        for _ in range(calls):
            if not np.array_equal(cuattn.flash_attention(q[i], q[i], q[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes() -> None:
    code = (
        "import os, numpy as np, cuattn\n"
        "q = np.random.default_rng(0).standard_normal((1, 900, 2, 64), dtype=np.float32)\n"
        "s = q[:, :64].copy()\n"
        "a = cuattn.flash_attention(q, q, q)\n"
        "for _ in range(100): b = cuattn.flash_attention(s, s, s)\n"
        "child = os.fork()\n"
        "same = all(np.array_equal(b, cuattn.flash_attention(s, s, s)) for _ in range(100))\n"
        "same &= np.array_equal(a, cuattn.flash_attention(q, q, q))\n"
        "if child == 0: os._exit(0 if same else 1)\n"
        "assert same and os.waitpid(child, 0)[1] == 0\n"
    )
    environment = {**os.environ, "CUATTN_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=120)


def bodies(count: int, body: Any) -> tuple[Any, Any]:
    """A job of ``count`` tiles that a Python function runs, and what keeps it alive."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(lambda _, tile: body(tile))
    return cpu_team.make_job([(ctypes.cast(function, ctypes.c_void_p).value or 0, 0, count)]), function


def test_a_team_shares_a_job() -> None:
    """Tiles that take their time land on both threads, every one once, call after call."""
    team = backend._team()
    found: list[tuple[int, int]] = []

    def body(tile: int) -> None:
        found.append((threading.get_ident(), tile))
        time.sleep(0.002)

    job, _function = bodies(8, body)
    for _ in range(5):
        found.clear()
        cpu_team.restart(job)
        team.run(job, 2)
        assert sorted(tile for _, tile in found) == list(range(8))
        assert len({thread for thread, _ in found}) == 2


def test_more_callers_than_the_team_has_slots() -> None:
    """Who finds no slot works alone: nobody waits for a helper, and no tile is lost."""
    team, done = backend._team(), []
    count = cpu_team.SLOTS + 6
    start = threading.Barrier(count)

    def call() -> None:
        job, _function = bodies(3, lambda _: time.sleep(0.001))
        start.wait()
        team.run(job, 3)
        done.append(int(job[cpu_team.HEADER + cpu_team.DONE]))

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done == [3] * count


def cpu_seconds(thread: threading.Thread) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clocks of threads here")
@pytest.mark.parametrize("backward", [False, True])
def test_both_threads_work_on_a_middle_sized_problem(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 tokens and 8 heads, some milliseconds: the helper has nearly half of the processor time."""
    monkeypatch.setenv("CUATTN_NUM_THREADS", "2")
    arrays = {name: draw(i, 1, 512, 8, 64) for i, name in enumerate("qkv")}
    spec = cases.spec_of(arrays, {}, "bshd")
    run = backend.prepare(spec, None, None)
    if backward:
        arrays |= {**run(arrays), "dout": draw(3, 1, 512, 8, 64)}
        run = backend.prepare(spec, None, frozenset("qkv"))
    run(arrays)
    helpers = [thread for thread in threading.enumerate() if thread.name == "cuattn"]
    assert helpers
    before = sum(map(cpu_seconds, helpers)), time.thread_time()
    for _ in range(10):
        run(arrays)
    helped, own = sum(map(cpu_seconds, helpers)) - before[0], time.thread_time() - before[1]
    assert helped > 0.3 * (helped + own)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be kept on CPUs here")
def test_helpers_keep_off_the_callers_cpu() -> None:
    """A team as large as the machine lives on CPUs of its own, and makes way when its caller moves."""
    code = (
        "import os, threading, numpy as np, cuattn\n"
        "cpus = os.sched_getaffinity(0)\n"
        "q = np.ones((1, 512, 4, 64), np.float32)\n"
        "cuattn.flash_attention(q, q, q)\n"
        "for cpu in sorted(cpus) * 2:\n"
        "    os.sched_setaffinity(0, {cpu})\n"
        "    cuattn.flash_attention(q, q, q)\n"
        "    helpers = [t.native_id for t in threading.enumerate() if t.name == 'cuattn']\n"
        "    homes = [os.sched_getaffinity(h) for h in helpers]\n"
        "    assert sorted(map(tuple, homes)) == sorted((c,) for c in cpus - {cpu}), (cpu, homes)\n"
        "    assert os.sched_getaffinity(0) == {cpu}\n"
        "    os.sched_setaffinity(0, cpus)\n"
    )
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    count = str(len(os.sched_getaffinity(0)))
    environment = {**os.environ, "CUATTN_NUM_THREADS": count}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, timeout=120)


def test_affinity_decides_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUATTN_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert cpu_team.thread_count() == 3


def test_memory_is_linear() -> None:
    """Twice the length, twice the buffers, forward and backward, also on many threads."""
    case = next(c for c in cases.CASES if c.name == "full")
    spec = cases.build(case, "float32").spec

    def elements(seqlen: int) -> float:
        longer = replace(spec, seqlen_q=seqlen, seqlen_kv=seqlen)
        programs = backend.forward_program(longer), backend.backward_program(longer, frozenset("qkv"), 64)
        return sum(float(np.prod(b.shape)) for p in programs for b in (*p.outputs, *p.workspace))

    assert elements(65536) <= 2.05 * elements(32768)


def test_work_that_nobody_wants_is_not_done() -> None:
    case = next(c for c in cases.CASES if c.name == "full")
    spec = cases.build(case, "float32").spec
    program = backend.backward_program(spec, frozenset("v"), 1)
    assert [b.name for b in program.outputs] == ["dv"]
    assert [s.entry for s in program.steps if isinstance(s, Host)] == ["backward.float32"]


# ---- arithmetic ----------------------------------------------------------------------------------


def kernels(real: str) -> Any:
    from cuattn.backends import cpu_layout, cpu_simd

    return cpu_simd.make(real, cpu_layout.machine())


def ulps(got: Any, wanted: Any) -> float:
    return float(np.max(np.abs(got - wanted) / np.spacing(np.abs(wanted).astype(got.dtype))))


@pytest.mark.parametrize("real", ["float32", "float64"])
def test_exp2_is_within_an_ulp(real: str) -> None:
    import numba

    simd = kernels(real)
    weights = simd.weights

    @numba.njit
    def run(x: int, rows: int, one: int, zeros: int) -> None:
        weights(x, x, rows, one, zeros, zeros, zeros)

    last = -126.0 if real == "float32" else -1022.0
    x = np.concatenate([np.linspace(last, 0, 100_000), -np.logspace(-9, 1, 20_000)]).astype(real)
    x = np.resize(x, -(-x.size // simd.width) * simd.width)
    y, one, zeros = x.copy(), np.array([1, 1e-37], real), np.zeros(simd.width, real)
    run(y.ctypes.data, y.size // simd.width, one.ctypes.data, zeros.ctypes.data)
    assert ulps(y, np.exp2(x.astype(np.longdouble))) <= 1.0
    y = np.resize(np.array([-np.inf, np.nan, 2 * last, 0.0], real), simd.width)
    run(y.ctypes.data, 1, one.ctypes.data, zeros.ctypes.data)
    assert y[0] == 0 and np.isnan(y[1]) and y[2] == 0 and y[3] == 1


@pytest.mark.parametrize("real", ["float32", "float64"])
def test_tanh_is_within_two_ulps(real: str) -> None:
    import numba

    simd, number = kernels(real), np.dtype(real).type
    tanh = simd.tanh

    @numba.njit
    def run(x: int, count: int) -> None:
        tanh(x, count, number(1.0))

    x = np.concatenate([np.linspace(-12, 12, 96_000), np.logspace(-20, 1, 32_000)]).astype(real)
    y = x.copy()
    run(y.ctypes.data, y.size)
    keep = x != 0
    assert ulps(y[keep], np.tanh(x[keep].astype(np.longdouble))) <= 2.0


@pytest.mark.parametrize("real", ["float32", "float64"])
def test_log_of_a_total(real: str) -> None:
    """The logarithm in ``finish``: float32's LSE to half an ulp, float64's to three."""
    import numba

    simd = kernels(real)
    finish = simd.finish

    @numba.njit
    def run(tops: int, totals: int, factor: int, lse: int, count: int) -> None:
        for i in range(0, count, simd_lanes):
            finish(tops, totals + i * itemsize, factor, lse + i * itemsize)

    simd_lanes, itemsize = simd.lanes, simd.itemsize
    x = np.concatenate([np.linspace(0.5, 3, 100_000), np.logspace(-30, 30, 20_000)]).astype(real)
    x = x[: x.size // simd.lanes * simd.lanes]
    totals, lse, factor, tops = x.copy(), np.empty_like(x), np.ones(2, real), np.zeros(simd.lanes, real)
    run(*(a.ctypes.data for a in (tops, totals, factor, lse)), x.size)
    np.testing.assert_array_equal(totals, np.array(1.0, real) / x)
    assert ulps(lse, np.log(x.astype(np.longdouble))) <= (0.51 if real == "float32" else 3.0)
    totals = np.resize(np.array([0.0, np.nan, 1.0], real), simd.lanes)
    run(*(a.ctypes.data for a in (tops, totals, factor, lse)), simd.lanes)
    assert lse[0] == -np.inf and np.isnan(lse[1]) and lse[2] == 0
    assert totals[0] == 0 and np.isnan(totals[1]) and totals[2] == 1


def test_half_precision_conversions() -> None:
    """Every float16 and bfloat16 there is, and rounding of float32 to both, as NumPy and ml_dtypes do it."""
    import numba

    from cuattn.backends import cpu_scores

    def convert(function: Any, x: Any, dtype: Any) -> Any:
        @numba.njit
        def run(x: Any, y: Any) -> None:
            for i in range(x.size):
                y[i] = function(x[i])

        y = np.empty(x.shape, dtype)
        run(x, y)
        return y

    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    exact = draw(0, 100_000) * np.exp2(np.random.default_rng(1).uniform(-30, 20, 100_000)).astype(np.float32)
    edges = np.array([65519.9, 65520, 65504, 6e-8, 2.9e-8, 3.4e38, np.inf, -np.inf, 0.0, -0.0], np.float32)
    floats = np.concatenate([exact, edges])
    pairs = (
        (np.float16, cpu_scores._from_half, cpu_scores._to_half),
        (ml_dtypes.bfloat16, cpu_scores._from_bfloat, cpu_scores._to_bfloat),
    )
    for kind, from_, to in pairs:
        np.testing.assert_array_equal(convert(from_, bits, np.float32), bits.view(kind).astype(np.float32))
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(convert(to, floats, np.uint16), floats.astype(kind).view(np.uint16))
        nan = convert(to, np.array([np.nan, -np.nan], np.float32), np.uint16)
        assert np.isnan(nan.view(kind).astype(np.float32)).all()


@pytest.mark.slow
@pytest.mark.parametrize("without", ["-avx512", "-avx,-fma,-f16c"])
def test_other_register_tiles(without: str, tmp_path: Path) -> None:
    """The same source for AVX2 and for SSE2."""
    code = (
        "import numpy as np, cuattn\n"
        "rng = np.random.default_rng(0)\n"
        "for rows, keys, dim in ((70, 90, 40), (64, 40, 32)):\n"
        "    q, k, v, d = (rng.standard_normal((1, n, 2, dim)).astype('f')\n"
        "                  for n in (rows, keys, keys, rows))\n"
        "    found = []\n"
        "    for name in ('numba', 'reference'):\n"
        "        (out, lse), pullback = cuattn.flash_attention_vjp(\n"
        "            q, k, v, causal=True, window_size=(20, 0), return_lse=True, backend=name)\n"
        "        found.append([out, np.where(np.isfinite(lse), lse, 0), *pullback(d)[:3]])\n"
        "    for a, b in zip(*found): assert np.abs(a - b).max() < 1e-5\n"
    )
    environment = {**os.environ, "CUATTN_CPU_FEATURES": without, "CUATTN_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, timeout=300)


# ---- the code cache ------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    cpu_code.cache_directory.cache_clear()
    yield tmp_path / "cpu"
    cpu_code.cache_directory.cache_clear()


def test_an_entry_is_kept_and_a_torn_one_made_again(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = cpu_code._object(SMALL)
    (path,) = empty_cache.iterdir()
    compiled = []
    monkeypatch.setattr(cpu_code, "_compile", lambda name: compiled.append(name) or code)
    assert cpu_code._object(SMALL) == code and not compiled
    path.write_bytes(path.read_bytes()[:-100])
    assert cpu_code._object(SMALL) == code and compiled == [SMALL]
    assert cpu_code._object(SMALL) == code and len(compiled) == 1
    assert ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(cpu_code._load(SMALL, code))


def test_long_entries_compile_side_by_side(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes the second one; where there is no such program, this one does."""
    names, compiled, compile_ = [SMALL, "combine.float32"], [], cpu_code._compile
    monkeypatch.setattr(cpu_code, "LONG", ("reduce", "combine"))
    monkeypatch.setattr(cpu_code, "_addresses", {})
    monkeypatch.setattr(cpu_code, "_compile", lambda name: compiled.append(name) or compile_(name))
    assert all(cpu_code.host_entries(names)) and compiled == [SMALL]
    kept = {path: path.read_bytes() for path in empty_cache.iterdir()}
    assert len(kept) == 2
    for path in kept:
        path.unlink()
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(cpu_code, "_addresses", {})
    assert all(cpu_code.host_entries(names)) and compiled == [SMALL, *names]


def test_entries_depend_on_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu_code._key()
    read = Path.read_text
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self, *a, **k: read(self, *a, **k) + "#")
        assert cpu_code._key.__wrapped__() != before
    assert cpu_code._key.__wrapped__() == before


def test_sources_are_all_there() -> None:
    """A file that shapes the code and is not in the key would leave stale entries alive."""
    folder = Path(cpu_code.__file__).parent
    assert {path.name for path in folder.glob("cpu_*.py")} <= set(cpu_code.SOURCES)


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(blocked / "below"))
    cpu_code.cache_directory.cache_clear()
    try:
        folder = cpu_code.cache_directory()
        assert folder is None or blocked not in folder.parents
    finally:
        cpu_code.cache_directory.cache_clear()


def test_a_second_process_compiles_nothing() -> None:
    """It loads machine code, without Numba, well within a second and a half."""
    code = (
        "import sys, time, numpy as np\n"
        "start = time.perf_counter()\n"
        "import cuattn\n"
        "q = np.ones((1, 32, 4, 32), np.float32)\n"
        "cuattn.flash_attention(q, q, q)\n"
        "assert 'numba' not in sys.modules\n"
        "sys.stdout.write(str(time.perf_counter() - start))\n"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, timeout=120)  # fills the cache
    times = [
        float(subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, timeout=120).stdout)
        for _ in range(3)
    ]
    assert min(times) < 1.5


def test_a_long_compile_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cpu_code, "NOTICE_AFTER", 0.0)
    with cpu_code._notice("some.entry"):
        done = threading.Event()
        done.wait(0.2)
    assert "some.entry" in capfd.readouterr().err
    monkeypatch.setattr(cpu_code, "NOTICE_AFTER", 60.0)
    with cpu_code._notice("some.entry"):
        pass
    assert not capfd.readouterr().err


@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_near_the_largest_number(causal: bool) -> None:
    """It takes all mass; LSE in units of log 2 is beyond float32."""
    q, k, v, dout = (draw(i, 1, 40, 2, 16) for i in range(4))
    sinks = np.array([3e38, -3e38], np.float32)
    (out, lse), pullback = cuattn.flash_attention_vjp(q, k, v, sinks=sinks, causal=causal, return_lse=True)
    found = pullback(dout)
    assert not np.any(out[:, :, 0]) and np.all(lse[:, 0] == sinks[0])
    for x in found[:3]:
        assert np.isfinite(x).all() and not np.any(x[:, :, 0]) and np.any(x[:, :, 1])
    assert not np.any(found.dsinks)


def test_rows_of_no_sequence_are_empty() -> None:
    """Packed arrays longer than their last sequence: out 0, LSE -inf, gradients 0 there."""
    problem = cases.build(next(c for c in cases.CASES if c.layout == "thd"), "float32")
    q, k, v = (np.concatenate([problem.arrays[n], problem.arrays[n][:3]]) for n in "qkv")
    options = {n: problem.arrays[n] for n in ("cu_seqlens_q", "cu_seqlens_k")}
    rest = {n: problem.options[n] for n in ("max_seqlen_q", "max_seqlen_k")}
    spec = cases.spec_of({"q": q, "k": k, "v": v, **options}, {**rest}, "thd")
    found = backend.prepare(spec, None, None)({"q": q, "k": k, "v": v, **options})
    assert (found["out"][-3:] == 0).all() and (found["lse"][:, -3:] == -np.inf).all()
    arrays = {"q": q, "k": k, "v": v, **options, **found, "dout": np.ones_like(found["out"])}
    gradients = backend.prepare(spec, None, frozenset("qkv"))(arrays)
    for name in ("dq", "dk", "dv"):
        assert (gradients[name][-3:] == 0).all()
    wanted, _ = reference.attention(spec, {"q": q, "k": k, "v": v, **options})
    np.testing.assert_allclose(found["out"], wanted, atol=1e-5)
