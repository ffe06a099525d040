"""XLA's foreign function interface: C structs by offset, and two handlers that run any ``Program``.

A program travels as one int64 array attribute ("plan") and one string ("kernels"); both are free of
addresses, so that compiled XLA programs may be cached on disk. The handlers are Numba cfuncs: no GIL, no
host callback, no C++ at install. Knows programs; must not know attention, specs or transformations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import cfunc, njit, types
from numpy.typing import NDArray

from .. import params
from ..errors import BackendUnavailable
from ..program import Host, Launch, Memset, Program, TensorMap
from ..spec import ITEMSIZE
from .native import (
    atomic_add,
    atomic_load,
    call32,
    call64,
    free,
    load8,
    load32,
    load64,
    make_symbol,
    malloc,
    sched_yield,
    stack,
    store8,
    store32,
    store64,
    text,
)

# ------------------------------------------------------------------------------------------------
# XLA's structs, xla/ffi/api/c_api.h. Every struct begins {size_t struct_size; Extension_Base* extension_start}.
# tests/test_xla_ffi.py compares each number with the field named beside it in the installed header.
# ------------------------------------------------------------------------------------------------
# struct XLA_FFI_CallFrame { ...; const Api* api; ExecutionContext* ctx; ExecutionStage stage; Args args; Rets rets;
#                            Attrs attrs; Future* future; }
FRAME_EXTENSION = 8  # XLA_FFI_CallFrame.extension_start
FRAME_API = 16  # XLA_FFI_CallFrame.api
FRAME_CONTEXT = 24  # XLA_FFI_CallFrame.ctx
FRAME_STAGE = 32  # XLA_FFI_CallFrame.stage
FRAME_ARGS = 40  # XLA_FFI_CallFrame.args
FRAME_RETS = 80  # XLA_FFI_CallFrame.rets
FRAME_ATTRS = 120  # XLA_FFI_CallFrame.attrs
# struct XLA_FFI_Args { ...; int64_t size; ArgType* types; void** args; }, and Rets alike
BUFFERS_SIZE = 16  # XLA_FFI_Args.size
BUFFERS_POINTERS = 32  # XLA_FFI_Args.args
# struct XLA_FFI_Attrs { ...; int64_t size; AttrType* types; ByteSpan** names; void** attrs; }, sorted by name
ATTRS_SIZE = 16  # XLA_FFI_Attrs.size
ATTRS_TYPES = 24  # XLA_FFI_Attrs.types
ATTRS_POINTERS = 40  # XLA_FFI_Attrs.attrs
# struct XLA_FFI_Buffer { ...; DataType dtype; void* data; int64_t rank; int64_t* dims; }
BUFFER_DATA = 24  # XLA_FFI_Buffer.data
# struct XLA_FFI_ByteSpan { const char* ptr; size_t len; }
SPAN_POINTER = 0  # XLA_FFI_ByteSpan.ptr
SPAN_LENGTH = 8  # XLA_FFI_ByteSpan.len
# struct XLA_FFI_Array { DataType dtype; size_t size; void* data; }
ARRAY_DTYPE = 0  # XLA_FFI_Array.dtype
ARRAY_SIZE = 8  # XLA_FFI_Array.size
ARRAY_DATA = 16  # XLA_FFI_Array.data
# struct XLA_FFI_Api { ...; Api_Version api_version; const InternalApi* internal_api; <one pointer per function> }
API_MINOR = 36  # XLA_FFI_Api.api_version + XLA_FFI_Api_Version.minor_version
API_ERROR_CREATE = 48  # XLA_FFI_Api.XLA_FFI_Error_Create
API_ERROR_DESTROY = 64  # XLA_FFI_Api.XLA_FFI_Error_Destroy
API_STREAM_GET = 80  # XLA_FFI_Api.XLA_FFI_Stream_Get
API_POOL_SCHEDULE = 136  # XLA_FFI_Api.XLA_FFI_ThreadPool_Schedule
API_POOL_THREADS = 144  # XLA_FFI_Api.XLA_FFI_ThreadPool_NumThreads
# struct XLA_FFI_Error_Create_Args { ...; const char* message; Error_Code errc; }; struct_size stops after errc
ERROR_CREATE_MESSAGE = 16  # XLA_FFI_Error_Create_Args.message
ERROR_CREATE_CODE = 24  # XLA_FFI_Error_Create_Args.errc
# struct XLA_FFI_Error_Destroy_Args { ...; Error* error; }
ERROR_DESTROY_ERROR = 16  # XLA_FFI_Error_Destroy_Args.error
# struct XLA_FFI_Stream_Get_Args { ...; ExecutionContext* ctx; void* stream; }
STREAM_GET_CONTEXT = 16  # XLA_FFI_Stream_Get_Args.ctx
STREAM_GET_STREAM = 24  # XLA_FFI_Stream_Get_Args.stream
# struct XLA_FFI_ThreadPool_Schedule_Args { ...; ExecutionContext* ctx; Task* task; void* data; }
SCHEDULE_CONTEXT = 16  # XLA_FFI_ThreadPool_Schedule_Args.ctx
SCHEDULE_TASK = 24  # XLA_FFI_ThreadPool_Schedule_Args.task
SCHEDULE_DATA = 32  # XLA_FFI_ThreadPool_Schedule_Args.data
# struct XLA_FFI_ThreadPool_NumThreads_Args { ...; ExecutionContext* ctx; int64_t* num_threads; }
THREADS_CONTEXT = 16  # XLA_FFI_ThreadPool_NumThreads_Args.ctx
THREADS_COUNT = 24  # XLA_FFI_ThreadPool_NumThreads_Args.num_threads
# struct XLA_FFI_Extension_Base { size_t struct_size; Extension_Type type; Extension_Base* next; }
EXTENSION_TYPE = 8  # XLA_FFI_Extension_Base.type
EXTENSION_NEXT = 16  # XLA_FFI_Extension_Base.next
# struct XLA_FFI_Metadata_Extension { Extension_Base extension_base; Metadata* metadata; }
EXTENSION_METADATA = 24  # XLA_FFI_Metadata_Extension.metadata
# struct XLA_FFI_Metadata { size_t struct_size; Api_Version api_version; Handler_Traits traits; ... }
METADATA_MAJOR = 24  # XLA_FFI_Metadata.api_version + XLA_FFI_Api_Version.major_version
METADATA_MINOR = 28  # XLA_FFI_Metadata.api_version + XLA_FFI_Api_Version.minor_version
METADATA_TRAITS = 32  # XLA_FFI_Metadata.traits

STAGE_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
EXTENSION_IS_METADATA = 1  # XLA_FFI_Extension_Metadata
ATTR_IS_ARRAY = 1  # XLA_FFI_AttrType_ARRAY
ATTR_IS_STRING = 4  # XLA_FFI_AttrType_STRING
DTYPE_S64 = 5  # XLA_FFI_DataType_S64
INVALID_ARGUMENT = 3  # XLA_FFI_Error_Code_INVALID_ARGUMENT
FAILED_PRECONDITION = 9  # XLA_FFI_Error_Code_FAILED_PRECONDITION
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
TESTED_MINOR = 5  # the newest API minor version whose structs were compared with these

# CUDA's driver API, cuda.h (12.4 and newer)
# typedef struct { unsigned gridDimX, Y, Z, blockDimX, Y, Z, sharedMemBytes; CUstream hStream; CUlaunchAttribute* attrs;
#                  unsigned numAttrs; } CUlaunchConfig;
CONFIG_STREAM, CONFIG_ATTRIBUTES, CONFIG_COUNT = 32, 40, 48
# typedef struct { CUlaunchAttributeID id; char pad[4]; CUlaunchAttributeValue value /* 64 bytes */; } CUlaunchAttribute;
ATTRIBUTE_VALUE = 8
ATTRIBUTE_DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
TENSOR_MAP_DTYPES = {  # CUtensorMapDataType
    "uint8": 0, "int32": 3, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
TENSOR_MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
TENSOR_MAP_L2_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
MAP_BYTES, MAX_MAPS, MAX_RANK = 128, 8, 5
MAPS_BYTES = MAP_BYTES * MAX_MAPS

# ------------------------------------------------------------------------------------------------
# The plan: what the handlers interpret. A buffer is an index into arguments, then results.
#   [version, steps, arguments, results] then per step [kind, words, ...]:
#   MEMSET  buffer, bytes
#   HOST    key, tiles, n, n x (word of the parameter block, buffer), block
#   LAUNCH  key, grid x 3, block, shared memory, dependent, n, maps, n x (word, buffer), block, maps x
#           [words, buffer, offset, dtype, rank, swizzle, dims[rank], strides[rank - 1], box[rank]]
# ------------------------------------------------------------------------------------------------
HEADER, STEP_MEMSET, STEP_HOST, STEP_LAUNCH = 4, 1, 2, 3
BLOCK_BYTES = 8 * params.WORDS
VERSION = int.from_bytes(hashlib.sha256(repr(("plan 1", params.FIELDS)).encode()).digest()[:6], "little")

# What the handlers look up at run time: entry points of this process, then a hash table key -> address.
SLOT_RESOLVER, SLOT_TASK, SLOT_LAUNCH, SLOT_ENCODE, SLOT_MEMSET, SLOT_ERROR, SLOT_CALLS, SLOT_FORKED = range(
    8
)
KEYS, KEY_SLOTS = 16, 4096
TABLE: NDArray[np.int64] = np.zeros(KEYS + 2 * KEY_SLOTS, np.int64)
_table = make_symbol("cuattn_table_1", TABLE.ctypes.data)
_lock = threading.RLock()

_native = functools.partial(njit, error_model="numpy", nogil=True)


@_native()
def _error(frame, code, message):  # type: ignore[no-untyped-def]
    """An XLA_FFI_Error* with a NUL-terminated message."""
    args = stack(32)
    store64(args, 28)
    store64(args + 8, 0)
    store64(args + ERROR_CREATE_MESSAGE, message)
    store32(args + ERROR_CREATE_CODE, np.int32(code))
    return call64(load64(load64(frame + FRAME_API) + API_ERROR_CREATE), (args,))


@_native()
def _append(buffer, used, source):  # type: ignore[no-untyped-def]
    """Append a C string to a buffer of 512 bytes; the new length."""
    i = 0
    while used < 510 and load8(source + i) != 0:
        store8(buffer + used, load8(source + i))
        used += 1
        i += 1
    store8(buffer + used, np.uint8(0))
    return used


@_native()
def _driver_error(frame, what, result):  # type: ignore[no-untyped-def]
    """The driver's own words for a CUresult."""
    buffer, pointer = stack(512), stack(8)
    store64(pointer, 0)
    used = _append(buffer, 0, what)
    if load64(_table() + 8 * SLOT_ERROR) != 0:
        call32(load64(_table() + 8 * SLOT_ERROR), (result, pointer))
    if load64(pointer) != 0:
        used = _append(buffer, used, load64(pointer))
    return _error(frame, INTERNAL, buffer)


@_native()
def _forget_error(frame, error):  # type: ignore[no-untyped-def]
    args = stack(32)
    store64(args, 24)
    store64(args + 8, 0)
    store64(args + ERROR_DESTROY_ERROR, error)
    call64(load64(load64(frame + FRAME_API) + API_ERROR_DESTROY), (args,))


@_native()
def _answer_metadata(frame, traits):  # type: ignore[no-untyped-def]
    """True if this call only asks which API version and traits the handler has (at registration)."""
    extension = load64(frame + FRAME_EXTENSION)
    while extension != 0:
        if load32(extension + EXTENSION_TYPE) == EXTENSION_IS_METADATA:
            metadata, api = load64(extension + EXTENSION_METADATA), load64(frame + FRAME_API)
            minor = np.int32(1)
            if api != 0:
                minor = min(load32(api + API_MINOR), np.int32(TESTED_MINOR))
            store32(metadata + METADATA_MAJOR, np.int32(0))
            store32(metadata + METADATA_MINOR, minor)
            store32(metadata + METADATA_TRAITS, np.int32(traits))
            return True
        extension = load64(extension + EXTENSION_NEXT)
    return False


@_native()
def _find(key):  # type: ignore[no-untyped-def]
    """The address registered under a key, or 0."""
    keys = _table() + 8 * KEYS
    for i in range(KEY_SLOTS):
        slot = keys + 16 * ((key + i) % KEY_SLOTS)
        found = atomic_load(slot)
        if found == key:
            return load64(slot + 8)
        if found == 0:
            return 0
    return 0


@_native()
def _find_or_resolve(frame, key):  # type: ignore[no-untyped-def]
    """As ``_find``; a miss (a program that this process did not trace) asks Python once. (address, error)"""
    address = _find(key)
    if address != 0:
        return address, 0
    span = load64(load64(frame + FRAME_ATTRS + ATTRS_POINTERS))
    message = call64(
        load64(_table() + 8 * SLOT_RESOLVER), (load64(span + SPAN_POINTER), load64(span + SPAN_LENGTH))
    )
    if message != 0:
        return 0, _error(frame, FAILED_PRECONDITION, message)
    address = _find(key)
    if address == 0:
        return 0, _error(
            frame,
            FAILED_PRECONDITION,
            text("cuattn: this program was made by another version of cuattn; trace or export it again"),
        )
    return address, 0


@_native()
def _buffer(frame, index):  # type: ignore[no-untyped-def]
    """Data pointer of the index-th buffer, arguments first."""
    arguments = load64(frame + FRAME_ARGS + BUFFERS_SIZE)
    base = load64(frame + FRAME_ARGS + BUFFERS_POINTERS) + 8 * index
    if index >= arguments:
        base = load64(frame + FRAME_RETS + BUFFERS_POINTERS) + 8 * (index - arguments)
    return load64(load64(base) + BUFFER_DATA)


@_native()
def _plan(frame):  # type: ignore[no-untyped-def]
    """Address of the checked plan and an error, one of which is 0."""
    attrs, kinds = frame + FRAME_ATTRS, load64(frame + FRAME_ATTRS + ATTRS_TYPES)
    if load64(_table() + 8 * SLOT_FORKED) != 0:
        return 0, _error(
            frame,
            FAILED_PRECONDITION,
            text("cuattn: JAX was used before this process was forked; start workers with spawn"),
        )
    if (
        load64(attrs + ATTRS_SIZE) != 2
        or load32(kinds) != ATTR_IS_STRING
        or load32(kinds + 4) != ATTR_IS_ARRAY
    ):
        return 0, _error(
            frame, INVALID_ARGUMENT, text("cuattn: expected the attributes 'kernels' and 'plan'")
        )
    array = load64(load64(attrs + ATTRS_POINTERS) + 8)
    plan = load64(array + ARRAY_DATA)
    if load32(array + ARRAY_DTYPE) != DTYPE_S64 or load64(array + ARRAY_SIZE) < HEADER:
        return 0, _error(frame, INVALID_ARGUMENT, text("cuattn: 'plan' must be an int64 array"))
    if load64(plan) != VERSION:
        return 0, _error(
            frame,
            FAILED_PRECONDITION,
            text("cuattn: this program was made by another version of cuattn; trace or export it again"),
        )
    if load64(plan + 16) != load64(frame + FRAME_ARGS + BUFFERS_SIZE) or load64(plan + 24) != load64(
        frame + FRAME_RETS + BUFFERS_SIZE
    ):
        return 0, _error(
            frame, INVALID_ARGUMENT, text("cuattn: wrong number of arguments or results for the plan")
        )
    atomic_add(_table() + 8 * SLOT_CALLS, 1)
    return plan, 0


@_native()
def _patched_block(frame, block, pointers, count):  # type: ignore[no-untyped-def]
    """Copy the parameter block that follows the pointer list, filling in addresses."""
    source = pointers + 16 * count
    for i in range(params.WORDS):
        store64(block + 8 * i, load64(source + 8 * i))
    for i in range(count):
        store64(block + 8 * load64(pointers + 16 * i), _buffer(frame, load64(pointers + 16 * i + 8)))


# ------------------------------------------------------------------------------------------------
# CPU: tiles on XLA's own thread pool
# ------------------------------------------------------------------------------------------------
# State of one loop, on the heap since a task may start after the loop has ended; counters on lines of their own.
LOOP_NEXT, LOOP_DONE, LOOP_OWNERS, LOOP_TILES, LOOP_BODY, LOOP_PARAMS, LOOP_BYTES = (
    0,
    64,
    128,
    192,
    200,
    208,
    256,
)


@_native()
def _run_tiles(state):  # type: ignore[no-untyped-def]
    tiles, body, block = (
        load64(state + LOOP_TILES),
        load64(state + LOOP_BODY),
        load64(state + LOOP_PARAMS),
    )
    tile = atomic_add(state + LOOP_NEXT, 1)
    while tile < tiles:
        call64(body, (block, tile))
        atomic_add(state + LOOP_DONE, 1)
        tile = atomic_add(state + LOOP_NEXT, 1)


@_native()
def _leave(state):  # type: ignore[no-untyped-def]
    if atomic_add(state + LOOP_OWNERS, -1) == 1:
        free(state)


def _pool_task(state):  # type: ignore[no-untyped-def]
    _run_tiles(state)
    _leave(state)


@_native()
def _parallel(frame, body, block, tiles):  # type: ignore[no-untyped-def]
    """body(block, tile) for every tile. The caller takes part and waits for claimed tiles only: no deadlock."""
    api, context = load64(frame + FRAME_API), load64(frame + FRAME_CONTEXT)
    args, threads = stack(64), stack(64)
    store64(threads, 1)
    store64(args, 32)
    store64(args + 8, 0)
    store64(args + THREADS_CONTEXT, context)
    store64(args + THREADS_COUNT, threads)
    error = call64(load64(api + API_POOL_THREADS), (args,))
    helpers = min(load64(threads), tiles) - 1
    if error != 0:
        _forget_error(frame, error)
        helpers = 0
    if helpers <= 0:
        for tile in range(tiles):
            call64(body, (block, tile))
        return
    state = malloc(LOOP_BYTES)
    store64(state + LOOP_NEXT, 0)
    store64(state + LOOP_DONE, 0)
    store64(state + LOOP_OWNERS, helpers + 1)
    store64(state + LOOP_TILES, tiles)
    store64(state + LOOP_BODY, body)
    store64(state + LOOP_PARAMS, block)
    for _ in range(helpers):
        store64(args, 40)
        store64(args + 8, 0)
        store64(args + SCHEDULE_CONTEXT, context)
        store64(args + SCHEDULE_TASK, load64(_table() + 8 * SLOT_TASK))
        store64(args + SCHEDULE_DATA, state)
        error = call64(load64(api + API_POOL_SCHEDULE), (args,))
        if error != 0:
            _forget_error(frame, error)
            _leave(state)
    _run_tiles(state)
    while atomic_load(state + LOOP_DONE) < tiles:
        sched_yield()
    _leave(state)


@_native()
def _zero(address, size):  # type: ignore[no-untyped-def]
    for i in range(size // 8):
        store64(address + 8 * i, 0)
    for i in range(size // 8 * 8, size):
        store8(address + i, np.uint8(0))


def _cpu_handler(frame):  # type: ignore[no-untyped-def]
    if _answer_metadata(frame, 0):
        return 0
    if load32(frame + FRAME_STAGE) != STAGE_EXECUTE:
        return 0
    plan, error = _plan(frame)
    if error != 0:
        return error
    block = stack(BLOCK_BYTES)
    step = plan + 8 * HEADER
    for _ in range(load64(plan + 8)):
        kind = load64(step)
        if kind == STEP_MEMSET:
            _zero(_buffer(frame, load64(step + 16)), load64(step + 24))
        elif kind == STEP_HOST:
            body, error = _find_or_resolve(frame, load64(step + 16))
            if error != 0:
                return error
            _patched_block(frame, block, step + 40, load64(step + 32))
            _parallel(frame, body, block, load64(step + 24))
        else:
            return _error(frame, INVALID_ARGUMENT, text("cuattn: this plan is not for the CPU"))
        step += 8 * load64(step + 8)
    return 0


# ------------------------------------------------------------------------------------------------
# CUDA: launches on XLA's stream
# ------------------------------------------------------------------------------------------------
@_native()
def _encode_map(frame, target, words):  # type: ignore[no-untyped-def]
    """Build one CUtensorMap from its words in the plan; a CUresult comes back."""
    lists = stack(
        192
    )  # u64 dims[5] at 0, u64 strides[4] at 40, u32 box[5] at 80, u32 element strides[5] at 120
    rank = load64(words + 32)
    dims = words + 48
    for i in range(rank):
        store64(lists + 8 * i, load64(dims + 8 * i))
        store32(lists + 80 + 4 * i, np.int32(load64(dims + 8 * (2 * rank - 1 + i))))
        store32(lists + 120 + 4 * i, np.int32(1))
    for i in range(rank - 1):
        store64(lists + 40 + 8 * i, load64(dims + 8 * (rank + i)))
    base = _buffer(frame, load64(words + 8)) + load64(words + 16)
    return call32(
        load64(_table() + 8 * SLOT_ENCODE),
        (
            target, np.int32(load64(words + 24)), np.int32(rank), base, lists, lists + 40, lists + 80, lists + 120,
            np.int32(0), np.int32(load64(words + 40)), np.int32(TENSOR_MAP_L2_256), np.int32(0),
        ),
    )  # fmt: skip


@_native()
def _launch(frame, stream, step):  # type: ignore[no-untyped-def]
    """Issue one LAUNCH step; an error or 0."""
    block, arguments, maps = stack(BLOCK_BYTES), stack(128), stack(MAPS_BYTES)
    config, attribute = stack(64), stack(128)
    kernel, error = _find_or_resolve(frame, load64(step + 16))
    if error != 0:
        return error
    pointers, n_maps = load64(step + 72), load64(step + 80)
    _patched_block(frame, block, step + 88, pointers)
    store64(arguments, block)
    words = step + 88 + 16 * pointers + BLOCK_BYTES
    for i in range(n_maps):
        result = _encode_map(frame, maps + MAP_BYTES * i, words)
        if result != 0:
            return _driver_error(frame, text("cuattn: cuTensorMapEncodeTiled: "), result)
        store64(arguments + 8 + 8 * i, maps + MAP_BYTES * i)
        words += 8 * load64(words)
    for i in range(4):
        store32(config + 4 * i, np.int32(load64(step + 24 + 8 * i)))
    store32(config + 16, np.int32(1))
    store32(config + 20, np.int32(1))
    store32(config + 24, np.int32(load64(step + 56)))
    store64(config + CONFIG_STREAM, stream)
    store64(config + CONFIG_ATTRIBUTES, attribute)
    store32(config + CONFIG_COUNT, np.int32(load64(step + 64)))
    store64(attribute, ATTRIBUTE_DEPENDENT)
    store64(attribute + ATTRIBUTE_VALUE, 1)
    result = call32(load64(_table() + 8 * SLOT_LAUNCH), (config, kernel, arguments, np.int64(0)))
    if result != 0:
        return _driver_error(frame, text("cuattn: cuLaunchKernelEx: "), result)
    return 0


def _cuda_handler(frame):  # type: ignore[no-untyped-def]
    if _answer_metadata(frame, 1):  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
        return 0
    if load32(frame + FRAME_STAGE) != STAGE_EXECUTE:
        return 0
    plan, error = _plan(frame)
    if error != 0:
        return error
    args = stack(32)
    store64(args, 32)
    store64(args + 8, 0)
    store64(args + STREAM_GET_CONTEXT, load64(frame + FRAME_CONTEXT))
    store64(args + STREAM_GET_STREAM, 0)
    error = call64(load64(load64(frame + FRAME_API) + API_STREAM_GET), (args,))
    if error != 0:
        return error
    stream = load64(args + STREAM_GET_STREAM)
    step = plan + 8 * HEADER
    for _ in range(load64(plan + 8)):
        kind = load64(step)
        if kind == STEP_LAUNCH:
            error = _launch(frame, stream, step)
            if error != 0:
                return error
        elif kind == STEP_MEMSET:
            if load64(step + 24) > 0:
                result = call32(
                    load64(_table() + 8 * SLOT_MEMSET),
                    (_buffer(frame, load64(step + 16)), np.int32(0), load64(step + 24), stream),
                )
                if result != 0:
                    return _driver_error(frame, text("cuattn: cuMemsetD8Async: "), result)
        else:
            return _error(frame, INVALID_ARGUMENT, text("cuattn: this plan is not for a GPU"))
        step += 8 * load64(step + 8)
    return 0


# ------------------------------------------------------------------------------------------------
# Python's side: compile, register, encode
# ------------------------------------------------------------------------------------------------
class Encoded(NamedTuple):
    """A program as attributes of an FFI call, and the sizes of its extra results in bytes."""

    plan: NDArray[np.int64]
    kernels: str
    workspace: tuple[int, ...]


def key_of(*name: object) -> int:
    """A stable, positive 62-bit key of a compiled thing's name."""
    digest = hashlib.sha256(json.dumps([VERSION, *name]).encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 2) | 1


def put(key: int, address: int) -> None:
    """Make an address known to the handlers. Safe while they run."""
    with _lock:
        for i in range(KEY_SLOTS):
            slot = KEYS + 2 * ((key + i) % KEY_SLOTS)
            if TABLE[slot] in (0, key):
                TABLE[slot + 1] = address
                TABLE[slot] = key
                return
    raise RuntimeError(f"more than {KEY_SLOTS} kernels in one process")


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a C-contiguous array."""
    return math.prod(shape) * (1 if dtype == "uint8" else ITEMSIZE[dtype])


def encode(program: Program, arch: int | None = None) -> Encoded:
    """Encode a program; ``arch`` (90 for compute capability 9.0) for one that has CUDA launches.

    The call's arguments are ``program.inputs`` in order; its results the outputs, then the workspace.
    """
    written = [*program.outputs, *program.workspace]
    index = {name: i for i, name in enumerate([*program.inputs, *(b.name for b in written)])}
    size = {b.name: nbytes(b.shape, b.dtype) for b in written}
    steps = [s for s in program.steps if not _is_empty(s)]
    words = [VERSION, len(steps), len(program.inputs), len(written)]
    hosts: list[str] = []
    kernels: list[Any] = []
    for step in steps:
        if isinstance(step, Memset):
            words += [STEP_MEMSET, 4, index[step.buffer], size[step.buffer]]
            continue
        pointers = [w for field, name in step.pointers for w in (params.INDEX[field], index[name])]
        block = np.frombuffer(step.block_words, "<i8").tolist()
        if isinstance(step, Host):
            hosts.append(step.entry)
            body = [key_of("host", step.entry), step.tiles, len(step.pointers), *pointers, *block]
            words += [STEP_HOST, 2 + len(body), *body]
        else:
            assert len(step.tensor_maps) <= MAX_MAPS
            maps = [_map_words(m, index[m.buffer]) for m in step.tensor_maps]
            name = [step.kernel.source, step.kernel.entry, [list(d) for d in step.kernel.defines]]
            kernels.append(name)
            body = [
                key_of("cuda", arch, *name),
                *step.grid,
                step.block,
                step.shared_memory,
                int(step.dependent),
            ]
            body += [len(step.pointers), len(maps), *pointers, *block, *(w for m in maps for w in m)]
            words += [STEP_LAUNCH, 2 + len(body), *body]
    table = {"host": hosts} if arch is None else {"arch": arch, "cuda": kernels}
    return Encoded(
        np.array(words, np.int64), json.dumps(table), tuple(size[b.name] for b in program.workspace)
    )


def _is_empty(step: Launch | Memset | Host) -> bool:
    if isinstance(step, Host):
        return step.tiles == 0
    return isinstance(step, Launch) and 0 in step.grid


def _map_words(tensor_map: TensorMap, buffer: int) -> list[int]:
    rank = len(tensor_map.dims)
    assert 1 <= rank <= MAX_RANK and len(tensor_map.strides) == rank - 1 and len(tensor_map.box) == rank
    words = [buffer, tensor_map.offset, TENSOR_MAP_DTYPES[tensor_map.dtype], rank]
    words += [TENSOR_MAP_SWIZZLES[tensor_map.swizzle]]
    words += [*tensor_map.dims, *tensor_map.strides, *tensor_map.box]
    return [1 + len(words), *words]


def resolve(kernels: str) -> None:
    """Compile and load whatever a program's ``kernels`` attribute names and this process lacks."""
    table = json.loads(kernels)
    with _lock:
        for entry in table.get("host", ()):
            key = key_of("host", entry)
            if not _known(key):
                from ..backends import numba as cpu

                put(key, cpu.host_entry(entry))
        missing = [n for n in table.get("cuda", ()) if not _known(key_of("cuda", table["arch"], *n))]
        if missing:
            from . import libcuda

            for name, address in zip(missing, libcuda.load(missing, table["arch"]), strict=True):
                put(key_of("cuda", table["arch"], *name), address)


def _known(key: int) -> bool:
    return any(TABLE[KEYS + 2 * i] == key for i in _probes(key))


def _probes(key: int) -> Iterator[int]:
    for i in range(KEY_SLOTS):
        slot = (key + i) % KEY_SLOTS
        yield slot
        if TABLE[KEYS + 2 * slot] == 0:
            return


_messages: list[Any] = []  # error texts that a handler may still be reading


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
def _resolver(address: int, length: int) -> int:
    """Called by a handler that lacks a kernel: 0, or the address of a message."""
    try:
        resolve(ctypes.string_at(address, length).decode())
        return 0
    except BaseException as error:  # nothing may escape into XLA
        message = ctypes.create_string_buffer(f"cuattn: {type(error).__name__}: {error}".encode())
        _messages.append(message)
        del _messages[:-64]
        return ctypes.addressof(message)


TABLE[SLOT_RESOLVER] = ctypes.cast(_resolver, ctypes.c_void_p).value or 0


@contextmanager
def _cache_folder() -> Iterator[None]:
    """Let Numba cache machine code in our folder, one per state of these sources, unless the user chose one."""
    from ..jit import cache_folder

    chosen = numba.config.CACHE_DIR
    if not chosen:
        here = Path(__file__).parent
        digest = hashlib.sha256(b"".join((here / n).read_bytes() for n in ("native.py", "xla_ffi.py")))
        numba.config.CACHE_DIR = str(cache_folder() / f"numba-{digest.hexdigest()[:16]}")
    try:
        yield
    finally:
        numba.config.CACHE_DIR = chosen


def _compile(signature: Any, function: Any) -> Any:
    """A cfunc, from the cache where that can be read or written."""
    try:
        with _cache_folder():
            return cfunc(signature, error_model="numpy", cache=True)(function)
    except (RuntimeError, OSError):  # no folder to cache in
        return cfunc(signature, error_model="numpy")(function)


@functools.cache
def _handler(name: str) -> Any:
    """The compiled handler, kept alive for good: XLA never forgets an address."""
    with _lock:
        if name == "cuattn_cuda":
            return _compile(types.int64(types.int64), _cuda_handler)
        task = _compile(types.void(types.int64), _pool_task)
        TABLE[SLOT_TASK] = task.address
        return _compile(types.int64(types.int64), _cpu_handler), task


@functools.cache
def register(platform: str) -> str:
    """Register the handler of ``"cpu"`` or ``"cuda"`` with XLA; the target's name comes back."""
    import jax

    target = f"cuattn_{platform}"
    with _lock:
        handler = _handler(target)
        if platform == "cuda":
            from . import libcuda

            for slot, name in (
                (SLOT_LAUNCH, "cuLaunchKernelEx"),
                (SLOT_ENCODE, "cuTensorMapEncodeTiled"),
                (SLOT_MEMSET, "cuMemsetD8Async"),
                (SLOT_ERROR, "cuGetErrorString"),
            ):
                TABLE[slot] = libcuda.entry_point(name)
        else:
            handler = handler[0]
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(handler.address), platform="CUDA" if platform == "cuda" else platform
        )
        os.register_at_fork(after_in_child=_mark_forked)
    return target


def _mark_forked() -> None:
    TABLE[SLOT_FORKED] = 1


def forked() -> bool:
    """Whether this process is a fork of one in which the handlers were registered: XLA's threads are gone."""
    return bool(TABLE[SLOT_FORKED])


def calls() -> int:
    """How often the handlers have run a program in this process (a captured CUDA graph replays without them)."""
    return int(TABLE[SLOT_CALLS])


__all__ = ["BackendUnavailable", "Encoded", "calls", "encode", "forked", "key_of", "put", "register", "resolve"]
