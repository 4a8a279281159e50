"""Reads each factor of scores: a mask, a number, an array of one step, or an exponential or a power that decays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autopallas.graph import Ref
from autopallas.numerics.casts import exponential_underflows_below, is_floating
from autopallas.patterns.linear_attention.captured import captured_decay
from autopallas.patterns.linear_attention.exponents import DEEPEST, ExponentReader, Sum, Term
from autopallas.patterns.linear_attention.masks import Seen
from autopallas.patterns.linear_attention.steps import BothSteps, Unread

__all__ = ["Factor", "FactorReader", "OwnFactor", "Product"]


class Factor(NamedTuple):
    """What scores are multiplied by, or divided; or a mask with which they are selected, where ``kept`` is not None:
    whether they are kept where it is true."""

    ref: Ref
    kept: bool | None = None
    divides: bool = False


class OwnFactor(NamedTuple):
    """An array by which scores are multiplied, or divided, and which varies with one of both steps at most."""

    ref: Ref
    divides: bool = False


class Product(NamedTuple):
    """A factor: ``number * exp(terms)`` times ``arrays``, 0 for pairs of steps that one of ``seen`` lacks, and anything
    for those that one of ``hidden`` lacks."""

    terms: tuple[Term, ...] = ()
    number: float = 1.0
    seen: tuple[Seen, ...] = ()
    hidden: tuple[Seen, ...] = ()
    arrays: tuple[OwnFactor, ...] = ()

    def times(self, other: Product) -> Product:
        return Product(
            self.terms + other.terms,
            self.number * other.number,
            self.seen + other.seen,
            self.hidden + other.hidden,
            self.arrays + other.arrays,
        )


class FactorReader:
    """Reads factors of scores.

    Attributes:
      steps: the steps between which they are.
      decays_alone: whether exponentials are read as decays, also those that vary with one of both steps.
    """

    def __init__(self, steps: BothSteps):
        self.steps = steps
        self.masks, self.scope, self.space, self.graph = steps.masks, steps.scope, steps.space, steps.graph
        self.decays_alone = True
        self._exponents = ExponentReader(steps)

    def product(self, factors: Sequence[Factor]) -> Product:
        """Returns several factors together."""
        product = Product()
        for factor in factors:
            if factor.divides:
                product = product.times(self.divisor(factor.ref))
            elif factor.kept is None:
                product = product.times(self.factor(factor.ref))
            else:
                product = product.times(Product(seen=(self.steps.mask(factor.ref, factor.kept),)))
        return product

    def factor(self, ref: Ref, depth: int = 0) -> Product:
        """Returns what a value is as a factor: of one that varies with one of both steps at most, a decay, or an array
        as it is."""
        if not self._is_array(ref):
            return self._factor(ref, depth)
        own = Product(arrays=(OwnFactor(self._nearest(ref)),))
        if not self.decays_alone:
            return own
        try:
            found = self._factor(ref, depth)
        except Unread:
            return own
        return own if found.arrays and not found.terms else found

    def _nearest(self, ref: Ref) -> Ref:
        """Returns the last of the values that hold an array as the scores are multiplied by it, repeated along no axis:
        the program has its cotangent by itself, while those of values further back may be added up."""
        atoms = self.space.atoms(self.space.canonical(ref))
        held = (at for use in self.space.met(ref) for at in self.space.chain(use) if self.space.atoms(at) == atoms)
        return max(held, key=lambda at: at.value, default=ref)

    def _is_array(self, ref: Ref) -> bool:
        """Returns whether a value is no number, and varies with one of both steps at most."""
        floating = is_floating(self.graph.dtype(ref.value))
        return floating and self.scope.number(ref) is None and len(self.steps.roles(self.space.canonical(ref))) < 2

    def divisor(self, ref: Ref) -> Product:
        """Returns what scores are multiplied by that are divided by an array."""
        if not self._is_array(ref):
            raise Unread("they are divided by an array of pairs of steps")
        return Product(arrays=(OwnFactor(self._nearest(ref), True),))

    def _factor(self, ref: Ref, depth: int) -> Product:
        ref = self.space.canonical(ref)
        number = self.scope.number(ref)
        if number is not None:
            if not math.isfinite(number) or number == 0:
                raise Unread("a factor is zero or not finite")
            return Product(number=float(number))
        if depth > DEEPEST:
            raise Unread("their decays are computed in too many steps")
        if self.masks.mask(ref) is not None:
            return Product(seen=(self.steps.mask(ref),))
        name, operands = self.scope.name(ref), self.space.operands(ref)
        if name is None:
            return self._captured(ref)
        if operands is None or not is_floating(self.graph.dtype(ref.value)):
            raise Unread(self.steps.described(ref))
        further = depth + 1
        match name:
            case "convert_element_type" if self.steps.keeps_numbers(operands[0], ref):
                return self.factor(operands[0], further)
            case "mul":
                return self.factor(operands[0], further).times(self.factor(operands[1], further))
            case "neg":
                found = self.factor(operands[0], further)
                return found._replace(number=-found.number)
            case "div" if (number := self.scope.number(operands[1])) is not None and number != 0:
                found = self.factor(operands[0], further)
                return found._replace(number=found.number / number)
            case "div" if self._is_array(operands[1]):
                return self.factor(operands[0], further).times(self.divisor(operands[1]))
            case "select_n" if len(operands) == 3:
                return self._selected(operands, further)
            case "exp" | "exp2":
                exponent = self._exponents.exponent(operands[0], further)
                return self._exponential(exponent if name == "exp" else exponent.times(math.log(2)), ref)
            case "pow":
                return self._power(operands[0], operands[1], ref, further)
            case _:
                raise Unread(self.steps.described(ref))

    def _selected(self, operands: Sequence[Ref], depth: int) -> Product:
        """Returns a selection between a factor and a number."""
        for kept, filled in ((2, 1), (1, 2)):
            fill = self.scope.number(operands[filled])
            if fill is None or math.isnan(fill):
                continue
            if kept == 1 and self._tells_what_is_not_finite(operands[0], operands[1], float(fill)):
                return self.factor(operands[1], depth)
            seen = (self.steps.mask(operands[0], kept == 2),)
            found = self.factor(operands[kept], depth)
            return found.times(Product(seen=seen) if fill == 0 else Product(hidden=seen))
        raise Unread("they are selected by something else than a causal mask")

    def _tells_what_is_not_finite(self, ref: Ref, given: Ref, fill: float) -> bool:
        """Returns whether a value tells where another one is no number, in whose place is 0 then, or infinite."""
        ref = self.space.canonical(ref)
        operands = self.space.operands(ref) if self.scope.name(ref) in ("ne", "eq") else None
        if operands is None or not any(self.space.same(x, self.space.canonical(given)) for x in operands):
            return False
        if self.scope.name(ref) == "ne":
            return fill == 0 and self.space.same(*operands)
        numbers = [self.scope.number(x) for x in operands]
        return any(x is not None and math.isinf(x) for x in numbers)

    def _exponential(self, found: Sum, ref: Ref) -> Product:
        """Returns the exponential of a sum."""
        seen, hidden = [], []
        least = exponential_underflows_below(self.graph.dtype(ref.value))
        for mask, fill in found.masks:
            if fill < least:
                seen.append(mask)
            elif fill < -least or math.isnan(fill):
                hidden.append(mask)
            else:
                raise Unread("decays of hidden steps are not finite")
        if abs(found.number) > 80:
            raise Unread("a factor is zero or not finite")
        return Product(found.terms, math.exp(found.number), tuple(seen), tuple(hidden))

    def _power(self, base: Ref, exponent: Ref, ref: Ref, depth: int) -> Product:
        """Returns a power whose exponent is a distance between the steps."""
        found = self._exponents.exponent(exponent, depth)
        if self.steps.roles(base) or not all(term.counts for term in found.terms):
            raise Unread("a decay is raised to something else than the number of steps between t and s")
        if any(not math.isfinite(fill) for _, fill in found.masks):
            raise Unread("decays of hidden steps are not finite")
        hidden = tuple(seen for seen, _ in found.masks)
        number = self.scope.number(base)
        if number is not None:
            if not 0 < number < math.inf:
                raise Unread("a decay is not positive")
            scaled = found._replace(masks=()).times(math.log(number))
            return self._exponential(scaled, ref)._replace(hidden=hidden)
        if found.number or not is_floating(self.graph.dtype(base.value)):
            raise Unread("a decay is raised to the number of steps between t and s and a further number")
        terms = tuple(replace(term, array=base, base=True) for term in found.terms)
        return Product(terms, hidden=hidden)

    def _captured(self, ref: Ref) -> Product:
        """Returns what an array that is part of the program's text is."""
        found = captured_decay(self.masks, ref, self.space.resolve(self.steps.steps))
        if found is None:
            raise Unread(
                "they are multiplied by an argument, or by a captured array that is no mask and no power of one decay"
            )
        return Product((Term("captured", found.rate, array=found.ref, rounding=found.rounding),), seen=(found.seen,))
