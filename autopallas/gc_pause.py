"""Python's garbage collector, out of the way of what makes many objects at once and keeps them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused"]

_OF_PYTHON = 1000
"""More objects than Python itself has frozen (from 3.12 on: hundreds), and fewer than a program would."""


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collection within, which would go through all of JAX's objects again and again and find nothing to free.

    Nor right behind it: what was made within counts as old then, and is looked at by the next full collection.  Else
    the first object made afterwards would have all of them gone through.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() <= _OF_PYTHON:  # what a program has frozen stays so
                gc.freeze()
                gc.unfreeze()  # to the oldest generation, in constant time
            gc.enable()
