"""What options cost on a GPU, on every family: windows their share of the work, determinism a third at most.

Timings in turns on one card; run them with nothing beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any

import cases
import numpy as np
import pytest

from cuattn import device
from cuattn.backends import cuda
from cuattn.interop import adapters
from cuattn.program import Launch, Program
from cuattn.spec import AttentionSpec, bind, canonical

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

FAMILIES = [("sm90", "bfloat16"), ("mma", "bfloat16"), ("wide", "float32")]
HIDDEN = 2048
Run = Callable[[], Any]


def draw(*shape: int, dtype: str) -> Any:
    x = cupy.random.standard_normal(shape, dtype=cupy.float32)
    return x.astype(cases.NUMPY_DTYPES[dtype])


def problem(arrays: dict[str, Any], **options: Any) -> AttentionSpec:
    adapter = adapters.load("cupy")
    layout = "thd" if "cu_seqlens_q" in arrays else "bshd"
    signatures = {n: adapter.signature(x) for n, x in arrays.items() if n != "dout"}
    spec = bind(signatures, layout=layout, **options)
    return replace(spec, dout=canonical(adapter.signature(arrays["dout"]), layout))


def programs(family: str, spec: AttentionSpec, gradients: str = "qkv") -> tuple[Program, Program]:
    """A family's forward and its backward of some of q, k, v; skips where it does not take the spec."""
    model, found = device.query(0), []
    for name in (family, f"{family}_backward"):
        module = import_module(f"cuattn.families.{name}")
        reason = module.refuses(spec, model)
        if reason is not None:
            pytest.skip(f"{name} {reason}")
        wants = () if name == family else (frozenset(gradients),)
        found.append(module.forward(spec, model) if name == family else module.backward(spec, model, *wants))
    return found[0], found[1]


def prepared(arrays: dict[str, Any], forward: Program, backward: Program) -> tuple[Run, Run]:
    """The two as functions without arguments; the backward has the forward's results."""
    run = cuda.prepare_program(forward, 0)
    pull, given = cuda.prepare_program(backward, 0), arrays | run(arrays)
    return lambda: run(arrays), lambda: pull(given)


def milliseconds(functions: dict[str, Run], rounds: int = 3) -> dict[str, float]:
    """Medians of bursts of 10 ms or one call, in turns."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()

    def burst(function: Run, calls: int) -> float:
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / calls

    calls = {}
    for name, function in functions.items():
        function()
        calls[name] = max(1, round(10 / burst(function, 1)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(burst(function, calls[name]))
    return {name: median(found) for name, found in times.items()}


def live_share(program: Program, seqlen: int, left: int) -> float:
    """The part of all tiles of the program's main kernel in which a window (left, 0) leaves something."""
    main = max((s for s in program.steps if isinstance(s, Launch)), key=lambda s: s.shared_memory)
    defines = dict(main.kernel.defines)
    rows, keys = int(defines["BLOCK_M"]), int(defines.get("BLOCK_N", 128))  # Hopper's backward: always 128
    first = np.arange(0, seqlen, rows)
    low, high = np.maximum(first - left, 0) // keys, -(-np.minimum(first + rows, seqlen) // keys)
    return float((high - low).sum()) / (len(first) * -(-seqlen // keys))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_a_sliding_window_costs_its_share(family: str, dtype: str, head_dim: int, backward: bool) -> None:
    """A window of 1024 at 16k tokens: at most 1.3 times what its live tiles predict of the full time."""
    seqlen, left = 16384, 1024
    arrays = {n: draw(1, seqlen, HIDDEN // head_dim, head_dim, dtype=dtype) for n in ("q", "k", "v", "dout")}
    pairs = {
        name: programs(family, problem(arrays, **options))
        for name, options in (("full", {}), ("window", {"window_size": (left, 0)}))
    }
    found = milliseconds({name: prepared(arrays, *pair)[backward] for name, pair in pairs.items()}, rounds=9)
    share = live_share(pairs["window"][backward], seqlen, left)
    assert found["window"] <= 1.3 * share * found["full"], (found, share)


SHARES = {"q": 0.97, "k": 0.75, "v": 0.6, "kv": 0.85}  # of five products 3, 3, 2, 4; dq: all sums to add


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_that_nobody_wants_cost_nothing(head_dim: int, causal: bool) -> None:
    """Hopper's backward of some of q, k and v at 8k tokens: a part of the time of all three."""
    shape = (1, 8192, HIDDEN // head_dim, head_dim)
    arrays = {n: draw(*shape, dtype="bfloat16") for n in ("q", "k", "v", "dout")}
    spec = problem(arrays, causal=causal)
    functions = {wants: prepared(arrays, *programs("sm90", spec, wants))[1] for wants in ("qkv", *SHARES)}
    found = milliseconds(functions)
    for wants, share in SHARES.items():
        assert found[wants] <= share * found["qkv"], (wants, found)


ENDS = (0, 700, 700, 5000, 8192, 12000, 16384)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "gqa": {"causal": True}, "varlen": {"causal": True},
    "bias": {"causal": True}, "window": {"window_size": (1024, 0)}, "gqa_window": {"window_size": (1024, 0)},
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_determinism_costs_a_third(family: str, dtype: str, head_dim: int, case: str) -> None:
    """The deterministic backward at 8k tokens: at most 1.35 times the default's time."""
    heads, batch = HIDDEN // head_dim, 1 if family == "wide" else 2
    heads_kv, options = heads // 4 if "gqa" in case else heads, dict(OPTIONS[case])
    shape = (16384,) if case == "varlen" else (batch, 8192)
    arrays = {n: draw(*shape, heads, head_dim, dtype=dtype) for n in ("q", "dout")}
    arrays |= {n: draw(*shape, heads_kv, head_dim, dtype=dtype) for n in "kv"}
    if case == "varlen":
        arrays |= {f"cu_seqlens_{x}": cupy.asarray(ENDS, np.int32) for x in "qk"}
        longest = int(np.diff(ENDS).max())
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    if case == "bias":
        arrays["bias"] = draw(8192, 8192, dtype=dtype)
    functions = {
        name: prepared(arrays, *programs(family, problem(arrays, **options, deterministic=deterministic)))[1]
        for name, deterministic in (("default", False), ("deterministic", True))
    }
    found = milliseconds(functions)
    assert found["deterministic"] <= 1.35 * found["default"], found


@pytest.mark.parametrize("how", ["mask", "segments"])
@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_tiles_that_hold_nothing_are_skipped(family: str, dtype: str, how: str) -> None:
    """Eight blocks along the diagonal, an eighth of the tiles: less than three eighths of the time."""
    seqlen = 8192
    arrays = {n: draw(1, seqlen, 16, 64, dtype=dtype) for n in ("q", "k", "v", "dout")}
    block = cupy.arange(seqlen, dtype=np.int32) // (seqlen // 8)
    functions: dict[str, Run] = {}
    for name, ids in (("all", cupy.zeros_like(block)), ("blocks", block)):
        given = {"mask": ids[:, None] == ids[None]}
        if how == "segments":
            given = {f"{side}_segment_ids": cupy.ascontiguousarray(ids[None]) for side in ("q", "kv")}
        given |= arrays
        functions[name], functions[f"{name} back"] = prepared(given, *programs(family, problem(given)))
    found = milliseconds(functions)
    for name in (n for n in found if n.startswith("all")):
        assert found[name.replace("all", "blocks")] <= 3 / 8 * found[name], found
