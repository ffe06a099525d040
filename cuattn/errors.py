"""The package's own exception, and the wording of argument errors. Imports nothing of ours."""

from __future__ import annotations


class BackendUnavailable(RuntimeError):
    """A backend, driver or library that the call needs is missing; the message says what to install."""


def argument_error(
    argument: str, got: object, takes: str, *, kind: type[Exception] = ValueError
) -> Exception:
    """Build the error for a refused argument: its name, what it got and what it takes."""
    return kind(f"{argument}: got {got}; takes {takes}")
