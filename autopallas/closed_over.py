"""What a function reads beside its arguments, which a trace that fails may leave changed."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, cast

import jax
import numpy as np

from autopallas import compat

__all__ = ["ClosedOver"]

_MOST = 10_000
"""How many objects are looked at."""
_LIBRARIES = sys.stdlib_module_names | {"autopallas", "jax", "jaxlib", "numpy"}
"""Libraries whose objects stay as they are: they hold what was compiled, or belong to several threads."""
_Content: TypeAlias = "dict[object, object] | list[object] | set[object]"
_Lacks = object()


class ClosedOver:
    """The object of a method, an object that is called, those of a partial function, and those that a function closes
    over or reads by a global name.

    Libraries whose functions change objects, such as the modules of a network, may take these apart before they notice
    that they are traced.  A function that is called as it is after that would find nothing in them.

    Example:
      >>> calls = []
      >>> before = ClosedOver(functools.partial(list.append, calls))
      >>> calls.append(1)
      >>> before.restore()
      >>> calls
      []
    """

    def __init__(self, function: Callable[..., object]):
        self._kept: list[tuple[_Content, _Content, bool]] = []
        todo, seen = [*_read(function, True)], set[int]()
        for value, is_own in todo:  # which grows meanwhile
            if id(value) not in seen and len(seen) < _MOST:
                seen.add(id(value))
                todo += self._parts(value, is_own)

    def _parts(self, value: object, is_own: bool) -> Iterable[tuple[object, bool]]:
        """Returns what a value holds, of which it keeps a copy."""
        kind = type(value)
        held: object = None
        if kind in (types.FunctionType, types.MethodType, functools.partial):
            return [(part, is_own and its) for part, its in _read(cast("Callable[..., object]", value), False)]
        if kind in (tuple, frozenset):
            return [(part, is_own) for part in cast("Iterable[object]", value)]
        if kind in (dict, list, set):
            held = value
        elif isinstance(value, (type, types.ModuleType)) or kind.__module__.partition(".")[0] in _LIBRARIES:
            return [(value.__wrapped__, False)] if callable(value) and hasattr(value, "__wrapped__") else []
        else:
            try:
                held = getattr(value, "__dict__", None)
            except Exception:  # an object that stands for another one, which is not there, may raise anything
                return []
        if type(held) not in (dict, list, set):
            return []
        content = cast(_Content, held)
        now = content.copy()  # code that runs beside the trace may add to the other one
        self._kept.append((content, now, is_own))
        return [(part, is_own) for part in (now.values() if isinstance(now, dict) else now)]

    def changed(self) -> bool:
        """Returns whether an object has what is traced in the place of what it had; or the objects of a method or of a
        partial function have it anywhere, or another number or array.

        Where the function is called as it is written, they have the array or the number of that call then.
        """
        for content, before, is_own in self._kept:
            now = content.copy()
            if isinstance(now, dict) and isinstance(before, dict):
                if any(_is_lost(before.get(name, _Lacks), one, is_own) for name, one in now.items()):
                    return True
            elif isinstance(now, list) and isinstance(before, list):
                if any(_is_lost(*pair, is_own) for pair in itertools.zip_longest(before, now, fillvalue=_Lacks)):
                    return True
        return False

    def restore(self) -> None:
        """Gives the objects of a method or of a partial function what they had, and others, which code that runs beside
        the trace may have changed too, what they lost or what is traced now."""
        for content, before, is_own in self._kept:
            if isinstance(content, dict) and isinstance(before, dict):
                for name in [*content] if is_own else ():
                    if name not in before:
                        del content[name]
                for name, one in before.items():
                    now = content.get(name, _Lacks)
                    if now is not one and (is_own or now is _Lacks or _is_traced(now)):
                        content[name] = one
            elif isinstance(content, list) and isinstance(before, list):
                alike = len(content) == len(before)
                if is_own and not (alike and all(a is b for a, b in zip(content, before, strict=True))):
                    content[:] = before
                for place, (one, now) in enumerate(zip(before, content, strict=False) if alike else ()):
                    if now is not one and _is_traced(now):
                        content[place] = one
            elif is_own and isinstance(content, set) and isinstance(before, set) and content != before:
                content.clear()
                content.update(before)


def _read(function: object, named: bool) -> Iterator[tuple[object, bool]]:
    """Yields what a function reads beside its arguments, and whether it is bound to it; with ``named`` the objects too
    that it reads by a global name."""
    if isinstance(function, functools.partial):
        yield from ((value, True) for value in (*function.args, *function.keywords.values()))
        yield from _read(function.func, named)
    elif isinstance(function, types.MethodType):
        yield function.__self__, True
        yield from _read(function.__func__, named)
    elif isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents, False
            except ValueError:  # nothing was written to it yet
                continue
        for name in function.__code__.co_names if named else ():
            value = function.__globals__.get(name)
            if not isinstance(value, (dict, list, set, types.FunctionType)):
                yield value, False
    else:  # one that holds a jit function is given another one while it is called, perhaps by another thread
        held = getattr(function, "__dict__", {}).values()
        yield function, not any(compat.jit_settings(value) is not None for value in held)


def _is_lost(before: object, now: object, is_own: bool) -> bool:
    """Returns whether what a function wrote while it was traced is not what it writes where it is called."""
    if now is before or (before is _Lacks and not is_own):
        return False
    if _is_traced(now):
        return not _is_traced(before)
    pairs = itertools.zip_longest(_leaves(before), _leaves(now), fillvalue=_Lacks) if is_own else ()
    return any(_is_number(one) and _is_number(other) and not _is_same(one, other) for one, other in pairs)


def _is_traced(value: object) -> bool:
    """Returns whether a value is traced, or holds what is."""
    return any(map(compat.is_tracer, _leaves(value)))


def _leaves(value: object) -> list[object]:
    try:
        leaves: list[object] = jax.tree.leaves(value, is_leaf=lambda node: node is None)
    except Exception:  # a dictionary whose keys have no order; or a class's own rule, which may raise anything
        return [value]
    return leaves


def _is_number(value: object) -> bool:
    return isinstance(value, (float, complex, np.generic, np.ndarray, jax.Array)) or type(value) is int


def _is_same(one: object, other: object) -> bool:
    """Returns whether a number was replaced by an equal one, as where a scale is computed anew in each call."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, jax.Array):
        return False
    a, b = np.asarray(one), np.asarray(other)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
