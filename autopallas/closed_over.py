"""What a function reads beside its arguments, which a trace that fails may leave changed."""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import gc
import inspect
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

__all__ = ["ClosedOver", "reads_iterator", "slots_of"]

_MOST = 10_000
"""How many objects are looked at."""
_LIBRARIES = sys.stdlib_module_names | {"autopallas", "jax", "jaxlib", "numpy"}
"""Libraries whose objects stay as they are: they hold what was compiled, or belong to several threads."""
_MOST_FUNCTIONS = 256
"""How many functions are looked at that a function calls."""
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
        self._memos = [memo for memo in _memos(function) if not _keeps_traced(memo)]
        globals_ = (value for variable, value in self._variables if isinstance(variable.place, dict))
        self._shared = {id(value) for value in globals_ if type(value) in _KINDS}
        """Containers with global names, of which nothing but what is traced is the function's own doing."""
        todo, seen = [*_read(function, True)], set[int]()
        self._direct = {id(value) for value, _ in todo}
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
            if is_own or id(value) in self._direct:
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
            return [(getattr(value, name, None), is_own) for name in slots_of(kind)] if held is None else []
        kept = _KINDS[type(held)](held, is_own, id(held) in self._shared)
        self._kept.append(kept)
        before = kept.before
        return [(part, is_own) for part in (before.values() if isinstance(before, dict) else before)]

    def changed(self) -> bool:
        """Returns whether a variable, an object or a container has what is traced and had not, or a function that keeps
        its results has such a one; or a variable to which the function writes, or the objects of a method or of a
        partial function, have another number, text or array, or more or fewer parts; or random numbers were drawn.

        Where the function is called as it is written, they have the array or the number of that call then.
        """
        if any(_is_lost(before, variable.read(), variable.is_written) for variable, before in self._variables):
            return True
        if any(map(_keeps_traced, self._memos)):
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
            now = variable.read()
            if now is not one and (variable.is_written or (one is not _Lacks and _is_traced(now))):
                variable.write(one)
        for memo in self._memos:
            if _keeps_traced(memo):
                memo.cache_clear()
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
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield value, False
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

    place: object
    """A cell, the global variables of a module, a class, or an object with slots."""
    name: str
    is_written: bool = False
    """Whether the function itself gives it other values."""

    def read(self) -> object:
        if isinstance(self.place, (dict, type)):
            names = self.place if isinstance(self.place, dict) else vars(self.place)
            return names.get(self.name, _Lacks)
        name = "cell_contents" if isinstance(self.place, types.CellType) else self.name
        try:
            return getattr(self.place, name)
        except (AttributeError, ValueError):  # nothing is in it
            return _Lacks

    def write(self, value: object) -> None:
        name = "cell_contents" if isinstance(self.place, types.CellType) else self.name
        if isinstance(self.place, dict):
            self.place.update({name: value} if value is not _Lacks else {})
            if value is _Lacks:
                self.place.pop(name, None)
        elif value is _Lacks:
            delattr(self.place, name)
        else:
            setattr(self.place, name, value)


def _variables(function: object) -> Iterator[_Variable]:
    """Yields the variables around a function to which it may write."""
    code = _code(function)
    if isinstance(code, types.FunctionType):
        written = _written(code.__code__)
        for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
            yield _Variable(cell, name, name in written)
        for name in code.__code__.co_names:
            if name in code.__globals__ or name in written:
                yield _Variable(code.__globals__, name, name in written)
    for value in (value for value, is_own in _read(function, False) if is_own):
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            simple = [name for name, held in vars(kind).items() if isinstance(held, _SIMPLE) and name[:2] != "__"]
            yield from (_Variable(kind, name, True) for name in simple)
            yield from (_Variable(value, name, True) for name in slots_of(kind) if kind is not value)


def slots_of(kind: type) -> tuple[str, ...]:
    """Returns the names of attributes that instances of a class have in no dictionary."""
    found = []
    for one in kind.__mro__:
        names = vars(one).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                found.append(f"_{one.__name__.lstrip('_')}{name}" if name[:2] == "__" and name[-2:] != "__" else name)
    return tuple(found)


def _code(function: object) -> object:
    """Returns the function of a partial function, of a method or of an object that is called."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif isinstance(function, (types.FunctionType, type)):
            return function
        else:
            method = inspect.getattr_static(type(function), "__call__", None)
            return method if isinstance(method, types.FunctionType) else function


@functools.lru_cache(maxsize=256)
def _written(code: types.CodeType) -> frozenset[str]:
    """Returns the names of global variables, and of those of functions around it, to which a function's code writes."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_GLOBAL", "STORE_DEREF")}
    return frozenset(own).union(*map(_written, inner)) - {*code.co_cellvars}


def _names(code: types.CodeType) -> set[str]:
    """Returns the names of global variables and attributes that a function's code reads."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def reads_iterator(function: object) -> bool:
    """Returns whether a function reads an iterator that it closes over, that has a global name, or that the object of
    a method holds: it would be given one thing when it is traced, and no other ever after."""
    code = _code(function)
    if not isinstance(code, types.FunctionType):
        return False
    names = _names(code.__code__).union(code.__code__.co_freevars)
    read = [variable.read() for variable in _variables(function) if variable.name in names]
    while isinstance(function, functools.partial):
        read += [*function.args, *function.keywords.values()]
        function = function.func
    for value, is_own in _read(function, False):
        held = getattr(value, "__dict__", None) if is_own and not isinstance(value, (type, types.ModuleType)) else None
        read += [held[name] for name in names & held.keys()] if isinstance(held, dict) else []
    return any(hasattr(type(value), "__next__") for value in read)


_Memo = type(functools.lru_cache(int))
"""A function that keeps its results."""


def _memos(function: object) -> list[functools._lru_cache_wrapper[object]]:
    """Returns the functions that keep their results, of those that a function names, and that these name."""
    found: list[functools._lru_cache_wrapper[object]] = []
    todo, seen, functions = [_code(function)], set[int](), 0
    for one in todo:  # which grows meanwhile
        if id(one) in seen or len(seen) > _MOST:
            continue
        seen.add(id(one))
        if isinstance(one, _Memo):
            found.append(one)
        if callable(one) and (type(one).__module__ or "").partition(".")[0] in _LIBRARIES:
            todo.append(getattr(one, "__wrapped__", None))
        if not isinstance(one, types.FunctionType) or functions > _MOST_FUNCTIONS:
            continue
        functions += 1
        if (one.__module__ or "").partition(".")[0] in _LIBRARIES:
            continue
        names = _names(one.__code__)
        holders: list[Mapping[str, object]] = [one.__globals__]
        for name in names:
            value = one.__globals__.get(name)
            if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _LIBRARIES:
                holders.append(vars(value))
        todo += [holder[name] for holder in holders for name in names if name in holder]
        for cell in one.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing was written to it yet
                todo.append(cell.cell_contents)
    return found


def _keeps_traced(memo: functools._lru_cache_wrapper[object]) -> bool:
    """Returns whether a function keeps what is traced among its results."""
    for part in gc.get_referents(memo):
        if any(map(_is_traced, part.values() if type(part) is dict else (part,))):
            return True
    return False


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
