"""What a function reads beside its arguments, which a trace that fails may leave changed."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, cast

import jax
import numpy as np

from autopallas import compat

__all__ = ["ClosedOver"]

_MOST = 10_000
"""How many objects are looked at."""
_LIBRARIES = sys.stdlib_module_names | {"autopallas", "jax", "jaxlib", "numpy"}
"""Libraries whose objects stay as they are: they hold what was compiled, or belong to several threads."""
_MOST_BYTES = 2**24
"""Of NumPy arrays that are looked at."""
_Names: TypeAlias = dict[object, object]
_AnyKept: TypeAlias = "_Kept[_Names] | _Kept[list[object]] | _Kept[set[object]] | _Kept[collections.deque[object]]"
_Lacks = object()
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray, jax.Array)
"""Values that tell by themselves whether they are the same."""
_Random: TypeAlias = "np.random.Generator | np.random.RandomState | random.Random"


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
        self._function = function
        self._kept: list[_AnyKept] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._random: list[tuple[_Random, object]] = []
        self._bytes = 0
        self._variables = [(variable, variable.read()) for variable in _variables(function)]
        globals_ = (value for variable, value in self._variables if isinstance(variable.place, dict))
        self._shared = {id(value) for value in globals_ if type(value) in _KINDS}
        """Containers with global names, of which nothing but what is traced is the function's own doing."""
        todo, seen = [*_read(function, True)], set[int]()
        for value, is_own in todo:  # which grows meanwhile
            if id(value) not in seen and len(seen) < _MOST:
                seen.add(id(value))
                parts = self._parts(value, is_own)
                todo += parts if id(value) not in self._shared else ()

    def _parts(self, value: object, is_own: bool) -> Iterable[tuple[object, bool]]:
        """Returns what a value holds, of which it keeps a copy."""
        kind = type(value)
        held: object = None
        if kind in (types.FunctionType, types.MethodType, functools.partial):
            return [(part, is_own and its) for part, its in _read(cast("Callable[..., object]", value), False)]
        if kind in (tuple, frozenset):
            return [(part, is_own) for part in cast("Iterable[object]", value)]
        if isinstance(value, np.ndarray) and kind is np.ndarray:
            if is_own and value.flags.writeable and self._bytes + value.nbytes <= _MOST_BYTES:
                self._bytes += value.nbytes
                self._arrays.append((value, value.copy()))
            return []
        if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
            if is_own:
                self._random.append((value, _state(value)))
            return []
        if kind in _KINDS:
            held = value
        elif isinstance(value, (type, types.ModuleType)) or kind.__module__.partition(".")[0] in _LIBRARIES:
            return [(value.__wrapped__, False)] if callable(value) and hasattr(value, "__wrapped__") else []
        else:
            try:
                held = getattr(value, "__dict__", None)
            except Exception:  # an object that stands for another one, which is not there, may raise anything
                return []
        if type(held) not in _KINDS:
            return []
        kept = _KINDS[type(held)](held, is_own, id(held) in self._shared)
        self._kept.append(kept)
        before = kept.before
        return [(part, is_own) for part in (before.values() if isinstance(before, dict) else before)]

    def changed(self) -> bool:
        """Returns whether a variable, an object or a container has what is traced and had not; or the objects of a
        method or of a partial function have another number, text or array, or more or fewer parts.

        Where the function is called as it is written, they have the array or the number of that call then.
        """
        if any(_is_lost(before, variable.read(), False) for variable, before in self._variables):
            return True
        had = {id(kept.content): kept.before for kept in self._kept}
        changed = {id(kept.content) for kept in self._kept if kept.is_changed(had)}
        if changed and not changed.isdisjoint(id(kept.content) for kept in ClosedOver(self._function)._kept):
            return True  # what an object does not hold any more may have become anything
        arrays = any(now.tobytes() != before.tobytes() for now, before in self._arrays)
        return arrays or any(not _is_same_state(_state(now), before) for now, before in self._random)

    def restore(self) -> None:
        """Gives the objects of a method or of a partial function what they had, and others, which code that runs beside
        the trace may have changed too, what they lost or what is traced now."""
        for variable, one in self._variables:
            if one is not _Lacks and _is_traced(variable.read()):
                variable.write(one)
        for kept in self._kept:
            kept.restore()
        for array, elements in self._arrays:
            if array.tobytes() != elements.tobytes():
                array[...] = elements
        for generator, state in self._random:
            _set_state(generator, state)


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
            if not isinstance(value, types.FunctionType):
                yield value, False
    else:  # one that holds a jit function is given another one while it is called, perhaps by another thread
        held = getattr(function, "__dict__", {}).values()
        yield function, not any(compat.jit_settings(value) is not None for value in held)


@dataclass(frozen=True, slots=True)
class _Variable:
    """A variable that a function closes over, or a global one that it names."""

    place: types.CellType | dict[str, object]
    name: str

    def read(self) -> object:
        if isinstance(self.place, dict):
            return self.place.get(self.name, _Lacks)
        try:
            return self.place.cell_contents
        except ValueError:  # nothing is in it
            return _Lacks

    def write(self, value: object) -> None:
        if isinstance(self.place, dict):
            self.place[self.name] = value
        else:
            self.place.cell_contents = value


def _variables(function: object) -> Iterator[_Variable]:
    """Yields the variables around a function to which it may write."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield _Variable(cell, name)
        for name in function.__code__.co_names:
            if name in function.__globals__:
                yield _Variable(function.__globals__, name)


C = TypeVar("C", _Names, list[object], set[object], collections.deque[object])


class _Kept(Generic[C]):
    """A container and a copy of it: those of each kind are compared and restored in their own way."""

    def __init__(self, content: C, is_own: bool, is_shared: bool):
        self.content: C = content
        self.before: C = content.copy()  # code that runs beside the trace may add to the other one
        self.is_own, self.is_shared = is_own, is_shared

    def is_changed(self, had: Mapping[int, object]) -> bool:
        """Returns whether the container has lost, by what was written to it, what it had or what it would have been
        given.  ``had`` has what containers had, by their identities."""
        pairs = self.pairs(self.content.copy())
        return any(_is_lost(had.get(id(one), one), other, self.is_own) for one, other in pairs if one is not other)

    def pairs(self, now: C) -> Iterable[tuple[object, object]]:
        """Returns what the container had and what it has ``now`` in each place."""
        return itertools.zip_longest(self.before, now, fillvalue=_Lacks)

    def restore(self) -> None:
        """Gives the container what it had; code that runs beside the trace may have changed one that is not the
        function's own."""
        raise NotImplementedError


class _KeptNames(_Kept[_Names]):
    def pairs(self, now: _Names) -> Iterable[tuple[object, object]]:
        names = {**self.before, **now}  # of a Counter too, whose union lacks what is not positive
        return [(self.before.get(name, _Lacks), now.get(name, _Lacks)) for name in names]

    def restore(self) -> None:
        content, before = self.content, self.before
        for name in [*content]:
            if name not in before and (self.is_own or _is_traced(content[name])):
                del content[name]
        for name, one in before.items():
            now = content.get(name, _Lacks)
            lost = now is _Lacks and not self.is_shared
            if now is not one and (self.is_own or lost or _is_traced(now)):
                content[name] = one


class _KeptDefaults(_KeptNames):
    """A dictionary that makes what it lacks where it is read, which does not change it."""

    def pairs(self, now: _Names) -> Iterable[tuple[object, object]]:
        pairs = ((self.before.get(name, _Lacks), now[name]) for name in now)
        return [(one, other) for one, other in pairs if one is not _Lacks or _is_traced(other)]


class _KeptList(_Kept[list[object]]):
    def restore(self) -> None:
        content, before, is_own = self.content, self.before, self.is_own
        if not is_own and len(content) > len(before):
            content[:] = [one for one in content if not _is_traced(one) or any(one is x for x in before)]
        alike = len(content) == len(before)
        if is_own and not (alike and all(a is b for a, b in zip(content, before, strict=True))):
            content[:] = before
        for place, (one, now) in enumerate(zip(before, content, strict=False) if alike else ()):
            if now is not one and _is_traced(now):
                content[place] = one


class _KeptSet(_Kept[set[object]]):
    def pairs(self, now: set[object]) -> Iterable[tuple[object, object]]:
        lost, new = self.before - now, now - self.before
        return [*((one, _Lacks) for one in lost), *((_Lacks, one) for one in new)]

    def restore(self) -> None:
        new = self.content - self.before
        self.content.difference_update([one for one in new if self.is_own or _is_traced(one)])
        self.content.update(self.before if self.is_own else ())


class _KeptQueue(_Kept[collections.deque[object]]):
    def restore(self) -> None:
        if self.is_own:
            self.content.clear()
            self.content.extend(self.before)


_KINDS: Mapping[type, Callable[..., _AnyKept]] = {
    dict: _KeptNames,
    collections.OrderedDict: _KeptNames,
    collections.Counter: _KeptNames,
    collections.defaultdict: _KeptDefaults,
    list: _KeptList,
    set: _KeptSet,
    collections.deque: _KeptQueue,
}
"""Kinds of containers that are looked into."""


def _is_lost(before: object, now: object, is_own: bool) -> bool:
    """Returns whether what a function wrote while it was traced is not what it writes where it is called."""
    if before is _Lacks or now is _Lacks:
        return is_own or _is_traced(now)
    if _is_traced(now):
        return not _is_traced(before)
    pairs = itertools.zip_longest(_leaves(before), _leaves(now), fillvalue=_Lacks) if is_own else ()
    return any(_is_other(*pair) for pair in pairs)


def _is_traced(value: object) -> bool:
    """Returns whether a value is traced, or holds what is."""
    return any(map(compat.is_tracer, _leaves(value)))


def _leaves(value: object) -> list[object]:
    try:
        leaves: list[object] = jax.tree.leaves(value, is_leaf=lambda node: node is None)
    except Exception:  # a dictionary whose keys have no order; or a class's own rule, which may raise anything
        return [value]
    return leaves


def _is_other(before: object, now: object) -> bool:
    """Returns whether something is in the place of another value: not where an object that tells no values is in the
    place of another one, or an equal number, as where a scale is computed anew in each call."""
    if before is now:
        return False
    tells = [isinstance(one, _SIMPLE) for one in (before, now)]
    if not all(tells):
        return any(tells) or before is _Lacks or now is _Lacks
    if type(before) is not type(now) or isinstance(before, jax.Array):
        return True
    if isinstance(before, (str, bytes)):
        return before != now
    a, b = np.asarray(before), np.asarray(now)
    return a.shape != b.shape or a.dtype != b.dtype or a.tobytes() != b.tobytes()


def _state(generator: _Random) -> object:
    """Returns what the next numbers of a generator follow from."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _is_same_state(one: object, other: object) -> bool:
    own, others = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(own) == len(others) and all(np.array_equal(a, b) for a, b in zip(own, others, strict=True))


def _set_state(generator: _Random, state: object) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(cast("tuple[object, ...]", state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = cast("dict[str, object]", state)
    else:
        generator.set_state(cast("dict[str, object]", state))
