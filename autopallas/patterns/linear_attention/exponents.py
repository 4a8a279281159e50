"""Reads exponents of decays: sums that are linear in the positions t and s, or in a sequence at t and at s."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from autopallas.graph import Ref
from autopallas.graph.labels import View
from autopallas.numerics.casts import counts_exactly, is_floating, kind_of
from autopallas.patterns.linear_attention.captured import captured_difference
from autopallas.patterns.linear_attention.masks import Seen
from autopallas.patterns.linear_attention.steps import BothSteps, Role, Unread

__all__ = ["DEEPEST", "ExponentReader", "Sum", "Term", "added"]

DEEPEST = 24
"""Longest chain of elementwise equations that is looked at."""
_MOST = 256
"""Most terms of an exponent."""


@dataclass(frozen=True, slots=True)
class Term:
    """A term of an exponent.

    Attributes:
      kind: "position", that of t or s; "distance" between both; "later", the distance where t is the later one, or s,
        and else 0; "array", a sequence at t or s; "segment", the sum of a sequence after the one up to the other, which
        is t or s; "captured", the logarithm of a captured array.
      coefficient: a number by which it is multiplied.
      role: which of both steps it is about.
      offset: a number that is added to a position.
      array: by which a position is multiplied, or the sequence.
      base: whether the logarithm of the array is meant.
      rounding: the relative error of a captured array.
    """

    kind: Literal["position", "distance", "later", "array", "segment", "captured"]
    coefficient: float
    role: Role = ""
    offset: float = 0.0
    array: Ref | None = None
    base: bool = False
    rounding: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it consists of positions alone."""
        return self.kind in ("position", "distance", "later") and self.array is None


class Sum(NamedTuple):
    """An exponent.

    Attributes:
      terms: they add up to it, with ``number``.
      number: a number that is added.
      masks: which pairs of steps it is the sum for, and the number that stands in the place of the others.
    """

    terms: tuple[Term, ...] = ()
    number: float = 0.0
    masks: tuple[tuple[Seen, float], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it consists of positions alone, each a whole number of times, and of whole numbers: a cast to another
        type that holds these keeps it."""
        numbers = [self.number, *(fill for _, fill in self.masks)]
        numbers += [number for term in self.terms for number in (term.coefficient, term.offset)]
        return all(term.counts for term in self.terms) and all(number.is_integer() for number in numbers)

    def plus(self, other: Sum) -> Sum:
        if len(self.terms) + len(other.terms) > _MOST:
            raise Unread("their decays are sums of too many terms")
        masks = self._filled_beside(other) + other._filled_beside(self)
        return Sum(self.terms + other.terms, self.number + other.number, masks)

    def _filled_beside(self, other: Sum) -> tuple[tuple[Seen, float], ...]:
        """Returns the masks where something is added to what stands in the place of hidden pairs."""
        known = not other.terms and not other.number and not other.masks
        return tuple((seen, fill if known or math.isinf(fill) else math.nan) for seen, fill in self.masks)

    def times(self, number: float) -> Sum:
        terms = tuple(replace(term, coefficient=term.coefficient * number) for term in self.terms)
        return Sum(terms, self.number * number, tuple((seen, fill * number) for seen, fill in self.masks))


class ExponentReader:
    """Reads values as exponents."""

    def __init__(self, steps: BothSteps):
        self.steps = steps
        self.masks, self.scope, self.space, self.graph = steps.masks, steps.scope, steps.space, steps.graph
        self._known: dict[tuple[int, View], Sum | Unread] = {}

    def exponent(self, ref: Ref, depth: int = 0) -> Sum:
        """Returns what a value is as an exponent; each is read once."""
        ref = self.space.canonical(ref)
        key = ref.value, self.space.view(ref.view)
        if key not in self._known:
            try:
                self._known[key] = self._exponent(ref, depth)
            except Unread as unread:
                self._known[key] = unread
        found = self._known[key]
        if isinstance(found, Unread):
            raise found
        return found

    def _exponent(self, ref: Ref, depth: int) -> Sum:
        space = self.space
        number, dtype = self.scope.number(ref), self.graph.dtype(ref.value)
        if number is not None:
            if not math.isfinite(number):
                raise Unread("an exponent is not finite")
            return Sum(number=float(number))
        if depth > DEEPEST:
            raise Unread("their decays are computed in too many steps")
        position = self.masks.position(ref)
        if position is not None and space.resolve(position[0]) in (self.steps.keys, space.resolve(self.steps.steps)):
            return Sum((Term("position", 1.0, self.steps.role_of(position[0]), float(position[1])),))
        name, operands = self.scope.name(ref), space.operands(ref)
        roles, further = self.steps.roles(ref), depth + 1
        if name is None and len(roles) == 2:
            difference = captured_difference(self.masks, ref, space.resolve(self.steps.steps))
            if difference is None:
                raise Unread(self.steps.described(ref))
            return Sum((Term("position", difference, "t"), Term("position", -difference, "s")))
        if operands is not None and kind_of(dtype) != "u":
            found = self._computed(name, operands, ref, further)
            if found is not None:
                return found
        if name == "cumsum" and len(roles) == 2:
            return self._segments(ref)
        if len(roles) == 2 or not is_floating(dtype):
            raise Unread(self.steps.described(ref))
        (role,) = roles or {""}
        return Sum((Term("array", 1.0, role, array=ref),))

    def _computed(self, name: str | None, operands: Sequence[Ref], ref: Ref, depth: int) -> Sum | None:
        """Returns the exponent that an elementwise equation computes; None where it is to be taken as an array."""
        mixed, dtype = len(self.steps.roles(ref)) == 2, self.graph.dtype(ref.value)
        found: Sum | None = None
        if name == "mul":
            found = self._multiple(operands, mixed, depth)
        elif name == "div" and is_floating(dtype):
            number = self.scope.number(operands[1])
            if number and (mixed or self._counts(operands[0], depth)):
                found = self.exponent(operands[0], depth).times(1 / number)
        elif name == "neg":
            found = self.exponent(operands[0], depth).times(-1.0)
        elif name == "convert_element_type" and (mixed or self._counts(operands[0], depth)):
            found = self.exponent(operands[0], depth)
            if not self.steps.keeps_numbers(operands[0], ref) and not found.is_whole:
                raise Unread(self.steps.described(ref))
        elif mixed and name in ("add", "sub", "add_any"):
            first, second = (self.exponent(x, depth) for x in operands)
            found = first.plus(second if name != "sub" else second.times(-1.0))
        elif mixed and name == "abs":
            found = self._distance(self.exponent(operands[0], depth))
        elif mixed and name == "max":
            found = self._not_negative(operands, depth)
        elif mixed and name == "select_n" and len(operands) == 3:
            found = self._chosen(operands, depth)
        if found is not None and found.terms and all(term.counts for term in found.terms):
            most = max(abs(term.coefficient) for term in found.terms)
            if most == int(most) and not counts_exactly(dtype, int(most * 4 * self.steps.count + abs(found.number))):
                raise Unread(f"positions are counted in {dtype}")
        return found

    def _counts(self, ref: Ref, depth: int) -> bool:
        """Returns whether a value that varies with one of both steps consists of positions."""
        if depth > DEEPEST:
            return False
        try:
            return any(term.kind == "position" for term in self.exponent(ref, depth).terms)
        except Unread:
            return False

    def _multiple(self, operands: Sequence[Ref], mixed: bool, depth: int) -> Sum | None:
        """Returns a sum times a number, or positions times an array that is the same in all steps."""
        for x, other in (operands, operands[::-1]):
            if not mixed and not self._counts(x, depth):
                continue
            number = self.scope.number(other)
            if number is not None:
                if not math.isfinite(number) or number == 0:
                    raise Unread("an exponent is zero or not finite")
                return self.exponent(x, depth).times(float(number))
            if not self.steps.roles(other) and is_floating(self.graph.dtype(other.value)):
                found = self.exponent(x, depth)
                if not all(term.counts for term in found.terms) or any(not math.isfinite(f) for _, f in found.masks):
                    raise Unread("a sum over steps is multiplied by an array")
                if found.number:
                    raise Unread("an array times a further number is added to their exponents")
                masks = tuple((seen, math.nan if fill else 0.0) for seen, fill in found.masks)
                return Sum(tuple(replace(term, array=other) for term in found.terms), masks=masks)
        if mixed:
            raise Unread("the rates of decays vary with the steps they are multiplied by")
        return None

    def _distance(self, found: Sum) -> Sum:
        difference = self._difference(found)
        if difference is None or found.masks:
            raise Unread("an absolute value of something else than t - s is taken")
        return Sum((Term("distance", abs(difference)),))

    def _not_negative(self, operands: Sequence[Ref], depth: int) -> Sum:
        for x, other in (operands, operands[::-1]):
            if self.scope.number(other) == 0:
                found = self.exponent(x, depth)
                difference = self._difference(found)
                if difference is not None and not found.masks:
                    return Sum((Term("later", abs(difference), "t" if difference > 0 else "s"),))
        raise Unread("a maximum of something else than t - s and 0 is taken")

    def _difference(self, found: Sum) -> float | None:
        """Returns c of a sum that is c times t - s; None of another one."""
        if found.number or not all(term.kind == "position" and term.array is None for term in found.terms):
            return None
        of_t, of_s, offset = added(found.terms)
        return of_t if of_t == -of_s and of_t != 0 and offset == 0 else None

    def _chosen(self, operands: Sequence[Ref], depth: int) -> Sum:
        """Returns a selection between a sum and a number."""
        for kept, filled in ((2, 1), (1, 2)):
            fill = self.scope.number(operands[filled])
            if fill is None or math.isnan(fill):
                continue
            seen = self.steps.mask(operands[0], kept == 2)
            found = self.exponent(operands[kept], depth)
            return found._replace(masks=(*found.masks, (seen, float(fill))))
        raise Unread("exponents are selected by something else than a causal mask")

    def _segments(self, ref: Ref) -> Sum:
        """Returns the sums over the steps after one up to another: running sums of what a strict mask leaves."""
        node = self.graph.definitions[ref.value]
        axis = int(node.params["axis"])
        start, summed = ref.view[axis]
        if start or bool(node.params["reverse"]) or self.space.extent(summed) != self.graph.shape(ref.value)[axis]:
            raise Unread("running sums from the last step on are taken of decays")
        role = self.steps.role_of(summed)
        masked = self.space.canonical(Ref(node.inputs[0], ref.view))
        operands = self.space.operands(masked) if self.scope.name(masked) in ("select_n", "mul") else None
        choices: list[tuple[Ref, Ref, bool]] = []
        if operands is not None and len(operands) == 2:
            pairs = (operands, operands[::-1])
            choices = [(given, mask, True) for given, mask in pairs if self.masks.mask(mask) is not None]
        elif operands is not None:
            places = ((2, 1), (1, 2))
            choices = [(operands[k], operands[0], k == 2) for k, f in places if self.scope.number(operands[f]) == 0]
        for given, mask, kept in choices:
            seen, own = self.steps.mask(mask, kept), self.steps.roles(given)
            if seen != (Seen(False, -1) if role == "t" else Seen(True, 1)):
                raise Unread("running sums of decays have other steps than those after s up to t")
            if own <= {role}:
                return Sum((Term("segment", 1.0, role, array=given),))
        raise Unread("running sums are taken of something else than masked logarithms of decays")


def added(terms: Iterable[Term]) -> tuple[float, float, float]:
    """Returns how often positions t and s are in a sum, and what is added to them."""
    found = {"t": 0.0, "s": 0.0, "": 0.0}
    offset = 0.0
    for term in terms:
        found[term.role] += term.coefficient
        offset += term.coefficient * term.offset
    return found["t"], found["s"], offset
