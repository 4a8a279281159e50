"""Finds products that a program adds to the scores, such as one of contents and one of rotated positions.

A sum of products of queries and keys is one product of concatenated queries and keys. So a further product that the
program adds to the scores belongs to the site as its operands, and not as an array of all scores.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.numerics.casts import rounds
from autopallas.patterns.expressions import Apply, Expression, Scope, computed_from
from autopallas.sites.elementwise import Constant

__all__ = ["Product", "added"]

_FURTHEST = 256.0
"""Largest factor by which a product may enter the sum more or less often than the scores: scaled queries stay in
range."""
_DEEPEST = 64
"""Most operations on one path between a product and the exponential."""


@dataclass(frozen=True, slots=True)
class Product:
    """A contraction of queries and keys.

    Attributes:
      ref: its result, as the exponential's argument reads it.
      query, key: the operands, with their layout operations still to undo.
      query_first: whether the queries are the first operand.
      head_axis: the labels that are contracted.
      scale: how often it is added for each time that the scores are added: plus or minus a power of two.
    """

    ref: Ref
    query: Ref
    key: Ref
    query_first: bool
    head_axis: tuple[Atom, ...]
    scale: float = 1.0


def added(scope: Scope, argument: Expression, score: Ref, products: Sequence[Product]) -> dict[int, float]:
    """Returns, by position, which products are added to the scores wherever these enter the argument, and how often."""
    sums = _Sums(scope, score, products)
    whole = sums.of(argument)
    tops = [whole, *sums.tops]
    found: dict[int, float] = {}
    if any(_ELSEWHERE in top for top in tops):
        return found
    for i in range(len(products)):
        ratios = {
            top[i] / top[_SCORE] if top.get(i) and top.get(_SCORE) else 0.0 for top in tops if i in top or _SCORE in top
        }
        ratio = ratios.pop() if len(ratios) == 1 else 0.0
        if abs(math.frexp(ratio)[0]) == 0.5 and 1 / _FURTHEST <= abs(ratio) <= _FURTHEST:
            found[i] = ratio
    return found


_SCORE, _ELSEWHERE = -1, -2
"""Stand for the scores, and for any of the values in another layout, among the positions of products."""


class _Sums:
    """Counts how often scores and products are added in values that are linear in them.

    Attributes:
      tops: the counts of values that anything other than a sum reads.
    """

    def __init__(self, scope: Scope, score: Ref, products: Sequence[Product]):
        self._scope = scope
        self._leaves = [score, *(product.ref for product in products)]
        self._first = min(leaf.value for leaf in self._leaves)
        self._depends = {leaf.value: True for leaf in self._leaves}
        self._known: dict[Hashable, dict[int, float]] = {}
        self.tops: list[dict[int, float]] = []

    def of(self, expression: Expression, depth: int = 0) -> dict[int, float]:
        key = self._scope.key(expression)
        if key not in self._known:
            self._known[key] = self._of(expression, depth)
        return self._known[key]

    def _of(self, expression: Expression, depth: int) -> dict[int, float]:
        scope = self._scope
        arguments: Sequence[Expression] | None
        match expression:
            case Ref():
                ref = scope.space.canonical(expression)
                for position, leaf in enumerate(self._leaves, _SCORE):
                    if leaf.value == ref.value:
                        return {position if scope.space.same(ref, leaf) else _ELSEWHERE: 1.0}
                if not computed_from(scope.graph, ref.value, self._depends, self._first):
                    return {}
                name, arguments = scope.name(ref), scope.space.operands(ref)
            case Apply():
                name, arguments = expression.primitive.name, expression.arguments
            case _:
                return {}
        if arguments is None or depth > _DEEPEST:
            return {_ELSEWHERE: 1.0}
        parts = [self.of(argument, depth + 1) for argument in arguments]
        if name in ("add", "add_any", "sub"):
            sign = -1.0 if name == "sub" else 1.0
            return {i: parts[0].get(i, 0.0) + sign * parts[1].get(i, 0.0) for i in {**parts[0], **parts[1]}}
        if name == "neg":
            return {i: -n for i, n in parts[0].items()}
        if name == "convert_element_type" and rounds(scope.dtype(arguments[0]), scope.dtype(expression)):
            return parts[0]
        if name in ("mul", "div"):
            for position in (0, 1) if name == "mul" else (0,):
                number = _number(scope, arguments[1 - position])
                if number:
                    return {i: n * number if name == "mul" else n / number for i, n in parts[position].items()}
        self.tops += parts
        return {}


def _number(scope: Scope, expression: Expression) -> float | int | None:
    if isinstance(expression, Constant):
        return expression.value
    return scope.number(expression) if isinstance(expression, Ref) else None
