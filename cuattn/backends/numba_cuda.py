"""``backend="numba"`` on CuPy arrays: the readable numba.cuda kernels of ``prototype``, forward and backward.

They take dense attention with causal masks, windows, offsets, softcap and grouped heads; anything else is
refused by name. For reading, changing and checking, not for speed. Numba's CUDA side is imported when one is
prepared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from .. import device as devices
from ..errors import argument_error
from ..families.common import operands
from ..spec import AttentionSpec

Array = Any  # of CuPy; of NumPy in Numba's simulator
_TAKES = "None there: its readable kernels know causal, window_size, q_offset, softmax_scale and softcap"


@cache
def unavailable() -> str | None:
    """Why the kernels cannot run here and what to install; None when they can."""
    install = "pip install 'numba-cuda[cu13]' (or [cu12] for an older driver)"
    try:
        from numba import cuda

        from .. import prototype

        if not cuda.is_available():
            return f"numba.cuda finds no GPU or no CUDA toolkit: {install}"
        prototype.load_numba_cuda()
        cuda.compile_ptx(lambda: None, (), cc=(8, 0))  # a NumPy too new for numba-cuda shows only here
    except Exception as fault:  # a broken installation raises anything
        first = (str(fault).splitlines() or [""])[0]
        return f"numba.cuda does not work ({type(fault).__name__}: {first}): {install}"
    return None


def check(spec: AttentionSpec) -> None:
    """Raise ``ValueError`` naming the first argument that the loops do not express."""
    for name in operands(spec)[3:]:
        if name != "dropout_seed":  # the argument is dropout_p
            raise argument_error(name, "an array with backend='numba' on a GPU", _TAKES)
    if spec.dropout_p > 0:
        raise argument_error("dropout_p", f"{spec.dropout_p} with backend='numba' on a GPU", "0.0 there")
    if spec.precision != "highest":
        raise argument_error("precision", f"{spec.precision!r} with backend='numba' on a GPU", "None there")


@cache
def modification(left: int, right: int, cap: float) -> tuple[Callable[..., float], Callable[..., float]]:
    """What happens to a scaled score, and its derivative: softcap, then the window around the diagonal."""

    def score(s: float, row: int, column: int) -> float:
        if (left >= 0 and row - column > left) or (right >= 0 and column - row > right):
            return -math.inf
        return cap * math.tanh(s / cap) if cap > 0.0 else s

    def slope(s: float, row: int, column: int) -> float:
        return 1.0 - math.tanh(s / cap) ** 2 if cap > 0.0 else 1.0

    return score, slope


def prepare(spec: AttentionSpec, device: int | None, wants: frozenset[str] | None) -> Prepared:
    """A forward (``wants`` None) or a backward for ``wants`` on CuPy arrays of a device."""
    check(spec)
    return Prepared(spec, wants, devices.import_cupy(), device or 0)


class Prepared:
    """Copies to (batch · heads, seqlen, dim) arrays of the accumulator, the kernels, and copies back.

    Runs on the device's current CuPy stream. ``xp`` is CuPy, or NumPy for Numba's simulator.
    """

    def __init__(self, spec: AttentionSpec, wants: frozenset[str] | None, xp: Any, device: int) -> None:
        from .. import prototype

        self.spec, self.wants, self.xp, self.device = spec, wants, xp, device
        score = modification(spec.window_left, spec.window_right, spec.softcap)
        self.kernels = prototype.cuda_kernels(*score, spec.head_dim, spec.head_dim_v, spec.accumulator)

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run on the operands by name; new outputs by name."""
        if self.xp.__name__ != "cupy":
            return self._run(arrays, lambda x: x, 0)
        from numba import cuda

        with self.xp.cuda.Device(self.device):
            address = self.xp.cuda.get_current_stream().ptr
            stream = cuda.external_stream(address) if address else cuda.default_stream()
            return self._run(arrays, lambda x: cuda.as_cuda_array(x, sync=False), stream)

    def _run(
        self, arrays: Mapping[str, Array], view: Callable[[Array], Any], stream: Any
    ) -> dict[str, Array]:
        spec, xp = self.spec, self.xp
        q, k, v = (self._heads(arrays[name]) for name in "qkv")
        given = [view(x) for x in (q, k, v)] + [spec.softmax_scale, int(spec.q_offset)]
        if self.wants is None:
            out, lse = xp.empty((*q.shape[:2], spec.head_dim_v), q.dtype), xp.empty(q.shape[:2], q.dtype)
            self.kernels.forward(*given, view(out), view(lse), stream=stream)
            return {"out": self._back(out, arrays["v"]), "lse": lse.reshape(spec.lse_shape)}
        dout = self._heads(arrays["dout"])
        delta = (dout * self._heads(arrays["out"])).sum(axis=-1)
        if "dlse" in arrays:
            delta -= arrays["dlse"].reshape(delta.shape)
        lse = arrays["lse"].reshape(delta.shape)
        given += [view(x) for x in (lse, dout, delta)]
        found = {}
        if "q" in self.wants:
            found["q"] = xp.zeros_like(q)
            self.kernels.backward_query(*given, view(found["q"]), stream=stream)
        if self.wants & {"k", "v"}:
            found |= {"k": xp.zeros_like(k), "v": xp.zeros_like(v)}
            self.kernels.backward_key(*given, view(found["k"]), view(found["v"]), stream=stream)
        return {f"d{name}": self._back(found[name], arrays[name]) for name in self.wants}

    def _heads(self, x: Array) -> Array:
        """A q-like array as a C-contiguous (batch · heads, seqlen, dim) one of the accumulator's dtype."""
        if self.spec.layout == "bshd":
            x = x.transpose(0, 2, 1, 3)
        x = self.xp.ascontiguousarray(x, dtype=self.spec.accumulator)
        return x.reshape(-1, *x.shape[2:])

    def _back(self, x: Array, like: Array) -> Array:
        """A result in the caller's layout and the dtype of ``like``."""
        x = x.reshape(self.spec.batch, -1, *x.shape[1:])
        if self.spec.layout == "bshd":
            x = x.transpose(0, 2, 1, 3)
        return self.xp.ascontiguousarray(x, dtype=like.dtype)
