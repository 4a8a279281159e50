"""Objects that call a function of ``jax.jit`` which they hold: where the whole cannot be traced, that is optimized."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from autopallas import compat

__all__ = ["HeldJit", "held_jit"]

P = ParamSpec("P")
R = TypeVar("R")


class HeldJit(Generic[P, R]):
    """An object that is called, and calls a jit function which it holds.

    A library whose functions change objects, such as the modules of a network, takes the arrays out of these before it
    calls the function that it made with jit, and puts new ones into them afterwards.  No trace can follow that.
    """

    def __init__(self, holder: Callable[P, R], name: str):
        self._holder, self._name = holder, name
        self.jitted: Callable[..., object] = getattr(holder, name)

    def call(self, instead: Callable[..., object], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the object, with another function in the place of its jit function while it runs; as it is, if it was
        given another jit function meanwhile."""
        if getattr(self._holder, self._name) not in (self.jitted, instead):  # another thread may just call it
            return self._holder(*args, **kwargs)
        setattr(self._holder, self._name, instead)
        try:
            return self._holder(*args, **kwargs)
        finally:
            setattr(self._holder, self._name, self.jitted)

    def traced(self, trace: Callable[..., object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls the object up to its jit function, of which it traces a call."""

        def instead(*given: object, **named: object) -> None:
            trace(*given, **named)
            raise _Traced

        with contextlib.suppress(_Traced):
            self.call(instead, *args, **kwargs)


class _Traced(Exception):
    """Ends a call of an object whose jit function was traced."""


def held_jit(function: Callable[P, R]) -> HeldJit[P, R] | None:
    """Returns what tells where an object holds its jit function; None if it is a function, or holds none or several, or
    cannot be given another."""
    if isinstance(function, (types.FunctionType, types.MethodType, type)):
        return None
    names = [
        name for name, value in getattr(function, "__dict__", {}).items() if compat.jit_settings(value) is not None
    ]
    if len(names) != 1 or names[0] == "__wrapped__":
        return None
    try:
        setattr(function, names[0], getattr(function, names[0]))
    except Exception:  # an object may refuse, in its own way
        return None
    return HeldJit(function, names[0])
