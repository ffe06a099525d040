"""The compiled half of ``cpu_team.py``: what each thread of a team does with a job. No attention."""

from __future__ import annotations

from .cpu_simd import atomic_add, call, get_i64, pause
from .cpu_team import CLAIMED, DONE, FUNCTION, HEADER, PARAMS, STEP_WORDS, TILES

PATIENCE = 100  # yields before a waiting thread begins to sleep


def drain(job, _):
    """Claim and run tiles of each step in turn, and wait for a step's end before the next."""
    for step in range(get_i64(job, 0)):
        at = job + 8 * (HEADER + step * STEP_WORDS)
        tiles = get_i64(at, TILES)
        while True:
            tile = atomic_add(at + 8 * CLAIMED, 1)
            if tile >= tiles:
                break
            call(get_i64(at, FUNCTION), get_i64(at, PARAMS), tile)
            atomic_add(at + 8 * DONE, 1)
        waits = 0
        while atomic_add(at + 8 * DONE, 0) < tiles:
            waits += 1
            pause(0 if waits < PATIENCE else 50)
