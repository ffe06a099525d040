"""Tiles of the mma.sync forward beside PyTorch's FlashAttention-2 backend, interleaved on one hot GPU.

    python bench/mma_forward.py [seconds]

bfloat16, 16384 tokens in all, hidden size 2048. Needs CuPy and PyTorch. A row is the tile a call gets from
``cuattn/tiles.py`` ("table") or another one worth knowing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import cupy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuattn import device, jit
from cuattn.backends import cuda
from cuattn.families import mma
from cuattn.interop import adapters
from cuattn.program import Launch
from cuattn.spec import AttentionSpec, bind
from cuattn.tiles import Tile

TOKENS, HIDDEN, LENGTHS = 16384, 2048, (1024, 4096, 16384)
OTHERS = {
    64: (Tile(64, 128, 112, 4, 2, 2), Tile(64, 128, 128, 4, 1, 2), Tile(64, 128, 64, 4, 2, 2)),
    128: (Tile(128, 128, 64, 4, 2, 2), Tile(128, 128, 48, 4, 2, 2), Tile(128, 128, 64, 4, 1, 2)),
}
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


def report(model: device.Device, head_dim: int, causal: bool, limit: float) -> None:
    """Print TFLOP/s of every tile at every length."""
    rows: dict[str, list[float]] = {}
    for seqlen in LENGTHS:
        shape = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
        flops = 4.0 * TOKENS * seqlen * HIDDEN / (2 if causal else 1)
        for name, seconds in measure(runs(model, shape, causal), 2 if seqlen == 16384 else 4, limit).items():
            rows.setdefault(name, []).append(flops / seconds / 1e12)
    print(f"head_dim {head_dim}, {'causal' if causal else 'full'}: TFLOP/s at lengths {LENGTHS}")
    for name, speeds in rows.items():
        print(f"  {name:46s}", *(f"{x:5.0f}" for x in speeds), flush=True)


def runs(model: device.Device, shape: tuple[int, ...], causal: bool) -> dict[str, Run]:
    """What is timed, by name, on one draw of q, k and v."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]

    def flash() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal)

    wanted = flash().transpose(1, 2).float()
    arrays = {n: cupy.from_dlpack(x) for n, x in zip("qkv", (q, k, v), strict=True)}
    adapter = adapters.load("cupy")
    spec = bind({n: adapter.signature(x) for n, x in arrays.items()}, causal=causal)
    chosen = mma.tile(spec, model)
    found: dict[str, Run] = {"FlashAttention-2 (PyTorch)": flash}
    for tile in (chosen, *(t for t in OTHERS[shape[-1]] if _name(t) != _name(chosen))):
        found[_label(spec, model, tile, "table" if tile is chosen else "")] = run = _run(
            spec, model, tile, arrays
        )
        error = float((torch.from_dlpack(run()).float() - wanted).abs().max())
        assert error < 0.02, (tile, error)
    return found


def _run(spec: AttentionSpec, model: device.Device, tile: Tile, arrays: dict[str, Any]) -> Run:
    prepared = cuda.prepare_program(mma.forward(spec, model, tile), 0)
    return lambda: prepared(arrays)["out"]


def _name(tile: Tile) -> str:
    return f"{tile.block_m}x{tile.block_n}, {tile.num_warps} warps, {tile.stages} stages"


def _label(spec: AttentionSpec, model: device.Device, tile: Tile, note: str) -> str:
    launch = mma.forward(spec, model, tile).steps[-1]
    assert isinstance(launch, Launch)
    made = jit.compiled(launch.kernel, model.arch)
    return f"{_name(tile)}, {made.registers}r {made.spill_bytes}s {note}"


def measure(functions: dict[str, Run], repeats: int, limit: float) -> dict[str, float]:
    """Median seconds of each function; five rounds, in turns, while there is time."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(5):
        for name, function in functions.items():
            if time.monotonic() > limit and times[name]:
                continue
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
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
