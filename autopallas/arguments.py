"""Splits the arguments of a call into arrays, which a trace can follow, and leaves that are held fixed."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TypeAlias, cast

import jax
import numpy as np
from jax.typing import ArrayLike

from autopallas import compat
from autopallas.closed_over import slots_of
from autopallas.compat import Array, PyTree
from autopallas.key_order import put_in_order

__all__ = [
    "Static",
    "Untraceable",
    "Watched",
    "given_back",
    "has_traced_parts",
    "in_objects",
    "is_flag",
    "is_number",
    "is_quantity",
    "join",
    "split",
    "split_traced",
    "told_apart",
    "traceable",
    "with_arguments",
]

_MOST_PARTS = 1000
"""How many parts of the objects in one call are looked at."""
_DEEPEST = 32
"""How deep objects may lie in each other."""


class Untraceable(TypeError):
    """Raised for a value that no trace can follow, such as a string or an arbitrary object."""


class _Unseen(Untraceable):
    """Raised for an array that may change, and too large to be read in each call, also where what an object holds is
    otherwise left to the object's own rule."""


_HOLDS_ARRAY = (
    "an object among its arguments holds a NumPy array, which may change without notice; hold a JAX array there, or "
    "call its setflags(write=False)"
)


@dataclass(frozen=True, slots=True)
class Static:
    """The part of a call that is held fixed: its structure, and the leaves that are not arrays.

    :func:`told_apart` makes it hashable, and equal only where a program that was traced with the one may run for the
    other.
    """

    structure: jax.tree_util.PyTreeDef
    kinds: tuple[type | None, ...]
    """Per leaf: None for an array, otherwise its type."""
    leaves: tuple[object, ...] = field(compare=False)
    """Per leaf: None for an array, otherwise the leaf."""
    states: tuple[Hashable, ...] = ()
    """Per leaf: what it is now; nothing before :func:`told_apart`."""
    numbers: bool = False
    """Whether Python's numbers are among the arrays."""
    given: PyTree = field(default=None, compare=False)
    """The arguments themselves, where dictionaries among them are to keep their order."""


def traceable(leaf: object) -> bool:
    """Returns whether ``jax.jit`` accepts a leaf of this type."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUMm" and leaf.dtype.names is None
    return (
        isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, bool, int, float, complex))
        or hasattr(leaf, "__jax_array__")
        or hasattr(leaf, "aval")
    )


def _is_array(leaf: object) -> bool:
    return traceable(leaf) and (isinstance(leaf, np.generic) or not isinstance(leaf, (bool, int, float, complex)))


def is_number(leaf: object) -> bool:
    """Returns whether a leaf is one of Python's own numbers, at whose value a function can look."""
    return traceable(leaf) and not _is_array(leaf)


def is_flag(kind: type | None) -> bool:
    """Returns whether leaves of a type are truth values, or integers with names, such as those of an ``IntEnum``.

    ``flag is True`` and ``mode is Mode.CAUSAL`` raise no error where the flag is traced, and are false there.
    """
    return kind is not None and kind is not int and issubclass(kind, int)


def is_quantity(kind: type | None) -> bool:
    """Returns whether leaves of a type are Python's own numbers with a fraction, such as a rate of dropout.

    Among the leaves of a library's module such a number is none of its parameters, and has no gradient; an array is
    one, and where the number is traced ``isinstance`` says that it is an array.
    """
    return kind is not None and issubclass(kind, (float, complex)) and not issubclass(kind, np.generic)


_CONTAINERS = (tuple, list, Mapping, collections.deque, functools.partial)
"""Nodes of trees whose leaves are what somebody put there, and no attributes of an object."""


def in_objects(structure: jax.tree_util.PyTreeDef) -> list[bool]:
    """Returns for each leaf whether it lies inside an object that is no container, such as the module of a library."""
    found: list[bool] = []
    todo = [(structure, False)]
    while todo:
        tree, inside = todo.pop()
        node = tree.node_data()
        if node is None:
            found.append(inside)
            continue
        inside = inside or not issubclass(node[0], _CONTAINERS)
        todo.extend((child, inside) for child in reversed(tree.children()))
    return found


def split(args: Sequence[PyTree], kwargs: Mapping[str, PyTree], numbers: bool = False) -> tuple[list[Array], Static]:
    """Returns (the arrays among the leaves, the rest); with ``numbers`` these are arrays too, but for flags and for
    quantities in objects."""
    leaves, structure = jax.tree.flatten((tuple(args), kwargs))
    told = numbers and any(is_quantity(type(leaf)) for leaf in leaves)
    inside = in_objects(structure) if told else [False] * len(leaves)

    def goes(leaf: object, inside: bool) -> bool:
        kind = type(leaf)
        return _is_array(leaf) or (
            numbers and is_number(leaf) and not is_flag(kind) and not (inside and is_quantity(kind))
        )

    going = [goes(leaf, one) for leaf, one in zip(leaves, inside, strict=True)]
    arrays = cast("list[Array]", [leaf for leaf, goes in zip(leaves, going, strict=True) if goes])
    rest = tuple(None if goes else leaf for leaf, goes in zip(leaves, going, strict=True))
    kinds = tuple(None if goes else type(leaf) for leaf, goes in zip(leaves, going, strict=True))
    return arrays, Static(structure, kinds, rest, numbers=any(map(is_number, arrays)))


def join(static: Static, arrays: Sequence[ArrayLike]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Inverts :func:`split`."""
    left = iter(arrays)
    leaves = [next(left) if kind is None else leaf for kind, leaf in zip(static.kinds, static.leaves, strict=True)]
    args, kwargs = jax.tree.unflatten(static.structure, leaves)
    if static.given is not None:
        put_in_order(static.given, (args, kwargs))
    return args, kwargs


def split_traced(args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> tuple[list[Array], Static]:
    """Splits the arguments that jit gives a function which it traces: what is traced, and what it holds fixed, such as
    its static arguments, which stay what they are."""
    if compat.is_outermost():  # as where jit is disabled, and traces nothing
        return split(args, kwargs)
    fixed = {id(one) for one in (*args, *kwargs.values()) if not any(map(compat.is_tracer, jax.tree.leaves(one)))}
    leaves, structure = jax.tree.flatten((tuple(args), kwargs), is_leaf=lambda node: id(node) in fixed)
    arrays = [leaf for leaf in leaves if compat.is_tracer(leaf)]
    rest = tuple(None if compat.is_tracer(leaf) else leaf for leaf in leaves)
    kinds = tuple(None if compat.is_tracer(leaf) else type(leaf) for leaf in leaves)
    return cast("list[Array]", arrays), Static(structure, kinds, rest)


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class _Argument:
    """Stands in a result for a leaf of the arguments."""

    number: int


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class _Number:
    """Stands in a result for one of Python's numbers."""

    value: float | complex


def given_back(result: PyTree, fixed: Static) -> PyTree:
    """Returns a result that a trace can give, in which what no trace can follow is told by its place in the arguments.

    So a train step may return the model that it was given, with the functions and numbers that are among its leaves.

    Args:
      result: what the function returned.
      fixed: what was held fixed while it was traced.

    Raises:
      Untraceable: the result has something else that no trace can follow, or not all numbers were held fixed.
    """
    places = {id(leaf): i for i, leaf in enumerate(fixed.leaves)}

    def given(leaf: object) -> object:
        if is_number(leaf) and isinstance(leaf, (bool, int, float, complex)):
            return _Number(leaf)
        if traceable(leaf):
            return leaf
        if fixed.numbers or id(leaf) not in places:
            raise Untraceable("it returns something that is neither an array nor a number, nor one of its arguments")
        return _Argument(places[id(leaf)])

    return jax.tree.map(given, result)


def has_traced_parts(structure: jax.tree_util.PyTreeDef) -> bool:
    """Returns whether an object of a tree holds what is traced and is none of the tree's leaves, such as a field of a
    dataclass that is no array field: a result of jit would hold it for ever."""
    todo = [structure]
    while todo:
        tree = todo.pop()
        node = tree.node_data()
        if node is not None:
            todo += tree.children()
            fixed = node[1] if isinstance(node[1], tuple) else (node[1],)
            if any(map(compat.is_tracer, fixed)):
                return True
    return False


def with_arguments(result: PyTree, fixed: Static) -> PyTree:
    """Inverts :func:`given_back` for the arguments of one call."""

    def leaf(one: object) -> object:
        if isinstance(one, _Argument):
            return fixed.leaves[one.number]
        return one.value if isinstance(one, _Number) else one

    return jax.tree.map(leaf, result, is_leaf=lambda node: isinstance(node, (_Argument, _Number)))


_Container: TypeAlias = "dict[Hashable, object] | list[object] | set[Hashable]"


class Watched:
    """Tells whether a function changed what it was given: a list, a dictionary, a module with parameters, an object.

    A caller sees that where the function is called as it is written, and not where jit traces it with copies.

    Example:
      >>> batch = {"x": 1.0}
      >>> watched = Watched((batch,), {})
      >>> batch["x"] = 2.0
      >>> watched.changed()
      True
    """

    def __init__(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]):
        self._given = tuple(args), dict(kwargs)
        self._kept: list[tuple[_Container, _Container]] = []
        self._before = self._now(self._kept)
        # Some trees are made of other leaves each time that one looks, from which nothing can be told.
        self._tells = self._before is not None and _alike(self._before, self._now())

    def changed(self) -> bool:
        """Returns whether anything is another one by now."""
        return self._tells and not _alike(self._before, self._now())

    def restore(self) -> None:
        """Gives objects their attributes back: a trace that failed may have left its tracers in them."""
        for container, content in self._kept:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            elif isinstance(container, dict):
                container.update(cast(dict[Hashable, object], content))
            else:
                container.update(content)

    def _now(
        self, kept: list[tuple[_Container, _Container]] | None = None
    ) -> tuple[jax.tree_util.PyTreeDef, list[object], tuple[Hashable, ...]] | None:
        parts = _Parts(kept)
        try:
            leaves, structure = jax.tree.flatten(self._given)
            states = tuple(parts.state(leaf, 0) for leaf in leaves if not traceable(leaf))
            hash(states)
        except (TypeError, ValueError):  # what it is made of cannot be seen, and it is not held fixed either
            return None
        return structure, leaves, states


def _alike(one: object, other: object) -> bool:
    if not (isinstance(one, tuple) and isinstance(other, tuple)):
        return False
    same = len(one[1]) == len(other[1]) and all(a is b for a, b in zip(one[1], other[1], strict=True))
    return same and bool(one[0] == other[0]) and bool(one[2] == other[2])


# ---------------------------------------------------------------------- what is held fixed, and may change


def told_apart(static: Static) -> Static:
    """Returns the same fixed part, equal to another only where their leaves are of the same types and the same values.

    1, 1.0 and True are different arguments, and so are 0.0 and -0.0.  An object that JAX knows nothing of, such as
    the instance of a method, is told apart from itself once an attribute of it is another one: what was traced holds
    what it was then.

    Args:
      static: from :func:`split`.

    Raises:
      Untraceable: a leaf may change without notice.
      TypeError: a leaf has no hash.

    Example:
      >>> one, other = (told_apart(split((0.0, sign * 0.0), {})[1]) for sign in (1, -1))
      >>> one == other
      False
    """
    parts = _Parts()
    told = replace(static, states=tuple(parts.state(leaf, 0) for leaf in static.leaves))
    try:
        hash(told)
    except ValueError as error:  # as of what shows the memory of something else
        raise Untraceable(str(error)) from error
    return told


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Something that is equal to itself alone."""

    one: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.one is other.one

    def __hash__(self) -> int:
        return id(self.one)


def _exactly(value: object) -> Hashable:
    """Returns what tells a number apart that is equal to others, such as zeros of both signs."""
    parts = (value.real, value.imag) if isinstance(value, (float, complex)) else ()
    return tuple(float(part).hex() for part in parts)


def _is_code(value: object) -> bool:
    """Returns whether a value is a function, a class or a module, or an object that stands for a function."""
    return isinstance(value, types.ModuleType) or (callable(value) and hasattr(value, "__name__"))


def _held(value: object) -> Mapping[str, object]:
    """Returns the attributes that an object has by itself, and not by its class."""
    return vars(value) if hasattr(value, "__dict__") else {}


_slots = functools.lru_cache(maxsize=256)(slots_of)


def _attributes(value: object) -> Mapping[str, object]:
    """Returns the attributes that an object has by itself, in slots too; of one of Python's own, such as a date, what
    another one would be made of, since it keeps what it computes."""
    kind: type = type(value)
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        if hasattr(value, "__dict__"):
            return vars(value)
        try:
            return {"": value.__reduce_ex__(4)}
        except Exception:  # it cannot be copied
            return {}
    slots = _slots(kind)
    return {**_held(value), **{name: getattr(value, name, None) for name in slots}} if slots else _held(value)


def _elements(array: np.ndarray) -> Hashable:
    """Returns what is in an array.

    Raises:
      Untraceable: too much is to be read in each call, or it may change itself.
    """
    if array.dtype.hasobject or array.nbytes > _MOST_BYTES:
        raise _Unseen(_HOLDS_ARRAY)
    return type(array), array.shape, array.dtype.str, array.tobytes()


_MOST_BYTES, _MOST_HIDDEN = 2**20, 100
"""Of a NumPy array, and parts of another object, that such an object holds and that are read in each call."""
_TOLD = (int, float, complex, str, bytes, tuple, frozenset, jax.Array)
"""Attributes by which objects that are equal by a rule of their own are told apart."""


_DEEPEST_READ, _MOST_READ = 4, 256
"""How deep what a function closes over lies in other functions and containers, and how much of it is looked at."""


class _Read:
    """Reads what functions, classes and modules hold, where that tells by itself what it is: numbers, texts and arrays,
    in containers and further functions too."""

    def __init__(self) -> None:
        self._left = _MOST_READ

    def state(self, value: object, depth: int = 0) -> Hashable:
        kind = type(value)
        self._left -= 1
        if value is None or kind in (bool, int, str, bytes):
            return kind, value
        if isinstance(value, (float, complex, np.generic)):
            return kind, np.asarray(value).tobytes()
        if isinstance(value, jax.Array):
            return kind, _Same(value)
        found = []
        for part in self._parts(value, depth) if depth <= _DEEPEST_READ else ():
            if self._left <= 0:
                break
            found.append(self.state(part, depth + 1))
        return kind, tuple(found)

    @staticmethod
    def _parts(value: object, depth: int) -> Iterator[object]:
        if isinstance(value, (type, types.ModuleType)):
            if depth == 0:  # others read functions of it, and change numbers at most
                held = _held(value).items()
                yield from (x for name, x in held if name[:2] != "__" and isinstance(x, (*_TOLD, list, dict)))
        elif type(value) in (tuple, list, set, frozenset):
            yield from cast("Iterable[object]", value)
        elif type(value) is dict:
            yield from (part for item in value.items() for part in item)
        elif _is_code(value):
            yield from _held(value).values()
            for cell in getattr(value, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # nothing was written to it yet
                    yield cell.cell_contents


class _Plain:
    """A class whose instances have attributes in a dictionary, and nothing else."""


class _Parts:
    """Reads what objects are made of, each once; keeps in ``kept`` what containers hold now, if it is given."""

    def __init__(
        self, kept: list[tuple[_Container, _Container]] | None = None, most: int = _MOST_PARTS, reads: bool = False
    ) -> None:
        self._met: dict[int, int] = {}
        self._kept = kept
        self._most = most
        self._reads = reads
        """Whether the elements of arrays are read, as in an object that is equal to others by a rule of its own."""

    def state(self, value: object, depth: int) -> Hashable:
        """Returns what tells a value from what it was before or will be later."""
        kind = type(value)
        if value is None or kind in (bool, int, str, bytes):
            return kind, value
        if isinstance(value, np.floating) or (isinstance(value, float) and kind is float):
            return kind, float(value).hex()
        if isinstance(value, complex) and kind is complex:
            return kind, value.real.hex(), value.imag.hex()
        if id(value) in self._met:
            return _Parts, self._met[id(value)]
        self._met[id(value)] = len(self._met)
        if len(self._met) > self._most or depth > _DEEPEST:
            raise Untraceable(f"a {kind.__name__} among its arguments has too many parts to see whether they change")
        if isinstance(value, jax.Array):
            return kind, _Same(value)
        if isinstance(value, np.ndarray):
            # Reading its elements would not do: JAX knows such constants by their identity too.
            if value.flags.writeable or value.base is not None:
                if self._reads:
                    return _elements(value)
                raise Untraceable(_HOLDS_ARRAY)
            return kind, _Same(value)
        if self._kept is not None and isinstance(value, (dict, list, set)) and kind in (dict, list, set):
            self._kept.append((value, value.copy()))
        inner = self._inside(value)
        if inner is not None:
            return kind, tuple(self.state(part, depth + 1) for part in inner)
        if kind.__hash__ is object.__hash__ and not _is_code(value):
            if kind.__basicsize__ > _Plain.__basicsize__ or not hasattr(value, "__dict__"):
                raise Untraceable(f"a {kind.__name__} among its arguments may change without notice")
            return kind, _Same(value), self.state(vars(value), depth + 1)
        return kind, value, self._read(value) if _is_code(value) else self._hidden(value, depth + 1), _exactly(value)

    def _read(self, code: object) -> Hashable:
        """Returns what a function, a class or a module reads of its own: its attributes, and what a function closes
        over, where that tells by itself what it is.  What a trace does to these is none of its arguments' changes."""
        return _Read().state(code) if self._kept is None else ()

    def _hidden(self, value: object, depth: int) -> tuple[Hashable, ...]:
        """Returns the attributes of an object that is equal to others by a rule of its own.

        To a frozen dataclass 1, 1.0 and True are equal, and so are 0.0 and -0.0; other attributes it may not compare.
        What cannot be told apart is left to the object's own rule.
        """
        if is_dataclass(value):
            held: Mapping[str, object] = {f.name: getattr(value, f.name, None) for f in fields(value)}
        else:
            held = _attributes(value)
        if isinstance(value, (tuple, frozenset)):
            held = {**held, "": tuple(value)}
        before, self._reads = self._reads, self._kept is None
        try:
            return tuple(self._told(held, depth))
        finally:
            self._reads = before

    def _told(self, held: Mapping[str, object], depth: int) -> Iterator[Hashable]:
        """Yields the names and the states of attributes, as far as these tell."""
        for name, part in held.items():
            kind = type(part)
            told = isinstance(part, _TOLD) or kind in (list, dict, set) or kind.__hash__ not in (None, object.__hash__)
            try:
                if part is None or told:
                    state = self.state(part, depth)
                elif self._kept is None:  # an object may fill such parts when it is used
                    state = self._content(part, depth)
                else:
                    continue
                hash(state)
            except _Unseen:
                raise
            except (TypeError, ValueError):
                continue
            yield name, state

    def _content(self, part: object, depth: int) -> Hashable:
        """Returns what is in an array or in an object, whichever one it is.

        Raises:
          TypeError: that cannot be told.
        """
        if isinstance(part, np.ndarray):
            return self.state(part, depth)
        if _is_code(part):
            raise Untraceable("it is told by what it is")
        return type(part), _Parts(most=_MOST_HIDDEN, reads=True).state(vars(part), depth + 1)

    @staticmethod
    def _inside(value: object) -> Sequence[object] | None:
        """Returns the parts of a container or of a bound function; None for anything else."""
        if type(value) is dict:
            return [part for item in value.items() for part in item]
        if type(value) in (tuple, list, set, frozenset):
            return list(cast(Iterable[object], value))
        if isinstance(value, types.MethodType):
            return [value.__func__, value.__self__]
        if type(value) is functools.partial:
            return [value.func, value.args, value.keywords]
        if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            owner = value.__self__
            return None if owner is None or isinstance(owner, types.ModuleType) else [value.__name__, owner]
        return None
