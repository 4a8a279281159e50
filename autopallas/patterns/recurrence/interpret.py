"""Abstract interpretation of a step: which of its variables are affine in the carried values, and how.

Every rule is an identity of rings, so what comes out equals the variable in exact arithmetic.  Anything else that reads
a carried value is opaque, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from autopallas import jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph.custom_rules import is_elementwise_call
from autopallas.kernels.recurrence.structure import MOST_SUBSTEPS
from autopallas.numerics.casts import rounds, widens
from autopallas.patterns.recurrence.step import Step
from autopallas.patterns.recurrence.sums import (
    MOST_FACTORS,
    MOST_TERMS,
    Axes,
    Carried,
    Labels,
    Part,
    Sum,
    Value,
    identity_of,
    sum_of,
)

__all__ = ["RULES", "Interpretation", "Opaque"]


@dataclass(frozen=True, slots=True)
class Opaque:
    """A variable that depends on a carried value in another way; the reason names the equation that began it."""

    reason: str


_Rule: TypeAlias = Callable[[JaxprEqn, Sequence[Sum], Labels], Sum | None]

_UNCHANGED = frozenset({"copy", "copy_p", "name", "optimization_barrier"})
_LAYOUT = _UNCHANGED | {
    "broadcast_in_dim",
    "transpose",
    "reshape",
    "squeeze",
    "expand_dims",
    "convert_element_type",
    "neg",
}
"""Equations whose result is the factor that they read, looked at in another way."""


class Interpretation:
    """What the variables of a step are, given which carried values are taken for states.

    Args:
      step: the step.
      states: the places of the states.
      solved: those of the carried values that are known.
      parts: variables up to which a step makes an update of a state, with its place; the next update begins with them.

    Attributes:
      values: the variables.
      updates: what each state is after each update of the step, in terms of what it is before that.
    """

    def __init__(
        self, step: Step, states: Sequence[int], solved: Sequence[int], parts: Mapping[Var, int] | None = None
    ):
        self.labels = Labels()
        self.identities = step.identities
        self._numbers = step.numbers
        self._same: dict[int, Var] = {}
        """One variable of each number."""
        self.values: dict[Var, Sum | Opaque] = {}
        self.updates: dict[int, list[Sum | Opaque]] = {place: [] for place in states}
        parts = parts or {}
        for variable in (*step.constants, *step.slices, *(step.carries[i] for i in solved)):
            self.values[variable] = self._own(variable, step.varies.get(variable))
        for variable in step.zeros:
            self.values[variable] = Sum(self.labels.of_shape(variable.aval.shape), (Part(0.0),))
        for place, variable in enumerate(step.carries):
            if place in states:
                self.values[variable] = self._state(place, variable)
            elif place not in solved:
                self.values[variable] = Opaque("a carried value that is computed from another one")
        after: dict[Var, list[int]] = {}
        for place in states:
            atom = step.after[place]
            if isinstance(atom, Var):
                after.setdefault(atom, []).append(place)
            else:
                self.updates[place].append(self._read(atom))
        for variable in self.values.keys() & after.keys():
            for place in after[variable]:
                self.updates[place].append(self.values[variable])
        for equation in step.equations:
            self._equation(equation)
            for variable in equation.outvars:
                value = self.values[variable]
                for place in (*after.get(variable, ()), *([parts[variable]] if variable in parts else [])):
                    self.updates[place].append(value)
                    if isinstance(value, Sum) and not value.is_free:
                        self.values[variable] = self._state(place, variable)

    def _state(self, place: int, variable: Var) -> Sum:
        """Returns a variable as a state after the updates that are known of it."""
        axes = self.labels.of_shape(variable.aval.shape)
        return Sum(axes, (Part(carried=Carried(place, len(self.updates[place]), axes)),))

    def _own(self, variable: Var, varies: tuple[bool, ...] | None = None) -> Sum:
        """Returns a variable without carried values as its own factor."""
        number = self._numbers.get(variable)
        if number is not None:
            variable = self._same.setdefault(number, variable)
        diagonal = self.identities.get(variable)
        if diagonal is None:
            return sum_of(self.labels, variable, varies)
        return identity_of(self.labels, variable, diagonal)

    def _read(self, atom: JaxprAtom) -> Sum | Opaque:
        if isinstance(atom, Literal):
            number = np.asarray(atom.val)
            return Sum((None,) * number.ndim, (Part(number.item()),)) if number.size == 1 else Opaque("an array")
        value = self.values[atom]
        return value if isinstance(value, Opaque) else self.labels.fresh(value)

    def _equation(self, equation: JaxprEqn) -> None:
        read = [self._read(atom) for atom in equation.invars]
        opaque = next((value for value in read if isinstance(value, Opaque)), None)
        if opaque is not None:
            self.values.update(dict.fromkeys(equation.outvars, opaque))
            return
        sums = [value for value in read if isinstance(value, Sum)]
        free = all(value.is_free for value in sums)
        rule = RULES.get(equation.primitive.name) if len(equation.outvars) == 1 else None
        found = None if rule is None else _bounded(rule(equation, sums, self.labels))
        if found is None and rule is not None and not free and any(v.is_free and v.has_identity for v in sums):
            pairs = zip(equation.invars, sums, strict=True)
            whole = [sum_of(self.labels, a) if v.is_free and isinstance(a, Var) else v for a, v in pairs]
            found = _bounded(rule(equation, whole, self.labels))
        if free:
            for variable in equation.outvars:
                self.values[variable] = self._free(equation, variable, sums, found)
        elif found is None:
            where = jaxprs.location(equation)
            reason = f"{jaxprs.operation_name(equation)} of the carried value at {where}"
            self.values.update(dict.fromkeys(equation.outvars, Opaque(reason)))
        else:
            self.values[equation.outvars[0]] = found

    def _free(self, equation: JaxprEqn, variable: Var, read: Sequence[Sum], found: Sum | None) -> Sum:
        """Returns a value without carried ones: sums of products of smaller factors as such, a layout of a factor as
        that factor, sums and products of identity matrices as such, and anything else as itself."""
        if found is not None and (found.has_identity or found.is_outer):
            return found
        if found is not None and len(found.parts) == 1 and not found.parts[0].summed:
            (part,) = found.parts
            if not part.factors or (len(part.factors) == 1 and equation.primitive.name in _LAYOUT):
                return found
        varies = found.varies() if found is not None else _varies(equation, variable, read)
        return self._own(variable, varies)


def _bounded(found: Sum | None) -> Sum | None:
    """Returns a sum of not too many terms and factors."""
    if found is None or len(found.parts) > MOST_TERMS or max(map(_size, found.parts), default=0) > MOST_FACTORS:
        return None
    return found


def _size(part: Part) -> int:
    return len(part.factors)


_ELEMENTWISE = frozenset(
    {
        "add", "sub", "mul", "div", "max", "min", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "neg",
        "sign", "abs", "sqrt", "rsqrt", "cbrt", "sin", "cos", "pow", "integer_pow", "erf", "square", "select_n", "eq",
        "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "convert_element_type", "is_finite", "clamp",
        "add_any", "real", "imag", "conj", "complex", "custom_jvp_call", "floor", "ceil", "round", "rem",
    }
)  # fmt: skip


def _varies(equation: JaxprEqn, variable: Var, read: Sequence[Sum]) -> tuple[bool, ...] | None:
    """Returns along which dimensions the result of an equation varies; None where that is not known."""
    name, shape = equation.primitive.name, tuple(variable.aval.shape)
    if name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
        gone = equation.params["axes"]
        return tuple(v for d, v in enumerate(read[0].varies()) if d not in gone)
    if name == "custom_jvp_call":
        if not is_elementwise_call(equation) or any(tuple(a.aval.shape) not in ((), shape) for a in equation.invars):
            return None
    elif name not in _ELEMENTWISE:
        return None
    found = [False] * len(shape)
    for value in read:
        for dimension, varies in enumerate(value.varies() if value.axes else ()):
            found[dimension] |= varies
    return tuple(found)


# ---------------------------------------------------------------------- rules


def _same(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    return read[0] if len(read) == 1 else None


def _converted(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    """A cast that keeps every value; or one that rounds a sum with a carried value, which is marked."""
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if not jnp.issubdtype(after, jnp.inexact):
        return None
    if read[0].is_free:
        return read[0] if before == after or before == np.bool_ or widens(before, after) else None
    if before == after or widens(before, after):
        return read[0]
    return _rounded(read[0]) if rounds(before, after) else None


def _rounded(value: Sum) -> Sum:
    """Returns a sum whose carried values are marked as rounded."""
    parts = (
        part if part.carried is None else replace(part, carried=replace(part.carried, rounded=True))
        for part in value.parts
    )
    return Sum(value.axes, tuple(parts))


def _negated(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    return read[0].scaled(-1)


def _added(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    if all(value.is_free and not value.has_identity and not value.is_outer for value in read):
        return None
    first, second = read
    if equation.primitive.name == "sub":
        second = second.scaled(-1)
    a, b, axes = Sum.aligned(first, second)
    parts = tuple(part for part in (*a.parts, *b.parts) if part.coefficient)
    return Sum(axes, parts or (Part(0.0),))


def _multiplied(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    if not any(value.is_free for value in read):
        return None
    a, b, axes = Sum.aligned(*read)
    return Sum(axes, tuple(p.times(q) for p in a.parts for q in b.parts))


def _divided(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    a, b, axes = Sum.aligned(*read)
    if a.is_free or not b.is_free or len(b.parts) != 1:
        return None
    (by,) = b.parts
    if by.summed or not by.coefficient or any(factor.case is not None for factor in by.factors):
        return None
    factors = tuple(replace(f, inverse=not f.inverse, diagonal=None) for f in by.factors)
    inverse = Part(1 / by.coefficient, factors)
    return Sum(axes, tuple(part.times(inverse) for part in a.parts))


def _broadcast(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    if len(read) != 1:
        return None
    shape = equation.params["shape"]
    axes: list[int | None] = [None] * len(shape)
    for dimension, label in zip(equation.params["broadcast_dimensions"], read[0].axes, strict=True):
        axes[dimension] = label
    for dimension, size in enumerate(shape):
        if axes[dimension] is None and size > 1:
            axes[dimension] = labels.new(size)
    return Sum(tuple(axes), read[0].parts)


def _transposed(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    return Sum(tuple(read[0].axes[i] for i in equation.params["permutation"]), read[0].parts)


def _reshaped(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    """Dimensions of size 1 come and go; others are not split or merged."""
    if len(read) != 1:
        return None
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    kept = iter([label for label, size in zip(read[0].axes, before, strict=True) if size != 1])
    return Sum(tuple(next(kept) if size != 1 else None for size in after), read[0].parts)


def _summed(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    gone = tuple(equation.params["axes"])
    sizes = [equation.invars[0].aval.shape[d] for d in gone]
    if read[0].is_free and (not read[0].is_outer or math.prod(sizes) > MOST_SUBSTEPS):
        return None
    axes = tuple(label for d, label in enumerate(read[0].axes) if d not in gone)
    over = [read[0].axes[d] for d in gone]
    return Sum(axes, tuple(_over(part, over, sizes, labels) for part in read[0].parts))


def _over(part: Part, labels: Sequence[int | None], sizes: Sequence[int], every: Labels) -> Part:
    """Returns a term summed over some labels; along those that it lacks it is the same as often as they are long."""
    own = part.labels()
    times = 1
    for label, size in zip(labels, sizes, strict=True):
        times *= 1 if label in own else size
    summed = frozenset(label for label in labels if label is not None and label in own)
    part = replace(part, coefficient=part.coefficient * times, summed=part.summed | summed)
    return part.without_identities(every.sizes)


def _contracted(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    """A product with a carried value, which is marked where the result is of a type that rounds it; or an outer one."""
    a, b = read
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    shapes = [atom.aval.shape for atom in equation.invars]
    if not (a.is_free or b.is_free):
        return None
    free = a.is_free and b.is_free
    identities = a.has_identity or b.has_identity
    if free and not identities and not _is_of_few(shapes, (left, right), (left_batch, right_batch)):
        return None
    names: dict[int, int] = {}
    merged = list(a.axes)
    for i, j in [*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)]:
        one, other = merged[i], b.axes[j]
        if one is not None and other is not None:
            names[other] = one
        elif one is None:
            merged[i] = other
    b = b.renamed(names)
    over, sizes = [merged[i] for i in left], [shapes[0][i] for i in left]
    axes = [merged[i] for i in left_batch]
    axes += [label for d, label in enumerate(merged) if d not in (*left, *left_batch)]
    axes += [label for d, label in enumerate(b.axes) if d not in (*right, *right_batch)]
    found = Sum(tuple(axes), tuple(_over(p.times(q), over, sizes, labels) for p in a.parts for q in b.parts))
    if free:
        return None if identities and any(part.summed for part in found.parts) else found
    before, after = equation.invars[0 if b.is_free else 1].aval.dtype, equation.outvars[0].aval.dtype
    if before == after or widens(before, after):
        return found
    return _rounded(found) if rounds(before, after) else None


def _is_of_few(shapes: Sequence[Sequence[int]], over: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]) -> bool:
    """Returns whether a product of matrices is a sum of few outer products, larger than its factors."""
    count = math.prod(shapes[0][i] for i in over[0])
    sizes = [
        math.prod(n for i, n in enumerate(shape) if i not in (*gone, *both))
        for shape, gone, both in zip(shapes, over, batch, strict=True)
    ]
    return count == 1 or (count <= MOST_SUBSTEPS and count < min(sizes))


def _selected(equation: JaxprEqn, read: Sequence[Sum], labels: Labels) -> Sum | None:
    which, *cases = read
    if not which.is_free:
        return None
    if all(case.is_free and not case.is_outer for case in cases) and not _is_diagonal(which, cases):
        return None
    predicate = equation.invars[0]
    if not isinstance(predicate, Var):
        return None
    (part,) = which.parts if len(which.parts) == 1 else (Part(0.0),)
    plain = part.coefficient == 1 and len(part.factors) == 1 and not part.summed
    if not plain or part.factors[0].inverse or part.factors[0].case is not None:
        which = sum_of(labels, predicate)
    shape = equation.outvars[0].aval.shape
    whole: Axes = labels.of_shape(shape)
    parts: tuple[Part, ...] = ()
    for number, case in enumerate(cases):
        own = Sum(whole, ())
        _, mask, _ = Sum.aligned(own, which if which.axes or not shape else Sum((None,) * len(shape), which.parts))
        _, chosen, _ = Sum.aligned(own, case)
        only = mask.parts[0].factors[0]
        factor: Value = replace(only, case=number, diagonal=only.diagonal if number == 1 else None)
        parts += tuple(p.times(Part(factors=(factor,))) for p in chosen.parts if p.coefficient)
    return Sum(whole, parts or (Part(0.0),))


def _is_diagonal(which: Sum, cases: Sequence[Sum]) -> bool:
    """Returns whether a selection by an identity matrix gives zero beside the diagonal."""
    beside = cases[0].parts
    return which.has_identity and len(cases) == 2 and not any(part.coefficient for part in beside)


RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_UNCHANGED, _same),
    "convert_element_type": _converted,
    "neg": _negated,
    "add": _added,
    "sub": _added,
    "add_any": _added,
    "mul": _multiplied,
    "div": _divided,
    "broadcast_in_dim": _broadcast,
    "transpose": _transposed,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "expand_dims": _reshaped,
    "reduce_sum": _summed,
    "dot_general": _contracted,
    "select_n": _selected,
}
"""By name of an equation, what its result is if it is affine."""
