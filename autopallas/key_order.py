"""Keeps the order of the keys of dictionaries among a plain function's arguments, which jit sorts.

A function that goes through the layers of a model in a dictionary would go through them in another order.  Once a
signature is traced in the order of one call, that stays the order: what ``jax.jit`` returns has sorted keys, so that
a step that is given its own results would otherwise change the order after its first call.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax

from autopallas.compat import PyTree

__all__ = ["as_given", "called", "put_in_order"]

T = TypeVar("T")


class _Call(threading.local):
    """The function that this thread calls, and the arguments of the call; None where they are not known."""

    given: tuple[object, Sequence[PyTree], Mapping[str, PyTree]] | None = None


_CALL = _Call()
_DICTIONARIES = (dict, collections.defaultdict)
"""Those of whose keys jit does not keep the order."""


def called(function: object, run: Callable[..., T], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> T:
    """Calls ``run`` with a function's arguments, which are kept for the trace that it may need."""
    before, _CALL.given = _CALL.given, (function, args, kwargs)
    try:
        return run(*args, **kwargs)
    finally:
        _CALL.given = before


@contextlib.contextmanager
def as_given(function: object, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> Iterator[None]:
    """Puts the dictionaries among a function's traced arguments in the order of those of the call; inside, the function
    is called, and its own calls are others."""
    call = _CALL.given
    if call is not None and call[0] is function:
        put_in_order(call[1:], (args, kwargs))
    _CALL.given = None
    try:
        yield
    finally:
        _CALL.given = call


def put_in_order(given: PyTree, traced: PyTree) -> None:
    """Puts the dictionaries of a tree in the order of those of another one of the same structure."""
    todo = [(given, traced)]
    while todo:
        one, other = todo.pop()
        if type(one) is not type(other):  # as where a class makes others of its parts
            continue
        if type(one) not in _DICTIONARIES:
            todo += zip(_parts(one), _parts(other), strict=False)
        elif one.keys() == other.keys():
            todo += [(one[key], other[key]) for key in one]
            if [*one] != [*other]:
                parts = {key: other[key] for key in one}
                other.clear()
                other.update(parts)


def _parts(node: PyTree) -> Iterable[PyTree]:
    level = jax.tree_util.default_registry.flatten_one_level(node)
    return () if level is None else level[0]
