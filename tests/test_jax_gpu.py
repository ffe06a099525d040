"""JAX on a GPU: dtypes against float64, the bits of CuPy, CUDA graphs, memory, devices, other libraries."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuattn

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to CuPy
pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")
jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from cuattn.interop import xla_ffi  # noqa: E402

NAMES = ("q", "k", "v", "bias", "sinks")


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    with jax.default_matmul_precision("highest"):
        yield


def x64() -> Any:
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def draw(seed: int, *shape: int, dtype: str = "float32") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def problem(
    dtype: str, batch: int = 2, seqlen_q: int = 150, seqlen_kv: int = 200, dim: int = 64
) -> dict[str, Any]:
    return {
        "q": draw(0, batch, seqlen_q, 4, dim, dtype=dtype),
        "k": draw(1, batch, seqlen_kv, 2, dim, dtype=dtype),
        "v": draw(2, batch, seqlen_kv, 2, dim, dtype=dtype),
        "bias": draw(3, 1, 4, seqlen_q, seqlen_kv, dtype=dtype),
        "sinks": draw(4, 4, dtype="float64" if dtype == "float64" else "float32"),
    }


def gradients(arrays: dict[str, Any], dout: Any, dlse: Any, **options: Any) -> Any:
    """(out, lse) and the gradients of the operands of ``NAMES``, under jit."""

    @jax.jit
    def run(given: Any, rest: Any, dout: Any, dlse: Any) -> Any:
        attend = functools.partial(cuattn.flash_attention, return_lse=True, **rest, **options)
        results, pullback = jax.vjp(lambda given: attend(**given), given)
        return results, pullback((dout, dlse))[0]

    given = {n: x for n, x in arrays.items() if n in NAMES}
    return run(given, {n: x for n, x in arrays.items() if n not in NAMES}, dout, dlse)


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window_softcap": {"window_size": (40, 8), "softcap": 5.0},
    "lengths": {"q_seqlens": np.array([150, 70]), "kv_seqlens": np.array([90, 200]), "causal": True},
    "segments": {
        "q_segment_ids": np.arange(300).reshape(2, 150) // 60,
        "kv_segment_ids": np.arange(400).reshape(2, 200) // 80,
    },
    "dropout": {"dropout_p": 0.25, "dropout_seed": 1234567890123},
}  # fmt: skip
BARS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 3e-5, "float64": 1e-11}


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("case", CASES)
def test_every_dtype_against_float64(dtype: str, case: str) -> None:
    arrays = problem(dtype)
    (out, lse), pullback = cuattn.flash_attention_vjp(
        **arrays, **CASES[case], backend="reference", return_lse=True
    )
    dout = draw(5, *out.shape, dtype=dtype)
    dlse = draw(6, *lse.shape, dtype=lse.dtype.name)
    wanted = (out, lse, *pullback(dout, dlse))
    with x64():
        options = {n: x for n, x in CASES[case].items() if not isinstance(x, np.ndarray)}
        operands = {n: jnp.asarray(x) for n, x in {**arrays, **CASES[case]}.items() if n not in options}
        (out, lse), found = gradients(operands, dout, dlse, **options)
        for name, a, b in zip(
            ("out", "lse", *NAMES), (out, lse, *(found[n] for n in NAMES)), wanted, strict=True
        ):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            bar = BARS[dtype] * max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
            np.testing.assert_allclose(a, b, atol=bar, rtol=0, err_msg=name)


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("case", ["causal", "dropout"])
def test_the_same_bits_as_through_cupy(dtype: str, case: str) -> None:
    """One program, two ways to launch it."""
    arrays = problem(dtype, dim=128)
    there = {n: cupy.asarray(x) for n, x in arrays.items()}
    options = {**CASES[case], "deterministic": True}
    (out, lse), pullback = cuattn.flash_attention_vjp(**there, **options, return_lse=True)
    dout = draw(5, *out.shape, dtype=dtype)
    wanted = (out, lse, *pullback(cupy.asarray(dout), cupy.zeros_like(lse)))
    with x64():
        (out, lse), found = gradients(
            {n: jnp.asarray(x) for n, x in arrays.items()}, dout, jnp.zeros_like(lse.get()), **options
        )
        for a, b in zip((out, lse, *(found[n] for n in NAMES)), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), b.get().view(np.uint8))


def test_order_on_xlas_stream() -> None:
    """Attention reads what XLA's own kernels have just written, and they read its result, 50 times over."""
    q, k, v = (jnp.asarray(draw(i, 1, 2048, 4, 64)) for i in range(3))

    @jax.jit
    def loop(q: Any) -> Any:
        def body(_: Any, q: Any) -> Any:
            big = jnp.cos(jnp.broadcast_to(q, (64, *q.shape))).mean(0) * 0 + q
            return cuattn.flash_attention(big, k, v, causal=True) * 0.5 + 0.5 * q

        return jax.lax.fori_loop(0, 50, body, q)

    wanted = q
    for _ in range(50):
        wanted = cuattn.flash_attention(wanted, k, v, causal=True) * 0.5 + 0.5 * wanted
    np.testing.assert_allclose(loop(q), wanted, atol=1e-5)


def test_twelve_layers_are_captured() -> None:
    """After its first runs a jitted step replays a CUDA graph: the handler is not called again."""
    q, k, v = (jnp.asarray(draw(i, 1, 256, 4, 64, dtype="bfloat16")) for i in range(3))

    @jax.jit
    def step(q: Any) -> Any:
        for _ in range(12):
            q = cuattn.flash_attention(q, k, v, causal=True)
        return q

    before = xla_ffi.calls()
    for i in range(20):
        found = step(q * (1 + i % 8))
        found.block_until_ready()
    assert xla_ffi.calls() - before <= 12 * 15  # recorded again only where buffers have moved
    wanted = q * 4
    for _ in range(12):
        wanted = cuattn.flash_attention(wanted, k, v, causal=True)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


def test_memory_is_linear() -> None:
    """Scratch of a jitted forward and backward at 16k tokens: gradients' accumulators, nothing of S x S."""
    q = jax.ShapeDtypeStruct((1, 16384, 8, 128), jnp.bfloat16)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return cuattn.flash_attention(q, k, v, causal=True).astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, q, q).compile()
    one = 16384 * 8 * 128 * 2
    assert compiled.memory_analysis().temp_size_in_bytes <= 8 * one  # out, dout, float32 dq and small ones


def test_cpu_arrays_beside_a_gpu() -> None:
    """Where the arrays live decides: the CPU's kernels for arrays on the CPU."""
    cpu = jax.devices("cpu")[0]
    arrays = problem("float32")
    here = {n: jax.device_put(x, cpu) for n, x in arrays.items()}
    there = {n: jnp.asarray(x) for n, x in arrays.items()}
    out = cuattn.flash_attention(**here)
    assert out.devices() == {cpu}
    np.testing.assert_allclose(out, cuattn.flash_attention(**there), atol=1e-5)
    with jax.default_device(cpu):
        out = jax.jit(cuattn.flash_attention)(*(jnp.asarray(arrays[n]) for n in "qkv"))
        assert out.devices() == {cpu}
    with pytest.raises(ValueError, match=r"backend.*'numba' with arrays on cuda"):
        cuattn.flash_attention(**there, backend="numba")


def test_beside_cupy_and_back() -> None:
    """Arrays cross by DLPack; both libraries' memory pools live side by side."""
    mine = cupy.asarray(draw(0, 1, 128, 2, 64))
    out = cuattn.flash_attention(*(jax.dlpack.from_dlpack(mine) for _ in range(3)), causal=True)
    wanted = cuattn.flash_attention(mine, mine, mine, causal=True)
    np.testing.assert_array_equal(cupy.from_dlpack(out).get(), wanted.get())


BESIDE = """
import sys
import jax, jax.numpy as jnp, numpy as np
import cuattn
x = np.random.default_rng(0).standard_normal((1, 256, 4, 64)).astype(np.float16)
def attend(q, k, v):
    return cuattn.flash_attention(q, k, v, causal=True)
step = jax.jit(jax.grad(lambda q: (attend(q, q, q).astype(jnp.float32) ** 2).sum()))
def check():
    mine = jnp.asarray(x)
    found = [np.asarray(step(mine)), np.asarray(jax.jit(attend)(mine, mine, mine))]
    if sys.argv[1] == "cupy":
        import cupy
        room = cupy.empty(8 << 30, cupy.uint8)
        theirs = cupy.asarray(x)
        out = attend(theirs, theirs, theirs).get()
    else:
        import torch
        theirs = torch.from_numpy(x).cuda()
        out = attend(theirs, theirs, theirs).cpu().numpy()
    np.testing.assert_array_equal(found[1], out)
    return found[0]
np.testing.assert_allclose(check(), check(), rtol=2e-2, atol=1e-3)
"""


@pytest.mark.parametrize(
    ("library", "preallocate"), [("cupy", "true"), ("cupy", "false"), ("torch", "true"), ("torch", "false")]
)
def test_beside_another_library(library: str, preallocate: str) -> None:
    """In one process, whether JAX takes its share of the memory at once or not."""
    pytest.importorskip(library)
    env = {
        **os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": preallocate, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", BESIDE, library], env=env, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
