"""Machine code of the CPU backend: compiled by Numba once, kept as an object file, loaded by LLVM alone.

A cache entry's name has in it everything that changes the code: our sources, the versions of Numba and
llvmlite, the CPU's name and features. Entries are written whole and renamed; one that is torn is made again.
A process that finds its entries never imports Numba. Knows no attention.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm

from .cpu_team import PLACES, PLACES_SYMBOL

if TYPE_CHECKING:
    from collections.abc import Iterator

Body = Callable[[int, int], None]
DRAIN = "drain"  # the team's loop, beside the entries of ``cpu_tiles.build``
SOURCES = (
    "cpu_backward.py",
    "cpu_code.py",
    "cpu_decode.py",
    "cpu_drain.py",
    "cpu_layout.py",
    "cpu_native.py",
    "cpu_scores.py",
    "cpu_simd.py",
    "cpu_small.py",
    "cpu_team.py",
    "cpu_tiles.py",
    "../interop/native.py",
    "../params.py",
)
LONG = ("forward", "backward", "bias_gradient")  # loops that take seconds to compile
NOTICE_AFTER = 2.0  # seconds of compiling until a line says so
_MAGIC = b"cuattn1\n"
_lock = threading.RLock()
_functions: dict[str, Body] = {}
_addresses: dict[str, int] = {}
_engines: list[Any] = []  # they own the code


def host_entry(name: str) -> int:
    """Address of the C function ``void body(int64 params, int64 tile)`` of an entry; compiles it at need.

    Names are those of ``cpu_tiles.build``. Safe from any thread; the address is good for this process alone.
    """
    address = _addresses.get(name)
    if address is None:
        with _lock:
            if name not in _addresses:
                _addresses[name] = _load(name, _object(name))
            address = _addresses[name]
    return address


def host_entries(names: Sequence[str]) -> list[int]:
    """Addresses of several entries; if more than one takes long to compile, other processes do their part."""
    long = [n for n in names if n.partition(".")[0] in LONG and n not in _addresses and not is_kept(n)]
    aside = [process for name in long[1:] if (process := compile_aside(name)) is not None]
    for name in long[:1]:
        host_entry(name)
    for process in aside:
        process.wait()  # whatever came of it: what is not kept is compiled here
    return [host_entry(name) for name in names]


def is_kept(name: str) -> bool:
    """Whether the cache has the entry, as these sources and this machine make it."""
    folder = cache_directory()
    return folder is not None and (folder / f"{name}-{_key()}.o").exists()


def compile_aside(name: str, quiet: bool = False) -> subprocess.Popen[bytes] | None:
    """Another Python that compiles an entry into the cache; None without a cache or such a program.

    ``quiet``: without the notice that compiling takes long, and without what goes wrong.
    """
    if cache_directory() is None or not Path(sys.executable or "").name.startswith("python"):
        return None
    code = f"from {__name__} import _object; _object({name!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if quiet else None,
        )
    except OSError:
        return None


def host_function(name: str) -> Body:
    """The entry as a Python callable that releases the GIL."""
    function = _functions.get(name)
    if function is None:
        function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(host_entry(name))
        _functions[name] = function
    return function


@cache
def features() -> frozenset[str]:
    """What the CPU has, by LLVM's names; ``CUATTN_CPU_FEATURES=-avx512,-fma`` takes away what begins so."""
    found = {name for name, has in llvm.get_host_cpu_features().items() if has}
    for change in os.environ.get("CUATTN_CPU_FEATURES", "").split(","):
        if change.startswith("-"):
            found = {name for name in found if not name.startswith(change[1:])}
    return frozenset(found)


@cache
def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    known = llvm.get_host_cpu_features()
    flags = ",".join(("+" if name in features() else "-") + name for name in sorted(known))
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=flags, opt=3, jit=True, codemodel="jitdefault",
        reloc="static" if target.name.startswith("x86") else "default",
    )  # fmt: skip


@cache
def _key() -> str:
    parts = [
        repr((sorted(features()), llvm.get_host_cpu_name(), llvm.get_default_triple(), sys.version_info[:2]))
    ]
    parts += [f"{name} {metadata.version(name)}" for name in ("numba", "llvmlite")]
    parts += [(Path(__file__).parent / name).read_text() for name in SOURCES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@cache
def cache_directory() -> Path | None:
    """Where entries are kept: ``CUATTN_CACHE_DIR``, the user's cache folder or a temporary one, if any."""
    user = os.environ.get("CUATTN_CACHE_DIR")
    places = [Path(user)] if user else []
    if not user:
        import platformdirs

        places.append(Path(platformdirs.user_cache_dir("cuattn", appauthor=False)))
    places.append(Path(tempfile.gettempdir()) / f"cuattn-{os.getuid() if hasattr(os, 'getuid') else 'user'}")
    for place in places:
        folder = place / "cpu"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            mine = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
            if mine:  # nobody else's code is run
                with tempfile.TemporaryFile(dir=folder):
                    return folder
        except OSError:
            continue
    return None


def _object(name: str) -> bytes:
    """The entry's object file, from disk or from the compiler."""
    folder = cache_directory()
    path = folder / f"{name}-{_key()}.o" if folder else None
    if path is not None:
        found = _read(path)
        if found is not None:
            return found
    with _notice(name):
        code = _compile(name)
    if path is not None:
        _write(path, code)
    return code


def _read(path: Path) -> bytes | None:
    """The entry, or None when it is absent or not what was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head = len(_MAGIC) + 32
    code = data[head:]
    whole = data.startswith(_MAGIC) and hashlib.sha256(code).digest() == data[len(_MAGIC) : head]
    return code if whole else None


def _write(path: Path, code: bytes) -> None:
    """Keep an entry; a full or read-only disk only means that the next process compiles again."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = file.name
            file.write(_MAGIC + hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


@contextmanager
def _notice(name: str) -> Iterator[None]:
    def say() -> None:
        sys.stderr.write(f"cuattn: compiling {name} for this CPU, once (kept in {cache_directory()})\n")
        sys.stderr.flush()

    timer = threading.Timer(NOTICE_AFTER, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _compile(name: str) -> bytes:
    """Numba's LLVM IR of the entry, with a C function around it, as an object file."""
    from numba import njit, types

    from . import cpu_drain, cpu_tiles
    from .cpu_layout import machine
    from .cpu_scores import OPTIONS

    body = cpu_drain.drain if name == DRAIN else cpu_tiles.build(name, machine())
    dispatcher = njit(types.void(types.int64, types.int64), **OPTIONS)(body)
    (compiled,) = dispatcher.overloads.values()
    inner = compiled.fndesc.mangled_name
    module = llvm.parse_assembly(next(iter(dispatcher.inspect_llvm().values())))
    module.link_in(llvm.parse_assembly(
        f'declare i32 @"{inner}"(ptr, ptr, i64, i64)\n'
        f'define void @"{_symbol(name)}"(i64 %params, i64 %tile) {{\n'
        f"  %result = alloca ptr\n  %exception = alloca ptr\n"
        f'  %status = call i32 @"{inner}"(ptr %result, ptr %exception, i64 %params, i64 %tile)\n'
        "  ret void\n}\n"
    ))  # fmt: skip
    return bytes(_target_machine().emit_object(module))


def _symbol(name: str) -> str:
    return "cuattn_" + name.replace(".", "_")


def _load(name: str, code: bytes) -> int:
    llvm.add_symbol(PLACES_SYMBOL, PLACES.ctypes.data)
    empty = llvm.parse_assembly(f'target triple = "{llvm.get_default_triple()}"')
    engine = llvm.create_mcjit_compiler(empty, _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(_symbol(name)))
