"""Numba intrinsics: raw memory, calls through an address, atomics, a table that cached code finds again.

Addresses are 64-bit integers throughout. Knows neither XLA nor CUDA nor attention.

NOTE: compile callers with ``error_model="numpy"``: a Python exception inside a cfunc is printed and lost.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I8P, _I32, _I64 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)


def _make_load(numba_type: Any, llvm_type: Any) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], llvm_type.as_pointer()))

        return numba_type(types.int64), codegen

    return load


def _make_store(numba_type: Any, llvm_type: Any) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], builder.inttoptr(args[0], llvm_type.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return store


load8 = _make_load(types.uint8, ir.IntType(8))
load32 = _make_load(types.int32, _I32)
load64 = _make_load(types.int64, _I64)
store8 = _make_store(types.uint8, ir.IntType(8))
store32 = _make_store(types.int32, _I32)
store64 = _make_store(types.int64, _I64)


def _make_call(numba_type: Any, llvm_type: Any) -> Any:
    @intrinsic
    def call(typingctx: Any, function: Any, arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = [builder.extract_value(args[1], i) for i in range(len(signature.args[1]))]
            kind = ir.FunctionType(llvm_type, [v.type for v in values])
            return builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)

        return numba_type(types.int64, arguments), codegen

    return call


call32 = _make_call(types.int32, _I32)  # call32(address, (integers...)) -> int32
call64 = _make_call(types.int64, _I64)


@intrinsic
def stack(typingctx: Any, size: Any) -> Any:
    """Address of a stack block of ``size`` bytes (a literal), 128-byte aligned, one for a whole function."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    length = size.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            block = builder.alloca(ir.ArrayType(ir.IntType(8), length))
            block.align = 128
        return builder.ptrtoint(block, _I64)

    return types.int64(size), codegen


@intrinsic
def text(typingctx: Any, literal: Any) -> Any:
    """Address of a NUL-terminated copy of a literal string."""
    if not isinstance(literal, types.StringLiteral):
        return None
    value = literal.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        constant = context.insert_const_string(builder.module, value)
        return builder.ptrtoint(builder.bitcast(constant, _I8P), _I64)

    return types.int64(literal), codegen


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to a 64-bit word; its former value comes back."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Any:
    """A 64-bit word, and all that was written before it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_swap(typingctx: Any, address: Any, wanted: Any, value: Any) -> Any:
    """Replace a 64-bit word if it is the wanted one; its former value comes back."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "seq_cst"), 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


def _libc(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def malloc(typingctx: Any, size: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(_libc(builder, "malloc", _I8P, args[0]), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def free(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _libc(builder, "free", ir.VoidType(), builder.inttoptr(args[0], _I8P))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def sched_yield(typingctx: Any) -> Any:
    """Let another thread run."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _libc(builder, "sched_yield", _I32)

    return types.int32(), codegen


def make_symbol(name: str, address: int) -> Any:
    """An intrinsic that gives ``address``, resolved by name each time code is loaded.

    Machine code that Numba caches on disk holds the name alone, so it stays right in another process.
    """
    llvm.add_symbol(name, address)

    @intrinsic
    def symbol(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            variable = builder.module.globals.get(name)
            if variable is None:
                variable = ir.GlobalVariable(builder.module, _I64, name)
                variable.linkage = "external"
            return builder.ptrtoint(variable, _I64)

        return types.int64(), codegen

    return symbol
