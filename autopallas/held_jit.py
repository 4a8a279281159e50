"""Objects that call a function of ``jax.jit`` which they hold: where the whole cannot be traced, that is optimized."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from autopallas import compat

__all__ = ["HeldJit", "held_jit"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class HeldJit(Generic[P, R]):
    """An object that is called, and calls a jit function which it holds.

    A library whose functions change objects, such as the modules of a network, takes the arrays out of these before it
    calls the function that it made with jit, and puts new ones into them afterwards.  No trace can follow that.
    """

    def __init__(self, function: Callable[P, R], holder: object, name: str):
        self._function, self._holder, self._name = function, holder, name
        self.jitted: Callable[..., object] = getattr(holder, name)

    def call(self, instead: Callable[..., object], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the object, with another function in the place of its jit function while it runs; as it is, if it was
        given another jit function meanwhile."""
        return self.while_held(instead, self._function, *args, **kwargs)

    def while_held(self, instead: Callable[..., object], use: Callable[..., T], /, *args: object, **named: object) -> T:
        """Calls the object or a method of it, with another function in the place of its jit function, as ``call``."""
        if getattr(self._holder, self._name) not in (self.jitted, instead):  # another thread may just call it
            return use(*args, **named)
        setattr(self._holder, self._name, instead)
        try:
            return use(*args, **named)
        finally:
            setattr(self._holder, self._name, self.jitted)

    def traced(self, trace: Callable[..., object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls the object up to its jit function, of which it traces a call; calls of other threads are made."""
        own = threading.get_ident()

        def instead(*given: object, **named: object) -> object:
            if threading.get_ident() != own:
                return self.jitted(*given, **named)
            trace(*given, **named)
            raise _Traced

        before = getattr(self._holder, self._name)
        setattr(self._holder, self._name, instead)
        try:
            with contextlib.suppress(_Traced):
                self._function(*args, **kwargs)
        finally:
            if getattr(self._holder, self._name) is instead:  # unless a call of another thread has ended
                setattr(self._holder, self._name, before)


class _Traced(Exception):
    """Ends a call of an object whose jit function was traced."""


def held_jit(function: Callable[P, R]) -> HeldJit[P, R] | None:
    """Returns what tells where an object holds the jit function that it calls; None if it is a function, or holds none
    or several, or does not seem to call it, or cannot be given another.

    The object may be that of a partial function, as methods are that a library's jit made.
    """
    holder: object = function
    while type(holder) is functools.partial:
        holder = holder.func
    if isinstance(holder, (types.FunctionType, types.MethodType, type)):
        return None
    names = [name for name, value in getattr(holder, "__dict__", {}).items() if compat.jit_settings(value) is not None]
    if len(names) != 1 or names[0] not in _names_in_calls(type(holder)):
        return None
    try:
        setattr(holder, names[0], getattr(holder, names[0]))
    except Exception:  # an object may refuse, in its own way
        return None
    return HeldJit(function, holder, names[0])


def _names_in_calls(kind: type) -> set[str]:
    """Returns the names of attributes that calls of an object read, in methods of its class that they name too."""
    found, todo = set[str](), ["__call__"]
    while todo:
        method = getattr(kind, todo.pop(), None)
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        new = {*code.co_names} - found if code is not None else ()
        found.update(new)
        todo += new
    return found
