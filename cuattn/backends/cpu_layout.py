"""What the CPU backend's planner and its compiled loops agree on: codes, words of the block, register tiles.

Imports neither Numba nor llvmlite by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# The aux words of the parameter block:
# aux0  how q, k, v, out and their gradients are stored: KIND_*
# aux1  query rows of a tile, a multiple of the panel width
# aux2  keys of a block, a multiple of 32
# aux3  backward: parts that the query rows of a key/value head are dealt to; forward: blocks of a tile
# aux4  backward: WANT_* bits; forward: whether long rows of all heads come first;
#       small: whether another thread may help
# aux5  how bias and its gradient are stored: KIND_*
# aux6  packed sequences: rows of q in all
KIND_REAL, KIND_FLOAT16, KIND_BFLOAT16, KIND_FLOAT32 = range(4)
WANT_Q, WANT_K, WANT_V = 1, 2, 4
LINE = 64  # bytes of a cache line
# Words of a record of rows that the products prefetch and copy on the side: where the next one lies, bytes
# to the one behind it, bytes of one, how many are left, how many go at a step; where copies go (0: nowhere),
# bytes between them; where the rows in use are
SOURCE, STRIDE, SIZE, LEFT, EACH, TARGET, TARGET_STRIDE, IN_USE = range(8)
ROWS_AHEAD = 2  # of a row that is copied goes the one that is prefetched
GROUP = 32  # columns that share dropout's counters; blocks of keys begin at a multiple of it


@dataclass(frozen=True)
class Isa:
    """Register tile of one instruction set: accumulators are ``rows`` x ``vectors`` registers."""

    vector_bytes: int
    rows: int
    vectors: int

    def lanes(self, itemsize: int) -> int:
        return self.vector_bytes // itemsize

    def width(self, itemsize: int) -> int:
        """Query rows of a panel."""
        return self.vectors * self.lanes(itemsize)

    def narrow(self) -> Isa:
        """The tile for few query rows: one vector of them, 8 numbers at least."""
        return Isa(self.vector_bytes, 8, 1)


def isa_of(features: Callable[[str], bool]) -> Isa:
    """The register tile for a CPU: what its registers hold beside the operands of one step."""
    if features("avx512f"):
        return Isa(64, 8, 2)  # 16 of 32; a width of 32 wastes less at the diagonal than 48
    if features("avx2"):
        return Isa(32, 4, 3)  # 12 of 16, 3 for the panel, 1 for the broadcast
    if features("neon") or features("fp-armv8"):
        return Isa(16, 8, 2)  # 16 of 32
    return Isa(16, 4, 2)  # SSE2: 8 of 16


@cache
def machine() -> Isa:
    """The register tile for this CPU."""
    from .cpu_code import features

    return isa_of(features().__contains__)


@cache
def second_level_bytes() -> int:
    """Size of a core's second-level cache; where the system does not tell, what most have at least."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return 512 << 10


def _itemsize(accumulator: str) -> int:
    return 8 if accumulator == "float64" else 4


def panel_width(accumulator: str) -> int:
    """Query rows of a panel on this CPU, for tiles that compute in ``accumulator``."""
    return machine().width(_itemsize(accumulator))


def lanes_of(accumulator: str) -> int:
    """Numbers that a vector of this CPU holds."""
    return machine().lanes(_itemsize(accumulator))


def padding(accumulator: str) -> int:
    """What rows in scratch are padded to a multiple of, in elements."""
    return max(lanes_of(accumulator), machine().rows)
