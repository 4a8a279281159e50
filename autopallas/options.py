"""Defines the options of the rewrite, and which setting wins.

Precedence, highest first: ``AUTOPALLAS_DISABLE`` and ``AUTOPALLAS_BACKEND*``, the arguments of ``optimize``, the
innermost ``with autopallas.options(...)``, the rest of the environment, the defaults of :class:`Options`.  What is
denied in any of these places is denied.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat, SupportsIndex, TypeAlias, TypedDict, TypeVar, Unpack, cast

import jax

from autopallas import environment
from autopallas.custom.registry import declared
from autopallas.environment import OBJECTIVES, OPERATIONS, SELECTED, one_of, places, selected
from autopallas.errors import OptionError
from autopallas.numerics.classes import CLASSES, Numerics
from autopallas.place_selectors import FORMS
from autopallas.sites.operation import IMPLEMENTATIONS, implementation_names, operation_named
from autopallas.trace_context import TraceContext

__all__ = ["OptionArguments", "Options", "Setting", "active", "callable_given", "options", "resolve", "validated"]

F = TypeVar("F")
Objective: TypeAlias = Literal["time", "memory", "always"]
Setting: TypeAlias = tuple[tuple[str, object], ...]
"""Options as given, in sorted (name, value) pairs: hashable, so that they can be part of a key."""


class OptionArguments(TypedDict, total=False):
    """Options as keywords, in the forms that users may write; :class:`Options` explains each one."""

    objective: Objective
    numerics: Numerics
    implementation: str | Sequence[str] | None
    ops: str | Sequence[str] | None
    only: str | Sequence[str] | None
    deny: str | Sequence[str] | None
    require: Mapping[str, int] | Literal["lockfile"] | None
    strict: bool
    autotune: bool | None
    tune_seconds: float
    verify: bool | float
    fuel: int | None
    lock: str | os.PathLike[str] | None
    assume_finite: bool


@dataclass(frozen=True, slots=True)
class Options:
    """The options in force for one trace, resolved and valid.

    Example:
      >>> resolve({"ops": "attention", "require": {"attention": 2}}).require
      (('attention', 2),)
    """

    objective: Objective = "time"
    """"time": a site is replaced where that is known to be faster; "memory": where it needs less temporary memory;
    "always": wherever it is legal, without evidence."""
    numerics: Numerics = "tolerance"
    """Which replacements are allowed: those whose results are "identical", bit for bit; also those that take sums in
    another order, "reordered"; or all that are within the "tolerance"."""
    implementation: str | tuple[str, ...] | None = None
    """None: chosen by evidence.  One name: that one or an error.  Several: the first that works, else the original."""
    ops: tuple[str, ...] | None = None
    """Operations, or kinds of respellings, to look for; those with "-" in front are left out.  None: all."""
    only: tuple[str, ...] | None = None
    """Places in the source code, or named scopes, at which sites may be replaced.  None: everywhere."""
    deny: tuple[str, ...] = ()
    """Places at which no site is replaced.  What different settings deny adds up, and wins over ``only``."""
    require: tuple[tuple[str, int], ...] | Literal["lockfile"] = ()
    """Smallest number of applied sites per operation; fewer raise RequirementError.  "lockfile": so does a program that
    the lockfile does not certify."""
    strict: bool = False
    """Whether an exception inside autopallas is raised.  Otherwise the program stays as it was, with a warning."""
    autotune: bool | None = None
    """Whether block sizes are searched for where no table has them; None: on TPUs, and quickly on CPUs and GPUs."""
    tune_seconds: float = 30.0
    """Time limit for all searches for one site, in seconds."""
    verify: bool | float = False
    """Whether the first call of each signature is checked against a float64 evaluation of the original.  A number
    between 0 and 1: the fraction of calls that are compared with the original."""
    fuel: int | None = None
    """Largest number of sites to replace; None: no limit.  Serves to find the site at fault by bisection."""
    lock: str | None = None
    """Path of a lockfile, which then decides sites, implementations and block sizes."""
    assume_finite: bool = True
    """Whether an inf or NaN that the original multiplies by an exact zero may vanish, one that is added to the
    state of a loop may reach other steps near it, exponentials from which no maximum is subtracted are taken not to
    overflow, and parts of a gradient that cancel to be finite."""
    disabled: bool = False
    """Whether ``AUTOPALLAS_DISABLE`` asks for every function to run as it was written."""
    implementation_of: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    """Settings of ``AUTOPALLAS_BACKEND_<OPERATION>``; see :meth:`implementation_for`."""

    def implementation_for(self, op: str) -> str | tuple[str, ...] | None:
        """Returns the implementation or implementations requested for one operation, or None.

        What is asked for in general says nothing about an operation with kinds of sites: these have no kernels.
        """
        own = dict(self.implementation_of).get(op)
        without_kernels = op in OPERATIONS and operation_named(op).kinds
        return self.implementation if own is None and not without_kernels else own


def _bad(name: str, value: object, remedy: str) -> OptionError:
    return OptionError(f"option {name} is {value!r}; {remedy}")


def _choices(name: str, value: object, choices: tuple[str, ...]) -> tuple[str, ...]:
    named = f"out of {', '.join(word for word in choices if word[0] != '-')}, or None"
    if isinstance(value, (Mapping, bytes)) or not hasattr(value, "__iter__"):
        raise _bad(name, value, f"give a name or a list of names {named}")
    given = tuple(one_of(f"option {name}", item, choices) for item in cast(Sequence[object], value))
    if not given:
        raise _bad(name, value, f"give at least one name {named}")
    return given


def _objective(name: str, value: object) -> str:
    return one_of(f"option {name}", value, OBJECTIVES)


def _numerics(name: str, value: object) -> str:
    return one_of(f"option {name}", value, CLASSES)


def _implementation(name: str, value: object) -> str | tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value if value in IMPLEMENTATIONS else one_of(f"option {name}", value, implementation_names())
    return _choices(name, value, implementation_names())


def _ops(name: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    return selected(f"option {name}", _choices(name, (value,) if isinstance(value, str) else value, SELECTED))


def _only(name: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    allowed = _places(name, value)
    if not allowed:  # which would say nowhere, and must not be taken for everywhere
        raise _bad(name, value, f"give at least one place, each {FORMS}, or None; fuel=0 replaces nothing")
    return allowed


def _deny(name: str, value: object) -> tuple[str, ...]:
    return () if value is None else _places(name, value)


def _places(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (Mapping, bytes)) or not hasattr(value, "__iter__"):
        raise _bad(name, value, f"give a place or a list of places, each {FORMS}, or None")
    texts = (value,) if isinstance(value, str) else cast(Sequence[object], value)
    return tuple(dict.fromkeys(places(f"option {name}", texts)))


def _count(name: str, value: object) -> int:
    remedy = "give a whole number, 0 or more"
    if isinstance(value, bool):
        raise _bad(name, value, remedy)
    try:
        count = operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise _bad(name, value, remedy) from None
    if count < 0:
        raise _bad(name, value, remedy)
    return count


def _require(name: str, value: object) -> tuple[tuple[str, int], ...] | Literal["lockfile"]:
    if value is None:
        return ()
    if value == "lockfile":
        return "lockfile"
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = dict(value)  # checked before: options are checked where they are given and where they are used
    if not isinstance(value, Mapping):
        remedy = 'give a mapping from operation to number of sites, such as {"attention": 2}, or "lockfile"'
        raise _bad(name, value, remedy)
    known = (*OPERATIONS, *(pattern.name for pattern in declared()))
    required = {one_of(f"an operation in option {name}", op, known): n for op, n in value.items()}
    return tuple(sorted((op, _count(f"{name}[{op!r}]", n)) for op, n in required.items()))


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, value, "give True or False")
    return value


def _verify(name: str, value: object) -> bool | float:
    if isinstance(value, bool):
        return value
    remedy = "give True or False, or a fraction of calls between 0 and 1, such as 0.001"
    try:
        fraction = -1.0 if isinstance(value, (str, bytes)) else float(cast(SupportsFloat, value))
    except (TypeError, ValueError, OverflowError):
        raise _bad(name, value, remedy) from None
    if not 0 <= fraction <= 1:
        raise _bad(name, value, remedy)
    return bool(fraction) if fraction in (0, 1) else fraction


def _autotune(name: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise _bad(name, value, "give True, False or None")
    return value


def _seconds(name: str, value: object) -> float:
    remedy = "give a number of seconds above 0"
    if isinstance(value, (bool, str, bytes)):
        raise _bad(name, value, remedy)
    try:
        seconds = float(cast(SupportsFloat, value))
    except (TypeError, ValueError, OverflowError):
        raise _bad(name, value, remedy) from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise _bad(name, value, remedy)
    return seconds


def _fuel(name: str, value: object) -> int | None:
    return None if value is None else _count(name, value)


def _lock(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not isinstance(path := os.fspath(value), str) or not path:
        raise _bad(name, value, "give the path of a lockfile, or None")
    return path


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "objective": _objective,
    "numerics": _numerics,
    "implementation": _implementation,
    "ops": _ops,
    "only": _only,
    "deny": _deny,
    "require": _require,
    "strict": _flag,
    "autotune": _autotune,
    "tune_seconds": _seconds,
    "verify": _verify,
    "fuel": _fuel,
    "lock": _lock,
    "assume_finite": _flag,
}


def validated(given: Mapping[str, object]) -> Setting:
    """Checks options by name and value, and converts them to their one hashable form.

    Args:
      given: options as a user wrote them.

    Returns:
      (name, value) pairs, sorted by name.

    Raises:
      OptionError: an option does not exist, or does not accept its value.

    Example:
      >>> validated({"implementation": ["pallas_gpu", "xla"], "fuel": 3})
      (('fuel', 3), ('implementation', ('pallas_gpu', 'xla')))
    """
    checked = {}
    for name, value in given.items():
        if name not in _CHECKS:
            if name in inspect.signature(jax.jit).parameters:
                raise OptionError(f"{name} is an argument of jax.jit: optimize(jax.jit(fn, {name}=...))")
            near = difflib.get_close_matches(str(name), _CHECKS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise OptionError(f"there is no option {name!r}{hint}; the options are {', '.join(_CHECKS)}")
        checked[name] = _CHECKS[name](name, value)
    return tuple(sorted(checked.items(), key=lambda item: item[0]))


def callable_given(user: str, fn: F) -> F:
    """Returns ``fn``, which the public function ``user`` was given, if it can be called.

    Raises:
      OptionError: it cannot.
    """
    if not callable(fn):
        raise OptionError(f"{user} takes a function, not {fn!r}; options are given by name")
    return fn


def _over(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that hold where both are in force: the inner one wins, but what either denies is denied."""
    denied = dict.fromkeys((*outer.get("deny", ()), *inner.get("deny", ())))
    return {**outer, **inner} | ({"deny": tuple(denied)} if denied else {})


# Part of the key of every jit cache: a function traced inside `with options(...)` is traced again outside of it.
_active: TraceContext[Setting] = TraceContext(())


def active() -> Setting:
    """Returns the options of the enclosing ``with options(...)`` blocks, in this thread, as hashable data."""
    return _active.value


@contextmanager
def options(**given: Unpack[OptionArguments]) -> Iterator[None]:
    """Sets options for everything that is traced inside a ``with`` block, in this thread.

    Blocks nest: an inner block changes the options that it names and keeps the others.

    Args:
      **given: any field of :class:`Options` except those that only the environment sets.

    Returns:
      A context manager.

    Raises:
      OptionError: an option does not exist, or does not accept its value.

    Example:
      >>> with options(objective="memory"):
      ...     with options(fuel=1):
      ...         resolve({}).objective, resolve({}).fuel
      ('memory', 1)
    """
    merged = tuple(sorted(_over(dict(active()), dict(validated(given))).items(), key=lambda item: item[0]))
    with _active(merged):
        yield


def resolve(explicit: Mapping[str, object]) -> Options:
    """Returns the options in force now, for a function that was given ``explicit`` options.

    Args:
      explicit: the options given to the function itself.

    Returns:
      Every option's value, by the precedence that this module's docstring states.

    Raises:
      OptionError: an option or an environment variable has a name or a value that does not exist.

    Example:
      >>> resolve({"objective": "always"}).objective
      'always'
    """
    asked = environment.read()
    values: dict[str, Any] = {
        name: value
        for name in ("ops", "only", "deny", "objective", "numerics", "autotune", "verify", "fuel")
        if (value := getattr(asked, name)) is not None
    }
    values = _over(_over(values, dict(active())), dict(validated(explicit)))
    if values.get("require") == "lockfile" and values.get("lock") is None:
        raise _bad("require", "lockfile", "give a lockfile too, lock=PATH")
    implementation_of = dict(asked.backend_of)
    if asked.backend is not None:
        values["implementation"] = asked.backend
    return Options(**values, disabled=bool(asked.disable), implementation_of=tuple(sorted(implementation_of.items())))
