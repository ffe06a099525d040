"""The CPU backend's threads: a team that claims tiles one by one, the calling thread among them.

A job is a block of 64-bit words: its steps, each with counters of tiles claimed and done on cache lines of
their own. Helpers are Python threads that spend a job inside compiled code, without the GIL. Whoever waits
waits only for tiles that a running thread has claimed, so callers on many threads cannot deadlock.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

STEP_WORDS = 32  # tiles, body, params in the first line; claimed, done in lines of their own
TILES, FUNCTION, PARAMS, CLAIMED, DONE = 0, 1, 2, 8, 16
HEADER = 32  # the number of steps
Job = NDArray[np.int64]


def thread_count() -> int:
    """Threads that a call may use: ``CUATTN_NUM_THREADS``, else the CPUs this process may run on."""
    wanted = os.environ.get("CUATTN_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_job(steps: Sequence[tuple[int, int, int]]) -> Job:
    """A job of (function address, params address, tiles) steps."""
    job: Job = np.zeros(HEADER + STEP_WORDS * len(steps), np.int64)
    job[0] = len(steps)
    for i, (function, block, tiles) in enumerate(steps):
        at = HEADER + i * STEP_WORDS
        job[at + TILES], job[at + FUNCTION], job[at + PARAMS] = tiles, function, block
    return job


def restart(job: Job) -> None:
    """Set a finished job's counters back; nobody else may hold it."""
    job[HEADER + CLAIMED :: STEP_WORDS] = 0
    job[HEADER + DONE :: STEP_WORDS] = 0


class Team:
    """Helper threads that live as long as the process; they sleep between jobs."""

    def __init__(self, drain_function: Any) -> None:
        self._drain = drain_function
        self._queue: SimpleQueue[Job] = SimpleQueue()
        self._helpers = 0
        self._lock = threading.Lock()
        self._process = os.getpid()

    def run(self, job: Job, threads: int) -> None:
        """Run a job on up to ``threads`` threads, the caller's included."""
        if threads > 1:
            self._start(threads - 1)
            for _ in range(threads - 1):
                self._queue.put(job)
        self._drain(job.ctypes.data, 0)

    def run_alone(self, job: int) -> None:
        """Run the job at an address on this thread."""
        self._drain(job, 0)

    def _start(self, helpers: int) -> None:
        if self._helpers >= helpers and self._process == os.getpid():
            return
        with self._lock:
            if self._process != os.getpid():  # forked: the threads stayed behind
                self._queue, self._helpers, self._process = SimpleQueue(), 0, os.getpid()
            while self._helpers < helpers:
                threading.Thread(target=self._help, args=(self._queue,), name="cuattn", daemon=True).start()
                self._helpers += 1

    def _help(self, queue: SimpleQueue[Job]) -> None:
        while True:
            job = queue.get()
            self._drain(job.ctypes.data, 0)
            del job
