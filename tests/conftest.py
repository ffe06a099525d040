"""The runners: one call with gradients on each kind of array and backend, NumPy in and NumPy out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

# Before JAX starts: eight CPU devices, to test meshes on. It changes nothing for GPUs.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)

import numpy as np
import pytest

import cuattn
from cuattn import device
from cuattn.backends import cuda


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs GPUs that are not there, saying why."""
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("gpu2")]
    if not marked:
        return
    reason = cuda.unavailable()
    count = 0
    if reason is None:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    for item in marked:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("gpu2") and count < 2:
            item.add_marker(pytest.mark.skip(reason="one GPU; the test needs two"))


@pytest.fixture(scope="module")
def compiler() -> None:
    """Skip a module whose kernels no NVRTC can compile here."""
    try:
        device.import_nvrtc()
    except Exception as fault:
        pytest.skip(f"no NVRTC: {fault}")


@pytest.fixture
def hopper() -> None:
    """Skip on GPUs that Hopper's kernels are not for."""
    if device.query(0).arch != 90:
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """JAX's arrays go to the first CPU device."""
    import jax

    with jax.default_device(jax.devices("cpu")[0]):
        yield


GRADIENTS = ("q", "k", "v", "bias", "sinks")


class Runner:
    """Runs ``flash_attention`` (or the packed one) and its pullback; arrays go in and come out as NumPy."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(
        self,
        arrays: dict[str, Any],
        *,
        dout: Any = None,
        dlse: Any = None,
        gradients: bool = True,
        wants: tuple[str, ...] | None = None,
        **options: Any,
    ) -> tuple[Any, Any, dict[str, Any]]:
        """(out, lse, gradients by operand name)."""
        varlen = "cu_seqlens_q" in arrays
        arrays = {name: self.to(x) for name, x in arrays.items()}
        if self.kind == "jax":
            return self._jax(arrays, dout, dlse, gradients, wants, options, varlen)
        function = cuattn.flash_attention_varlen_vjp if varlen else cuattn.flash_attention_vjp
        backend = {"reference": "reference", "numba": "numba"}.get(self.kind)
        (out, lse), pullback = function(**arrays, **options, backend=backend, return_lse=True)
        found: dict[str, Any] = {}
        if gradients:
            dout, dlse = (None if x is None else self.to(x) for x in (dout, dlse))
            given = pullback(dout, dlse, wants=wants)
            found = {n: self.back(x) for n, x in zip(GRADIENTS, given, strict=True) if x is not None}
        return self.back(out), self.back(lse), found

    def _jax(
        self, arrays: Any, dout: Any, dlse: Any, gradients: bool, wants: Any, options: Any, varlen: bool
    ) -> tuple[Any, Any, dict[str, Any]]:
        import jax
        import jax.numpy as jnp

        function = cuattn.flash_attention_varlen if varlen else cuattn.flash_attention
        names = [n for n in GRADIENTS if n in arrays and (wants is None or n in wants)]
        rest = {n: x for n, x in arrays.items() if n not in names}

        def call(*values: Any) -> Any:
            return function(**rest, **dict(zip(names, values, strict=True)), **options, return_lse=True)

        if not gradients:
            out, lse = call(*(arrays[n] for n in names))
            return self.back(out), self.back(lse), {}
        (out, lse), pullback = jax.vjp(call, *(arrays[n] for n in names))
        cotangents = tuple(
            jnp.zeros_like(x) if d is None else jnp.asarray(d) for x, d in ((out, dout), (lse, dlse))
        )
        found = dict(zip(names, map(self.back, pullback(cotangents)), strict=True))
        return self.back(out), self.back(lse), found

    def to(self, x: Any) -> Any:
        """A NumPy array as one of this kind; strides survive where the kind has them."""
        if not isinstance(x, np.ndarray):
            return x
        if self.kind == "cupy":
            import cupy

            return _strided_copy(cupy, x)
        if self.kind == "jax":
            import jax.numpy as jnp

            return jnp.asarray(x)
        return x

    def back(self, x: Any) -> Any:
        return x.get() if self.kind == "cupy" else np.asarray(x)


def _strided_copy(cupy: Any, x: Any) -> Any:
    """x on the GPU with the same strides (axis order and broadcast axes)."""
    kept = tuple(
        slice(0, 1) if s == 0 and n > 1 else slice(None) for s, n in zip(x.strides, x.shape, strict=True)
    )
    small = x[kept]
    order = sorted(range(x.ndim), key=lambda i: -abs(small.strides[i]))
    moved = cupy.asarray(np.asarray(small.transpose(order), order="C"))
    return cupy.broadcast_to(moved.transpose(np.argsort(order)), x.shape)


KINDS = ["reference", "numba", "jax", pytest.param("cupy", marks=pytest.mark.gpu)]


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest) -> Runner:
    """Each kind of array and backend in turn."""
    if request.param == "jax":
        pytest.importorskip("jax")
    return Runner(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def normal(rng: np.random.Generator) -> Callable[..., Any]:
    """Draw normal arrays of a shape and dtype."""

    def draw(*shape: int, dtype: Any = np.float32) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    return draw
