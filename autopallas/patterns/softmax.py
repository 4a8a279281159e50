"""Proves that weights are a softmax, whatever its spelling.

The proof pulls the weights' side of a contraction over S back to ``exp(argument) * weights * exp(rows)``. Here ``rows``
is a formal sum of terms without S, and ``log(sum over S of exp(x))`` is one kind of term. The weights are a softmax of
x exactly when that sum is ``-1 * logsumexp(x)`` and nothing else in it depends on the scores. A subtracted maximum
cancels, however often it was subtracted. Division before or after the contraction, reciprocals, log_softmax and
logsumexp all give the same form.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from jax import lax
from jax import numpy as jnp

from autopallas import compat
from autopallas.compat import Dtype
from autopallas.graph import Node, Ref
from autopallas.graph.labels import Atom
from autopallas.numerics.casts import blurs, exponential_underflows_below, rounds, widens
from autopallas.patterns.advice import (
    BETWEEN_PRODUCTS,
    MASK_SCORES,
    OVER_THE_KEYS,
    STOP_EARLIER,
)
from autopallas.patterns.expressions import Apply, Expression, Scope, parts_of
from autopallas.patterns.key_axis import DEEPEST
from autopallas.patterns.match import Mismatch
from autopallas.patterns.row_terms import MOST_TERMS, RowTerms
from autopallas.patterns.score_magnitudes import BLURS_BY, ScoreMagnitudes
from autopallas.patterns.softmax_terms import (
    APART,
    HIDDEN,
    ROUNDED,
    UNSHIFTED,
    Exponential,
    Factor,
    LogSumExp,
    SeveralMaps,
    Term,
)
from autopallas.sites.elementwise import Constant, conversion_params

__all__ = ["Softmax"]

_MOST_FACTORS = 16
"""Most factors of probabilities, such as masks; a program that masks and divides again and again has any number."""
_MOST_BEHIND = 128
"""Most values behind one, the nearest first, among which an exponential of the scores is looked for."""
_DROWNS_IN = 1e10
"""Magnitude to which float64 adds the logarithm of a count with an error beyond any tolerance of float32. In a row of
nothing but numbers of this size, ``exp(s - logsumexp(s))`` is 1 everywhere."""


class _Stripped(NamedTuple):
    """Argument of an exponential, split into ``x`` plus ``rows``.

    ``shifted`` says whether the program takes the exponential of ``x`` less its own maximum over the keys, or of
    something smaller. ``under_mask`` is the subset of ``rows`` over which a mask stands.
    """

    x: Expression
    rows: list[Term]
    shifted: bool = False
    under_mask: Sequence[Term] = ()


class Softmax(RowTerms):
    """Implements the algebra over one site."""

    def __init__(self, scope: Scope, axis: tuple[Atom, ...], offset: int):
        super().__init__(scope, axis, offset)
        self.magnitudes = ScoreMagnitudes(self)
        self.added_behind = False  # whether something, possibly a fill, is added to scores less their maximum
        self.scaled_behind = False  # whether exact scores are scaled after their maximum was subtracted
        self.overflows = False  # whether a row value was taken out that a cast may make infinite

    # ------------------------------------------------------------------ the weights' side

    def exponential(self, ref: Ref, depth: int = 0) -> Exponential:
        """Pulls probabilities, normalised or not, back to an exponential of the scores."""
        if depth > DEEPEST:
            raise Mismatch(f"the probabilities pass through more than {DEEPEST} operations", advice=BETWEEN_PRODUCTS)
        ref = self.space.canonical(ref)
        found = self.remembered("exponential", ref, lambda: self._exponential(ref, depth))
        if len(found.weights) > _MOST_FACTORS:
            raise Mismatch(f"the probabilities have more than {_MOST_FACTORS} factors", advice=BETWEEN_PRODUCTS)
        return replace(found, weights=[*found.weights], rows=[*found.rows])  # callers add to both

    def _exponential(self, ref: Ref, depth: int) -> Exponential:
        name, operands = self.scope.name(ref), self.space.operands(ref)
        if operands is None:
            raise Mismatch(
                f"the probabilities pass through {name or 'something that is not computed here'}",
                advice=BETWEEN_PRODUCTS,
            )
        if name == "convert_element_type" and self._rounds(ref, operands[0]):
            return self.exponential(operands[0], depth + 1)
        if (power := self.scope.exponential(ref)) is not None:
            exponent, scale = power
            if not self.carries_axis(exponent):
                raise Mismatch("the exponential does not carry the key axis", advice=OVER_THE_KEYS)
            nothing = exponential_underflows_below(self.scope.graph.dtype(exponent.value))
            stripped = self._stripped(exponent, nothing if scale >= math.log(2) else -math.inf)
            self.unshifted |= not stripped.shifted
            argument, rows, under = stripped.x, list(stripped.rows), list(stripped.under_mask)
            self._note_scale(stripped, scale)
            if scale != 1:
                own = self.scope.dtype(argument)
                dtype = np.dtype(np.float64 if own == np.float64 else np.float32)  # log 2 in 16 bits is not log 2
                argument, factor = self.convert(argument, dtype), Constant(scale, dtype)
                argument = Apply(lax.mul_p, compat.multiplication_params(), (argument, factor), dtype)
                rows, under = ([t.scaled(scale) for t in terms] for terms in (rows, under))
            return Exponential(argument, [], rows, under_mask=under)
        if name in ("mul", "div"):
            a, b = operands
            if name == "mul" and not (self.carries_axis(a) and self._has_exponential(a)):
                a, b = b, a
            if not self.carries_axis(a):
                raise Mismatch("the probabilities lack the key axis", advice=OVER_THE_KEYS)
            found = self.exponential(a, depth + 1)
            if not self.carries_axis(b):
                found.rows += [t.scaled(1 if name == "mul" else -1) for t in self.log(b)]
                if len(found.rows) > MOST_TERMS:
                    found.rows = self._fewer(found)
            elif self.scope.depends(b.value):
                raise Mismatch(
                    "the softmax runs over another axis, or its weights depend on the scores", advice=OVER_THE_KEYS
                )
            else:
                kind: Literal["multiply", "divide"] = "multiply" if name == "mul" else "divide"
                found.weights.append(Factor(kind, b, found.is_normalised))
            return found
        if name == "select_n" and len(operands) == 3:
            mask, *cases = operands
            if self._is_infinite(mask, cases[0]):  # no probability is
                return self._guarded(cases[0], depth)
            for position in (0, 1):
                if self.scope.number(cases[position]) == 0:
                    if self.scope.depends(mask.value):
                        if position == 0 or not self._is_nan(mask, cases[0]):
                            raise Mismatch("a mask on the probabilities depends on the scores", advice=MASK_SCORES)
                        return self._guarded(cases[0], depth)
                    found = self.exponential(cases[1 - position], depth + 1)
                    found.weights.append(Factor("unless" if position else "where", mask, found.is_normalised))
                    return found
        if name == "stop_gradient":
            raise Mismatch("the gradient is stopped inside the softmax", advice=STOP_EARLIER)
        if name in ("add", "add_any", "sub", "neg"):
            raise SeveralMaps(name)
        raise Mismatch(f"the probabilities pass through {name}", advice=BETWEEN_PRODUCTS)

    def _fewer(self, found: Exponential) -> list[Term]:
        """Returns the rows of an exponential with equal ones added up: each sum of probabilities that are divided by
        their sum has all rows of these, so that there are twice as many after each division.

        Raises:
          Mismatch: there are too many, or a normaliser cancels, before which a mask means something else.
        """
        rows = self.combine(found.rows)
        if len(rows) > MOST_TERMS or not any(t.kind in ("logsumexp", "log") for t in rows):
            raise Mismatch(f"the probabilities have more than {MOST_TERMS} factors of a row", advice=BETWEEN_PRODUCTS)
        return rows

    def _guarded(self, ref: Ref, depth: int) -> Exponential:
        """Pulls back probabilities whose NaNs are replaced. That concerns whole rows, if nothing weighs the
        probabilities."""
        found = self.exponential(ref, depth + 1)
        if found.weights:
            raise Mismatch(
                "weighted probabilities are replaced where they are not numbers",
                advice="Mask the scores with -inf, before the softmax, and replace what is not a number in the result "
                "of the second product.",
            )
        found.guarded = True
        return found

    def _is_nan(self, mask: Ref, ref: Ref) -> bool:
        """Returns whether a mask is true exactly where a value is NaN."""
        operands = self.space.operands(mask) if self.scope.name(mask) == "ne" else None
        return bool(operands) and all(self.space.same(o, self.space.canonical(ref)) for o in operands or ())

    def _is_infinite(self, mask: Ref, ref: Ref) -> bool:
        """Returns whether a mask is true exactly where a value is infinite, of one sign."""
        operands = self.space.operands(mask) if self.scope.name(mask) == "eq" else None
        infinite = [self.scope.number(o) in (math.inf, -math.inf) for o in operands or ()]
        compared = [o for o, known in zip(operands or (), infinite, strict=True) if not known]
        ref = self.space.canonical(ref)
        return any(infinite) and all(self.space.same(self.space.canonical(o), ref) for o in compared)

    def _has_exponential(self, ref: Ref) -> bool:
        """Returns whether a value is computed from an exponential of the scores by few elementwise operations: where
        the steps of a recurrence are written one after the other, each would otherwise look at all before it."""

        def operands(at: Ref) -> Sequence[Ref]:
            return self.space.operands(at) or [] if self.carries_scores(at) else []

        def found() -> bool:
            behind = self.behind(ref, operands, _MOST_BEHIND, nearest_first=True)
            return any(self.carries_scores(at) and self.scope.exponential(at) for at in behind)

        return self.remembered("has exponential", ref, found)

    # ------------------------------------------------------------------ the exponential's argument

    def strip(self, ref: Ref) -> _Stripped:
        """Splits the argument of an exponential into x + rows, where the rows depend on the scores but lack S."""
        return self._stripped(ref)

    def _stripped(self, ref: Ref, nothing: float = -math.inf, depth: int = 0) -> _Stripped:
        """Does what ``strip`` does; a fill below ``nothing`` has an exponential of exactly 0 if ``ref`` is the whole
        exponent."""
        ref = self.space.canonical(ref)
        if not self.scope.depends(ref.value) or depth > DEEPEST:
            return _Stripped(ref, [])
        return self.remembered("strip", ref, lambda: self._take_rows_out(ref, nothing, depth), nothing)

    def _take_rows_out(self, ref: Ref, nothing: float, depth: int) -> _Stripped:
        name, operands, node = self.scope.name(ref), self.space.operands(ref), self.scope.node(ref)
        if operands is None or node is None:
            return _Stripped(ref, [])
        dtype = self.scope.graph.dtype(ref.value)
        x: Expression = ref
        rows: list[Term] = []
        shifted = False
        under: Sequence[Term] = ()
        if name in ("add", "add_any", "sub"):
            a, b = operands
            sign = -1 if name == "sub" else 1
            if self.is_row(b):
                x, rows, shifted, under = self._stripped(a, depth=depth + 1)
                row = [t.scaled(sign) for t in self.linear(b)]
                bounds = self._bounds(row, a)
                if self._drowns(row) and self.magnitudes.is_filled(a, _DROWNS_IN):
                    row = [Term(float(sign), "value", self.space.canonical(b))]
                    bounds = False
                elif not bounds and self.magnitudes.blurs(a, b):
                    return _Stripped(ref, [])  # a row value as large as a fill takes the scores' last digits
                self.overflows |= self.magnitudes.overflows(b)
                rows = rows + row
                shifted = bounds or shifted and all(t.coefficient < 0 for t in row)
            elif self.is_row(a):
                x, inner, _, under = self._stripped(b, depth=depth + 1)
                under = [t.scaled(sign) for t in under]
                rows = self.linear(a) + [t.scaled(sign) for t in inner]
                if sign < 0:
                    x = Apply(lax.neg_p, {}, (x,), self.scope.dtype(x))
            else:
                left, right = (self._stripped(o, depth=depth + 1) for o in (a, b))
                if not self.space.same(self.space.canonical(a), self.space.canonical(b)):
                    if any(side.rows and self.magnitudes.is_offset(o) for side, o in ((left, a), (right, b))):
                        self.added_behind = True
                        return _Stripped(ref, [])  # the program subtracts first, so the addend keeps its digits
                x = self._on_wide(node, left.x, right.x)
                rows = [*left.rows, *(t.scaled(sign) for t in right.rows)]
                under = [*left.under_mask, *(t.scaled(sign) for t in right.under_mask)]
        elif name == "convert_element_type" and self._rounds(ref, operands[0]):
            x, rows, shifted, under = self._stripped(operands[0], nothing, depth + 1)
            if blurs(dtype, self.magnitudes.added(operands[0])):
                rows = []
            elif widens(self.scope.dtype(x), dtype):
                x = self.convert(x, dtype)
            elif self.scope.dtype(x) == np.float64 and not self.magnitudes.double:
                rows = []  # kernels compute in float32, which does not hold what float64 does before rows are taken out
        elif name in ("mul", "div") and node.name == name:  # not a dot without contraction
            for position in (0, 1) if name == "mul" else (0,):
                other = operands[1 - position]
                number = self.scope.number(other)
                if number and self.scope.depends(operands[position].value):
                    x, rows, shifted, under = self._stripped(operands[position], depth=depth + 1)
                    factor = number if name == "mul" else 1 / number
                    self._note_scale(_Stripped(x, rows), factor)
                    x = self._on_wide(node, x, other) if position == 0 else self._on_wide(node, other, x)
                    rows, under = ([t.scaled(factor) for t in terms] for terms in (rows, under))
                    shifted = shifted and number > 0
                    break
        elif name == "neg":
            x, rows, _, under = self._stripped(operands[0], depth=depth + 1)
            x = self._on_wide(node, x)
            rows, under = ([t.scaled(-1) for t in terms] for terms in (rows, under))
        elif name == "select_n" and len(operands) == 3:
            mask, *cases = operands
            for position in (0, 1):
                fill = self.scope.number(cases[position])
                if fill is not None and (fill == -math.inf or fill < nothing):
                    y, rows, _, _ = self._stripped(cases[1 - position], depth=depth + 1)
                    under = rows
                    filled = Constant(-math.inf, self.scope.dtype(y))
                    x = self._on_wide(node, mask, *((filled, y) if position == 0 else (y, filled)))
                    break
        if not rows:
            return _Stripped(ref, [])
        rows = self.combine(rows)
        return _Stripped(x, rows, shifted, under) if len(rows) <= MOST_TERMS else _Stripped(ref, [])

    def _note_scale(self, stripped: _Stripped, factor: float) -> None:
        """Notes a factor that is applied after a row value was subtracted from scores with few digits.

        The program multiplies an exact difference. Kernels multiply the scores, and round the product unless the factor
        is a power of two. Where scores have all digits of their dtype, the program rounded them as much.
        """
        if math.frexp(factor)[0] not in (0.5, -0.5) and any(self.depends(term) for term in stripped.rows):
            all_digits = jnp.finfo(np.float64 if self.magnitudes.double else np.float32).nmant
            self.scaled_behind |= self.magnitudes.digits(stripped.x) < all_digits

    def _on_wide(self, node: Node, *arguments: Expression) -> Apply:
        """Applies an equation to other operands, in the widest of their dtypes: an operand whose cast was left out is
        wider than in the program."""
        floats = [d for d in map(self.scope.dtype, arguments) if rounds(d, d)]
        wide = max(floats, key=lambda d: d.itemsize)
        converted = (self.convert(a, wide) if rounds(self.scope.dtype(a), wide) else a for a in arguments)
        return Apply(node.equation.primitive, node.params, tuple(converted), wide)

    def convert(self, expression: Expression, dtype: Dtype) -> Expression:
        """Casts an expression to another dtype."""
        if self.scope.dtype(expression) == dtype:
            return expression
        if isinstance(expression, Constant):
            return Constant(expression.value, dtype)
        return Apply(lax.convert_element_type_p, conversion_params(dtype), (expression,), dtype)

    def _bounds(self, row: Sequence[Term], values: Ref) -> bool:
        """Returns whether a row that is added to some values subtracts their maximum, up to rounding, or the logarithm
        of the sum of their exponentials."""
        for term in row:
            if term.kind == "logsumexp" and term.coefficient < 0:
                return True
            if term.kind == "value" and term.coefficient == -1:
                if self._is_maximum(term.value, values, about=True):
                    return True
        return False

    def _drowns(self, row: Sequence[Term]) -> bool:
        """Returns whether the program adds the logarithm of the sum to the row's maximum before it subtracts both."""
        return [t.kind for t in row if t.kind != "constant"] == ["logsumexp"]

    def assumed(self, argument: Expression, weights: Iterable[Factor]) -> tuple[str, ...]:
        """Returns what the proof assumes about summed exponentials of some scores, masked by ``weights``."""
        if self.unshifted:
            return (UNSHIFTED,)
        shown = self._shown(argument)
        hides = any((w.kind, self.scope.key(w.source)) not in shown for w in weights)
        return ((ROUNDED,) if self.rounded else ()) + ((HIDDEN,) if hides else ()) + ((APART,) if self.apart else ())

    def may_be_nothing_but_fills(self, inner: LogSumExp) -> bool:
        """Returns whether a row of exponentials may hold nothing but a mask's fill, because a greater score was hidden
        after it was subtracted: in the program they are then all 0."""
        refs = [part for part in parts_of(inner.argument) if isinstance(part, Ref)]
        filled = any(self.magnitudes.is_filled(ref, BLURS_BY) for ref in refs)
        return filled and not {UNSHIFTED, HIDDEN}.isdisjoint(self.assumed(inner.argument, inner.weights))

    def _shown(self, argument: Expression) -> set[tuple[str, Hashable]]:
        """Returns the masks that set scores to -inf."""
        found: set[tuple[str, Hashable]] = set()
        for _ in range(DEEPEST):
            name: str | None = None
            arguments: Sequence[Expression] = ()
            if isinstance(argument, Ref):
                ref = self.space.canonical(argument)
                name, arguments = self.scope.name(ref), self.space.operands(ref) or ()
            elif isinstance(argument, Apply):
                name, arguments = argument.primitive.name, argument.arguments
            if name == "select_n" and len(arguments) == 3:
                hidden = [self._number(case) == -math.inf for case in arguments[1:]]
                if True not in hidden:
                    break
                found.add(("where" if hidden[0] else "unless", self.scope.key(arguments[0])))
                argument = arguments[2 if hidden[0] else 1]
            elif name in ("convert_element_type", "mul", "div") and arguments:
                argument = arguments[0]
            else:
                break
        return found

    def _number(self, expression: Expression) -> float | int | None:
        if isinstance(expression, Constant):
            return expression.value
        return self.scope.number(expression) if isinstance(expression, Ref) else None
