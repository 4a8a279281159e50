"""What is known of a value, element by element, where a few others are given."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping

from autopallas.graph import Ref
from autopallas.graph.labels import Atom, View
from autopallas.patterns.expressions import Scope
from autopallas.patterns.mixture_of_experts.axes import positions_along
from autopallas.patterns.mixture_of_experts.choice import folded

__all__ = ["MOST", "Key", "Values"]

Key = tuple[int, View]
"""Of an element of a value, under labels."""

MOST = 2**20
"""Counts up to a small multiple of this are exact in the dtypes below."""

_COUNTED = frozenset({"int32", "int64", "float32", "float64"})
_DEPTH = 40
_DEEPEST = 100
_VISITED = 600


class Values:
    """Questions about the values of one site, each asked of an element: a value under labels."""

    def __init__(self, scope: Scope):
        self.scope, self.space, self.graph = scope, scope.space, scope.graph
        self.needed: set[int] = set()
        """Values of which it was needed what gives them."""
        self._binary: dict[Hashable, bool] = {}

    def key(self, ref: Ref) -> Key:
        found = self.space.canonical(ref)
        return found.value, self.space.view(found.view)

    def core(self, ref: Ref) -> Ref:
        """A value without its casts, but for one to booleans."""
        ref = self.space.canonical(ref)
        while self.scope.name(ref) == "convert_element_type" and self.graph.dtype(ref.value).kind != "b":
            (ref,) = self.space.operands(ref) or (ref,)
        return ref

    def counted(self, ref: Ref) -> bool:
        """Whether a value's dtype holds every count."""
        return self.graph.dtype(ref.value).name in _COUNTED

    def uncast(self, ref: Ref) -> Ref:
        """A value without its casts, as long as they keep every count."""
        ref = self.space.canonical(ref)
        while self.scope.name(ref) == "convert_element_type" and self.counted(ref):
            (ref,) = self.space.operands(ref) or (ref,)
        return ref

    def positions(self, ref: Ref) -> tuple[int, tuple[Atom, ...]]:
        """(first, labels) if a value counts up along labels, from that number on; no labels if not."""
        found = positions_along(self.scope, ref)
        return (0, ()) if found is None or found[2] > MOST else found[:2]

    def inside(self, ref: Ref) -> tuple[list[Ref], tuple[Atom, ...]] | None:
        """The factors of what is summed (or of which the largest is taken), under the same labels each time, and the
        labels that the result lacks; None of anything else."""
        node = self.scope.node(ref)
        if node is None or node.name not in ("reduce_sum", "reduce_max", "dot_general"):
            return None
        if self.scope.name(ref) == "mul":
            return None
        if node.name == "dot_general":
            *factors, dimensions = self.space.dot(ref)
        else:
            operand, dimensions = self.space.reduced(ref)
            factors = [operand]
        return factors, self.space.resolve([x for _, atoms in dimensions for x in atoms])

    def walk(self, ref: Ref) -> Iterator[Ref]:
        """A value, and those from which it is computed element by element, and those of which it is a sum."""
        seen: set[Key] = set()
        todo = deque([ref])
        while todo:  # what is near comes first
            found = self.space.canonical(todo.popleft())
            key = self.key(found)
            if key in seen or len(seen) > _VISITED:
                continue
            seen.add(key)
            yield found
            reduced = self.inside(found)
            todo += reduced[0] if reduced is not None else self.space.uses(found) or []

    def factors(self, ref: Ref) -> Iterator[Ref]:
        """What a product is made of, without casts and ones."""
        ref = self.core(ref)
        operands = self.space.uses(ref) if self.scope.name(ref) in ("mul", "and") else None
        if not operands:
            yield ref
        for operand in operands or ():
            if self.scope.number(operand) != 1:
                yield from self.factors(operand)

    def binary(self, ref: Ref, depth: int = 0) -> bool:
        """Whether a value is 0 or 1, whatever it is computed from; so no derivative passes through it."""
        number = self.scope.number(ref)
        if number is not None:
            return number in (0, 1)
        ref = self.space.canonical(ref)
        key = self.space.pattern(ref, frozenset())
        if key not in self._binary:
            self._binary[key] = False
            self._binary[key] = depth <= _DEPTH and self._computes_binary(ref, depth + 1)
        return self._binary[key]

    def _computes_binary(self, ref: Ref, depth: int) -> bool:
        if self.graph.dtype(ref.value).kind == "b":
            return True
        node = self.scope.node(ref)
        if node is None:
            return False
        if node.name == "reduce_sum":
            (operand,), atoms = self.inside(ref) or ([ref], ())
            return bool(atoms) and self.binary(operand, depth) and self.exclusive(operand, atoms)
        operands = self.space.uses(ref) or []
        if node.name == "select_n":
            operands = operands[1:]
        elif self.scope.name(ref) not in ("mul", "convert_element_type", "and", "max", "min"):
            return False
        return bool(operands) and all(self.binary(operand, depth) for operand in operands)

    def one_of(self, mask: Ref, atoms: tuple[Atom, ...]) -> bool:
        """Whether a mask is 1 where a number counts along some labels, and nowhere else."""
        for positions, index in self._compared(mask):
            if self.positions(positions)[1] == atoms and not self.space.atoms(index) & set(atoms):
                return True
        return False

    def exclusive(self, mask: Ref, atoms: tuple[Atom, ...]) -> bool:
        """Whether a mask is 1 at one place at most along some labels: as :meth:`one_of` says, or since numbers that
        differ along them are compared with a position."""
        if self.one_of(mask, atoms):
            return True
        for positions, index in self._compared(mask):
            along = self.positions(positions)[1]
            if along and not set(along) & set(atoms) and self._distinct(index, atoms):
                return True
        return False

    def _compared(self, mask: Ref) -> Iterator[tuple[Ref, Ref]]:
        """What the factors of a mask compare, one way round and the other."""
        for factor in self.factors(mask):
            operands = self.space.operands(factor) if self.scope.name(factor) == "eq" else None
            if operands:
                yield operands[0], operands[1]
                yield operands[1], operands[0]

    def _distinct(self, index: Ref, atoms: tuple[Atom, ...]) -> bool:
        """Whether indices differ along some labels: they are where the greatest elements of a row stand."""
        found = self.core(index)
        node = self.scope.node(found)
        if node is None or node.name != "top_k" or found.value != node.outputs[1]:
            return False
        axis = int(node.params["axis"])
        if self.space.resolve(self.space.view(found.view)[axis][1]) != self.space.resolve(atoms):
            return False
        self.needed.add(found.value)
        return True

    def zero(self, ref: Ref, given: Mapping[Key, float]) -> bool:
        """Whether a value is zero where some others are ``given``, whatever all the rest is."""
        return self.value(ref, given) == 0

    def value(self, ref: Ref, given: Mapping[Key, float]) -> float | None:
        """A value as far as it is known where some others are ``given``."""
        return _Evaluation(self, given, self.space.atoms(self.space.canonical(ref))).of(ref)


class _Evaluation:
    """What values are where some others are ``given``; asked of a value with the labels ``outer``."""

    def __init__(self, values: Values, given: Mapping[Key, float], outer: frozenset[Atom]):
        self.values, self.given = values, given
        self.space, self.scope, self.graph = values.space, values.scope, values.graph
        atoms = {key: frozenset(x for _, own in key[1] for x in own) for key in given}
        self._named = outer.union(*atoms.values())
        self._wanted = [(number, own & outer) for (number, _), own in atoms.items()]
        self._known: dict[Hashable, float | None] = {}

    def of(self, ref: Ref, depth: int = 0) -> float | None:
        number = self.scope.number(ref)
        if number is not None:
            return number
        ref = self.space.canonical(ref)
        key = self.values.key(ref)
        if key in self.given:
            return self.given[key]
        if depth > _DEEPEST or not self._leads_to_given(ref):
            return None
        place = self.space.pattern(ref, self._named)
        if place not in self._known:
            self._known[place] = None
            self._known[place] = self._computed(ref, depth + 1)
        return self._known[place]

    def _leads_to_given(self, ref: Ref) -> bool:
        """Whether a value may be computed from what is given: it comes later, with the same labels but for sums."""
        atoms = self.space.atoms(ref)
        return any(number < ref.value and wanted <= atoms for number, wanted in self._wanted)

    def _computed(self, ref: Ref, depth: int) -> float | None:
        node = self.scope.node(ref)
        if node is None or node.equation.effects:
            return None
        reduced = self.values.inside(ref)
        operands = self.space.uses(ref) if reduced is None else reduced[0]
        if operands is None:
            return None
        found = [self.of(operand, depth) for operand in operands]
        dtype = self.graph.dtype(ref.value)
        if reduced is None:
            return folded(self.scope.name(ref) or "", found, dtype)
        return found[0] if node.name == "reduce_max" else folded("mul", [*found, None], dtype)
