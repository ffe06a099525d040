"""Tile tables of the mma.sync family: literals only, each row with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration of ``fwd.cu``, whose head says what the fields do.

    A row is for head dims up to ``head_dim``, for the architectures in ``archs`` (all, if empty), and with
    ``masked`` only for calls whose lengths or windows do (True) or do not (False) hide keys by position.
    """

    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    stages: int
    min_blocks: int = 1
    tie: int = 2
    archs: tuple[int, ...] = ()
    masked: bool | None = None
    q_in_registers: bool = False

    def shared_memory(self, head_dim: int, head_dim_v: int) -> int:
        """Bytes of dynamic shared memory at these (rounded) head dims: Q (or O), the stages of K and V."""
        keys = self.stages * self.block_n * (head_dim + head_dim_v)
        return 2 * (self.block_m * max(head_dim, head_dim_v) + keys)


HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # compile-time head dims; others round up

# Scores that are q.k, scaled: 32 rows a warp where registers allow, since each warp reads all of K and V; two
# blocks an SM hide each other's softmax. What was measured: docs/performance/mma_forward.md.
FORWARD = (
    Tile(64, 128, 96, 4, 2, 2),  # 64 + 96 accumulators a thread; 128 keys spill
    Tile(64, 128, 96, 4, 1, 2),  # sm_86, sm_89, sm_120: 40 KB
    Tile(64, 128, 64, 4, 1, 2),  # sm_75: 32 KB; 96 keys spill
    Tile(96, 128, 64, 4, 2, 2),  # 96 + 64
    Tile(128, 128, 48, 4, 2, 2, archs=(90,), masked=True),  # 64 keys spill beside a diagonal's positions
    Tile(128, 128, 64, 4, 2, 2),  # 128 + 64 in 96 KB
    Tile(128, 128, 48, 4, 2, 2, archs=(80,), masked=True),  # 80 KB, just twice in sm_80's 164
    Tile(128, 128, 48, 4, 2, 2, tie=0, archs=(80,)),  # tied, it spills
    Tile(128, 128, 32, 4, 1, 2),  # sm_86, sm_89, sm_120: 48 KB, still two blocks an SM
    Tile(128, 64, 64, 4, 1, 1),  # sm_75: 48 KB of its 64
    Tile(256, 128, 64, 8, 1, 1),  # O takes 128 registers at 16 rows a warp
    Tile(256, 64, 64, 4, 1, 1),  # sm_86, sm_89, sm_120: 96 KB
    Tile(256, 64, 32, 4, 1, 1),  # sm_75: 64 KB, all it has
)

# Scores with bias, mask, dropout and the like: 16 rows a warp leave registers for addresses and random bits.
FORWARD_FEATURED = (
    Tile(128, 64, 64, 4, 2, 2),
    Tile(128, 64, 64, 4, 1, 2),
    Tile(256, 64, 64, 4, 1, 1),
    Tile(256, 64, 32, 4, 1, 1),
)


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """A configuration of ``bwd.cu``, whose head says what its fields do; for head dims up to ``head_dim``."""

    head_dim: int
    block_m: int
    block_n: int
    warps_n: int
    warps_m: int
    sub_m: int
    stages: int
    dq_warps_m: int
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_m

    def shared_memory(self, head_dim: int, head_dim_v: int) -> int:
        """Bytes of dynamic shared memory at these (rounded) head dims.

        K, V, the stages of Q, dO, LSE and delta, dS, P.
        """
        dims = head_dim + head_dim_v
        scores = self.block_m * self.block_n * (2 if self.warps_m > 1 else 1)
        return (
            2 * (dims * (self.block_n + self.stages * self.block_m) + scores) + 8 * self.stages * self.block_m
        )


# dK and dV take 2 * block_n * head_dim / threads registers each, the scores 2 * 32 a thread. 128 keys where
# they fit: the traffic of dQ's sums falls with them.
BACKWARD = (
    BackwardTile(64, 64, 128, 4, 1, 32, 2, 2, 2),  # 80 KB: two blocks an SM hide each other's barriers
    BackwardTile(64, 64, 64, 4, 1, 32, 1, 2, 2),  # sm_86, sm_89: 41 KB
    BackwardTile(64, 64, 64, 4, 1, 32, 1, 2, 1),  # sm_75
    BackwardTile(96, 64, 128, 4, 2, 32, 2, 4, 1),  # 129 KB
    BackwardTile(96, 64, 64, 4, 1, 32, 2, 2, 1),  # sm_86, sm_89: 81 KB
    BackwardTile(96, 32, 64, 4, 1, 32, 1, 2, 1),  # sm_75: 40 KB
    BackwardTile(128, 64, 128, 4, 2, 32, 2, 2, 1),  # 161 KB, just within sm_80
    BackwardTile(128, 64, 64, 4, 1, 32, 1, 2, 1),  # sm_86, sm_89: 72 KB
    BackwardTile(128, 32, 64, 4, 1, 32, 1, 2, 1),  # sm_75: 52 KB
    BackwardTile(192, 64, 64, 4, 2, 32, 2, 2, 1),  # 161 KB
    BackwardTile(192, 32, 64, 4, 2, 16, 1, 2, 1),  # sm_86, sm_89: 80 KB
    BackwardTile(192, 32, 32, 2, 2, 16, 1, 2, 1),  # sm_75: 52 KB
    BackwardTile(256, 64, 64, 4, 2, 32, 2, 2, 1),  # 209 KB
    BackwardTile(256, 64, 64, 4, 2, 32, 1, 2, 1),  # sm_80: 145 KB
    BackwardTile(256, 32, 32, 2, 2, 16, 1, 2, 1),  # sm_86, sm_89: 68 KB
)

# With a bias or a mask, whose loads want registers too: 3.9 ms instead of 4.9, 3.5 instead of 3.6 (2 x 4096
# tokens, 32 heads).
BACKWARD_BIASED = (BackwardTile(64, 64, 128, 4, 1, 16, 2, 2, 2), *BACKWARD)

# bwd_dbias.cu: only block_m, block_n and warps_n count, and shared memory, which has no dS.
BACKWARD_BIAS = (
    BackwardTile(128, 64, 64, 4, 1, 64, 1, 4),
    BackwardTile(256, 32, 64, 4, 1, 32, 1, 2),
)
