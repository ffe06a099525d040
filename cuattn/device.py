"""What a GPU is, as far as choosing kernels needs it: plain data that tests can fake. No spec, no kernels.

``CUATTN_ARCH=compute_80`` (or ``compute_75``, ...) makes every device look like that architecture: kernels
are compiled to PTX for it and the driver translates them. So older paths are tested on a newer GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
import threading
from dataclasses import dataclass, replace
from typing import Any

from .errors import BackendUnavailable

OLDEST = 75
_compiler_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU model. Sizes in bytes; ``arch`` is 10 * major + minor of the compute capability."""

    name: str
    arch: int
    sm_count: int
    shared_memory_per_block: int  # the most a block may opt in to
    shared_memory_per_sm: int
    l2_bytes: int
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048


T4 = Device("T4", 75, 40, 65536, 65536, 4 << 20, threads_per_sm=1024)
A100 = Device("A100", 80, 108, 166912, 167936, 40 << 20)
RTX4090 = Device("RTX 4090", 89, 128, 101376, 102400, 72 << 20, threads_per_sm=1536)
RTX3090 = Device("RTX 3090", 86, 82, 101376, 102400, 6 << 20, threads_per_sm=1536)
H200 = Device("H200", 90, 132, 232448, 233472, 60 << 20)
B200 = Device("B200", 100, 148, 232448, 233472, 126 << 20)
RTX5090 = Device("RTX 5090", 120, 170, 101376, 102400, 96 << 20, threads_per_sm=1536)
MODELS = {d.arch: d for d in (T4, A100, RTX3090, RTX4090, H200, B200, RTX5090)}  # one of each architecture


def forced_arch() -> int | None:
    """The architecture that ``CUATTN_ARCH`` forces; None without it."""
    value = os.environ.get("CUATTN_ARCH", "")
    if not value:
        return None
    prefix, _, number = value.partition("_")
    if prefix != "compute" or not number.isdigit():
        raise ValueError(f"CUATTN_ARCH: got {value!r}; takes compute_75, compute_80 or a newer one")
    return int(number)


def import_cupy() -> Any:
    """CuPy; an unusable home directory, where it wants a cache, does not stop it."""
    if "CUPY_CACHE_DIR" not in os.environ:
        home = os.path.expanduser("~")
        if not (os.path.isdir(home) and os.access(home, os.W_OK)):
            os.environ["CUPY_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "cuattn-cupy")
    import cupy

    return cupy


def import_nvrtc() -> Any:
    """CuPy's binding of NVRTC, loaded. NOTE: two threads that load it at once may fail."""
    with _compiler_lock:
        import_cupy()
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
        return nvrtc


@functools.cache
def unavailable() -> str | None:
    """Why no GPU can be used, with what to install; None when one can."""
    extra = "pip install 'cuattn[cuda13]' (or 'cuattn[cuda12]' for an older driver)"
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {extra}"
    try:
        cupy = import_cupy()
    except Exception as fault:  # a broken installation raises anything
        return f"CuPy does not load ({_first_line(fault)}): {extra}"
    try:
        import_nvrtc()
    except Exception as fault:
        return f"NVRTC does not load ({_first_line(fault)}): {extra}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as fault:
        return f"no usable NVIDIA driver ({_first_line(fault)}): install a driver for CUDA 12.4 or newer"
    if count == 0:
        return "the NVIDIA driver finds no GPU (is CUDA_VISIBLE_DEVICES set?)"
    found = [query(i) for i in range(count)]
    if max(d.arch for d in found) < OLDEST:
        return f"{found[0].name} is sm_{found[0].arch}: kernels need sm_{OLDEST} or newer"
    return None


def _first_line(fault: Exception) -> str:
    return f"{type(fault).__name__}: {(str(fault).strip() or 'no message').splitlines()[0]}"


def query(index: int) -> Device:
    """The device of that CUDA index, as ``CUATTN_ARCH`` has it."""
    found, forced = _query(index), forced_arch()
    if forced is None or forced == found.arch:
        return found
    if forced > found.arch:
        raise BackendUnavailable(f"CUATTN_ARCH=compute_{forced}: {found.name} is only sm_{found.arch}")
    model = MODELS.get(forced, found)
    return replace(
        found,
        arch=forced,
        shared_memory_per_block=min(found.shared_memory_per_block, model.shared_memory_per_block),
        shared_memory_per_sm=min(found.shared_memory_per_sm, model.shared_memory_per_sm),
    )


@functools.cache
def _query(index: int) -> Device:
    facts = import_cupy().cuda.runtime.getDeviceProperties(index)
    return Device(
        name=facts["name"].decode(),
        arch=10 * facts["major"] + facts["minor"],
        sm_count=facts["multiProcessorCount"],
        shared_memory_per_block=facts["sharedMemPerBlockOptin"],
        shared_memory_per_sm=facts["sharedMemPerMultiprocessor"],
        l2_bytes=facts["l2CacheSize"],
        registers_per_sm=facts["regsPerMultiprocessor"],
        threads_per_sm=facts["maxThreadsPerMultiProcessor"],
    )


def of_jax() -> Device:
    """The GPU that JAX compiles for: programs of one process run on GPUs of one model."""
    reason = unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend 'cuda' cannot run here: {reason}")
    return query(0)
