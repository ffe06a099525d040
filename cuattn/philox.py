"""Dropout's keep mask: Philox4x32-7, a function of (seed, batch, q head, row, column) alone.

The twin of ``kernels_cu/philox.cuh``, in NumPy. Source: Salmon, Moraes, Dror, Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC'11. Nothing here knows attention.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 7


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Apply the seven rounds to counters of shape (..., 4); the same shape of uint32 comes back."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (np.uint64(k & 0xFFFFFFFF) for k in key)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(ROUNDS):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def threshold(p: float) -> int:
    """The number of the 65536 equally likely 16-bit draws that keep a weight at dropout rate p."""
    return round((1.0 - p) * 65536)


def keep_mask(
    seed: int,
    p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_kv: int,
    *,
    first: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> NDArray[np.bool_]:
    """The kept weights, (batch, heads, seqlen_q, seqlen_kv), of a dropout of rate p.

    ``first``: the batch, head, row and column (a multiple of 32) at which this part of a whole begins.

    Columns 32 g + 8 t + 2 j + h of a row share the call with counter (4 g + j, row, head, batch); word t
    of it holds h = 0 in its low 16 bits and h = 1 in its high ones.
    """
    groups = -(-seqlen_kv // 32)
    counts = (batch, heads, seqlen_q, 4 * groups)
    b, h, row, call = np.meshgrid(*(np.arange(n, dtype=np.uint32) for n in counts), indexing="ij")
    b, h, row = (x + np.uint32(n) for x, n in zip((b, h, row), first, strict=False))
    call = call + np.uint32(first[3] // 32 * 4)
    seed &= (1 << 64) - 1
    words = philox4x32(np.stack([call, row, h, b], axis=-1), (seed & 0xFFFFFFFF, seed >> 32))
    draws = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)  # b h row (g j) t half
    draws = draws.reshape(batch, heads, seqlen_q, groups, 4, 4, 2).swapaxes(4, 5)  # ... g t j half
    return draws.reshape(batch, heads, seqlen_q, 32 * groups)[..., :seqlen_kv] < threshold(p)
