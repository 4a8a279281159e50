"""What is known of a value, element by element, where a few others are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.patterns.experts_choice import folded
from autopallas.patterns.expressions import Scope

__all__ = ["MOST", "Key", "Values"]

Key = tuple[int, Any]
"""Of an element of a value, under labels."""

MOST = 2**20
"""Counts up to a small multiple of this are exact in the dtypes below."""

_COUNTED = frozenset({"int32", "int64", "float32", "float64"})
_DEPTH = 40
_VISITED = 600


class Values:
    """Questions about the values of one site, each asked of an element: a value under labels."""

    def __init__(self, scope: Scope):
        self.scope, self.space, self.graph = scope, scope.space, scope.graph

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
        ref = self.uncast(ref)
        node = self.scope.node(ref)
        if node is None or node.name != "iota" or not self.counted(ref):
            return 0, ()
        axis = node.params["dimension"]
        offset, atoms = ref.view[axis]
        return offset, self.space.resolve(atoms) if self.graph.shape(ref.value)[axis] <= MOST else ()

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
        todo = [ref]
        while todo:
            found = self.space.canonical(todo.pop())
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
        node = self.scope.node(ref)
        if self.graph.dtype(ref.value).kind == "b":
            return True
        if node is None or depth > _DEPTH:
            return False
        operands = self.space.uses(ref) or []
        if node.name == "select_n":
            operands = operands[1:]
        elif self.scope.name(ref) not in ("mul", "convert_element_type", "and", "max", "min"):
            return False
        return bool(operands) and all(self.binary(operand, depth + 1) for operand in operands)

    def zero(self, ref: Ref, given: Mapping[Key, float]) -> bool:
        """Whether a value is zero where some others are ``given``, whatever all the rest is."""
        return self.value(ref, given) == 0

    def value(self, ref: Ref, given: Mapping[Key, float]) -> float | None:
        """A value as far as it is known where some others are ``given``."""
        return self._value(ref, given, {})

    def _value(self, ref: Ref, given: Mapping[Key, float], known: dict[Key, float | None]) -> float | None:
        number = self.scope.number(ref)
        if number is not None:
            return number
        ref = self.space.canonical(ref)
        key = self.key(ref)
        if key in given:
            return given[key]
        if key not in known:
            known[key] = None
            node = self.scope.node(ref)
            if node is None or node.equation.effects:
                return None
            reduced = self.inside(ref)
            operands = self.space.uses(ref) if reduced is None else reduced[0]
            if operands is None:
                return None
            values = [self._value(operand, given, known) for operand in operands]
            if reduced is None:
                known[key] = folded(self.scope.name(ref) or "", values, self.graph.dtype(ref.value))
            elif node.name == "reduce_max":
                known[key] = values[0]
            else:
                known[key] = 0.0 if 0 in values else None
        return known[key]
