"""The CPU backend: specs into programs of loops (``Host`` steps), and programs onto NumPy arrays and threads.

The loops are in ``cpu_tiles.py``, their machine code is ``cpu_code.py``'s, threads are ``cpu_team.py``'s.
Numba itself is imported only when something has to be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import params
from ..philox import threshold
from ..program import Buffer, Host, Memset, Program
from ..spec import ITEMSIZE, AttentionSpec, Operand, row_major
from .cpu_layout import (
    GROUP,
    KIND_BFLOAT16,
    KIND_FLOAT16,
    KIND_FLOAT32,
    KIND_REAL,
    WANT_K,
    WANT_Q,
    WANT_V,
    lanes_of,
    padding,
    panel_width,
    second_level_bytes,
)
from .cpu_team import PLACE_SMALL, Team, make_job, restart, thread_count

Array = NDArray[Any]
Values = dict[str, int | float]
Pointers = tuple[tuple[str, str], ...]

# Measured in docs/performance/cpu.md
MAX_ROWS = 512  # query rows of a tile: keys and values are copied once for all of them
PLAIN_ROWS = 1024  # of a forward without features, whose terms take as much of the cache as the rows
MIN_ROWS = 64  # below it copying costs more than finer tiles bring
KEYS = 64  # of a block: its scores stay in the first-level cache
LONG_KEYS = 128  # the same for a forward whose two blocks of keys and of values leave the cache to the rows
TILES_PER_THREAD = 8  # so that the last ones do not keep all waiting
DECODE_ROWS = 8  # up to so many query rows keys are read once per row group, not packed for a panel
DECODE_KEYS = 256  # keys of a block where each is read once: long runs through memory
SHARED_KEYS = 64  # keys of a block that several rows attend to: it stays in the second-level cache
DECODE_PART = 1024  # keys of a part at least
SHARED_WORK = 3.0e5  # from here a helper that looks for work anyway is offered some of a short call
SERIAL_WORK = 8.0e6  # below it (some 0.1 ms) waking helpers costs more than they bring
TILE_WORK = 2.0e6  # of a tile at least: claiming and scratch cost a tenth of a microsecond or two
NEAR = 2 << 20  # elements of all keys and values: up to it the long rows of all heads come first, then short
SMALL, SMALL_DIM = 128, 64  # rows, keys and head dims up to which reading keys and values in place is faster
PARTS_PER_THREAD = 4  # the same for the backward, whose parts each hold sums of dk and dv


def unavailable() -> str | None:
    """Why this backend cannot run here; None when it can."""
    missing = [name for name in ("numba", "llvmlite") if find_spec(name) is None]
    return f"{' and '.join(missing)} not installed: pip install numba" if missing else None


# ------------------------------------------------------------------------------------------------
# Programs
# ------------------------------------------------------------------------------------------------


def _kind(spec: AttentionSpec, dtype: str) -> int:
    if dtype == spec.accumulator:
        return KIND_REAL
    return {"float16": KIND_FLOAT16, "bfloat16": KIND_BFLOAT16, "float32": KIND_FLOAT32}[dtype]


def _has_features(spec: AttentionSpec) -> bool:
    """Whether scores need more than a range of keys per row."""
    return bool(
        spec.bias or spec.mask or spec.alibi_slopes or spec.segments or spec.softcap > 0 or spec.dropout_p > 0
    )


def _operands(spec: AttentionSpec) -> list[str]:
    """Names of the forward's inputs."""
    names = ["q", "k", "v"]
    names += [n for n in ("bias", "mask", "alibi_slopes", "sinks") if getattr(spec, n) is not None]
    names += ["q_segment_ids", "kv_segment_ids"] if spec.segments else []
    names += [n for n in ("q_seqlens", "kv_seqlens") if getattr(spec, n)]
    names += ["q_offset"] if spec.q_offset == "array" else []
    names += ["cu_seqlens_q", "cu_seqlens_k"] if spec.varlen else []
    names += ["dropout_seed"] if spec.dropout_p > 0 else []
    names += ["softmax_scale"] if spec.softmax_scale is None else []
    return names


def _set_strides(values: Values, name: str, operand: Operand) -> None:
    for axis, stride in zip("bhs", operand.strides, strict=False):
        values[f"{name}_stride_{axis}"] = stride


def _set_contiguous(
    values: Values, spec: AttentionSpec, name: str, heads: int, seqlen: int, dim: int
) -> None:
    for axis, stride in zip("bhs", spec.strides_of(heads, seqlen, dim), strict=True):
        values[f"{name}_stride_{axis}"] = stride


def _common(spec: AttentionSpec, rows: int, keys: int) -> Values:
    """The words of the parameter block that every loop reads."""
    values: Values = {
        "batch": spec.batch, "heads_q": spec.heads_q, "heads_kv": spec.heads_kv,
        "seqlen_q": spec.seqlen_q, "seqlen_kv": spec.seqlen_kv,
        "head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v,
        "window_left": spec.window_left, "window_right": spec.window_right,
        "softcap": spec.softcap, "softmax_scale_value": spec.softmax_scale or 0.0,
        "lse_stride_h": spec.total_q if spec.varlen else spec.seqlen_q,
        "lse_stride_b": 0 if spec.varlen else spec.heads_q * spec.seqlen_q,
        "aux0": _kind(spec, spec.dtype), "aux1": rows, "aux2": keys, "aux6": spec.total_q,
    }  # fmt: skip
    for name in ("q", "k", "v"):
        _set_strides(values, name, getattr(spec, name))
    _set_contiguous(values, spec, "out", spec.heads_q, spec.seqlen_q, spec.head_dim_v)
    modes = {"array": params.OFFSET_ARRAY, "bottom_right": params.OFFSET_BOTTOM_RIGHT}
    values["q_offset_mode"] = modes.get(str(spec.q_offset), params.OFFSET_VALUE)
    values["q_offset_value"] = spec.q_offset if isinstance(spec.q_offset, int) else 0
    for name in ("bias", "mask"):
        operand: Operand | None = getattr(spec, name)
        if operand is not None:
            for axis, stride in zip("bhqk", operand.strides, strict=True):
                values[f"{name}_stride_{axis}"] = stride
    if spec.bias is not None:
        values["aux5"] = _kind(spec, spec.bias.dtype)
    if spec.alibi_slopes is not None:
        values["alibi_slopes_stride_b"] = spec.alibi_slopes.strides[0]
    if spec.dropout_p > 0:
        values["dropout_threshold"] = threshold(spec.dropout_p)
        values["dropout_scale"] = 1.0 / (1.0 - spec.dropout_p)
    return values


def _is_small(spec: AttentionSpec, threads: int) -> bool:
    """Whether ``cpu_small.py`` has it: short sequences, whole vectors of 8 rows or more, groups of 8 keys.

    A tile is a head there, which threads may share badly.
    """
    lanes, heads = lanes_of(spec.accumulator), spec.batch * spec.heads_q
    return (
        spec.dtype == spec.accumulator
        and lanes >= 8
        and max(spec.seqlen_q, spec.seqlen_kv) <= SMALL
        and max(spec.head_dim, spec.head_dim_v) <= SMALL_DIM
        and not any(n % lanes for n in (spec.seqlen_q, spec.head_dim, spec.head_dim_v))
        and spec.seqlen_kv % 8 == 0
        and spec.softmax_scale is not None
        and spec.softmax_scale > 0
        and not (_has_features(spec) or spec.sinks or spec.varlen or spec.q_seqlens or spec.kv_seqlens)
        and spec.q_offset != "array"
        and (spec.seqlen_q <= MIN_ROWS or _work(spec) < SERIAL_WORK or heads >= threads * TILES_PER_THREAD)
    )


def _fit(limit: int, length: int, step: int) -> int:
    """``limit``, or less where ``length`` needs less; a multiple of step."""
    return max(step, min(limit // step * step, -(-length // step) * step))


def _entry(spec: AttentionSpec, loop: str, features: bool) -> str:
    return f"{loop}.{spec.accumulator}" + (".features" if features else "")


def _forward_rows(spec: AttentionSpec, threads: int) -> int:
    """Query rows of a tile: as many as the second-level cache holds, but enough tiles for all threads."""
    width = panel_width(spec.accumulator)
    itemsize = ITEMSIZE[spec.accumulator]
    rows = MAX_ROWS if _has_features(spec) else PLAIN_ROWS
    while rows > MIN_ROWS and rows * (spec.head_dim + spec.head_dim_v) * itemsize > second_level_bytes() // 2:
        rows //= 2
    pairs = spec.batch * spec.heads_q
    while rows > MIN_ROWS and pairs * -(-spec.seqlen_q // rows) < threads * TILES_PER_THREAD:
        rows //= 2
    return _fit(rows, spec.seqlen_q, width)


def _forward_keys(spec: AttentionSpec) -> int:
    """Keys of a block: longer sums, as long as they leave the second-level cache to a tile's rows."""
    one = (spec.head_dim + spec.head_dim_v) * ITEMSIZE[spec.accumulator]
    most = LONG_KEYS if LONG_KEYS * one <= second_level_bytes() // 8 and not _has_features(spec) else KEYS
    return _fit(most, spec.seqlen_kv, GROUP)


def _work(spec: AttentionSpec) -> float:
    """Floating-point operations of a forward; with few query rows, what reading the keys is worth."""
    keys = spec.seqlen_kv
    if spec.window_left >= 0 and spec.window_right >= 0:
        keys = min(keys, spec.window_left + spec.window_right + 1)
    dims = spec.head_dim + spec.head_dim_v
    return spec.batch * keys * dims * max(2.0 * spec.heads_q * spec.seqlen_q, 16.0 * spec.heads_kv)


def _together(spec: AttentionSpec, blocks: int, threads: int) -> int:
    """Blocks of query rows that one tile takes in turn: all where one thread does all, else few."""
    if _work(spec) < SERIAL_WORK:
        return blocks
    enough = int(TILE_WORK * blocks / _work(spec))
    return max(1, min(enough, blocks // (threads * TILES_PER_THREAD)))


def _backward_rows(spec: AttentionSpec, threads: int) -> int:
    """Query rows of a block; parts of one head need blocks to be dealt."""
    pairs, rows = spec.batch * spec.heads_kv, MAX_ROWS
    wanted = 2 * -(-threads * PARTS_PER_THREAD // max(pairs, 1)) if pairs % threads else 1
    while rows > MIN_ROWS and spec.group * -(-spec.seqlen_q // rows) < wanted:
        rows //= 2
    return _fit(rows, spec.seqlen_q, panel_width(spec.accumulator))


def forward_program(spec: AttentionSpec, threads: int | None = None) -> Program:
    """One loop over blocks of query rows; any number of threads may run it, ``threads`` is what it is cut to.

    Few rows and no features: one over parts of the keys, and one that puts the parts together.
    """
    threads = threads or thread_count()
    if spec.seqlen_q <= DECODE_ROWS and not _has_features(spec):
        return _decode_program(spec, threads)
    small = _is_small(spec, threads)
    rows = spec.seqlen_q if small else _forward_rows(spec, threads)
    keys = _forward_keys(spec)
    inputs = tuple(_operands(spec))
    outputs = (Buffer("out", spec.out_shape, spec.dtype), Buffer("lse", spec.lse_shape, spec.accumulator))
    blocks = spec.batch * spec.heads_q * -(-spec.seqlen_q // rows)
    together = _together(spec, blocks, threads)
    near = spec.batch * spec.heads_kv * spec.seqlen_kv * (spec.head_dim + spec.head_dim_v) <= NEAR
    shared = threads > 1 and together == blocks and _work(spec) >= SHARED_WORK
    step = Host(
        _entry(spec, "small", False) if small else _entry(spec, "forward", _has_features(spec)),
        -(-blocks // together),
        params.pack(_common(spec, rows, keys) | {"aux3": together, "aux4": int(shared if small else near)}),
        tuple((name, name) for name in (*inputs, "out", "lse")),
    )
    clear = (Memset("out"),) if spec.varlen else ()  # rows of no sequence
    return Program(inputs, outputs, (), (*clear, step))


def _decode_program(spec: AttentionSpec, threads: int) -> Program:
    values = _common(spec, 0, DECODE_KEYS if spec.group * spec.seqlen_q == 1 else SHARED_KEYS)
    pairs = spec.batch * spec.heads_kv
    most = max(1, spec.seqlen_kv // DECODE_PART)
    together = 1  # heads whose rows are neighbours in memory
    lanes = lanes_of(spec.accumulator)
    while spec.k.strides[1] < spec.k.strides[2] and spec.heads_kv % (2 * together) == 0 and together < lanes:
        together *= 2
    tiles = pairs // together
    parts = min(most, -(-threads * PARTS_PER_THREAD // tiles)) if tiles % threads or tiles < threads else 1
    values |= {"aux3": parts, "aux4": together}
    inputs = tuple(_operands(spec))
    outputs = (Buffer("out", spec.out_shape, spec.dtype), Buffer("lse", spec.lse_shape, spec.accumulator))
    step = padding(spec.accumulator)
    record = -(-spec.head_dim_v // step) * step + 3
    scratch = Buffer("scratch", (pairs, parts, spec.group * spec.seqlen_q, record), spec.accumulator)
    pointers = tuple((name, name) for name in (*inputs, "out", "lse", "scratch"))
    block = params.pack(values)
    steps = (
        Host(_entry(spec, "decode", False), tiles * parts, block, pointers),
        Host(_entry(spec, "combine", False), spec.batch * spec.heads_q, block, pointers),
    )
    clear = (Memset("out"),) if spec.varlen else ()
    return Program(inputs, outputs, (scratch,), (*clear, *steps))


def backward_program(spec: AttentionSpec, wants: frozenset[str], threads: int | None = None) -> Program:
    """Loops over parts of the query rows of each key/value head, then over what bias and sinks want.

    With few heads the rows of one are dealt to several parts, as many as ``threads`` can use; each part
    holds its own sums of dk and dv, O(sequence), which a last loop adds up in a fixed order.
    """
    threads = threads or thread_count()
    rows = _backward_rows(spec, threads)
    keys = _fit(KEYS, spec.seqlen_kv, GROUP)
    values = _common(spec, rows, keys)
    dout = spec.dout or Operand(spec.dtype, (), spec.strides_of(spec.heads_q, spec.seqlen_q, spec.head_dim_v))
    _set_strides(values, "dout", dout)
    inputs = (*_operands(spec), "out", "lse", "dout", *(("dlse",) if spec.dlse else ()))
    outputs = tuple(
        Buffer(f"d{name}", spec.gradient_shape(name), spec.gradient_dtype(name))
        for name in ("q", "k", "v", "bias", "sinks")
        if name in wants
    )
    pointers = tuple((name, name) for name in inputs)
    workspace: tuple[Buffer, ...] = ()
    steps: list[Host | Memset] = []
    if wants & {"q", "k", "v"}:
        workspace, steps = _qkv_steps(spec, wants, threads, values, pointers)
    if "bias" in wants and not _bias_on_the_way(spec, wants):
        steps.append(_bias_step(spec, values, pointers))
    if "sinks" in wants:
        block = params.pack(values)
        entry = _entry(spec, "sinks_gradient", False)
        steps.append(Host(entry, spec.heads_q, block, (*pointers, ("dsinks", "dsinks"))))
    return Program(inputs, outputs, workspace, tuple(steps))


def _qkv_steps(
    spec: AttentionSpec, wants: frozenset[str], threads: int, values: Values, pointers: Pointers
) -> tuple[tuple[Buffer, ...], list[Host | Memset]]:
    """Workspace and steps for dq, dk and dv, as wanted; and for dbias where it is found on the way."""
    wanted = [name for name in ("q", "k", "v") if name in wants]
    keys_shape = (spec.heads_kv, spec.seqlen_kv)
    lengths = {
        "q": (spec.heads_q, spec.seqlen_q, spec.head_dim),
        "k": (*keys_shape, spec.head_dim),
        "v": (*keys_shape, spec.head_dim_v),
    }
    for name in wanted:
        _set_contiguous(values, spec, f"d{name}", *lengths[name])
    pairs = spec.batch * spec.heads_kv
    blocks = spec.group * -(-spec.seqlen_q // int(values["aux1"]))
    parts = 1
    if pairs < threads * PARTS_PER_THREAD and pairs % threads:
        parts = max(1, min(threads, blocks, -(-threads * PARTS_PER_THREAD // pairs)))
    bits = {"q": WANT_Q, "k": WANT_K, "v": WANT_V}
    values |= {"aux3": parts, "aux4": sum(bits[name] for name in wanted)}
    named = [f"d{name}" for name in wanted]
    steps: list[Host | Memset] = [Memset(name) for name in named] if spec.varlen else []
    if _bias_on_the_way(spec, wants):
        values |= _dbias_strides(spec)
        named.append("dbias")
        steps.append(Memset("dbias"))
    workspace: tuple[Buffer, ...] = ()
    reduced = [name for name in wanted if name != "q"] if parts > 1 else []
    for name in reduced:
        step = padding(spec.accumulator)
        held = -(-spec.seqlen_kv // GROUP) * GROUP + GROUP
        shape = (pairs * parts, held, -(-lengths[name][2] // step) * step)
        workspace += (Buffer(f"d{name}_accum", shape, spec.accumulator),)
        named.append(f"d{name}_accum")
    pointers = (*pointers, *((name, name) for name in named))
    block = params.pack(values)
    steps.append(Host(_entry(spec, "backward", _has_features(spec)), pairs * parts, block, pointers))
    if reduced:
        tiles = pairs * -(-spec.seqlen_kv // int(values["aux2"]))
        steps.append(Host(_entry(spec, "reduce", False), tiles, block, pointers))
    return workspace, steps


def _bias_shape(spec: AttentionSpec) -> tuple[int, ...]:
    """The bias's own shape with all four axes."""
    assert spec.bias_shape is not None
    return (1,) * (4 - len(spec.bias_shape)) + tuple(spec.bias_shape)


def _dbias_strides(spec: AttentionSpec) -> dict[str, int]:
    shape = _bias_shape(spec)
    strides = [0 if n == 1 else s for n, s in zip(shape, row_major(shape), strict=True)]
    return {f"dbias_stride_{axis}": s for axis, s in zip("bhqk", strides, strict=True)}


def _bias_on_the_way(spec: AttentionSpec, wants: frozenset[str]) -> bool:
    """Whether dbias is the score gradient as dq and dk need it anyway: nothing summed, no softcap between."""
    whole = (spec.batch, spec.heads_q, spec.seqlen_q, spec.seqlen_kv)
    return "bias" in wants and bool(wants & {"q", "k"}) and spec.softcap == 0 and _bias_shape(spec) == whole


def _bias_step(spec: AttentionSpec, values: Values, pointers: Pointers) -> Host:
    """dbias by itself, summed over the axes that bias is broadcast over."""
    strides = _dbias_strides(spec)
    row_blocks, key_blocks = (
        -(-spec.seqlen_q // int(values["aux1"])),
        -(-spec.seqlen_kv // int(values["aux2"])),
    )
    tiles = 1
    counts = (spec.batch, spec.heads_q, row_blocks, key_blocks)
    for stride, count in zip(strides.values(), counts, strict=True):
        tiles *= count if stride else 1
    block = params.pack(values | strides)
    return Host(_entry(spec, "bias_gradient", False), tiles, block, (*pointers, ("dbias", "dbias")))


# ------------------------------------------------------------------------------------------------
# Running them on NumPy arrays
# ------------------------------------------------------------------------------------------------


def host_entry(name: str) -> int:
    """Address of the loop ``void body(int64 params, int64 tile)`` that a ``Host`` step names."""
    return _host_entries([name])[0]


def _host_entries(names: list[str]) -> list[int]:
    from .cpu_code import host_entries

    found = host_entries(names)
    for name, address in zip(names, found, strict=True):
        loop, _, real = name.partition(".")
        if loop == "small":
            _team().lend(PLACE_SMALL + (real == "float64"), address, thread_count())
    return found


@cache
def _team() -> Team:
    from .cpu_code import DRAIN, host_function

    return Team(host_function(DRAIN))


class _Run:
    """Parameter blocks and the job over them, made once and used by one call at a time."""

    def __init__(self, hosts: list[Host], entries: list[int]) -> None:
        self._blocks = [np.frombuffer(host.block_words, np.int64).copy() for host in hosts]
        self.words = [block.data for block in self._blocks]
        steps = zip(entries, self._blocks, hosts, strict=True)
        self.job = make_job([(entry, block.ctypes.data, host.tiles) for entry, block, host in steps])
        self.address = self.job.ctypes.data


class Prepared:
    """A program bound to nothing yet: called with arrays by name, it gives its outputs by name.

    Safe from several threads at once: whatever a call writes belongs to that call.
    """

    def __init__(self, program: Program, spec: AttentionSpec, threads: int) -> None:
        self._outputs = [
            (b.name, b.shape, None if b.dtype == "bfloat16" else np.dtype(b.dtype)) for b in program.outputs
        ]
        self._workspace = [(b.name, b.shape, np.dtype(b.dtype)) for b in program.workspace]
        self._memsets = [step.buffer for step in program.steps if isinstance(step, Memset)]
        self._hosts = [step for step in program.steps if isinstance(step, Host) and step.tiles > 0]
        self._entries = _host_entries([step.entry for step in self._hosts])
        places: dict[str, list[tuple[int, int]]] = {}
        for i, step in enumerate(self._hosts):
            for field, name in step.pointers:
                places.setdefault(name, []).append((i, params.INDEX[field]))
        self._places = list(places.items())
        tiles = max((step.tiles for step in self._hosts), default=0)
        self._threads = 1 if _work(spec) < SERIAL_WORK else max(1, min(threads, tiles))
        self._seeded = "dropout_seed" in places
        self._spare: list[_Run] = []
        self._team = _team()

    def __call__(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Run on the operands by name; fresh outputs by name."""
        like = arrays["q"].dtype
        outputs = {name: np.empty(shape, dtype or like) for name, shape, dtype in self._outputs}
        held = {**arrays, **outputs}
        for name, shape, dtype in self._workspace:
            held[name] = np.empty(shape, dtype)
        if self._seeded and not isinstance(held["dropout_seed"], np.ndarray):
            held["dropout_seed"] = np.array(
                [held["dropout_seed"], 0, 0, 0, 0], np.int64
            )  # as philox.cuh has it
        for name in self._memsets:
            held[name].fill(0)
        run = self._spare.pop() if self._spare else _Run(self._hosts, self._entries)
        for name, places in self._places:
            address = held[name].__array_interface__["data"][0]
            for block, word in places:
                run.words[block][word] = address
        restart(run.job)
        if self._threads > 1:
            self._team.run(run.job, self._threads)
        else:
            self._team.run_alone(run.address)
        self._spare.append(run)
        return outputs


def prepare(spec: AttentionSpec, device: int | None, wants: frozenset[str] | None) -> Prepared:
    """Compile what a forward (``wants`` None) or a backward for ``wants`` needs on NumPy arrays."""
    threads = thread_count()
    program = forward_program(spec, threads) if wants is None else backward_program(spec, wants, threads)
    return Prepared(program, spec, threads)
