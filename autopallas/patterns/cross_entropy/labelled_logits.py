"""Labels the logits of one head, or of several that are read together, and values beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from autopallas import jaxprs
from autopallas.graph import Graph, Node, Ref, Space
from autopallas.graph.labels import Atom, Dimension, View
from autopallas.patterns.advice import (
    BETWEEN_LOGITS,
    GRADIENTS_OF_EXAMPLES,
    ONE_LABEL,
    OWN_LOGITS,
    OWN_PRODUCTS,
    PRECISION,
    SAME_HEADS,
    WHOLE_ROWS,
)
from autopallas.patterns.expressions import Scope, precision_of
from autopallas.patterns.forward import in_backward
from autopallas.patterns.match import Mismatch

__all__ = ["JOINS", "HeadLogits", "LabelledLogits"]

_FURTHEST = 8
"""Most equations through which a value is followed back, for what is said of it."""
JOINS = frozenset({"concatenate", "stack"})
"""Primitives that put one array together from several."""


@dataclass(frozen=True, slots=True)
class HeadLogits:
    """The logits of one head: the values that are multiplied, and the labels over which the product sums."""

    score: Ref
    x: Ref
    w: Ref
    hidden: list[Atom]


class LabelledLogits:
    """Logits under labels of rows and of the vocabulary.

    Args:
      graph: the program.
      dot: the contraction that gives the logits.
      inside: numbers of the values of the logits' size around it.
      ends: the computations into which these flow.
      others: further contractions whose results are logits, each with the values into which they flow.
      alone: values into which the first one's logits flow, of those that are read with the others'.
      taken: the side of the contraction whose axis is that of the rows, where that is known.
    """

    def __init__(
        self,
        graph: Graph,
        dot: Node,
        inside: set[int],
        ends: Sequence[Node],
        others: Sequence[tuple[Node, Set[int]]],
        alone: Set[int],
        taken: int | None,
    ):
        self.graph, self.dot, self.inside, self.ends = graph, dot, inside, ends
        self.logits = dot.outputs[0]
        self.others, self._alone, self._taken = others, alone, taken
        self.further: list[HeadLogits] = []
        """Logits of the others, seen under the labels of the first one's; filled by :meth:`_join`."""
        self.side = 0

    def _anchor(self, node: Node) -> bool:
        """Fixes the labels by a sum of exponentials over the axis of one operand; returns whether the end is such a
        sum."""
        source, axes = _summed(self.graph, node) or (None, ())
        if source is None or not self._sums_exponentials(source):
            return False
        self.scope = scope = Scope(self.graph, through=True)
        self.space = space = scope.space
        scope.score = self.logits
        at = space.full(source)
        score = _seen_from(space, at, {self.logits})
        if score is None:
            return False
        contraction = space.contraction(score)
        if contraction is None:
            return False
        reduced = {a for d in axes for a in space.resolve(at.view[d][1])}
        left, right, contracted = contraction
        self.hidden = [a for _, atoms in contracted for a in atoms]
        for side, (rows, weight) in enumerate(((left, right), (right, left))):
            if side == self._taken:
                continue
            own = space.atoms(weight) - set(space.resolve(self.hidden))
            if reduced and reduced <= own and not reduced & space.atoms(rows):
                self.score, self.x, self.w, self.side = score, rows, weight, side
                self._known = {self.logits: score}
                self.vocabulary = tuple(a for _, atoms in score.view for a in space.resolve(atoms) if a in reduced)
                self.rows = tuple(a for _, atoms in score.view for a in space.resolve(atoms) if a not in reduced)
                self._apart = tuple(a for a in self.rows if a in own)
                return True
        return False

    def _join(self) -> None:
        """Finds the logits of the other contractions under the labels of the first one's.

        Raises:
          Mismatch: they do not have the same rows and the same vocabulary.
        """
        reached, left = set(self._alone), list(self.others)
        self.further = []
        while left:
            seen = ((n, self._beside(dot.outputs[0], reached, inside)) for n, (dot, inside) in enumerate(left))
            position, at = next(((n, at) for n, at in seen if at is not None), (0, None))
            if at is None:
                raise Mismatch(
                    "the logits of several products are read together in a way that is not understood",
                    advice=SAME_HEADS,
                )
            self.further.append(self._head(at))
            self._known[at.value] = at
            reached |= left.pop(position)[1]

    def _beside(self, logits: int, reached: Set[int], inside: Set[int]) -> Ref | None:
        """Returns other logits, seen from where they are first read together with values that are aligned already."""
        both = reached & inside
        if both:
            return _seen_from(self.space, self._aligned(min(both)), {logits})
        for node in self.ends:
            if node.name != "dot_general":
                continue
            for side, number in enumerate(node.inputs):
                if number in reached and node.inputs[1 - side] in inside:
                    with contextlib.suppress(Mismatch, KeyError):
                        _, read = self._factors(node, self._aligned(number), side)
                        return _seen_from(self.space, read, {logits})
        return None

    def _head(self, at: Ref) -> HeadLogits:
        space, shape = self.space, self.graph.shape(at.value)
        rows, vocabulary = set(self.resolved(self.rows)), set(self.resolved(self.vocabulary))
        labels = [a for _, atoms in at.view for a in space.resolve(atoms)]
        whole = all(offset == 0 and space.extent(a) == n for (offset, a), n in zip(at.view, shape, strict=True))
        if not whole or len(set(labels)) != len(labels) or set(labels) != rows | vocabulary:
            raise Mismatch(
                "the loss reads logits of several products, of which each has other rows or columns", advice=SAME_HEADS
            )
        contraction = space.contraction(at)
        if contraction is not None:
            left, right, contracted = contraction
            hidden = [a for _, atoms in contracted for a in atoms]
            apart = set(self.apart)
            for x, w in ((left, right), (right, left)):
                own = [space.atoms(operand) - set(space.resolve(hidden)) for operand in (x, w)]
                if rows - apart <= own[0] <= rows and own[1] == vocabulary | apart:
                    kinds = {self.graph.dtype(n) for n in (at.value, self.logits)}
                    if np.float64 in kinds and len(kinds) > 1:
                        raise Mismatch(
                            "the products that give the logits are computed in different precisions", advice=PRECISION
                        )
                    if precision_of(self.graph, self.graph.definitions[at.value]) != precision_of(self.graph, self.dot):
                        raise Mismatch(
                            "the products that give the logits ask for different precisions", advice=PRECISION
                        )
                    return HeadLogits(at, x, w, hidden)
        raise Mismatch(
            "the loss reads logits of several products, of which each has other rows or columns", advice=SAME_HEADS
        )

    def _sums_exponentials(self, value: int) -> bool:
        """Returns whether a value is an exponential of logits, apart from casts, masks and factors."""
        for _ in range(8):
            node = self.graph.definitions.get(value)
            if node is None:
                return False
            if node.name in ("exp", "exp2"):
                return value in self.inside
            following = next((i for i in node.inputs if i in self.inside), None)
            if following is None:
                return False
            value = following
        return False

    def resolved(self, atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        return self.space.resolve(atoms)

    @property
    def apart(self) -> frozenset[Atom]:
        """Labels of rows that have a weight of their own each."""
        return frozenset(self.resolved(self._apart))

    @property
    def counted(self) -> tuple[Atom, ...]:
        """Labels of rows that share a weight."""
        return tuple(a for a in self.resolved(self.rows) if a not in self.apart)

    def _back_from(self, value: int) -> Iterator[Node]:
        """Yields the computations on the only way from the logits to a value, from the last one on."""
        for _ in range(_FURTHEST):
            node = self.graph.definitions.get(value)
            if node is None:
                return
            yield node
            following = {number for number in node.inputs if number in self.inside}
            if len(following) != 1:
                return
            (value,) = following

    def _aligned(self, value: int, known: Mapping[int, Ref] | None = None) -> Ref:
        """Returns a value that is computed from ``known`` ones (by default the logits), seen under the labels of
        these."""
        scratch = Space(self.graph, through=True)
        full = scratch.full(value)
        for base in (self._known if known is None else known).values():
            found = _seen_from(scratch, full, {base.value})
            if found is not None:
                break
        else:
            joined = next((node for node in self._back_from(value) if node.name in JOINS), None)
            if joined is not None:
                where = jaxprs.location(joined.equation)
                raise Mismatch(f"the loss reads a part of what {joined.name} joins at {where}", advice=OWN_LOGITS)
            raise Mismatch("a value beside the logits is not understood", advice=BETWEEN_LOGITS)
        meaning: dict[Atom, tuple[Atom, ...]] = {}
        for (own_offset, own), (offset, atoms) in zip(found.view, base.view, strict=True):
            own = scratch.resolve(own)
            groups = self.space.cut(atoms, [scratch.sizes[a] for a in own])
            if own_offset != offset or groups is None or scratch.extent(own) != self.space.extent(atoms):
                if set(self.resolved(atoms)).isdisjoint(self.resolved(self.vocabulary)):
                    raise Mismatch("the loss reads the rows of one product in parts, each apart", advice=OWN_PRODUCTS)
                raise Mismatch("a part of the logits is used apart from the rest", advice=WHOLE_ROWS)
            for atom, (_, group) in zip(own, groups, strict=True):
                if atom in meaning:
                    raise Mismatch("the logits are read along a diagonal", advice=ONE_LABEL)
                meaning[atom] = group
        view: list[Dimension] = []
        for offset, atoms in full.view:
            resolved = scratch.resolve(atoms)
            if any(a not in meaning for a in resolved):
                if any(map(in_backward, self._back_from(value))):
                    raise Mismatch(
                        "the gradient of each row is multiplied by activations, and not summed over rows",
                        advice=GRADIENTS_OF_EXAMPLES,
                    )
                raise Mismatch(
                    "the logits are repeated along a further axis",
                    advice="Take the loss of each row once, and repeat the losses, not the logits.",
                )
            view.append((offset, tuple(x for a in resolved for x in meaning[a])))
        at = Ref(value, tuple(view))
        self._learn(at)
        return at

    def _learn(self, at: Ref) -> None:
        """Notes under which labels scatters are read, since other values can be aligned by them."""
        todo, seen = [at], set()
        while todo:
            ref = self.space.canonical(todo.pop())
            if ref.value in seen or ref.value not in self.inside:
                continue
            seen.add(ref.value)
            if self.graph.name(ref.value) == "scatter-add":
                self._known.setdefault(ref.value, ref)
            else:
                todo += self.space.uses(ref) or []

    def _factors(self, node: Node, at: Ref, side: int) -> tuple[View, Ref]:
        """Returns the result's dimensions and the other factor of a contraction of ``at`` with a factor that has no
        axis of its own."""
        contracting, batch = node.params["dimension_numbers"]
        pairs = zip((*contracting[side], *batch[side]), (*contracting[1 - side], *batch[1 - side]), strict=True)
        shared = {o: at.view[d] for d, o in pairs}
        other = node.inputs[1 - side]
        read = Ref(other, tuple(shared[o] for o in range(len(self.graph.shape(other)))))
        first = [at.view[d] for d in batch[side]]
        own = [dimension for d, dimension in enumerate(at.view) if d not in (*contracting[side], *batch[side])]
        return (*first, *own), read


def _summed(graph: Graph, node: Node) -> tuple[int, Sequence[int]] | None:
    """Returns the value that a node sums, and along which axes: a product with ones alone is a sum too."""
    if node.name == "reduce_sum":
        return node.inputs[0], node.params["axes"]
    if node.name == "dot_general":
        contracting, batch = node.params["dimension_numbers"]
        for side, other in enumerate(reversed(node.inputs)):
            along = len(contracting[1 - side]) + len(batch[1 - side])
            if len(graph.shape(other)) == along:
                scope = Scope(graph)
                if scope.number(scope.space.full(other)) == 1:
                    return node.inputs[side], contracting[side]
    return None


def _seen_from(space: Space, at: Ref, wanted: set[int]) -> Ref | None:
    """Returns the use of one of some values from which another value is computed elementwise."""
    todo, seen = [at], set()
    while todo:
        ref = todo.pop()
        for step in space.chain(ref):
            if step.value in wanted:
                return step
            ref = step
        key = (ref.value, space.view(ref.view))
        if key not in seen:
            seen.add(key)
            todo += space.uses(ref) or []
    return None
