"""The CPU backend's threads: a team that claims tiles one by one, the calling thread among them.

A job is a block of 64-bit words: its steps, each with counters of tiles claimed and done on cache lines of
their own. Helpers are Python threads that enter compiled code (``cpu_drain.py``) once and stay there: they
sleep on a condition outside of the GIL, and a job reaches them without Python. Whoever waits waits only for
threads that are running, so callers on many threads cannot deadlock.

Work of microseconds is only offered: a helper that looks for work at that moment takes some of it, and nobody
is woken. Where such calls follow each other, one in a while wakes a helper, which then stays awake with them.

A team as large as the machine keeps each helper on a CPU of its own and the caller, during a job, on another:
kernels that like to leave CPUs idle put the two on one, where they take turns for tens of milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

# A job
STEPS, TEAM = 0, 1  # how many; address of the team that helps
SAVED, ALONE, CPU_WORDS = 8, 24, 16  # sets of 1024 CPUs: the caller's own, and the one it stays on meanwhile
HEADER = 40
STEP_WORDS = 32  # tiles, body, params in the first line; claimed, done in lines of their own
TILES, FUNCTION, PARAMS, CLAIMED, DONE = 0, 1, 2, 8, 16
# A team: POSIX objects of 16 words each, counters and slots in lines of their own
LOCK, WORK, PROGRESS = 0, 16, 32  # a mutex; conditions: a job was posted, a step ended or a helper left
POSTS, PARKED = 48, 56  # jobs posted so far, helpers that sleep
SLOTS_AT, SLOTS, SLOT_WORDS = 64, 64, 8  # jobs at once; a caller that finds no slot works alone
SLOT_JOB, SLOT_TICKETS, SLOT_USERS = 0, 1, 2  # address; helpers that it still takes; -(those inside)
CALLER, HOMES = 576, 577  # the CPU that the last caller ran on, -1: nobody is kept anywhere; helpers that are
CPU_SET = 584  # room for a set
OFFER = 600  # NOBODY looks for offers, one is WAITING, has TAKEN one; or the address of an offered job
LONELY, EVERY = 608, 609  # offers in a row that nobody saw; how many until a helper is woken
HOMES_AT, MAX_HOMES = 616, 1023  # thread id and CPU of each
NOBODY, WAITING, TAKEN = 0, 1, 2
OFTEN, RARELY = 8, 256  # of EVERY: while helpers come, and at most
# An offered job, which function(job, -1) helps with; own lines: what is claimed, whether help is done
OFFERED_FUNCTION, OFFERED_PARAMS, OFFERED_SCRATCH, OFFERED_END = range(4)
OFFERED_NEXT, OFFERED_DONE, OFFERED_WORDS = 8, 16, 24
# What compiled code finds by a symbol: this process's team (0: none), its functions that help
PLACES_SYMBOL = "cuattn_places_1"
PLACES: NDArray[np.int64] = np.zeros(8, np.int64)
PLACE_TEAM, PLACE_SMALL = 0, 1  # the latter for float32, then for float64
TEAM_WORDS = HOMES_AT + 2 * MAX_HOMES
Words = NDArray[np.int64]


if hasattr(os, "register_at_fork"):  # helpers stay behind
    os.register_at_fork(after_in_child=lambda: PLACES.fill(0))


def thread_count() -> int:
    """Threads that a call may use: ``CUATTN_NUM_THREADS``, else the CPUs this process may run on."""
    wanted = os.environ.get("CUATTN_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_job(steps: Sequence[tuple[int, int, int]]) -> Words:
    """A job of (function address, params address, tiles) steps."""
    job: Words = np.zeros(HEADER + STEP_WORDS * len(steps), np.int64)
    job[STEPS] = len(steps)
    for i, (function, block, tiles) in enumerate(steps):
        at = HEADER + i * STEP_WORDS
        job[at + TILES], job[at + FUNCTION], job[at + PARAMS] = tiles, function, block
    return job


def restart(job: Words) -> None:
    """Set a finished job's counters back."""
    job[HEADER + CLAIMED :: STEP_WORDS] = 0
    job[HEADER + DONE :: STEP_WORDS] = 0


class Team:
    """Helper threads that live as long as the process; ``function``: ``cpu_drain.drain``, without the GIL."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._begin()

    def run(self, job: Words, threads: int) -> None:
        """Run a job on up to ``threads`` threads, the caller's included. It may be used again afterwards."""
        if threads > 1:
            self._start(threads - 1)
            job[TEAM] = self._address
        self._function(job.ctypes.data, threads - 1)

    def run_alone(self, job: int) -> None:
        """Run the job at an address on this thread."""
        self._function(job, 0)

    def lend(self, place: int, function: int, threads: int) -> None:
        """Have helpers for what ``cpu_drain.offer`` offers; its function's address goes to a place."""
        if threads > 1:
            self._start(threads - 1)
            PLACES[place] = function
            PLACES[PLACE_TEAM] = self._address

    def _begin(self) -> None:
        """Words for helpers to come: never freed, since these outlive the interpreter by a moment."""
        words: Words = np.zeros(TEAM_WORDS + 8, np.int64)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(words))
        self._words = words[-words.ctypes.data % 64 // 8 :]
        self._address, self._helpers, self._process = self._words.ctypes.data, 0, os.getpid()
        self._words[CALLER], self._words[EVERY] = -1, OFTEN
        libc = ctypes.CDLL(None)
        libc.pthread_mutex_init(ctypes.c_void_p(self._address + 8 * LOCK), None)
        for condition in (WORK, PROGRESS):
            libc.pthread_cond_init(ctypes.c_void_p(self._address + 8 * condition), None)

    def _start(self, helpers: int) -> None:
        if self._helpers >= helpers and self._process == os.getpid():
            return
        with self._lock:
            if self._process != os.getpid():  # forked: the threads stayed behind
                self._begin()
            threads = []
            while self._helpers < helpers:
                arguments = (self._address, -1)
                thread = threading.Thread(target=self._function, args=arguments, name="cuattn", daemon=True)
                thread.start()
                threads.append(thread)
                self._helpers += 1
            if len(threads) == helpers:  # of a team that grows, nobody is kept anywhere
                self._settle([thread.native_id or 0 for thread in threads])

    def _settle(self, helpers: list[int]) -> None:
        """Give each helper a CPU of its own if there are as many; ``cpu_drain`` keeps off the caller's."""
        if not hasattr(os, "sched_setaffinity"):
            return
        cpus = sorted(os.sched_getaffinity(0))
        if len(helpers) + 1 != len(cpus) or len(helpers) > MAX_HOMES or cpus[-1] >= 64 * CPU_WORDS:
            return
        for i, (thread, cpu) in enumerate(zip(helpers, cpus[1:], strict=True)):
            try:
                os.sched_setaffinity(thread, {cpu})
            except OSError:
                return
            self._words[HOMES_AT + 2 * i : HOMES_AT + 2 * i + 2] = thread, cpu
        self._words[HOMES], self._words[CALLER] = len(helpers), cpus[0]
