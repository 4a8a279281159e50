"""Reads slot numbers as functions of a running count ``cumsum(mask)`` along tokens, of a mask of zeros and ones.

At two places where the mask is 1, the count is never the same. A program subtracts one from it, adds how many slots
were given before, and picks it at the expert that a token chooses. All of that is kept here as
``count + offset + bases``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.numerics.casts import kind_of
from autopallas.patterns.mixture_of_experts.choice import folded
from autopallas.patterns.mixture_of_experts.values import MOST, Values

__all__ = ["Linear", "Reader", "Running", "first_ones", "running_counts"]

_DEPTH = 40
_BASES = 6
_ROUNDED = 256
"""Largest whole number that stays exact where a product of matrices rounds its operands."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A number that is ``factor * count + offset + sum(bases)`` where the mask is 1, and ``off`` where it is 0.

    Attributes:
      bases: counts of tokens, the same for all tokens that are counted together.
      off: None where it is not known.
      sure: whether that holds wherever the mask is 1; if not, the number may also be ``off`` there.
    """

    factor: float
    offset: float
    bases: tuple[Ref, ...] = ()
    off: float | None = None
    sure: bool = True

    @property
    def constant(self) -> bool:
        return not self.factor and not self.bases and self.off == self.offset

    @property
    def exact(self) -> bool:
        """Whether all that it may be is small enough to be exact, and no fraction."""
        whole = self.factor in (-1, 0, 1) and abs(self.offset) <= MOST and self.offset == int(self.offset)
        return whole and len(self.bases) <= _BASES


@dataclass(frozen=True, slots=True)
class Running:
    """A running count.

    Attributes:
      count, mask: under the same labels.
      kept: a mask that is 1 only where ``mask`` is; perhaps the same.
      pinned: labels of the mask over which the slot's number was summed: the expert that a token chooses.
      along: labels along which the mask is counted.
    """

    count: Ref
    mask: Ref
    kept: Ref
    along: tuple[Atom, ...]
    pinned: tuple[Atom, ...] = ()

    def at(self, ref: Ref, values: Values, expert: tuple[Atom, ...]) -> Ref:
        """Returns a value under the mask's labels, with the expert of a slot in the place of the one that a token
        chooses."""
        if not self.pinned:
            return ref
        space = values.space
        view = ((o, expert if space.resolve(atoms) == self.pinned else atoms) for o, atoms in ref.view)
        return Ref(ref.value, tuple(view))


def running_counts(values: Values, index: Ref, labels: frozenset[Atom], tokens: frozenset[Atom]) -> Iterator[Running]:
    """Yields the running counts along ``tokens`` from which a number with some of the ``labels`` is computed.

    The number may lack labels of the count: choices of a token that are counted one after the other, and the expert.
    """
    space, graph = values.space, values.graph
    for count in list(values.walk(index)):
        if values.scope.name(count) != "cumsum" or not values.counted(count):
            continue
        node = graph.definitions[count.value]
        axis = int(node.params["axis"])
        mask = Ref(node.inputs[0], count.view)
        offset, along = count.view[axis][0], space.resolve(count.view[axis][1])
        others = [space.resolve(atoms) for d, (_, atoms) in enumerate(count.view) if d != axis]
        size = graph.shape(count.value)[axis]
        if offset or space.extent(along) != size or size > MOST or not tokens <= set(along):
            continue
        if len(set(along)) != len(along):
            continue
        if any(set(along) & set(atoms) for atoms in others) or not values.binary(mask):
            continue
        more = space.atoms(count) - labels
        pinned = [atoms for atoms in others if set(atoms) & more]
        if len(pinned) > 1 or any(set(atoms) - more for atoms in pinned):
            continue
        own = values.core(mask)
        masks = {values.key(own): own}
        for found in list(values.walk(index)):
            same = space.atoms(found) == space.atoms(own) and values.scope.name(found) in ("mul", "and")
            if same and values.binary(found) and _rest(values, own, found) is not None:
                masks.setdefault(values.key(values.core(found)), values.core(found))
        for kept in masks.values():
            yield Running(count, mask, kept, along, pinned[0] if pinned else ())


class Reader:
    """Reads numbers as functions of one running count."""

    def __init__(self, values: Values, running: Running, labels: frozenset[Atom]):
        self.values, self.running, self.labels = values, running, labels
        self.scope, self.space, self.graph = values.scope, values.space, values.graph
        self.mask = values.core(running.mask)

    def read(self, ref: Ref, depth: int = 0) -> Linear | None:
        """Reads a number; returns None if it is something else."""
        number = self.scope.number(ref)
        if number is not None:
            return Linear(0.0, number, (), number)
        ref, values = self.space.canonical(ref), self.values
        core = values.core(ref)
        for mask, off in ((self.running.kept, 0.0), (self.mask, None)):
            if self.space.same(core, mask):
                return Linear(0.0, 1.0, (), off)
        if self.scope.node(ref) is None or depth > _DEPTH or not values.counted(ref):
            return None
        found = self._read(ref, depth)
        return found if found is not None and found.exact else None

    def _read(self, ref: Ref, depth: int) -> Linear | None:
        values = self.values
        if self.space.same(ref, self.running.count):
            return Linear(1.0, 0.0)
        reduced = values.inside(ref)
        if reduced is not None:
            return self._base(ref) or self._reduced(ref, *reduced, depth)
        operands = self.space.uses(ref)
        if operands is None:
            return None
        name = self.scope.name(ref) or ""
        if name == "select_n" and len(operands) == 3:
            return self._selected(operands, depth)
        given = [self.read(operand, depth + 1) for operand in operands]
        known = [linear for linear in given if linear is not None]
        if len(known) != len(given) or not given:
            return None
        off = folded(name, [linear.off for linear in known], self.graph.dtype(ref.value))
        found = _combined(name, known, off)
        return None if found is None or self._rounds(ref, found) else found

    def _rounds(self, ref: Ref, linear: Linear) -> bool:
        """Returns whether a product of matrices may round the numbers that it adds up."""
        node = self.graph.definitions[ref.value]
        if node.name != "dot_general" or kind_of(self.graph.dtype(ref.value)) in "iu":
            return False
        return (len(linear.bases) + 1) * self.space.extent(self.running.along) + abs(linear.offset) > _ROUNDED

    def _base(self, ref: Ref) -> Linear | None:
        """Reads the number of tokens that a mask holds."""
        reduced, space = self.values.inside(ref), self.space
        if reduced is None or self.scope.name(ref) != "reduce_sum" or space.atoms(ref) & set(self.running.along):
            return None
        (operand,), atoms = reduced
        if space.extent(atoms) > MOST or not self.values.binary(operand):
            return None
        return Linear(0.0, 0.0, (ref,))

    def _reduced(self, ref: Ref, operands: Sequence[Ref], atoms: tuple[Atom, ...], depth: int) -> Linear | None:
        given = [self.read(operand, depth + 1) for operand in operands]
        whole = given[0]
        if len(given) == 2:
            known = [linear for linear in given if linear is not None]
            if len(known) == 2:
                off = folded("mul", [linear.off for linear in known], self.graph.dtype(ref.value))
                whole = _combined("mul", known, off)
            else:
                whole = None
        if whole is None or self._rounds(ref, whole):
            return None
        if not atoms:
            return whole
        if whole.off is None or not set(atoms) <= self.space.atoms(self.running.mask) - self.labels:
            return None
        if self.scope.name(ref) == "reduce_max":
            return replace(whole, sure=False)
        return whole if whole.off == 0 and self.values.exclusive(self.mask, atoms) else None

    def _selected(self, operands: Sequence[Ref], depth: int) -> Linear | None:
        """Reads ``where(mask, a, b)``."""
        values = self.values
        own, kept = values.key(self.mask), values.key(self.running.kept)
        on = values.value(operands[0], {own: 1.0, kept: 1.0})
        off = values.value(operands[0], {kept: 0.0})
        if on is None or off is None:
            return None
        chosen, other = (self.read(operands[2 if known else 1], depth + 1) for known in (on, off))
        if chosen is None or other is None or not (chosen.sure and other.sure):
            return None
        return replace(chosen, off=other.off)


def _combined(name: str, given: Sequence[Linear], off: float | None) -> Linear | None:
    """Applies an elementwise operation to such numbers."""
    a, b = given[0], given[-1]
    if len(given) > 1 and not (a.sure and b.sure or a.constant or b.constant):
        return None
    sure = a.sure and b.sure
    if name in ("convert_element_type", "stop_gradient", "copy"):
        return replace(a, off=off)
    if name in ("add", "add_any"):
        return Linear(a.factor + b.factor, a.offset + b.offset, a.bases + b.bases, off, sure)
    if name == "sub" and not b.bases:
        return Linear(a.factor - b.factor, a.offset - b.offset, a.bases, off, sure)
    if name == "mul":
        for one, other in ((a, b), (b, a)):
            if one.factor == 0 and not one.bases and (one.offset == 1 or not other.bases):
                factor = one.offset
                return Linear(factor * other.factor, factor * other.offset, other.bases, off, sure)
    return None


def first_ones(values: Values, running: Running, part: Ref, labels: frozenset[Atom]) -> bool:
    """Returns whether a mask is the counted one where the count is below a number, and zero from there on."""
    rest = _rest(values, values.core(running.mask), part)
    reader = Reader(values, replace(running, kept=values.core(running.mask)), labels)
    return rest is not None and all(_below(values, reader, factor) for factor in rest)


def _rest(values: Values, whole: Ref, part: Ref) -> list[Ref] | None:
    """Returns the further factors of a product that has all factors of another; None if it lacks one."""
    own = {values.key(factor) for factor in values.factors(whole)}
    parts = {values.key(factor): factor for factor in values.factors(part)}
    return [factor for key, factor in parts.items() if key not in own] if own <= parts.keys() else None


def _below(values: Values, reader: Reader, ref: Ref) -> bool:
    name, operands = values.scope.name(ref), values.space.uses(ref)
    if operands is None or name not in ("lt", "le", "gt", "ge"):
        return False
    small, large = operands if name in ("lt", "le") else operands[::-1]
    count = reader.read(small)
    return values.scope.number(large) is not None and count is not None and count.factor == 1 and count.sure
