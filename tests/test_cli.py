"""The command line: what each command prints, writes and returns, on small sizes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
from rich.console import Console
from typer.testing import CliRunner

from cuattn import bench, cli, info, jit, planning, verify
from cuattn.backends import cpu_code, numba_cuda, reference
from cuattn.cli import app
from cuattn.device import H200

runner = CliRunner()


def invoke(*arguments: str, code: int = 0) -> str:
    """Run a command in this process and check its exit code."""
    result = runner.invoke(app, list(arguments), env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def test_bench_writes_a_record_and_a_plot(tmp_path: Path) -> None:
    text = invoke("bench", "--arrays", "numpy", "--lengths", "64,130", "--heads", "2", "--out", str(tmp_path))
    assert "130" in text
    record = json.loads((tmp_path / "attention.json").read_text())
    assert [row["length"] for row in record["rows"]] == [64, 130]
    for row in record["rows"]:
        assert row["cuattn"]["error"] < 5e-6
        assert row["standard"]["error"] < 5e-6
        assert set(row["cuattn"]["errors"]) == {"out", "dq", "dk", "dv"}
        assert row["cuattn"]["forward"] > 0
    assert record["backend"] == "numba"
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arrays", "unit"), [("numpy", "GF/s"), ("cupy", "TF/s")])
def test_the_bench_table_fits_a_terminal_of_80_columns(arrays: str, unit: str) -> None:
    setup = bench.default_setup(arrays)
    slow = bench.Sample(13.04, 25.79, 3 * 2**30 + 5, 1.23e-6)
    ours = bench.Sample(0.01793, 0.0458, 776 * 2**20, 4.56e-7)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(cli._bench_table(setup, [bench.Row(16384, ours, slow)]))
    text = console.export_text()
    assert "…" not in text
    assert unit in text
    assert "4.6e-7" in text
    assert "1.2e-6" in text


def test_bench_goes_on_alone_where_standard_attention_is_too_big(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "available_memory", lambda _: 2 * 128 * 128 * 4 * 4)
    setup = bench.Setup("numpy", "float32", 1, 1, 1, 16, False, True, (64, 128, 256), 3600.0)
    rows = list(bench.run(setup))
    assert [row.standard is None for row in rows] == [False, False, True]
    assert "GiB" in rows[-1].skipped


def test_bench_keeps_to_its_budget() -> None:
    setup = bench.Setup("numpy", "float32", 1, 1, 1, 16, False, False, (64, 128, 256), 0.0)
    assert len(list(bench.run(setup))) == 1


@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_agrees_with_the_oracle(causal: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 700, 2, 8)) for _ in range(4))
    want = bench.oracle_head(np, *(x[0, :, -1] for x in (q, k, v, dout)), causal=causal)
    out, weights = bench.standard_attention(np, q, k, v, causal)
    found = dict(zip(("dq", "dk", "dv"), bench.standard_gradients(np, q, k, v, weights, dout), strict=True))
    for name, x in {"out": out, **found}.items():
        np.testing.assert_allclose(x[0, :, -1], want[name], rtol=0, atol=1e-13)


def test_peak_memory_sees_compiled_and_python_arrays() -> None:
    peak, total = bench.peak_memory(np, lambda: int(np.ones(4 * 2**20, np.uint8).sum()))
    assert total == 4 * 2**20
    assert peak >= 4 * 2**20


def test_verify_passes_and_says_so() -> None:
    text = invoke("verify", "--arrays", "numpy", "--dtype", "float32", "--match", "causal")
    assert "right" in text


def test_verify_says_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compile_loops(wanted: verify.Calls) -> tuple[int, Any]:
        asked.extend(wanted)
        return 2, iter([None, None])

    monkeypatch.setattr(verify, "compile_loops", compile_loops)
    text = invoke("verify", "--arrays", "numpy", "--dtype", "float32", "--match", "grouped heads")
    assert "numpy: 2 CPU loops" in text
    assert [wants for _, wants in asked] == [None, frozenset("qkv")]


def test_verify_fails_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify.BARS, "float32", 0.0)
    text = invoke("verify", "--arrays", "numpy", "--dtype", "float32", "--match", "full", code=1)
    assert "wrong" in text


def test_verify_refuses_a_match_without_a_case() -> None:
    invoke("verify", "--arrays", "numpy", "--match", "no such case", code=2)


def test_the_case_table_covers_every_option() -> None:
    options = {name for case in verify.CASES for name, _ in case.options}
    operands = {name for case in verify.CASES for name in case.operands}
    assert operands == {"bias", "mask", "alibi_slopes", "sinks", "segments", "lengths"}
    assert options >= {"causal", "window_size", "softcap", "dropout_p", "deterministic", "q_offset", "layout"}


@pytest.mark.parametrize("case", verify.CASES, ids=lambda case: case.name)
def test_verify_knows_what_its_cases_ask_of_a_backend(
    case: verify.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Stop(Exception):
        pass

    def prepare(spec: Any, device: int | None, wants: frozenset[str] | None) -> Any:
        asked.append((spec, wants))
        if wants is not None:
            raise Stop
        return genuine(spec, device, wants)

    genuine = reference.prepare
    monkeypatch.setattr(reference, "prepare", prepare)
    monkeypatch.setattr("cuattn.call._kept", {})
    monkeypatch.setattr("cuattn.call._made", {})
    with pytest.raises(Stop):
        verify.compute(case, verify.draw(case, "float16"), "numpy", "reference")
    assert asked == verify.calls("numpy", [case], ("float16",))


def test_verify_compiles_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("cuattn.device.query", lambda _: H200)
    started: list[float] = []
    both = threading.Barrier(2, timeout=60)

    def compiled(kernel: Any, arch: int) -> None:
        assert arch == 90
        started.append(time.monotonic())
        if len(started) <= 2:
            both.wait()  # passes only if two kernels are being compiled at once
        raise jit.CompileError("left to its case")

    monkeypatch.setattr(jit, "compiled", compiled)
    wanted = verify.calls("cupy", [c for c in verify.CASES if c.name == "sinks"], ("float16", "float64"))
    count, steps = verify.compile_kernels(wanted)
    assert len(list(steps)) == count == len(started) >= 4
    assert not both.broken


def test_verify_compiles_the_loops_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    cpu_code.cache_directory.cache_clear()
    try:
        wanted = verify.calls("numpy", [verify.CASES[0]], ("float32",))[:1]
        count, steps = verify.compile_loops(wanted)
        assert len(list(steps)) == count == 3  # decode, combine, drain
        assert len(list((tmp_path / "cpu").glob("*.o"))) == 3
        assert verify.compile_loops(wanted)[0] == 0
    finally:
        cpu_code.cache_directory.cache_clear()


def test_readable_kernels_are_verified_with_what_they_take() -> None:
    chosen = verify.cases("cupy", "numba")
    assert {case.name for case in chosen} >= {"causal", "softcap", "window", "grouped heads"}
    for spec, _ in verify.calls("cupy", chosen, ("float32",)):
        numba_cuda.check(spec)
    assert len(verify.cases("cupy", None)) == len(verify.CASES) > len(chosen)


def test_a_first_call_that_compiles_is_not_the_time_of_a_call() -> None:
    calls = []

    def forward() -> tuple[Any, Any]:
        calls.append("forward")
        time.sleep(0.7 if calls == ["forward"] else 0.001)
        return x, None

    def backward(_: Any) -> tuple[Any, Any, Any]:
        calls.append("backward")
        time.sleep(0.7 if calls.count("backward") == 1 else 0.001)
        return x, x, x

    x = np.zeros((1, 4, 1, 8), np.float32)
    setup = bench.Setup("numpy", "float32", 1, 1, 1, 8, False, True, (4,), 60.0)
    sample = bench._sample(np, setup, (x, x, x, x), forward, backward)
    assert 0.001 <= sample.forward < 0.2
    assert sample.backward is not None
    assert 0.001 <= sample.backward < 0.2


def test_one_repetition_of_a_long_call_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2.0, 1.0])
    monkeypatch.setattr(bench, "_timed", lambda _, call: (call(), next(seconds)))
    assert bench.measure(np, lambda: None, 5.0) == 2.0
    assert bench.measure(np, lambda: None, 2 * bench.REPEAT_SECONDS) == 2 * bench.REPEAT_SECONDS
    times = iter([0.1, 0.3, 0.2, 9.0])
    monkeypatch.setattr(bench, "_timed", lambda _, call: (call(), next(times)))
    assert bench.measure(np, lambda: None, 0.1) == 0.2


def test_bench_compiles_the_kernels_of_all_lengths_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    found: list[Any] = []
    monkeypatch.setattr("cuattn.device.query", lambda _: H200)
    monkeypatch.setattr(jit, "compile_all", lambda pairs: found.extend(pairs))
    setup = bench.default_setup("cupy")
    bench.compile_kernels(setup)
    for length in setup.lengths:
        x = planning.shaped((1, length, 16, 128), "float16")
        spec = planning.bind_call(x, x, x, {"causal": True})
        for wants in (None, frozenset("qkv")):
            assert {(k, 90) for k in planning.kernels_of([(spec, wants)], H200)} <= set(found)


def test_info_says_which_extras_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Square brackets are not taken for colours."""
    reason = "CuPy is not installed: pip install 'cuattn[cuda13]'"
    facts = info.facts()
    facts["backends"] = {"cuda": {"available": False, "reason": reason}}
    facts["choices"] = [{"arrays": "CuPy", "backend": "none", "why": reason}]
    monkeypatch.setattr(info, "facts", lambda: facts)
    text = runner.invoke(app, ["info"], env={"COLUMNS": "200"}).output
    assert text.count(reason) == 2
    wrong = runner.invoke(app, ["plan", "--dtype", "[red]"])
    assert wrong.exit_code == 2 and "[red]" in wrong.output


def test_info_names_every_backend_and_library() -> None:
    text = invoke("info")
    for word in ("cuda", "numba", "reference", "NumPy", "CuPy", "JAX", "NVRTC"):
        assert word in text
    facts = json.loads(invoke("info", "--json"))
    assert facts["backends"]["reference"]["available"]
    assert facts["choices"][0] | {"why": ""} == {"arrays": "NumPy", "backend": "numba", "why": ""}


def test_unknown_arrays_are_refused() -> None:
    assert "numpi" in invoke("bench", "--arrays", "numpi", code=2)


def test_without_its_libraries_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from cuattn.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pip install 'cuattn[cli]'" in done.stderr


def test_python_m_cuattn_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cuattn", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("bench", "verify", "info", "plan", "precompile"):
        assert command in done.stdout


@pytest.mark.parametrize("device", ["T4", "A100", "RTX4090", "H200"])
@pytest.mark.parametrize("way", [(), ("--backward",)])
def test_plan_needs_no_gpu(device: str, way: tuple[str, ...]) -> None:
    made = json.loads(invoke("plan", "--device", device, "--no-compiled", "--causal", "--json", *way))
    assert made["kernels"]
    assert made["flops"] == pytest.approx(2 * 16 * 4096 * 4097 / 2 * 128 * (5 if way else 2))
    tiled = [kernel for kernel in made["kernels"] if kernel["tile"]]
    assert tiled
    assert made["on_chip_bytes"] > made["memory_bytes"]
    assert all(0 < kernel["shared_memory"] < 232449 for kernel in tiled)


@pytest.mark.parametrize("head_dim", ["128", "256"])
def test_plan_fits_a_terminal_of_80_columns(head_dim: str) -> None:
    arguments = ("--device", "H200", "--no-compiled", "--head-dim", head_dim, "--backward", "--explain")
    result = runner.invoke(app, ["plan", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "…" not in result.output
    assert "keys" in result.output


def test_the_readable_kernels_have_no_plan() -> None:
    class OnGpu(np.ndarray):
        __cuda_array_interface__ = None

    x = np.zeros((1, 4, 1, 8), np.float32)
    assert planning.plan(x, x, x, backend="numba").backend == "numba"
    with pytest.raises(ValueError, match=r"backend.*numba"):
        planning.plan(x.view(OnGpu), x, x, backend="numba")


def test_plan_explains_in_words() -> None:
    assert "1 × 16 heads of 1" in invoke("plan", "--device", "cpu", "--seqlen", "1", "--explain")
    text = invoke("plan", "--device", "cpu", "--dtype", "float32", "--explain")
    assert "tiles of 512 queries" in " ".join(text.split())  # lines are wrapped
    text = invoke("plan", "--device", "H200", "--no-compiled", "--window", "1024,0", "--explain")
    assert "Roofline" in text
    assert "█" in text


def test_plan_knows_registers_where_there_is_a_compiler() -> None:
    pytest.importorskip("cupy")
    made = json.loads(invoke("plan", "--device", "A100", "--head-dim", "64", "--json"))
    (kernel,) = made["kernels"]
    assert 0 < kernel["registers"] <= 255
    assert kernel["blocks_per_sm"] >= 1


def test_plan_refuses_what_a_call_would_refuse() -> None:
    assert "heads" in invoke("plan", "--device", "A100", "--heads", "6", "--heads-kv", "4", code=2)
    assert "device" in invoke("plan", "--device", "A1000", code=2)


def test_precompile_fills_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    text = invoke(
        "precompile", "--device", "A100", "--dtypes", "float16", "--head-dims", "64", "--no-backward"
    )
    assert "registers" in text
    assert any(tmp_path.iterdir())
