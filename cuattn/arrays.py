"""Which library an array belongs to, told by its type's name alone: no library is imported to find out.

Adapters (``interop/adapters.py``) and DLPack are loaded when the first array that needs them arrives. No
attention here.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import argument_error

if TYPE_CHECKING:
    from .interop.adapters import Adapter

TAKES = "a NumPy, CuPy or JAX array, or an object with __dlpack__ or __cuda_array_interface__"
_libraries: dict[type, str] = {}
_adapters: dict[str, Any] = {}


def library_of(name: str, x: Any) -> str:
    """The array library of argument ``name``: "numpy", "cupy", "jax", or the root package of another one.

    Raises ``TypeError`` for what is no array.
    """
    library = _libraries.get(type(x))
    if library is None:
        library = _find_library(x)
        if library is None:
            raise argument_error(name, type(x).__name__, TAKES, kind=TypeError)
        _libraries[type(x)] = library
    return library


def _find_library(x: Any) -> str | None:
    for base in type(x).__mro__:
        root = base.__module__.partition(".")[0]
        if (root, base.__name__) in (("numpy", "ndarray"), ("cupy", "ndarray")):
            return root
    if is_jax(x):
        return "jax"
    if hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__"):
        return type(x).__module__.partition(".")[0]
    return None


def adapter(library: str) -> Adapter:
    """The adapter of "numpy", "cupy" or "jax"."""
    if library not in _adapters:
        _adapters[library] = import_module(".interop.adapters", __package__).load(library)
    return _adapters[library]


def adopt(name: str, x: Any) -> tuple[str, Any]:
    """x as an array the backends run on: ("numpy" | "cupy" | "jax", array).

    Nothing is copied but a NumPy array of the other byte order.
    """
    library = library_of(name, x)
    if library == "numpy" and not x.dtype.isnative:
        return library, x.astype(x.dtype.newbyteorder("="))
    if library in ("numpy", "cupy", "jax"):
        return library, x
    return import_module(".interop.dlpack", __package__).adopt(name, x)


def give_back(x: Any, library: str) -> Any:
    """A result of a backend as an array of ``library``, without a copy."""
    if library in ("numpy", "cupy", "jax"):
        return x
    return import_module(".interop.dlpack", __package__).give_back(x, library)


def is_jax(x: Any) -> bool:
    """Whether x is a JAX array or tracer; does not import JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)
