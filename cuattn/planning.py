"""What a call would run and what it would cost, unrun: ``cuattn.plan`` and ``cuattn.precompile``.

Reads programs that the backends make, and counts. Nothing here chooses a tile, allocates or launches.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

from . import arrays, params
from . import device as devices
from .device import Device
from .errors import argument_error
from .program import Buffer, Host, Kernel, Launch, Program
from .spec import ITEMSIZE, AttentionSpec, Signature, bind

BLOCKS_PER_SM = {75: 16, 86: 16, 89: 24, 120: 24}  # resident at most; 32 elsewhere
RESERVED_SHARED = 1024  # bytes of shared memory that the system keeps per block, from sm_80 on
_INTEGERS = (
    "q_segment_ids",
    "kv_segment_ids",
    "q_seqlens",
    "kv_seqlens",
    "q_offset",
    "cu_seqlens_q",
    "cu_seqlens_k",
)
_ARRAYS = ("bias", "mask", "alibi_slopes", "sinks", "softmax_scale", *_INTEGERS)


class Peak(NamedTuple):
    """What a GPU can do at best: dense products in operations a second by kind, and bytes a second."""

    half: float  # float16 and bfloat16 inputs, float32 sums
    tf32: float  # 0: no such path
    single: float
    double: float
    bandwidth: float


PEAKS = {  # vendor's data sheets, without sparsity
    "T4": Peak(65e12, 0, 8.1e12, 0.25e12, 320e9),
    "A100": Peak(312e12, 156e12, 19.5e12, 19.5e12, 2039e9),
    "RTX 3090": Peak(71e12, 35.6e12, 35.6e12, 0.56e12, 936e9),
    "RTX 4090": Peak(165e12, 82.6e12, 82.6e12, 1.3e12, 1008e9),
    "H100": Peak(989e12, 494e12, 67e12, 67e12, 3350e9),
    "H200": Peak(989e12, 494e12, 67e12, 67e12, 4800e9),
    "B200": Peak(2250e12, 1125e12, 75e12, 37e12, 8000e9),
    "RTX 5090": Peak(210e12, 105e12, 105e12, 1.6e12, 1792e9),
}


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One launch: what runs, on how many blocks, and how a multiprocessor holds them.

    Registers, spills and occupancy are None where the kernel was not compiled. Sizes in bytes.
    """

    name: str
    source: str
    tile: tuple[int, int] | None  # (queries, keys)
    stages: int | None
    blocks: int
    threads: int
    shared_memory: int
    registers: int | None = None
    spill_bytes: int | None = None
    blocks_per_sm: int | None = None
    occupancy: float | None = None  # share of a multiprocessor's threads
    waves: float | None = None
    limit: str | None = None  # what keeps more blocks from residing
    parts: int | None = None  # a tile's keys are cut into these, each worked on by itself
    heads: int | None = None  # query heads in a tile


@dataclass(frozen=True, slots=True)
class Plan:
    """A call's kernels and costs. FLOPs count the visible scores; bytes what memory must move once."""

    backend: str
    device: Device | None
    backward: bool
    spec: AttentionSpec
    kernels: tuple[KernelUse, ...]
    visible: float  # share of the score matrix that some position mask leaves
    flops: float
    memory_bytes: int  # operands and results, each once
    on_chip_bytes: int  # what blocks load from the L2 cache
    workspace_bytes: int
    standard_flops: float  # plain attention's, which computes what masks hide too
    standard_bytes: int  # what plain attention moves: also four passes over the score matrix
    standard_workspace: int  # the score matrices that it holds
    peak_flops: float | None
    bandwidth: float | None

    @property
    def products(self) -> str:
        """What multiplies matrices, in words."""
        if self.spec.dtype != "float32" or self.device is None or self.device.arch < 80:
            return self.spec.dtype
        words = {"highest": "float32 as three of float16 halves", "tf32": "TF32", "bf16": "bfloat16"}
        return words[self.spec.precision]

    @property
    def intensity(self) -> float:
        """Operations per byte of device memory."""
        return self.flops / max(1, self.memory_bytes)

    @property
    def balance(self) -> float | None:
        """Operations per byte at which the device's arithmetic and memory take equally long."""
        return self.peak_flops / self.bandwidth if self.peak_flops and self.bandwidth else None

    @property
    def seconds(self) -> float | None:
        """The roofline's bound: no call can be faster."""
        if not self.peak_flops or not self.bandwidth:
            return None
        return max(self.flops / self.peak_flops, self.memory_bytes / self.bandwidth)

    @property
    def standard_seconds(self) -> float | None:
        """The same bound for plain attention."""
        if not self.peak_flops or not self.bandwidth:
            return None
        return max(self.standard_flops / self.peak_flops, self.standard_bytes / self.bandwidth)


# ---- from arguments to a spec ----


def _signature(name: str, x: Any) -> Signature:
    """An operand's layout: a real array's own; C-contiguous for anything else with a shape and a dtype."""
    if isinstance(x, list | tuple):
        return Signature("int32", (len(x),), (1,), 16)
    if hasattr(x, "strides") and not arrays.is_jax(x) and not hasattr(x, "__torch_function__"):
        library, x = arrays.adopt(name, x)
        found = arrays.adapter(library).signature(x)
    elif hasattr(x, "shape") and hasattr(x, "dtype"):
        shape = tuple(int(n) for n in x.shape)
        strides, step = [], 1
        for n in reversed(shape):
            strides.append(step)
            step *= n
        dtype = getattr(x.dtype, "name", str(x.dtype).rpartition(".")[2])
        found = Signature(dtype, shape, tuple(reversed(strides)), 16)
    else:
        raise argument_error(
            name, type(x).__name__, "an array or anything with shape and dtype", kind=TypeError
        )
    return found._replace(dtype="int32") if name in _INTEGERS else found


def bind_call(q: Any, k: Any, v: Any, options: dict[str, Any]) -> AttentionSpec:
    """The spec of a call of ``flash_attention``, or with ``cu_seqlens_q`` of ``flash_attention_varlen``."""
    options = {
        name: x for name, x in options.items() if x is not None and name not in ("return_lse", "backend")
    }
    named = {"q": _signature("q", q), "k": _signature("k", k), "v": _signature("v", v)}
    for name in _ARRAYS:
        if name in options and not isinstance(options[name], int | float):
            named[name] = _signature(name, options.pop(name))
    if options.pop("dropout_seed", None) is not None and options.get("dropout_p"):
        named["dropout_seed"] = Signature("int64", (1,), (1,), 16)
    if "cu_seqlens_q" in named:
        options["layout"] = "thd"
    return bind(named, **options)


def find_device(value: Any) -> Device:
    """A ``Device`` from itself, a CUDA index, or a model's name ("T4", "A100", "RTX4090", "H200", ...)."""
    if isinstance(value, Device):
        return value
    if isinstance(value, int):
        return devices.query(value)
    wanted = str(value).replace(" ", "").lower()
    for model in devices.MODELS.values():
        if model.name.replace(" ", "").lower() == wanted:
            return model
    names = ", ".join(model.name.replace(" ", "") for model in devices.MODELS.values())
    raise argument_error("device", repr(value), f"a CUDA index or one of {names}")


# ---- counting ----


def visible_scores(spec: AttentionSpec) -> int:
    """Scores of one head that causal mask, window and offset leave; lengths in arrays count as full."""
    import numpy as np

    offset = spec.q_offset if isinstance(spec.q_offset, int) else spec.seqlen_kv - spec.seqlen_q
    rows = np.arange(spec.seqlen_q, dtype=np.int64) + offset
    last = rows + spec.window_right + 1 if spec.window_right >= 0 else np.full_like(rows, spec.seqlen_kv)
    first = rows - spec.window_left if spec.window_left >= 0 else np.zeros_like(rows)
    seen = np.minimum(last, spec.seqlen_kv) - np.maximum(first, 0)
    return int(np.maximum(seen, 0).sum())


def _size(buffers: Iterable[Buffer]) -> int:
    total = 0
    for buffer in buffers:
        size = ITEMSIZE[buffer.dtype]
        for n in buffer.shape:
            size *= n
        total += size
    return total


def _operand_bytes(spec: AttentionSpec, backward: bool) -> int:
    """Bytes of the inputs; a broadcast axis counts once."""
    total = 0
    for name in ("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks"):
        operand = getattr(spec, name)
        if operand is not None:
            size = ITEMSIZE[operand.dtype]
            for n, stride in zip(operand.shape, operand.strides, strict=True):
                size *= n if stride else 1
            total += size
    if backward:  # out, dout and LSE are read too
        rows = spec.total_q if spec.varlen else spec.batch * spec.seqlen_q
        total += (
            spec.heads_q * rows * (2 * spec.head_dim_v * ITEMSIZE[spec.dtype] + ITEMSIZE[spec.accumulator])
        )
    return total


def _peak(spec: AttentionSpec, device: Device | None) -> tuple[float | None, float | None]:
    if device is None:
        return None, None
    found = next((peak for name, peak in PEAKS.items() if name in device.name), None)
    if found is None:
        return None, None
    if spec.dtype == "float64":
        return found.double, found.bandwidth
    if spec.dtype == "float32":
        # by tensor cores: three f16 products, or one
        rates = {"highest": found.half / 3, "tf32": found.tf32, "bf16": found.half}
        return max(rates[spec.precision] if found.tf32 else 0, found.single), found.bandwidth
    return found.half, found.bandwidth


def _residency(device: Device, threads: int, shared: int, registers: int) -> tuple[int, str]:
    """Blocks that a multiprocessor holds at once, and what limits them."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256  # registers come in units of 256 a warp
    reserve = RESERVED_SHARED if device.arch >= 80 else 0
    limits = {
        "registers": device.registers_per_sm // (per_warp * warps),
        "shared memory": device.shared_memory_per_sm // (shared + reserve) if shared else 32,
        "threads": device.threads_per_sm // threads,
        "blocks": BLOCKS_PER_SM.get(device.arch, 32),
    }
    name = min(limits, key=lambda key: limits[key])
    return limits[name], name


def _tile(kernel: Kernel) -> tuple[int, int] | None:
    """(queries, keys) of a tile: given to the kernel or fixed in its source; None where it has none."""
    sizes = dict(kernel.defines)
    if "BLOCK_N" not in sizes:
        text = import_module(".jit", __package__).sources()[f"{kernel.source}.cu"]
        sizes |= dict(re.findall(r"^#define (BLOCK_N) (\d+)$", text, re.MULTILINE))
    return (int(sizes["BLOCK_M"]), int(sizes["BLOCK_N"])) if {"BLOCK_M", "BLOCK_N"} <= sizes.keys() else None


def _use(step: Launch, device: Device, compile_kernels: bool) -> KernelUse:
    defines = dict(step.kernel.defines)
    tile = _tile(step.kernel)
    blocks = step.grid[0] * step.grid[1] * step.grid[2]
    use = KernelUse(
        step.kernel.entry, f"{step.kernel.source}.cu", tile,
        int(defines["STAGES"]) if "STAGES" in defines else None, blocks, step.block, step.shared_memory,
    )  # fmt: skip
    if defines.get("SPLIT"):
        parts, _, heads = struct.unpack_from("<3q", step.block_words, 8 * params.INDEX["aux4"])
        use = replace(use, parts=parts, heads=heads)
    if not compile_kernels:
        return use
    made = import_module(".jit", __package__).compiled(step.kernel, device.arch)
    if not made.registers:  # PTX: the driver decides
        return use
    resident, limit = _residency(device, step.block, step.shared_memory + made.shared_memory, made.registers)
    return replace(
        use, registers=made.registers, spill_bytes=made.spill_bytes, blocks_per_sm=resident,
        occupancy=resident * step.block / device.threads_per_sm,
        waves=blocks / max(1, resident * device.sm_count), limit=limit,
    )  # fmt: skip


def _compiler() -> bool:
    """Whether kernels can be compiled here (with or without a GPU)."""
    try:
        devices.import_cupy()
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception:  # a broken installation raises anything; the plan then leaves registers out
        return False
    return True


def _on_chip(spec: AttentionSpec, uses: tuple[KernelUse, ...], visible: float, backward: bool) -> int:
    """Bytes that blocks load: keys and values for each block of queries; backward the other way round."""
    tile = next((use.tile for use in uses if use.tile is not None), None)
    if tile is None:
        return 0
    size, dims = ITEMSIZE[spec.dtype], spec.head_dim + spec.head_dim_v
    heads = spec.batch * spec.heads_q
    if backward:
        blocks = -(-spec.seqlen_kv // tile[1])
        return int(heads * (blocks * spec.seqlen_q * visible + spec.seqlen_kv) * dims * size)
    blocks = -(-spec.seqlen_q // tile[0])
    return int(heads * (blocks * spec.seqlen_kv * visible + spec.seqlen_q) * dims * size)


def describe(
    spec: AttentionSpec, device: Device | None, backward: bool, program: Program, compile_kernels: bool
) -> Plan:
    """The plan of a program that a backend made for a spec; ``device`` is None on the CPU."""
    uses = []
    for step in program.steps:
        if isinstance(step, Launch):
            assert device is not None
            uses.append(_use(step, device, compile_kernels))
        elif isinstance(step, Host):
            words = struct.unpack_from("<2q", step.block_words, 8 * params.INDEX["aux1"])
            tile = (words[0] or spec.seqlen_q, words[1])  # 0: few rows, all at once
            uses.append(KernelUse(step.entry, "cpu_tiles.py", tile, None, step.tiles, 1, 0))
    pairs, whole = visible_scores(spec), spec.seqlen_q * spec.seqlen_kv
    visible = pairs / whole if whole else 1.0
    heads, d, dv = spec.batch * spec.heads_q, spec.head_dim, spec.head_dim_v
    flops = 2.0 * pairs * heads * (3 * d + 2 * dv if backward else d + dv)
    moved = _operand_bytes(spec, backward) + _size(program.outputs)
    matrix = heads * whole * ITEMSIZE[spec.dtype]
    peak, bandwidth = _peak(spec, device)
    return Plan(
        backend="cuda" if device is not None else "numba", device=device, backward=backward, spec=spec,
        kernels=tuple(uses), visible=visible, flops=flops, memory_bytes=moved,
        on_chip_bytes=_on_chip(spec, tuple(uses), visible, backward),
        workspace_bytes=_size(program.workspace),
        standard_flops=2.0 * whole * heads * (2 if backward else 1) * (d + dv),
        standard_bytes=moved + (7 if backward else 4) * matrix,
        standard_workspace=(3 if backward else 2) * matrix, peak_flops=peak, bandwidth=bandwidth,
    )  # fmt: skip


# ---- public ----


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    device: Any = None,
    backward: bool = False,
    backend: str | None = None,
    compile_kernels: bool | None = None,
    **options: Any,
) -> Plan:
    """What ``flash_attention(q, k, v, **options)`` would run here or on another GPU, without running it.

    ``q``, ``k``, ``v`` and array options: arrays, or anything with ``shape`` and ``dtype`` (such as
    ``jax.ShapeDtypeStruct``). ``device``: a CUDA index or a model's name ("T4", "A100", "RTX3090", "RTX4090",
    "H200", "B200", "RTX5090"), which need not be here; None takes where the arrays live. ``backward``: the
    gradients' kernels instead of the forward's. ``compile_kernels``: compile them to know registers and
    occupancy (some seconds, once); None does so where there is a compiler.

    Returns a ``Plan``. Raises what the call itself would raise for wrong arguments.
    """
    spec = bind_call(q, k, v, options)
    wants = frozenset(
        {"q", "k", "v"} | ({"bias"} if spec.bias else set()) | ({"sinks"} if spec.sinks else set())
    )
    if backend not in (None, "cuda", "numba"):
        raise argument_error("backend", repr(backend), "None, 'cuda' or 'numba'")
    if backend == "numba" and _lives_on_gpu(q):
        raise argument_error("backend", "'numba' with arrays on a GPU", "None or 'cuda' there, to be planned")
    on_gpu = backend == "cuda" or (backend is None and (device is not None or _lives_on_gpu(q)))
    if not on_gpu:
        cpu = import_module(".backends.numba", __package__)
        made = cpu.backward_program(spec, wants) if backward else cpu.forward_program(spec)
        return describe(spec, None, backward, made, False)
    where = find_device(0 if device is None else device)
    cuda = import_module(".backends.cuda", __package__)
    made = cuda.program(spec, where, wants if backward else None)
    return describe(spec, where, backward, made, _compiler() if compile_kernels is None else compile_kernels)


def _lives_on_gpu(x: Any) -> bool:
    if arrays.is_jax(x):
        import jax

        return bool(jax.default_backend() == "gpu")
    return hasattr(x, "__cuda_array_interface__")


@dataclass(frozen=True, slots=True)
class _DType:
    name: str


@dataclass(frozen=True, slots=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: _DType


def shaped(shape: Iterable[int], dtype: str) -> Any:
    """A stand-in for an array: a shape and a dtype's name."""
    return _Shape(tuple(shape), _DType(dtype))


def kernels_of(calls: Iterable[tuple[AttentionSpec, frozenset[str] | None]], where: Device) -> list[Kernel]:
    """The CUDA kernels of forwards (``None``) and backwards (for the gradients named), each once."""
    cuda = import_module(".backends.cuda", __package__)
    found: dict[Kernel, None] = {}
    for spec, wants in calls:
        steps = cuda.program(spec, where, wants).steps
        found |= dict.fromkeys(step.kernel for step in steps if isinstance(step, Launch))
    return list(found)


def precompile(
    *,
    dtypes: Iterable[str] = ("float16", "bfloat16"),
    head_dims: Iterable[int] = (64, 128),
    causal: Iterable[bool] = (False, True),
    backward: bool = True,
    device: Any = None,
    **options: Any,
) -> list[str]:
    """Compile the CUDA kernels of these calls into the cache on disk ahead of their first use.

    Lengths, batch and heads never matter; dtypes, head dims and the options given do. ``device`` as in
    ``plan``; a model's name compiles for a GPU that is not here. Returns one line per kernel: its name,
    registers and spilled bytes. Raises ``BackendUnavailable`` without a compiler.
    """
    jit = import_module(".jit", __package__)
    where = find_device(0 if device is None else device)
    causal, head_dims = tuple(causal), tuple(head_dims)
    calls: list[tuple[AttentionSpec, frozenset[str] | None]] = []
    for dtype in dtypes:
        for dim in head_dims:
            for flag in causal:
                x = shaped((1, 1024, 8, dim), dtype)
                spec = bind_call(x, x, x, {**options, "causal": flag})
                calls += [(spec, None), (spec, frozenset("qkv"))][: 2 if backward else 1]
    kernels = kernels_of(calls, where)
    made = jit.compile_all((kernel, where.arch) for kernel in kernels)
    return [
        f"{kernel.entry} {_told(kernel.defines)}: {m.registers} registers, {m.spill_bytes} bytes spilled"
        for kernel, m in zip(kernels, made, strict=True)
    ]


def _told(defines: tuple[tuple[str, Any], ...]) -> str:
    """The defines that tell kernels apart, in short."""
    shown = dict(defines)
    dtype = ("float16", "bfloat16", "float32", "float64")[int(shown.get("DTYPE", 0))]
    return f"{dtype} head_dim {shown.get('HEAD_DIM', '?')}" + (" windowed" if shown.get("HAS_RIGHT") else "")
