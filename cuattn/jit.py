"""Raw CUDA sources to loaded kernels: NVRTC through CuPy, our own cubin cache on disk, modules per device.

A cache entry is found by a hash of all that can change its bytes: the source, all headers, the defines, the
options, NVRTC's version and the architecture. Nothing here knows attention; CuPy is imported in functions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .device import forced_arch, import_cupy, import_nvrtc
from .program import Kernel

OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
_FORMAT = 1  # of cache entries


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's machine code (or PTX) and what ptxas said of it; the numbers are 0 for PTX."""

    image: bytes
    registers: int
    spill_bytes: int  # stores and loads
    shared_memory: int  # static, bytes
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A loaded kernel. ``handle`` is the CUfunction of one device; ``module`` keeps it alive."""

    handle: int
    compiled: Compiled
    module: Any


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``CUATTN_CACHE_DIR``, or the user's cache folder."""
    chosen = os.environ.get("CUATTN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("cuattn", appauthor=False))


@functools.cache
def sources() -> dict[str, str]:
    """All of ``kernels_cu`` by file name."""
    folder = Path(__file__).parent / "kernels_cu"
    return {p.name: p.read_text() for p in sorted(folder.iterdir()) if p.suffix in (".cu", ".cuh")}


@functools.cache
def _files(source: str) -> dict[str, str]:
    """A source's own file, first, and every header that it includes, directly or not, by file name."""
    found: dict[str, str] = {}
    names = [f"{source}.cu"]
    for name in names:
        if name not in found:
            found[name] = sources()[name]
            names += re.findall(r'^\s*#\s*include\s+"([^"]+)"', found[name], re.MULTILINE)
    return found


@functools.cache
def _files_digest(source: str) -> bytes:
    return hashlib.sha256(repr(sorted(_files(source).items())).encode()).digest()


def target(arch: int) -> str:
    """NVRTC's name of an architecture: sm_90a for Hopper's own instructions; compute_* when it is forced."""
    if forced_arch() == arch:
        return f"compute_{arch}"
    return f"sm_{arch}a" if arch == 90 else f"sm_{arch}"


def key(kernel: Kernel, arch: int) -> str:
    """The cache key: a hash of all that decides the machine code."""
    facts = (_FORMAT, kernel.entry, kernel.defines, OPTIONS, import_nvrtc().getVersion(), target(arch))
    return hashlib.sha256(repr(facts).encode() + _files_digest(kernel.source)).hexdigest()


def build(kernel: Kernel, arch: int) -> Compiled:
    """Compile now, whatever the cache holds. Needs neither a GPU nor a driver. Raises ``CompileError``."""
    nvrtc = import_nvrtc()
    (file, text), *headers = _files(kernel.source).items()
    names, texts = [x.encode() for x, _ in headers], [x.encode() for _, x in headers]
    program = nvrtc.createProgram(text, file, texts, names)
    try:
        defines = (f"-D{name}={value}" for name, value in kernel.defines)
        options = [f"-arch={target(arch)}", *OPTIONS, *defines]
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CompileError(f"{file} for {target(arch)}: {error}\n{log}") from None
        log = nvrtc.getProgramLog(program)
        if target(arch).startswith("compute"):
            ptx = nvrtc.getPTX(program)
            image = ptx.encode() if isinstance(ptx, str) else ptx
        else:
            image = nvrtc.getCUBIN(program) + b"\0"  # NOTE: CuPy 14.2 drops the last byte
    finally:
        nvrtc.destroyProgram(program)
    return Compiled(image, *read_log(log))


def read_log(log: str) -> tuple[int, int, int, tuple[str, ...]]:
    """Registers, spilled bytes, static shared memory and warnings out of NVRTC's and ptxas's log."""
    registers = sum(int(n) for n in re.findall(r"Used (\d+) registers", log))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    shared = sum(int(n) for n in re.findall(r"(\d+) bytes smem", log))
    lines = tuple(line.strip() for line in log.splitlines() if "warning" in line.lower() or "C75" in line)
    return registers, spills, shared, lines


_memory: dict[tuple[Kernel, str], Compiled] = {}


def compiled(kernel: Kernel, arch: int) -> Compiled:
    """The kernel out of memory, the disk cache, or the compiler (which then fills both)."""
    name = (kernel, target(arch))
    found = _memory.get(name)
    if found is None:
        entry = key(kernel, arch)
        found = _read(entry)
        if found is None:
            found = build(kernel, arch)
            _write(entry, found)
        _memory[name] = found
    return found


def compile_all(kernels: Iterable[tuple[Kernel, int]]) -> list[Compiled]:
    """Compile (kernel, architecture) pairs side by side on the machine's cores; in the pairs' order."""
    wanted = list(kernels)
    if len(wanted) < 2:
        return [compiled(kernel, arch) for kernel, arch in wanted]
    with ThreadPoolExecutor(max(1, min(len(wanted), os.cpu_count() or 1))) as pool:
        return list(pool.map(lambda pair: compiled(*pair), wanted))


# ---- the disk cache: <key>.json names the image file by its hash, so no reader sees half an entry ----


def _image_path(entry: str, digest: str) -> Path:
    return cache_folder() / f"{entry}-{digest[:16]}.bin"


def _read(entry: str) -> Compiled | None:
    """An entry whose image is whole; None when there is none or it is damaged."""
    try:
        facts = json.loads((cache_folder() / f"{entry}.json").read_text())
        digest = facts.pop("sha256")
        image = _image_path(entry, digest).read_bytes()
        facts["warnings"] = tuple(facts["warnings"])
        found = Compiled(image=image, **facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return found if hashlib.sha256(image).hexdigest() == digest else None


def _write(entry: str, result: Compiled) -> None:
    """Write an entry, image first; without a writable folder nothing is kept."""
    facts = asdict(result)
    image = facts.pop("image")
    facts["sha256"] = hashlib.sha256(image).hexdigest()
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        _replace(_image_path(entry, facts["sha256"]), image)
        _replace(cache_folder() / f"{entry}.json", json.dumps(facts).encode())
    except OSError:
        pass  # a read-only home: this process keeps what it compiled in memory


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that another process sees all of it or none."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


# ---- loading ----

_functions: dict[tuple[Kernel, int], Function] = {}
_loading = threading.Lock()


def get_function(kernel: Kernel, device: int, arch: int) -> Function:
    """The kernel loaded on a device (its CUDA index), compiled for ``arch`` if need be."""
    found = _functions.get((kernel, device))
    if found is None:
        result = compiled(kernel, arch)
        with _loading:
            found = _functions.get((kernel, device)) or _load(kernel, result, device, arch)
            _functions[kernel, device] = found
    return found


def _load(kernel: Kernel, result: Compiled, device: int, arch: int) -> Function:
    cupy = import_cupy()
    path = _image_path(key(kernel, arch), hashlib.sha256(result.image).hexdigest())
    with cupy.cuda.Device(device), tempfile.TemporaryDirectory() as folder:
        try:
            whole = path.read_bytes() == result.image
        except OSError:
            whole = False
        if not whole:  # no cache that keeps files
            path = Path(folder) / path.name
            path.write_bytes(result.image)
        module = cupy.RawModule(path=str(path))
        handle = module.get_function(kernel.entry).kernel.ptr
    return Function(handle, result, module)


def loaded() -> Sequence[tuple[Kernel, int]]:
    """What has been loaded in this process: (kernel, device) pairs."""
    return tuple(_functions)
