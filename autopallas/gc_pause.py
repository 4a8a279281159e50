"""Spares Python's garbage collector around code that makes many objects at once and keeps them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused", "rare"]

_OF_PYTHON = 1000
"""More objects than Python itself freezes (hundreds, from 3.12 on), and fewer than a program would."""
_YOUNG = 20_000
"""Objects after which young ones are looked at while collections are rare; Python's own number is 700 or 2000."""


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


@contextlib.contextmanager
def rare() -> Iterator[None]:
    """Makes collections rare inside, where a user's function is traced: JAX keeps nearly every object until the end.

    They are not prevented, for the function may make anything, such as large arrays in cycles.  Thresholds that are
    higher, or that the function sets, are left as they are.
    """
    before = gc.get_threshold()
    raised = 0 < before[0] < _YOUNG
    if raised:
        gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        if raised and gc.get_threshold()[0] == _YOUNG:
            gc.set_threshold(*before)
