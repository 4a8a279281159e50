"""A declared operation that is called by its name: what it may be called with, and the site that its arrays make.

An array has an axis for each letter of its operand.  The first letter of ``rows`` is an exception: it stands for any
number of axes, or none, and arrays are broadcast along these as NumPy does it.  The further letters of ``rows`` may be
missing where there is a single row: ``x[N]`` is read as ``x[M, N]`` with M = 1, and a result has no axis for it either.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from itertools import islice
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from autopallas.compat import Shaped
from autopallas.sites.declared import DeclaredOperation, DeclaredSite, Labels
from autopallas.sites.index_notation import Operand, View
from autopallas.sites.spec import Dtype, Spec

__all__ = [
    "checked_parameters",
    "kind_of",
    "main_operand",
    "operand_names",
    "parameters",
    "result_dtype_of",
    "shape_in_letters",
    "site_of",
]


def operand_names(operation: DeclaredOperation) -> dict[str, bool]:
    """Returns the operands in the order of the reference's arguments, each with whether a site may lack it: then the
    reference has a default for it."""
    arguments = inspect.signature(operation.reference).parameters
    return {n: p.default is not inspect.Parameter.empty for n, p in arguments.items() if n in operation.operands}


def parameters(operation: DeclaredOperation) -> dict[str, object]:
    """Returns the fields of the spec that are neither sizes nor dtypes, with their defaults, or
    ``inspect.Parameter.empty``."""
    arrays = (*operation.operands, "result", *operation.further)
    known = {*operation.sizes.values(), *(f"{name}_dtype" for name in arrays)}
    own = (f for f in fields(operation.sample) if f.name not in known)
    return {f.name: inspect.Parameter.empty if f.default is MISSING else f.default for f in own}


def shape_in_letters(operation: DeclaredOperation, letters: str) -> str:
    """Returns a shape as messages and docstrings show it, such as "[B..., M, N]"."""
    first = operation.first_row
    return f"[{', '.join(f'{x}...' if x == first else x for x in letters.split())}]"


def kind_of(operation: DeclaredOperation, operand: str) -> str:
    """Returns the kind of numbers that an operand holds: that of the sample's, and "floating-point" where the sample
    lacks it."""
    dtype = getattr(operation.sample, f"{operand}_dtype")
    return "floating-point" if dtype is None else _kind(dtype)


def main_operand(operation: DeclaredOperation) -> str | None:
    """Returns the first operand that has the dtype of the result in the sample: elsewhere the result has this one's."""
    dtypes = {name: getattr(operation.sample, f"{name}_dtype") for name in operand_names(operation)}
    return next((name for name, dtype in dtypes.items() if dtype == _result_dtype(operation)), None)


def result_dtype_of(operation: DeclaredOperation, dtypes: Mapping[str, Dtype]) -> Dtype:
    """Returns the result's dtype by default: that of the main operand, and else that of the sample."""
    main = main_operand(operation)
    return dtypes[main] if main is not None and main in dtypes else _result_dtype(operation)


def _result_dtype(operation: DeclaredOperation) -> Dtype:
    dtype: Dtype = getattr(operation.sample, "result_dtype")  # noqa: B009 (every spec has it, their base has not)
    return dtype


def checked_parameters(operation: DeclaredOperation, given: Mapping[str, object]) -> dict[str, object]:
    """Returns the values of the spec's parameters, each of the type that the sample's has.

    Raises:
      TypeError, ValueError: one is of another type, or not finite.
    """
    return {name: _checked(name, value, getattr(operation.sample, name)) for name, value in given.items()}


def site_of(
    operation: DeclaredOperation,
    arrays: Mapping[str, Shaped],
    values: Mapping[str, object],
    result_dtype: Dtype | None = None,
    further_dtypes: Mapping[str, Dtype | None] | None = None,
) -> DeclaredSite:
    """The site that computes the operation from whole arrays.

    Where some operand lacks the second letter of ``rows``, the first one is for the axes along which such operands vary
    too: those along which none does count as the second one's.  So a call has the sizes that a pattern finds.

    Args:
      operation: what is called.
      arrays: the operands that are given, by name.
      values: those of the spec's parameters.
      result_dtype: by default, :func:`result_dtype_of`.
      further_dtypes: those of further results, by name; None for one that is not given, as all are by default.

    Raises:
      TypeError, ValueError: an array has the wrong dtype, rank or size.
    """
    first, further = operation.first_row, operation.rows.split()[1:]
    axes = {name: _axes(operation, name, array) for name, array in arrays.items()}
    found = _sizes(operation, axes)
    batch = _broadcast({name: own[first] for name, own in axes.items() if first in own}, first)
    label: dict[str, Labels] = {letter: (len(batch) + number,) for number, letter in enumerate(found)}
    label |= {letter: label[other] for letter, other in operation.stands_for.items() if letter not in label}

    def view(letters: Iterable[str], shape: tuple[int, ...]) -> View:
        own = [(i,) if n > 1 else () for i, n in enumerate(shape, len(batch) - len(shape))]
        return tuple((0, x) for letter in letters for x in (own if letter == first else [label[letter]]))

    views = {name: view((x for x in own if x == first or own[x]), own.get(first, ())) for name, own in axes.items()}
    result, *others = (
        view((x for x in letters.split() if x == first or x in label), batch)
        for letters in (operation.result, *operation.further.values())
    )
    shared = [i for i, n in enumerate(batch) if n > 1]
    for second in (letter for letter in further[:1] if letter in found and _tells_apart(operation, letter)):
        moved = [i for i in shared if all(((0, (i,)) in views[name]) == (second in own) for name, own in axes.items())]
        label[second] = (*moved, *label[second])
        shared = [i for i in shared if i not in moved]
    dtypes = {name: np.dtype(array.dtype) for name, array in arrays.items()}
    kind, result_dtype = _kind(_result_dtype(operation)), result_dtype or result_dtype_of(operation, dtypes)
    if _kind(result_dtype) != kind:
        raise TypeError(f"result_dtype is {result_dtype}; it must be {kind}")
    more = {name: dtype for name, dtype in (further_dtypes or {}).items() if dtype is not None}
    for name, dtype in more.items():
        if _kind(dtype) != kind:
            raise TypeError(f"{name}_dtype is {dtype}; it must be {kind}")
    spec: Callable[..., Spec] = type(operation.sample)
    form = spec(
        **dict.fromkeys(operation.sizes.values(), 0),  # the site has them
        **{f"{name}_dtype": dtypes.get(name) for name in operation.operands},
        result_dtype=result_dtype,
        **{f"{name}_dtype": more.get(name) for name in operation.further},
        **values,
    )
    return DeclaredSite(
        op=operation.name,
        form=form,
        sizes=(*batch, *found.values()),
        operands=tuple((name, Operand(position, views[name])) for position, name in enumerate(arrays)),
        letters=tuple((x, tuple(shared) if x == first else label.get(x, ())) for x in operation.sizes),
        result=result,
        uses=tuple(range(len(arrays))),
        further=tuple((name, own) for name, own in zip(operation.further, others, strict=True) if name in more),
    )


_Axes: TypeAlias = dict[str, tuple[int, ...]]
"""The sizes of the axes of each letter; none of one that an array lacks since it is a single row."""


def _axes(operation: DeclaredOperation, name: str, array: Shaped) -> _Axes:
    """The axes of an array by their letters."""
    kind = kind_of(operation, name)
    if not hasattr(array, "dtype") or _kind(array.dtype) != kind:
        given = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{name} must be an array of {kind} numbers, not {given}; convert it")
    first, further, letters = operation.first_row, operation.rows.split()[1:], operation.operands[name].split()
    several = len(array.shape) - sum(letter != first for letter in letters)
    missing = [letter for letter in letters if letter in further][: max(-several, 0)]
    several += len(missing)
    if several < 0 or several > 0 and first not in letters:
        shape = shape_in_letters(operation, operation.operands[name])
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {shape}: add or merge axes")
    if 0 in array.shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must not be empty: leave the call out")
    rest = iter(array.shape)
    counts = {letter: several if letter == first else int(letter not in missing) for letter in letters}
    return {letter: tuple(islice(rest, count)) for letter, count in counts.items()}


def _tells_apart(operation: DeclaredOperation, second: str) -> bool:
    """Whether an operand lacks a letter that the result has."""
    return second in operation.result.split() and any(second not in x.split() for x in operation.operands.values())


def _sizes(operation: DeclaredOperation, axes: Mapping[str, _Axes]) -> dict[str, int]:
    """The size of each letter but the first of ``rows``, in which operands must agree; not of one without an axis."""
    found: dict[str, tuple[str, int]] = {}
    for name, own in axes.items():
        for letter in own.keys() - {operation.first_row}:
            mine = math.prod(own[letter])
            other, size = found.setdefault(letter, (name, mine))
            if size != mine:
                words = operation.sizes[letter].replace("_", " ")
                raise ValueError(f"{name} has {mine} {words} ({letter}) and {other} {size}; they must agree")
    having = {letter for own in axes.values() for letter, sizes in own.items() if sizes}
    return {letter: found[letter][1] for letter in operation.sizes if letter in found and letter in having}


def _broadcast(shapes: Mapping[str, tuple[int, ...]], letter: str) -> tuple[int, ...]:
    """The axes of all arrays that the first letter of ``rows`` stands for."""
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        said = ", ".join(f"{shape} of {name}" for name, shape in shapes.items())
        raise ValueError(f"the axes {letter}... cannot be broadcast together: {said}; make them 1 or equal") from None


def _checked(name: str, value: object, like: object) -> object:
    """A parameter, of the type of the sample's."""
    if isinstance(like, bool):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} is a {type(value).__name__}; pass True or False, known before tracing")
        return bool(value)
    if not isinstance(like, int | float):
        return value
    kind = numbers.Integral if isinstance(like, int) else numbers.Real
    own = type(like)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a Python {own.__name__}, known before tracing")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value}; it must be a finite number")
    return int(value) if isinstance(value, numbers.Integral) and own is int else number


def _kind(dtype: Dtype) -> str:
    kinds = {"floating-point": jnp.floating, "integer": jnp.integer, "boolean": jnp.bool_}
    return next((name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)), str(dtype))
