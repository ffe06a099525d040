"""The compiled half of ``cpu_team.py``: what each thread of a team does. No attention."""

# mypy: ignore-errors
# (Numba types what it compiles.)
from __future__ import annotations

from ..interop.native import atomic_add, atomic_load, atomic_swap, sched_yield
from .cpu_native import (
    call,
    cond_broadcast,
    cond_signal,
    cond_wait,
    current_cpu,
    get_affinity,
    get_i64,
    mutex_lock,
    mutex_unlock,
    put_i64,
    relax,
    set_affinity,
)
from .cpu_scores import jit
from .cpu_team import (
    ALONE,
    CALLER,
    CLAIMED,
    CPU_SET,
    CPU_WORDS,
    DONE,
    EVERY,
    FUNCTION,
    HEADER,
    HOMES,
    HOMES_AT,
    LOCK,
    LONELY,
    NOBODY,
    OFFER,
    OFFERED_DONE,
    OFFERED_FUNCTION,
    OFTEN,
    PARAMS,
    PARKED,
    POSTS,
    PROGRESS,
    RARELY,
    SAVED,
    SLOT_JOB,
    SLOT_TICKETS,
    SLOT_USERS,
    SLOT_WORDS,
    SLOTS,
    SLOTS_AT,
    STEP_WORDS,
    STEPS,
    TAKEN,
    TEAM,
    TILES,
    WAITING,
    WORK,
)

PATIENCE = 4000  # looks, some 10 ns each, before a waiting thread sleeps: as long as waking it takes


@jit
def _wait(team, word, value):
    """Until the word at an address is at least ``value``."""
    for _ in range(PATIENCE):
        if atomic_load(word) >= value:
            return
        relax()
    mutex_lock(team + 8 * LOCK)
    while atomic_load(word) < value:
        cond_wait(team + 8 * PROGRESS, team + 8 * LOCK)
    mutex_unlock(team + 8 * LOCK)


@jit
def _announce(team):
    """Wake who waits for a step's end or for helpers to leave; the words they look at have been written."""
    mutex_lock(team + 8 * LOCK)
    mutex_unlock(team + 8 * LOCK)
    cond_broadcast(team + 8 * PROGRESS)


@jit
def _drain(job, team):
    """Claim and run tiles of each step in turn; the end of a step that others help with is waited for."""
    steps = get_i64(job, STEPS)
    for step in range(steps):
        at = job + 8 * (HEADER + step * STEP_WORDS)
        tiles = get_i64(at, TILES)
        tile = atomic_add(at + 8 * CLAIMED, 1)
        while tile < tiles:
            call(get_i64(at, FUNCTION), get_i64(at, PARAMS), tile)
            if atomic_add(at + 8 * DONE, 1) == tiles - 1 and team != 0:
                _announce(team)
            tile = atomic_add(at + 8 * CLAIMED, 1)
        if team != 0 and step < steps - 1:
            _wait(team, at + 8 * DONE, tiles)


@jit
def _fill_set(cpus, cpu):
    """The set of one CPU."""
    for word in range(CPU_WORDS):
        put_i64(cpus, word, 1 << cpu % 64 if word == cpu // 64 else 0)


@jit
def _stay(job):
    """Keep the caller on the CPU it is on, which comes back; -1: of this team nobody is kept anywhere."""
    cpu = current_cpu()
    if get_i64(get_i64(job, TEAM), CALLER) < 0 or not 0 <= cpu < 64 * CPU_WORDS:
        return -1
    if not get_affinity(0, 8 * CPU_WORDS, job + 8 * SAVED):
        return -1
    _fill_set(job + 8 * ALONE, cpu)
    set_affinity(0, 8 * CPU_WORDS, job + 8 * ALONE)
    return cpu


@jit
def _make_way(team, cpu):
    """Send the helper on the caller's CPU to the one that the last caller left. The lock is held."""
    left = get_i64(team, CALLER)
    put_i64(team, CALLER, cpu)
    for i in range(get_i64(team, HOMES)):
        home = team + 8 * (HOMES_AT + 2 * i)
        if get_i64(home, 1) == cpu:
            put_i64(home, 1, left)
            _fill_set(team + 8 * CPU_SET, left)
            set_affinity(get_i64(home, 0), 8 * CPU_WORDS, team + 8 * CPU_SET)


@jit
def _post(team, job, helpers, cpu):
    """Offer a job to so many helpers and wake those that sleep; the slot's address, 0 when all are taken."""
    mutex_lock(team + 8 * LOCK)
    if cpu >= 0 and cpu != get_i64(team, CALLER):
        _make_way(team, cpu)
    slot = team + 8 * SLOTS_AT
    end = slot + 8 * SLOTS * SLOT_WORDS
    while slot < end and get_i64(slot, SLOT_JOB) != 0:
        slot += 8 * SLOT_WORDS
    parked = 0
    if slot < end:
        put_i64(slot, SLOT_JOB, job)
        put_i64(slot, SLOT_TICKETS, helpers)
        put_i64(slot, SLOT_USERS, 0)
        atomic_add(team + 8 * POSTS, 1)
        parked = get_i64(team, PARKED)
    mutex_unlock(team + 8 * LOCK)
    if parked > helpers:
        for _ in range(helpers):
            cond_signal(team + 8 * WORK)
    elif parked > 0:
        cond_broadcast(team + 8 * WORK)
    return slot if slot < end else 0


@jit
def _dismiss(team, slot):
    """Take a job back: no helper looks at it any more in the end."""
    mutex_lock(team + 8 * LOCK)
    put_i64(slot, SLOT_TICKETS, 0)
    mutex_unlock(team + 8 * LOCK)
    _wait(team, slot + 8 * SLOT_USERS, 0)
    mutex_lock(team + 8 * LOCK)
    put_i64(slot, SLOT_JOB, 0)
    mutex_unlock(team + 8 * LOCK)


@jit
def _run(job, helpers):
    """The job on this thread and helpers; none of them looks at it any more in the end."""
    team = get_i64(job, TEAM)
    cpu = _stay(job)
    slot = _post(team, job, helpers, cpu)
    if slot == 0:
        _drain(job, 0)
    else:
        _drain(job, team)
        _dismiss(team, slot)
    if cpu >= 0:
        set_affinity(0, 8 * CPU_WORDS, job + 8 * SAVED)


@jit
def _invite(team):
    """Wake a helper, if all sleep, for offers to come."""
    put_i64(team, LONELY, 0)
    put_i64(team, EVERY, min(2 * get_i64(team, EVERY), RARELY))
    cpu = current_cpu()
    mutex_lock(team + 8 * LOCK)
    parked = get_i64(team, PARKED)
    if parked > 0:
        if get_i64(team, CALLER) >= 0 and 0 <= cpu != get_i64(team, CALLER):
            _make_way(team, cpu)
        atomic_add(team + 8 * POSTS, 1)
    mutex_unlock(team + 8 * LOCK)
    if parked > 0:
        cond_signal(team + 8 * WORK)


@jit
def offer(team, job):
    """Show a job to a helper that looks for work; whether there is one. Nobody is woken for it."""
    if atomic_swap(team + 8 * OFFER, WAITING, job) == WAITING:
        return True
    lonely = get_i64(team, LONELY) + 1
    put_i64(team, LONELY, lonely)
    if lonely >= get_i64(team, EVERY):
        _invite(team)
    return False


@jit
def withdraw(team, job):
    """The end of an offer: no helper looks at the job any more."""
    if atomic_swap(team + 8 * OFFER, job, WAITING) == job:
        return
    put_i64(team, LONELY, 0)
    put_i64(team, EVERY, OFTEN)
    looks = 0
    while atomic_load(job + 8 * OFFERED_DONE) == 0:
        looks += 1
        if looks > PATIENCE:  # it may need this CPU
            sched_yield()
        relax()


@jit
def _accept(team):
    """Help with what is offered, if anything is; whether it was."""
    place = team + 8 * OFFER
    job = atomic_load(place)
    if job <= TAKEN or atomic_swap(place, job, TAKEN) != job:
        return False
    call(get_i64(job, OFFERED_FUNCTION), job, -1)
    atomic_add(place, WAITING - TAKEN)
    atomic_add(job + 8 * OFFERED_DONE, 1)  # the last that is seen of it
    return True


@jit
def _look(team, posts):
    """Until more is posted or patience ends; one helper of a team takes offers meanwhile."""
    place, left = team + 8 * OFFER, PATIENCE
    waits = atomic_swap(place, NOBODY, WAITING) == NOBODY
    while left > 0 and atomic_load(team + 8 * POSTS) == posts:
        left -= 1
        if waits and _accept(team):
            left = PATIENCE
        relax()
    while waits and atomic_swap(place, WAITING, NOBODY) != WAITING:
        _accept(team)


@jit
def _take(team):
    """A ticket for some job: its slot's address; 0 when nobody wants help. The lock is held."""
    for i in range(SLOTS):
        slot = team + 8 * (SLOTS_AT + i * SLOT_WORDS)
        if get_i64(slot, SLOT_TICKETS) > 0:
            put_i64(slot, SLOT_TICKETS, get_i64(slot, SLOT_TICKETS) - 1)
            atomic_add(slot + 8 * SLOT_USERS, -1)
            return slot
    return 0


@jit
def _serve(team):
    """Help whoever posts a job, for ever."""
    while atomic_load(team + 8 * POSTS) >= 0:  # Numba wants to see an end
        mutex_lock(team + 8 * LOCK)
        slot = _take(team)
        posts = atomic_load(team + 8 * POSTS)
        mutex_unlock(team + 8 * LOCK)
        if slot != 0:
            _drain(get_i64(slot, SLOT_JOB), team)
            if atomic_add(slot + 8 * SLOT_USERS, 1) == -1:
                _announce(team)
            continue
        _look(team, posts)
        mutex_lock(team + 8 * LOCK)
        put_i64(team, PARKED, get_i64(team, PARKED) + 1)
        while atomic_load(team + 8 * POSTS) == posts:
            cond_wait(team + 8 * WORK, team + 8 * LOCK)
        put_i64(team, PARKED, get_i64(team, PARKED) - 1)
        mutex_unlock(team + 8 * LOCK)


def drain(address, helpers):
    """Run the job at an address with up to so many helpers; < 0: help the team at an address, for ever."""
    if helpers < 0:
        _serve(address)
    elif helpers == 0:
        _drain(address, 0)
    else:
        _run(address, helpers)
