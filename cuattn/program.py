"""What a backend hands over to be run: a list of launches over named buffers. Plain data, hashable.

The same program is executed by CuPy (``backends/cuda.py``), by NumPy (``backends/numba.py``) and inside
XLA's handlers (``interop/xla_ffi.py``): each only fills in addresses and issues the launches in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import params


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel: a source file of ``kernels_cu`` (its stem), its defines, and the entry's name."""

    source: str
    entry: str
    defines: tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A TMA descriptor, passed as a 128-byte kernel argument after the parameter block.

    ``dims`` and ``box`` count elements, innermost first; ``strides`` are bytes of all axes but the
    innermost (multiples of 16). Elements are of ``dtype``; ``swizzle`` is in bytes (0, 32, 64, 128).
    """

    buffer: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    offset: int = 0  # bytes from the buffer's start


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. Arguments: the parameter block by value, then each tensor map by value."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared_memory: int  # dynamic, bytes
    block_words: bytes  # a packed ``params`` block; pointers are 0
    pointers: tuple[tuple[str, str], ...]  # (params field, buffer name) to fill in
    tensor_maps: tuple[TensorMap, ...] = ()
    dependent: bool = False  # programmatic dependent launch: may start while its predecessor drains


@dataclass(frozen=True, slots=True)
class Memset:
    """Fill a buffer's bytes with zero before what follows."""

    buffer: str


@dataclass(frozen=True, slots=True)
class Host:
    """One loop of the CPU backend: ``entry(params, tile)`` for every tile in ``range(tiles)``."""

    entry: str  # name in the CPU backend's table of compiled loops
    tiles: int
    block_words: bytes
    pointers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array that a program writes or needs: shape in the caller's layout, C-contiguous."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Program:
    """Steps in order. ``inputs`` are names of operands, ``outputs`` come back, ``workspace`` is scratch."""

    inputs: tuple[str, ...]
    outputs: tuple[Buffer, ...]
    workspace: tuple[Buffer, ...]
    steps: tuple[Launch | Memset | Host, ...]

    def __post_init__(self) -> None:
        known = {*self.inputs, *(b.name for b in self.outputs), *(b.name for b in self.workspace)}
        for step in self.steps:
            if isinstance(step, Memset):
                assert step.buffer in known, step.buffer
                continue
            assert len(step.block_words) == 8 * params.WORDS
            for field, name in step.pointers:
                assert field in params.POINTERS and name in known, (field, name)
