"""Reads what scores are multiplied by: a causal mask, numbers, and decays between the steps.

A decay is the exponential of a sum that is linear in the positions t and s, or in a sequence at t and at s; both with
opposite signs, so that only the steps between them count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from autopallas.graph import Ref
from autopallas.graph.labels import Atom, View
from autopallas.kernels.linear_attention.operation import DecayForm
from autopallas.numerics.casts import (
    counts_exactly,
    exponential_underflows_below,
    is_floating,
    keeps_range,
    kind_of,
    rounds,
)
from autopallas.patterns.expressions import Scope
from autopallas.patterns.linear_attention.captured import captured_decay, captured_difference, captured_steps
from autopallas.patterns.linear_attention.masks import COMPARISONS, MaskReader, Seen, Triangle

__all__ = ["Factor", "OwnFactor", "Unread", "Weights", "read_weights"]

_DEEPEST = 24
"""Longest chain of elementwise equations that is looked at."""
_MOST = 256
"""Most values that are looked at to find a mask, and most terms of an exponent."""
_Role: TypeAlias = Literal["t", "s", ""]


class Unread(Exception):
    """A factor of scores is no mask, number or decay.

    Attributes:
      reason: what it is instead, in words; empty where nothing resembles a decay.
    """

    def __init__(self, reason: str = ""):
        super().__init__(reason)
        self.reason = reason


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


class Weights(NamedTuple):
    """Everything that scores are multiplied by.

    Attributes:
      seen: which pairs of steps are left.
      steps: the labels of the steps t.
      factor: a number.
      form, rate: how scores decay, as the operation's spec has it.
      decay: the array that tells the decays, under the labels of t where it varies with the steps.
      rounding: the relative error with which it holds them, where it is a captured one.
      of_t, of_s: arrays that vary with one of both steps at most.
    """

    seen: Seen
    steps: tuple[Atom, ...]
    factor: float = 1.0
    form: DecayForm | None = None
    rate: float = 1.0
    decay: Ref | None = None
    rounding: float = 0.0
    of_t: OwnFactor | None = None
    of_s: OwnFactor | None = None


@dataclass(frozen=True, slots=True)
class _Term:
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
    role: _Role = ""
    offset: float = 0.0
    array: Ref | None = None
    base: bool = False
    rounding: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it consists of positions alone."""
        return self.kind in ("position", "distance", "later") and self.array is None


class _Sum(NamedTuple):
    """An exponent.

    Attributes:
      terms: they add up to it, with ``number``.
      number: a number that is added.
      masks: which pairs of steps it is the sum for, and the number that stands in the place of the others.
    """

    terms: tuple[_Term, ...] = ()
    number: float = 0.0
    masks: tuple[tuple[Seen, float], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it consists of positions alone, each a whole number of times, and of whole numbers: a cast to another
        type that holds these keeps it."""
        numbers = [self.number, *(fill for _, fill in self.masks)]
        numbers += [number for term in self.terms for number in (term.coefficient, term.offset)]
        return all(term.counts for term in self.terms) and all(number.is_integer() for number in numbers)

    def plus(self, other: _Sum) -> _Sum:
        if len(self.terms) + len(other.terms) > _MOST:
            raise Unread("their decays are sums of too many terms")
        masks = self._filled_beside(other) + other._filled_beside(self)
        return _Sum(self.terms + other.terms, self.number + other.number, masks)

    def _filled_beside(self, other: _Sum) -> tuple[tuple[Seen, float], ...]:
        """Returns the masks where something is added to what stands in the place of hidden pairs."""
        known = not other.terms and not other.number and not other.masks
        return tuple((seen, fill if known or math.isinf(fill) else math.nan) for seen, fill in self.masks)

    def times(self, number: float) -> _Sum:
        terms = tuple(replace(term, coefficient=term.coefficient * number) for term in self.terms)
        return _Sum(terms, self.number * number, tuple((seen, fill * number) for seen, fill in self.masks))


class _Product(NamedTuple):
    """A factor: ``number * exp(terms)`` times ``arrays``, 0 for pairs of steps that one of ``seen`` lacks, and anything
    for those that one of ``hidden`` lacks."""

    terms: tuple[_Term, ...] = ()
    number: float = 1.0
    seen: tuple[Seen, ...] = ()
    hidden: tuple[Seen, ...] = ()
    arrays: tuple[OwnFactor, ...] = ()

    def times(self, other: _Product) -> _Product:
        return _Product(
            self.terms + other.terms,
            self.number * other.number,
            self.seen + other.seen,
            self.hidden + other.hidden,
            self.arrays + other.arrays,
        )


def read_weights(scope: Scope, factors: Sequence[Factor], keys: Sequence[Atom]) -> Weights:
    """Returns what several factors of scores are together.

    Args:
      scope: the site's values.
      factors: what scores are multiplied by.
      keys: the labels of the steps s that are seen.

    Raises:
      Unread: they are no weights.
    """
    masks = MaskReader(scope, keys)
    steps = _steps(masks, [factor.ref for factor in factors])
    if steps is None:
        raise Unread
    reader = _Reader(masks, steps)
    try:
        return reader.weights(_read(reader, factors))
    except Unread as unread:  # exponentials may be no decays, but arrays of one step each
        reader.decays_alone = False
        with suppress(Unread):
            return reader.weights(_read(reader, factors))
        raise unread


def _read(reader: _Reader, factors: Sequence[Factor]) -> _Product:
    product = _Product()
    for factor in factors:
        if factor.divides:
            product = product.times(reader.divisor(factor.ref))
        elif factor.kept is None:
            product = product.times(reader.factor(factor.ref))
        else:
            product = product.times(_Product(seen=(reader.mask(factor.ref, factor.kept),)))
    return product


def _steps(masks: MaskReader, refs: Iterable[Ref]) -> tuple[Atom, ...] | None:
    """Returns the labels of the steps t that the first mask has, among values from which factors are computed."""
    space, graph = masks.space, masks.graph
    todo = [*refs]
    known: set[tuple[int, View]] = set()
    while todo and len(known) < _MOST:
        ref = space.canonical(todo.pop(0))
        key = ref.value, space.view(ref.view)
        if key in known or masks.scope.number(ref) is not None:
            continue
        known.add(key)
        name = masks.scope.name(ref)
        found: Triangle | tuple[Atom, ...] | None = None
        if name is None:
            found = captured_steps(masks, ref)
        elif name in COMPARISONS:
            found = masks.mask(ref)
        if found is not None:
            return space.resolve(found.steps if isinstance(found, Triangle) else found)
        if name == "cumsum":
            todo.append(Ref(graph.definitions[ref.value].inputs[0], ref.view))
        else:
            todo += space.operands(ref) or ()
    return None


class _Reader:
    """Reads factors of scores."""

    def __init__(self, masks: MaskReader, steps: tuple[Atom, ...]):
        self.masks, self.scope, self.space, self.graph = masks, masks.scope, masks.space, masks.graph
        self.steps = steps
        self.decays_alone = True
        """Whether exponentials are read as decays, also those that vary with one of both steps."""
        self._known: dict[tuple[int, View], _Sum | Unread] = {}
        self.largest = self.space.extent(steps)

    @property
    def keys(self) -> tuple[Atom, ...]:
        return self.space.resolve(self.masks.keys)

    def roles(self, ref: Ref) -> set[_Role]:
        """Returns which of both steps a value varies with."""
        atoms = self.space.atoms(ref)
        found: set[_Role] = set()
        if not atoms.isdisjoint(self.space.resolve(self.steps)):
            found.add("t")
        if not atoms.isdisjoint(self.keys):
            found.add("s")
        return found

    def mask(self, ref: Ref, kept: bool = True) -> Seen:
        """Returns which pairs of steps a mask keeps, where it compares positions."""
        found = self.masks.mask(ref)
        if found is None or self.space.resolve(found.steps) != self.space.resolve(self.steps):
            raise Unread("they are masked by something else than positions")
        return found.seen if kept else found.seen.inverted()

    # ------------------------------------------------------------------ factors

    def factor(self, ref: Ref, depth: int = 0) -> _Product:
        """Returns what a value is as a factor: of one that varies with one of both steps at most, a decay, or an array
        as it is."""
        if not self._is_array(ref):
            return self._factor(ref, depth)
        own = _Product(arrays=(OwnFactor(self._nearest(ref)),))
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
        return floating and self.scope.number(ref) is None and len(self.roles(self.space.canonical(ref))) < 2

    def divisor(self, ref: Ref) -> _Product:
        """Returns what scores are multiplied by that are divided by an array."""
        if not self._is_array(ref):
            raise Unread("they are divided by an array of pairs of steps")
        return _Product(arrays=(OwnFactor(self._nearest(ref), True),))

    def _factor(self, ref: Ref, depth: int) -> _Product:
        ref = self.space.canonical(ref)
        number = self.scope.number(ref)
        if number is not None:
            if not math.isfinite(number) or number == 0:
                raise Unread("a factor is zero or not finite")
            return _Product(number=float(number))
        if depth > _DEEPEST:
            raise Unread("their decays are computed in too many steps")
        if self.masks.mask(ref) is not None:
            return _Product(seen=(self.mask(ref),))
        name, operands = self.scope.name(ref), self.space.operands(ref)
        if name is None:
            return self._captured(ref)
        if operands is None or not is_floating(self.graph.dtype(ref.value)):
            raise Unread(self._described(ref))
        further = depth + 1
        match name:
            case "convert_element_type" if self._rounds(operands[0], ref):
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
                exponent = self.exponent(operands[0], further)
                return self._exponential(exponent if name == "exp" else exponent.times(math.log(2)), ref)
            case "pow":
                return self._power(operands[0], operands[1], ref, further)
            case _:
                raise Unread(self._described(ref))

    def _selected(self, operands: Sequence[Ref], depth: int) -> _Product:
        """Returns a selection between a factor and a number."""
        for kept, filled in ((2, 1), (1, 2)):
            fill = self.scope.number(operands[filled])
            if fill is None or math.isnan(fill):
                continue
            if kept == 1 and self._tells_what_is_not_finite(operands[0], operands[1], float(fill)):
                return self.factor(operands[1], depth)
            seen = (self.mask(operands[0], kept == 2),)
            found = self.factor(operands[kept], depth)
            return found.times(_Product(seen=seen) if fill == 0 else _Product(hidden=seen))
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

    def _exponential(self, found: _Sum, ref: Ref) -> _Product:
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
        return _Product(found.terms, math.exp(found.number), tuple(seen), tuple(hidden))

    def _power(self, base: Ref, exponent: Ref, ref: Ref, depth: int) -> _Product:
        """Returns a power whose exponent is a distance between the steps."""
        found = self.exponent(exponent, depth)
        if self.roles(base) or not all(term.counts for term in found.terms):
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
        return _Product(terms, hidden=hidden)

    def _captured(self, ref: Ref) -> _Product:
        """Returns what an array that is part of the program's text is."""
        found = captured_decay(self.masks, ref, self.space.resolve(self.steps))
        if found is None:
            raise Unread(
                "they are multiplied by an argument, or by a captured array that is no mask and no power of one decay"
            )
        return _Product((_Term("captured", found.rate, array=found.ref, rounding=found.rounding),), seen=(found.seen,))

    # ------------------------------------------------------------------ exponents

    def exponent(self, ref: Ref, depth: int = 0) -> _Sum:
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

    def _exponent(self, ref: Ref, depth: int) -> _Sum:
        space = self.space
        number, dtype = self.scope.number(ref), self.graph.dtype(ref.value)
        if number is not None:
            if not math.isfinite(number):
                raise Unread("an exponent is not finite")
            return _Sum(number=float(number))
        if depth > _DEEPEST:
            raise Unread("their decays are computed in too many steps")
        position = self.masks.position(ref)
        if position is not None and space.resolve(position[0]) in (self.keys, space.resolve(self.steps)):
            return _Sum((_Term("position", 1.0, self._role_of(position[0]), float(position[1])),))
        name, operands = self.scope.name(ref), space.operands(ref)
        roles, further = self.roles(ref), depth + 1
        if name is None and len(roles) == 2:
            difference = captured_difference(self.masks, ref, space.resolve(self.steps))
            if difference is None:
                raise Unread(self._described(ref))
            return _Sum((_Term("position", difference, "t"), _Term("position", -difference, "s")))
        if operands is not None and kind_of(dtype) != "u":
            found = self._computed(name, operands, ref, further)
            if found is not None:
                return found
        if name == "cumsum" and len(roles) == 2:
            return self._segments(ref)
        if len(roles) == 2 or not is_floating(dtype):
            raise Unread(self._described(ref))
        (role,) = roles or {""}
        return _Sum((_Term("array", 1.0, role, array=ref),))

    def _computed(self, name: str | None, operands: Sequence[Ref], ref: Ref, depth: int) -> _Sum | None:
        """Returns the exponent that an elementwise equation computes; None where it is to be taken as an array."""
        mixed, dtype = len(self.roles(ref)) == 2, self.graph.dtype(ref.value)
        found: _Sum | None = None
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
            if not self._rounds(operands[0], ref) and not found.is_whole:
                raise Unread(self._described(ref))
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
            if most == int(most) and not counts_exactly(dtype, int(most * 4 * self.largest + abs(found.number))):
                raise Unread(f"positions are counted in {dtype}")
        return found

    def _counts(self, ref: Ref, depth: int) -> bool:
        """Returns whether a value that varies with one of both steps consists of positions."""
        if depth > _DEEPEST:
            return False
        try:
            return any(term.kind == "position" for term in self.exponent(ref, depth).terms)
        except Unread:
            return False

    def _multiple(self, operands: Sequence[Ref], mixed: bool, depth: int) -> _Sum | None:
        """Returns a sum times a number, or positions times an array that is the same in all steps."""
        for x, other in (operands, operands[::-1]):
            if not mixed and not self._counts(x, depth):
                continue
            number = self.scope.number(other)
            if number is not None:
                if not math.isfinite(number) or number == 0:
                    raise Unread("an exponent is zero or not finite")
                return self.exponent(x, depth).times(float(number))
            if not self.roles(other) and is_floating(self.graph.dtype(other.value)):
                found = self.exponent(x, depth)
                if not all(term.counts for term in found.terms) or any(not math.isfinite(f) for _, f in found.masks):
                    raise Unread("a sum over steps is multiplied by an array")
                if found.number:
                    raise Unread("an array times a further number is added to their exponents")
                masks = tuple((seen, math.nan if fill else 0.0) for seen, fill in found.masks)
                return _Sum(tuple(replace(term, array=other) for term in found.terms), masks=masks)
        if mixed:
            raise Unread("the rates of decays vary with the steps they are multiplied by")
        return None

    def _distance(self, found: _Sum) -> _Sum:
        difference = self._difference(found)
        if difference is None or found.masks:
            raise Unread("an absolute value of something else than t - s is taken")
        return _Sum((_Term("distance", abs(difference)),))

    def _not_negative(self, operands: Sequence[Ref], depth: int) -> _Sum:
        for x, other in (operands, operands[::-1]):
            if self.scope.number(other) == 0:
                found = self.exponent(x, depth)
                difference = self._difference(found)
                if difference is not None and not found.masks:
                    return _Sum((_Term("later", abs(difference), "t" if difference > 0 else "s"),))
        raise Unread("a maximum of something else than t - s and 0 is taken")

    def _difference(self, found: _Sum) -> float | None:
        """Returns c of a sum that is c times t - s; None of another one."""
        if found.number or not all(term.kind == "position" and term.array is None for term in found.terms):
            return None
        of_t, of_s, offset = _added(found.terms)
        return of_t if of_t == -of_s and of_t != 0 and offset == 0 else None

    def _chosen(self, operands: Sequence[Ref], depth: int) -> _Sum:
        """Returns a selection between a sum and a number."""
        for kept, filled in ((2, 1), (1, 2)):
            fill = self.scope.number(operands[filled])
            if fill is None or math.isnan(fill):
                continue
            seen = self.mask(operands[0], kept == 2)
            found = self.exponent(operands[kept], depth)
            return found._replace(masks=(*found.masks, (seen, float(fill))))
        raise Unread("exponents are selected by something else than a causal mask")

    def _segments(self, ref: Ref) -> _Sum:
        """Returns the sums over the steps after one up to another: running sums of what a strict mask leaves."""
        node = self.graph.definitions[ref.value]
        axis = int(node.params["axis"])
        start, summed = ref.view[axis]
        if start or bool(node.params["reverse"]) or self.space.extent(summed) != self.graph.shape(ref.value)[axis]:
            raise Unread("running sums from the last step on are taken of decays")
        role = self._role_of(summed)
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
            seen, own = self.mask(mask, kept), self.roles(given)
            if seen != (Seen(False, -1) if role == "t" else Seen(True, 1)):
                raise Unread("running sums of decays have other steps than those after s up to t")
            if own <= {role}:
                return _Sum((_Term("segment", 1.0, role, array=given),))
        raise Unread("running sums are taken of something else than masked logarithms of decays")

    def _role_of(self, atoms: Sequence[Atom]) -> _Role:
        atoms = self.space.resolve(atoms)
        if atoms == self.space.resolve(self.steps):
            return "t"
        if atoms == self.keys:
            return "s"
        raise Unread("decays are summed or counted along another axis than that of the steps")

    def _rounds(self, source: Ref, target: Ref) -> bool:
        """Returns whether a cast keeps every number but for its rounding."""
        dtypes = self.graph.dtype(source.value), self.graph.dtype(target.value)
        return rounds(*dtypes) and keeps_range(*dtypes)

    def _described(self, ref: Ref) -> str:
        """Returns what a value is, in words; an empty string of products, which are no decays."""
        if self.space.contraction(ref) is not None:
            return ""
        name = self.scope.name(ref)
        return "a factor is an argument of the program" if name is None else f"a factor is computed by {name}"

    # ------------------------------------------------------------------ what they are together

    def weights(self, product: _Product) -> Weights:
        """Returns what a product is, if it is a mask with decays."""
        if not product.seen:
            raise Unread
        seen = product.seen[0]
        if any(other != seen for other in product.seen):
            seen = self._both(product.seen)
        if any(other != seen and not _holds(other, seen) for other in product.hidden):
            raise Unread("decays are hidden by another mask than the scores")
        factor, terms = self._without_counts(product, seen)
        weights = Weights(seen, self.space.resolve(self.steps), factor)
        for own in product.arrays:
            at = "of_s" if "s" in self.roles(own.ref) else "of_t"
            if getattr(weights, at) is not None:
                raise Unread("several arrays are factors of the same step")
            weights = weights._replace(of_t=own) if at == "of_t" else weights._replace(of_s=own)
        if not self.decays_alone and weights.of_t is not None and weights.of_s is not None:
            # Such exponentials may be far apart from one, and their products near to it.
            raise Unread("exponentials at both steps are no decays between them")
        if not math.isfinite(factor) or factor == 0:
            raise Unread("a factor is zero or not finite")
        if not terms:
            return weights
        kinds = {(term.kind, term.base) for term in terms}
        if kinds == {("array", False)}:
            return self._of_sums(weights, terms)
        if len(terms) != 1:
            raise Unread("they decay by several arrays")
        (term,) = terms
        sign = -1.0 if seen.reverse else 1.0
        match term.kind:
            case "position":
                form: DecayForm = "number" if term.array is None else "powers" if term.base else "rates"
                if form == "powers" and abs(term.coefficient) != 1:
                    raise Unread("a decay is raised to a multiple of the number of steps between t and s")
                return weights._replace(form=form, rate=sign * term.coefficient, decay=term.array)
            case "captured":
                return weights._replace(
                    form="captured", rate=term.coefficient, decay=term.array, rounding=term.rounding
                )
            case "segment":
                if term.role != ("s" if seen.reverse else "t"):
                    raise Unread("running sums of decays have the steps that the mask hides")
                assert term.array is not None
                array = self._at_t(term.array, term.role)
                return weights._replace(form="steps", rate=term.coefficient, decay=array)
            case _:
                raise Unread("they decay by several arrays")

    def _both(self, masks: Sequence[Seen]) -> Seen:
        """Returns the one of several masks whose pairs of steps all have."""
        for seen in masks:
            if all(other == seen or _holds(other, seen) for other in masks):
                return seen
        raise Unread("several masks hide steps on both sides")

    def _of_sums(self, weights: Weights, terms: Sequence[_Term]) -> Weights:
        """Returns decays of which a sequence at t and at s tells the logarithms."""
        found = {role: [term for term in terms if term.role == role] for role in ("t", "s", "")}
        if found[""] or len(found["t"]) != 1 or len(found["s"]) != 1:
            raise Unread("exponents of decays are no differences of a sequence at both steps")
        (of_t,), (of_s,) = found["t"], found["s"]
        assert of_t.array is not None
        assert of_s.array is not None
        array = self.space.canonical(of_t.array)
        if of_t.coefficient != -of_s.coefficient or not self.space.same(self._at_t(of_s.array, "s"), array):
            raise Unread("exponents of decays are no differences of one sequence at both steps")
        rate = -of_t.coefficient if weights.seen.reverse else of_t.coefficient
        return weights._replace(form="sums", rate=rate, decay=array)

    def _at_t(self, ref: Ref, role: _Role) -> Ref:
        """Returns a sequence at t that is read at t or s."""
        ref = self.space.canonical(ref)
        if role == "t":
            return ref
        names = dict(zip(self.keys, self.space.resolve(self.steps), strict=True))
        view = ((start, tuple(names.get(a, a) for a in own)) for start, own in self.space.view(ref.view))
        return Ref(ref.value, tuple(view))

    def _without_counts(self, product: _Product, seen: Seen) -> tuple[float, list[_Term]]:
        """Returns the number and the other terms of a product, with what is counted as differences of t and s."""
        factor, rest = product.number, [t for t in product.terms if t.kind not in ("position", "distance", "later")]
        groups: dict[object, list[_Term]] = {}
        for term in product.terms:
            if term.kind in ("position", "distance", "later"):
                key = None if term.array is None else (self.scope.key(term.array), term.base)
                groups.setdefault(key, []).extend(self._placed(term, seen))
        for own in groups.values():
            of_t, of_s, offset = _added(own)
            array, base = own[0].array, own[0].base
            if array is None:
                factor *= math.exp(offset) if abs(offset) < 80 else math.inf
            elif offset:
                raise Unread("a decay has a further step than those between t and s")
            if of_t != -of_s:
                raise Unread("decays depend on something else than the number of steps between t and s")
            if of_t:
                rest.append(_Term("position", of_t, "t", array=array, base=base))
        return factor, rest

    def _placed(self, term: _Term, seen: Seen) -> list[_Term]:
        """Returns a distance as a difference of positions."""
        if term.kind == "position":
            return [term]
        later: _Role = "s" if seen.reverse else "t"
        if seen.strict is None or (term.kind == "later" and term.role != later):
            raise Unread("decays count steps that the mask hides")
        sign = -1.0 if later == "s" else 1.0
        coefficient = term.coefficient * sign
        return [
            replace(term, kind="position", coefficient=coefficient, role="t"),
            replace(term, kind="position", coefficient=-coefficient, role="s"),
        ]


def _added(terms: Iterable[_Term]) -> tuple[float, float, float]:
    """Returns how often positions t and s are in a sum, and what is added to them."""
    found = {"t": 0.0, "s": 0.0, "": 0.0}
    offset = 0.0
    for term in terms:
        found[term.role] += term.coefficient
        offset += term.coefficient * term.offset
    return found["t"], found["s"], offset


def _holds(mask: Seen, other: Seen) -> bool:
    """Returns whether a mask has all pairs of steps that another one has."""
    if mask.reverse != other.reverse:
        return False
    return mask.offset <= other.offset if mask.reverse else mask.offset >= other.offset
