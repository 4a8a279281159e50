"""How large and how precise scores and row values may be: fills among them, digits, what sums of them lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from jax import numpy as jnp

from autopallas.compat import Dtype
from autopallas.graph import Ref
from autopallas.numerics.casts import rounds
from autopallas.patterns.expressions import Apply, Expression
from autopallas.patterns.key_axis import DEEPEST, KeyAxis
from autopallas.patterns.match import Mismatch

__all__ = ["BLURS_BY", "ScoreMagnitudes"]

BLURS_BY = 1e3
"""Magnitude to which float32 adds a score with an error beyond its tolerance."""
_KEEPS_DIGITS = frozenset({"convert_element_type", "max", "min", "neg", "select_n"})
"""Operations whose results have no more digits than their operands."""
_MOST_VALUES = 32
"""Most values behind another among which fills and addends are looked for."""


class ScoreMagnitudes:
    """Bounds the values along an axis of keys, as far as the program's constants and dtypes tell."""

    def __init__(self, keys: KeyAxis):
        self.keys = keys
        self.scope, self.space = keys.scope, keys.space

    def digits(self, x: Expression, depth: int = 0) -> int:
        """Returns how many binary digits the scores in an expression have at most, as far as dtypes tell."""
        if isinstance(x, Ref):
            x = self.space.canonical(x)
            if x.value == self.scope.score:
                return self._digits_of_product(x)
        digits = _digits_of(self.scope.dtype(x))
        arguments: Sequence[Expression] | None
        match x:
            case Ref():
                if not self.scope.depends(x.value):
                    return 0
                name, arguments = self.scope.name(x), self.space.operands(x)
            case Apply():
                name, arguments = x.primitive.name, x.arguments
            case _:
                return 0
        if arguments is None or depth > DEEPEST or name not in _KEEPS_DIGITS:
            return digits
        return min(digits, max(self.digits(a, depth + 1) for a in arguments))

    def _digits_of_product(self, score: Ref) -> int:
        graph, product = self.scope.graph, self.scope.node(score)
        assert product is not None
        found = 0
        for number in product.inputs:
            dtypes = [graph.dtype(number)]
            while (node := graph.definitions.get(number)) is not None and node.name == "convert_element_type":
                number = node.inputs[0]
                dtypes.append(graph.dtype(number))
            found += min(map(_digits_of, dtypes)) + 1
        return min(found, _digits_of(graph.dtype(score.value)))

    def added(self, ref: Ref, depth: int = 0) -> float:
        """Bounds how far from 0 the known numbers that the program adds after a row value carry the sums."""
        ref = self.space.canonical(ref)
        if not self.scope.depends(ref.value) or depth > DEEPEST:
            return 0.0
        return self.keys.remembered("added", ref, lambda: self._added_before(ref, depth + 1))

    def _added_before(self, ref: Ref, depth: int) -> float:
        operands, name, found = self.space.operands(ref), self.scope.name(ref), 0.0
        if operands is None or name not in ("add", "add_any", "sub", "neg", "select_n", "convert_element_type"):
            return 0.0
        if any(self.keys.is_row(operand) for operand in operands):
            return 0.0
        for operand in operands:
            number = self.scope.number(operand)
            if number is None:
                found += self.added(operand, depth)
            elif name in ("add", "add_any", "sub") and math.isfinite(number):
                found += abs(number)
        return found

    @property
    def double(self) -> bool:
        """Whether kernels compute in float64."""
        score = self.scope.score
        return score is not None and self.scope.graph.dtype(score) == np.float64

    def _one_of(self, at: Ref) -> Sequence[Ref]:
        """Returns the operands of which a row value is always one, up to rounding."""
        name, operands = self.scope.name(at), self.space.operands(at) or []
        if name == "select_n":
            return operands[1:]
        return operands if name in ("max", "stop_gradient", "convert_element_type") else []

    def overflows(self, number: Ref) -> bool:
        """Returns whether a row value may be a fill that a cast makes infinite: an infinite number less itself is not
        0."""
        for at in self.keys.behind(number, self._one_of, DEEPEST):
            dtype = self.scope.dtype(at)
            if self.scope.name(at) == "convert_element_type" and rounds(dtype, dtype):
                if self.is_filled(at, float(jnp.finfo(dtype).max)):
                    return True
        return False

    def blurs(self, scores: Ref, number: Ref) -> bool:
        """Returns whether a row value, other than a maximum, may be as large as a fill among the scores, or infinite
        like one."""
        one_of = self._one_of
        ends = [
            at for at in self.keys.behind(number, one_of, DEEPEST) if not one_of(at) and self.scope.depends(at.value)
        ]
        numbers = [at for at in ends if self.scope.name(at) != "reduce_max"]
        filled = any(self.is_filled(at, BLURS_BY) for at in numbers) and self.is_filled(scores, BLURS_BY)
        return filled or any(map(self.is_filled_with_infinities, numbers))

    def is_filled(self, ref: Ref, beyond: float) -> bool:
        """Returns whether a value is computed from scores, some of which are replaced by a finite number larger than
        ``beyond``."""
        numbers = map(self.scope.number, self.keys.behind(ref, self._across_keys, _MOST_VALUES))
        return any(number is not None and beyond < abs(number) < math.inf for number in numbers)

    def is_offset(self, ref: Ref) -> bool:
        """Returns whether all scores of a row may be as large as a fill, or as an array that the program adds to
        them."""

        def operands(at: Ref) -> Sequence[Ref]:
            name, found = self.scope.name(at), self.space.operands(at) or []
            if name == "select_n":
                return found[1:]
            return found if name in ("add", "add_any", "sub", "neg", "convert_element_type") else []

        behind = self.keys.behind(ref, operands, _MOST_VALUES)
        given = (at for at in behind if not self.scope.depends(at.value) and self.keys.carries_axis(at))
        return self.is_filled(ref, BLURS_BY) or any(self.scope.number(at) is None for at in given)

    def is_filled_with_infinities(self, ref: Ref) -> bool:
        """Returns whether a value is computed from infinite scores, other than through exponentials and maxima."""

        def operands(at: Ref) -> Sequence[Ref]:
            return [] if self.scope.name(at) in ("exp", "exp2", "reduce_max") else self._across_keys(at)

        numbers = map(self.scope.number, self.keys.behind(ref, operands, _MOST_VALUES))
        return any(number in (math.inf, -math.inf) for number in numbers)

    def _across_keys(self, ref: Ref) -> Sequence[Ref]:
        """Returns the operands of a value; for a reduction over the keys, what it reduces."""
        if self.scope.number(ref) is not None:
            return []
        if self.scope.name(ref) in ("reduce_max", "reduce_min", "reduce_sum"):
            with suppress(Mismatch):
                return [self.keys.reduced(ref)]
            return []
        return self.space.operands(ref) or []


def _digits_of(dtype: Dtype) -> int:
    """Returns the number of binary digits after the leading one; that of float64 for types other than floats of 16 bits
    or more."""
    return int(jnp.finfo(dtype if rounds(dtype, dtype) else np.float64).nmant)
