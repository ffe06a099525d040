"""GPU benchmark against the peers that are importable: ``python -m bench.gpu fwd|bwd [--cells TEXT]``.

All implementations of a cell run in one process, in a random order each round. "hot" is the median over
bursts of calls back to back, "cool" over single calls after a pause with the L2 cache flushed and the host
ahead. TFLOP/s count 4 B H Sq Sk D (half when causal, the visible part of a window), 2.5 times that backward.
Needs PyTorch and CuPy; JAX (hot only: it has its own stream) and fa3_fwd where they are installed. Writes
bench/results/gpu_<fwd|bwd>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROUNDS, BURST_SECONDS, PAUSE_SECONDS = 6, 0.01, 0.02
AHEAD_CYCLES = 4_000_000  # that the GPU waits before a cool call: the host is slow after a pause
PACKED = (4096, 50, 2048, 300, 1024, 3000, 128, 700, 1500, 96, 2000, 77, 900, 465)  # 16k tokens


@dataclass(frozen=True)
class Cell:
    """One shape. ``window`` keys are seen (0: all); ``packed`` holds the lengths of packed sequences;
    ``queries`` is 0 where there are as many as keys."""

    name: str
    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    head_dim: int
    causal: bool = False
    window: int = 0
    packed: tuple[int, ...] = ()
    queries: int = 0

    @property
    def flops(self) -> float:
        """Of a forward."""
        lengths = self.packed or (self.seqlen,) * self.batch
        pairs = sum(s * s / 2 if self.causal else s * s for s in lengths)
        if self.window:
            pairs = sum(self.window * s - self.window * (self.window - 1) / 2 for s in lengths)
        if self.queries:
            pairs = self.batch * self.queries * self.seqlen
        return 4.0 * self.heads * self.head_dim * pairs

    @property
    def seconds(self) -> float:
        """About what a forward takes: how many calls make a burst."""
        keys = 4 * self.batch * self.heads_kv * self.seqlen * self.head_dim
        return max(self.flops / 500e12, keys / 4e12 if self.queries else 0.0)


def cells() -> list[Cell]:
    """16k tokens each, hidden size 2048."""
    found = []
    for head_dim in (128, 64, 256):
        heads = 2048 // head_dim
        for causal in (False, True):
            for s in (1024, 4096, 16384):
                name = f"D{head_dim} {'causal' if causal else 'full'} {s // 1024}k"
                found.append(Cell(name, 16384 // s, heads, heads, s, head_dim, causal))
    found.append(Cell("GQA 32/8 D128 causal 8k", 2, 32, 8, 8192, 128, True))
    found.append(Cell("window 1024 D128 16k", 1, 16, 16, 16384, 128, window=1024))
    found.append(Cell("packed 14 D128 causal", 14, 16, 16, max(PACKED), 128, True, packed=PACKED))
    found.append(Cell("B1 H16 D128 full 1k", 1, 16, 16, 1024, 128))
    found.append(Cell("B1 H16 D128 causal 1k", 1, 16, 16, 1024, 128, True))
    found.append(Cell("decode 1 x 128k 32/8 D128", 1, 32, 8, 131072, 128, queries=1))
    found.append(Cell("decode 16 x 8k 32/8 D128", 16, 32, 8, 8192, 128, queries=1))
    return found


@dataclass
class Inputs:
    """Torch tensors in (batch, seqlen, heads, head_dim), or packed, and the same memory as CuPy arrays."""

    torch: dict[str, Any]
    cupy: dict[str, Any]


def make_inputs(cell: Cell) -> Inputs:
    import cupy
    import ml_dtypes
    import torch

    def draw(heads: int, rows: int = 0) -> Any:
        shape = (sum(cell.packed), heads) if cell.packed else (cell.batch, rows or cell.seqlen, heads)
        return torch.randn(*shape, cell.head_dim, device="cuda").bfloat16()

    tensors = {
        "q": draw(cell.heads, cell.queries),
        "k": draw(cell.heads_kv),
        "v": draw(cell.heads_kv),
        "dout": draw(cell.heads, cell.queries),
    }
    bits = {name: cupy.from_dlpack(x.view(torch.int16)) for name, x in tensors.items()}
    arrays = {name: x.view(ml_dtypes.bfloat16) for name, x in bits.items()}
    if cell.packed:
        starts = [sum(cell.packed[:i]) for i in range(len(cell.packed) + 1)]
        tensors["cu"] = torch.tensor(starts, device="cuda", dtype=torch.int32)
        arrays["cu"] = cupy.asarray(starts, dtype=cupy.int32)
    return Inputs(tensors, arrays)


# ---- implementations: (cell, inputs) -> (forward, backward), either may be None ----

Pair = tuple[Callable[[], Any] | None, Callable[[], Any] | None]


def ours(cell: Cell, inputs: Inputs) -> Pair:
    import cuattn

    x = inputs.cupy
    options: dict[str, Any] = {"causal": cell.causal}
    if cell.window:
        options["window_size"] = (cell.window - 1, 0)
    names = ("q", "k", "v")
    forward, vjp = cuattn.flash_attention, cuattn.flash_attention_vjp
    if cell.packed:
        forward, vjp = cuattn.flash_attention_varlen, cuattn.flash_attention_varlen_vjp
        longest = max(cell.packed)
        options |= {f"cu_seqlens_{n}": x["cu"] for n in "qk"} | {f"max_seqlen_{n}": longest for n in "qk"}
    pullbacks: list[Any] = []

    def backward() -> Any:
        if not pullbacks:
            pullbacks.append(vjp(*(x[n] for n in names), **options)[1])
        return pullbacks[0](x["dout"])

    return lambda: forward(*(x[n] for n in names), **options), backward


def torch_backend(name: str) -> Callable[[Cell, Inputs], Pair]:
    def make(cell: Cell, inputs: Inputs) -> Pair:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if cell.packed or cell.window:
            return None, None
        q, k, v, dout = (inputs.torch[n].transpose(1, 2) for n in ("q", "k", "v", "dout"))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=cell.causal, enable_gqa=cell.heads != cell.heads_kv
                )

        out = forward(*leaves)
        return forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return make


def fa3(cell: Cell, inputs: Inputs) -> Pair:
    import fa3_fwd_interface as fa3_fwd

    x = inputs.torch
    if cell.packed:
        longest = max(cell.packed)
        arguments = (x["q"], x["k"], x["v"], x["cu"], x["cu"], longest, longest)
        return lambda: fa3_fwd.flash_attn_varlen_func(*arguments, causal=cell.causal), None
    if cell.window:
        return None, None  # this build has no windows
    if cell.queries:
        return lambda: fa3_fwd.flash_attn_with_kvcache(x["q"], x["k"], x["v"]), None
    return lambda: fa3_fwd.flash_attn_func(x["q"], x["k"], x["v"], causal=cell.causal), None


def jax_cudnn(cell: Cell, inputs: Inputs) -> Pair:
    import jax

    if cell.packed:
        return None, None
    q, k, v, dout = (jax.dlpack.from_dlpack(inputs.torch[n]) for n in ("q", "k", "v", "dout"))
    window = (cell.window - 1, 0) if cell.window else None

    def attention(q: Any, k: Any, v: Any) -> Any:
        causal = cell.causal or bool(cell.window)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, local_window_size=window, implementation="cudnn"
        )

    forward = jax.jit(attention)
    backward = jax.jit(lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout))  # its forward included
    return lambda: forward(q, k, v), lambda: backward(q, k, v, dout)


IMPLEMENTATIONS: dict[str, Callable[[Cell, Inputs], Pair]] = {
    "cuattn": ours,
    "torch cuDNN": torch_backend("CUDNN_ATTENTION"),
    "torch FA2": torch_backend("FLASH_ATTENTION"),
    "fa3_fwd": fa3,
    "jax cuDNN": jax_cudnn,
}


# ---- timing ----


def _events() -> tuple[Any, Any]:
    import torch

    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _burst(call: Callable[[], Any], count: int) -> float:
    """Seconds a call, by events around ``count`` calls."""
    import torch

    start, end = _events()
    call()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count / 1e3


def _burst_jax(call: Callable[[], Any], count: int) -> float:
    import jax

    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / count


def _single(call: Callable[[], Any], flush: Any) -> float:
    import torch

    time.sleep(PAUSE_SECONDS)
    torch.cuda._sleep(AHEAD_CYCLES)
    flush.zero_()
    start, end = _events()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(calls: dict[str, Callable[[], Any]], flops: float, seconds: float) -> dict[str, dict[str, float]]:
    """Median TFLOP/s, hot and cool, of each call; one takes about ``seconds``."""
    import torch

    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    hot: dict[str, list[float]] = {name: [] for name in calls}
    cool: dict[str, list[float]] = {name: [] for name in calls}
    count = max(2, int(BURST_SECONDS / seconds))
    names = list(calls)
    for _ in range(ROUNDS):
        random.shuffle(names)
        for name in names:
            hot[name].append((_burst_jax if name.startswith("jax") else _burst)(calls[name], count))
    for _ in range(ROUNDS):
        random.shuffle(names)
        for name in names:
            if not name.startswith("jax"):
                cool[name].append(_single(calls[name], flush))

    def rate(times: list[float]) -> float:
        return flops / sorted(times)[len(times) // 2] / 1e12

    return {
        name: {"hot": rate(hot[name][1:])} | ({"cool": rate(cool[name])} if cool[name] else {})
        for name in calls
    }


def run_cell(
    cell: Cell, backward: bool, names: list[str]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """(TFLOP/s by implementation, reasons of those that did not run)."""
    import torch

    inputs = make_inputs(cell)
    calls, skipped = {}, {}
    for name in names:
        try:
            call = IMPLEMENTATIONS[name](cell, inputs)[backward]
            if call is None:
                continue
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            calls[name] = call
        except Exception as fault:  # a peer that is missing or refuses must not stop the others
            skipped[name] = f"{type(fault).__name__}: {str(fault).strip()[:100]}"
    work = 2.5 if backward else 1.0
    return measure(calls, cell.flops * work, cell.seconds * work), skipped


def _machine() -> dict[str, Any]:
    import torch

    root = Path(__file__).parent.parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    packages = ("torch", "jax", "fa3_fwd", "cupy-cuda13x", "cupy-cuda12x")
    return {
        "commit": os.environ.get("CUATTN_COMMIT") or git("describe", "--always", "--dirty") or None,
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "versions": {name: found for name in packages if (found := version(name))},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _line(cell: Cell, rates: dict[str, dict[str, float]]) -> str:
    parts = [f"{name} " + "/".join(f"{rate:.3g}" for rate in found.values()) for name, found in rates.items()]
    ratios = []
    for kind in ("hot", "cool"):
        peers = [found[kind] for name, found in rates.items() if name != "cuattn" and kind in found]
        if "cuattn" in rates and peers:
            ratios.append(f"{max(peers) / rates['cuattn'][kind]:.2f}")
    return f"{cell.name:24s} {'  '.join(parts)}  time over the best peer's {'/'.join(ratios) or '-'}"


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("direction", choices=("fwd", "bwd"))
    parser.add_argument("--cells", default="", help="only cells whose name contains this")
    parser.add_argument("--peers", default=",".join(list(IMPLEMENTATIONS)[1:]), help="comma-separated")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no cell after this long")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch

    torch.manual_seed(0)
    names = ["cuattn", *(name for name in arguments.peers.split(",") if name)]
    started, rows = time.monotonic(), []
    for cell in cells():
        if cell.queries and arguments.direction == "bwd":
            continue
        if arguments.cells not in cell.name or time.monotonic() - started > arguments.seconds:
            continue
        rates, skipped = run_cell(cell, arguments.direction == "bwd", names)
        rows.append({"cell": asdict(cell), "tflops": rates, "skipped": skipped})
        print(_line(cell, rates), *(f"[{name}: {why}]" for name, why in skipped.items()), flush=True)
        torch.cuda.empty_cache()
    path = arguments.output or RESULTS / f"gpu_{arguments.direction}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": _machine(), "direction": arguments.direction, "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
