"""XLA's two handlers, CPU and CUDA, as Numba cfuncs that interpret a plan: no GIL, no host callback.

Reads C structs by the offsets of ``xla_structs.py``. Knows neither JAX nor attention; who compiles and
registers the handlers and fills the table is ``xla_ffi.py``.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .. import params
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
from .xla_structs import (
    API_ERROR_CREATE,
    API_ERROR_DESTROY,
    API_MINOR,
    API_POOL_SCHEDULE,
    API_POOL_THREADS,
    API_STREAM_GET,
    ARRAY_DATA,
    ARRAY_DTYPE,
    ARRAY_SIZE,
    ATTR_IS_ARRAY,
    ATTR_IS_STRING,
    ATTRIBUTE_DEPENDENT,
    ATTRIBUTE_VALUE,
    ATTRS_POINTERS,
    ATTRS_SIZE,
    ATTRS_TYPES,
    BLOCK_BYTES,
    BUFFER_DATA,
    BUFFERS_POINTERS,
    BUFFERS_SIZE,
    CONFIG_ATTRIBUTES,
    CONFIG_COUNT,
    CONFIG_STREAM,
    DTYPE_S64,
    ERROR_CREATE_CODE,
    ERROR_CREATE_MESSAGE,
    ERROR_DESTROY_ERROR,
    EXTENSION_IS_METADATA,
    EXTENSION_METADATA,
    EXTENSION_NEXT,
    EXTENSION_TYPE,
    FAILED_PRECONDITION,
    FRAME_API,
    FRAME_ARGS,
    FRAME_ATTRS,
    FRAME_CONTEXT,
    FRAME_EXTENSION,
    FRAME_RETS,
    FRAME_STAGE,
    HEADER,
    INTERNAL,
    INVALID_ARGUMENT,
    MAP_BYTES,
    MAPS_BYTES,
    METADATA_MAJOR,
    METADATA_MINOR,
    METADATA_TRAITS,
    SCHEDULE_CONTEXT,
    SCHEDULE_DATA,
    SCHEDULE_TASK,
    SPAN_LENGTH,
    SPAN_POINTER,
    STAGE_EXECUTE,
    STEP_HOST,
    STEP_LAUNCH,
    STEP_MEMSET,
    STREAM_GET_CONTEXT,
    STREAM_GET_STREAM,
    TENSOR_MAP_L2_256,
    TESTED_MINOR,
    THREADS_CONTEXT,
    THREADS_COUNT,
    VERSION,
)

# What the handlers look up at run time: entry points of this process, then a hash table key -> address.
(
    SLOT_RESOLVER,
    SLOT_TASK,
    SLOT_LAUNCH,
    SLOT_ENCODE,
    SLOT_MEMSET,
    SLOT_ERROR,
    SLOT_CALLS,
    SLOT_FORKED,
) = range(8)
KEYS, KEY_SLOTS = 16, 4096
TABLE: NDArray[np.int64] = np.zeros(KEYS + 2 * KEY_SLOTS, np.int64)
_table = make_symbol("cuattn_table_1", TABLE.ctypes.data)
FORKED = "cuattn: JAX was used before this process was forked; start workers with spawn"
# Tensor maps made before: [lock, address, words of the plan (20 at most), map], one for each hash.
KEPT_MAPS, KEPT_BYTES, KEPT_WORDS, KEPT_MAP = 256, 320, 16, 184
MAPS: NDArray[np.int64] = np.zeros(KEPT_MAPS * KEPT_BYTES // 8, np.int64)
_maps = make_symbol("cuattn_maps_1", MAPS.ctypes.data)

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
            text(FORKED),
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
# State of one loop, on the heap since a task may start after the loop has ended; counters on their own lines.
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


def pool_task(state):  # type: ignore[no-untyped-def]
    _run_tiles(state)
    _leave(state)


@_native()
def _pool_threads(frame, args):  # type: ignore[no-untyped-def]
    """Threads of XLA's pool; ``args``: 128 bytes of scratch."""
    threads = args + 64
    store64(threads, 1)
    store64(args, 32)
    store64(args + 8, 0)
    store64(args + THREADS_CONTEXT, load64(frame + FRAME_CONTEXT))
    store64(args + THREADS_COUNT, threads)
    error = call64(load64(load64(frame + FRAME_API) + API_POOL_THREADS), (args,))
    if error != 0:
        _forget_error(frame, error)
        return 1
    return load64(threads)


@_native()
def _parallel(frame, body, block, tiles):  # type: ignore[no-untyped-def]
    """body(block, tile) for every tile. The caller takes part, waits for claimed tiles only: no deadlock."""
    args = stack(128)
    helpers = min(_pool_threads(frame, args), tiles) - 1 if tiles > 1 else 0
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
        store64(args + SCHEDULE_CONTEXT, load64(frame + FRAME_CONTEXT))
        store64(args + SCHEDULE_TASK, load64(_table() + 8 * SLOT_TASK))
        store64(args + SCHEDULE_DATA, state)
        error = call64(load64(load64(frame + FRAME_API) + API_POOL_SCHEDULE), (args,))
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


def cpu_handler(frame):  # type: ignore[no-untyped-def]
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
def _encode_map(base, target, words):  # type: ignore[no-untyped-def]
    """Build one CUtensorMap of the array at ``base`` from its words in the plan; a CUresult comes back."""
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
    return call32(
        load64(_table() + 8 * SLOT_ENCODE),
        (
            target, np.int32(load64(words + 24)), np.int32(rank), base, lists, lists + 40, lists + 80,
            lists + 120, np.int32(0), np.int32(load64(words + 40)), np.int32(TENSOR_MAP_L2_256), np.int32(0),
        ),
    )  # fmt: skip


@_native()
def _tensor_map(frame, target, words):  # type: ignore[no-untyped-def]
    """A CUtensorMap from its words in the plan, or a copy of one made before; a CUresult comes back.

    Encoding costs the driver a third of a microsecond. A kept map that another thread is at is passed by.
    """
    base = _buffer(frame, load64(words + 8)) + load64(words + 16)
    count = load64(words)
    mixed = base
    for i in range(count):
        mixed = (mixed ^ load64(words + 8 * i)) * 0x100000001B3
    kept = _maps() + KEPT_BYTES * ((mixed >> 20) & (KEPT_MAPS - 1))
    if atomic_add(kept, 1) != 0:
        atomic_add(kept, -1)
        return _encode_map(base, target, words)
    same = load64(kept + 8) == base
    for i in range(count):
        same = same and load64(kept + KEPT_WORDS + 8 * i) == load64(words + 8 * i)
    result = np.int32(0)
    if same:
        for i in range(MAP_BYTES // 8):
            store64(target + 8 * i, load64(kept + KEPT_MAP + 8 * i))
    else:
        result = _encode_map(base, target, words)
        if result == 0:
            store64(kept + 8, base)
            for i in range(count):
                store64(kept + KEPT_WORDS + 8 * i, load64(words + 8 * i))
            for i in range(MAP_BYTES // 8):
                store64(kept + KEPT_MAP + 8 * i, load64(target + 8 * i))
    atomic_add(kept, -1)
    return result


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
        result = _tensor_map(frame, maps + MAP_BYTES * i, words)
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


def cuda_handler(frame):  # type: ignore[no-untyped-def]
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
