"""The benchmark behind ``cuattn bench``: exactness, speed and peak memory against standard attention.

Standard attention is plain softmax attention in the same array library and dtype: the whole score matrix,
its softmax, its product with v. Both are compared with float64 on one head. Nothing here prints.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from . import device as devices
from . import jit, planning
from .api import flash_attention_vjp
from .spec import AttentionSpec

Array = Any  # of NumPy or CuPy
T = TypeVar("T")

STEP_SECONDS = 12.0  # standard attention stops before the length at which one call would take longer
SAMPLE_SECONDS = 0.5  # repeated calls stop after this long
REPEAT_SECONDS = 6.0  # a first call that took longer is not repeated


@dataclass(frozen=True)
class Setup:
    """What is measured: ``arrays`` is "numpy" or "cupy"; lengths in tokens, ascending."""

    arrays: str
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool
    backward: bool
    lengths: tuple[int, ...]
    budget: float  # seconds for the whole run


@dataclass
class Sample:
    """One implementation at one length. Times in seconds, memory in bytes above the inputs."""

    forward: float
    backward: float | None
    memory: int
    error: float  # largest error against float64 over out (and gradients), relative to the largest value
    errors: dict[str, float] = field(default_factory=dict)


@dataclass
class Row:
    """One length: ours, and standard attention's or the reason why it did not run."""

    length: int
    cuattn: Sample
    standard: Sample | None
    skipped: str = ""


def default_setup(arrays: str, *, quick: bool = False) -> Setup:
    """Sizes that suit the library's usual machine: a small CPU for NumPy, a data-centre GPU for CuPy."""
    if arrays == "cupy":
        lengths = tuple(2**n for n in range(9, 13 if quick else 17))
        return Setup("cupy", "float16", 1, 16, 16, 128, True, True, lengths, 150.0)
    lengths = tuple(2**n for n in range(7, 11 if quick else 16))
    return Setup("numpy", "float32", 1, 4, 4, 64, True, True, lengths, 150.0)


def array_module(arrays: str) -> ModuleType:
    """NumPy or CuPy; CuPy is imported here and nowhere earlier."""
    if arrays == "numpy":
        return np
    import cupy

    return cupy


# Standard attention and the float64 oracle


def standard_attention(xp: ModuleType, q: Array, k: Array, v: Array, causal: bool) -> tuple[Array, Array]:
    """Plain softmax attention over (batch, seqlen, heads, head_dim); out and the weights it keeps."""
    qt, kt, vt = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    group = qt.shape[1] // kt.shape[1]
    if group > 1:
        kt, vt = (xp.repeat(x, group, axis=1) for x in (kt, vt))
    scores = qt @ kt.swapaxes(-1, -2)
    wide = scores.dtype if scores.dtype.itemsize > 2 else xp.float32
    scores = scores.astype(wide, copy=False)
    scores *= wide.type(q.shape[-1] ** -0.5) if hasattr(wide, "type") else wide(q.shape[-1] ** -0.5)
    if causal:
        rows, cols = scores.shape[-2:]
        seen = xp.tri(rows, cols, cols - rows, dtype=bool)
        scores[..., ~seen] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    weights = scores.astype(q.dtype, copy=False)
    return (weights @ vt).transpose(0, 2, 1, 3), weights


def standard_gradients(
    xp: ModuleType, q: Array, k: Array, v: Array, weights: Array, dout: Array
) -> tuple[Array, Array, Array]:
    """Gradients of plain attention for q, k and v from the weights that its forward kept."""
    scale = q.shape[-1] ** -0.5
    qt, kt, vt, dt = (x.transpose(0, 2, 1, 3) for x in (q, k, v, dout))
    heads_kv, group = kt.shape[1], qt.shape[1] // kt.shape[1]
    if group > 1:
        kt, vt = (xp.repeat(x, group, axis=1) for x in (kt, vt))
    dv = weights.swapaxes(-1, -2) @ dt
    ds = (dt @ vt.swapaxes(-1, -2)).astype(xp.float64 if q.dtype.itemsize == 8 else xp.float32, copy=False)
    ds -= (ds * weights).sum(axis=-1, keepdims=True)
    ds *= weights
    ds *= ds.dtype.type(scale)
    ds = ds.astype(q.dtype, copy=False)
    dq, dk = ds @ kt, ds.swapaxes(-1, -2) @ qt
    if group > 1:
        dk, dv = (x.reshape(x.shape[0], heads_kv, group, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
    back = tuple(x.transpose(0, 2, 1, 3) for x in (dq, dk, dv))
    return back[0], back[1], back[2]


def oracle_head(xp: ModuleType, q: Array, k: Array, v: Array, dout: Array, causal: bool) -> dict[str, Array]:
    """Attention and its gradients in float64 for one head, (seqlen, head_dim) each, by blocks of rows."""
    q, k, v, dout = (x.astype(xp.float64) for x in (q, k, v, dout))
    n, d = q.shape
    scale, block = d**-0.5, 512
    result = {"out": xp.empty_like(q), "dq": xp.empty_like(q), "dk": xp.zeros_like(k), "dv": xp.zeros_like(v)}
    for start in range(0, n, block):
        rows = slice(start, min(start + block, n))
        seen = slice(0, rows.stop if causal else n)
        scores = (q[rows] @ k[seen].T) * scale
        if causal:
            tail = xp.tri(rows.stop - start, dtype=bool)
            scores[:, start:][~tail] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        p = xp.exp(scores, out=scores)
        p /= p.sum(axis=-1, keepdims=True)
        out = p @ v[seen]
        result["out"][rows] = out
        result["dv"][seen] += p.T @ dout[rows]
        ds = dout[rows] @ v[seen].T
        ds -= (dout[rows] * out).sum(axis=-1, keepdims=True)
        ds *= p
        ds *= scale
        result["dq"][rows] = ds @ k[seen]
        result["dk"][seen] += ds.T @ q[rows]
    return result


def _errors(setup: Setup, got: dict[str, Array], want: dict[str, Array]) -> dict[str, float]:
    """Largest error of the last head of the first batch entry, relative to each array's largest value."""
    found = {}
    for name, x in got.items():
        if setup.heads != setup.heads_kv and name in ("dk", "dv"):
            continue  # those heads sum over several query heads; the oracle has one
        ref = want[name]
        diff = abs(x[0, :, -1].astype(np.float64) - ref).max()
        found[name] = float(diff) / max(float(abs(ref).max()), 1e-30)
    return found


# Clocks and counters


def _timed(xp: ModuleType, call: Callable[[], T]) -> tuple[T, float]:
    """A call's result and its seconds; on a GPU by events on the current stream."""
    if xp is np:
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start
    begin, end = xp.cuda.Event(), xp.cuda.Event()
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    return result, float(xp.cuda.get_elapsed_time(begin, end)) / 1e3


def measure(xp: ModuleType, call: Callable[[], Any], first: float) -> float:
    """Median seconds over calls, three or more, until SAMPLE_SECONDS have gone; one call may be enough.

    ``first`` is what the first call took, which may have compiled or loaded something: it only counts where
    it is too long to be repeated.
    """
    if first > REPEAT_SECONDS:
        return first
    times: list[float] = []
    while not times or (times[-1] < SAMPLE_SECONDS and (len(times) < 3 or sum(times) < SAMPLE_SECONDS)):
        times.append(_timed(xp, call)[1])
        if len(times) == 100:
            break
    return statistics.median(times)


def _resident(name: str) -> int | None:
    """VmRSS or VmHWM of this process in bytes; None where the system does not say (not Linux)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_memory(xp: ModuleType, call: Callable[[], T]) -> tuple[int, T]:
    """Bytes that a call holds at its peak above what is held before it, and its result.

    CuPy: what a memory pool of its own had to take from the device. NumPy: the larger of tracemalloc's peak
    (arrays made in Python) and, on Linux, the growth of the resident set (also what compiled code takes).
    """
    gc.collect()
    if xp is not np:
        pool = xp.cuda.MemoryPool()
        with xp.cuda.using_allocator(pool.malloc):
            result = call()
            xp.cuda.Device().synchronize()
        return int(pool.total_bytes()), result
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to the present
        before = _resident("VmRSS")
    except OSError:
        before = None
    tracemalloc.start()
    try:
        result = call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    after = _resident("VmHWM") if before is not None else None
    if before is not None and after is not None:
        peak = max(peak, after - before)
    return peak, result


def available_memory(xp: ModuleType) -> int:
    """Bytes that a new array may take: free device memory, or the system's available memory."""
    if xp is not np:
        return int(xp.cuda.runtime.memGetInfo()[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 2**30


def standard_bytes(setup: Setup, length: int) -> int:
    """Bytes of the score-sized arrays that standard attention holds at once, forward and backward."""
    wide = 8 if setup.dtype == "float64" else 4
    matrices = 4 if setup.backward else 2
    return setup.batch * setup.heads * length * length * wide * matrices


def flops(setup: Setup, length: int) -> float:
    """Floating-point operations of the forward pass; the backward pass counts 2.5 times as many."""
    full = 4.0 * setup.batch * setup.heads * length * length * setup.head_dim
    return full / 2 if setup.causal else full


# The run


def make_inputs(xp: ModuleType, setup: Setup, length: int) -> tuple[Array, Array, Array, Array]:
    """Random normal q, k, v and dout of (batch, length, heads, head_dim), from a fixed seed."""
    rng = np.random.default_rng(length)

    def draw(heads: int) -> Array:
        x = rng.standard_normal((setup.batch, length, heads, setup.head_dim), dtype=np.float32)
        if setup.dtype == "bfloat16":
            import ml_dtypes

            return xp.asarray(x.astype(ml_dtypes.bfloat16))
        return xp.asarray(x.astype(setup.dtype))

    return draw(setup.heads), draw(setup.heads_kv), draw(setup.heads_kv), draw(setup.heads)


Forward = Callable[[], tuple[Array, Any]]  # out, and what the backward wants
Backward = Callable[[Any], tuple[Array, Array, Array]]


def _ours(inputs: tuple[Array, ...], setup: Setup, backend: str | None) -> tuple[Forward, Backward]:
    q, k, v, dout = inputs

    def forward() -> tuple[Array, Any]:
        return flash_attention_vjp(q, k, v, causal=setup.causal, backend=backend)

    def backward(pullback: Any) -> tuple[Array, Array, Array]:
        dq, dk, dv, _, _ = pullback(dout)
        return dq, dk, dv

    return forward, backward


def _standard(xp: ModuleType, inputs: tuple[Array, ...], setup: Setup) -> tuple[Forward, Backward]:
    q, k, v, dout = inputs

    def forward() -> tuple[Array, Any]:
        return standard_attention(xp, q, k, v, setup.causal)

    def backward(weights: Any) -> tuple[Array, Array, Array]:
        return standard_gradients(xp, q, k, v, weights, dout)

    return forward, backward


def _sample(
    xp: ModuleType, setup: Setup, inputs: tuple[Array, ...], forward: Forward, backward: Backward
) -> Sample:
    """Run once under the memory counters, again for the clock, and compare."""
    first: dict[str, float] = {}

    def whole() -> dict[str, Array]:
        (out, kept), first["forward"] = _timed(xp, forward)
        if not setup.backward:
            return {"out": out}
        (dq, dk, dv), first["backward"] = _timed(xp, lambda: backward(kept))
        return {"out": out, "dq": dq, "dk": dk, "dv": dv}

    memory, got = peak_memory(xp, whole)
    seconds, back = measure(xp, forward, first["forward"]), None
    if setup.backward:
        back = first["backward"]
        if back <= REPEAT_SECONDS:
            _, kept = forward()
            back = measure(xp, lambda: backward(kept), back)
    sample = Sample(seconds, back, memory, 0.0)
    return _with_errors(xp, setup, inputs, got, sample)


def _with_errors(
    xp: ModuleType, setup: Setup, inputs: tuple[Array, ...], got: dict[str, Array], sample: Sample
) -> Sample:
    q, k, v, dout = (x[0, :, -1] for x in inputs)
    want = oracle_head(xp, q, k, v, dout, setup.causal)
    sample.errors = _errors(setup, got, want)
    sample.error = max(sample.errors.values())
    return sample


def compile_kernels(setup: Setup) -> None:
    """Compile the CUDA kernels of all lengths side by side, so that no length has to."""
    calls: list[tuple[AttentionSpec, frozenset[str] | None]] = []
    for length in setup.lengths:
        q, k = (
            planning.shaped((setup.batch, length, heads, setup.head_dim), setup.dtype)
            for heads in (setup.heads, setup.heads_kv)
        )
        spec = planning.bind_call(q, k, k, {"causal": setup.causal})
        calls += [(spec, None), (spec, frozenset("qkv"))]
    where = devices.query(0)
    jit.compile_all((kernel, where.arch) for kernel in planning.kernels_of(calls, where))


def run(setup: Setup, backend: str | None = None) -> Iterator[Row]:
    """Yield one ``Row`` per length; stops early, before a length that would exceed the budget.

    Standard attention is left out from the first length on at which it would not fit into half of the free
    memory or one call would take longer than STEP_SECONDS.
    """
    xp = array_module(setup.arrays)
    if setup.arrays == "cupy" and backend in (None, "cuda"):
        compile_kernels(setup)
    started = time.perf_counter()
    skipped, standard_cost, cost = "", 0.0, 0.0
    for length in setup.lengths:
        left = setup.budget - (time.perf_counter() - started)
        if cost and 4 * cost > left:
            return
        inputs = make_inputs(xp, setup, length)
        if not cost:  # the first length also compiles the CPU's loops
            _sample(xp, setup, inputs, *_ours(inputs, setup, backend))
        begin = time.perf_counter()
        ours = _sample(xp, setup, inputs, *_ours(inputs, setup, backend))
        cost = time.perf_counter() - begin
        need, free = standard_bytes(setup, length), available_memory(xp)
        if not skipped and need > free / 2:
            skipped = f"needs {need / 2**30:.1f} GiB of scores, {free / 2**30:.1f} GiB are free"
        if not skipped and 4 * standard_cost > STEP_SECONDS:
            skipped = f"would take about {4 * standard_cost:.0f} s a call"
        standard = None
        if not skipped:
            standard = _sample(xp, setup, inputs, *_standard(xp, inputs, setup))
            standard_cost = standard.forward + (standard.backward or 0.0)
        yield Row(length, ours, standard, skipped)


def machine(arrays: str) -> dict[str, Any]:
    """What the figures were measured on: processor, cores, GPU, versions, and the tree's commit if any."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {},
    }
    for name in ("cuattn", "numpy", "numba", "jax", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            facts["versions"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if arrays == "cupy":
        cupy = array_module("cupy")
        gpu = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        facts["gpu"] = gpu["name"].decode()
        facts["driver"] = cupy.cuda.runtime.driverGetVersion()
    root = Path(__file__).resolve().parent.parent
    if (root / ".git").exists():
        git = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        facts["commit"] = git.stdout.strip()
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write_record(path: Path, setup: Setup, backend: str, rows: list[Row]) -> None:
    """Write setup, machine and rows as JSON."""
    record = {
        "command": " ".join(["cuattn", *sys.argv[1:]]),
        "backend": backend,
        "setup": asdict(setup),
        "machine": machine(setup.arrays),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def draw(path: Path, setup: Setup, backend: str, rows: list[Row]) -> None:
    """Draw time, memory and error against length into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ours, plain = "#0b6e99", "#c8553d"
    fig, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    both = [(row.length, row.standard) for row in rows if row.standard is not None]
    series: list[tuple[str, str, str, list[tuple[int, Sample]]]] = [
        ("cuattn", ours, "o", [(row.length, row.cuattn) for row in rows]),
        ("standard attention", plain, "s", both),
    ]
    for label, color, marker, points in series:
        lengths = [n for n, _ in points]
        style = {"color": color, "marker": marker, "markersize": 4}
        axes[0].plot(lengths, [s.forward for _, s in points], label=f"{label}, forward", **style)
        if setup.backward:
            back = [s.backward for _, s in points]
            axes[0].plot(lengths, back, linestyle="--", label=f"{label}, backward", **style)
        axes[1].plot(lengths, [s.memory / 2**20 for _, s in points], label=label, **style)
        axes[2].plot(lengths, [s.error for _, s in points], label=label, **style)
    ends = (rows[0].length / 2**0.5, rows[-1].length * 2**0.5)
    missing = [row for row in rows if row.standard is None]
    if missing:
        for axis in axes:
            axis.axvspan(missing[0].length / 2**0.5, ends[1], color="0.94", zorder=0)
        axes[1].text(
            ends[1] / 1.1, 0.03, "standard attention\ndoes not run", fontsize=8, color="0.35", ha="right",
            transform=axes[1].get_xaxis_transform(),
        )  # fmt: skip
    titles = (
        "time of one call (s)",
        "peak memory above the inputs (MiB)",
        "largest error, relative, to float64",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xscale="log", yscale="log", xlabel="length (tokens)", title=title, xlim=ends)
        axis.set_xscale("log", base=2)
        axis.set_xticks([row.length for row in rows], [_short(row.length) for row in rows])
        axis.grid(True, which="major", color="0.88", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="upper left")
    worst = [s.error for row in rows for s in (row.cuattn, row.standard) if s]
    axes[2].set_ylim(
        10 ** (np.floor(np.log10(min(worst) + 1e-18)) - 0.5), 10 ** (np.ceil(np.log10(max(worst))) + 1)
    )
    mask = "causal" if setup.causal else "full"
    fig.suptitle(
        f"{backend} backend, {setup.arrays} {setup.dtype}, batch {setup.batch}, "
        f"{setup.heads} heads of {setup.head_dim}, {mask}",
        fontsize=11,
    )
    fig.savefig(path, dpi=130)
    plt.close(fig)


def _short(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)
