"""Reads the factor of an attention's rows where it is not just one over their sums, such as with an epsilon.

The weights are ``exp(x)`` times a factor of the row. If this factor is an elementwise function of sums and maxima over
the keys, and of values that do not depend on the scores, a kernel gives the sums and maxima, and the factor is computed
from them outside the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import Dtype
from autopallas.graph import Ref
from autopallas.kernels.attention.site_parts import RowProgram, RowStatistic
from autopallas.kernels.attention.spec import Weight
from autopallas.numerics.casts import kind_of, rounds
from autopallas.patterns.advice import NORMALISE, OWN_DTYPE, SAME_SUM, SIDE_DTYPES
from autopallas.patterns.carry import Carrier
from autopallas.patterns.expressions import Apply, Computed, Expression, operation
from autopallas.patterns.match import Mismatch
from autopallas.patterns.program_builder import ProgramBuilder, Register
from autopallas.patterns.softmax import Softmax
from autopallas.patterns.softmax_terms import Exponential, Factor, LogSumExp, Term
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Side, conversion_params
from autopallas.sites.index_notation import Operand, Positions

__all__ = ["RowFactor", "row_factor"]

_LONGEST = 200
_GREATEST_POWER = 64
"""Greatest power of a sum that is written as products: one that is multiplied by itself again and again has any."""


@dataclass(frozen=True, slots=True)
class RowFactor:
    """Factor ``expression`` of the rows: the result is ``exp(x - shift)`` times the values, times the factor.

    The normaliser's argument is x.
    """

    normaliser: LogSumExp
    expression: Expression
    further: tuple[tuple[Factor, ...], ...] = ()
    """Per sum besides the normaliser, the weights that only this sum has."""

    def program(self, carrier: Carrier, weight: Callable[[Factor], Weight]) -> RowProgram:
        """Builds the program of the factor, with what it reads."""
        sums = [tuple(map(weight, factors)) for factors in self.further]
        builder = _RowBuilder(carrier, sums)
        program = builder.build(self.expression)
        return RowProgram(program, tuple(builder.inputs), tuple(builder.statistics), _follows_maximum(self.expression))


def row_factor(softmax: Softmax, found: Exponential) -> RowFactor | None:
    """Returns the factor of the rows of proved exponentials; None where it involves no sum of them.

    Raises:
      Mismatch: the factor is not a function of sums, maxima and independent values.
    """
    reader = _Reader(softmax, found)
    terms = softmax.combine(found.rows)
    reader.product(terms, 1.0)  # finds the sums
    if not reader.sums:
        return None
    normaliser, further = reader.told_apart()
    reader.masked = any(w.kind in ("where", "unless") for w in normaliser.weights)
    expression = reader.product(terms, 1.0)
    if found.guarded:
        total, nothing = Computed("sum 0", found.argument, reader.wide), Constant(0.0, reader.wide)
        some = Apply(lax.gt_p, {}, (total, nothing), np.dtype(bool))
        expression = Apply(lax.select_n_p, {}, (some, nothing, expression), reader.wide)
    return RowFactor(normaliser, expression, further)


class _Reader:
    """Reads terms and values of a row as expressions of what a kernel gives."""

    def __init__(self, softmax: Softmax, found: Exponential):
        self.softmax, self.scope, self.space = softmax, softmax.scope, softmax.space
        self.argument = found.argument
        self.sums: list[LogSumExp] = []
        self.masked = False  # whether exponentials are set to 0, whatever they were
        self.under_mask = {self.softmax.term_key(t) for t in found.under_mask}
        self.length = 0
        assert self.scope.score is not None
        double = self.scope.graph.dtype(self.scope.score) == np.float64
        self.wide: Dtype = np.dtype(np.float64 if double else np.float32)

    def product(self, terms: Sequence[Term], shifts: float = 0.0) -> Expression:
        """Returns the exponential of a sum of terms, and of ``shifts`` times the kernel's shift."""
        exponents: list[Expression] = []
        over_mask: list[Expression] = []
        factors: list[tuple[Expression, float]] = []
        for term in terms:
            if term.kind == "constant":
                exponents.append(Constant(term.coefficient, self.wide))
            elif term.kind == "logsumexp":
                factors.append((self._sum(term.inner), term.coefficient))
                shifts += term.coefficient
            elif term.kind == "log":
                factors.append((self._convert(self._row(term.value), self.wide), term.coefficient))
            else:
                exponents.append(self._times(self._convert(self._row(term.value), self.wide), term.coefficient))
                if self.softmax.term_key(term) not in self.under_mask:
                    over_mask.append(exponents[-1])
        exponent = self._exponent(exponents, over_mask, shifts)
        result: Expression = Apply(lax.exp_p, {"accuracy": None}, (exponent,), self.wide)
        for factor, power in factors:
            if not float(power).is_integer():
                raise Mismatch("a factor of the row enters with a fractional power", advice=NORMALISE)
            if abs(power) > _GREATEST_POWER:
                raise Mismatch(f"a factor of the row enters with a power beyond {_GREATEST_POWER}", advice=NORMALISE)
            for _ in range(abs(int(power))):
                divided = Apply(lax.div_p, {}, (result, factor), self.wide)
                result = self._multiply(result, factor) if power > 0 else divided
        return result

    def _exponent(self, exponents: Sequence[Expression], over_mask: Sequence[Expression], shifts: float) -> Expression:
        """Returns the sum of exponents and shifts.

        A row without any key has a shift of -inf and multiplies nothing but zeros, so that any number will do. If the
        program's own exponent is not a number, neither are its exponentials, unless a mask stands over them: only the
        exponents ``over_mask`` count then.
        """
        zero: Expression = Constant(0.0, self.wide)
        total = self._total(exponents)
        if not shifts:
            return total
        boolean = np.dtype(bool)
        shift = Computed("shift", self.argument, self.wide)
        empty = Apply(lax.eq_p, {}, (shift, Constant(-math.inf, self.wide)), boolean)
        whole = Apply(lax.add_p, {}, (total, self._times(shift, shifts)), self.wide)
        left = self._total(over_mask)
        finite = Apply(lax.is_finite_p, {}, (left,), boolean)
        alone = zero if self.masked or not over_mask else Apply(lax.select_n_p, {}, (finite, left, zero), self.wide)
        return Apply(lax.select_n_p, {}, (empty, whole, alone), self.wide)

    def _total(self, exponents: Sequence[Expression]) -> Expression:
        total: Expression = exponents[0] if exponents else Constant(0.0, self.wide)
        for exponent in exponents[1:]:
            total = Apply(lax.add_p, {}, (total, exponent), self.wide)
        return total

    def _sum(self, inner: LogSumExp) -> Computed:
        """Returns a sum of the exponentials, relative to the kernel's shift."""
        if self.scope.key(inner.argument) != self.scope.key(self.argument):
            raise Mismatch("the normaliser sums something else than the numerator", advice=SAME_SUM)
        keys = [self.softmax.term_key(Term(1.0, "logsumexp", x)) for x in (*self.sums, inner)]
        position = keys.index(keys[-1])
        if position == len(self.sums):
            self.sums.append(inner)
        return Computed(f"sum {position}", self.argument, self.wide)

    def told_apart(self) -> tuple[LogSumExp, tuple[tuple[Factor, ...], ...]]:
        """Returns the first sum, and the weights that each of the other sums has besides the first one's."""
        first, *others = self.sums
        if others and any(x.extras for x in self.sums):
            raise Mismatch("the factor of the row holds several sums, and a sink", advice=NORMALISE)
        further = []
        for other in others:
            left = list(other.weights)
            for factor in first.weights:
                same = [w for w in left if self.softmax.factor_key(w) == self.softmax.factor_key(factor)]
                if not same:
                    raise Mismatch("the factor of the row holds sums with different masks", advice=NORMALISE)
                left.remove(same[0])
            further.append(tuple(left))
        return first, tuple(further)

    def _row(self, ref: Ref) -> Expression:
        """Reads a value of the row."""
        ref = self.space.canonical(ref)
        node, name = self.scope.node(ref), self.scope.name(ref)
        if node is None or not self.scope.depends(ref.value):
            return ref
        self.length += 1
        if self.length > _LONGEST or self.softmax.carries_axis(ref):
            raise Mismatch("a factor of the row is computed from single scores", advice=NORMALISE)
        dtype = self.scope.dtype(ref)
        if dtype == np.float64 != self.wide:
            raise Mismatch(
                "a factor of the row is computed in float64, which holds numbers that float32 does not",
                advice="Compute it in the dtype of the scores, or the products in float64.",
            )
        if name == "reduce_max":
            return self._convert(self._greatest(ref), dtype)
        if name in ("reduce_sum", "dot_general"):
            terms = self.softmax.log(ref)
            if not any(t.kind == "logsumexp" for t in terms):
                raise self.softmax.note or Mismatch(
                    "a factor of the row sums something else than exponentials", advice=NORMALISE
                )
            return self._convert(self.product(self.softmax.combine(terms)), dtype)
        operands = self.space.operands(ref)
        if operands is None:
            raise Mismatch(f"a factor of the row passes through {name}", advice=NORMALISE)
        if name == "convert_element_type" and jnp.issubdtype(dtype, jnp.floating):
            if self.softmax.magnitudes.is_filled(ref, float(jnp.finfo(dtype).max)):
                raise Mismatch(
                    f"a row of nothing but a mask's fill has a maximum that is infinite in {dtype}",
                    advice=OWN_DTYPE,
                )
        arguments = tuple(self._row(operand) for operand in operands)
        if node.name == "dot_general":  # a dot without contraction is a product
            return self._multiply(*(self._convert(a, dtype) for a in arguments))
        return Apply(*operation(node), arguments, dtype)

    def _greatest(self, ref: Ref) -> Expression:
        """Reads a maximum over the keys, without terms that all keys share. A rounding inside is moved outside, since
        it is monotone."""
        casts: list[Dtype] = []
        inner = self.space.canonical(self.softmax.reduced(ref))
        while self.scope.name(inner) == "convert_element_type" and len(casts) < _LONGEST:
            operands = self.space.operands(inner)
            if not operands or not rounds(self.scope.dtype(operands[0]), self.scope.dtype(inner)):
                break
            casts.append(self.scope.dtype(inner))
            inner = operands[0]
        stripped = self.softmax.strip(inner)
        tile, rows = stripped.x, stripped.rows
        if self._unmasked(tile) != self._unmasked(self.argument):
            raise Mismatch(
                "the exponentials are relative to a maximum that something is added to behind it",
                advice="Add to the scores first, and subtract the maximum of what is exponentiated.",
            )
        found: Expression = Computed("greatest", tile, self.wide)
        for term in self.softmax.combine(rows):
            if term.kind != "value":
                raise Mismatch("a maximum over the keys is taken of more than scores and maxima", advice=NORMALISE)
            value = self._convert(self._row(term.value), self.wide)
            found = Apply(lax.add_p, {}, (found, self._times(value, term.coefficient)), self.wide)
        for dtype in reversed(casts):
            found = self._convert(found, dtype)
        return found

    def _unmasked(self, expression: Expression) -> Hashable:
        """Returns a key of some scores without the masks over them and without their factors.

        Where ``b`` is added after the maximum, ``exp((s - max(s)) + b)`` rounds as finely as ``b`` is small, but a
        kernel's ``exp(s + b)`` as coarsely as the scores are large.
        """
        for _ in range(_LONGEST):
            name: str | None = None
            arguments: Sequence[Expression] = ()
            if isinstance(expression, Apply):
                name, arguments = expression.primitive.name, expression.arguments
            elif isinstance(expression, Ref):
                expression = self.space.canonical(expression)
                name, arguments = self.scope.name(expression), self.space.operands(expression) or ()
            of_scores = [a for a in arguments if self._of_scores(a)]
            if name not in ("select_n", "convert_element_type", "mul", "div", "neg") or len(of_scores) != 1:
                break
            (expression,) = of_scores
        return self.scope.key(expression)

    def _of_scores(self, expression: Expression) -> bool:
        if isinstance(expression, Ref):
            return self.scope.reads_score(expression)
        return isinstance(expression, Apply) and any(map(self._of_scores, expression.arguments))

    # ------------------------------------------------------------------ arithmetic

    def _convert(self, expression: Expression, dtype: Dtype) -> Expression:
        if self.scope.dtype(expression) == dtype:
            return expression
        return Apply(lax.convert_element_type_p, conversion_params(dtype), (expression,), dtype)

    def _multiply(self, a: Expression, b: Expression) -> Expression:
        return Apply(lax.mul_p, compat.multiplication_params(), (a, b), self.scope.dtype(a))

    def _times(self, expression: Expression, coefficient: float) -> Expression:
        if coefficient == 1:
            return expression
        return self._rounded(self._multiply(Constant(coefficient, self.wide), expression))

    def _rounded(self, product: Expression) -> Expression:
        """Keeps compilers from leaving a product unrounded, as they may where one instruction multiplies and adds.

        Where huge numbers cancel, the rounding error would be all that is left.
        """
        same = Apply(lax.eq_p, {}, (product, product), np.dtype(bool))
        return Apply(lax.select_n_p, {}, (same, Constant(math.nan, self.wide), product), self.wide)


class _RowBuilder(ProgramBuilder):
    """Builds programs of row numbers from statistics, and from values that do not depend on the scores."""

    def __init__(self, carrier: Carrier, sums: Sequence[tuple[Weight, ...]]):
        super().__init__(carrier)
        self.inputs: list[Operand | Positions | RowStatistic] = []
        self.statistics: list[ElementwiseProgram | tuple[Weight, ...]] = list(sums)

    def _written(self, expression: Expression) -> Register:
        source: Operand | Positions | RowStatistic
        match expression:
            case Computed(kind="greatest"):
                program = ProgramBuilder(self.carrier).build(expression.argument)
                if program not in self.statistics:
                    self.statistics.append(program)
                source = RowStatistic("further", self.statistics.index(program))
            case Computed(kind="sum 0"):
                source = RowStatistic("sum")
            case Computed(kind="shift"):
                source = RowStatistic("shift")
            case Computed():
                source = RowStatistic("further", int(expression.kind.removeprefix("sum ")) - 1)
            case Ref() if self.scope.number(expression) is None:
                dtype = self.scope.dtype(expression)
                if not (kind_of(dtype) in "iub" or jnp.issubdtype(dtype, jnp.floating)):
                    raise Mismatch(f"a side input has the dtype {dtype}", advice=SIDE_DTYPES)
                source = self.carrier.source(expression)
            case _:
                return super()._written(expression)
        if source not in self.inputs:
            self.inputs.append(source)
        return self._input(Side(self.inputs.index(source), self.scope.dtype(expression)))


def _follows_maximum(expression: Expression) -> bool:
    """Returns whether a derivative could run through a maximum over the keys."""
    match expression:
        case Computed():
            return expression.kind == "greatest"
        case Apply():
            if expression.primitive.name == "stop_gradient" or not jnp.issubdtype(expression.dtype, jnp.floating):
                return False
            return any(map(_follows_maximum, expression.arguments))
        case _:
            return False
