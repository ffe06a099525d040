"""The CUDA backend: which kernel family takes a spec, and running its program on CuPy arrays.

Tiles and parameters are the families' (``cuattn/families``), compiling is ``jit``'s. A prepared call holds
all that does not change from call to call, so that a warm one fills in a few pointers and launches.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .. import device as devices
from .. import jit, params
from ..device import Device
from ..errors import BackendUnavailable
from ..program import Buffer, Launch, Memset, Program, TensorMap
from ..spec import ITEMSIZE, AttentionSpec

FORWARD = ("sm90_split", "sm90", "mma", "wide")  # modules of cuattn.families, best first
BACKWARD = ("sm90_backward", "mma_backward", "wide_backward")
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ALIGNMENT = 256  # of buffers inside one workspace allocation
_SEED_POINTER, _SEED_VALUE = params.INDEX["dropout_seed"], params.INDEX["dropout_seed_value"]
_KEPT_MAPS = 256  # tensor maps kept a program, by address


def unavailable() -> str | None:
    """Why CUDA cannot be used here and what to install; None when it can."""
    return devices.unavailable()


# ---- choosing ----


def _choose(modules: tuple[str, ...], spec: AttentionSpec, device: Device) -> Any:
    reasons = []
    for name in modules:
        family = import_module(f"..families.{name}", __package__)
        reason = family.refuses(spec, device)
        if reason is None:
            return family
        reasons.append(f"{name} {reason}")
    raise BackendUnavailable(f"no CUDA kernel takes this call on {device.name}: " + "; ".join(reasons))


def forward_program(spec: AttentionSpec, device: Device) -> Program:
    """The forward of a spec on a device: out and lse from the operands."""
    return _choose(FORWARD, spec, device).forward(spec, device)


def backward_program(spec: AttentionSpec, device: Device, wants: frozenset[str]) -> Program:
    """The backward of a spec on a device for the gradients named in ``wants`` (of ``spec.GRADIENTS``)."""
    # Hopper's main kernel makes some of dq, dk and dv: nothing for a call that wants none of them
    modules = BACKWARD if wants & {"q", "k", "v"} else tuple(m for m in BACKWARD if m != "sm90_backward")
    return _choose(modules, spec, device).backward(spec, device, wants)


def program(spec: AttentionSpec, device: Device, wants: frozenset[str] | None) -> Program:
    """``forward_program`` (``wants`` None) or ``backward_program``."""
    return forward_program(spec, device) if wants is None else backward_program(spec, device, wants)


def prepare(spec: AttentionSpec, device: int | None, wants: frozenset[str] | None) -> Prepared:
    """Compile and load what a spec needs on a device (its CUDA index)."""
    return prepare_program(program(spec, devices.query(device or 0), wants), device or 0)


def prepare_program(what: Program, device: int) -> Prepared:
    """Compile and load a program's kernels on a device (its CUDA index)."""
    arch = devices.query(device).arch
    jit.compile_all((step.kernel, arch) for step in what.steps if isinstance(step, Launch))
    return Prepared(what, device, arch)


# ---- the driver ----


class _LaunchConfig(ctypes.Structure):
    # cuda.h: CUlaunchConfig { unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ,
    #   sharedMemBytes; CUstream hStream; CUlaunchAttribute *attrs; unsigned int numAttrs; }
    _fields_ = [
        *((f"size{i}", ctypes.c_uint) for i in range(6)),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


# cuda.h: CUlaunchAttribute { CUlaunchAttributeID id; char pad[4]; union of 64 bytes }; id 6 is
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION with an int.
_DEPENDENT = struct.pack("<i4xi60x", 6, 1)

# cuda.h: CUtensorMapDataType; CUtensorMapSwizzle
_MAP_DTYPES = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION_128B = 2


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    library.cuMemsetD8Async.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
    library.cuTensorMapEncodeTiled.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    return library


def _check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} (CUresult {result})")


def encode(tensor_map: TensorMap, address: int) -> ctypes.Array[ctypes.c_char]:
    """The 128 bytes of a TMA descriptor, in a buffer that starts on 64 bytes (the driver's demand)."""
    raw = ctypes.create_string_buffer(192)
    shift = -ctypes.addressof(raw) % 64
    rank = len(tensor_map.dims)
    result = _driver().cuTensorMapEncodeTiled(
        ctypes.addressof(raw) + shift,
        _MAP_DTYPES[tensor_map.dtype],
        rank,
        address + tensor_map.offset,
        (ctypes.c_uint64 * rank)(*tensor_map.dims),
        (ctypes.c_uint64 * max(1, rank - 1))(*tensor_map.strides),
        (ctypes.c_uint32 * rank)(*tensor_map.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _MAP_SWIZZLES[tensor_map.swizzle],
        _L2_PROMOTION_128B,
        0,
    )
    _check(result, f"cuTensorMapEncodeTiled({tensor_map.buffer}: {tensor_map.dims}, {tensor_map.strides})")
    return (ctypes.c_char * 128).from_buffer(raw, shift)


# ---- running ----


class _Call:
    """What one thread keeps for one launch: parameter block, argument array and launch configuration."""

    __slots__ = ("arguments", "attribute", "block", "config", "handle", "kept", "pointers", "words")

    def __init__(self, step: Launch, handle: int) -> None:
        self.handle = handle
        self.block = ctypes.create_string_buffer(step.block_words, len(step.block_words))
        self.words = memoryview(self.block).cast("B").cast("q")
        self.arguments = (ctypes.c_void_p * (1 + len(step.tensor_maps)))(ctypes.addressof(self.block))
        self.kept: list[Any] = [None] * len(self.arguments)  # maps in use, which another thread may evict
        self.config = _LaunchConfig(*step.grid, step.block, 1, 1, step.shared_memory, None, None, 0)
        if step.dependent:
            self.attribute = ctypes.create_string_buffer(_DEPENDENT, len(_DEPENDENT))
            self.config.attributes = ctypes.addressof(self.attribute)
            self.config.attribute_count = 1
        self.pointers = ctypes.addressof(self.config), ctypes.addressof(self.arguments)


class Prepared:
    """A program loaded on one device; called with CuPy arrays it returns its outputs. Any thread may call it.

    It launches on the device's current CuPy stream and neither waits nor changes the current device. It can
    be captured into a CUDA graph once it has run; a captured call's workspace is never given back.
    """

    def __init__(self, what: Program, device: int, arch: int) -> None:
        self.program = what
        self.device = device
        self._cupy = devices.import_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._stream = self._cupy.cuda.get_current_stream
        self.functions: dict[Launch, jit.Function] = {}
        for step in what.steps:
            if isinstance(step, Launch):
                self.functions[step] = self._load(step, arch)
        self._layout()
        self._own = threading.local()  # a list of calls a thread: their memory is written to
        self._maps: dict[tuple[int, int], Any] = {}
        self._captured: list[Any] = []

    def _load(self, step: Launch, arch: int) -> jit.Function:
        function = jit.get_function(step.kernel, self.device, arch)
        if step.shared_memory > 48 << 10:
            with self._cupy.cuda.Device(self.device):
                attribute = self._cupy.cuda.driver.funcSetAttribute
                attribute(function.handle, MAX_DYNAMIC_SHARED, step.shared_memory)
        return function

    def _layout(self) -> None:
        """Give each buffer a slot in the list of addresses, each scratch buffer a place in one allocation."""
        what = self.program
        self._inputs = tuple(n for n in what.inputs if n != "dropout_seed")
        self._seeded = "dropout_seed" in what.inputs
        names = [*self._inputs, *(b.name for b in what.outputs), *(b.name for b in what.workspace)]
        slot = {name: i for i, name in enumerate(names)}
        self._outputs = [(b.name, b.shape, _dtype(b.dtype)) for b in what.outputs]
        self._offsets, self._scratch = [], 0
        for buffer in what.workspace:
            self._offsets.append(self._scratch)
            self._scratch += -(-_bytes(buffer) // _ALIGNMENT) * _ALIGNMENT
        sizes = {b.name: _bytes(b) for b in (*what.outputs, *what.workspace)}
        self._steps: list[Any] = []
        map_number = itertools.count()
        for step in what.steps:
            if isinstance(step, Memset):
                self._steps.append((slot[step.buffer], sizes[step.buffer]))
                continue
            assert isinstance(step, Launch), step
            found = [(params.INDEX[f], slot[name]) for f, name in step.pointers if name != "dropout_seed"]
            maps = [(i + 1, next(map_number), m, slot[m.buffer]) for i, m in enumerate(step.tensor_maps)]
            self._steps.append((found, maps, any(name == "dropout_seed" for _, name in step.pointers)))

    def __call__(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Run on CuPy arrays by operand name (the dropout seed may be a Python int); new outputs by name."""
        current = self._runtime.getDevice()
        if current == self.device:
            return self._run(arrays)
        self._runtime.setDevice(self.device)
        try:
            return self._run(arrays)
        finally:
            self._runtime.setDevice(current)

    def _run(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        cupy = self._cupy
        addresses = [arrays[name].data.ptr for name in self._inputs]
        outputs = {}
        for name, shape, dtype in self._outputs:
            x = outputs[name] = cupy.ndarray(shape, dtype)
            addresses.append(x.data.ptr)
        stream = self._stream().ptr
        if self._scratch:
            scratch = cupy.cuda.alloc(self._scratch)
            if stream and self._runtime.streamIsCapturing(stream):
                self._captured.append(scratch)  # the graph writes to it whenever it runs
            start = scratch.ptr
            addresses += [start + offset for offset in self._offsets]
        self._launch(addresses, arrays["dropout_seed"] if self._seeded else 0, stream)
        return outputs

    def _launch(self, addresses: list[int], seed: Any, stream: int) -> None:
        driver = _driver()
        try:
            calls = self._own.calls
        except AttributeError:
            calls = self._own.calls = self._new_calls()
        for step, call in zip(self._steps, calls, strict=True):
            if call is None:
                at, size = step
                _check(driver.cuMemsetD8Async(addresses[at], 0, size, stream), "cuMemsetD8Async")
                continue
            pointers, maps, seeded = step
            words = call.words
            for word, at in pointers:
                words[word] = addresses[at]
            if seeded:
                given = isinstance(seed, int)
                words[_SEED_POINTER] = 0 if given else seed.data.ptr
                words[_SEED_VALUE] = seed if given else 0
            for argument, number, tensor_map, at in maps:
                address = addresses[at]
                found = self._maps.get((number, address)) or self._map(number, tensor_map, address)
                call.arguments[argument], call.kept[argument] = found
            call.config.stream = stream
            config, arguments = call.pointers
            result = driver.cuLaunchKernelEx(config, call.handle, arguments, None)
            if result:
                _check(result, "cuLaunchKernelEx")

    def _new_calls(self) -> list[_Call | None]:
        """The calling thread's own. NOTE: a fresh thread has no context to launch in until setDevice."""
        self._runtime.setDevice(self.device)
        handles = self.functions
        return [_Call(s, handles[s].handle) if isinstance(s, Launch) else None for s in self.program.steps]

    def _map(self, number: int, tensor_map: TensorMap, address: int) -> tuple[int, Any]:
        """A map's address and what keeps it in memory."""
        if len(self._maps) >= _KEPT_MAPS:
            self._maps = {}  # a new dictionary: another thread may be reading the old one
        encoded = encode(tensor_map, address)
        self._maps[number, address] = found = ctypes.addressof(encoded), encoded
        return found


def _bytes(buffer: Buffer) -> int:
    size = ITEMSIZE[buffer.dtype]
    for n in buffer.shape:
        size *= n
    return size


def _dtype(name: str) -> Any:
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
