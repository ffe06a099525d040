"""CUDA's driver, looked up at run time: entry points for XLA's handler, and kernels that serve every device.

Kernels are loaded with cuLibraryLoadData, so that one handle works in all contexts. Knows neither XLA nor
attention; compiling is ``cuattn.jit``'s.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from ..errors import BackendUnavailable
from ..program import Kernel

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES


@functools.cache
def _library() -> ctypes.CDLL:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        _check(library, "cuInit", library.cuInit(0))
        return library
    raise BackendUnavailable(
        "no NVIDIA driver: libcuda.so.1 was not found; install a driver for CUDA 12.4 or newer"
    )


def _check(library: ctypes.CDLL, name: str, result: int) -> None:
    if result != 0:
        words = ctypes.c_char_p()
        library.cuGetErrorString(result, ctypes.byref(words))
        reason = words.value.decode() if words.value else f"CUresult {result}"
        raise BackendUnavailable(f"{name}: {reason}")


def entry_point(name: str) -> int:
    """Address of a driver function."""
    try:
        function = getattr(_library(), name)
    except AttributeError:
        raise BackendUnavailable(
            f"the NVIDIA driver lacks {name}; install one for CUDA 12.4 or newer"
        ) from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def devices() -> tuple[int, ...]:
    """Handles of the visible devices."""
    library, count = _library(), ctypes.c_int()
    _check(library, "cuDeviceGetCount", library.cuDeviceGetCount(ctypes.byref(count)))
    handles = []
    for ordinal in range(count.value):
        handle = ctypes.c_int()
        _check(library, "cuDeviceGet", library.cuDeviceGet(ctypes.byref(handle), ordinal))
        handles.append(handle.value)
    return tuple(handles)


def load(names: Sequence[Any], arch: int) -> list[int]:
    """Compile and load kernels given as [source, entry, [[define, value]...]]; their CUkernel handles."""
    from .. import jit

    kernels = [Kernel(source, entry, tuple((k, v) for k, v in defines)) for source, entry, defines in names]
    compiled = jit.compile_all([(kernel, arch) for kernel in kernels])
    return [_load(c.image + b"\0", kernel.entry) for c, kernel in zip(compiled, kernels, strict=True)]


def _load(image: bytes, entry: str) -> int:
    """Load a cubin (or PTX, ended by a 0) and allow its kernel all the shared memory that each device has."""
    library, module, kernel = _library(), ctypes.c_void_p(), ctypes.c_void_p()
    result = library.cuLibraryLoadData(ctypes.byref(module), image, None, None, 0, None, None, 0)
    _check(library, "cuLibraryLoadData", result)
    result = library.cuLibraryGetKernel(ctypes.byref(kernel), module, entry.encode())
    _check(library, f"cuLibraryGetKernel({entry})", result)
    for device in devices():
        limit, static = ctypes.c_int(), ctypes.c_int()
        _check(library, "attribute", library.cuDeviceGetAttribute(ctypes.byref(limit), SHARED_OPTIN, device))
        result = library.cuKernelGetAttribute(ctypes.byref(static), STATIC_SHARED, kernel, device)
        if result != 0:
            continue  # a device of another architecture: the kernel cannot run there
        limit.value -= static.value
        result = library.cuKernelSetAttribute(MAX_DYNAMIC_SHARED, limit, kernel, device)
        _check(library, "cuKernelSetAttribute", result)
    return kernel.value or 0
