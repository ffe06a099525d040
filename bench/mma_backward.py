"""The mma.sync backward beside PyTorch's FlashAttention-2 backend: tiles, and what options cost.

    python bench/mma_backward.py [seconds]

bfloat16, 16384 tokens in all, hidden size 2048, everything of a table interleaved on one hot GPU. Needs CuPy
and PyTorch. A row of the first tables is the tile of ``cuattn/tiles.py`` that a call gets ("table"), or
another one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import cupy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuattn import device, jit
from cuattn.backends import cuda
from cuattn.families import mma, mma_backward
from cuattn.interop import adapters
from cuattn.program import Launch
from cuattn.spec import AttentionSpec, Signature, bind
from cuattn.tiles import BackwardTile

TOKENS, HIDDEN, LENGTHS = 16384, 2048, (1024, 4096, 16384)
OTHERS = {
    64: (BackwardTile(64, 64, 128, 4, 1, 16, 2, 2, 2), BackwardTile(64, 64, 256, 8, 1, 32, 2, 2, 1)),
    128: (BackwardTile(128, 128, 128, 4, 2, 32, 1, 4, 1), BackwardTile(128, 64, 64, 4, 1, 64, 2, 2, 2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "deterministic": {"deterministic": True},
    "window of 1024": {"window_size": (1024, 0)},
    "dropout 0.1": {"dropout_p": 0.1},
    "softcap": {"softcap": 30.0},
}
WANTS = frozenset("qkv")
Run = Callable[[], Any]


def main() -> None:
    limit = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 120)
    model = device.query(0)
    print(f"{model.name}, NVRTC {device.import_nvrtc().getVersion()}, torch {torch.__version__}")
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(300):
        warm @ warm
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        for head_dim in (64, 128):
            for causal in (False, True):
                report(model, head_dim, causal, limit)
            report_options(model, head_dim, limit)
        report_groups(model, limit)


def report(model: device.Device, head_dim: int, causal: bool, limit: float) -> None:
    """Print TFLOP/s of every tile at every length."""
    rows: dict[str, list[float]] = {}
    for seqlen in LENGTHS:
        shape = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
        flops = 10.0 * TOKENS * seqlen * HIDDEN / (2 if causal else 1)
        for name, seconds in measure(runs(model, shape, causal), 2 if seqlen == 16384 else 4, limit).items():
            rows.setdefault(name, []).append(flops / seconds / 1e12)
    print(f"head_dim {head_dim}, {'causal' if causal else 'full'}: TFLOP/s at lengths {LENGTHS}")
    for name, speeds in rows.items():
        print(f"  {name:52s}", *(f"{x:5.0f}" for x in speeds), flush=True)


def report_options(model: device.Device, head_dim: int, limit: float) -> None:
    """Print milliseconds of some options at 8192 tokens, the window at 16384."""
    for seqlen, names in (
        (8192, tuple(n for n in OPTIONS if "window" not in n)),
        (16384, ("full", "window of 1024")),
    ):
        shape = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
        functions = {n: prepare(model, draw(shape), shape[2], OPTIONS[n]) for n in names}
        found = measure(functions, 2, limit)
        print(
            f"head_dim {head_dim}, {seqlen} tokens: ms",
            {n: round(1e3 * x, 3) for n, x in found.items()},
            flush=True,
        )


def report_groups(model: device.Device, limit: float) -> None:
    """Print milliseconds where q heads share keys, by the q heads of a block; "*" is what a call gets."""
    chosen = mma_backward._Plan.heads_of_block
    for heads_kv in (8, 1):
        for batch, seqlen in ((1, 1024), (1, 4096), (4, 2048), (1, 16384)):
            shape = (batch, seqlen, 32, 128)
            arrays, options, functions = draw(shape, heads_kv), {"causal": True}, {}
            spec = spec_of(arrays, options)
            tile = mma_backward._fitting(mma_backward.BACKWARD, spec, model)
            assert tile is not None
            own = mma_backward._Plan(spec, model, WANTS, tile).heads_of_block
            for heads in (n for n in range(1, spec.group + 1) if spec.group % n == 0):
                mma_backward._Plan.heads_of_block = property(lambda _, n=heads: n)
                functions[f"{heads}{'*' if heads == own else ''}"] = prepare(model, arrays, heads_kv, options)
            mma_backward._Plan.heads_of_block = chosen
            found = measure(functions, 4, limit)
            print(f"32/{heads_kv} heads, batch {batch}, {seqlen} tokens, causal: ms by heads of a block",
                  {n: round(1e3 * x, 3) for n, x in found.items()}, flush=True)  # fmt: skip


def draw(shape: tuple[int, ...], heads_kv: int | None = None) -> dict[str, Any]:
    """q, k, v and dout, bshd."""
    kv = (*shape[:2], heads_kv or shape[2], shape[3])
    shapes = {"q": shape, "k": kv, "v": kv, "dout": shape}
    return {n: torch.randn(s, device="cuda", dtype=torch.bfloat16) for n, s in shapes.items()}


def spec_of(arrays: dict[str, Any], options: dict[str, Any]) -> AttentionSpec:
    adapter = adapters.load("cupy")
    signatures = {n: adapter.signature(cupy.from_dlpack(arrays[n])) for n in "qkv"}
    if "dropout_p" in options:
        signatures["dropout_seed"] = Signature("int64", (5,), (1,))
    return bind(signatures, **options)


def prepare(
    model: device.Device,
    arrays: dict[str, Any],
    heads_kv: int,
    options: dict[str, Any],
    tile: BackwardTile | None = None,
) -> Run:
    """The backward of a call, with the mma forward's out and LSE."""
    spec = spec_of(arrays, options)
    assert spec.heads_kv == heads_kv
    given = {n: cupy.from_dlpack(x) for n, x in arrays.items()} | {"dropout_seed": 7}
    given |= cuda.prepare_program(mma.forward(spec, model), 0)(given)
    prepared = cuda.prepare_program(mma_backward.backward(spec, model, WANTS, tile), 0)
    return lambda: prepared(given)


def runs(model: device.Device, shape: tuple[int, ...], causal: bool) -> dict[str, Run]:
    """What is timed, by name, on one draw."""
    arrays, options = draw(shape), {"causal": causal}
    leaves = [arrays[n].transpose(1, 2).detach().requires_grad_() for n in "qkv"]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    dout = arrays["dout"].transpose(1, 2)

    def flash() -> Any:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    wanted = [x.transpose(1, 2).float() for x in flash()]
    chosen = mma_backward._fitting(mma_backward.BACKWARD, spec_of(arrays, options), model)
    assert chosen is not None
    found: dict[str, Run] = {"FlashAttention-2 (PyTorch)": flash}
    for tile in (chosen, *(t for t in OTHERS[shape[-1]] if replace(t, head_dim=chosen.head_dim) != chosen)):
        run = prepare(model, arrays, shape[2], options, tile)
        found[label(spec_of(arrays, options), model, tile, "table" if tile is chosen else "")] = run
        for x, y in zip(run().values(), wanted, strict=True):
            assert float((torch.from_dlpack(x).float() - y).abs().max()) < 0.02 * float(y.abs().max()), tile
    return found


def label(spec: AttentionSpec, model: device.Device, tile: BackwardTile, note: str) -> str:
    steps = mma_backward.backward(spec, model, WANTS, tile).steps
    kernel = next(s.kernel for s in steps if isinstance(s, Launch) and s.kernel.entry == "bwd")
    made = jit.compiled(kernel, model.arch)
    warps = f"{tile.warps_n}x{tile.warps_m} warps by {tile.sub_m}, {tile.stages} stages"
    return f"{tile.block_m}x{tile.block_n}, {warps}, {made.registers}r {made.spill_bytes}s {note}"


def measure(functions: dict[str, Run], repeats: int, limit: float) -> dict[str, float]:
    """Median seconds of each function; five rounds, in turns, while there is time."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(5):
        for name, function in functions.items():
            if time.monotonic() > limit and times[name]:
                continue
            function()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                function()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / repeats / 1e3)
    return {name: median(x) for name, x in times.items()}


if __name__ == "__main__":
    main()
