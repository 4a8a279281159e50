"""Proves that a dispatch puts at most one token into each slot, and that tokens have no weight in the slots of others.

Where a dispatch is not zero, one of several comparisons ``number == position`` holds, at a token of a mask. To show
that, the dispatch is evaluated with each comparison, or its mask, taken as zero. The numbers are running counts of
masks, so two tokens of one mask never have the same number. The numbers of a second mask start where those of the first
end.

A dispatch that is a sum over a token's choices is proved choice by choice: where each choice of each token has a slot
of its own, each token has too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.numerics.casts import kind_of
from autopallas.patterns.mixture_of_experts.counts import Linear, Reader, Running, first_ones, running_counts
from autopallas.patterns.mixture_of_experts.signs import Signs
from autopallas.patterns.mixture_of_experts.values import Key, Values

__all__ = ["unproved"]

_TRIED = 16
_EVALUATED = 100


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A comparison of a number with all positions of slots.

    Attributes:
      compared: the comparison.
      running, number: the slot as a function of a running count.
      implied: whether the comparison can only hold where the mask is 1.
    """

    compared: Ref
    running: Running
    number: Linear
    implied: bool


def unproved(
    values: Values,
    dispatch: Ref,
    combine: Ref,
    tokens: Sequence[Atom],
    expert: tuple[Atom, ...],
    slot: tuple[Atom, ...],
) -> str | None:
    """Returns what could not be shown about a dispatch and the weights of its slots, under the same labels; None if all
    was."""
    space, own = values.space, frozenset(values.space.resolve(tokens))
    proof = _Proof(values, [dispatch], own, expert, slot)
    summed: tuple[list[Ref], tuple[Atom, ...]] | None = None
    if not proof.one_token_each():
        summed = _summed(values, dispatch)
        if summed is not None:
            factors, choices = summed
            proof = _Proof(values, factors, own.union(choices), expert, slot)
        if summed is None or not proof.one_token_each():
            return "it was not shown that a slot holds one token at most"
    same = space.atoms(space.canonical(combine)) == space.atoms(space.canonical(dispatch))
    decides = proof.decides(combine) if summed is None else _decides(values, proof, dispatch, combine, summed[1])
    return None if same and decides else "it was not shown that a token has no weight in the slots of others"


def _summed(values: Values, ref: Ref) -> tuple[list[Ref], tuple[Atom, ...]] | None:
    """Returns the factors of what a value sums, looking through casts, and the summed labels; None if it is no sum."""
    core = values.core(ref)
    operands = values.space.uses(core)
    name = values.scope.name(core)
    if operands and (name == "convert_element_type" or name in ("gt", "ne") and values.scope.number(operands[1]) == 0):
        core = values.core(operands[0])
    node = values.scope.node(core)
    found = values.inside(core)
    if node is None or found is None or node.name == "reduce_max" or not found[1]:
        return None
    return found


def _decides(values: Values, proof: _Proof, dispatch: Ref, combine: Ref, choices: tuple[Atom, ...]) -> bool:
    """Returns whether a weight is zero wherever a dispatch is zero that sums zeros and ones over a token's choices.

    Each choice is zero there, since none is negative, and so the weight of each choice must be.
    """
    space = values.space
    if values.zero(combine, {values.key(dispatch): 0.0, values.key(values.core(dispatch)): 0.0}):
        return True
    summed = _summed(values, combine)
    if summed is None or kind_of(values.graph.dtype(combine.value)) == "b":
        return False
    factors, theirs = summed
    if [space.sizes[a] for a in theirs] != [space.sizes[a] for a in choices]:
        return False
    same = dict(zip(theirs, choices, strict=True))

    def named(ref: Ref) -> Ref:
        """Returns a factor of a weight under the labels that the choices have in the dispatch."""
        view = space.view(ref.view)
        return Ref(ref.value, tuple((offset, tuple(same.get(a, a) for a in atoms)) for offset, atoms in view))

    weights = [named(values.core(factor)) for factor in factors]
    return all(any(values.zero(weight, {values.key(f): 0.0}) for weight in weights) for f in proof.factors())


class _Proof:
    """Proves properties of a product of ``parts``: the dispatch, or what it sums."""

    def __init__(
        self,
        values: Values,
        parts: Sequence[Ref],
        tokens: frozenset[Atom],
        expert: tuple[Atom, ...],
        slot: tuple[Atom, ...],
    ):
        self.values, self.scope, self.space = values, values.scope, values.space
        self.parts, self.tokens, self.expert, self.slot = parts, tokens, expert, slot
        self.labels = frozenset[Atom]().union(*(self.space.atoms(self.space.canonical(part)) for part in parts))

    def factors(self) -> Iterator[Ref]:
        """Yields the factors of the parts."""
        for part in self.parts:
            yield from self.values.factors(part)

    def _values(self) -> list[Ref]:
        """Returns the parts, and the values from which they are computed."""
        return [found for part in self.parts for found in self.values.walk(part)]

    # ------------------------------------------------------------------ one token in each slot

    def one_token_each(self) -> bool:
        if not all(map(self.values.binary, self.parts)) or not self.tokens or not self.tokens <= self.labels:
            return False
        options = [found for pair in self._compared() if (found := list(self._numbers(*pair)))]
        for chosen in islice(product(*options), _TRIED) if options else ():
            masks = self._apart(chosen)
            if masks is not None and self._covered(chosen, masks):
                return True
        return False

    def _compared(self) -> Iterator[tuple[Ref, Ref, int]]:
        """Yields the comparisons with positions of slots, each with what is compared and the first position."""
        for found in self._values():
            operands = self.space.operands(found) if self.scope.name(found) == "eq" else None
            for positions, index in (operands, operands[::-1]) if operands else ():
                first, atoms = self.values.positions(positions)
                if atoms == self.slot and self.values.counted(index):
                    if self.space.atoms(index) <= self.labels - set(self.slot):
                        yield found, index, first
                        break

    def _numbers(self, compared: Ref, index: Ref, first: int) -> Iterator[_Numbered]:
        """Yields the ways to read a number such that it tells tokens of one slot apart."""
        space, slot = self.space, set(self.slot)
        for running in running_counts(self.values, index, self.labels, self.tokens):
            reader = Reader(self.values, running, self.labels)
            number = reader.read(index)
            pinned, own = set(running.pinned), space.atoms(running.mask)
            if number is None or abs(number.factor) != 1 or not number.exact or own & slot:
                continue
            implied = number.off is not None and not first <= number.off < first + space.extent(self.slot)
            if pinned:  # a token chooses one expert, and is counted for that one
                if own & set(self.expert) or own - self.labels != pinned:
                    continue
                if not self.values.one_of(reader.mask, running.pinned):
                    continue
                if space.extent(running.pinned) != space.extent(self.expert):
                    continue
            elif own - self.labels and not implied:
                continue
            if not (number.sure or implied):
                continue
            # What is added has to be the same for all tokens of a slot.
            fixed = (self.labels - set(running.along) - slot) | pinned
            if all(space.atoms(base) <= fixed for base in number.bases):
                yield _Numbered(compared, running, replace(number, offset=number.offset - first), implied)

    def _placed(self, numbered: _Numbered, ref: Ref) -> Ref:
        return numbered.running.at(self.values.core(ref), self.values, self.expert)

    # ------------------------------------------------------------------ several choices of a token

    def _apart(self, chosen: Sequence[_Numbered]) -> list[list[Ref]] | None:
        """Returns, per comparison, the masks that must be 1 for numbers of different comparisons to differ; None if
        they may be equal."""
        masks: list[list[Ref]] = [[] for _ in chosen]
        for j, b in enumerate(chosen):
            for i, a in enumerate(chosen[:j]):
                if self._same_number(a, b):
                    continue
                for first, second, place in ((a, b, i), (b, a, j)):
                    part = self._ends_before(first, second)
                    if part is not None:
                        masks[place].append(part)
                        break
                else:
                    return None
        return masks

    def _bases(self, numbered: _Numbered) -> list[Key]:
        return [self.values.key(self._moved(numbered, base)) for base in numbered.number.bases]

    def _moved(self, numbered: _Numbered, ref: Ref) -> Ref:
        return numbered.running.at(ref, self.values, self.expert)

    def _same_number(self, a: _Numbered, b: _Numbered) -> bool:
        """Returns whether two numbers are the same function of the same count."""
        same = a.number.factor == b.number.factor and a.number.offset == b.number.offset
        if not same or sorted(map(repr, self._bases(a))) != sorted(map(repr, self._bases(b))):
            return False
        return self.space.same(self._moved(a, a.running.count), self._moved(b, b.running.count))

    def _ends_before(self, first: _Numbered, second: _Numbered) -> Ref | None:
        """Returns the mask whose tokens are all counted by ``first``, if ``second`` starts behind them."""
        if first.number.factor != 1 or second.number.factor != 1 or second.number.offset < first.number.offset:
            return None
        bases = {self.values.key(ref): ref for ref in (self._moved(second, base) for base in second.number.bases)}
        if len(bases) != len(second.number.bases) or not set(self._bases(first)) <= bases.keys():
            return None
        if len(set(self._bases(first))) != len(first.number.bases):
            return None
        for key, base in bases.items():
            if key not in self._bases(first):
                part = self._total(first, base)
                if part is not None:
                    return part
        return None

    def _total(self, numbered: _Numbered, base: Ref) -> Ref | None:
        """Returns the mask whose total a number is, if the total is at least the last count of the slots' tokens."""
        space, running = self.space, numbered.running
        reduced = self.values.inside(space.canonical(base))
        if reduced is None or len(reduced[0]) != 1:
            return None
        inner, atoms = self.values.core(reduced[0][0]), reduced[1]
        if space.extent(atoms) != space.extent(running.along):
            return None
        view = space.view(inner.view)
        if [own for _, own in view].count(atoms) != 1 or any(set(own) & set(atoms) and own != atoms for _, own in view):
            return None
        part = Ref(inner.value, tuple((o, running.along if own == atoms else own) for o, own in view))
        count, mask = self._moved(numbered, running.count), self._moved(numbered, running.mask)
        if space.same(part, self.values.core(mask)):
            return part
        placed = Running(count, mask, self.values.core(mask), running.along)
        return part if first_ones(self.values, placed, part, self.labels) else None

    # ------------------------------------------------------------------ evaluating the dispatch

    def _covered(self, chosen: Sequence[_Numbered], masks: Sequence[Sequence[Ref]]) -> bool:
        """Returns whether the dispatch is zero unless one of the comparisons holds where its masks are 1."""
        ways = [list(self._without(numbered, more)) for numbered, more in zip(chosen, masks, strict=True)]
        for count, given in enumerate(product(*ways)):
            together = {key: value for part in given for key, value in part.items()}
            if count == _EVALUATED or not any(self.values.zero(part, together) for part in self.parts):
                return False
        return bool(ways)

    def _without(self, numbered: _Numbered, more: Sequence[Ref]) -> Iterator[Mapping[Key, float]]:
        """Yields the ways in which a comparison, or one of its masks, can be zero."""
        values, running = self.values, numbered.running
        yield {values.key(numbered.compared): 0.0}
        whole, kept = self._placed(numbered, running.mask), self._placed(numbered, running.kept)
        needed = [] if numbered.implied and not running.pinned else [kept]
        parts = {values.key(part): part for part in (*needed, *more)}
        parts.pop(values.key(whole), None)
        if needed:
            # Where a whole mask is 0, its parts are too.
            yield dict.fromkeys([values.key(whole), *parts], 0.0)
        for key, part in parts.items():
            flat = [values.key(ref) for ref in self._flattened(part)] if running.pinned else []
            yield dict.fromkeys([key, *flat], 0.0)

    def _flattened(self, part: Ref) -> Iterator[Ref]:
        """Yields the sums over experts of a mask that is 1 at the expert of the slot, or at none."""
        space = self.space
        for found in self._values():
            reduced = self.values.inside(found)
            if reduced is None or len(reduced[0]) != 1:
                continue
            inner, atoms = self.values.core(reduced[0][0]), reduced[1]
            view = tuple((o, self.expert if own == atoms else own) for o, own in space.view(inner.view))
            if inner.value == part.value and view == space.view(part.view) and atoms:
                if space.extent(atoms) == space.extent(self.expert):
                    yield found

    # ------------------------------------------------------------------ weights

    def decides(self, combine: Ref) -> bool:
        """Returns whether a weight is zero wherever the dispatch, the only part, is zero."""
        (dispatch,), values = self.parts, self.values
        core = values.core(dispatch)
        given = {values.key(dispatch): 0.0, values.key(core): 0.0}
        weight = self._compared_with_zero(core)
        if weight is not None:
            given[values.key(weight)] = 0.0
        if values.zero(combine, given):
            return True
        return all(values.zero(combine, {values.key(factor): 0.0}) for factor in self.factors())

    def _compared_with_zero(self, ref: Ref) -> Ref | None:
        """Returns the operand whose difference from zero a value tells: all of it, or that it is above zero where it
        is never below."""
        operands = self.space.uses(ref)
        if not operands:
            return None
        if self.scope.name(ref) == "convert_element_type":
            return operands[0] if kind_of(self.values.graph.dtype(ref.value)) == "b" else None
        name, scope = self.scope.name(ref), self.scope
        if name == "ne":
            return next((a for a, b in (operands, operands[::-1]) if scope.number(b) == 0), None)
        if name in ("gt", "lt"):
            weight, zero = operands if name == "gt" else operands[::-1]
            if scope.number(zero) == 0 and Signs(self.values.graph).nonnegative(weight.value):
                return weight
        return None
