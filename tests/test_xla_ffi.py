"""XLA's structs against the installed header, the plan's encoding, and both handlers without a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from cuattn import params
from cuattn.program import Buffer, Host, Kernel, Launch, Memset, Program, TensorMap

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from numba import cfunc, njit, types  # noqa: E402

from cuattn.interop import native, xla_ffi, xla_handlers, xla_structs  # noqa: E402

SOURCE = Path(xla_structs.__file__).read_text()


# -------------------------------------------------------------------------------------------- the C header
class Header:
    """Just enough of a C parser for c_api.h: struct fields, enums, sizes on a 64-bit machine."""

    SIZES: ClassVar[dict[str, int]] = {
        "int": 4,
        "int32_t": 4,
        "uint32_t": 4,
        "size_t": 8,
        "int64_t": 8,
        "uint8_t": 1,
        "bool": 1,
    }

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        text = re.sub(r"#define[^\n]*(\\\n[^\n]*)*", "", text)
        self.bodies = dict(re.findall(r"struct (XLA_FFI_\w+) \{(.*?)\n\}", text, re.S))
        if "XLA_FFI_InternalExtension" in self.bodies:  # so called from JAX 0.12 on
            self.bodies["XLA_FFI_Extension_Base"] = self.bodies["XLA_FFI_InternalExtension"]
        self.enums: dict[str, int] = {}
        self.enum_types = set(re.findall(r"typedef enum[^{]*\{[^}]*\}\s*(\w+);", text))
        for body in re.findall(r"typedef enum[^{]*\{([^}]*)\}", text):
            value = -1
            for entry in filter(None, map(str.strip, body.split(","))):
                name, _, given = entry.partition("=")
                value = int(given, 0) if given else value + 1
                self.enums[name.strip()] = value

    def fields(self, struct: str) -> Iterator[tuple[str, int, int]]:
        """(name, offset, size) of each field."""
        offset = 0
        for line in self.bodies[struct].split(";"):
            line = " ".join(line.split())
            if not line or line.startswith("#"):
                continue
            if member := re.match(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", line):
                name, size, align = member.group(1), 8, 8
            else:
                kind, name = re.match(r"(?:const )?([\w ]+?(?: ?\*+)?) ?(\w+)$", line).groups()  # type: ignore[union-attr]
                size, align = self.layout(kind.strip())
            offset = -(-offset // align) * align
            yield name, offset, size
            offset += size

    def layout(self, kind: str) -> tuple[int, int]:
        if kind.endswith("*"):
            return 8, 8
        if kind in self.enum_types or kind == "XLA_FFI_Handler_Traits":
            return 4, 4
        if kind in self.SIZES:
            return self.SIZES[kind], self.SIZES[kind]
        fields = list(self.fields(kind))
        align = max(min(size, 8) for _, _, size in fields)
        return -(-(fields[-1][1] + fields[-1][2]) // align) * align, align

    def offset(self, path: str) -> int:
        """Offset of "Struct.field", or a sum of several."""
        total = 0
        for part in path.split(" + "):
            struct, field = part.split(".")
            total += {name: at for name, at, _ in self.fields(struct)}[field]
        return total


@pytest.fixture(scope="module")
def header() -> Header:
    return Header((Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text())


OFFSETS = re.findall(r"^([A-Z_]+) = (\d+)  # (XLA_FFI_\w+\..*)$", SOURCE, re.M)
ENUMS = re.findall(r"^([A-Z_0-9]+) = (\d+)  # (XLA_FFI_\w+)$", SOURCE, re.M)


@pytest.mark.parametrize(("name", "value", "path"), OFFSETS, ids=[n for n, _, _ in OFFSETS])
def test_offsets_are_those_of_the_installed_header(header: Header, name: str, value: str, path: str) -> None:
    assert header.offset(path) == int(value)


@pytest.mark.parametrize(("name", "value", "enum"), ENUMS, ids=[n for n, _, _ in ENUMS])
def test_enums_are_those_of_the_installed_header(header: Header, name: str, value: str, enum: str) -> None:
    assert header.enums[enum] == int(value)


def test_every_constant_is_compared() -> None:
    section = SOURCE.split("# XLA's structs")[1].split("# CUDA's driver API")[0]
    named = set(re.findall(r"^([A-Z_0-9]+) = ", section, re.M)) - {"TESTED_MINOR"}
    assert named == {n for n, _, _ in OFFSETS} | {n for n, _, _ in ENUMS}
    assert len(named) > 45


def test_struct_sizes_written_by_the_handlers(header: Header) -> None:
    """XLA accepts struct_size up to the last field that a caller knows."""
    for struct, size in (
        ("XLA_FFI_Error_Create_Args", 28),
        ("XLA_FFI_Error_Destroy_Args", 24),
        ("XLA_FFI_Stream_Get_Args", 32),
        ("XLA_FFI_ThreadPool_Schedule_Args", 40),
        ("XLA_FFI_ThreadPool_NumThreads_Args", 32),
    ):
        *_, (_, offset, length) = header.fields(struct)
        assert offset + length == size, struct


# ------------------------------------------------------------------------------------------ CPU, under XLA
Q, OUT, STEP = (params.INDEX[n] for n in ("q", "out", "aux0"))


@njit(error_model="numpy")
def _double(block, tile):  # type: ignore[no-untyped-def]
    q, out, n = native.load64(block + 8 * Q), native.load64(block + 8 * OUT), native.load64(block + 8 * STEP)
    for i in range(tile * n, (tile + 1) * n):
        native.store64(out + 8 * i, native.load64(out + 8 * i) + 2 * native.load64(q + 8 * i))


@cfunc(types.int64(types.int64, types.int64), error_model="numpy")
def double(block, tile):  # type: ignore[no-untyped-def]
    _double(block, tile)
    return 0


def host_program(length: int = 1024, step: int = 16, entry: str = "test_double") -> Program:
    loop = Host(entry, length // step, params.pack({"aux0": step}), (("q", "x"), ("out", "y")))
    return Program(
        ("x",),
        (Buffer("y", (length,), "int64"),),
        (Buffer("w", (10,), "float32"),),
        (Memset("y"), loop, Memset("w")),
    )


def ffi(program: Program) -> Callable[[Any], Any]:
    """The program as a jitted function of one int64 array given as uint32 pairs."""
    encoded = xla_ffi.encode(program)
    target = xla_ffi.register("cpu")
    outputs = [jax.ShapeDtypeStruct((2 * b.shape[0],), jnp.uint32) for b in program.outputs]
    scratch = [jax.ShapeDtypeStruct((n,), jnp.uint8) for n in encoded.workspace]
    call = jax.ffi.ffi_call(target, [*outputs, *scratch], vmap_method="sequential")
    return jax.jit(lambda x: call(x, plan=encoded.plan, kernels=encoded.kernels)[0])


@pytest.fixture
def doubling(on_cpu: None) -> None:
    """A host loop, known to the handlers."""
    xla_ffi.put(xla_ffi.key_of("host", "test_double"), double.address)


@pytest.mark.parametrize(("length", "step"), [(16, 16), (1024, 16), (4096, 1)])
def test_host_loops_and_memsets(doubling: None, length: int, step: int) -> None:
    x = np.arange(length, dtype=np.int64) * 3
    run = ffi(host_program(length, step))
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(x.view(np.uint32))).view(np.int64), 2 * x)


def test_host_loops_from_many_threads(doubling: None) -> None:
    x = np.arange(4096, dtype=np.int64)
    run = ffi(host_program(4096, 8))
    wrong = []

    def work() -> None:
        for _ in range(50):
            if not np.array_equal(np.asarray(run(x.view(np.uint32))).view(np.int64), 2 * x):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_errors_come_out_of_jax(doubling: None) -> None:
    x = np.zeros(2048, np.uint32)
    good = xla_ffi.encode(host_program())
    shapes = [jax.ShapeDtypeStruct((2048,), jnp.uint32), jax.ShapeDtypeStruct((40,), jnp.uint8)]

    def call(outputs: Any, **attributes: Any) -> Any:
        run = jax.ffi.ffi_call("cuattn_cpu", outputs, vmap_method="sequential")
        return jax.block_until_ready(jax.jit(lambda x: run(x, **attributes))(x))

    other_version = good.plan.copy()
    other_version[0] += 1
    other_kind = good.plan.copy()
    other_kind[xla_structs.HEADER] = xla_structs.STEP_LAUNCH
    unknown = xla_ffi.encode(host_program(entry="never_compiled"))
    for outputs, attributes, words in (
        (shapes, {"plan": good.plan}, "expected the attributes"),
        (shapes, {"kernels": 1, "plan": good.plan}, "expected the attributes"),
        (shapes, {"kernels": good.kernels, "plan": good.plan.astype(np.int32)}, "int64"),
        (shapes[:1], {"kernels": good.kernels, "plan": good.plan}, "wrong number"),
        (shapes, {"kernels": good.kernels, "plan": other_version}, "another version of cuattn"),
        (shapes, {"kernels": good.kernels, "plan": other_kind}, "not for the CPU"),
        (shapes, {"kernels": '{"host": []}', "plan": unknown.plan}, "another version of cuattn"),
        (shapes, {"kernels": unknown.kernels, "plan": unknown.plan}, r"cuattn: \w+Error"),
    ):
        with pytest.raises(Exception, match=words):
            call(outputs, **attributes)


def test_registering_again_is_harmless() -> None:
    assert xla_ffi.register("cpu") == xla_ffi.register("cpu") == "cuattn_cpu"


def test_handlers_load_from_the_disk_cache(tmp_path: Path) -> None:
    """A second process compiles nothing."""
    code = (
        "from cuattn.interop import xla_ffi\n"
        "xla_ffi.register('cpu')\n"
        "print(sum(sum(h.cache_hits.values()) if hasattr(h.cache_hits, 'values') else h.cache_hits"
        " for h in xla_ffi._handler('cuattn_cpu')))"
    )
    env = {"NUMBA_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    hits = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**__import__("os").environ, **env},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert hits == ["0", "2"]


# --------------------------------------------------------------------------------------- CUDA, fake driver
class Machine:
    """A call frame, an XLA API and a driver made of callbacks, to run the CUDA handler without a GPU."""

    def __init__(self) -> None:
        self.keep: list[Any] = []
        self.log: list[Any] = []
        self.error: tuple[int, str] | None = None
        self.result = 0
        slots = {
            xla_handlers.SLOT_LAUNCH: self.callback(self.launch, 4),
            xla_handlers.SLOT_ENCODE: self.callback(self.encode_map, 12),
            xla_handlers.SLOT_MEMSET: self.callback(self.memset, 4),
            xla_handlers.SLOT_ERROR: self.callback(self.error_string, 2),
        }
        for slot, address in slots.items():
            xla_handlers.TABLE[slot] = address
        api = self.words(*[0] * 26)
        api.view(np.int32)[xla_structs.API_MINOR // 4] = 3
        api[xla_structs.API_ERROR_CREATE // 8] = self.callback(self.create_error, 1, ctypes.c_int64)
        api[xla_structs.API_STREAM_GET // 8] = self.callback(self.stream_get, 1, ctypes.c_int64)
        self.api = api.ctypes.data
        self.handler = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(
            xla_ffi._handler("cuattn_cuda").address
        )

    def callback(self, function: Any, n: int, result: Any = ctypes.c_int32) -> int:
        wrapped = ctypes.CFUNCTYPE(result, *[ctypes.c_int64] * n)(function)
        self.keep.append(wrapped)
        return ctypes.cast(wrapped, ctypes.c_void_p).value or 0

    def words(self, *values: int) -> Any:
        array = np.array(values, np.int64)
        self.keep.append(array)
        return array

    @staticmethod
    def read(address: int, n: int, kind: Any = np.int64) -> list[int]:
        data = ctypes.string_at(address, n * np.dtype(kind).itemsize)
        return np.frombuffer(data, kind).tolist()  # type: ignore[no-any-return]

    def launch(self, config: int, kernel: int, arguments: int, extra: int) -> int:
        grid = self.read(config, 7, np.uint32)
        stream, attributes = self.read(config + xla_structs.CONFIG_STREAM, 2)
        count = self.read(config + xla_structs.CONFIG_COUNT, 1, np.uint32)[0]
        pairs = [
            self.read(attributes + 72 * i, 1, np.int32) + self.read(attributes + 72 * i + 8, 1, np.int32)
            for i in range(count)
        ]
        (block,) = self.read(arguments, 1)
        maps = [self.read(p, 1)[0] for p in self.read(arguments + 8, 8)[: self.maps]]
        self.log.append(("launch", kernel, grid, stream, pairs, self.read(block, params.WORDS), maps, extra))
        self.maps = 0
        return self.result

    maps = 0

    def encode_map(self, target: int, *rest: int) -> int:
        dtype, rank, base, dims, strides, box, element, interleave, swizzle, l2, fill = rest
        assert target % 64 == 0
        self.log.append((
            "map", dtype & 0xFF, rank & 0xFF, base, self.read(dims, rank & 7),
            self.read(strides, (rank & 7) - 1),
            self.read(box, rank & 7, np.uint32), self.read(element, rank & 7, np.uint32), interleave & 0xFF,
            swizzle & 0xFF, l2 & 0xFF, fill & 0xFF,
        ))  # fmt: skip
        ctypes.memmove(target, self.words(0xABC + self.maps).ctypes.data, 8)
        self.maps += 1
        return self.result

    def memset(self, address: int, value: int, size: int, stream: int) -> int:
        self.log.append(("memset", address, value & 0xFF, size, stream))
        return self.result

    def error_string(self, result: int, target: int) -> int:
        words = ctypes.create_string_buffer(b"out of luck")
        self.keep.append(words)
        ctypes.memmove(target, self.words(ctypes.addressof(words)).ctypes.data, 8)
        return 0

    def create_error(self, args: int) -> int:
        size, _, message = self.read(args, 3)
        assert size == 28
        self.error = (
            self.read(args + xla_structs.ERROR_CREATE_CODE, 1, np.int32)[0],
            ctypes.string_at(message).decode(),
        )
        return 0xE44

    def stream_get(self, args: int) -> int:
        assert self.read(args, 3) == [32, 0, 0x77]
        ctypes.memmove(args + xla_structs.STREAM_GET_STREAM, self.words(0x57).ctypes.data, 8)
        return 0

    def frame(self, arguments: list[int], results: list[int], encoded: Any = None) -> int:
        def buffers(addresses: list[int]) -> tuple[int, int, int, int, int]:
            each = [self.words(48, 0, 11, a, 1, 0).ctypes.data for a in addresses]
            return 40, 0, len(addresses), 0, self.words(*each, 0).ctypes.data

        attrs: tuple[int, ...] = (48, 0, 0, 0, 0, 0)
        if encoded is not None:
            text = encoded.kernels.encode()
            self.keep.append(text)
            pointer = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value or 0
            span = self.words(pointer, len(text)).ctypes.data
            plan = self.words(*encoded.plan.tolist())
            array = self.words(xla_structs.DTYPE_S64, len(plan), plan.ctypes.data).ctypes.data
            kinds = np.array([xla_structs.ATTR_IS_STRING, xla_structs.ATTR_IS_ARRAY], np.int32)
            self.keep.append(kinds)
            attrs = 48, 0, 2, kinds.ctypes.data, 0, self.words(span, array).ctypes.data
        head = (176, 0, self.api, 0x77, xla_structs.STAGE_EXECUTE)
        return int(self.words(*head, *buffers(arguments), *buffers(results), *attrs, 0).ctypes.data)


@pytest.fixture
def machine() -> Iterator[Machine]:
    kept = xla_handlers.TABLE[: xla_handlers.KEYS].copy()
    xla_handlers.MAPS.fill(0)
    yield Machine()
    xla_handlers.TABLE[: xla_handlers.KEYS] = kept


KERNEL = Kernel("nowhere", "axpy", (("HEAD_DIM", 64), ("DTYPE", 1)))


def gpu_program(**changes: Any) -> Program:
    tensor_map = TensorMap("x", "bfloat16", (64, 128, 3), (128, 16384), (64, 32, 1), 128, offset=256)
    given: dict[str, Any] = {
        "kernel": KERNEL, "grid": (7, 2, 3), "block": 256, "shared_memory": 65536,
        "block_words": params.pack({"batch": 5, "softcap": 2.5}),
        "pointers": (("q", "x"), ("out", "y"), ("scratch", "w")), "dependent": True,
        "tensor_maps": (tensor_map, TensorMap("y", "float32", (8,), (), (8,), 0)), **changes,
    }  # fmt: skip
    plain = Launch(KERNEL, (1, 1, 1), 32, 0, params.pack({}), (("k", "x"),))
    empty = Launch(KERNEL, (0, 1, 1), 32, 0, params.pack({}), ())
    return Program(
        ("x",), (Buffer("y", (4, 4), "bfloat16"),), (Buffer("w", (3,), "float32"),),
        (Memset("w"), Launch(**given), empty, plain),
    )  # fmt: skip


def test_cuda_handler_launches_what_the_program_says(machine: Machine) -> None:
    encoded = xla_ffi.encode(gpu_program(), 90)
    key = xla_ffi.key_of("cuda", 90, "nowhere", "axpy", [["HEAD_DIM", 64], ["DTYPE", 1]])
    xla_ffi.put(key, 0xF00)
    assert encoded.workspace == (12,)
    assert machine.handler(machine.frame([0x1000], [0x2000, 0x3000], encoded)) == 0, machine.error
    memset, first, second, launch, last = machine.log
    assert memset == ("memset", 0x3000, 0, 12, 0x57)
    assert first == ("map", 9, 3, 0x1100, [64, 128, 3], [128, 16384], [64, 32, 1], [1, 1, 1], 0, 3, 3, 0)
    assert second == ("map", 7, 1, 0x2000, [8], [], [8], [1], 0, 0, 3, 0)
    kind, kernel, grid, stream, attributes, block, maps, extra = launch
    assert (kind, kernel, grid, stream) == ("launch", 0xF00, [7, 2, 3, 256, 1, 1, 65536], 0x57)
    assert attributes == [[xla_structs.ATTRIBUTE_DEPENDENT, 1]]
    assert (maps, extra) == ([0xABC, 0xABD], 0)
    want = dict.fromkeys(range(params.WORDS), 0)
    want |= {params.INDEX["q"]: 0x1000, params.INDEX["out"]: 0x2000, params.INDEX["scratch"]: 0x3000}
    want |= {params.INDEX["batch"]: 5, params.INDEX["softcap"]: int(np.float64(2.5).view(np.int64))}
    assert block == list(want.values())
    assert last[2] == [1, 1, 1, 32, 1, 1, 0]
    assert last[4] == []
    assert last[5][params.INDEX["k"]] == 0x1000


def test_tensor_maps_are_encoded_once_per_address(machine: Machine) -> None:
    encoded = xla_ffi.encode(gpu_program(), 90)
    xla_ffi.put(xla_ffi.key_of("cuda", 90, "nowhere", "axpy", [["HEAD_DIM", 64], ["DTYPE", 1]]), 0xF00)
    counts = []
    for x, y in ((0x1000, 0x2000), (0x1000, 0x2000), (0x1000, 0x4000), (0x1000, 0x2000)):
        machine.log.clear()
        machine.maps = 2 if counts == [2] else 0  # how many the launch below is to look at
        assert machine.handler(machine.frame([x], [y, 0x3000], encoded)) == 0
        if counts == [2]:
            (launch,) = [entry for entry in machine.log if entry[0] == "launch" and entry[4]]
            assert launch[6] == [0xABC, 0xABD]
        counts.append(sum(entry[0] == "map" for entry in machine.log))
    assert counts[:3] == [2, 0, 1]
    assert counts[3] in (0, 1)  # 1 where both addresses fall on one place
    locks = xla_handlers.MAPS.reshape(-1, xla_handlers.KEPT_BYTES // 8)[:, 0]
    locks[:] = 1  # as if other threads were at all of them
    machine.log.clear()
    assert machine.handler(machine.frame([0x1000], [0x2000, 0x3000], encoded)) == 0
    assert sum(entry[0] == "map" for entry in machine.log) == 2


def test_cuda_handler_reports_the_drivers_words(machine: Machine) -> None:
    xla_ffi.put(xla_ffi.key_of("cuda", 90, "nowhere", "axpy", [["HEAD_DIM", 64], ["DTYPE", 1]]), 0xF00)
    machine.result = 701
    assert machine.handler(machine.frame([1], [2, 3], xla_ffi.encode(gpu_program(), 90))) == 0xE44
    assert machine.error == (xla_structs.INTERNAL, "cuattn: cuMemsetD8Async: out of luck")
    no_maps = Program(("x",), (), (), (Launch(KERNEL, (1, 1, 1), 2048, 0, params.pack({}), ()),))
    assert machine.handler(machine.frame([1], [], xla_ffi.encode(no_maps, 90))) == 0xE44
    assert machine.error == (xla_structs.INTERNAL, "cuattn: cuLaunchKernelEx: out of luck")
    wrong = xla_ffi.encode(host_program())
    machine.result = 0
    assert machine.handler(machine.frame([1], [2, 3], wrong)) == 0xE44
    assert machine.error == (xla_structs.INVALID_ARGUMENT, "cuattn: this plan is not for a GPU")


def test_handlers_answer_xlas_question_for_metadata(machine: Machine) -> None:
    for name, traits in (("cuattn_cuda", 1), ("cuattn_cpu", 0)):
        compiled = xla_ffi._handler(name)
        compiled = compiled[0] if isinstance(compiled, tuple) else compiled
        metadata = machine.words(*[0] * 6)
        extension = machine.words(32, xla_structs.EXTENSION_IS_METADATA, 0, metadata.ctypes.data)
        frame = machine.words(*[0] * 24)
        frame[xla_structs.FRAME_EXTENSION // 8], frame[xla_structs.FRAME_API // 8] = (
            extension.ctypes.data,
            machine.api,
        )
        assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)(frame.ctypes.data) == 0
        assert metadata.view(np.int32)[6:9].tolist() == [0, 3, traits]


def test_keys_are_stable_and_positive() -> None:
    keys = {xla_ffi.key_of("cuda", arch, "a", "b", []) for arch in (80, 90)} | {xla_ffi.key_of("host", "a")}
    assert len(keys) == 3
    assert all(0 < key < 1 << 62 for key in keys)


def test_plan_holds_no_address() -> None:
    """The same program encodes to the same words: JAX's compilation cache may keep it."""
    first, second = xla_ffi.encode(gpu_program(), 90), xla_ffi.encode(gpu_program(), 90)
    np.testing.assert_array_equal(first.plan, second.plan)
    assert first.kernels == second.kernels == (
        '{"arch": 90, "cuda": [["nowhere", "axpy", [["HEAD_DIM", 64], ["DTYPE", 1]]], '
        '["nowhere", "axpy", [["HEAD_DIM", 64], ["DTYPE", 1]]]]}'
    )  # fmt: skip
