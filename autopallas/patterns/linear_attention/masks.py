"""Proves that a mask is a triangle: which steps each step sees, by comparisons of positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.numerics.casts import counts_exactly, kind_of
from autopallas.patterns.expressions import Scope

__all__ = ["COMPARISONS", "MaskReader", "Seen", "Triangle"]

_DEEPEST = 16
"""Longest chain of elementwise equations that is looked at."""
COMPARISONS = frozenset({"ge", "gt", "le", "lt"})
_MIRRORED = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}


_Position: TypeAlias = tuple[tuple[Atom, ...], int]
"""The labels of an axis, and what is added to the position along it."""


class Seen(NamedTuple):
    """Which steps s a step t sums over: those up to ``t + offset``, or from there on where ``reverse``."""

    reverse: bool
    offset: int

    @property
    def strict(self) -> bool | None:
        """Whether t itself is left out; None where that is not the only question."""
        return {0: False, 1 if self.reverse else -1: True}.get(self.offset)

    def inverted(self) -> Seen:
        return Seen(not self.reverse, self.offset + (-1 if self.reverse else 1))


class Triangle(NamedTuple):
    """A mask of ones and zeros, or of booleans.

    Attributes:
      seen: which pairs of steps it holds.
      steps: the labels of the steps t that see others.
    """

    seen: Seen
    steps: tuple[Atom, ...]


class MaskReader:
    """Reads masks, and the positions that they compare.

    Args:
      scope: the site's values.
      keys: the labels of the steps s that are seen.
    """

    def __init__(self, scope: Scope, keys: Sequence[Atom]):
        self.scope, self.space, self.graph, self.keys = scope, scope.space, scope.graph, keys

    def mask(self, ref: Ref) -> Triangle | None:
        """Returns the triangle of a mask of booleans, or of ones and zeros."""
        inverted = False
        found: Triangle | None = None
        for _ in range(_DEEPEST):
            ref = self.space.canonical(ref)
            name, operands = self.scope.name(ref), self.space.operands(ref)
            if name is None:
                found = self._captured(ref)
                break
            if operands is None:
                return None
            if name in COMPARISONS:
                found = self._compared(name, operands)
                break
            if name == "convert_element_type":
                (ref,) = operands
            elif name == "not" and kind_of(self.graph.dtype(ref.value)) == "b":
                (ref,), inverted = operands, not inverted
            elif name == "select_n" and len(operands) == 3:
                sides = self.scope.number(operands[1]), self.scope.number(operands[2])
                if sides not in ((0, 1), (1, 0)):
                    return None
                ref, inverted = operands[0], inverted != (sides == (1, 0))
            else:
                return None
        if found is None or not inverted:
            return found
        return found._replace(seen=found.seen.inverted())

    def _keys(self) -> tuple[Atom, ...]:
        return self.space.resolve(self.keys)

    def _compared(self, name: str, operands: Sequence[Ref]) -> Triangle | None:
        """Returns the triangle that a comparison of positions is."""
        pair = self._opposed(operands)
        if pair is None:
            return None
        first, second = pair
        if self.space.resolve(first[0]) == self._keys():  # s against t is t against s, mirrored
            first, second, name = second, first, _MIRRORED[name]
        (steps, offset), (keys, further) = first, second
        if self.space.resolve(keys) != self._keys() or {*self.space.resolve(steps)} & {*self._keys()}:
            return None
        difference = offset - further  # t + offset (name) s + further
        reverse, one_more = {"ge": (False, 0), "gt": (False, -1), "le": (True, 0), "lt": (True, 1)}[name]
        return Triangle(Seen(reverse, difference + one_more), steps)

    def _opposed(self, operands: Sequence[Ref]) -> tuple[_Position, _Position] | None:
        """Returns the positions that a comparison is about: of its two sides, or of a difference beside a number."""
        for place in (0, 1):
            ref = self.space.canonical(operands[place])
            number = self.scope.number(operands[1 - place])
            given = self.space.operands(ref) if number is not None and self.scope.name(ref) == "sub" else None
            if given is None or number is None:
                continue
            first, second = (self.position(x) for x in given)
            largest = max(self.graph.shape(ref.value), default=0)
            dtype = self.graph.dtype(ref.value)
            if first is None or second is None or number != int(number) or abs(number) > largest:
                return None
            if kind_of(dtype) == "u" or not counts_exactly(dtype, 4 * largest + abs(first[1]) + abs(second[1])):
                return None
            second = second[0], second[1] + int(number)
            return (first, second) if place == 0 else (second, first)
        first, second = (self.position(x) for x in operands)
        return None if first is None or second is None else (first, second)

    def position(self, ref: Ref) -> _Position | None:
        """Returns (labels, offset) of a value that is ``offset`` plus the position along an axis."""
        space, offset = self.space, 0
        largest = max(self.graph.shape(ref.value), default=0)
        for _ in range(_DEEPEST):
            ref = space.canonical(ref)
            name, dtype = self.scope.name(ref), self.graph.dtype(ref.value)
            if not counts_exactly(dtype, 2 * largest + abs(offset)):
                return None
            view = space.view(ref.view)
            if name == "iota":
                node = self.graph.definitions[ref.value]
                start, steps = view[int(node.params["dimension"])]
                return (steps, offset + start) if steps else None
            if name is None:
                counted = self._counted(ref)
                varying = [own for own in view if own[1]]
                if counted is None or len(varying) != 1:
                    return None
                return varying[0][1], offset + counted + varying[0][0]
            operands = space.operands(ref)
            if operands is not None and name == "convert_element_type":
                (ref,) = operands
                continue
            if operands is None or name not in ("add", "sub") or kind_of(dtype) == "u":  # which may wrap around
                return None
            number, place = self.scope.number(operands[1]), 0
            if number is None and name == "add":
                number, place = self.scope.number(operands[0]), 1
            if number is None or number != int(number) or abs(number) > largest:
                return None
            offset += int(number) if name == "add" else -int(number)
            ref = operands[place]
        return None

    def _counted(self, ref: Ref) -> int | None:
        """Returns the first of the numbers of a captured array that counts, else None."""
        constant = self.constant(ref)
        if constant is None or constant.ndim != 1 or not np.issubdtype(constant.dtype, np.integer):
            return None
        first = int(constant[0])
        return first if np.array_equal(constant, np.arange(first, first + constant.size)) else None

    def constant(self, ref: Ref) -> np.ndarray | None:
        """Returns the elements of a captured array, without axes of size 1, where these can be looked at."""
        constant = self.scope.captured(ref)
        return None if constant is None or constant.size <= 1 else np.squeeze(constant)

    def _captured(self, ref: Ref) -> Triangle | None:
        """Returns the triangle that a captured array is."""
        constant = self.constant(ref)
        axes = [own for own in self.space.view(ref.view) if own[1]]
        if constant is None or constant.ndim != 2 or len(axes) != 2 or any(start for start, _ in axes):
            return None
        (_, steps), (_, keys) = axes
        if steps == self._keys():
            constant, steps, keys = constant.T, keys, steps
        if keys != self._keys() or (self.space.extent(steps), self.space.extent(keys)) != constant.shape:
            return None
        kept = constant.astype(bool)
        if not np.array_equal(kept.astype(constant.dtype), constant):
            return None
        for offset in (0, -1):
            lower = np.tri(kept.shape[0], kept.shape[1], offset, dtype=bool)
            if np.array_equal(kept, lower):
                return Triangle(Seen(False, offset), steps)
            if np.array_equal(kept, lower.T):
                return Triangle(Seen(True, -offset), steps)
        return None
