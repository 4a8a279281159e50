"""Computes sums of exponentials of sums of arrays that lack axes as products of matrices of exponentials.

The largest number along the summed axes is taken out of each array before.  A product may still be 0, or too small to
trust, where the largest numbers of two arrays meet at no element: ``a = [0, -200]`` and ``b = [-200, 0]``.  So each
product is tested, and where one is below a bound the sum is computed as it is written; and a loop of which the arrays
that all steps share do not show beforehand that this will not happen is run as it is written.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from autopallas import compat
from autopallas.compat import Literal
from autopallas.graph.extract import jaxpr_of, nodes_between
from autopallas.kernels.respelling.exponential_plan import Axes, ExponentialSum, Group, Plan, Term
from autopallas.kernels.respelling.indexed_loops import evaluated

__all__ = ["Shared", "can_be_sure", "is_sure", "run", "shared"]

_BOUND: Mapping[str, float] = {"float32": 2.0**-32, "float64": 2.0**-200}
"""Below this a product is not trusted: its logarithm, -22 in float32, and the exponents that its largest terms are the
exponentials of are rounded by more than a sum of exponents often is.  Numbers that flush to zero are no part of it."""


@dataclass(frozen=True, slots=True)
class _Array:
    """An array without axes of one element, and the exponent's axes that it has, in order."""

    value: jax.Array
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Exponentials:
    """The largest numbers of a sum of terms along the summed axes, and exponentials of what is left without them."""

    largest: _Array
    rest: _Array


@dataclass(frozen=True, slots=True)
class Shared:
    """What all steps share.

    Attributes:
      values: terms of exponents and their factors, by number.
      exponentials: those of groups of terms, by the positions of the sum and of the group.
    """

    values: dict[int, jax.Array]
    exponentials: dict[tuple[int, int], _Exponentials]


def shared(plan: Plan, constants: Sequence[jax.Array]) -> Shared:
    """Returns what all steps share, of the step's inputs that are the same in all."""
    known = _known_to_all(plan, constants)
    given = set(plan.inputs)
    return Shared(
        {number: value for number, value in known.items() if number not in given},
        {
            (place, position): _exponentials(plan, known, one, group)
            for place, one in enumerate(plan.sums)
            for position, group in enumerate(one.groups)
            if group.constant
        },
    )


def _known_to_all(plan: Plan, constants: Sequence[jax.Array]) -> dict[int, jax.Array]:
    """Returns those constants, and the terms of exponents and their factors that are computed of them, by number."""
    given = dict(zip(plan.inputs, constants, strict=False))
    every = dict.fromkeys(n for one in plan.sums for term in one.terms for n in term.numbers)
    terms = [n for n in every if n in plan.constants and n not in plan.graph.literals]
    return given | dict(zip(terms, _computed(plan, given, terms), strict=True))


def can_be_sure(plan: Plan) -> bool:
    """Returns whether what all steps share may show that products are to be trusted: at most one of the arrays that
    vary from step to step has an axis that is summed over, so that their largest numbers meet."""
    for one in plan.sums:
        varying = [axis for group in one.groups if not group.constant for axis in one.reduced.intersection(group.axes)]
        if len(varying) > len(set(varying)):
            return False
    return True


def is_sure(plan: Plan, constants: Sequence[jax.Array]) -> jax.Array:
    """Returns whether products of all steps are to be trusted, whatever finite numbers these are given.

    A sum has a term in which what varies is largest, and which is no smaller than the range of what all steps share
    allows.  Where that is wide, as of costs divided by a small temperature or transitions that are not allowed, steps
    would take the exponentials that the program has, and products and their tests beside them.

    Args:
      plan: of the step.
      constants: the step's inputs that are the same in all.
    """
    known = _known_to_all(plan, constants)
    sure = jnp.asarray(True)
    for one in plan.sums:
        arrays = [_total(plan, known, group.terms).value for group in one.groups if group.constant]
        if arrays:
            ranges = [jnp.max(x) - jnp.min(x) for x in arrays]
            sure &= functools.reduce(operator.add, ranges) < -math.log(2 * _BOUND[str(arrays[0].dtype)])
    return sure


def run(plan: Plan, of_all: Shared, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns a step's results.

    Args:
      plan: of the step.
      of_all: what all steps share.
      operands: the step's inputs.
    """
    known = dict(zip(plan.inputs, operands, strict=True)) | of_all.values
    step = _Step(plan, of_all, known)
    for node in plan.schedule:
        step.compute(node.outputs)
    return [
        jnp.asarray(n.val, n.aval.dtype) if isinstance(n, Literal) else _at(plan, step.known, n) for n in plan.results
    ]


def _at(plan: Plan, known: Mapping[int, jax.Array], number: int) -> jax.Array:
    """Returns a value that is known, or a literal."""
    if number in known:
        return known[number]
    return jnp.asarray(plan.graph.literals[number], plan.graph.dtype(number))


def _computed(plan: Plan, known: Mapping[int, jax.Array], numbers: Sequence[int]) -> Sequence[jax.Array]:
    """Returns values as the step computes them of others that are known."""
    nodes, _ = nodes_between(plan.graph, list(known), numbers)
    program = jaxpr_of(plan.graph, nodes, list(known), numbers)
    found: Sequence[jax.Array] = compat.jaxpr_as_fun(program)(*known.values())
    return found


# ---------------------------------------------------------------------- arrays that lack axes


def _array(value: jax.Array, axes: Axes) -> _Array:
    """Returns an array without axes of one element, the others in order."""
    value = lax.squeeze(value, [i for i, axis in enumerate(axes) if axis < 0])
    held = [axis for axis in axes if axis >= 0]
    order = sorted(range(len(held)), key=held.__getitem__)
    return _Array(lax.transpose(value, order), tuple(sorted(held)))


def _spread(x: _Array, axes: Sequence[int], shape: Sequence[int]) -> jax.Array:
    """Returns an array as one of other axes; -1 stands for one in which it is the same for all."""
    held = [axis for axis in axes if axis in x.axes]
    ordered = lax.transpose(x.value, [x.axes.index(axis) for axis in held])
    return lax.broadcast_in_dim(ordered, shape, [i for i, axis in enumerate(axes) if axis in x.axes])


def _combined(function: Callable[[jax.Array, jax.Array], jax.Array], arrays: Sequence[_Array]) -> _Array:
    """Returns arrays added or multiplied."""
    axes = sorted({axis for x in arrays for axis in x.axes})
    values = [lax.expand_dims(x.value, [i for i, axis in enumerate(axes) if axis not in x.axes]) for x in arrays]
    return _Array(functools.reduce(function, values), tuple(axes))


def _summed(arrays: Sequence[_Array], reduced: frozenset[int], sizes: Sequence[int]) -> _Array:
    """Returns the sum over some axes of a product of arrays, as a product of matrices where two have these axes."""
    inside: dict[tuple[int, ...], _Array] = {}
    for x in arrays:
        if reduced & set(x.axes):
            inside[x.axes] = _combined(operator.mul, [inside[x.axes], x]) if x.axes in inside else x
    outside = [x for x in arrays if not reduced & set(x.axes)]
    held = {axis for axes in inside for axis in axes}
    kept = tuple(sorted(held - reduced))
    if inside:
        operands = [part for x in inside.values() for part in (x.value, list(x.axes))]
        found = jnp.einsum(*operands, list(kept), precision=lax.Precision.HIGHEST, optimize="optimal")
        outside.append(_Array(found, kept))
    result = _combined(operator.mul, outside)
    repeated = math.prod(sizes[axis] for axis in reduced - held)
    return _Array(result.value * repeated, result.axes) if repeated != 1 else result


# ---------------------------------------------------------------------- exponentials


def _term(plan: Plan, known: Mapping[int, jax.Array], term: Term) -> _Array:
    value = _at(plan, known, term.number)
    for name, number in term.factors:
        if name == "neg":
            value = -value
        else:
            factor = _at(plan, known, number)
            value = value * factor if name == "mul" else value / factor
    return _array(value, term.axes)


def _total(plan: Plan, known: Mapping[int, jax.Array], terms: Iterable[Term]) -> _Array:
    return _combined(operator.add, [_term(plan, known, term) for term in terms])


def _exponentials(plan: Plan, known: Mapping[int, jax.Array], one: ExponentialSum, group: Group) -> _Exponentials:
    total = _total(plan, known, group.terms)
    reduced = [i for i, axis in enumerate(total.axes) if axis in one.reduced]
    largest = jnp.max(total.value, reduced, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    rest = _Array(jnp.exp(total.value - largest), total.axes)
    return _Exponentials(_Array(lax.squeeze(largest, reduced), _without(total.axes, one.reduced)), rest)


def _guarded(x: _Array) -> _Array:
    """Returns an array with 0 for each number that is not finite."""
    return _Array(jnp.where(jnp.isfinite(x.value), x.value, 0), x.axes)


def _without(axes: Sequence[int], left_out: frozenset[int]) -> tuple[int, ...]:
    return tuple(axis for axis in axes if axis not in left_out)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum of exponentials of a step.

    Attributes:
      result: the logarithm of the sum of exp(x), with all axes of x that are kept.
      factors: arrays whose product is exp(x - result), where the sum is trusted.
      is_trusted: whether it is.
    """

    result: _Array
    factors: tuple[_Array, ...]
    is_trusted: jax.Array


class _Step:
    """Computes one step.

    Attributes:
      known: what is known, by number.
    """

    def __init__(self, plan: Plan, of_all: Shared, known: dict[int, jax.Array]):
        self.plan, self.graph, self.of_all, self.known = plan, plan.graph, of_all, known
        self._sums: dict[int, _Sum] = {}

    def compute(self, numbers: Sequence[int]) -> None:
        """Computes the values of one equation."""
        plan, number = self.plan, numbers[0]
        if self.known.keys() >= set(numbers):
            return
        if number in plan.maxima:
            place, axes = plan.maxima[number]
            result = self._sum(place).result
            found = _guarded(result) if number in plan.sums[place].guarded else result
            self.known[number] = _spread(found, axes, self.graph.shape(number))
        elif number in plan.products or number in plan.reductions:
            self._reduce(plan.reductions[number].product if number in plan.reductions else number)
        else:
            node = self.graph.definitions[number]
            given = [_at(plan, self.known, n) for n in node.inputs]
            self.known.update(zip(node.outputs, evaluated(node.equation, given), strict=True))

    # ------------------------------------------------------------------ sums

    def _sum(self, place: int) -> _Sum:
        if place not in self._sums:
            self._sums[place] = self._new_sum(place)
        return self._sums[place]

    def _new_sum(self, place: int) -> _Sum:
        plan, one = self.plan, self.plan.sums[place]
        own = [
            self.of_all.exponentials[place, position] if group.constant else _exponentials(plan, self.known, one, group)
            for position, group in enumerate(one.groups)
        ]
        rests = [x.rest for x in own]
        total = _summed(rests, one.reduced, one.shape)
        sizes = [one.shape[axis] for axis in one.kept]
        outside = [_total(plan, self.known, one.outside)] if one.outside else []
        parts = [_Array(jnp.log(total.value), total.axes), *(x.largest for x in own), *outside]
        product = _spread(_combined(operator.add, parts), one.kept, sizes)
        bound = _BOUND[str(product.dtype)]
        is_large = _Array((total.value > bound) & (total.value < jnp.inf), total.axes)
        is_trusted = lax.cond(
            jnp.all(is_large.value) & jnp.all(jnp.isfinite(product)),
            lambda: True,
            lambda: self._is_known(one, total, is_large, product, outside),
        )

        def as_written() -> jax.Array:
            subtracted, exponentials = self._as_written(one, [one.maxima[-1][0], one.exponential])
            reduced = sorted(one.reduced)
            for axis in reversed(reduced):
                subtracted = lax.index_in_dim(subtracted, 0, axis, keepdims=False)
            found = jnp.log(jnp.sum(exponentials, reduced)) + subtracted
            return found.reshape(sizes)

        result = lax.cond(is_trusted, lambda: product, as_written)
        factors = [*rests, _Array(jnp.where(total.value > 0, 1 / total.value, 0), total.axes)]
        factors += [_Array(jnp.isfinite(x.value).astype(x.value.dtype), x.axes) for x in outside]
        return _Sum(_Array(result, one.kept), tuple(factors), is_trusted)

    def _is_known(
        self, one: ExponentialSum, total: _Array, is_large: _Array, product: jax.Array, outside: Sequence[_Array]
    ) -> jax.Array:
        """Returns whether each sum is large or 0, the latter since each of its exponents is -inf."""
        if not one.is_guarded:
            return jnp.asarray(False)
        finite = []
        for group in one.groups:
            exponent = _total(self.plan, self.known, group.terms)
            finite.append(_Array((exponent.value > -jnp.inf).astype(exponent.value.dtype), exponent.axes))
        count = _summed(finite, one.reduced, one.shape)
        is_zero = _Array((total.value == 0) & (count.value == 0), total.axes)
        large, zero = (_spread(x, one.kept, product.shape) for x in (is_large, is_zero))
        known = large & jnp.isfinite(product)
        if not outside:
            return jnp.all(known | zero)
        rest = _spread(outside[0], one.kept, product.shape)
        return jnp.all(known | zero & (rest < jnp.inf) | large & (rest == -jnp.inf))

    def _as_written(self, one: ExponentialSum, numbers: Sequence[int]) -> Sequence[jax.Array]:
        """Returns values as the step computes them of a sum's terms."""
        given = (*self.plan.inputs, *(n for term in one.terms for n in term.numbers))
        own = {n: self.known[n] for n in given if n in self.known}
        return _computed(self.plan, own, numbers)

    # ------------------------------------------------------------------ products with exponentials

    def _reduce(self, number: int) -> None:
        """Computes a product, or what sums of it the step needs."""
        plan, graph = self.plan, self.graph
        product = plan.products[number]
        one, own = plan.sums[product.place], self._sum(product.place)
        needed = plan.sums_of_products.get(number, [])
        ones = [n for n in needed if not product.factors and plan.reductions[n].reduced == one.summed]
        for n in ones:
            whole = _Array(jnp.where(jnp.isfinite(own.result.value), 1, jnp.exp(own.result.value)), own.result.axes)
            value = _spread(whole, plan.reductions[n].axes, graph.shape(n))
            self.known[n] = -value if product.negative else value
        needed = [n for n in needed if n not in ones]
        if number in plan.needed:
            needed.append(number)
        if not needed:
            return
        factors = [self._factor(factor.number, factor.axes, factor.divides) for factor in product.factors]

        def result(x: _Array, n: int) -> jax.Array:
            axes = plan.reductions[n].axes if n in plan.reductions else product.axes
            value = _spread(x, axes, graph.shape(n))
            return -value if product.negative else value

        def reduced(n: int) -> frozenset[int]:
            return plan.reductions[n].reduced if n in plan.reductions else frozenset()

        def as_products() -> list[jax.Array]:
            return [result(_summed([*own.factors, *factors], reduced(n), one.shape), n) for n in needed]

        def as_written() -> list[jax.Array]:
            (exponentials,) = self._as_written(one, [one.exponential])
            # The logarithm of a sum may be large and rounded: a quotient is more exact than a difference from it.
            total = jnp.sum(exponentials, sorted(one.reduced), keepdims=True)
            logarithm = _spread(own.result, range(len(one.shape)), total.shape)
            exponentials = exponentials / jnp.where(jnp.isfinite(logarithm), total, 1)
            whole = _combined(operator.mul, [_array(exponentials, one.own_axes), *factors])
            found = []
            for n in needed:
                places = [i for i, axis in enumerate(whole.axes) if axis in reduced(n)]
                kept = _without(whole.axes, reduced(n))
                found.append(result(_Array(jnp.sum(whole.value, places), kept), n))
            return found

        is_trusted = own.is_trusted & self._are_small(factors)
        self.known.update(zip(needed, lax.cond(is_trusted, as_products, as_written), strict=True))

    def _are_small(self, factors: Sequence[_Array]) -> jax.Array:
        """Returns whether no product of arrays and the inverse of a sum overflows, where an exponential is 0."""
        if not factors:
            return jnp.asarray(True)
        largest = functools.reduce(operator.mul, [jnp.max(jnp.abs(x.value)) for x in factors])
        return largest < 1 / _BOUND[str(largest.dtype)] / 4

    def _factor(self, number: int, axes: Axes, divides: bool) -> _Array:
        found = _array(_at(self.plan, self.known, number), axes)
        return _Array(1 / found.value, found.axes) if divides else found
