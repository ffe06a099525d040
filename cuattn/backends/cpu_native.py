"""Numbers in memory, the C library and threads for the CPU backend's compiled loops, as Numba intrinsics.

Everything works on 64-bit addresses. No vectors, no attention.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..interop.native import make_symbol
from .cpu_team import PLACES, PLACES_SYMBOL

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def emit_prefetch(b: Any, pointer: Any, level: int) -> None:
    """Into the first- or second-level cache; the address need not be mapped."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    name = "llvm.prefetch.p0"
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    read, locality, data = (ir.Constant(I32, n) for n in (0, 4 - level, 1))
    b.call(function, [pointer, read, locality, data])


def _make_get(kind: Any, numba_type: Any) -> Any:
    @intrinsic
    def get(ctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return b.load(b.gep(b.inttoptr(args[0], kind.as_pointer()), [args[1]]))

        return numba_type(types.int64, types.int64), codegen

    return get


def _make_put(kind: Any, numba_type: Any) -> Any:
    @intrinsic
    def put(ctx: Any, address: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            b.store(args[2], b.gep(b.inttoptr(args[0], kind.as_pointer()), [args[1]]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), codegen

    return put


def _make_bitcast(source: tuple[Any, Any], target: tuple[Any, Any]) -> Any:
    @intrinsic
    def bitcast(ctx: Any, x: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return b.bitcast(args[0], target[1])

        return target[0](source[0]), codegen

    return bitcast


_F32, _F64 = (types.float32, ir.FloatType()), (types.float64, ir.DoubleType())
get_f32, put_f32 = _make_get(_F32[1], _F32[0]), _make_put(_F32[1], _F32[0])
get_f64, put_f64 = _make_get(_F64[1], _F64[0]), _make_put(_F64[1], _F64[0])
get_u8, put_u8 = _make_get(I8, types.uint8), _make_put(I8, types.uint8)
get_u16, put_u16 = _make_get(ir.IntType(16), types.uint16), _make_put(ir.IntType(16), types.uint16)
get_i32, put_i32 = _make_get(I32, types.int32), _make_put(I32, types.int32)
get_i64, put_i64 = _make_get(I64, types.int64), _make_put(I64, types.int64)
float_of_bits = _make_bitcast((types.uint32, I32), _F32)
bits_of_float = _make_bitcast(_F32, (types.uint32, I32))


def _libc(b: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    return b.call(function, arguments)


@intrinsic
def malloc(ctx: Any, size: Any) -> Any:
    """Address of a new block of ``size`` bytes."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.ptrtoint(_libc(b, "malloc", I8.as_pointer(), [args[0]]), I64)

    return types.int64(types.int64), codegen


@intrinsic
def free(ctx: Any, address: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _libc(b, "free", ir.VoidType(), [b.inttoptr(args[0], I8.as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def call(ctx: Any, function: Any, block: Any, tile: Any) -> Any:
    """Call a loop body by its address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def relax(ctx: Any) -> Any:
    """Tell the core that this thread only looks whether a word has changed."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            _libc(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif machine in ("aarch64", "arm64"):
            _libc(b, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(I32, 1)])
        return context.get_dummy_value()

    return types.void(), codegen


def _make_pthread(name: str, arity: int) -> Any:
    """A function of POSIX threads on its objects' addresses; its result, always success here, is dropped."""

    @intrinsic
    def one(ctx: Any, x: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            _libc(b, name, I32, [b.inttoptr(x, I8.as_pointer()) for x in args])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    @intrinsic
    def two(ctx: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            _libc(b, name, I32, [b.inttoptr(x, I8.as_pointer()) for x in args])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return one if arity == 1 else two


mutex_lock, mutex_unlock = _make_pthread("pthread_mutex_lock", 1), _make_pthread("pthread_mutex_unlock", 1)
cond_wait = _make_pthread("pthread_cond_wait", 2)
cond_signal, cond_broadcast = (
    _make_pthread("pthread_cond_signal", 1),
    _make_pthread("pthread_cond_broadcast", 1),
)


@intrinsic
def current_cpu(ctx: Any) -> Any:
    """The CPU that this thread runs on, -1 where the system does not tell."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if not sys.platform.startswith("linux"):
            return ir.Constant(I64, -1)
        return b.sext(_libc(b, "sched_getcpu", I32, []), I64)

    return types.int64(), codegen


@intrinsic
def get_affinity(ctx: Any, thread: Any, size: Any, cpus: Any) -> Any:
    """Store the set of CPUs that a thread may run on; whether that is known."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if not sys.platform.startswith("linux"):
            return ir.Constant(I8, 0)
        arguments = [b.trunc(args[0], I32), args[1], b.inttoptr(args[2], I8.as_pointer())]
        found = b.icmp_signed("==", _libc(b, "sched_getaffinity", I32, arguments), ir.Constant(I32, 0))
        return b.zext(found, I8)

    return types.uint8(types.int64, types.int64, types.int64), codegen


@intrinsic
def set_affinity(ctx: Any, thread: Any, size: Any, cpus: Any) -> Any:
    """Keep a thread, by its system's number, on a set of CPUs: ``size`` bytes at an address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if sys.platform.startswith("linux"):
            arguments = [b.trunc(args[0], I32), args[1], b.inttoptr(args[2], I8.as_pointer())]
            _libc(b, "sched_setaffinity", I32, arguments)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


places = make_symbol(PLACES_SYMBOL, PLACES.ctypes.data)


def namespace(name: str, **members: Any) -> Any:
    """Functions and constants by name, as a module: the one kind of namespace that Numba looks into."""
    module = ModuleType(name)
    vars(module).update(members)
    return module
