"""Reads a program that was mapped over examples as the program of one example."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprEqn, Literal, Params, PyTree, Var
from autopallas.graph.custom_rules import ELEMENTWISE, derivative_of, is_elementwise_call
from autopallas.graph.extract import closed
from autopallas.graph.flatten import flatten

__all__ = ["OneExample"]

_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})
_CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
_ALIKE = ELEMENTWISE | {"copy", "copy_p", "name", "bitcast_convert_type"}


class _Differs(Exception):
    """Reports an equation that does not compute each example by itself, or that cannot be read so."""


@dataclass(frozen=True, slots=True)
class _Step:
    """An equation of one example: what computes it from its operands."""

    equation: JaxprEqn
    compute: Callable[..., PyTree]


@dataclass(frozen=True, slots=True, eq=False)
class OneExample:
    """What a program computes for one example.

    Attributes:
      axis: the axis of the program's result along which the examples lie.
      size: how many there are.
      axes: per input, the axis along which they lie; None for one that all examples share.
      alone: per input that they share, an axis of size 1 that stands in the place of theirs, or None.
    """

    program: ClosedJaxpr
    axis: int
    size: int
    axes: tuple[int | None, ...]
    alone: tuple[int | None, ...]
    steps: tuple[_Step, ...]

    @staticmethod
    def of(program: ClosedJaxpr, axis: int, differentiable: bool = True) -> OneExample | None:
        """Returns what a program with one result computes for each index of an axis of that; None where one index is
        not computed by itself, or where no input has such an axis.

        A derivative may call its own function, such as that of ``logaddexp``: unless ``differentiable``, functions have
        no derivatives.
        """
        jaxpr, constants = jaxprs.open_jaxpr(program)
        (result,) = jaxpr.outvars
        if constants or not isinstance(result, Var) or result.aval.shape[axis] < 2:
            return None
        if any(_is_divided(v) for v in (*jaxpr.invars, *(v for equation in jaxpr.eqns for v in equation.outvars))):
            return None  # types say along which axes
        reading = _Reading(differentiable)
        reading.at(result, axis)
        try:
            steps = [reading.step(equation) for equation in reversed(jaxpr.eqns)]
        except _Differs:
            return None
        size = result.aval.shape[axis]
        axes, alone = [], []
        for variable in jaxpr.invars:
            own = reading.axes.get(variable)
            repeated = own is not None and variable.aval.shape[own] != size
            axes.append(None if repeated else own)
            alone.append(own if repeated else None)
        if all(own is None for own in axes):
            return None
        kept = tuple(step for step in reversed(steps) if step is not None)
        return OneExample(program, axis, size, tuple(axes), tuple(alone), kept)

    def __call__(self, *inputs: ArrayLike) -> jax.Array:
        """Computes the result of one example; what all share is given without the axis of size 1."""
        jaxpr, _ = jaxprs.open_jaxpr(self.program)
        values: dict[Var, ArrayLike] = dict(zip(jaxpr.invars, inputs, strict=True))
        for step in self.steps:
            given = [a.val if isinstance(a, Literal) else values[a] for a in step.equation.invars]
            found = step.compute(*given)
            outputs = step.equation.outvars
            values.update(zip(outputs, [found] if len(outputs) == 1 else found, strict=True))
        (result,) = jaxpr.outvars
        assert isinstance(result, Var)
        return cast(jax.Array, values[result])

    def mapped(self, axes: Sequence[int | None]) -> ClosedJaxpr:
        """Returns the program of all examples, whose inputs have the examples along ``axes``."""
        avals = self.program.in_avals
        shapes = [array_types.typed_like(aval) for aval in avals]
        for i, (own, axis) in enumerate(zip(self.axes, axes, strict=True)):
            if own is None and axis is not None:
                alone = self.alone[i]
                shape = avals[i].shape if alone is None else _rest(avals[i].shape, alone)
                shapes[i] = jax.ShapeDtypeStruct((*shape[:axis], self.size, *shape[axis:]), avals[i].dtype)
        repeated = [own if axis is None else None for own, axis in zip(self.alone, axes, strict=True)]
        over = jax.vmap(self, in_axes=tuple(axes), out_axes=self.axis)

        def function(*inputs: jax.Array) -> jax.Array:
            given = [
                x if d is None else lax.reshape(x, _rest(x.shape, d)) for x, d in zip(inputs, repeated, strict=True)
            ]
            result: jax.Array = over(*given)
            return result

        with array_types.on_mesh_of(avals), compat.at_width(jaxprs.is_wide(self.program)):
            return compat.make_jaxpr(function, *shapes)


class _Reading:
    """Follows the axis of the examples back from a result.  Its size is 1 in what examples share and read by it."""

    def __init__(self, differentiable: bool) -> None:
        self.axes: dict[Var, int | None] = {}
        self.differentiable = differentiable

    def at(self, atom: object, axis: int | None) -> None:
        """Records the axis of a value that is read.

        Raises:
          _Differs: it is another one elsewhere, or none.
        """
        if isinstance(atom, Var) and self.axes.setdefault(atom, axis) != axis:
            raise _Differs

    def step(self, equation: JaxprEqn) -> _Step | None:
        """Records the axes of an equation's operands by that of its result; returns the equation of one example, or
        None where nothing needs the result."""
        if not any(v in self.axes for v in equation.outvars):
            return None
        if len(equation.outvars) != 1 and equation.primitive.name != "split" or equation.effects:
            raise _Differs
        known = {self.axes[v] for v in equation.outvars if v in self.axes}
        if len(known) > 1:
            raise _Differs
        (axis,) = known
        if axis is None:
            if not jaxprs.is_leaf(equation) and jaxprs.bodies(equation):
                raise _Differs
            for atom in equation.invars:
                self.at(atom, None)
            return _Step(equation, _bound(equation, equation.params))
        return _Step(equation, self._of_one(equation, axis))

    def _of_one(self, equation: JaxprEqn, axis: int) -> Callable[..., jax.Array]:
        name, params = equation.primitive.name, equation.params
        result = equation.outvars[0]
        if name in _ALIKE or is_elementwise_call(equation):
            return self._elementwise(equation, axis)
        if name == "dot_general":
            return self._product(equation, axis)
        if name == "concatenate":
            if params["dimension"] == axis:
                raise _Differs
            for atom in equation.invars:
                self.at(atom, axis)
            return _bound(equation, params | {"dimension": _without(params["dimension"], axis)})
        if name == "iota":
            if params["dimension"] == axis:
                raise _Differs
            dimension = _without(params["dimension"], axis)
            return _bound(equation, params | {"shape": _rest(params["shape"], axis), "dimension": dimension})
        operand = equation.invars[0]
        if len(equation.invars) != 1 or not isinstance(operand, Var):
            raise _Differs
        before: tuple[int, ...] = operand.aval.shape
        if name in _REDUCTIONS:
            kept = [d for d in range(len(before)) if d not in params["axes"]]
            own = kept[axis]
            self.at(operand, own)
            return _bound(equation, params | {"axes": tuple(_without(d, own) for d in params["axes"])})
        if name in _CUMULATIVE or name == "split":
            if params["axis"] == axis:
                raise _Differs
            self.at(operand, axis)
            return _bound(equation, params | {"axis": _without(params["axis"], axis)})
        if name == "transpose":
            own = params["permutation"][axis]
            self.at(operand, own)
            permutation = tuple(_without(d, own) for d in _rest(params["permutation"], axis))
            return _bound(equation, params | {"permutation": permutation})
        if name == "broadcast_in_dim":
            return self._broadcast(equation, axis)
        if name in ("reshape", "squeeze", "expand_dims"):
            shape = _rest(result.aval.shape, axis)
            self.at(operand, _reshaped_from(before, result.aval.shape, axis))
            return lambda x: lax.reshape(x, shape)
        if name == "slice":
            starts, ends = params["start_indices"], params["limit_indices"]
            if starts[axis] != 0 or ends[axis] != before[axis] or (params["strides"] or (1,) * len(before))[axis] != 1:
                raise _Differs
            self.at(operand, axis)
            strides = None if params["strides"] is None else _rest(params["strides"], axis)
            cut = {"start_indices": _rest(starts, axis), "limit_indices": _rest(ends, axis), "strides": strides}
            return _bound(equation, params | cut)
        raise _Differs

    def _elementwise(self, equation: JaxprEqn, axis: int) -> Callable[..., jax.Array]:
        (result,) = equation.outvars
        rank, size = len(result.aval.shape), result.aval.shape[axis]
        for atom in equation.invars:
            shape = atom.aval.shape
            if shape and (len(shape) != rank or shape[axis] not in (1, size)):
                raise _Differs
            self.at(atom, axis if shape else None)
        if is_elementwise_call(equation):
            return _called(equation, axis, self.differentiable)
        return _bound(equation, equation.params)

    def _product(self, equation: JaxprEqn, axis: int) -> Callable[..., jax.Array]:
        (contracting, batch), params = equation.params["dimension_numbers"], equation.params
        left, right = equation.invars
        sides = []
        for own, contracted, batched in zip((left, right), contracting, batch, strict=True):
            free = [d for d in range(len(own.aval.shape)) if d not in contracted and d not in batched]
            sides.append((tuple(contracted), tuple(batched), free))
        count, first = len(sides[0][1]), len(sides[0][2])
        places: list[int | None] = [None, None]
        if axis < count:
            places = [sides[0][1][axis], sides[1][1][axis]]
        elif axis < count + first:
            places[0] = sides[0][2][axis - count]
        else:
            places[1] = sides[1][2][axis - count - first]
        numbers = []
        for atom, place, (contracted, batched, _) in zip((left, right), places, sides, strict=True):
            self.at(atom, place)
            if place is not None:
                batched = tuple(_without(d, place) for d in batched if d != place)
                contracted = tuple(_without(d, place) for d in contracted)
            numbers.append((contracted, batched))
        (left_contracting, left_batch), (right_contracting, right_batch) = numbers
        dimensions = ((left_contracting, right_contracting), (left_batch, right_batch))
        return _bound(equation, params | {"dimension_numbers": dimensions})

    def _broadcast(self, equation: JaxprEqn, axis: int) -> Callable[..., jax.Array]:
        params, operand = equation.params, equation.invars[0]
        before, targets = operand.aval.shape, list(params["broadcast_dimensions"])
        shape = _rest(params["shape"], axis)
        own = targets.index(axis) if axis in targets else None
        self.at(operand, own)
        moved = tuple(_without(int(d), axis) for d in targets if d != axis)
        same = own is None and shape == tuple(before) and moved == tuple(range(len(shape)))
        if same:
            return lambda x: cast(jax.Array, x)
        return _bound(equation, params | {"shape": shape, "broadcast_dimensions": moved})


def _reshaped_from(before: Sequence[int], after: Sequence[int], axis: int) -> int | None:
    """Returns the axis before a reshape that an axis afterwards is; None for one of size 1 that is new."""
    outer = math.prod(after[:axis])
    for own, size in enumerate(before):
        if size == after[axis] and math.prod(before[:own]) == outer:
            return own
    if after[axis] != 1:
        raise _Differs
    return None


def _bound(equation: JaxprEqn, params: Params) -> Callable[..., jax.Array]:
    """Returns what computes an equation with other parameters."""

    def compute(*operands: jax.Array) -> jax.Array:
        with equation.ctx.manager:
            found = equation.primitive.bind(*operands, **params)
        alone = equation.primitive.multiple_results and len(equation.outvars) == 1
        return cast(jax.Array, found[0] if alone else found)

    return compute


def _called(equation: JaxprEqn, axis: int, differentiable: bool) -> Callable[..., jax.Array]:
    """Returns what computes an elementwise function with a derivative of its own for one example; without it unless
    ``differentiable``.

    Raises:
      _Differs: the function or its derivative cannot be read so.
    """
    value = OneExample.of(_inlined(equation.params["call_jaxpr"]), axis, differentiable=False)
    if value is not None and not differentiable:
        return value
    tangent = OneExample.of(_inlined(derivative_of(equation)), axis, differentiable=False)
    if value is None or tangent is None:
        raise _Differs
    one, moved = value, tangent
    floating = [i for i, atom in enumerate(equation.invars) if jnp.issubdtype(atom.aval.dtype, jnp.floating)]

    @jax.custom_jvp
    def function(*operands: jax.Array) -> jax.Array:
        return one(*operands)

    @function.defjvp
    def rule(operands: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return function(*operands), moved(*operands, *(tangents[i] for i in floating))

    return cast("Callable[..., jax.Array]", function)


def _inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program without calls of functions in it.

    Raises:
      _Differs: it has constants or loops.
    """
    body = flatten(program)
    if body.children or body.constvars:
        raise _Differs
    return closed(body.invars, body.outvars, body.equations)


def _is_divided(variable: Var) -> bool:
    """Returns whether an array's type says that it is divided among devices."""
    sharding = array_types.explicit_sharding(variable.aval)
    return sharding is not None and any(names is not None for names in sharding.spec)


def _without(dimension: int, axis: int) -> int:
    """Returns a dimension's number where an axis before it may be gone."""
    return dimension - (dimension > axis)


def _rest(sizes: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*sizes[:axis], *sizes[axis + 1 :])
