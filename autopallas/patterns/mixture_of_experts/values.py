"""Abstract interpretation: elementwise facts about a value under assumed values of a few others."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping

from autopallas.graph import Ref
from autopallas.graph.labels import Atom, View
from autopallas.numerics.casts import kind_of
from autopallas.patterns.expressions import Scope
from autopallas.patterns.mixture_of_experts.axes import positions_along
from autopallas.patterns.mixture_of_experts.choice import folded

__all__ = ["MOST", "Key", "Values"]

Key = tuple[int, View]
"""Key of an element of a value: its number, and its view under labels."""

MOST = 2**20
"""Largest size of a count: small multiples of it are exact in the dtypes below."""

_COUNTED = frozenset({"int32", "int64", "float32", "float64"})
_DEPTH = 40
_DEEPEST = 100
_VISITED = 600


class Values:
    """Answers questions about the values of one site, each asked about an element: a value under labels."""

    def __init__(self, scope: Scope):
        self.scope, self.space, self.graph = scope, scope.space, scope.graph
        self.needed: set[int] = set()
        """Values whose definitions the answers rely on."""
        self._binary: dict[Hashable, bool] = {}

    def key(self, ref: Ref) -> Key:
        found = self.space.canonical(ref)
        return found.value, self.space.view(found.view)

    def core(self, ref: Ref) -> Ref:
        """Returns a value without its casts, except a cast to booleans."""
        ref = self.space.canonical(ref)
        while self.scope.name(ref) == "convert_element_type" and kind_of(self.graph.dtype(ref.value)) != "b":
            (ref,) = self.space.operands(ref) or (ref,)
        return ref

    def counted(self, ref: Ref) -> bool:
        """Returns whether a value's dtype holds every count."""
        return self.graph.dtype(ref.value).name in _COUNTED

    def positions(self, ref: Ref) -> tuple[int, tuple[Atom, ...]]:
        """Returns (first, labels) if a value counts up along labels, starting at ``first``; no labels if it does
        not."""
        found = positions_along(self.scope, ref)
        return (0, ()) if found is None or found[2] > MOST else found[:2]

    def inside(self, ref: Ref) -> tuple[list[Ref], tuple[Atom, ...]] | None:
        """Returns the factors of what is summed (or what the maximum is taken of), under the same labels each time, and
        the labels that the result lacks; None for anything else."""
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
        """Yields a value, then the values from which it is computed elementwise or as a sum."""
        seen: set[Key] = set()
        todo = deque([ref])
        while todo:  # nearby values come first
            found = self.space.canonical(todo.popleft())
            key = self.key(found)
            if key in seen or len(seen) > _VISITED:
                continue
            seen.add(key)
            yield found
            reduced = self.inside(found)
            todo += reduced[0] if reduced is not None else self.space.uses(found) or []

    def factors(self, ref: Ref) -> Iterator[Ref]:
        """Yields the factors of a product, without casts and ones."""
        ref = self.core(ref)
        operands = self.space.uses(ref) if self.scope.name(ref) in ("mul", "and") else None
        if not operands:
            yield ref
        for operand in operands or ():
            if self.scope.number(operand) != 1:
                yield from self.factors(operand)

    def binary(self, ref: Ref, depth: int = 0) -> bool:
        """Returns whether a value is 0 or 1, whatever it is computed from, so that no derivative passes through it."""
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
        if kind_of(self.graph.dtype(ref.value)) == "b":
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
        """Returns whether a mask is 1 only where a position along some labels equals a number that does not vary along
        them."""
        for positions, index in self._compared(mask):
            if self.positions(positions)[1] == atoms and not self.space.atoms(index) & set(atoms):
                return True
        return False

    def exclusive(self, mask: Ref, atoms: tuple[Atom, ...]) -> bool:
        """Returns whether a mask is 1 at one place at most along some labels.

        That holds where :meth:`one_of` does, or where numbers that differ along these labels are compared with a
        position.
        """
        if self.one_of(mask, atoms):
            return True
        for positions, index in self._compared(mask):
            along = self.positions(positions)[1]
            if along and not set(along) & set(atoms) and self._distinct(index, atoms):
                return True
        return False

    def _compared(self, mask: Ref) -> Iterator[tuple[Ref, Ref]]:
        """Yields the pairs that the factors of a mask compare, in both orders."""
        for factor in self.factors(mask):
            operands = self.space.operands(factor) if self.scope.name(factor) == "eq" else None
            if operands:
                yield operands[0], operands[1]
                yield operands[1], operands[0]

    def _distinct(self, index: Ref, atoms: tuple[Atom, ...]) -> bool:
        """Returns whether indices differ along some labels, since they are the positions of the largest elements of a
        row."""
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
        """Returns whether a value is zero where some others are ``given``, whatever all the rest is."""
        return self.value(ref, given) == 0

    def value(self, ref: Ref, given: Mapping[Key, float]) -> float | None:
        """Evaluates a value as far as it is known where some others are ``given``."""
        return _Evaluation(self, given, self.space.atoms(self.space.canonical(ref))).of(ref)


class _Evaluation:
    """Evaluates values where some others are ``given``; asked about a value with the labels ``outer``."""

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
        """Returns whether a value may be computed from what is given: it comes later, and has the same labels, apart
        from summed ones."""
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
