"""The CPU backend against PyTorch, JAX and plain NumPy on this machine: ``python -m bench.cpu [--quick]``.

Every round runs each contender once, in turn, so that all of them see the same machine; what is reported is
the median and the best of the rounds. Writes ``bench/results/cpu.md`` and ``cpu.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

RESULTS = Path(__file__).parent / "results"
HEADS = 8
PAUSE = 0.16  # seconds
LONG = 0.3  # seconds of a run that needs no other before it
CALLS = 200  # of a small problem
Contenders = dict[str, Callable[[], Any]]
clock: Callable[[], float] = time.perf_counter


def measure(contenders: Contenders, seconds: float) -> dict[str, list[float]]:
    """Seconds of each run, by contender; at least three rounds.

    A pause and, unless it takes long, an untimed run go before each: the threads of the contender before have
    gone to sleep (OpenBLAS's wait busily for 0.1 s, on the core that the next needs), the caches are its own.
    """
    took = {}
    for name, run in contenders.items():
        start = time.perf_counter()
        run()
        took[name] = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in contenders}
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(next(iter(times.values()))) < 3:
        for name, run in contenders.items():
            time.sleep(PAUSE)
            if took[name] < LONG:
                run()
            start = clock()
            run()
            times[name].append(clock() - start)
    return times


def row(what: str, work: float, unit: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """One line of the table: rates of work (in 1e9) per second, median and best."""
    rates = {
        name: {"median": work / statistics.median(t) / 1e9, "best": work / min(t) / 1e9}
        for name, t in times.items()
    }
    return {"what": what, "unit": unit, "rates": rates}


def plain(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Standard attention, as one writes it in NumPy; all (batch, seqlen, heads, dim)."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) * np.float32(1 / math.sqrt(q.shape[-1]))
    if causal:
        scores[..., ~np.tri(q.shape[2], k.shape[2], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3), weights


def plain_gradients(q: Any, k: Any, v: Any, dout: Any, weights: Any) -> Any:
    """Its gradients, from the weights it kept."""
    q, k, v, dout = (x.transpose(0, 2, 1, 3) for x in (q, k, v, dout))
    dweights = dout @ v.swapaxes(-1, -2)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    dscores *= np.float32(1 / math.sqrt(q.shape[-1]))
    return dscores @ k, dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dout


def forwards(q: Any, k: Any, v: Any, causal: bool, wanted: set[str], cuattn: bool = True) -> Contenders:
    found: Contenders = {}
    if cuattn:
        from cuattn import flash_attention

        found["cuattn"] = lambda: flash_attention(q, k, v, causal=causal)
    if "torch" in wanted:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        tensors = [torch.from_numpy(x).transpose(1, 2) for x in (q, k, v)]
        found["torch"] = lambda: scaled_dot_product_attention(*tensors, is_causal=causal)
    if "jax" in wanted:
        import jax

        arrays = [jax.device_put(x, jax.devices("cpu")[0]) for x in (q, k, v)]
        run = jax.jit(lambda a, b, c: jax.nn.dot_product_attention(a, b, c, is_causal=causal))
        found["jax"] = lambda: run(*arrays).block_until_ready()
    if "numpy" in wanted:
        found["numpy"] = lambda: plain(q, k, v, causal)
    return found


def backwards(q: Any, k: Any, v: Any, dout: Any, causal: bool, wanted: set[str]) -> Contenders:
    import cuattn

    _, pullback = cuattn.flash_attention_vjp(q, k, v, causal=causal)
    found: Contenders = {"cuattn": lambda: pullback(dout)}
    if "torch" in wanted:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        tensors = [torch.from_numpy(x).transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        out = scaled_dot_product_attention(*tensors, is_causal=causal)
        tangent = torch.from_numpy(dout).transpose(1, 2)
        found["torch"] = lambda: torch.autograd.grad(out, tensors, tangent, retain_graph=True)
    if "numpy" in wanted:
        _, weights = plain(q, k, v, causal)
        found["numpy"] = lambda: plain_gradients(q, k, v, dout, weights)
    return found


def draw(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def shapes(quick: bool, seconds: float, available: set[str]) -> list[dict[str, Any]]:
    """float32, forward and backward, layout bshd."""
    rows = []
    for dim in (64, 128):
        for seqlen in (512, 2048, 4096) if quick else (512, 1024, 2048, 4096, 8192, 16384):
            wanted = set(available)
            if seqlen > 4096:
                wanted -= {"numpy", "jax"}  # their score matrices take gigabytes
            for causal in (False, True):
                q, k, v, dout = (draw(1, seqlen, HEADS, dim) for _ in range(4))
                flops = 4 * HEADS * seqlen**2 * dim / (2 if causal else 1)
                name = f"D{dim} S{seqlen} {'causal' if causal else 'full'}"
                times = measure(forwards(q, k, v, causal, wanted), seconds)
                rows.append(row(f"forward {name}", flops, "GFLOP/s", times))
                times = measure(backwards(q, k, v, dout, causal, wanted), seconds)
                rows.append(row(f"backward {name}", 2.5 * flops, "GFLOP/s", times))
                say(rows[-2:])
    return rows


def dtypes(seconds: float) -> list[dict[str, Any]]:
    """cuattn in each dtype, at one shape."""
    import cuattn

    rows = []
    for causal in (False, True):
        forward, backward = {}, {}
        for name in ("float32", "float64", "float16", "bfloat16"):
            kind = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
            q, k, v, dout = (draw(1, 2048, HEADS, 64, dtype=kind) for _ in range(4))
            _, pullback = cuattn.flash_attention_vjp(q, k, v, causal=causal)
            forward[name] = lambda q=q, k=k, v=v, c=causal: cuattn.flash_attention(q, k, v, causal=c)
            backward[name] = lambda pullback=pullback, dout=dout: pullback(dout)
        flops = 4 * HEADS * 2048**2 * 64 / (2 if causal else 1)
        name = f"dtypes D64 S2048 {'causal' if causal else 'full'}"
        rows.append(row(f"forward {name}", flops, "GFLOP/s", measure(forward, seconds)))
        rows.append(row(f"backward {name}", 2.5 * flops, "GFLOP/s", measure(backward, seconds)))
    say(rows)
    return rows


def prepared(threads: int, q: Any, k: Any, v: Any, causal: bool, wants: str = "") -> Callable[[Any], Any]:
    """A forward, or a backward for ``wants``, that uses so many threads: called with the arrays by name."""
    from cuattn.backends import numba
    from cuattn.planning import bind_call

    former = os.environ.get("CUATTN_NUM_THREADS", "")
    os.environ["CUATTN_NUM_THREADS"] = str(threads)
    try:
        spec = bind_call(q, k, v, {"causal": causal})
        return numba.prepare(spec, None, frozenset(wants) if wants else None)
    finally:
        os.environ["CUATTN_NUM_THREADS"] = former


def scaling(seconds: float, threads: int) -> list[dict[str, Any]]:
    """One thread and all of them, in turn, on the same arrays."""
    rows = []
    for seqlen, causal in ((512, False), (1024, True), (2048, False), (8192, True)):
        q, k, v, dout = (draw(1, seqlen, HEADS, 64) for _ in range(4))
        arrays = {"q": q, "k": k, "v": v}
        given = {**arrays, **prepared(1, q, k, v, causal)(arrays), "dout": dout}
        flops = 4 * HEADS * seqlen**2 * 64 / (2 if causal else 1)
        name = f"D64 S{seqlen} {'causal' if causal else 'full'}"
        for what, wants, work in (("forward", "", flops), ("backward", "qkv", 2.5 * flops)):
            runs = {n: partial(prepared(n, q, k, v, causal, wants), given) for n in (threads, 1)}
            found = measure({f"{n} threads": run for n, run in runs.items()}, seconds)
            rows.append(row(f"{what} {name}", work, "GFLOP/s", found))
    say(rows)
    return rows


def decode(seconds: float, threads: int, available: set[str]) -> list[dict[str, Any]]:
    """One query against 32k keys: bytes of keys and values a second, against reading as many."""
    q, k, v = draw(1, 1, HEADS, 128), draw(1, 32768, HEADS, 128), draw(1, 32768, HEADS, 128)
    rows = []
    for count in sorted({1, threads}):
        found = {"cuattn": partial(prepared(count, q, k, v, False), {"q": q, "k": k, "v": v})}
        if count == 1:
            found["read (NumPy sum)"] = lambda: (k.sum(), v.sum())
        if "torch" in available:
            import torch

            torch.set_num_threads(count)
            found |= forwards(q, k, v, False, {"torch"}, cuattn=False)
            tensors = [torch.from_numpy(x) for x in (k, v)]
            found["read (torch sum)"] = lambda tensors=tensors: [x.sum() for x in tensors]
        name = f"decode 1 x 32k, 8 heads of 128, {count} threads"
        rows.append(row(name, k.nbytes + v.nbytes, "GB/s", measure(found, seconds)))
    say(rows)
    return rows


def against_numpy(seconds: float) -> list[dict[str, Any]]:
    """4k tokens against plain NumPy, whose backward may keep the weights or compute them again."""
    import cuattn

    rows = []
    for causal in (False, True):
        q, k, v, dout = (draw(1, 4096, HEADS, 64) for _ in range(4))
        _, weights = plain(q, k, v, causal)
        _, pullback = cuattn.flash_attention_vjp(q, k, v, causal=causal)

        def again(q: Any = q, k: Any = k, v: Any = v, dout: Any = dout, causal: bool = causal) -> Any:
            return plain_gradients(q, k, v, dout, plain(q, k, v, causal)[1])

        def both(q: Any = q, k: Any = k, v: Any = v, dout: Any = dout, causal: bool = causal) -> Any:
            return cuattn.flash_attention_vjp(q, k, v, causal=causal)[1](dout)

        flops = 4 * HEADS * 4096**2 * 64 / (2 if causal else 1)
        kept = partial(plain_gradients, q, k, v, dout, weights)
        name = f"D64 S4096 {'causal' if causal else 'full'}"
        found = {"cuattn": partial(pullback, dout), "numpy, weights kept": kept, "numpy, again": again}
        rows.append(row(f"backward {name}", 2.5 * flops, "GFLOP/s", measure(found, seconds)))
        found = {"cuattn": both, "numpy": again}
        rows.append(row(f"forward and backward {name}", 3.5 * flops, "GFLOP/s", measure(found, seconds)))
    say(rows)
    return rows


def small(seconds: float) -> list[dict[str, Any]]:
    """Microseconds of a small call from NumPy, warm."""
    import cuattn

    q, rows = draw(1, 32, 4, 32), []

    def calls(causal: bool) -> None:
        for _ in range(CALLS):
            cuattn.flash_attention(q, q, q, causal=causal)

    for causal in (False, True):
        times = [t / CALLS for t in measure({"cuattn": partial(calls, causal)}, seconds)["cuattn"]]
        name = f"small call, B1 H4 S32 D32 {'causal' if causal else 'full'}, NumPy"
        rows.append(microseconds(name, {"cuattn": times}))
    say(rows)
    return rows


def microseconds(what: str, times: dict[str, list[float]]) -> dict[str, Any]:
    rates = {n: {"median": statistics.median(t) * 1e6, "best": min(t) * 1e6} for n, t in times.items()}
    return {"what": what, "unit": "us", "rates": rates}


def small_jit(seconds: float) -> list[dict[str, Any]]:
    """The same call under jax.jit, and an FFI handler that does nothing, on the same operands."""
    import jax
    from numba import cfunc, types

    import cuattn
    from cuattn.interop.xla_handlers import _answer_metadata

    def empty(frame: Any) -> int:
        _answer_metadata(frame, 0)
        return 0

    handler = cfunc(types.int64(types.int64), error_model="numpy")(empty)
    jax.ffi.register_ffi_target("cuattn_bench_empty", jax.ffi.pycapsule(handler.address), platform="cpu")
    q = jax.device_put(draw(1, 32, 4, 32), jax.devices("cpu")[0])
    results = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((1, 4, 32), q.dtype))
    nothing = jax.jit(lambda x: jax.ffi.ffi_call("cuattn_bench_empty", results)(x, x, x)[0])

    def calls(run: Callable[[Any], Any]) -> None:
        for _ in range(CALLS):
            run(q).block_until_ready()

    rows = []
    for causal in (False, True):
        ours = jax.jit(lambda x, causal=causal: cuattn.flash_attention(x, x, x, causal=causal))
        peer = jax.jit(lambda x, causal=causal: jax.nn.dot_product_attention(x, x, x, is_causal=causal))
        contenders = {"cuattn": ours, "empty handler": nothing, "jax": peer}
        times = measure({name: partial(calls, run) for name, run in contenders.items()}, seconds)
        found = {name: [t / CALLS for t in each] for name, each in times.items()}
        name = f"small call, B1 H4 S32 D32 {'causal' if causal else 'full'}, jax.jit"
        rows.append(microseconds(name, found))
    say(rows)
    return rows


def start_up() -> dict[str, float]:
    """Seconds of a first call in a process: where nothing is compiled yet, and later; and of the import."""
    code = (
        "import time; start = time.perf_counter(); import cuattn; import numpy as np\n"
        "q = np.ones((1, 32, 4, 32), np.float32); out, pull = cuattn.flash_attention_vjp(q, q, q{bias})\n"
        "{more}print(time.perf_counter() - start)"
    )
    ready = (
        "import time, numpy; start = time.perf_counter(); import cuattn; print(time.perf_counter() - start)"
    )
    bias = ", bias=np.zeros((1, 1, 32, 32), np.float32)"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CUATTN_CACHE_DIR": folder}

        def seconds(code: str) -> float:
            command = [sys.executable, "-c", code]
            return float(
                subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
            )

        for name, options, more in (
            ("first forward ever", "", ""),
            ("then the first backward", "", "pull(q); "),
            ("then with features, forward", bias, ""),
            ("then with features, backward", bias, "pull(q); "),
            ("later process, forward and backward", "", "pull(q); "),
        ):
            found[name] = seconds(code.format(bias=options, more=more))
        found["import cuattn, after NumPy"] = min(seconds(ready) for _ in range(5))
    sys.stdout.write(f"start-up, s: { {name: round(x, 3) for name, x in found.items()} }\n")
    sys.stdout.flush()
    return found


def peak_memory() -> float:
    """MiB that this process had at most; ``ru_maxrss`` may be that of the process that started it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def long_context() -> None:
    """32k tokens forward and backward: seconds and the process's peak memory, as JSON on standard output."""
    import cuattn

    before = peak_memory()
    q, k, v, dout = (draw(1, 32768, HEADS, 64) for _ in range(4))
    start = time.perf_counter()
    _, pullback = cuattn.flash_attention_vjp(q, k, v, causal=True)
    pullback(dout)
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "peak_mib": peak_memory(), "peak_before_mib": before}
    sys.stdout.write(json.dumps(found) + "\n")


def peak(seconds: float) -> dict[str, list[float]]:
    """The roofline's two numbers as plain libraries reach them: sgemm, and reading."""
    a, x = draw(1536, 1536), draw(1 << 26)
    return measure({"sgemm": lambda: a @ a, "read": x.sum}, seconds)


def say(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        rates = ", ".join(f"{n} {x['median']:.1f}" for n, x in r["rates"].items())
        sys.stdout.write(f"{r['what']}: {rates} {r['unit']}\n")
    sys.stdout.flush()


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: medians (best), and how many times a peer cuattn is."""
    lines = ["| what | unit | cuattn | others: median (best), cuattn over it |", "|---|---|---|---|"]
    for r in rows:
        rates = dict(r["rates"])
        first = next(iter(rates))
        ours = rates.pop(first)
        others = "; ".join(
            f"{n} {x['median']:.1f} ({x['best']:.1f}), {ours['median'] / x['median']:.2f}×"
            for n, x in rates.items()
        )
        lines.append(f"| {r['what']} | {r['unit']} | {ours['median']:.1f} ({ours['best']:.1f}) | {others} |")
    return "\n".join(lines)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer lengths")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of every contender; default: all CPUs"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time of each line")
    parser.add_argument("--long-context", action="store_true", help="that measurement alone, in this process")
    only = ("dtypes", "numpy", "scaling", "decode", "small", "jit", "start")
    parser.add_argument("--only", choices=only, help="print these lines alone and write nothing")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: one thread's, on a shared machine"
    )
    options = parser.parse_args()
    if options.long_context:
        long_context()
        return
    if options.clock == "cpu":
        if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # NumPy reads it when it is loaded
            again = [sys.executable, "-m", "bench.cpu", *sys.argv[1:]]
            os.execve(sys.executable, again, {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
        global clock
        clock, options.threads = time.thread_time, 1
    threads = options.threads or len(os.sched_getaffinity(0))
    os.environ["CUATTN_NUM_THREADS"] = str(threads)
    available = {"numpy"}
    # JAX works on threads of its own, which one thread's clock does not see
    for name in ("torch", "jax") if options.clock == "wall" else ("torch",):
        try:
            module = __import__(name)
        except ImportError:
            sys.stdout.write(f"{name} is not installed: left out\n")
            continue
        available.add(name)
        if name == "torch":
            module.set_num_threads(threads)
    if options.only:
        parts = {
            "dtypes": lambda: dtypes(options.seconds), "numpy": lambda: against_numpy(options.seconds),
            "scaling": lambda: scaling(options.seconds, threads), "start": start_up,
            "decode": lambda: decode(options.seconds, threads, available),
            "small": lambda: small(options.seconds), "jit": lambda: small_jit(options.seconds),
        }  # fmt: skip
        parts[options.only]()
        return
    ceiling = peak(options.seconds)
    gflops, read = 2 * 1536**3 / min(ceiling["sgemm"]) / 1e9, 4 * (1 << 26) / min(ceiling["read"]) / 1e9
    head = f"{cpu_name()}, {threads} threads, {options.clock} clock; "
    head += f"sgemm {gflops:.0f} GFLOP/s, read {read:.1f} GB/s (best)"
    sys.stdout.write(head + "\n")
    rows = shapes(options.quick, options.seconds, available)
    rows += dtypes(options.seconds) + against_numpy(options.seconds) + scaling(options.seconds, threads)
    rows += decode(options.seconds, threads, available) + small(options.seconds)
    if "jax" in available:
        rows += small_jit(options.seconds)
    write({"machine": head, "rows": rows, "start_up": start_up(), "long_context": measure_long_context()})


def measure_long_context() -> dict[str, float]:
    """``long_context`` in a process of its own."""
    command = [sys.executable, "-m", "bench.cpu", "--long-context"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    sys.stdout.write(f"32k tokens, causal, forward and backward: {found}\n")
    return found  # type: ignore[no-any-return]


def write(record: dict[str, Any]) -> None:
    """The record as JSON and as a table."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    long = record["long_context"]
    start = "; ".join(f"{name} {seconds:.2f}" for name, seconds in record["start_up"].items())
    (RESULTS / "cpu.md").write_text(
        f"# CPU\n\n`python -m bench.cpu`: {record['machine']}. float32, layout bshd, {HEADS} heads;"
        f" median (best).\n\n{table(record['rows'])}\n\n"
        f"Start-up, seconds: {start}.\n\n"
        f"32k tokens, causal, D64, forward and backward: {long['seconds']:.1f} s, peak"
        f" {long['peak_mib']:.0f} MiB in all, {long['peak_before_mib']:.0f} MiB of them before.\n"
    )


if __name__ == "__main__":
    main()
