"""Reads values as polynomials of a tile of rows and of the moments of its rows.

A value is read as ``P * q**e * scale + shift``. ``P`` is a polynomial of x, of the row's mean of x, of its mean of
``x * x``, and of a root of one of those. ``q`` is such a polynomial without x; scale and shift do not vary with the
rows. A sum over the columns takes each power of x to a moment. So ``E[(x - m)**2]`` and ``E[x**2] - m**2`` are one
polynomial, and so are a scale before and after the product with the reciprocal root.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import NamedTuple

import numpy as np

from autopallas.graph import Ref, Space
from autopallas.graph.labels import Atom
from autopallas.numerics.casts import rounds
from autopallas.patterns.expressions import Scope
from autopallas.patterns.match import Mismatch

__all__ = ["Conclusion", "Form", "FormReader", "OfRowsError", "UnlikeError", "before_layout"]

_DEEPEST = 48
"""Most operations on one path that are read."""
_MOST_TERMS = 24
_CLOSE = 2e-7
"""Largest relative difference of factors that count as equal: constants such as 1 / N are rounded to float32."""
_ABOUT = 1e-6
"""Largest relative difference of a factor of the whole result from the number that it stands for."""

_FLOAT16 = "the squares are computed in float16, which does not hold those of numbers beyond 256"
_CANCELS = (
    "the variance is a difference of two means, which may be rounded to 0 or below, and nothing is added to it: such a "
    "row is not finite"
)
_POSITIVE = "Add a small number to the variance, or compute it from the centred rows: jnp.var(x, -1)."
_TWICE = "a number is added both to the mean of the squares and to its root"
_ONCE = "Add one number, to the variance or the mean of the squares, before the root is taken."
_FLOORED_TWICE = (
    "there is a floor under the mean of the squares or the variance, or under its root, and one more number"
)
_FLOOR_ALONE = "Leave one of both: a floor under the moment or under its root, or a small number that is added to it."
_CHOSEN = "another number takes the place of the mean of the squares or the variance, or of its root, such as of a 0"
_ADDED_ALONE = "Add a small number before the root is taken, and choose none: that is what the kernels compute."
_STOPPED = "the gradient is stopped inside the normalisation"
_THROUGH = "Let the gradient run through the mean and the root, as kernels do, or stop that of the rows before them."
_WIDE = "Cast the rows to float32 before they are squared, and the result back to float16."

Monomial = tuple[int, int, int, int, int]
"""Exponents of x, of the mean of x, of the mean of x * x, of the root, and of what has a floor."""
Polynomial = dict[Monomial, float]

_ONE: Monomial = (0, 0, 0, 0, 0)
_X: Monomial = (1, 0, 0, 0, 0)
_MEAN: Monomial = (0, 1, 0, 0, 0)
_MEAN_OF_MEAN: Monomial = (0, 2, 0, 0, 0)
_SQUARE: Monomial = (0, 0, 1, 0, 0)
_ROOT: Monomial = (0, 0, 0, 1, 0)
_RAISED: Monomial = (0, 0, 0, 0, 1)


class UnlikeError(Exception):
    """Raised where a value is no part of a normalisation; the message says why, for debugging."""


class OfRowsError(UnlikeError):
    """Raised where the rows have scales or shifts of their own, as in norms of a batch or of groups."""


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for one, p in a.items():
        for other, q in b.items():
            first, second, third, fourth, fifth = map(add, one, other)
            monomial = first, second, third, fourth, fifth
            result[monomial] = result.get(monomial, 0.0) + p * q
    if len(result) > _MOST_TERMS or any(m[0] > 2 for m in result):
        raise UnlikeError("the rows are normalised by other numbers than their mean and their mean square")
    return _tidy(result)


def _sum(a: Polynomial, b: Polynomial, sign: float = 1.0) -> Polynomial:
    result = dict(a)
    for monomial, q in b.items():
        result[monomial] = result.get(monomial, 0.0) + sign * q
    return _tidy(result)


def _tidy(polynomial: Polynomial) -> Polynomial:
    """Drops terms that cancelled up to rounding."""
    largest = max(map(abs, polynomial.values()), default=0.0)
    return {m: c for m, c in polynomial.items() if abs(c) > 1e-7 * largest or m == _ONE and c}


def _number(polynomial: Polynomial) -> float | None:
    if any(m != _ONE for m in polynomial):
        return None
    return polynomial.get(_ONE, 0.0)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _CLOSE * max(abs(a), abs(b))


def _about(a: float, exact: float) -> bool:
    return abs(a - exact) <= _ABOUT * abs(exact)


def _moment(polynomial: Polynomial) -> tuple[bool, float, float] | None:
    """Returns (centred, factor, added) if a polynomial is ``factor * moment + added`` with a positive factor."""
    rest = dict(polynomial)
    factor, mean, added = (rest.pop(m, 0.0) for m in (_SQUARE, _MEAN_OF_MEAN, _ONE))
    if rest or factor <= 0 or not (mean == 0 or _near(-mean, factor)):
        return None
    return mean != 0, factor, added


@dataclass(frozen=True)
class Form:
    """Value of the form ``numerator * base**exponent * scale + shift``."""

    numerator: Polynomial
    base: tuple[tuple[Monomial, float], ...] = ()
    exponent: float = 0.0
    scale: Ref | None = None
    shift: Ref | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a polynomial."""
        return not self.exponent and self.scale is None and self.shift is None


class Conclusion(NamedTuple):
    """What a normalisation consists of: ``gain * (x - centre) / sqrt(factor * moment + epsilon)``.

    Attributes:
      centred: whether the mean is subtracted, and the moment is the variance; else it is the mean of squares.
      epsilon: what is added to the moment, or to the root if ``outside``; with ``floor``, the least that it may be.
      gain, factor: what the rows and the moment are multiplied by.
    """

    centred: bool
    epsilon: float
    outside: bool
    gain: float
    factor: float
    floor: bool = False


class FormReader:
    """Reads values of one site as forms.

    Attributes:
      x: the number of the tile that is normalised, before casts.
      columns, rows: the labels of both.
      reads: the uses by which equations read x, by number of the value that they read.
      centred: whether what is nearly a normalisation subtracts the mean.
    """

    def __init__(self, scope: Scope, x: int, columns: Sequence[Atom], rows: Sequence[Atom]):
        self.scope, self.space, self.graph = scope, scope.space, scope.graph
        self.x, self.columns, self.rows = x, tuple(columns), frozenset(rows)
        self.reads: dict[int, Ref] = {}
        self._view: object = None
        self._root: Polynomial | None = None
        self._raised: tuple[Polynomial, float] | None = None  # what has a floor, and the floor
        self._known: dict[object, Form] = {}
        self.centred = False
        self._cancels = False  # whether the square of the mean is subtracted from the mean of the squares

    def form(self, ref: Ref, depth: int = 0) -> Form:
        """Reads a use of a value as a form.

        Raises:
          UnlikeError: the value has no such form.
        """
        if depth > _DEEPEST:
            raise UnlikeError(f"more than {_DEEPEST} operations make the normalisation")
        at = before_layout(self.space, ref, self.x)
        if at.value == self.x:
            view = self.space.view(at.view)
            if self._view not in (None, view):
                raise UnlikeError("the rows are normalised by numbers of other rows")
            self._view = view
            self.reads.setdefault(ref.value, ref)
            return Form({_X: 1.0})
        key = at.value, self.space.view(at.view)
        if key not in self._known:
            value = self.scope.number(at)
            if value is not None:
                if not math.isfinite(value):
                    raise UnlikeError("a number that is not finite is part of it")
                self._known[key] = Form({_ONE: float(value)})
            elif self._is_shared(at) and not self._is_moment(at):
                # before it was repeated for each row: a program has the cotangent there, for whatever comes before may
                # stand outside of a loop or a checkpoint
                self._known[key] = Form({_ONE: 1.0}, scale=self.space.unrepeated(ref))
            else:
                self._known[key] = self._read(at, depth)
        return self._known[key]

    def _is_shared(self, at: Ref) -> bool:
        """Returns whether several rows share a value: all of them, or those of one sequence, say."""
        return not self.rows or not self.rows <= self.space.atoms(at)

    def _read(self, at: Ref, depth: int) -> Form:
        name = self.scope.name(at)
        if name in ("reduce_sum", "dot_general"):
            return self._summed(at, depth)
        operands = self.space.uses(at)
        if operands is None or not operands:
            of_rows = self.space.atoms(at).isdisjoint(self.columns)
            raise (OfRowsError if of_rows else UnlikeError)("the rows are combined with something else")
        if name == "select_n":
            case = self.scope.number(operands[0])
            if case is None:
                self._check_chosen(operands[1:], depth)
                raise UnlikeError("a mask chooses between the rows and something else")
            return self.form(operands[1 + int(case)], depth + 1)
        return self._combined(at, name or "", operands, [self.form(operand, depth + 1) for operand in operands])

    def _check_chosen(self, operands: Sequence[Ref], depth: int) -> None:
        """Raises Mismatch if one of two values is a moment or its root, and the other is a number."""
        numbers = [operand for operand in operands if self.scope.number(operand) is not None]
        others = [operand for operand in operands if operand not in numbers]
        if len(numbers) == len(others) == 1 and (moment := self._floored(self.form(others[0], depth + 1))) is not None:
            self.centred = moment[0]
            raise Mismatch(_CHOSEN, advice=_ADDED_ALONE)

    def _is_moment(self, at: Ref) -> bool:
        """Returns whether a value without row labels is computed from the only row there is."""
        return not self.rows and at.value > self.x

    def _combined(self, at: Ref, name: str, operands: Sequence[Ref], forms: list[Form]) -> Form:
        match name:
            case "convert_element_type":
                source, target = (self.graph.dtype(r.value) for r in (operands[0], at))
                if not rounds(source, target):
                    raise UnlikeError(f"it is cast from {source} to {target}")
                if not self.space.atoms(at) & set(self.columns):
                    self._check_width(at)
                return self._squared(at, forms[0])
            case "add" | "add_any" | "sub":
                return self._added(forms[0], forms[1], -1.0 if name == "sub" else 1.0)
            case "neg":
                return self._times(forms[0], Form({_ONE: -1.0}))
            case "mul":
                return self._squared(at, self._times(forms[0], forms[1]))
            case "div":
                return self._times(forms[0], self._power(forms[1], -1.0))
            case "square":
                return self._squared(at, self._times(forms[0], forms[0]))
            case "integer_pow":
                exponent = self.graph.definitions[at.value].params["y"]
                if exponent == 2:
                    return self._squared(at, self._times(forms[0], forms[0]))
                return self._power(forms[0], float(exponent))
            case "pow":
                number = _number(forms[1].numerator) if forms[1].plain else None
                if number == 2:
                    return self._squared(at, self._times(forms[0], forms[0]))
                return self._power(forms[0], math.nan if number is None else number)
            case "sqrt":
                return self._power(forms[0], 0.5)
            case "rsqrt":
                return self._power(forms[0], -0.5)
            case "max":  # a variance is not below 0
                for one, other in (forms, forms[::-1]):
                    moment = self._floored(one)
                    floor = _number(other.numerator) if moment is not None and other.plain else None
                    if moment is None or floor is None:
                        continue
                    if floor == 0.0:
                        return one
                    if floor > 0.0:
                        return self._with_floor(one, moment, floor)
            case "stop_gradient":
                stopped = forms[0].numerator
                self.centred = any(m in stopped for m in (_MEAN, _MEAN_OF_MEAN))
                raise Mismatch(_STOPPED, advice=_THROUGH)
        raise UnlikeError(f"the rows pass through {name}")

    def _check_width(self, number: Ref) -> None:
        """Raises UnlikeError if a number of the rows is narrower than they are."""
        if self.graph.dtype(number.value).itemsize < self.graph.dtype(self.x).itemsize:
            raise UnlikeError("a number of the rows is rounded more than they are")

    def _floored(self, form: Form) -> tuple[bool, float, float] | None:
        """Returns the moment, as :func:`_moment` does, that a form is, or the root of which it is; None for others, and
        where a negative number is added to it."""
        root = form.numerator.keys() == {_ROOT} and form.numerator[_ROOT] > 0
        found = _moment(self._root if root and self._root is not None else form.numerator) if form.plain else None
        return None if found is None or found[2] < 0 else found

    def _with_floor(self, form: Form, moment: tuple[bool, float, float], floor: float) -> Form:
        """Returns what stands for a moment, or its root, that is at least a number."""
        self.centred = moment[0]
        raised = form.numerator, floor
        if moment[2] or self._raised not in (None, raised):
            raise Mismatch(_FLOORED_TWICE, advice=_FLOOR_ALONE)
        self._raised = raised
        return Form({_RAISED: 1.0})

    def _squared(self, at: Ref, form: Form) -> Form:
        """Returns the form; raises Mismatch if it holds squares, of x or of its mean, or means of squares in
        float16."""
        squared = any(m[0] == 2 or m[1] == 2 or m[2] for m in form.numerator)
        if squared and self.graph.dtype(at.value) == np.float16:
            raise Mismatch(_FLOAT16, advice=_WIDE)
        return form

    def _added(self, a: Form, b: Form, sign: float) -> Form:
        if (a.base, a.exponent, a.scale) == (b.base, b.exponent, b.scale) and None in (a.shift, b.shift):
            if b.shift is not None and sign < 0:
                raise UnlikeError("something that does not vary with the rows is subtracted")
            squares, means = ({m for m in (_SQUARE, _MEAN_OF_MEAN) if m in form.numerator} for form in (a, b))
            self._cancels |= bool(squares and means) and squares != means
            return replace(a, numerator=_sum(a.numerator, b.numerator, sign), shift=a.shift or b.shift)
        for one, other, own in ((a, b, 1.0), (b, a, sign)):  # a number per column is added to what varies with the rows
            alone = not other.exponent and other.shift is None and other.numerator == {_ONE: 1.0}
            if alone and other.scale is not None and one.shift is None and one.exponent:
                if other is b and sign < 0:
                    raise UnlikeError("something that does not vary with the rows is subtracted")
                return replace(one, numerator=_sum({}, one.numerator, own), shift=other.scale)
        raise UnlikeError("two different things are added to it")

    def _times(self, a: Form, b: Form) -> Form:
        if a.shift is not None or b.shift is not None:
            raise UnlikeError("it is multiplied by something after something was added")
        if a.scale is not None and b.scale is not None:
            raise UnlikeError("it is multiplied by several things that do not vary with the rows")
        if a.exponent and b.exponent and a.base != b.base:
            raise UnlikeError("the rows are divided by two different numbers")
        base, exponent = a.base or b.base, a.exponent + b.exponent
        return Form(_product(a.numerator, b.numerator), base if exponent else (), exponent, a.scale or b.scale)

    def _power(self, form: Form, exponent: float) -> Form:
        """Raises a row number, or a known number, to the power 1/2, -1/2 or -1."""
        if exponent not in (0.5, -0.5, -1.0) or form.scale is not None or form.shift is not None:
            raise UnlikeError("something else than a root or a reciprocal is taken")
        number = _number(form.numerator)
        if form.exponent:
            if number is None or number <= 0:
                raise UnlikeError("a root is taken of more than one number of the row")
            return Form({_ONE: number**exponent}, form.base, form.exponent * exponent)
        if number is not None:
            if number <= 0:
                raise UnlikeError("a root is taken of a number that is not positive")
            return Form({_ONE: number**exponent})
        if any(m[0] for m in form.numerator):
            raise UnlikeError("a root or a reciprocal is taken of the rows themselves")
        if exponent == 0.5:
            if self._root not in (None, form.numerator) or _ROOT in form.numerator:
                raise UnlikeError("several different roots are taken")
            self._root = form.numerator
            return Form({_ROOT: 1.0})
        if exponent == -1.0 and form.numerator.keys() == {_ROOT}:
            assert self._root is not None
            return Form({_ONE: 1 / form.numerator[_ROOT]}, tuple(sorted(self._root.items())), -0.5)
        return Form({_ONE: 1.0}, tuple(sorted(form.numerator.items())), exponent)

    def _summed(self, at: Ref, depth: int) -> Form:
        """Reads a sum over the columns, of one value or of the product of two."""
        node = self.graph.definitions[at.value]
        self._check_width(at)
        dimensions = [(0, (atom,)) for atom in self.columns]
        if node.name == "reduce_sum":
            shape, axes, kept = self.graph.shape(node.inputs[0]), node.params["axes"], iter(at.view)
            summed = [d for d in sorted(axes) if shape[d] != 1]
            if [shape[d] for d in summed] != [self.space.sizes[atom] for atom in self.columns]:
                raise UnlikeError("it is summed over other columns than those that it has")
            gone = dict(zip(summed, dimensions, strict=True))
            view = tuple(gone.get(d, (0, ())) if d in axes else next(kept) for d in range(len(shape)))
            form = self.form(Ref(node.inputs[0], view), depth + 1)
        else:
            shape = self.graph.shape(node.inputs[0])
            axes = node.params["dimension_numbers"][0][0]
            if [shape[d] for d in axes] != [self.space.sizes[atom] for atom in self.columns]:
                raise UnlikeError("a product is summed over other columns than those that it has")
            left, right, _ = self.space.dot(at, dimensions)
            form = self._squared(at, self._times(self.form(left, depth + 1), self.form(right, depth + 1)))
        if not form.plain:
            raise UnlikeError("something is summed that was normalised before")
        count = math.prod(self.space.sizes[atom] for atom in self.columns)
        result: Polynomial = {}
        for (power, *others), coefficient in form.numerator.items():
            monomial = 0, others[0] + (power == 1), others[1] + (power == 2), others[2], others[3]
            result[monomial] = result.get(monomial, 0.0) + coefficient * count
        return Form(_tidy(result))

    def conclusion(self, form: Form) -> Conclusion:
        """Returns what a form that normalises x consists of.

        Raises:
          UnlikeError: it does something else.
        """
        numerator, base = dict(form.numerator), dict(form.base)
        gain, mean = numerator.pop(_X, 0.0), numerator.pop(_MEAN, 0.0)
        if numerator or gain == 0 or not (mean == 0 or _near(-mean, gain)):
            raise UnlikeError("the rows are not just centred and scaled")
        base, floor = self._without_floor(base)
        outside, of_root, after = False, 1.0, 0.0
        if form.exponent == -1.0 and _ROOT in base and self._root is not None:
            of_root, after, outside = base.pop(_ROOT), base.pop(_ONE, 0.0), True
            if base or of_root <= 0:
                raise UnlikeError("the rows are divided by another number than the root of a mean")
            base = dict(self._root)
            if _RAISED in base:
                raise Mismatch(_FLOORED_TWICE, advice=_FLOOR_ALONE)
        elif form.exponent != -0.5:
            raise UnlikeError("the rows are divided by another number than the root of a mean")
        moment = _moment(base)
        if moment is None or moment[0] != (mean != 0):
            raise UnlikeError("the rows are divided by another number than the root of a mean")
        centred, factor, added = moment
        self.centred = centred
        if outside and added:
            raise Mismatch(_TWICE, advice=_ONCE)
        factor, epsilon = factor * of_root**2, (after if outside else added) if floor is None else floor
        if epsilon < 0:
            raise UnlikeError("a positive number is subtracted from the mean")
        if self._cancels and centred and not epsilon:
            raise Mismatch(_CANCELS, advice=_POSITIVE)
        if _about(gain / math.sqrt(factor), 1.0):  # then it is a norm by the mean, whose epsilon is a part of this one
            epsilon /= math.sqrt(factor) if outside else factor
            return Conclusion(centred, epsilon, outside, 1.0, 1.0, floor is not None)
        count = math.prod(self.space.sizes[atom] for atom in self.columns)
        gain = next((exact for exact in (1.0, -1.0, math.sqrt(count)) if _about(gain, exact)), gain)
        factor = next((exact for exact in (1.0, float(count)) if _about(factor, exact)), factor)
        return Conclusion(centred, epsilon, outside, gain, factor, floor is not None)

    def _without_floor(self, base: Polynomial) -> tuple[Polynomial, float | None]:
        """Returns what stands under the floor of a polynomial, and the floor; the polynomial and None where there is
        none."""
        if _RAISED not in base or self._raised is None:
            return dict(base), None
        raised, floor = self._raised
        times = base[_RAISED]
        if len(base) > 1:
            raise Mismatch(_FLOORED_TWICE, advice=_FLOOR_ALONE)
        if times <= 0:
            raise UnlikeError("the rows are divided by a number that is not positive")
        return {monomial: times * q for monomial, q in raised.items()}, times * floor


def before_layout(space: Space, ref: Ref, value: int) -> Ref:
    """Returns the same elements before layout operations, but goes back no further than a certain value."""
    for at in space.chain(ref):
        if at.value == value:
            return at
    return space.canonical(ref)
