"""Dropout seeds for callers that bring none (the flash-attn drop-ins): a generator the user can seed."""

from __future__ import annotations

import random
import threading

_generator = random.Random()
_lock = threading.Lock()


def set_seed(seed: int) -> None:
    """Seed the generator that dropout seeds are drawn from when a drop-in call brings none."""
    with _lock:
        _generator.seed(seed)


def draw() -> int:
    """The next dropout seed, 63 bits."""
    with _lock:
        return _generator.getrandbits(63)
