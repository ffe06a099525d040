"""One small class per array library: what an array looks like, where it lives, how to make another.

Libraries are imported inside their adapter. No attention here.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import argument_error
from ..spec import ITEMSIZE, Signature


class Adapter(Protocol):
    """What the core asks of an array library."""

    library: str
    dtypes: dict[str, Any]  # the library's own, by the names of ``spec.ITEMSIZE`` and "uint8"

    def key(self, x: Any) -> tuple[Any, ...]:
        """A cheap hashable that tells all of ``signature`` apart."""

    def signature(self, x: Any) -> Signature: ...

    def device(self, x: Any) -> int | None:
        """The GPU's ordinal, or None for the CPU."""

    def contiguous(self, x: Any, dtype: str) -> Any:
        """x as a C-contiguous array of ``dtype``, itself when it is one."""

    def unit_stride(self, x: Any) -> Any:
        """x with elements of its last axis adjacent, itself when they are."""

    def from_sequence(self, values: Any, dtype: str, like: Any) -> Any:
        """A Python sequence as an array on the device of ``like``."""

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any: ...

    def take(self, x: Any) -> Any:
        """A NumPy or CuPy array brought over to this library, through the bus if need be."""


def alignment(address: int, strides: tuple[int, ...], itemsize: int) -> int:
    """The largest power of two up to 16 that divides the address and all strides but the last, in bytes."""
    bits = address | 16
    for stride in strides[:-1]:
        bits |= stride * itemsize
    return bits & -bits


class _Strided:
    """What NumPy and CuPy share: shape, strides in bytes, dtypes by NumPy's names."""

    library: str

    def __init__(self) -> None:
        import ml_dtypes
        import numpy as np

        self.dtypes = {name: np.dtype(name) for name in ITEMSIZE if name != "bfloat16"}
        self.dtypes["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
        self.dtypes["uint8"] = np.dtype("uint8")

    def address(self, x: Any) -> int:
        raise NotImplementedError

    def key(self, x: Any) -> tuple[Any, ...]:
        return x.shape, x.strides, x.dtype, self.address(x) & 15  # a dtype's char does not tell byte order

    def signature(self, x: Any) -> Signature:
        itemsize = x.dtype.itemsize
        if any(s % itemsize for s in x.strides):
            raise argument_error(
                "array", f"strides {x.strides}", f"multiples of its {itemsize}-byte elements"
            )
        strides = tuple(s // itemsize for s in x.strides)
        return Signature(x.dtype.name, x.shape, strides, alignment(self.address(x), strides, itemsize))

    def unit_stride(self, x: Any) -> Any:
        strides, itemsize = x.strides, x.dtype.itemsize
        adjacent = bool(strides) and (strides[-1] == itemsize or x.shape[-1] == 1)
        return x if adjacent and not any(s % itemsize for s in strides) else self.copy(x)

    def copy(self, x: Any) -> Any:
        return x.copy()


class NumpyAdapter(_Strided):
    library = "numpy"

    def address(self, x: Any) -> int:
        return x.__array_interface__["data"][0]

    def device(self, x: Any) -> None:
        return None

    def contiguous(self, x: Any, dtype: str) -> Any:
        import numpy as np

        return np.ascontiguousarray(x, self.dtypes[dtype])

    def from_sequence(self, values: Any, dtype: str, like: Any) -> Any:
        import numpy as np

        return np.asarray(values, self.dtypes[dtype])

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        import numpy as np

        return np.full(shape, value, self.dtypes[dtype])

    def take(self, x: Any) -> Any:
        return x.get() if hasattr(x, "get") else x


class CupyAdapter(_Strided):
    library = "cupy"

    def address(self, x: Any) -> int:
        return x.data.ptr

    def device(self, x: Any) -> int:
        return x.data.device_id

    def key(self, x: Any) -> tuple[Any, ...]:
        data = x.data
        return x.shape, x.strides, x.dtype.char, data.ptr & 15, data.device_id

    def contiguous(self, x: Any, dtype: str) -> Any:
        import cupy

        if x.flags.c_contiguous and x.dtype == self.dtypes[dtype]:
            return x
        with cupy.cuda.Device(self.device(x)):
            return cupy.ascontiguousarray(x, self.dtypes[dtype])

    def copy(self, x: Any) -> Any:
        import cupy

        with cupy.cuda.Device(self.device(x)):
            return x.copy()

    def from_sequence(self, values: Any, dtype: str, like: Any) -> Any:
        import cupy

        with cupy.cuda.Device(self.device(like)):
            return cupy.asarray(values, self.dtypes[dtype])

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        import cupy

        with cupy.cuda.Device(self.device(like)):
            return cupy.full(shape, value, self.dtypes[dtype])

    def take(self, x: Any) -> Any:
        import cupy

        return cupy.asarray(x)


class JaxAdapter:
    """Marks JAX arrays and tracers; their calls go to ``interop/jax.py`` whole."""

    library = "jax"


_CLASSES = {"numpy": NumpyAdapter, "cupy": CupyAdapter, "jax": JaxAdapter}
_loaded: dict[str, Any] = {}


def load(library: str) -> Any:
    """The adapter of "numpy", "cupy" or "jax"; its library is imported now at the latest."""
    if library not in _loaded:
        _loaded[library] = _CLASSES[library]()
    return _loaded[library]
