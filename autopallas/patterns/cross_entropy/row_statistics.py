"""Reads reductions of tile values as functions of the few statistics that a kernel takes of logits.

A reduction over the vocabulary may mix values of the tile with numbers per row that were computed from the logits
before, such as a maximum that is subtracted or a logsumexp. Once these are taken out, the rest is a program of the
logits alone, which one pass over them can evaluate: ``sum exp(x - m)`` is ``exp_sum(x) * exp(shift(x) - m)``, and so
on. A number that cannot be taken out stays in the program as a side input; the statistic then needs a pass of its own,
after the pass that gives the number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import Dtype, Primitive
from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.numerics.casts import counts_exactly, rounds
from autopallas.patterns.advice import BETWEEN_LOGITS, COUNT, LOSS_PER_ROW
from autopallas.patterns.expressions import Apply, Computed, Expression, Position, Scope, operation
from autopallas.patterns.indexing import Pick, placed
from autopallas.patterns.match import Mismatch
from autopallas.patterns.softmax import Softmax
from autopallas.patterns.softmax_terms import Factor, Term
from autopallas.sites.elementwise import Axis, Constant

__all__ = ["CANCELS", "MASK_LOGITS", "WEIGHTED", "RowStatistics"]

_BOOLEAN = np.dtype(bool)
_STOP_GRADIENT = jax.make_jaxpr(lax.stop_gradient)(0.0).eqns[0].primitive


@dataclass(frozen=True, slots=True)
class _Summand:
    """``product of factors * sum over V of tile``; with ``label`` only the element there counts. No tile stands for
    ones."""

    factors: tuple[Expression, ...]
    tile: Expression | None
    label: Expression | None = None
    known: Expression | None = None
    """Value of the whole sum over V, where it is known."""


class _NotLinear(Exception):
    """Raised where a number per row that depends on the logits does not enter linearly."""


_MOST_SUMMANDS = 64
"""Most summands into which a reduction is taken apart: with more, it is a statistic as a whole."""
_DEEPEST = 64
"""Most operations on one path that are looked through."""
WEIGHTED = "the exponentials are weighted"
MASK_LOGITS = "Mask the logits with -inf, before the softmax, and weight the losses, not the exponentials."
ONE_HOT = "what the zeros of one-hot labels are multiplied with is finite"
"""Assumption about a contraction with a mask, which gives NaN where an infinity meets a zero."""
CANCELS = "the parts of a maximum's gradient, which cancel, are finite"
"""Assumption about a maximum that is subtracted before a softmax without stopping its gradient."""
DIVIDED = "what the zeros around a label's gradient are divided by is not zero, such as a probability that vanishes"
"""Assumption about the derivative of a logarithm that is taken of all probabilities, one of which is picked."""


class RowStatistics(Softmax):
    """Implements the algebra over one site's tile values.

    ``axis`` holds the labels of the vocabulary, ``rows`` those of rows that share a weight.
    """

    def __init__(self, scope: Scope, axis: tuple[Atom, ...], wide: Dtype, rows: tuple[Atom, ...] = ()):
        super().__init__(scope, axis, 0)
        self.wide, self.rows = wide, rows
        self.touches: Callable[[int], bool] = scope.depends
        """Tells whether a value is computed from the logits, or from a scatter that the site takes over."""
        self.result_of: Callable[[Ref], Expression | None] = lambda ref: None
        """Gives a number per row as a function of statistics, if an earlier reduction computes it."""
        self.cancelled: frozenset[int] = frozenset()
        """Values of the tile that are zero."""
        self.assumptions: dict[str, None] = {}
        """Assumptions about the logits, in words."""
        self.weighs = False
        """Whether exponentials are multiplied by something else than a mask before they are summed."""
        self._pure: dict[Hashable, bool] = {}
        self._elements: dict[Hashable, Expression] = {}

    # Numbers per row are not taken apart here.

    def linear(self, ref: Ref, depth: int = 0) -> list[Term]:
        number = self.scope.number(ref)
        if number is not None:
            return [Term(float(number), "constant", None)]
        return [Term(1.0, "value", self.space.canonical(ref))]

    def log(self, ref: Ref, depth: int = 0) -> list[Term]:
        number = self.scope.number(ref)
        if number is not None and number > 0:
            return [Term(math.log(number), "constant", None)]
        return [Term(1.0, "log", self.space.canonical(ref))]

    # ------------------------------------------------------------------ reductions

    def maximum(self, tile: Ref) -> Expression:
        """Reads a max over V. A rounding inside is moved outside, since it is monotone."""
        casts: list[Dtype] = []
        tile = self.space.canonical(tile)
        while len(casts) <= _DEEPEST and self.scope.name(tile) == "convert_element_type":
            operands = self.space.operands(tile)
            if not operands or not self.scope.depends(operands[0].value) or not self._rounds(tile, operands[0]):
                break
            if self._widens(tile, operands[0]) and self.scope.name(operands[0]) != "convert_element_type":
                break  # nothing is rounded, and what else reads the values reads these
            casts.append(self.scope.dtype(tile))
            tile = operands[0]
        stripped = self.strip(tile)
        greatest: Expression = Computed("max", stripped.x, self.wide)
        found = self._plus(greatest, stripped.rows)
        if stripped.under_mask:
            alone = self._plus(greatest, self._over_mask(stripped.rows, stripped.under_mask))
            found = Apply(lax.select_n_p, {}, (self._is_empty(greatest), found, alone), self.wide)
        for dtype in reversed(casts):
            found = self.convert(found, dtype)
        return found

    def total(self, tile: Ref) -> Expression:
        """Reads a sum over V."""
        counted = self._ties(tile)
        if counted is not None:
            return counted
        self._refuse_uncounted(tile)
        return self._sum_of(self._expand(self.space.canonical(tile))) or Computed("sum", tile, self.wide)

    def total_of_products(self, tile: Ref, other: Ref) -> Expression:
        """Reads a sum over V of the products of two tiles, each taken without rounding."""
        if any(not jnp.issubdtype(self.scope.dtype(t), jnp.floating) for t in (tile, other)):
            raise Mismatch("whole numbers that are computed from the logits are summed", advice=COUNT)
        a, b = self.space.canonical(tile), self.space.canonical(other)
        if self._is_mask(a) or self._is_mask(b):  # a mask that XLA selects with, where it multiplies elementwise
            self.assumptions[ONE_HOT] = None
        found = self._sum_of(self._multiplied(a, b, self.wide, 1))
        if found is None:
            factors = self.convert(a, self.wide), self.convert(b, self.wide)
            found = Computed("sum", self._multiply(*factors), self.wide)
        return found

    def _is_mask(self, ref: Ref) -> bool:
        """Returns whether a value is a mask as zeros and ones."""
        for _ in range(_DEEPEST):
            operands = self.space.operands(ref) if self.scope.name(ref) == "convert_element_type" else None
            if not operands:
                break
            ref = self.space.canonical(operands[0])
        return self.scope.dtype(ref) == _BOOLEAN

    def _sum_of(self, expanded: Iterator[_Summand]) -> Expression | None:
        """Returns the sum over V of some summands; None where a number per row does not enter linearly."""
        try:
            summands = list(islice(expanded, _MOST_SUMMANDS + 1))
        except _NotLinear:
            return None
        if len(summands) > _MOST_SUMMANDS:
            return None
        found: Expression | None = None
        for summand in summands:
            value = self._summand(summand)
            found = value if found is None else self._add(found, value)
        return found if found is not None else Constant(0.0, self.wide)

    def _refuse_uncounted(self, tile: Ref) -> None:
        """Refuses a sum of whole numbers, except a count that both its dtype and a kernel's dtype hold exactly."""
        ref = self.space.canonical(tile)
        dtype, operands = self.scope.dtype(ref), self.space.operands(ref)
        if rounds(dtype, dtype):
            return
        counts = bool(operands) and self.scope.name(ref) == "convert_element_type"
        counts = counts and self.scope.dtype((operands or [ref])[0]) == _BOOLEAN
        most = self.space.extent(self.axis)
        if not counts or not all(counts_exactly(d, most) for d in (dtype, self.wide)):
            raise Mismatch(f"whole numbers ({dtype}) that are computed from the logits are summed", advice=COUNT)

    def argmax(self, tile: Ref) -> Expression:
        """Reads an argmax, of the tile exactly as it stands, since rounding decides ties."""
        return Computed("argmax", tile, np.dtype(np.int32))

    def element(self, tile: Ref, pick: Pick, fill: float | None) -> Expression:
        """Reads the element of each row at a label."""
        dtype, label = self.scope.dtype(tile), pick.label
        if pick.mode != "fill":
            found = self._at(tile, label, "clipped_pick")
            if pick.mode == "clip":
                return found
            apart = Apply(_STOP_GRADIENT, {}, (found,), dtype)  # an element clipped after all has no gradient
            return Apply(lax.select_n_p, {}, (self._within(label), apart, found), dtype)
        found = self._at(tile, label)
        if fill is None:
            if not jnp.issubdtype(dtype, jnp.floating):
                raise Mismatch(
                    "whole numbers are picked from the logits",
                    advice="Pick from the logits themselves, before they are rounded or cast to whole numbers.",
                )
            fill = math.nan
        nothing = Constant(fill, dtype)
        return Apply(lax.select_n_p, {}, (self._within(label), nothing, self.convert(found, dtype)), dtype)

    def _ties(self, tile: Ref) -> Expression | None:
        """Returns how many elements of a row equal its maximum, if that is what the tile counts."""
        tile = self.space.canonical(tile)
        operands = self.space.operands(tile)
        if operands is None or self.scope.name(tile) != "convert_element_type":
            return None
        value = self.greatest(operands[0])
        if value is None or not counts_exactly(self.wide, self.space.extent(self.axis)):
            return None
        return Computed("ties", value, self.wide)

    def greatest(self, tile: Ref) -> Ref | None:
        """Returns the values that a tile compares with their maximum in the row, if it does that."""
        compared = self.space.operands(tile)
        if compared is None or self.scope.name(tile) != "eq":
            return None
        for value, greatest in (compared, compared[::-1]):
            if self.carries_axis(value) and not self.carries_axis(greatest):
                found = self.result_of(greatest)
                if isinstance(found, Computed) and found.kind == "max":
                    if self.scope.key(found.argument) == self.scope.key(value):
                        return value
        return None

    def is_rounded_otherwise(self, tile: Ref) -> bool:
        """Returns whether a tile compares 16-bit numbers with what the program makes of the maximum of others: what is
        made of the maximum is rounded fewer times than they are, so that none of them need be equal to it."""
        compared = self.space.operands(tile)
        if compared is None or self.scope.name(tile) != "eq":
            return False
        for value, greatest in (compared, compared[::-1]):
            if self.carries_axis(value) and not self.carries_axis(greatest) and self.scope.dtype(value).itemsize == 2:
                todo: list[Expression | None] = [self.result_of(greatest)]
                while todo:
                    made = todo.pop()
                    if isinstance(made, Computed) and made.kind == "max":
                        return True
                    if isinstance(made, Apply):
                        todo += made.arguments
        return False

    # ------------------------------------------------------------------ exponentials

    def _exponentials(self, tile: Ref) -> Expression:
        found = self.exponential(tile)
        found.weights = [self._as_mask(weight) for weight in found.weights]
        if any(w.kind not in ("where", "unless") for w in found.weights):
            raise Mismatch(WEIGHTED, advice=MASK_LOGITS)
        argument = found.argument
        self.assumptions |= dict.fromkeys(self.assumed(argument, found.weights))
        for weight in found.weights:
            dtype = self.scope.dtype(argument)
            nothing = Constant(-math.inf, dtype)
            cases = (nothing, argument) if weight.kind == "where" else (argument, nothing)
            argument = Apply(lax.select_n_p, {}, (weight.source, *cases), dtype)
        if self.leaves(argument):
            raise Mismatch("the exponent holds numbers per row that cannot be taken out", advice=LOSS_PER_ROW)
        greatest = Computed("max", argument, self.wide)
        finite = Apply(lax.is_finite_p, {}, (greatest,), _BOOLEAN)
        shift: Expression = Apply(lax.select_n_p, {}, (finite, Constant(0.0, self.wide), greatest), self.wide)
        exponent: Expression = Apply(_STOP_GRADIENT, {}, (shift,), self.wide)
        factors = [term for term in found.rows if term.kind == "log"]
        rows = [term for term in found.rows if term.kind != "log"]
        exponent = self._plus(exponent, rows)
        if found.under_mask or found.weights:  # in an empty row, the subtracted number may be infinite
            over: Sequence[Term] = () if found.weights else self._over_mask(rows, found.under_mask)
            alone = self._plus(Constant(0.0, self.wide), over)
            exponent = Apply(lax.select_n_p, {}, (self._is_empty(greatest), exponent, alone), self.wide)
        result = self._multiply(Computed("exp_sum", argument, self.wide), self._unary(lax.exp_p, exponent))
        for term in factors:
            if abs(term.coefficient) != 1:
                raise Mismatch("a factor of the exponentials enters with a power", advice=LOSS_PER_ROW)
            value = self.convert(term.value, self.wide)
            result = self._multiply(result, value) if term.coefficient == 1 else self._divide(result, value)
        return result

    def _as_mask(self, weight: Factor) -> Factor:
        """Returns a factor of zeros and ones, a boolean or ``1 - mask`` as numbers, as the mask that it is."""
        kinds: dict[str, Literal["where", "unless"]] = {"multiply": "where", "multiply by the rest": "unless"}
        kind, ref = str(weight.kind), self.space.canonical(weight.source)
        for _ in range(_DEEPEST if kind in kinds else 0):
            name, operands = self.scope.name(ref), self.space.operands(ref) or []
            if self.scope.dtype(ref) == _BOOLEAN:
                return replace(weight, kind=kinds[kind], source=ref)
            if name == "sub" and self.scope.number(operands[0]) == 1:
                kind = "multiply" if kind != "multiply" else "multiply by the rest"
                ref = operands[1]
            elif name == "convert_element_type":
                ref = operands[0]
            else:
                break
        return weight

    def _plus(self, expression: Expression, terms: Iterable[Term]) -> Expression:
        for term in terms:
            expression = self._add(expression, self._term(term))
        return expression

    def _over_mask(self, rows: Sequence[Term], under_mask: Iterable[Term]) -> list[Term]:
        """Returns the rows taken out over which no mask stood."""
        return self.combine([*rows, *(t.scaled(-1) for t in under_mask)])

    def _is_empty(self, greatest: Expression) -> Apply:
        """Tests whether a row holds nothing but -inf, given its maximum."""
        return Apply(lax.eq_p, {}, (greatest, Constant(-math.inf, self.wide)), _BOOLEAN)

    # ------------------------------------------------------------------ sums

    def _expand(self, tile: Ref, depth: int = 0) -> Iterator[_Summand]:
        """Yields summands of the tile in which numbers per row that depend on the logits are factors."""
        if depth > _DEEPEST:
            raise _NotLinear
        depth += 1
        tile = self.space.canonical(tile)
        if not self.carries_axis(tile):
            yield _Summand((tile,), None)
            return
        if tile.value in self.cancelled:
            return
        node = self.scope.node(tile)
        if self._is_placed(tile) and self._goes_to_rows(tile):
            yield self._placed(tile)
            return
        name, operands = self.scope.name(tile), self.space.operands(tile)
        has_mask = name == "mul" and any(
            self._as_mask(Factor("multiply", operand, False)).kind != "multiply" for operand in operands or ()
        )
        if has_mask or name in ("exp", "exp2", "select_n"):
            try:
                yield self._exponential_sum(tile)
                return
            except _NotLinear:
                pass
        if self.pure(tile):
            yield _Summand((), tile)
            return
        if operands is None or node is None:
            raise _NotLinear
        dtype = self.scope.dtype(tile)
        if name in ("add", "add_any"):
            for operand in operands:
                yield from self._expand(operand, depth)
        elif name == "sub":
            yield from self._expand(operands[0], depth)
            yield from (self._scaled(s, Constant(-1.0, self.wide)) for s in self._expand(operands[1], depth))
        elif name == "neg":
            yield from (self._scaled(s, Constant(-1.0, self.wide)) for s in self._expand(operands[0], depth))
        elif name == "convert_element_type" and self._rounds(tile, operands[0]):
            yield from self._expand(operands[0], depth)
        elif name == "mul":
            a, b = operands
            yield from self._multiplied(a, b, dtype, depth, tile)
        elif name == "div" and not self.carries_axis(operands[1]):
            one = Constant(1.0, self.wide)
            reciprocal = self._divide(one, self.convert(operands[1], self.wide))
            yield from (self._scaled(s, reciprocal) for s in self._expand(operands[0], depth))
        elif name == "div" and self._places(operands[0]):
            self.assumptions[DIVIDED] = None
            for s in self._expand(operands[0], depth):
                assert s.label is not None
                divisor = self.convert(self._at(operands[1], s.label), self.wide)
                yield self._scaled(s, self._divide(Constant(1.0, self.wide), divisor))
        elif name == "select_n" and len(operands) == 3 and self.pure(operands[0]):
            mask, *cases = operands
            zero, one = Constant(0.0, dtype), Constant(1.0, dtype)
            for position, case in enumerate(cases):
                for s in self._expand(case, depth):
                    if s.known is not None:
                        raise _NotLinear
                    inner: Expression = s.tile if s.tile is not None else one
                    infinite = [n for n in map(self._number, s.factors) if n is not None and not math.isfinite(n)]
                    if infinite:  # as a factor of an empty sum, it would be multiplied by 0
                        if s.tile is not None or len(s.factors) > 1:
                            raise _NotLinear
                        s, inner = replace(s, factors=()), Constant(infinite[0], dtype)
                    both = (inner, zero) if position == 0 else (zero, inner)
                    wide = self._wider(dtype, inner)
                    masked = Apply(lax.select_n_p, {}, (mask, *(self.convert(b, wide) for b in both)), wide)
                    if all(self._number(factor) is not None for factor in s.factors):
                        yield _Summand(s.factors, masked, s.label)
                    elif s.tile is None or isinstance(s.tile, Ref) and self._is_mask(s.tile):
                        yield self._of_those_counted(_Summand((), masked, s.label), s.factors)
                    else:
                        raise _NotLinear
        else:
            yield self._exponential_sum(tile)

    def _of_those_counted(self, counted: _Summand, factors: Sequence[Expression]) -> _Summand:
        """Multiplies numbers per row by how many elements of the row are chosen; 0, whatever the numbers, if none is
        chosen."""
        count = self._summand(counted)
        product = self._summand(replace(counted, factors=tuple(factors)))
        nothing = Apply(lax.eq_p, {}, (count, Constant(0.0, self.wide)), _BOOLEAN)
        value = Apply(lax.select_n_p, {}, (nothing, product, Constant(0.0, self.wide)), self.wide)
        return _Summand((), None, known=value)

    def _number(self, expression: Expression) -> float | None:
        if isinstance(expression, Constant):
            return float(expression.value)
        return self.scope.number(expression) if isinstance(expression, Ref) else None

    def _multiplied(self, a: Ref, b: Ref, dtype: Dtype, depth: int, product: Ref | None = None) -> Iterator[_Summand]:
        """Yields summands of the product of two tiles, as :meth:`_expand` does. ``product`` is the value that holds it,
        if any does."""
        if not self.carries_axis(b) or self.carries_axis(a) and self._places(a):
            a, b = b, a
        if not self.carries_axis(a):
            yield from (self._scaled(s, a) for s in self._expand(b, depth))
        elif self._places(b):
            self._assume_finite(a)
            for s in self._expand(b, depth):
                assert s.label is not None
                yield self._scaled(s, self._at(a, s.label))
        elif self.pure(a) or self.pure(b):
            a, b = (a, b) if self.pure(a) else (b, a)
            self.weighs |= self._has_exponential(b)
            yield from (self._times(s, a, dtype) for s in self._expand(b, depth))
        elif self._is_sparse(a) or self._is_sparse(b):
            a, b = (a, b) if self._is_sparse(a) else (b, a)
            self._assume_finite(b)
            for part in self._expand(a, depth):
                if part.label is not None:
                    yield self._scaled(part, self._at(b, part.label))
                else:
                    yield from (replace(s, factors=(*s.factors, *part.factors)) for s in self._expand(b, depth))
        elif product is not None:
            yield self._exponential_sum(product)
        else:
            raise _NotLinear

    def _exponential_sum(self, tile: Ref) -> _Summand:
        if not self._has_exponential(tile):
            raise _NotLinear
        try:
            return _Summand((), None, known=self._exponentials(tile))
        except Mismatch:
            raise _NotLinear from None

    def _places(self, tile: Ref, depth: int = 0) -> bool:
        """Returns whether a tile value is a scatter of one element per row, apart from factors."""
        if depth > _DEEPEST:
            return False
        return self.remembered("places", self.space.canonical(tile), lambda: self._scatters(tile, depth + 1))

    def _assume_finite(self, tile: Ref) -> None:
        """Assumes that what zeros are multiplied with is finite, unless it is an exponential, times numbers per row."""
        for _ in range(_DEEPEST):
            tile = self.space.canonical(tile)
            name, operands = self.scope.name(tile), self.space.operands(tile)
            if name in ("exp", "exp2"):
                return
            varying = [o for o in operands or () if self.carries_axis(o)]
            if name not in ("mul", "div", "neg", "convert_element_type") or len(varying) != 1:
                break
            (tile,) = varying
        self.assumptions[ONE_HOT] = None

    def _is_sparse(self, tile: Ref, depth: int = 0) -> bool:
        """Returns whether a tile value is a sum of scatters of one element per row and of numbers per row."""
        if depth > _DEEPEST:
            return False
        return self.remembered("sparse", self.space.canonical(tile), lambda: self._adds_few(tile, depth + 1))

    def _adds_few(self, tile: Ref, depth: int) -> bool:
        tile = self.space.canonical(tile)
        if not self.carries_axis(tile) or self._places(tile):
            return True
        name, operands = self.scope.name(tile), self.space.operands(tile)
        if operands is None:
            return False
        if name in ("mul", "div") and not self.carries_axis(operands[1]):
            return self._is_sparse(operands[0], depth)
        if name == "mul" and not self.carries_axis(operands[0]):
            return self._is_sparse(operands[1], depth)
        linear = name in ("add", "add_any", "sub", "neg", "convert_element_type")
        return linear and all(self._is_sparse(operand, depth) for operand in operands)

    def _scatters(self, tile: Ref, depth: int) -> bool:
        tile = self.space.canonical(tile)
        name, operands = self.scope.name(tile), self.space.operands(tile)
        if self._is_placed(tile):
            return self._goes_to_rows(tile)
        if operands is None or not self.carries_axis(tile):
            return False
        if name in ("neg", "convert_element_type"):
            return self._places(operands[0], depth)
        if name in ("mul", "div"):
            return self._places(operands[0], depth) or name == "mul" and self._places(operands[1], depth)
        return False

    def _placed(self, tile: Ref) -> _Summand:
        pick, updates = self.updates(tile)
        return _Summand((updates,), None, self._label(pick))

    def _label(self, pick: Pick) -> Expression:
        if pick.mode != "clip":
            return pick.label
        label = self._countable(pick.label, pick.along)
        own = self.scope.dtype(label)
        last = Constant(self._extent(pick.along) - 1, own)
        return Apply(lax.clamp_p, {}, (Constant(0, own), label, last), own)

    def _extent(self, along: Axis) -> int:
        return self.space.extent(self.axis if along == "key" else self.rows)

    def _countable(self, label: Expression, along: Axis = "key") -> Expression:
        """Casts a label whose own type is too narrow for all positions to one that holds them."""
        own = self.scope.dtype(label)
        return label if counts_exactly(own, self._extent(along)) else self.convert(label, np.dtype(np.int32))

    def _picked(self, tile: Expression, label: Expression, kind: str = "pick") -> Expression:
        """Picks the element of a program at a label; gives 0 where the label is out of range."""
        if isinstance(label, Ref):
            return Computed(kind, tile, self.wide, label)
        dtype = self.scope.dtype(tile)
        cases = Constant(0.0, dtype), tile
        return Computed("sum", Apply(lax.select_n_p, {}, (self._here(label), *cases), dtype), self.wide)

    def _here(self, label: Expression, along: Axis = "key") -> Expression:
        """Marks the position of a label in the tile."""
        label = self._countable(label, along)
        return Apply(lax.eq_p, {}, (Position(along, self.scope.dtype(label)), label), _BOOLEAN)

    def updates(self, tile: Ref) -> tuple[Pick, Ref]:
        """Reads a scatter of one element per row, or per column: the pick of its positions, and the elements."""
        node = self.scope.node(tile)
        assert node is not None
        try:
            pick = placed(self.scope, tile, node, self.axis)
        except Mismatch as mismatch:
            try:
                pick = replace(placed(self.scope, tile, node, self.rows), along="query")
            except Mismatch:
                raise mismatch from None
        return pick, Ref(node.inputs[2], pick.view)

    def spread(self, tile: Ref) -> Expression:
        """Writes a scatter of one element per row, or per column, as an elementwise expression."""
        pick, updates = self.updates(tile)
        dtype = self.scope.dtype(tile)
        here = self._here(self._label(pick), pick.along)
        return Apply(lax.select_n_p, {}, (here, Constant(0.0, dtype), updates), dtype)

    def _is_tile(self, ref: Ref) -> bool:
        return self.carries_axis(ref) and self._varies_over_rows(ref)

    def _is_placed(self, tile: Ref) -> bool:
        """Returns whether a tile value is a scatter that the site takes over; any other is an array that it reads."""
        return self.scope.name(tile) == "scatter-add" and self.touches(tile.value)

    def _goes_to_rows(self, scatter: Ref) -> bool:
        """Returns whether a scatter puts one element in each row."""
        return self._is_tile(scatter) and self.updates(scatter)[0].along == "key"

    def _scaled(self, summand: _Summand, factor: Expression) -> _Summand:
        return replace(summand, factors=(*summand.factors, factor))

    def _wider(self, dtype: Dtype, tile: Expression) -> Dtype:
        """Returns the dtype in which a tile is combined with others of ``dtype``.

        Where a cast after a taken-out row number was left out, the tile is wider than the program's, and its numbers
        are larger.
        """
        return np.dtype(jnp.promote_types(dtype, self.scope.dtype(tile)))

    def _times(self, summand: _Summand, tile: Ref, dtype: Dtype) -> _Summand:
        if summand.known is not None:
            raise _NotLinear
        if summand.tile is None:
            return _Summand(summand.factors, tile, summand.label)
        wide = self._wider(dtype, summand.tile)
        factors = self.convert(tile, wide), self.convert(summand.tile, wide)
        product = Apply(lax.mul_p, compat.multiplication_params(), factors, wide)
        return _Summand(summand.factors, product, summand.label)

    def _summand(self, summand: _Summand) -> Expression:
        found: Expression
        if summand.known is not None:
            found = summand.known
        elif summand.label is not None:
            if summand.tile is not None:
                found = self.convert(self._picked(summand.tile, summand.label), self.wide)
            else:
                found = self.convert(self._within(summand.label), self.wide)
        elif summand.tile is not None:
            found = Computed("sum", summand.tile, self.wide)
        else:
            found = Constant(float(self.space.extent(self.axis)), self.wide)
        for factor in summand.factors:
            found = self._multiply(found, self.convert(factor, self.wide))
        return found

    # ------------------------------------------------------------------ picked elements

    def _at(self, tile: Ref, label: Expression, kind: str = "pick", depth: int = 0) -> Expression:
        """Reads the tile at a label: what depends on numbers per row is computed from the element itself."""
        tile = self.space.canonical(tile)
        if not self.carries_axis(tile):
            return tile
        key = self.scope.key(tile), self.scope.key(label), kind
        if key not in self._elements:
            self._elements[key] = self._element(tile, label, kind, depth)
        return self._elements[key]

    def _element(self, tile: Ref, label: Expression, kind: str, depth: int) -> Expression:
        dtype = self.scope.dtype(tile)
        if self.pure(tile):
            return self.convert(self._picked(tile, label, kind), dtype)
        node, operands = self.scope.node(tile), self.space.operands(tile)
        if node is None or operands is None or depth > _DEEPEST:
            raise Mismatch(f"the logits pass through {self.scope.name(tile)}", advice=BETWEEN_LOGITS)
        arguments = tuple(self._at(operand, label, kind, depth + 1) for operand in operands)
        if node.name == "dot_general":
            arguments = tuple(self.convert(a, dtype) for a in arguments)
            return Apply(lax.mul_p, compat.multiplication_params(), arguments, dtype)
        return Apply(*operation(node), arguments, dtype)

    def _within(self, label: Expression) -> Expression:
        label = self._countable(label)
        own = self.scope.dtype(label)
        at_least = Apply(lax.ge_p, {}, (label, Constant(0, own)), _BOOLEAN)
        below = Apply(lax.lt_p, {}, (label, Constant(self.space.extent(self.axis), own)), _BOOLEAN)
        return Apply(lax.and_p, {}, (at_least, below), _BOOLEAN)

    # ------------------------------------------------------------------ numbers per row inside a tile

    def pure(self, tile: Ref) -> bool:
        """Returns whether a tile value needs neither a scatter nor a number per row that depends on the logits."""
        tile = self.space.canonical(tile)
        key = self.scope.key(tile)
        if key not in self._pure:
            self._pure[key] = not self.leaves(tile, stop=True)
        return self._pure[key]

    def of_column(self, ref: Ref) -> bool:
        """Returns whether a value is computed from the logits, and is one number per column."""
        return self.touches(ref.value) and self.carries_axis(ref) and not self._varies_over_rows(ref)

    def _varies_over_rows(self, ref: Ref) -> bool:
        rows = self.space.resolve(self.rows)
        return not rows or not self.space.atoms(ref).isdisjoint(rows)

    def leaves(self, tile: Expression, stop: bool = False) -> list[Ref]:
        """Returns the numbers per row, or per column, inside a tile value that depend on the logits.

        With ``stop``, one is enough, a scatter counts, and columns do not: their numbers are at hand before a pass over
        rows.
        """
        found: dict[Hashable, Ref] = {}
        seen: set[Hashable] = set()
        todo: list[Expression] = [tile]
        while todo and not (stop and found):
            expression = todo.pop()
            match expression:
                case Apply():
                    todo += expression.arguments
                case Ref():
                    ref = self.space.canonical(expression)
                    key = self.scope.key(ref)
                    if key in seen or self.scope.is_score(ref.value) or ref.value in self.cancelled:
                        continue
                    seen.add(key)
                    if self._is_placed(ref) and self._is_tile(ref):
                        pick, updates = self.updates(ref)
                        if stop and pick.along == "key":
                            found[key] = ref
                        else:
                            todo += [pick.label, updates]
                    elif self.touches(ref.value):
                        if not self.carries_axis(ref):
                            found[key] = ref
                        elif self.of_column(ref):
                            if not stop:
                                found[key] = ref
                        else:
                            operands = self.space.operands(ref)
                            if operands is None:
                                raise Mismatch(f"the logits pass through {self.scope.name(ref)}", advice=BETWEEN_LOGITS)
                            todo += operands
        return list(found.values())

    # ------------------------------------------------------------------ arithmetic on numbers per row

    def _term(self, term: Term) -> Expression:
        if term.kind == "constant":
            return Constant(term.coefficient, self.wide)
        value = self.convert(term.value, self.wide)
        return value if term.coefficient == 1 else self._multiply(Constant(term.coefficient, self.wide), value)

    def _unary(self, primitive: Primitive, x: Expression) -> Expression:
        return Apply(primitive, {"accuracy": None}, (x,), self.wide)

    def _add(self, a: Expression, b: Expression) -> Expression:
        return Apply(lax.add_p, {}, (a, b), self.wide)

    def _multiply(self, a: Expression, b: Expression) -> Expression:
        return Apply(lax.mul_p, compat.multiplication_params(), (a, b), self.wide)

    def _divide(self, a: Expression, b: Expression) -> Expression:
        return Apply(lax.div_p, {}, (a, b), self.wide)
