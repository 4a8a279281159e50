"""Computes equations one step of an axis at a time: what they give at a step depends on that step alone.

Where ``y[b, t, d] = f(x[b, t, d])``, step t of y needs step t of x.  A loop over t that computes such equations in its
body keeps one step of what lies between, and not the whole of it.  Arrays of one step have size 1 along the axis, so
that the equations stay as they are but for the sizes in their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import ClosedJaxpr, JaxprEqn, Literal
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.kernels.respelling.short_sums import short_sum, short_sums

__all__ = ["SUMMED", "axes_read", "axis_given", "is_light", "run_step"]

SUMMED = -1
"""In place of an axis: a result that is summed over the steps."""

_LITTLE = 2**16
"""Elements of the largest step in which such a sum was measured, and gained."""
_LONGEST_ROW, _LONGEST_COLUMN = 16, 2**12
"""Most numbers that are added up one after the other in a step: what that rounds away grows with them."""
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})


def is_light(equation: JaxprEqn) -> bool:
    """Returns whether an equation costs no more than writing its result does."""
    name = equation.primitive.name
    if name == "dot_general":
        return not equation.params["dimension_numbers"][0][0]
    return name in ELEMENTWISE or name in ("broadcast_in_dim", "reshape", "transpose", "squeeze")


def axes_read(equation: JaxprEqn, axis: int) -> tuple[int | None, ...] | None:
    """Returns the axes of the operands along which the steps of a result stand.

    Args:
      equation: one with one result.
      axis: the axis of the steps in the result.

    Returns:
      An axis for each operand, None for one that is the same for all steps; None where a step of the result needs more
      than a step of each operand.
    """
    name, params = equation.primitive.name, equation.params
    (result,) = equation.outvars
    shapes, shape = [tuple(v.aval.shape) for v in equation.invars], tuple(result.aval.shape)
    if any(params.get(key) is not None for key in ("sharding", "out_sharding")):
        return None
    if name in ELEMENTWISE:
        return tuple(_along(own, shape, axis) for own in shapes) if _agree(shapes, shape) else None
    if len(shapes) == 1:
        (own,) = shapes
        if name == "broadcast_in_dim":
            placed = [i for i, d in enumerate(params["broadcast_dimensions"]) if d == axis]
            return (placed[0] if placed and own[placed[0]] == shape[axis] else None,)
        if name == "transpose":
            return (int(params["permutation"][axis]),)
        if name == "reshape" and params["dimensions"] is None:
            found = _same_place(shape, own, axis)
            return None if found is None else (found,)
        removed = params.get("dimensions") if name == "squeeze" else None
        if removed is not None:
            return ([d for d in range(len(own)) if d not in removed][axis],)
    if name == "dot_general":
        ((left, _), (left_batch, right_batch)), rank = params["dimension_numbers"], len(shapes[0])
        if axis < len(left_batch):
            return int(left_batch[axis]), int(right_batch[axis])
        if left:
            return None
        free = [d for d in range(rank) if d not in left_batch]
        if axis < len(left_batch) + len(free):
            return free[axis - len(left_batch)], None
        others = [d for d in range(len(shapes[1])) if d not in right_batch]
        return None, others[axis - len(left_batch) - len(free)]
    return None


def axis_given(equation: JaxprEqn, axes: Sequence[int | None]) -> int | None:
    """Returns the axis of the result along which the steps stand, given those of the operands.

    Returns:
      The axis; ``SUMMED`` for a sum over the steps; None where a step of the result needs more than a step of each
      operand.
    """
    name, params = equation.primitive.name, equation.params
    known = [(i, axis) for i, axis in enumerate(axes) if axis is not None]
    if not known:
        return None
    (place, axis), *_ = known
    (result,) = equation.outvars
    shape = tuple(result.aval.shape)
    found: int | None = None
    if name in ELEMENTWISE:
        found = axis
    elif name == "broadcast_in_dim":
        found = int(params["broadcast_dimensions"][axis])
    elif name == "transpose":
        found = list(params["permutation"]).index(axis)
    elif name == "reshape" and params["dimensions"] is None:
        found = _same_place(tuple(equation.invars[0].aval.shape), shape, axis)
    elif name == "squeeze":
        found = axis - sum(d < axis for d in params["dimensions"])
    elif name in _REDUCTIONS and params.get("out_sharding") is None:
        if axis in params["axes"]:
            return SUMMED if name == "reduce_sum" else None
        return axis - sum(int(d) < axis for d in params["axes"])
    elif name == "dot_general":
        (contracted, batch) = params["dimension_numbers"]
        if place == 0 and axis in batch[0]:
            found = list(batch[0]).index(axis)
            return found if axes[1] == batch[1][found] else None
        if place == 0 and axis in contracted[0]:
            other = contracted[1][list(contracted[0]).index(axis)]
            return SUMMED if axes[1] == other else None
        if axes[1 - place] is None and axis not in (*contracted[place], *batch[place]):
            return _beside(equation, place, axis)
        return None
    if found is None or axes_read(equation, found) != tuple(axes):
        return None
    return found


def _beside(equation: JaxprEqn, place: int, axis: int) -> int | None:
    """Returns the axis of a product along which the steps of one operand stand, where the other is the same for all
    steps and has no axes of its own, so that a step is no product of matrices."""
    contracted, batch = equation.params["dimension_numbers"]
    own, other = (len(equation.invars[i].aval.shape) for i in (place, 1 - place))
    if other != len(contracted[1 - place]) + len(batch[1 - place]):
        return None
    free = [d for d in range(own) if d not in contracted[place] and d not in batch[place]]
    return len(batch[place]) + free.index(axis)


def _agree(shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Returns whether operands have the axes of a result, some of size 1, or none at all."""
    return all(not own or len(own) == len(shape) for own in shapes)


def _along(own: tuple[int, ...], shape: tuple[int, ...], axis: int) -> int | None:
    return axis if own and own[axis] == shape[axis] else None


def _same_place(shape: Sequence[int], other: Sequence[int], axis: int) -> int | None:
    """Returns the axis of an array of another shape that holds the same elements at each of its positions."""
    before = math.prod(shape[:axis])
    for found, size in enumerate(other):
        if size == shape[axis] and math.prod(other[:found]) == before:
            return found
    return None


def run_step(program: ClosedJaxpr, steps: Sequence[int], given: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes one step of a program.

    Args:
      program: the equations at full size, each with one result.
      steps: for each equation, the axis of the steps in its result, or ``SUMMED``.
      given: the inputs, of size 1 along the axis of the steps if they have one.

    Returns:
      One step of each result; of a sum, what the step adds.
    """
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.invars, given, strict=True))
    for equation, axis in zip(jaxpr.eqns, steps, strict=True):
        (result,) = equation.outvars
        operands = [v.val if isinstance(v, Literal) else known[v] for v in equation.invars]
        if equation.primitive.name == "reduce_sum":
            x, axes = jnp.asarray(operands[0]), equation.params["axes"]
            if _is_summed_alone(x, axes):
                known[result] = short_sum(x, axes)
                continue
        params = equation.primitive.get_bind_params(_of_one_step(equation, axis))
        known[result] = equation.primitive.bind(*operands, **params)
    return [known[v] for v in jaxpr.outvars if not isinstance(v, Literal)]


def _is_summed_alone(x: jax.Array, axes: Sequence[int]) -> bool:
    """Returns whether a sum of one step takes less time in the loop than in the library that XLA gives it to."""
    return (
        x.dtype == np.float32
        and x.size <= _LITTLE
        and short_sums(x.shape, axes, _LONGEST_ROW, _LONGEST_COLUMN) is not None
    )


def _of_one_step(equation: JaxprEqn, axis: int) -> dict[str, Any]:
    """Returns an equation's parameters where its result has size 1 along an axis."""
    name = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}.get(equation.primitive.name)
    if name is None or axis == SUMMED:
        return dict(equation.params)
    sizes = list(equation.params[name])
    sizes[axis] = 1
    return dict(equation.params) | {name: tuple(sizes)}
