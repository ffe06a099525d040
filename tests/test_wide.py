"""Which tiles float32 and float64 calls get, and what is refused: no compiler and no GPU needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import pytest

from cuattn import device, planning
from cuattn.families import wide, wide_backward
from cuattn.program import Launch
from cuattn.spec import AttentionSpec

MODELS = list(device.MODELS.values())
HEAD_DIMS = (1, 32, 33, 64, 96, 128, 160, 192, 200, 256)
QKV = frozenset("qkv")


def spec(dtype: str, head_dim: int, operands: Any = (), **options: Any) -> AttentionSpec:
    case = cases.Case(
        "call", seqlen_q=300, seqlen_kv=300, head_dim=head_dim, options=options, operands=dict(operands)
    )
    return cases.build(case, dtype).spec


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"sm_{m.arch}")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_programs_fit_the_device_or_are_refused(model: device.Device, dtype: str) -> None:
    for head_dim in HEAD_DIMS:
        call = spec(dtype, head_dim, causal=True)
        if (reason := wide.refuses(call, model)) is None:
            steps = wide.forward(call, model).steps
            assert all(
                s.shared_memory <= model.shared_memory_per_block for s in steps if isinstance(s, Launch)
            )
        else:
            assert "shared memory" in reason
            assert (model.arch, dtype) == (75, "float64"), head_dim
        if (reason := wide_backward.refuses(call, model)) is None:
            steps = wide_backward.backward(call, model, QKV).steps
            assert all(
                s.shared_memory <= model.shared_memory_per_block for s in steps if isinstance(s, Launch)
            )
        else:
            assert "shared memory" in reason
            assert head_dim > 128 or model.arch == 75
            assert dtype == "float64" or (head_dim > 192 and model.arch == 75)


def test_tiles_that_were_fastest() -> None:
    for head_dim, forward, backward in ((64, (128, 32, 2), (64, 128, 1)), (128, (128, 32, 1), (32, 128, 1))):
        for causal in (False, True):
            call = spec("float32", head_dim, causal=causal)
            found = wide.fitting(call, device.H200)
            assert found is not None
            assert (found.block_m, found.block_n, found.min_blocks) == forward
            main = wide_backward.backward(call, device.H200, QKV).steps[-1]
            assert isinstance(main, Launch)
            defines = dict(main.kernel.defines)
            assert (defines["BLOCK_M"], defines["BLOCK_N"], defines["MIN_BLOCKS"]) == backward
            assert defines["TIE"] == 4


def test_featured_calls_and_rounded_products_get_other_tiles() -> None:
    plain = wide.fitting(spec("float32", 64), device.H200)
    for other in (
        spec("float32", 64, {"bias": (1, 4, 300, 300)}),
        spec("float32", 64, {"mask": (1, 1, 300, 300)}),
        spec("float32", 64, softcap=30.0),
        replace(spec("float32", 64), precision="tf32"),
    ):
        assert wide.fitting(other, device.H200) != plain


def test_two_blocks_are_wanted_only_where_two_fit() -> None:
    call = spec("float32", 64)
    for model in MODELS:
        found = wide.fitting(call, model)
        assert found is not None
        room = model.shared_memory_per_sm
        assert found.min_blocks == 1 or found.min_blocks * (found.shared_memory(call, model) + 1024) <= room


def test_precision_is_refused_on_turing() -> None:
    assert "tf32" in str(wide.refuses(replace(spec("float32", 64), precision="tf32"), device.T4))


def test_plan_says_what_multiplies() -> None:
    q = planning.shaped((1, 1024, 8, 64), "float32")
    words = {"highest": "halves", "tf32": "TF32", "bf16": "bfloat16"}
    peaks = []
    for precision, word in words.items():
        made = planning.plan(
            q, q, q, device="H200", backend="cuda", compile_kernels=False, precision=precision
        )
        assert word in made.products
        assert made.kernels[0].name == "fwd_wide"
        peaks.append(made.peak_flops or 0)
    assert peaks == sorted(peaks)
    made = planning.plan(q, q, q, device="T4", backend="cuda", compile_kernels=False)
    assert made.products == "float32"
    assert made.peak_flops == 8.1e12
