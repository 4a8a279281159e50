"""Proves that what comes back to a row's maximum adds up to zero.

A softmax does not change with what is subtracted from its row.  Where a program subtracts the maximum and does not
stop its gradient, the derivative has two parts that cancel: what comes back through the difference, summed over the
vocabulary, and what comes back otherwise.  A number per row is written as a polynomial of statistics and of numbers
that do not depend on the logits; it is zero if no term is left.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeAlias

import numpy as np

from autopallas.graph import Ref
from autopallas.numerics.casts import is_floating, kind_of
from autopallas.patterns.cross_entropy.row_statistics import RowStatistics
from autopallas.patterns.expressions import Apply, Computed, Expression, parts_of
from autopallas.sites.elementwise import Constant

__all__ = ["is_zero"]

Monomial: TypeAlias = frozenset[tuple[Hashable, float]]
"""Factors and their exponents."""
Polynomial: TypeAlias = dict[Monomial, float]

_ONE: Monomial = frozenset()
_MOST_TERMS = 32
_MOST_STEPS = 2048
"""Most expressions that are looked at for one number."""
_DEEPEST = 96
_MOST_CASES = 16
"""Most cases of conditions that are told apart."""
_ROUNDED = 1e-12
"""Part of a sum's terms that is left by the rounding of known numbers."""
_RESTATES = frozenset({"stop_gradient", "copy", "reshape", "broadcast_in_dim", "squeeze", "expand_dims"})


class _TooLong(Exception):
    """Raised where a number is made by more than is looked at."""


class _Undecided(Exception):
    """Raised at a condition whose cases are to be told apart."""

    def __init__(self, condition: Hashable):
        super().__init__(condition)
        self.condition = condition


def is_zero(algebra: RowStatistics, number: Ref) -> bool:
    """Returns whether a number per row is zero but for rounding, whatever the logits are, if all terms are finite.

    Args:
      algebra: tells of a number per row which function of statistics it is.
      number: a number per row.
    """
    todo: list[dict[Hashable, bool]] = [{}]
    cases = 0
    while todo:
        known, cases = todo.pop(), cases + 1
        if cases > _MOST_CASES:
            return False
        try:
            if _Polynomials(algebra, known).of(number):
                return False
        except _TooLong:
            return False
        except _Undecided as undecided:
            todo += [{**known, undecided.condition: holds} for holds in (False, True)]
    return True


class _Polynomials:
    """Writes numbers per row as polynomials, where each condition is known to hold or not."""

    def __init__(self, algebra: RowStatistics, known: Mapping[Hashable, bool]):
        self._algebra, self._scope, self._known = algebra, algebra.scope, known
        self._result_of = algebra.result_of
        self._found: dict[Hashable, Polynomial] = {}
        self._kept: list[Expression] = []  # so that no key of one is taken for another
        self._left = _MOST_STEPS

    def of(self, expression: Expression, depth: int = 0) -> Polynomial:
        """Returns the polynomial of a number per row, without terms that cancel."""
        if isinstance(expression, Ref):
            expression = self._scope.space.canonical(expression)
        key = self._scope.key(expression)
        if key not in self._found:
            self._left -= 1
            if depth > _DEEPEST or self._left < 0:
                raise _TooLong
            self._found[key] = _tidy(self._read(expression, key, depth + 1))
            self._kept.append(expression)
        return self._found[key]

    def _read(self, expression: Expression, key: Hashable, depth: int) -> Polynomial:
        if key in self._known:
            return {_ONE: float(self._known[key])}
        match expression:
            case Constant():
                return self._constant(float(expression.value), key)
            case Apply():
                name, arguments, params = expression.primitive.name, expression.arguments, expression.params
            case Ref():
                number = self._scope.number(expression)
                if number is not None:
                    return self._constant(float(number), key)
                own = self._result_of(expression)
                if own is not None:
                    return self.of(own, depth)
                if (total := self._of_labels(expression)) is not None:
                    return self._sum(total, depth)
                node, operands = self._scope.node(expression), self._scope.space.operands(expression)
                if node is None or not operands:
                    return _atom(key)
                name, arguments, params = self._scope.name(expression) or "", tuple(operands), node.params
            case Computed(kind="sum"):
                return self._sum(expression, depth)
            case _:
                return _atom(key)
        return self._applied(name, arguments, params, key, depth)

    def _of_labels(self, number: Ref) -> Computed | None:
        """Returns a sum that the program takes over an axis of the vocabulary's length, of what the logits do not give,
        such as labels, as one over the vocabulary."""
        node, space = self._scope.node(number), self._scope.space
        if node is None or node.name != "reduce_sum" or len(node.params["axes"]) != 1:
            return None
        (summed,), (axis,) = node.inputs, node.params["axes"]
        labels = space.resolve(self._algebra.axis)
        if self._scope.graph.shape(summed)[axis] != space.extent(labels):
            return None
        view = [*number.view[:axis], (0, labels), *number.view[axis:]]
        return Computed("sum", Ref(summed, tuple(view)), self._algebra.wide)

    def _sum(self, computed: Computed, depth: int) -> Polynomial:
        """Reads a sum over the vocabulary, with numbers of the whole row as its factors."""
        tile, factor = self._canonical(computed.argument), {_ONE: 1.0}
        for _ in range(_DEEPEST):
            operands = self._scope.space.operands(tile) if isinstance(tile, Ref) else None
            name = self._scope.name(tile) if isinstance(tile, Ref) else None
            if not operands or name not in ("neg", "mul", "div"):
                break
            if name == "neg":
                factor = _sum({}, factor, -1.0)
                tile = self._canonical(operands[0])
                continue
            varying = [i for i, operand in enumerate(operands) if self._algebra.carries_axis(operand)]
            if len(varying) != 1 or (name == "div" and varying != [0]):
                break
            other = self.of(operands[1 - varying[0]], depth)
            factor = _product(factor, other if name == "mul" else _power(other, -1.0))
            tile = self._canonical(operands[varying[0]])
        return _product(factor, _atom(("sum of", self._scope.key(tile))))

    def _constant(self, value: float, key: Hashable) -> Polynomial:
        return {_ONE: value} if math.isfinite(value) else _atom(("not finite", repr(value)))

    def _applied(
        self, name: str, arguments: tuple[Expression, ...], params: Mapping[str, object], key: Hashable, depth: int
    ) -> Polynomial:
        def of(position: int) -> Polynomial:
            return self.of(arguments[position], depth)

        match name:
            case "add" | "add_any":
                return _sum(of(0), of(1))
            case "sub":
                return _sum(of(0), of(1), -1.0)
            case "neg":
                return _sum({}, of(0), -1.0)
            case "mul":
                return _product(of(0), of(1))
            case "square":
                return _product(of(0), of(0))
            case "div":
                return _product(of(0), _power(of(1), -1.0))
            case "integer_pow":
                return _power(of(0), float(str(params["y"])))
            case "convert_element_type":
                source, made = self._scope.dtype(arguments[0]), np.dtype(str(params["new_dtype"]))
                known = kind_of(source) == "b" or _only_rounds(np.dtype(source))
                return of(0) if known and _only_rounds(made) else _atom(key)
            case "exp":
                return _exponential(of(0))
            case "log":
                return _atom(("log", _frozen(of(0))))
            case "abs" | "sign":
                inner = of(0)
                positive = self._is_positive(arguments[0], depth)
                return (inner if name == "abs" else {_ONE: 1.0}) if positive else _atom(key)
            case "select_n" if len(arguments) == 3:
                first, second = of(1), of(2)
                if first == second:
                    return first
                condition = self.of(arguments[0], depth)
                if condition.keys() <= {_ONE}:
                    return second if condition else first
                raise _Undecided(self._scope.key(self._canonical(arguments[0])))
        return of(0) if name in _RESTATES and len(arguments) == 1 else _atom(key)

    def _canonical(self, expression: Expression) -> Expression:
        return self._scope.space.canonical(expression) if isinstance(expression, Ref) else expression

    def _is_positive(self, expression: Expression, depth: int) -> bool:
        """Returns whether a number is a sum of exponentials, times exponentials."""
        for _ in range(_DEEPEST - depth):
            if not isinstance(expression, Ref):
                break
            own = self._result_of(self._scope.space.canonical(expression))
            if own is None:
                return False
            expression = own
        factors = [p for p in parts_of(expression) if isinstance(p, Computed)]
        if isinstance(expression, Apply) and expression.primitive.name == "mul":
            a, b = expression.arguments
            return (
                isinstance(a, Computed)
                and a.kind == "exp_sum"
                and isinstance(b, Apply)
                and b.primitive.name == "exp"
                and bool(factors)
            )
        return isinstance(expression, Computed) and expression.kind == "exp_sum"


def _only_rounds(dtype: np.dtype) -> bool:
    """Returns whether a cast to a dtype rounds, and does not quantise as one to 8 bits."""
    return is_floating(dtype) and dtype.itemsize > 1


def _atom(key: Hashable) -> Polynomial:
    return {frozenset({(key, 1.0)}): 1.0}


def _frozen(polynomial: Polynomial) -> Hashable:
    return frozenset(polynomial.items())


def _sum(a: Polynomial, b: Polynomial, sign: float = 1.0) -> Polynomial:
    """Returns ``a + sign * b`` without the terms of which no more is left than rounding leaves."""
    found = dict(a)
    for monomial, number in b.items():
        before = found.get(monomial, 0.0)
        after = before + sign * number
        if abs(after) <= _ROUNDED * abs(number):
            found.pop(monomial, None)
        else:
            found[monomial] = after
    if len(found) > _MOST_TERMS:
        raise _TooLong
    return found


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    found: Polynomial = {}
    if len(a) * len(b) > _MOST_TERMS**2:
        raise _TooLong
    for one, p in a.items():
        for other, q in b.items():
            found = _sum(found, {_times(one, other): p * q})
    return found


def _times(a: Monomial, b: Monomial) -> Monomial:
    exponents = dict(a)
    for factor, exponent in b:
        exponents[factor] = exponents.get(factor, 0.0) + exponent
    return frozenset((factor, exponent) for factor, exponent in exponents.items() if exponent)


def _tidy(polynomial: Polynomial) -> Polynomial:
    return {monomial: number for monomial, number in polynomial.items() if number}


def _power(polynomial: Polynomial, exponent: float) -> Polynomial:
    if len(polynomial) == 1:
        ((monomial, number),) = polynomial.items()
        return {frozenset((f, e * exponent) for f, e in monomial): number**exponent}
    if exponent in (1.0, 2.0):
        return polynomial if exponent == 1.0 else _product(polynomial, polynomial)
    return {frozenset({(("sum", _frozen(polynomial)), exponent)}): 1.0}


def _exponential(polynomial: Polynomial) -> Polynomial:
    """Returns the exponential of a polynomial: a product of one for each term, in which logarithms are undone."""
    found: Polynomial = {_ONE: 1.0}
    for monomial, number in polynomial.items():
        factors = [*monomial]
        logarithm = factors[0][0] if len(factors) == 1 and factors[0][1] == 1.0 else None
        if isinstance(logarithm, tuple) and logarithm[:1] == ("log",) and number in (1.0, -1.0):
            found = _product(found, _power(dict(logarithm[1]), number))
        elif monomial == _ONE:
            found = _product(found, {_ONE: math.exp(number)} if number < 700 else _atom(("exp", number)))
        else:
            found = _product(found, {frozenset({(("exp", monomial), number)}): 1.0})
    return found
