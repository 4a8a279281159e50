"""The keys of one softmax: which values run along them, reductions over them, pieces that they come in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.patterns.expressions import Scope
from autopallas.patterns.match import Mismatch

__all__ = ["DEEPEST", "KeyAxis"]

T = TypeVar("T")

DEEPEST = 64
"""Most operations on one path that a proof looks through. No spelling of a softmax has so many, but a program may have
any number."""
_MOST_SOURCES = 60
"""Most values behind an axis among which a concatenation is looked for."""


class KeyAxis:
    """Answers questions about the axis S over which the exponentials of one site are summed.

    Attributes:
      scope, space: the site's values and its axis labels.
      axis: the labels of S.
      offset: where the keys start in a longer axis, as beside a sink column.
    """

    def __init__(self, scope: Scope, axis: tuple[Atom, ...], offset: int):
        self.scope, self.space = scope, scope.space
        self.axis = axis
        self.offset = offset
        self._memory: dict[Hashable, tuple[int, Any]] = {}  # per question, (label refinements at that time, answer)

    def remembered(self, what: str, ref: Ref, compute: Callable[[], T], further: Hashable = None) -> T:
        """Returns the outcome of ``compute``, which is called once for each use of a value.

        Calls it again after labels were refined, since more can be read then.
        """
        key = (what, ref.value, self.space.view(ref.view), self.space.resolve(self.axis), further)
        known = self._memory.get(key)
        if known is None or known[0] != self.space.refinements:
            outcome = compute()
            known = self._memory[key] = self.space.refinements, outcome
        found: T = known[1]
        return found

    def carries_axis(self, ref: Ref) -> bool:
        return bool(self.space.atoms(ref) & set(self.space.resolve(self.axis)))

    def carries_scores(self, ref: Ref) -> bool:
        return self.scope.depends(ref.value) and self.carries_axis(ref)

    def is_row(self, ref: Ref) -> bool:
        return self.scope.depends(ref.value) and not self.carries_axis(ref)

    def behind(
        self, ref: Ref, operands: Callable[[Ref], Iterable[Ref]], most: float = math.inf, nearest_first: bool = False
    ) -> Iterator[Ref]:
        """Yields a value, then the values from which it is computed, as far as ``operands`` lists them."""
        seen: set[int] = set()
        todo = deque([ref])
        while todo and len(seen) <= most:
            at = self.space.canonical(todo.popleft() if nearest_first else todo.pop())
            if at.value not in seen:
                seen.add(at.value)
                yield at
                todo += operands(at)

    def reduced(self, ref: Ref) -> Ref:
        """Returns the operand of a reduction over exactly the keys.

        Raises:
          Mismatch: it reduces more or less than the keys.
        """
        node = self.scope.node(ref)
        assert node is not None
        axes, source = node.params["axes"], node.inputs[0]
        shape, labels = self.scope.graph.shape(source), self.space.resolve(self.axis)
        sizes = [shape[d] for d in axes]
        groups = self.space.cut(labels, [n for n in sizes if n != 1])
        if groups is None or math.prod(sizes) != self.space.extent(labels):
            raise Mismatch(
                "a maximum is taken over more or less than the keys",
                advice="Take the maximum over the keys alone, the axis of the softmax, or use jax.nn.softmax.",
            )
        left, kept = iter(groups), iter(ref.view)
        axis = {d: (0, ()) if shape[d] == 1 else next(left) for d in axes}
        return Ref(source, tuple(axis[d] if d in axis else next(kept) for d in range(len(shape))))

    def segments(self, value: int, axis: int) -> list[int] | None:
        """Returns the sizes of the pieces if the axis of a value comes from a concatenation."""
        graph = self.scope.graph
        size = graph.shape(value)[axis]
        todo, seen = [value], set[int]()
        while todo and len(seen) < _MOST_SOURCES:
            value = todo.pop()
            node = graph.definitions.get(value)
            if node is None or value in seen:
                continue
            seen.add(value)
            if node.name == "stack" and node.params["axis"] == axis:
                return [1] * len(node.inputs)
            if node.name == "concatenate":
                if node.params["dimension"] == axis:
                    return [graph.shape(i)[axis] for i in node.inputs]
            elif self.space.operands(self.space.full(value)) is None:
                continue
            shapes = ((i, graph.shape(i)) for i in node.inputs[::-1])
            todo += [i for i, shape in shapes if len(shape) > axis and shape[axis] == size]
        return None
