"""The registry: which backends exist, what each needs, and which one a call gets. Every "no" has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from ..errors import BackendUnavailable, argument_error
from ..spec import AttentionSpec

NAMES = ("cuda", "numba", "reference")


class Prepared(Protocol):
    """One spec made ready to run any number of times."""

    def __call__(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name: out and lse, or dq, dk, dv, dbias, dsinks as wanted."""


class Backend(Protocol):
    def unavailable(self) -> str | None:
        """Why it cannot run here and what to install; None when it can."""

    def prepare(self, spec: AttentionSpec, device: int | None, wants: frozenset[str] | None) -> Prepared:
        """Plan and compile a forward (``wants`` None) or a backward for the gradients named in ``wants``."""


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here; ``reason`` says why not and what to install, or what it runs on."""

    available: bool
    reason: str


def get(name: str) -> Backend:
    """The backend module of that name, imported now at the latest."""
    return cast(Backend, import_module(f".{name}", __package__))


def backends() -> dict[str, Availability]:
    """What is available on this machine: backend name to ``Availability``."""
    runs_on = {
        "cuda": "CuPy and JAX arrays on the GPU",
        "numba": "NumPy and JAX arrays on the CPU; CuPy arrays, when asked for, by readable kernels",
    }
    found = {}
    for name in NAMES:
        reason = get(name).unavailable()
        found[name] = Availability(reason is None, reason or runs_on.get(name, "any array; plain and slow"))
    return found


def select(name: str | None, library: str) -> Backend:
    """The backend for arrays of ``library``: the named one, or the one where the arrays live.

    Raises ``ValueError`` for an unknown name, ``BackendUnavailable`` for one that cannot run here.
    """
    if name is None:
        name = "cuda" if library == "cupy" else "numba"
    if name not in NAMES:
        raise argument_error("backend", repr(name), "None, " + ", ".join(map(repr, NAMES)))
    backend = get("numba_cuda" if name == "numba" and library == "cupy" else name)
    reason = backend.unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r} cannot run here: {reason}")
    return backend
