"""Two GPUs of one host: split under jit, ring and Ulysses, their speed and memory beside one GPU's."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuattn

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
pytestmark = pytest.mark.gpu2
jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from cuattn.interop import jax_parallel  # noqa: E402
from cuattn.interop.jax import ring_attention, ulysses_attention, zigzag_order  # noqa: E402


@pytest.fixture(autouse=True)
def two_gpus() -> Iterator[None]:
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("JAX has no two GPUs")
    with jax.default_matmul_precision("highest"):
        yield


def draw(seed: int, *shape: int, dtype: str = "bfloat16") -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def step(function: Any) -> Any:
    """Forward and backward of q, k, v and out's gradient."""
    return jax.jit(lambda q, k, v, dout: jax.vjp(function, q, k, v)[1](dout))


def split(function: Any, spec: Any, **options: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), ("seq",))
    inside = functools.partial(function, axis_name="seq", causal=True, **options)
    return mesh, jax.shard_map(lambda *a: inside(*a), mesh=mesh, in_specs=spec, out_specs=spec)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["jit", "ring", "zigzag", "zigzag_in_turns", "ulysses"])
def test_equal_to_one_gpu(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "zigzag_in_turns":
        monkeypatch.setattr(jax_parallel, "TURN_BYTES", 1)
    arrays = [draw(i, 2, 1024, h, 64, dtype=dtype) for i, h in enumerate((8, 4, 4, 8))]
    one = functools.partial(cuattn.flash_attention, causal=True)
    want = step(one)(*(jnp.asarray(x) for x in arrays))
    order = np.arange(1024)
    if kind == "jit":
        spec, run = P(None, None, "seq"), one
        mesh = Mesh(np.array(jax.devices()[:2]), ("seq",))
    else:
        spec = P(None, "seq")
        options = {"zigzag": True} if kind.startswith("zigzag") else {}
        mesh, run = split(ulysses_attention if kind == "ulysses" else ring_attention, spec, **options)
        order = zigzag_order(1024, 2) if kind.startswith("zigzag") else order
    put = [jax.device_put(x[:, order], NamedSharding(mesh, spec)) for x in arrays]
    got = step(run)(*put)
    bar = 3e-2 if dtype == "bfloat16" else 2e-5
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)[:, order]
        np.testing.assert_allclose(a, b, atol=bar * max(1.0, np.abs(b).max()), rtol=0)


def seconds(run: Any, arrays: Any) -> float:
    best = 1e9
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        best = min(best, time.perf_counter() - start)
    return best


def normal(shape: tuple[int, ...], sharding: Any = None) -> list[Any]:
    """q, k, v and dout, drawn on the devices."""
    make = functools.partial(jax.random.normal, shape=shape, dtype="bfloat16")
    return [jax.jit(make, out_shardings=sharding)(jax.random.key(i)) for i in range(4)]


def order_of(program: str) -> str:
    """Transfers' starts (s) and ends (d) and calls of ours (c) in a compiled program, in order."""
    steps = re.findall(r" (collective-permute-(?:start|done)|custom-call)\(.*?(cuattn_cuda|\n)", program)
    letters = {"collective-permute-start": "s", "collective-permute-done": "d", "custom-call": "c"}
    return "".join(letters[step] for step, name in steps if step != "custom-call" or name != "\n")


def test_ring_at_128k_tokens() -> None:
    """At least 1.8 times one GPU's speed, forward and backward, with half the memory on each."""
    shape = 1, 131072, 16, 128
    one = step(functools.partial(cuattn.flash_attention, causal=True))
    here = normal(shape)
    alone = one.lower(*here).compile()
    single = seconds(alone, here)
    del here
    mesh, ring = split(ring_attention, P(None, "seq"), zigzag=True)
    put = normal(shape, NamedSharding(mesh, P(None, "seq")))
    both = step(ring).lower(*put).compile()
    double = seconds(both, put)
    memory = [
        m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes
        for m in (alone.memory_analysis(), both.memory_analysis())
    ]
    times = f"{single * 1e3:.1f} ms, {double * 1e3:.1f} ms on two"
    report = f"{times}: {single / double:.2f} times; bytes {memory}"
    print(report)  # noqa: T201
    assert single / double >= 1.8, report
    assert memory[1] <= 0.55 * memory[0], report
    assert re.search("scd", order_of(both.as_text())), "no kernel between a transfer's start and its end"
