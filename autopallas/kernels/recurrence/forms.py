"""Runs a recurrence in its different forms; all return the last carried values and the stacked results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from autopallas.compat import JaxprAtom, JaxprEqn, Var
from autopallas.kernels.recurrence.chunks import OfChunks
from autopallas.kernels.recurrence.loop import AllSteps, Loop
from autopallas.kernels.recurrence.state_arrays import StateArrays
from autopallas.kernels.recurrence.structure import Known, MatrixState
from autopallas.sites.spec import Dtype

__all__ = ["in_chunks", "is_product", "products_apart", "without_products"]

Array: TypeAlias = jax.Array


# ---------------------------------------------------------------------- the loop without its products


def without_products(loop: Loop, known: Sequence[Known], operands: Sequence[Array]) -> list[Array]:
    """Computes products with matrices that are the same in all steps before and after the loop."""
    steps = AllSteps(loop, operands)
    early = _early(loop, known)
    before, after = products_apart(loop, early)
    last: dict[int, Array] = {}
    for value in early:
        last |= _computed(steps, value)
    steps.compute(v for e in before for v in e.outvars)
    late = {v for e in after for v in e.outvars}
    between = [a for e in after for a in e.invars if isinstance(a, Var) and a not in late]
    results = [a for a in loop.outputs[loop.carried :] if isinstance(a, Var)]
    inside = [place for place in range(loop.carried) if place not in last]
    dependent = _dependent(loop, inside)
    inner = dict.fromkeys(v for v in (*between, *results) if v in dependent and v not in late)
    last |= steps.scan(inside, [*inner] or [loop.carries[place] for place in inside])
    steps.compute(results)
    return [*(last[i] for i in range(loop.carried)), *map(steps.stacked, loop.outputs[loop.carried :])]


def products_apart(loop: Loop, known: Sequence[Known]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Returns the products with matrices of all steps that do not read carried values, but for those that are known
    before the loop; and the equations behind those that do, if these do not lead to the carried values."""
    early = {value.carry: value.kind for value in _early(loop, known)}
    dependent = _dependent(loop, [place for place in range(loop.carried) if place not in early])
    slices = loop.inputs[loop.constants + loop.carried :]
    varying = {*slices, *dependent, *(loop.carries[i] for i, kind in early.items() if kind == "shifted")}
    carried = [a for i, a in enumerate(loop.outputs[: loop.carried]) if i not in early and isinstance(a, Var)]
    leading = set(loop.leading_to(carried, {}))
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    late: set[Var] = set()
    for position, equation in enumerate(loop.equations):
        read = [a for a in equation.invars if isinstance(a, Var)]
        own = [a for a in read if a in varying]
        if own:
            varying.update(equation.outvars)
        product = is_product(equation) and len(own) == 1
        if product and not dependent.intersection(own):
            before.append(equation)
        elif position not in leading and (late.intersection(read) or product):
            after.append(equation)
            late.update(equation.outvars)
    return before, after


def _early(loop: Loop, known: Sequence[Known]) -> list[Known]:
    """Returns the carried values that are known before the loop without a loop of their own."""
    found: list[Known] = []
    for value in known:
        others = set(loop.carries) - {loop.carries[own.carry] for own in found}
        after = loop.outputs[value.carry]
        wanted = [after] if isinstance(after, Var) else []
        read = {*wanted, *_read(loop, loop.leading_to(wanted, {}))}
        if value.kind == "constant" or (value.kind == "shifted" and others.isdisjoint(read)):
            found.append(value)
    return found


def _read(loop: Loop, positions: Sequence[int]) -> set[Var]:
    """Returns the variables that equations read."""
    return {a for i in positions for a in loop.equations[i].invars if isinstance(a, Var)}


def is_product(equation: JaxprEqn) -> bool:
    """Returns whether an equation sums products over an axis."""
    if equation.primitive.name == "dot_general":
        return bool(equation.params["dimension_numbers"][0][0])
    return equation.primitive.name == "conv_general_dilated"


def _dependent(loop: Loop, carried: Sequence[int]) -> set[Var]:
    """Returns the variables that depend on some of the carried values."""
    found = {loop.carries[place] for place in carried}
    for equation in loop.equations:
        if not found.isdisjoint([a for a in equation.invars if isinstance(a, Var)]):
            found.update(equation.outvars)
    return found


# ---------------------------------------------------------------------- chunks


def in_chunks(
    loop: Loop,
    known: Sequence[Known],
    states: Sequence[MatrixState],
    sizes: Mapping[int, int],
    dtype: Dtype,
    chunk: int,
    of_chunks: OfChunks,
    operands: Sequence[Array],
) -> list[Array]:
    """Computes states in chunks of steps, and everything else for all steps at once.

    Args:
      loop: the loop.
      known: the other carried values, in the order in which they can be computed.
      states: the states.
      sizes: the size of each label.
      dtype: in which the states are computed.
      chunk: the number of steps of a chunk.
      of_chunks: what computes chunks.
      operands: the site's operands.
    """
    steps = AllSteps(loop, operands)
    last: dict[int, Array] = {}
    for value in known:
        if value.kind != "last":
            last |= _computed(steps, value)
    for state in states:
        last[state.carry] = StateArrays(steps, state, sizes, dtype).run(chunk, of_chunks)
    for value in known:
        if value.kind == "last":
            last[value.carry] = _sequence(steps, loop.outputs[value.carry])[-1]
    results = loop.outputs[loop.carried :]
    steps.compute(a for a in results if isinstance(a, Var))
    return [*(last[i] for i in range(loop.carried)), *map(steps.stacked, results)]


def _computed(steps: AllSteps, value: Known) -> dict[int, Array]:
    """Makes known what a carried value is before each step; returns what it is at the end."""
    loop, place = steps.loop, value.carry
    variable, after, first = loop.carries[place], loop.outputs[place], steps.first[place]
    match value.kind:
        case "constant":
            steps.fixed[variable] = first
            return {place: first}
        case "shifted":
            found = _sequence(steps, after)
            steps.varying[variable] = jnp.concatenate([first[None], found[:-1]])
            return {place: found[-1]}
        case _:
            return steps.scan([place], [])


def _sequence(steps: AllSteps, atom: JaxprAtom) -> Array:
    """Returns the values of a variable in all steps, the first step's first."""
    if isinstance(atom, Var):
        steps.compute([atom])
    found = steps.stacked(atom)
    return jnp.flip(found, 0) if steps.loop.reverse else found
