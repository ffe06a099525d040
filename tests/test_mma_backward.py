"""The mma.sync family's backward programs: what fits, workspace, and how work is split. No GPU."""

from __future__ import annotations

from typing import Any

import pytest

from cuattn import device
from cuattn.device import Device
from cuattn.families import mma_backward
from cuattn.program import Launch, Program
from cuattn.spec import ITEMSIZE, AttentionSpec, Signature, bind, row_major

QKV = frozenset("qkv")


def signature(*shape: int, dtype: str = "float16", align: int = 16) -> Signature:
    return Signature(dtype, shape, row_major(shape), align)


def spec(
    seqlen: int = 1024, heads: int = 8, heads_kv: int | None = None, head_dim: int = 64, batch: int = 1,
    bias: tuple[int, ...] | None = None, **options: Any,
) -> AttentionSpec:  # fmt: skip
    kv = signature(batch, seqlen, heads_kv or heads, head_dim)
    arrays = {"q": signature(batch, seqlen, heads, head_dim), "k": kv, "v": kv}
    if bias is not None:
        arrays["bias"] = signature(*bias)
    return bind(arrays, **options)


def launches(program: Program) -> dict[str, Launch]:
    return {step.kernel.entry: step for step in program.steps if isinstance(step, Launch)}


def size(program: Program) -> int:
    total = 0
    for buffer in program.workspace:
        n = ITEMSIZE[buffer.dtype]
        for m in buffer.shape:
            n *= m
        total += n
    return total


@pytest.mark.parametrize("model", device.MODELS.values(), ids=lambda d: d.name)
@pytest.mark.parametrize("bias", [None, (1, 8, 1024, 1024)], ids=["plain", "bias"])
@pytest.mark.parametrize("head_dim", [1, 64, 80, 96, 128, 192, 256])
def test_head_dims_fit_or_are_refused(head_dim: int, bias: tuple[int, ...] | None, model: Device) -> None:
    problem = spec(head_dim=head_dim, bias=bias)
    largest = {75: 128 if bias else 192, 86: 192, 89: 192, 120: 192} if bias or model.arch == 75 else {}
    reason = mma_backward.refuses(problem, model)
    if head_dim > largest.get(model.arch, 256):
        assert reason == f"head dims {head_dim} and {head_dim} need more shared memory than {model.name} has"
        return
    assert reason is None
    program = mma_backward.backward(problem, model, QKV | ({"bias"} if bias else set()))
    assert all(step.shared_memory <= model.shared_memory_per_block for step in launches(program).values())


@pytest.mark.parametrize("wants", [{"q"}, {"k"}, {"v"}, {"k", "v"}, {"q", "k", "v"}, {"bias"}, {"q", "bias"}])
def test_only_what_is_wanted_runs(wants: set[str]) -> None:
    program = mma_backward.backward(spec(bias=(1, 8, 1024, 1024)), device.H200, frozenset(wants))
    assert {b.name for b in program.outputs} == {f"d{name}" for name in wants}
    found = launches(program)
    assert ("bwd" in found) == bool(wants & QKV)
    assert ("bwd_dq" in found) == ("q" in wants)
    assert ("bwd_dbias" in found) == ("bias" in wants)
    assert ("dq_accum" in {b.name for b in program.workspace}) == ("q" in wants)


@pytest.mark.parametrize(
    "options",
    [{}, {"deterministic": True}, {"heads_kv": 2}, {"heads_kv": 1}, {"window_size": (64, 0)}],
    ids=str,
)
def test_workspace_is_linear_in_the_length(options: dict[str, Any]) -> None:
    small, large = (
        size(mma_backward.backward(spec(n, **options), device.H200, QKV)) for n in (1 << 14, 1 << 17)
    )
    assert large <= 8.01 * small


def test_partial_sums_stay_small() -> None:
    """Sums of dk and dv over parts of a group exist only while there are few blocks."""
    for heads_kv in (1, 2, 8):
        for n in (1 << 10, 1 << 14, 1 << 18):
            program = mma_backward.backward(spec(n, 32, heads_kv, 128), device.H200, QKV)
            partial = [b for b in program.workspace if b.name == "dk_accum"]
            blocks = sum(b.shape[0] for b in partial) // 128
            assert blocks <= 2 * mma_backward.ENOUGH_WAVES * device.H200.sm_count


def test_what_loads_for_each_score_takes_fewer_queries_at_a_time() -> None:
    """What docs/performance/mma_backward.md measured at head dim 64; at 128 it makes no difference."""
    for options, queries in (({}, 32), ({"softcap": 5.0}, 32), ({"bias": (1024, 1024)}, 16)):
        program = mma_backward.backward(spec(**options), device.H200, QKV)
        assert dict(launches(program)["bwd"].kernel.defines)["SUB_M"] == queries
        program = mma_backward.backward(spec(head_dim=128, **options), device.H200, QKV)
        assert dict(launches(program)["bwd"].kernel.defines)["SUB_M"] == 32


def test_new_lengths_compile_nothing() -> None:
    kernels = {
        frozenset(
            step.kernel
            for step in launches(mma_backward.backward(spec(n, causal=True), device.H200, QKV)).values()
        )
        for n in range(1000, 1100)
    }
    assert len(kernels) == 1
