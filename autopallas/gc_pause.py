"""Pauses Python's garbage collector around code that makes many objects at once and keeps them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused"]

_OF_PYTHON = 1000
"""More objects than Python itself freezes (hundreds, from 3.12 on), and fewer than a program would."""


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Prevents collections inside, which would go through all of JAX's objects repeatedly and find nothing to free.

    Also prevents one right afterwards: the objects made inside then count as old, and only the next full collection
    looks at them.  Otherwise the first object made afterwards would trigger a pass through all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() <= _OF_PYTHON:  # what a program has frozen stays frozen
                gc.freeze()
                gc.unfreeze()  # moves all to the oldest generation, in constant time
            gc.enable()
