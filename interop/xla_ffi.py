"""Programs for XLA's foreign function interface: encoded, their kernels loaded, the handlers registered.

A program travels as one int64 array attribute ("plan") and one string ("kernels"); both are free of
addresses, so that compiled XLA programs may be cached on disk. The handlers (``xla_handlers.py``) are Numba
cfuncs: no C++ at install. Knows programs; must not know attention, specs or transformations.
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
from numba import cfunc, types
from numpy.typing import NDArray

from .. import params
from ..program import Host, Launch, Memset, Program, TensorMap
from ..spec import ITEMSIZE
from . import xla_handlers
from .xla_handlers import (
    FORKED,
    KEY_SLOTS,
    KEYS,
    SLOT_CALLS,
    SLOT_ENCODE,
    SLOT_ERROR,
    SLOT_FORKED,
    SLOT_LAUNCH,
    SLOT_MEMSET,
    SLOT_RESOLVER,
    SLOT_TASK,
    TABLE,
)
from .xla_structs import (
    MAX_MAPS,
    MAX_RANK,
    STEP_HOST,
    STEP_LAUNCH,
    STEP_MEMSET,
    TENSOR_MAP_DTYPES,
    TENSOR_MAP_SWIZZLES,
    VERSION,
)

_lock = threading.RLock()


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
    """Let Numba cache machine code in our folder, one for each state of the sources, unless one is chosen."""
    from ..jit import cache_folder

    chosen = numba.config.CACHE_DIR
    if not chosen:
        here = Path(__file__).parent
        digest = hashlib.sha256(
            b"".join((here / n).read_bytes() for n in ("native.py", "xla_structs.py", "xla_handlers.py"))
        )
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
            return _compile(types.int64(types.int64), xla_handlers.cuda_handler)
        task = _compile(types.void(types.int64), xla_handlers.pool_task)
        TABLE[SLOT_TASK] = task.address
        return _compile(types.int64(types.int64), xla_handlers.cpu_handler), task


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
        _watch_forks()
    return target


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_mark_forked)


def _mark_forked() -> None:
    """In a forked child, where XLA's threads are gone, let no call of ours begin.

    What JAX has compiled would hang before it reaches a handler. A changed option that is part of JAX's cache
    keys and of nothing else has it trace again, which our functions refuse (``jax_operands.py``); programs
    that were compiled ahead of time are refused by their text.
    """
    import jax

    TABLE[SLOT_FORKED] = 1
    call = jax.stages.Compiled.__call__

    def refuse_ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        program = self.as_text() or ""
        if any(f'"cuattn_{platform}"' in program for platform in ("cpu", "cuda")):
            raise RuntimeError(FORKED)
        return call(self, *args, **kwargs)

    jax.stages.Compiled.__call__ = refuse_ours
    version = getattr(jax.config, "jax_xla_profile_version", None)
    if version is not None:
        jax.config.update("jax_xla_profile_version", version + 1)


def forked() -> bool:
    """Whether this process is a fork of one in which the handlers were registered: XLA's threads are gone."""
    return bool(TABLE[SLOT_FORKED])


def calls() -> int:
    """How often the handlers have run a program in this process (a CUDA graph replays without them)."""
    return int(TABLE[SLOT_CALLS])


__all__ = ["FORKED", "Encoded", "calls", "encode", "forked", "key_of", "put", "register", "resolve"]
