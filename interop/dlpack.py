"""Foreign arrays in and out without a copy: DLPack capsules, bfloat16 on the CPU included.

NumPy's and CuPy's own ``from_dlpack`` do the work; where NumPy knows no bfloat16, the capsule is read and
written here. No attention, no kernels.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, ClassVar

from ..errors import argument_error

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
_BFLOAT = 4  # DLDataTypeCode
_NAME, _USED = b"dltensor", b"used_dltensor"


class _Device(ctypes.Structure):
    # typedef struct { DLDeviceType device_type; int32_t device_id; } DLDevice;
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    # typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    # typedef struct { void* data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t* shape;
    #                  int64_t* strides; uint64_t byte_offset; } DLTensor;
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    # typedef struct DLManagedTensor { DLTensor dl_tensor; void* manager_ctx; void (*deleter)(...); };
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_api = ctypes.pythonapi
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Owner:
    """Keeps a consumed capsule's tensor alive for the NumPy array made of it, then calls its deleter."""

    def __init__(self, managed: Any, interface: dict[str, Any]) -> None:
        self._managed = managed
        self.__array_interface__ = interface

    def __del__(self) -> None:
        if self._managed.contents.deleter:
            self._managed.contents.deleter(self._managed)


def _read_bfloat16(x: Any) -> Any:
    """A bfloat16 CPU array of another library as a NumPy one over the same memory."""
    import ml_dtypes
    import numpy as np

    capsule = x.__dlpack__()
    managed = ctypes.cast(_api.PyCapsule_GetPointer(capsule, _NAME), ctypes.POINTER(_Managed))
    tensor = managed.contents.tensor
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(2 * tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    interface = {"version": 3, "typestr": "<u2", "shape": shape, "strides": strides, "data": (address, False)}
    _api.PyCapsule_SetName(capsule, _USED)
    return np.asarray(_Owner(managed, interface)).view(ml_dtypes.bfloat16)


class _Export:
    """A bfloat16 NumPy array as a DLPack producer."""

    _alive: ClassVar[dict[int, tuple[Any, ...]]] = {}  # exported tensors, until their deleter runs

    def __init__(self, x: Any) -> None:
        self._array = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        x = self._array
        dims = ctypes.c_int64 * x.ndim
        shape, strides = dims(*x.shape), dims(*(s // 2 for s in x.strides))
        managed = _Managed()
        managed.tensor = _Tensor(
            x.ctypes.data, _Device(_CPU, 0), x.ndim, _DataType(_BFLOAT, 16, 1), shape, strides, 0
        )
        managed.deleter = _release
        address = ctypes.addressof(managed)
        self._alive[address] = (managed, x, shape, strides)
        return _api.PyCapsule_New(address, _NAME, None)


@_Deleter
def _release(managed: Any) -> None:
    _Export._alive.pop(ctypes.addressof(managed.contents), None)


def on_gpu(x: Any) -> bool:
    """Whether a foreign array lives on a CUDA device."""
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[0]) in (_CUDA, _CUDA_MANAGED)
    return hasattr(x, "__cuda_array_interface__")


def adopt(name: str, x: Any) -> tuple[str, Any]:
    """A foreign array as ("numpy" | "cupy", array) over the same memory.

    Raises ``TypeError`` naming the argument when the exporter refuses.
    """
    try:
        if on_gpu(x):
            import cupy

            return "cupy", cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)
        import numpy as np

        if "bfloat16" in str(getattr(x, "dtype", "")):
            return "numpy", _read_bfloat16(x)
        return "numpy", np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        takes = "an array whose memory can be shared"
        raise argument_error(name, f"{type(x).__name__} ({error})", takes, kind=TypeError) from error


def give_back(x: Any, library: str) -> Any:
    """A NumPy or CuPy array as one of ``library``, whose arrays the caller gave."""
    module = sys.modules[library]
    if hasattr(module, "from_dlpack"):
        bfloat16 = type(x).__module__ == "numpy" and x.dtype.name == "bfloat16"
        return module.from_dlpack(_Export(x) if bfloat16 else x)
    if library == "numba":
        from numba import cuda

        return cuda.as_cuda_array(x)
    return x
