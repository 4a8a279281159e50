"""Loops that carry arrays of bfloat16 and set slices of them, as loops that carry their bits.

An array that a step sets a slice of is carried as integers of 16 bits.  The slice is written as bits; slices that are
read, and the whole array where a product reads it, become bfloat16 again where they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Literal, Var
from autopallas.kernels.respelling.bfloat16_bits import BFLOAT16, as_bits, of_bits
from autopallas.kernels.respelling.indexed_loops import IndexedLoop, evaluated

__all__ = ["set_by_slices", "step_in_bits"]

_LEAST_SLICES = 8
"""An array of fewer slices is not much larger than what a step sets."""
_SETS = frozenset({"dynamic_update_slice", "scatter"})
_READS = frozenset({"dynamic_slice", "gather", "slice"})


def set_by_slices(loop: IndexedLoop) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the numbers of the carried arrays that can be carried as bits, and of those that products read whole.

    A step may set slices of such an array, read slices of it, before and after, and hand on nothing but the array with
    all slices set.  Products may read all of it where they need not turn it: transpositions of bits are slow.
    """
    step, _ = jaxprs.open_jaxpr(loop.step)
    candidates = _set(loop)
    holds = _arrays(loop, candidates)
    refused: set[int] = set()
    whole: set[int] = set()
    for equation in step.eqns:
        held = {i: number for i, atom in enumerate(equation.invars) if (number := _held(holds, atom)) is not None}
        if not held:
            continue
        if equation.primitive.name == "dot_general" and all(_is_in_place(equation, side) for side in held):
            whole.update(held.values())
        elif list(held) != [0] or not (_sets_little(equation) or _reads_little(equation)):
            refused.update(held.values())
        elif equation.primitive.name in _SETS:
            holds[equation.outvars[0]] = held[0]
    given = [(i, _held(holds, atom)) for i, atom in enumerate(step.outvars)]
    refused.update(number for i, number in given if number is not None and number != i)
    return frozenset(candidates - refused), frozenset(whole - refused)


def _set(loop: IndexedLoop) -> set[int]:
    """Returns the numbers of the carried arrays that a step hands on with slices set, and with no other change."""
    step, _ = jaxprs.open_jaxpr(loop.step)
    holds = _arrays(loop, range(loop.carried))
    changed: dict[Var, int] = {}
    for equation in step.eqns:
        if equation.primitive.name in _SETS and (number := _held(holds, equation.invars[0])) is not None:
            holds[equation.outvars[0]] = changed[equation.outvars[0]] = number
    return {i for i, atom in enumerate(step.outvars[: loop.carried]) if _held(changed, atom) == i}


def step_in_bits(
    loop: IndexedLoop, carried: Collection[int]
) -> Callable[[Sequence[jax.Array], Sequence[jax.Array], Sequence[jax.Array]], list[jax.Array]]:
    """Returns a loop's step, from constants, carried values and slices to carried values and results, where those of
    the numbers ``carried`` are bits."""
    step, captured = jaxprs.open_jaxpr(loop.step)

    def run(constants: Sequence[jax.Array], first: Sequence[jax.Array], slices: Sequence[jax.Array]) -> list[jax.Array]:
        values = dict(zip([*step.constvars, *step.invars], [*captured, *constants, *first, *slices], strict=True))
        holds = _arrays(loop, carried)

        def value(atom: JaxprAtom) -> jax.Array:
            return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]

        for equation in step.eqns:
            given, name = [value(atom) for atom in equation.invars], equation.primitive.name
            held = [_held(holds, atom) for atom in equation.invars]
            if held and held[0] is not None and name in _SETS:
                holds[equation.outvars[0]] = held[0]
                results = [_slices_as_bits(equation, given)]
            elif held and held[0] is not None and name in _READS:
                results = [of_bits(_slices_as_bits(equation, given))]
            else:
                given = [x if number is None else of_bits(x) for x, number in zip(given, held, strict=True)]
                results = list(evaluated(equation, given))
            values.update(zip(equation.outvars, results, strict=True))
        return [value(atom) for atom in step.outvars]

    return run


def _arrays(loop: IndexedLoop, numbers: Collection[int]) -> dict[Var, int]:
    """Returns the numbers of the carried arrays of bfloat16 by the variables that a step is given them in."""
    step, _ = jaxprs.open_jaxpr(loop.step)
    carries = step.invars[loop.constants : loop.constants + loop.carried]
    return {carries[i]: i for i in numbers if carries[i].aval.dtype == BFLOAT16 and carries[i].aval.shape}


def _held(holds: dict[Var, int], atom: JaxprAtom) -> int | None:
    return holds.get(atom) if isinstance(atom, Var) else None


def _sets_little(equation: JaxprEqn) -> bool:
    """Returns whether an equation sets slices of its first operand that are a small part of it."""
    name = equation.primitive.name
    if name not in _SETS or name == "scatter" and equation.params["update_jaxpr"] is not None:
        return False
    update = equation.invars[1 if name == "dynamic_update_slice" else 2].aval
    return update.dtype == BFLOAT16 and _LEAST_SLICES * update.size <= equation.invars[0].aval.size


def _reads_little(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    return name in _READS and 2 * equation.outvars[0].aval.size <= equation.invars[0].aval.size


def _is_in_place(equation: JaxprEqn, side: int) -> bool:
    """Returns whether a product may read an operand as it lies in memory: the axes of its batch come first."""
    _, batch = equation.params["dimension_numbers"]
    return tuple(batch[side]) == tuple(range(len(batch[side])))


def _slices_as_bits(equation: JaxprEqn, given: Sequence[jax.Array]) -> jax.Array:
    """Returns what an equation gives that sets or reads slices of an array, of the array's bits."""
    name, params, given = equation.primitive.name, dict(equation.params), list(given)
    if name in _SETS:
        place = 1 if name == "dynamic_update_slice" else 2
        given[place] = as_bits(given[place])
    elif name == "gather":  # what is read beyond the array is NaN, unless the program says otherwise
        fill = np.nan if params["fill_value"] is None else params["fill_value"]
        params["fill_value"] = int(np.asarray(fill, BFLOAT16).view(np.uint16))
    found: jax.Array = equation.primitive.bind(*given, **equation.primitive.get_bind_params(params))
    return found
