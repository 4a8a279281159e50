"""Products that the steps of a loop add to what they carry: which these are, and their sum over many steps at once."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Literal, Var
from autopallas.kernels.respelling.indexed_loops import IndexedLoop

__all__ = ["Term", "elements_of", "factors_of", "is_padded", "may_add_products", "rows_of", "sums_of", "total"]

_ADDITIONS = frozenset({"add", "add_any"})
_TURNS = frozenset({"transpose", "reshape", "slice", "split", "squeeze", "expand_dims"})
_Turn: TypeAlias = tuple[JaxprEqn, int]
"""An equation, and which of its results is used, or which of the operands that it concatenates the value is."""


@dataclass(frozen=True, slots=True)
class Term:
    """A product that a step adds to what it carries.

    Attributes:
      product: its equation.
      turns: what is done to its result before it is added: transpositions, reshapes, slices, zeros or other products
        around it and casts to wider numbers.
    """

    product: JaxprEqn
    turns: tuple[_Turn, ...]


def may_add_products(equation: JaxprEqn) -> bool:
    """Returns whether a scan's step may add a product to a carried array: a quick look."""
    jaxpr, _ = jaxprs.open_jaxpr(equation.params["jaxpr"])
    constants, carried = compat.scan_parts(equation)
    carries = set(jaxpr.invars[constants : constants + carried])
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    todo = [v for v in jaxpr.outvars[:carried] if isinstance(v, Var) and len(getattr(v.aval, "shape", ())) >= 2]
    seen = set(todo)
    while todo:
        last = made.get(todo.pop())
        if last is not None and last.primitive.name in _ADDITIONS:
            inputs = {v for v in last.invars if isinstance(v, Var)}
            if inputs & carries:
                return True
            todo += inputs - seen  # what is added up in many ways is looked at once
            seen |= inputs
    return False


def sums_of(loop: IndexedLoop) -> dict[int, tuple[Term, ...]]:
    """Returns the terms of each carried value to which steps add nothing but products, and which they do not read."""
    step, _ = jaxprs.open_jaxpr(loop.step)
    made = {v: e for e in step.eqns for v in e.outvars}
    uses: dict[Var, int] = {}
    for atom in (*(v for e in step.eqns for v in e.invars), *step.outvars):
        if isinstance(atom, Var):
            uses[atom] = uses.get(atom, 0) + 1
    constants = {*step.constvars, *step.invars[: loop.constants]}
    found = {}
    for i in range(loop.carried):
        before, after = step.invars[loop.constants + i], step.outvars[i]
        terms = _terms(before, after, made, uses, constants)
        if terms:
            found[i] = terms
    return found


def _terms(
    before: Var, after: JaxprAtom, made: dict[Var, JaxprEqn], uses: dict[Var, int], constants: set[Var]
) -> tuple[Term, ...] | None:
    """Returns the products whose sum with ``before`` is ``after``, or None where that is anything else."""
    if not jnp.issubdtype(before.aval.dtype, jnp.floating) or uses.get(before) != 1:
        return None
    todo, terms, has_before = [after], list[Term](), False
    while todo:
        atom = todo.pop()
        if atom is before:
            has_before = True
            continue
        if not isinstance(atom, Var) or uses[atom] != 1 or atom.aval.dtype != before.aval.dtype:
            return None
        equation = made.get(atom)
        if equation is not None and equation.primitive.name in _ADDITIONS:
            if any(v.aval.shape != atom.aval.shape for v in equation.invars):
                return None
            todo += equation.invars
            continue
        found = _of(atom, made, uses, constants, ())
        if found is None:
            return None
        terms += found
    return tuple(terms) if has_before else None


def _of(
    atom: Var, made: dict[Var, JaxprEqn], uses: dict[Var, int], constants: set[Var], turned: tuple[_Turn, ...]
) -> list[Term] | None:
    """Returns the products that a value is put together of, turned and cast to wider numbers, or None.

    Args:
      atom: the value.
      made, uses, constants: the equations of a step's values, how often these are read, and what all steps share.
      turned: what is done to the value before it is added, the last of it first.
    """
    turns = list(turned)
    while (equation := made.get(atom)) is not None and uses.get(atom) == 1:
        name = equation.primitive.name
        if name == "dot_general":
            steps = all(isinstance(v, Var) and v not in constants for v in equation.invars)
            floats = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*equation.invars, atom))
            narrowed = any(v.aval.dtype.itemsize > atom.aval.dtype.itemsize for v in equation.invars)
            return [Term(equation, tuple(reversed(turns)))] if steps and floats and not narrowed else None
        if name == "concatenate":
            if not all(isinstance(v, Var) for v in equation.invars):
                return None
            parts = [
                _of(cast(Var, v), made, uses, constants, (*turns, (equation, i))) for i, v in enumerate(equation.invars)
            ]
            return None if None in parts else [term for part in parts for term in part or ()]
        given = equation.invars[0] if equation.invars else None
        if not isinstance(given, Var) or not (name in _TURNS or _widens(equation) or _pads_with_zeros(equation)):
            return None
        turns.append((equation, equation.outvars.index(atom)))
        atom = given
    return None


def _widens(equation: JaxprEqn) -> bool:
    """Returns whether an equation casts floating numbers to a dtype that has all of them."""
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return jnp.issubdtype(before, jnp.floating) and jnp.promote_types(before, after) == after


def _pads_with_zeros(equation: JaxprEqn) -> bool:
    """Returns whether an equation puts an array among zeros, as the gradient of a slice does."""
    if equation.primitive.name != "pad":
        return False
    value = equation.invars[1]
    return isinstance(value, Literal) and not np.any(np.asarray(value.val))


def is_padded(term: Term) -> bool:
    """Returns whether each step puts the product among zeros."""
    return any(equation.primitive.name == "pad" for equation, _ in term.turns)


def factors_of(sums: Mapping[int, tuple[Term, ...]]) -> list[Var]:
    """Returns what products that are added up multiply."""
    products = [term.product for terms in sums.values() for term in terms]
    return [v for product in products for v in product.invars if isinstance(v, Var)]


def elements_of(loop: IndexedLoop, sums: Iterable[int]) -> int:
    return sum(math.prod(loop.step.out_avals[i].shape) for i in sums)


def rows_of(product: JaxprEqn) -> int:
    """Returns how many products of two numbers each element of a product of matrices sums up."""
    (contracted, _), _ = product.params["dimension_numbers"]
    return math.prod(product.invars[0].aval.shape[axis] for axis in contracted)


# ---------------------------------------------------------------------- their sum over many steps


def total(terms: Sequence[Term], values: dict[Var, jax.Array], dtype: np.dtype) -> jax.Array:
    """Returns the sum of products over the steps of a chunk; products alike are one, of the rows of all."""
    alike: dict[str, list[Term]] = {}
    for term in terms:
        alike.setdefault(_form(term), []).append(term)
    found = []
    for own in alike.values():
        left, right = ([values[cast(Var, term.product.invars[side])] for term in own] for side in (0, 1))
        x = _product(own[0].product, _joined(left, dtype), _joined(right, dtype))
        for equation, result in own[0].turns:
            if equation.primitive.name != "convert_element_type":
                x = _turned(equation, x, result)
        found.append(x)
    return functools.reduce(operator.add, found)


def _form(term: Term) -> str:
    """Returns a text that is equal for products of operands of equal shapes that are taken and turned alike."""
    equations = ((term.product, 0), *term.turns)
    return str([(e.primitive.name, i, [v.aval.shape for v in e.invars], e.params) for e, i in equations])


def _joined(parts: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    """Returns the rows of all steps, and of several products, in the dtype of their sum: not every compiler for CPUs
    multiplies numbers of 16 bits and sums them up in 32."""
    whole = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return whole.astype(dtype)


def _product(equation: JaxprEqn, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns a step's product summed over the steps, which are the first axes of the operands."""
    contracted, batch = equation.params["dimension_numbers"]
    numbers = _later(contracted, True), _later(batch, False)
    found: jax.Array = lax.dot_general(left, right, numbers, precision=equation.params["precision"])
    return found


def _later(axes: tuple[Sequence[int], Sequence[int]], contracts: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes of two operands behind a first axis of steps, which is one of them where it is contracted."""
    left, right = (((0,) if contracts else ()) + tuple(axis + 1 for axis in own) for own in axes)
    return left, right


def _turned(equation: JaxprEqn, x: jax.Array, place: int) -> jax.Array:
    """Returns an array as an equation turns, reshapes, cuts or pads it, whose own may be narrower; one of those that it
    concatenates with zeros in the place of the others."""
    if equation.primitive.name == "concatenate":
        axis, sizes = (
            equation.params["dimension"],
            [v.aval.shape[equation.params["dimension"]] for v in equation.invars],
        )
        around = [(0, 0, 0)] * x.ndim
        around[axis] = sum(sizes[:place]), sum(sizes[place + 1 :]), 0
        return lax.pad(x, jnp.zeros((), x.dtype), around)
    params = equation.primitive.get_bind_params(equation.params)
    more = [jnp.zeros((), x.dtype)] if equation.primitive.name == "pad" else []
    found = equation.primitive.bind(x, *more, **params)
    return cast(jax.Array, found[place] if equation.primitive.multiple_results else found)
