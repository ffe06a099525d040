"""Each CUDA family on the case table, forward and every gradient, whether or not a call would choose it.

On the GPU as it is, and through PTX of older architectures that the driver translates. Outputs and workspace
hold NaN before a program runs: what it does not write is seen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import cases
import numpy as np
import pytest

import cuattn
from cuattn import device, jit
from cuattn.backends import cuda
from cuattn.device import Device
from cuattn.program import Launch, Program

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")
if "CUATTN_TEST_OWN_BLOCKS" in os.environ:  # every array an allocation of its own, so memcheck knows its end
    cupy.cuda.set_allocator(None)

BIG = [
    cases._dense("many_tiles_causal", 600, 700, 128, options={"causal": True}),
    cases._dense("many_tiles", 513, 640, 64),
    cases._dense("many_tiles_256", 300, 400, 256),
    cases._dense("many_tiles_window", 700, 700, 128, options={"window_size": (100, 30)}),
    cases._dense("many_tiles_mask", 300, 400, 64, operands={"mask": (2, 1, 300, 400)}),
    cases._dense("many_tiles_segments", 300, 400, 128, operands={"segments": ()}),
    cases._dense(
        "many_tiles_features", 300, 400, 128, options={"causal": True, "softcap": 5.0},
        operands={"bias": (1, 4, 300, 400), "alibi_slopes": (4,), "sinks": (4,), "kv_seqlens": (400, 177)},
    ),
]  # fmt: skip
THIN = (
    "causal", "causal_empty_rows", "one_query", "head_dim_17_by_5", "head_dim_128_by_64", "head_dim_256",
    "mqa", "window_causal", "softcap", "alibi", "sinks", "bias", "bias_rows", "mask", "segments", "q_seqlens",
    "dropout", "deterministic", "everything", "varlen_everything",
)  # fmt: skip
# a subprocess of the last tests here runs its share of the thin table; through compute_80, of the whole one
SUBPROCESS = "CUATTN_TEST_SHARD" in os.environ
SHARD, SHARDS = map(int, os.environ.get("CUATTN_TEST_SHARD", "0/1").split("/"))
SHORT = ([cases.BY_NAME[name] for name in THIN] + BIG[:4])[SHARD::SHARDS]
LONG = SHORT if SUBPROCESS and device.forced_arch() != 80 else (cases.CASES + BIG)[SHARD::SHARDS]
TABLE = [
    *(("mma", "bfloat16", case) for case in LONG),
    *(("mma", "float16", case) for case in SHORT),
    *(("wide", "float32", case) for case in LONG),
    *(("wide", "float64", case) for case in LONG),
    # an error of the tanh comes out 50 times as large
    ("wide", "float32", cases._dense("softcap_50", 90, 130, 64, options={"softcap": 50.0})),
]
if device.forced_arch() is None:
    TABLE += [("sm90", "bfloat16", case) for case in LONG] + [("sm90", "float16", case) for case in SHORT]


def programs(case: cases.Case, family: str, dtype: str, model: Device) -> dict[str, Program]:
    """The family's programs of a case, as far as it takes them."""
    problem = cases.build(case, dtype)
    found = {}
    forward, backward = (import_module(f"cuattn.families.{family}{part}") for part in ("", "_backward"))
    if forward.refuses(problem.spec, model) is None:
        found["forward"] = forward.forward(problem.spec, model)
    spec = replace(problem.spec, dlse=True)
    if backward.refuses(spec, model) is None:
        wants = frozenset(name for name in ("q", "k", "v", "bias", "sinks") if name in problem.arrays)
        found["backward"] = backward.backward(spec, model, wants)
    return found


@pytest.fixture(scope="module")
def compiled() -> None:
    """Everything compiled side by side."""
    model = device.query(0)
    found = [p for family, dtype, case in TABLE for p in programs(case, family, dtype, model).values()]
    kernels = {s.kernel: None for p in found for s in p.steps if isinstance(s, Launch)}
    jit.compile_all((kernel, model.arch) for kernel in kernels)


def poison(what: Program) -> None:
    """Fill the memory that the program's buffers will get with NaN."""
    sizes = [cuda._bytes(b) for b in what.outputs]
    sizes.append(sum(-(-cuda._bytes(b) // 256) * 256 for b in what.workspace))
    held = [cupy.full((size,), 0xFF, cupy.uint8) for size in sizes if size]
    del held


def run(what: Program, arrays: dict[str, Any]) -> dict[str, Any]:
    prepared = cuda.prepare_program(what, 0)
    poison(what)
    return prepared(arrays)


def host(x: Any) -> Any:
    return np.asarray(cupy.asnumpy(x), np.float64)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("family", "dtype", "case"), TABLE, ids=str)
def test_case(family: str, dtype: str, case: cases.Case) -> None:
    problem = cases.build(case, dtype)
    found = programs(case, family, dtype, device.query(0))
    if not found:
        pytest.skip(f"{family} does not take it")
    arrays = {n: cupy.asarray(x) for n, x in problem.arrays.items()}
    if "dropout_seed" in problem.options:
        arrays["dropout_seed"] = problem.options["dropout_seed"]
    if "forward" in found:
        results = run(found["forward"], arrays)
        cases.check_forward(problem, host(results["out"]), host(results["lse"]))
        again = run(found["forward"], arrays)
        assert all(x.tobytes() == again[n].tobytes() for n, x in results.items())
    else:
        out, lse = cases.reference.attention(problem.spec, problem.oracle_arrays)
        small = np.float64 if dtype == "float64" else np.float32
        results = {
            "out": cupy.asarray(out.astype(problem.arrays["q"].dtype)),
            "lse": cupy.asarray(lse.astype(small)),
        }
    if "backward" in found:
        incoming = {"dout": cupy.asarray(problem.dout), "dlse": cupy.asarray(problem.dlse)}
        gradients = run(found["backward"], {**arrays, **results, **incoming})
        cases.check_backward(problem, {n[1:]: host(x) for n, x in gradients.items()})


def test_a_graph_keeps_its_workspace() -> None:
    """Memory that a captured backward works in is nobody else's, as long as the graph may run."""
    q = cupy.ones((1, 512, 4, 64), cupy.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):
            cuattn.flash_attention_vjp(q, q, q)[1](q)
        stream.begin_capture()
        out, pullback = cuattn.flash_attention_vjp(q, q, q)
        gradients = pullback(q)
        graph = stream.end_capture()
        others = [cupy.zeros(n, cupy.uint8) for n in (1 << 12, 1 << 16, 1 << 19, 1 << 20) for _ in range(40)]
        graph.launch(stream)
        stream.synchronize()
        assert not any(bool(x.any()) for x in others)
    del out, gradients


def run_again(which: str, environment: dict[str, str], prefix: tuple[str, ...] = ()) -> None:
    """Run the thin table's ``which`` (pytest's -k) in several processes, each behind a command prefix."""
    shards = min(8, os.cpu_count() or 1)
    command = [
        *prefix,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "-k",
        which,
    ]
    running = [
        subprocess.Popen(
            [*command, __file__],
            env={**os.environ, **environment, "CUATTN_TEST_SHARD": f"{i}/{shards}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(shards)
    ]
    for process in running:
        output, _ = process.communicate(timeout=800)
        assert process.returncode == 0 and " passed" in output, output[-6000:]


@pytest.mark.slow
@pytest.mark.skipif(SUBPROCESS, reason="runs this file again")
@pytest.mark.parametrize("arch", ["compute_75", "compute_80", "compute_86"])
def test_older_architectures(arch: str) -> None:
    """The table (whole through compute_80) as older GPUs would run it; the driver translates for long."""
    run_again("test_case", {"CUATTN_ARCH": arch})


@pytest.mark.slow
@pytest.mark.skipif(SUBPROCESS, reason="runs this file again")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    """compute-sanitizer finds nothing. It does not follow TMA: no racecheck of Hopper's kernels."""
    program = shutil.which("compute-sanitizer", path=os.environ.get("PATH", "") + ":/usr/local/cuda/bin")
    if program is None:
        pytest.skip("no compute-sanitizer")
    which = "test_case and not many_tiles" + (" and not sm90" if tool == "racecheck" else "")
    prefix = (program, "--tool", tool, "--error-exitcode", "99", "--print-limit", "5")
    run_again(which, {"CUATTN_TEST_OWN_BLOCKS": "1"}, prefix)
