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
from autopallas.graph.labels import Atom, Dimension
from autopallas.numerics.casts import blurs, exponential_underflows_below, keeps_range, rounds, widens
from autopallas.patterns.advice import (
    BETWEEN_PRODUCTS,
    EPSILON,
    MASK_SCORES,
    OVER_THE_KEYS,
    SAME_SUM,
    SINK,
    STOP_EARLIER,
)
from autopallas.patterns.expressions import Apply, Expression, Scope, parts_of
from autopallas.patterns.key_axis import DEEPEST, KeyAxis
from autopallas.patterns.logarithms_of_sums import is_logaddexp
from autopallas.patterns.match import Mismatch
from autopallas.patterns.score_magnitudes import BLURS_BY, ScoreMagnitudes
from autopallas.patterns.softmax_terms import (
    APART,
    HIDDEN,
    ROUNDED,
    UNSHIFTED,
    Exponential,
    Factor,
    LogSumExp,
    SeveralBlocks,
    SeveralMaps,
    Term,
)
from autopallas.sites.elementwise import Constant, conversion_params

__all__ = ["Softmax"]

_MOST_TERMS = 32
"""Most terms of one sum of logarithms; a longer sum is a term of its own."""
_MOST_FACTORS = 16
"""Most factors of probabilities, such as masks; a program that masks and divides again and again has any number."""
_DROWNS_IN = 1e10
"""Magnitude to which float64 adds the logarithm of a count with an error beyond any tolerance of float32. In a row of
nothing but numbers of this size, ``exp(s - logsumexp(s))`` is 1 everywhere."""
_HELD = 2**15
"""Largest number of keys for which every floating dtype holds a sum of exponentials that are at most 1 each."""


class _Stripped(NamedTuple):
    """Argument of an exponential, split into ``x`` plus ``rows``.

    ``shifted`` says whether the program takes the exponential of ``x`` less its own maximum over the keys, or of
    something smaller. ``under_mask`` is the subset of ``rows`` over which a mask stands.
    """

    x: Expression
    rows: list[Term]
    shifted: bool = False
    under_mask: Sequence[Term] = ()


class Softmax(KeyAxis):
    """Implements the algebra over one site."""

    def __init__(self, scope: Scope, axis: tuple[Atom, ...], offset: int):
        super().__init__(scope, axis, offset)
        self.magnitudes = ScoreMagnitudes(self)
        self.note: Mismatch | None = None  # why a denominator could not be read
        self.unshifted = False  # whether some exponential was read without a subtracted maximum
        self.rounded = False  # whether some exponential is relative to a maximum in a narrower dtype
        self.added_behind = False  # whether something, possibly a fill, is added to scores less their maximum
        self.scaled_behind = False  # whether exact scores are scaled after their maximum was subtracted
        self.joins = False  # whether sums relative to maxima of their own are read as those of other blocks of keys
        self.apart = False  # whether one was
        self.opens = False  # whether row values of other blocks' scores are read too, as where two blocks are joined
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
                if len(found.rows) > _MOST_TERMS:
                    found.rows = self._fewer(found)
            elif self.scope.depends(b.value):
                raise Mismatch(
                    "the softmax runs over another axis, or its weights depend on the scores", advice=OVER_THE_KEYS
                )
            else:
                kind: Literal["multiply", "divide"] = "multiply" if name == "mul" else "divide"
                found.weights.append(Factor(kind, b, _normalised(found)))
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
                    found.weights.append(Factor("unless" if position else "where", mask, _normalised(found)))
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
        if len(rows) > _MOST_TERMS or not any(t.kind in ("logsumexp", "log") for t in rows):
            raise Mismatch(f"the probabilities have more than {_MOST_TERMS} factors of a row", advice=BETWEEN_PRODUCTS)
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

    def _rounds(self, result: Ref, operand: Ref) -> bool:
        """Returns whether the proof reads through a cast of a factor."""
        return rounds(self.scope.graph.dtype(operand.value), self.scope.graph.dtype(result.value))

    def _widens(self, result: Ref, operand: Ref) -> bool:
        """Returns whether a cast keeps every value."""
        return widens(self.scope.graph.dtype(operand.value), self.scope.graph.dtype(result.value))

    def _keeps_range(self, result: Ref, operand: Ref) -> bool:
        """Returns whether a cast makes no finite number infinite, apart from rounding."""
        return keeps_range(self.scope.graph.dtype(operand.value), self.scope.graph.dtype(result.value))

    def _has_exponential(self, ref: Ref) -> bool:
        """Returns whether a value is computed from an exponential of the scores by elementwise operations."""

        def operands(at: Ref) -> Sequence[Ref]:
            return self.space.operands(at) or [] if self.carries_scores(at) else []

        def found() -> bool:
            return any(self.carries_scores(at) and self.scope.exponential(at) for at in self.behind(ref, operands))

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
        return _Stripped(x, rows, shifted, under) if len(rows) <= _MOST_TERMS else _Stripped(ref, [])

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

    # ------------------------------------------------------------------ row terms

    def linear(self, ref: Ref, depth: int = 0) -> list[Term]:
        """Returns a row value as a sum of terms."""
        ref = self.space.canonical(ref)
        number = self.scope.number(ref)
        if number is not None:
            return [Term(float(number), "constant", None)]
        itself = [Term(1.0, "value", ref)]
        if not (self.opens or self.scope.depends(ref.value)) or depth > DEEPEST:
            return itself
        terms = self.remembered("linear", ref, lambda: self._summands(ref, depth + 1), self.opens)
        return itself if terms is None else list(terms)

    def _summands(self, ref: Ref, depth: int) -> list[Term] | None:
        """Returns the terms that a row value is the sum of, or None where it is a term of its own."""
        name, operands = self.scope.name(ref), self.space.operands(ref)
        if operands is None:
            return None
        if name in ("add", "add_any", "sub"):
            sign = -1 if name == "sub" else 1
            left, right = (self.linear(operand, depth) for operand in operands)
            terms = self.combine([*left, *(t.scaled(sign) for t in right)])
            return terms if len(terms) <= _MOST_TERMS else None
        if name == "neg":
            return [t.scaled(-1) for t in self.linear(operands[0], depth)]
        if name == "convert_element_type" and self._widens(ref, operands[0]):
            return self.linear(operands[0], depth)
        if name == "log":
            return self.log(operands[0], depth)
        if name == "custom_jvp_call" and (node := self.scope.node(ref)) and is_logaddexp(node.equation):
            return self._joined(operands, depth)
        if name in ("mul", "div"):
            for position in (0, 1) if name == "mul" else (0,):
                number = self.scope.number(operands[1 - position])
                if number:
                    factor = number if name == "mul" else 1 / number
                    return [t.scaled(factor) for t in self.linear(operands[position], depth)]
        if name == "max":  # jax.nn.softmax guards against an empty axis with max(-inf, m)
            for position in (0, 1):
                if self.scope.number(operands[position]) == -math.inf:
                    return self.linear(operands[1 - position], depth)
        return None

    def log(self, ref: Ref, depth: int = 0) -> list[Term]:
        """Returns the logarithm of a row factor as a sum of terms."""
        ref = self.space.canonical(ref)
        number = self.scope.number(ref)
        if number is not None and number > 0:
            return [Term(math.log(number), "constant", None)]
        if not (self.opens or self.scope.depends(ref.value)) or depth > DEEPEST:
            return [Term(1.0, "log", ref)]
        return list(self.remembered("log", ref, lambda: self._log(ref, depth + 1), self.opens))

    def _joined(self, operands: Sequence[Ref], depth: int) -> list[Term] | None:
        """Returns the logarithm of the sum of the exponentials of row values; None where it is no normaliser.

        What does not depend on the scores may be the logarithm of a sum over other keys.
        """
        outer, self.opens = self.opens, True
        try:
            return self._log_of_sum([self.linear(operand, depth) for operand in operands])
        except SeveralBlocks:
            raise
        except Mismatch:
            return None
        finally:
            self.opens = outer

    def _log(self, ref: Ref, depth: int) -> list[Term]:
        name, operands, node = self.scope.name(ref), self.space.operands(ref), self.scope.node(ref)
        itself = [Term(1.0, "log", ref)]
        if operands is not None and node is not None:
            if name == "convert_element_type" and self._rounds(ref, operands[0]):
                terms = self.log(operands[0], depth)
                if self._keeps_range(ref, operands[0]) or self._is_bounded(terms) or self._sums_in(ref, operands[0]):
                    return terms
                raise Mismatch(
                    f"the denominator is cast to {self.scope.dtype(ref)}, which may not hold it",
                    advice="Subtract the maximum of the scores before the exponential, or leave the denominator in the "
                    "dtype in which it is summed.",
                )
            if name == "abs":  # jax.scipy.special.logsumexp takes abs of a sum that is positive anyway
                inner = self.log(operands[0], depth)
                return inner if all(map(_positive, inner)) else itself
            if name == "exp":
                return self.linear(operands[0], depth)
            if name in ("mul", "div"):
                sign = 1 if name == "mul" else -1
                left, right = (self.log(operand, depth) for operand in operands)
                terms = self.combine([*left, *(t.scaled(sign) for t in right)])
                return terms if len(terms) <= _MOST_TERMS else itself
            if name == "integer_pow":
                return [t.scaled(node.params["y"]) for t in self.log(operands[0], depth)]
            if name in ("add", "add_any") and any(self.scope.number(operand) == 0 for operand in operands):
                (other,) = [o for o in operands if self.scope.number(o) != 0]  # two zeros would sum to a known number
                return self.log(other, depth)
            if name in ("add", "add_any", "max"):
                if (found := self._unchanged(name, operands, depth)) is not None:
                    return found
            if name in ("add", "add_any"):
                try:
                    return self._log_of_sum([self.log(o, depth) for o in operands])
                except Mismatch as mismatch:
                    self.note = mismatch.with_traceback(None)
            if name == "max":
                self.note = Mismatch("there is a floor under the denominator", advice=EPSILON)
            if name == "stop_gradient":
                self.note = Mismatch("the gradient is stopped inside the softmax", advice=STOP_EARLIER)
        if name == "reduce_sum":
            found = self._log_of_reduction(ref)
            return found if self.scope.depends(ref.value) else self._relative(found, ref)
        if name == "dot_general":
            found = self._log_of_dot(ref)
            if found is not None:
                return found
        return itself

    def _unchanged(self, name: str, operands: Sequence[Ref], depth: int) -> list[Term] | None:
        """Returns the logarithm of a sum of exponentials combined with a number too small to matter; None otherwise.

        One of the exponentials is 1 where the maximum is subtracted. Adding less than half a unit in the last place of
        1 then has no effect, nor has a floor below 1.
        """
        for ref, other in (operands, operands[::-1]):
            number = self.scope.number(other)
            double = self.scope.dtype(ref) == np.float64
            if number is None or not 0 <= number < (1.0 if name == "max" else 2.0 ** (-54 if double else -25)):
                continue
            terms = self.log(ref, depth)
            shift = [t for t in terms if t.kind != "logsumexp"]
            if len(shift) == 1 and len(terms) == 2 and shift[0].kind == "value" and shift[0].coefficient == -1:
                (inner,) = (t.inner for t in terms if t.kind == "logsumexp")
                if not inner.weights and not inner.extras and self._is_maximum(shift[0].value, inner.argument):
                    return terms
        return None

    def _sums_in(self, result: Ref, total: Ref) -> bool:
        """Returns whether a cast returns a sum to the narrow dtype of its summands, which JAX widens to add them. In
        that dtype the summands overflow too."""
        if self.scope.name(total) != "reduce_sum":
            return False
        summands = self.space.canonical(self.reduced(total))
        inner = self.space.operands(summands) or []
        return any(self.scope.dtype(x) == self.scope.dtype(result) for x in (summands, *inner))

    def _is_bounded(self, terms: Sequence[Term]) -> bool:
        """Returns whether terms are the logarithm of a sum of exponentials that are at most 1, and not too many."""
        sums = [t.inner for t in terms if t.kind == "logsumexp"]
        weighted = any(x.extras or any(w.kind in ("multiply", "divide") for w in x.weights) for x in sums)
        return not (self.unshifted or weighted or self.space.extent(self.axis) > _HELD)

    def _is_maximum(self, row: Ref, argument: Expression, about: bool = False) -> bool:
        """Returns whether a row value is the maximum of some values over the keys. With ``about``, rounding is allowed,
        and so is 0 instead of an infinite maximum."""
        keeps = self._rounds if about else self._widens
        row = self.space.canonical(row)
        rounded = False
        for _ in range(DEEPEST):
            name, operands = self.scope.name(row), self.space.operands(row) or []
            kept = [o for o in operands if name != "max" or self.scope.number(o) != -math.inf]
            if about and name == "select_n" and len(operands) == 3 and self.scope.name(operands[0]) == "is_finite":
                kept = operands[2:]
            elif name == "convert_element_type":
                if not (keeps(row, operands[0]) and self._keeps_range(row, operands[0])):
                    return False
                rounded |= not self._widens(row, operands[0])
            elif name not in ("stop_gradient", "max") or len(kept) != 1:
                break
            (row,) = kept
        if self.scope.name(row) != "reduce_max":
            return False
        try:
            found = self._equal(self.reduced(row), argument)
        except Mismatch:
            return False
        self.rounded |= found and rounded
        return found

    def _equal(self, a: Expression, b: Expression) -> bool:
        """Returns whether two values are the same, or the same mask of the same values with equal numbers as fills."""
        if self.scope.key(a) == self.scope.key(b):
            return True
        if not isinstance(a, Ref) or not isinstance(b, Ref):
            return False
        a, b = self.space.canonical(a), self.space.canonical(b)
        if self.scope.name(a) != "select_n" or self.scope.name(b) != "select_n":
            return False
        cases = zip(self.space.operands(a) or [], self.space.operands(b) or [], strict=True)
        return all(
            self.scope.key(x) == self.scope.key(y) or self.scope.number(x) == self.scope.number(y) is not None
            for x, y in cases
        )

    def _log_of_sum(self, summands: Sequence[list[Term]]) -> list[Term]:
        """Returns log(a + b) where one summand is a normaliser and the others, relative to it, do not depend on the
        scores."""
        if self.joins:
            summands = [self.combine(part for t in terms for part in self._of_another_block(t)) for terms in summands]
        normalisers = [
            i for i, terms in enumerate(summands) if any(t.kind == "logsumexp" and self._depends(t) for t in terms)
        ]
        if len(normalisers) > 1:
            raise SeveralBlocks
        if not normalisers:  # take the normaliser of another block of keys
            normalisers = [i for i, terms in enumerate(summands) if any(t.kind == "logsumexp" for t in terms)][:1]
        if not normalisers:
            raise Mismatch("a sum in the denominator lacks a normaliser", advice=SAME_SUM)
        terms = summands[normalisers[0]]
        found = [t for t in terms if t.kind == "logsumexp"]
        if len(found) != 1 or found[0].coefficient != 1:
            raise Mismatch("the normaliser is not understood", advice=SAME_SUM)
        shift = [t for t in terms if t.kind != "logsumexp"]
        extras: list[tuple[Term, ...]] = []
        for i, other in enumerate(summands):
            if i == normalisers[0]:
                continue
            extra = self.combine([*other, *(t.scaled(-1) for t in shift)])
            if any(self._depends(t) for t in extra):
                raise Mismatch(
                    "an epsilon (or another function of the row) is added to the denominator", advice=EPSILON
                )
            if any(t.kind == "log" for t in extra):
                raise Mismatch("what is added to the denominator is not known to be positive", advice=SINK)
            extras.append(tuple(extra))
        inner = found[0].inner
        merged = LogSumExp(inner.argument, inner.weights, (*inner.extras, *extras))
        return [*shift, Term(1.0, "logsumexp", merged)]

    def _log_of_reduction(self, ref: Ref) -> list[Term]:
        """Returns the log of a sum over the keys, or over the keys and sink columns beside them."""
        node = self.scope.node(ref)
        assert node is not None
        axes, source = tuple(node.params["axes"]), node.inputs[0]
        shape = self.scope.graph.shape(source)
        kept = iter(ref.view)
        view: list[Dimension | None] = [None if d in axes else next(kept) for d in range(len(shape))]

        def with_axes(dimensions: Iterable[Dimension]) -> Ref:
            left = iter(dimensions)
            return Ref(source, tuple(next(left) if d is None else d for d in view))

        sizes, labels = [shape[d] for d in axes], self.space.resolve(self.axis)
        pieces: list[tuple[Ref, tuple[Atom, ...]]]
        if math.prod(sizes) == self.space.extent(labels):
            groups = self.space.cut(labels, [n for n in sizes if n != 1])
            if groups is None:
                return [Term(1.0, "log", ref)]
            left = iter(groups)
            pieces = [(with_axes((0, ()) if n == 1 else next(left) for n in sizes), self.axis)]
        else:
            segments = self.segments(source, axes[0]) if len(axes) == 1 else None
            if not segments:
                others = self.space.inside(ref, sizes)
                terms = self._another_block(with_axes(others), [a for _, atoms in others for a in atoms])
                if terms is None:
                    raise Mismatch(
                        "the softmax runs over another axis, or over more than the keys", advice=OVER_THE_KEYS
                    )
                return terms
            pieces, start = [], 0
            for size in segments:
                mine = size == self.space.extent(labels) and start == self.offset
                atoms = labels if mine else self.space.fresh(size)
                pieces.append((with_axes([(start, atoms)]), atoms))
                start += size
        summands = []
        for piece, atoms in pieces:
            if not atoms:
                summands.append(self._column(piece))
                continue
            outer, self.axis = self.axis, atoms
            try:
                found = self.exponential(piece)
            finally:
                self.axis = outer
            summands.append([*found.rows, Term(1.0, "logsumexp", LogSumExp(found.argument, tuple(found.weights)))])
        return summands[0] if len(summands) == 1 else self._log_of_sum(summands)

    def _of_another_block(self, term: Term) -> list[Term]:
        """Returns a term, or the terms of a sum of exponentials of other scores that are relative to numbers of the row
        of their own."""
        known = term.kind == "log" and term.coefficient == 1 and self.scope.name(term.value) == "reduce_sum"
        if not self.joins or not known:
            return [term]
        try:
            return self._relative(self._log_of_reduction(term.value), term.value)
        except Mismatch:
            return [term]

    def _relative(self, found: Sequence[Term], total: Ref) -> list[Term]:
        """Returns the logarithm of a sum of exponentials of other scores, with what is subtracted from all scores of a
        row as a term of its own."""
        row, terms = self.space.atoms(total), []
        for part in found:
            while part.kind == "logsumexp" and isinstance(part.inner.argument, Ref):
                argument = part.inner.argument
                operands = self.space.operands(argument) if self.scope.name(argument) == "sub" else None
                if not operands or not self.space.atoms(operands[1]) <= row:
                    break
                self.apart = True
                terms += [t.scaled(-part.coefficient) for t in self.linear(operands[1])]
                inner = replace(part.inner, argument=self.space.canonical(operands[0]))
                part = part._replace(expression=inner)
            terms.append(part)
        return terms

    def _another_block(self, ref: Ref, axis: Sequence[Atom]) -> list[Term] | None:
        """Returns the logarithm of a sum of exponentials of other scores over an axis; None where the sum is another
        one."""
        outer, self.axis = self.axis, tuple(axis)
        before = self.unshifted
        try:
            found = self.exponential(ref)
        except Mismatch:
            return None
        finally:
            self.axis, self.unshifted = outer, before  # the other block's own proof says whether it is shifted
        if self.scope.reads_score(found.argument):
            return None
        return [*found.rows, Term(1.0, "logsumexp", LogSumExp(found.argument, tuple(found.weights)))]

    def _column(self, ref: Ref) -> list[Term]:
        """Returns the logarithm of a single column beside the keys (a sink), which is an exponential without S."""
        ref = self.space.canonical(ref)
        operands = self.space.operands(ref)
        while self.scope.name(ref) == "convert_element_type" and operands and self._rounds(ref, operands[0]):
            ref = operands[0]
            operands = self.space.operands(ref)
        if self.scope.name(ref) != "exp" or operands is None:
            raise Mismatch("a column beside the keys is not an exponential", advice=SINK)
        rows: list[Term] = []
        at = operands[0]
        while self.scope.depends(at.value):
            inner = self.space.operands(at)
            if inner and self.scope.name(at) == "convert_element_type" and self._rounds(at, inner[0]):
                at = inner[0]
            elif inner and self.scope.name(at) == "sub" and self.scope.depends(inner[1].value):
                rows += [t.scaled(-1) for t in self.linear(inner[1])]
                at = inner[0]
            else:
                raise Mismatch(f"a column beside the keys passes through {self.scope.name(at)}", advice=SINK)
        return [*rows, *self.linear(at)]

    def _log_of_dot(self, ref: Ref) -> list[Term] | None:
        """Returns the log of a sum over the keys that is spelled as a dot with a constant vector."""
        node = self.scope.node(ref)
        assert node is not None
        (contracting, _), _ = node.params["dimension_numbers"]
        sizes = [self.scope.graph.shape(node.inputs[0])[d] for d in contracting]
        labels = self.space.resolve(self.axis)
        if not sizes or math.prod(sizes) != self.space.extent(labels):
            return None
        groups = self.space.cut(labels, [n for n in sizes if n != 1])
        if groups is None:
            return None
        left = iter(groups)
        a, b, _ = self.space.dot(ref, [(0, ()) if n == 1 else next(left) for n in sizes])
        for weights, constant in ((a, b), (b, a)):
            number = self.scope.number(self.space.canonical(constant))
            if number is not None and number > 0:
                found = self.exponential(weights)
                inner = LogSumExp(found.argument, tuple(found.weights))
                return [*found.rows, Term(math.log(number), "constant", None), Term(1.0, "logsumexp", inner)]
        return None

    # ------------------------------------------------------------------ sums of terms

    def combine(self, terms: Iterable[Term]) -> list[Term]:
        """Adds up equal terms and drops those that cancel."""
        sums: dict[Hashable, Term] = {}
        for term in terms:
            key = (term.kind, self.term_key(term))
            before = sums.get(key)
            sums[key] = term if before is None else term._replace(coefficient=before.coefficient + term.coefficient)
        return [t for t in sums.values() if abs(t.coefficient) > 1e-12]  # equal terms cancel exactly

    def term_key(self, term: Term) -> Hashable:
        inner = term.expression
        if inner is None:
            return None
        if isinstance(inner, Ref):
            return self.scope.key(inner)
        return (
            self.scope.key(inner.argument),
            tuple(sorted((self.factor_key(w) for w in inner.weights), key=repr)),
            tuple(sorted(([(t.coefficient, t.kind, self.term_key(t)) for t in e] for e in inner.extras), key=repr)),
        ).__repr__()

    def factor_key(self, factor: Factor) -> tuple[str, Hashable]:
        return factor.kind, self.scope.key(factor.source)

    def _depends(self, term: Term) -> bool:
        expression = term.expression
        if expression is None:
            return False
        return self.scope.reads_score(expression.argument if isinstance(expression, LogSumExp) else expression)

    def depends(self, term: Term) -> bool:
        """Returns whether a term is computed from the scores."""
        return self._depends(term)


def _positive(term: Term) -> bool:
    """Returns whether a term is the logarithm of a value that is known to be positive."""
    if term.kind != "logsumexp":
        return term.kind == "value" or term.kind == "constant"
    return all(w.kind in ("where", "unless") for w in term.inner.weights)


def _normalised(found: Exponential) -> bool:
    return any(t.kind in ("logsumexp", "log") for t in found.rows)
