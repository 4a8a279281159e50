"""Recognises rows that are sorted by expert, where each expert has an interval: ``start[e] <= row < end[e]``.

If ``end`` is the running sum of how many rows each expert has, and ``start`` is where the rows of the expert before
end, the intervals do not overlap. A row's expert is then the number of intervals that end before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopallas.graph import Graph, Node, Ref, Space
from autopallas.graph.labels import Atom, Dimension
from autopallas.numerics.casts import kind_of
from autopallas.patterns.expressions import Scope
from autopallas.patterns.mixture_of_experts.axes import positions_along
from autopallas.patterns.mixture_of_experts.signs import Signs

__all__ = ["Interval", "interval"]

_LOWER, _UPPER = "lower", "upper"
_SIDES = {
    ("ge", 0): _LOWER, ("le", 1): _LOWER, ("lt", 0): _UPPER, ("gt", 1): _UPPER,
}  # fmt: skip
"""Bound that a comparison sets on positions, by their place among its operands."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Intervals of rows, one for each expert.

    Attributes:
      rows: the positions of rows.
      ends: where the intervals end, under labels of experts and of whatever has rows of its own.
      expert: labels of experts.
      kept: the values that show that the intervals do not overlap.
    """

    rows: Ref
    ends: Ref
    expert: tuple[Atom, ...]
    kept: frozenset[int]

    def along(self, space: Space) -> int:
        """Returns the axis of ``ends`` that counts experts."""
        return next(d for d, (_, atoms) in enumerate(self.ends.view) if space.resolve(atoms) == self.expert)

    def dimension(self, graph: Graph) -> tuple[Dimension, int]:
        """Returns the dimension of rows, and how many there are."""
        axis = graph.definitions[self.rows.value].params["dimension"]
        return self.rows.view[axis], graph.shape(self.rows.value)[axis]

    def index(self, space: Space, graph: Graph, experts: int) -> Ref:
        """Returns the expert of each row.

        ``experts`` is the number of an array with the axes of ``ends`` except that of experts, and then one of rows.
        """
        axis = self.along(space)
        view = self.ends.view
        return Ref(experts, (*view[:axis], *view[axis + 1 :], self.dimension(graph)[0]))


def interval(scope: Scope, ref: Ref, node: Node) -> Interval | None:
    """Reads which rows belong to an expert; None if a value does not tell that, or rows may belong to several
    experts."""
    if node.name != "and":
        return None
    found = {}
    proof = _Proof(scope)
    for operand in scope.space.operands(ref) or ():
        bound = _bound(scope, operand)
        if bound is not None:
            found[bound[0]] = bound[1:3]
            proof.keep_between(bound[3], bound[2].value)
    if len(found) != 2 or not scope.space.same(found[_LOWER][0], found[_UPPER][0]):
        return None
    (rows, start), (_, end) = found[_LOWER], found[_UPPER]
    return proof.of(rows, start, end)


def _bound(scope: Scope, ref: Ref) -> tuple[str, Ref, Ref, int] | None:
    """Returns (which bound, positions, bound, what is compared) of a comparison of positions with bounds."""
    operands = scope.space.operands(ref) if scope.name(ref) in ("ge", "gt", "le", "lt") else None
    for place, rows in enumerate(operands or ()):
        side = _SIDES.get((scope.name(ref) or "", place))
        counted = positions_along(scope, rows) if side is not None else None
        if side is not None and operands is not None and counted is not None and counted[0] == 0:
            while scope.name(rows) == "convert_element_type":
                (rows,) = scope.space.operands(rows) or (rows,)
            return side, rows, operands[1 - place], scope.graph.definitions[ref.value].inputs[1 - place]
    return None


class _Proof:
    def __init__(self, scope: Scope):
        self.scope, self.space, self.graph = scope, scope.space, scope.graph
        self.kept: set[int] = set()

    def of(self, rows: Ref, start: Ref, end: Ref) -> Interval | None:
        found = self._before(start)
        if found is None:
            return None
        total, counts, expert = found
        if not self.space.same(total, end) and not self._is_sum(end, start, counts):
            return None
        if not expert or set(expert) & self.space.atoms(rows) or not Signs(self.graph).nonnegative(counts.value):
            return None
        if self.graph.dtype(total.value).name not in ("int32", "int64"):
            return None  # a narrower type may not hold the total: then a sum wraps around
        return Interval(rows, end, expert, frozenset(self.kept | {end.value}))

    def _before(self, ref: Ref) -> tuple[Ref, Ref, tuple[Atom, ...]] | None:
        """Returns (running sum, counts, labels) if a value is a running sum without the last count."""
        node = self.scope.node(ref)
        if node is None:
            return None
        self.kept.add(ref.value)
        if node.name == "sub":
            total, counts = self.space.operands(ref) or (None, None)
            own = None if total is None else self._running(total)
            if own is None or counts is None or total is None or not self.space.same(own[0], counts):
                return None
            return total, *own
        if node.name == "concatenate":
            return self._shifted(ref, node, int(node.params["dimension"]))
        return None

    def _shifted(self, ref: Ref, node: Node, axis: int) -> tuple[Ref, Ref, tuple[Atom, ...]] | None:
        """Reads a zero followed by all running sums, or by all but the last, as a running sum without the last
        count."""
        if len(node.inputs) != 2 or self.graph.shape(node.inputs[0])[axis] != 1 or ref.view[axis][0] != 0:
            return None
        first = self.space.canonical(Ref(node.inputs[0], (*ref.view[:axis], (0, ()), *ref.view[axis + 1 :])))
        if self.scope.number(first) != 0 and not Signs(self.graph).counts_below(first.value, 1):
            return None
        atoms = ref.view[axis][1]
        size = self.graph.shape(node.inputs[1])[axis]
        extent = self.space.extent(atoms)
        if size not in (extent - 1, extent):
            return None
        (whole,) = self.space.inside(ref, [size])
        second = self.space.canonical(Ref(node.inputs[1], (*ref.view[:axis], whole, *ref.view[axis + 1 :])))
        places = [d for d, dimension in enumerate(second.view) if dimension == whole]
        if len(places) != 1:
            return None
        (place,) = places
        self.keep_between(node.inputs[1], second.value)
        total = Ref(second.value, (*second.view[:place], (0, atoms), *second.view[place + 1 :]))
        if self.graph.shape(total.value)[place] != extent:
            return None
        own = self._running(total)
        return None if own is None else (total, *own)

    def _running(self, ref: Ref) -> tuple[Ref, tuple[Atom, ...]] | None:
        """Returns (counts, labels) of a running sum."""
        node = self.scope.node(ref)
        if (
            node is None
            or node.name != "cumsum"
            or node.params["reverse"]
            or kind_of(self.graph.dtype(ref.value)) not in "iu"
        ):
            return None
        offset, atoms = ref.view[node.params["axis"]]
        if offset or self.space.extent(atoms) != self.graph.shape(ref.value)[node.params["axis"]]:
            return None
        self.kept.add(ref.value)
        return self.space.canonical(Ref(node.inputs[0], ref.view)), self.space.resolve(atoms)

    def _is_sum(self, ref: Ref, start: Ref, counts: Ref) -> bool:
        operands = self.space.operands(ref) if self.scope.name(ref) == "add" else None
        return operands is not None and any(
            self.space.same(a, start) and self.space.same(b, counts) for a, b in (operands, operands[::-1])
        )

    def keep_between(self, value: int, source: int) -> None:
        """Keeps the layout operations between two values."""
        space = self.space
        for step in space.chain(space.full(value)):
            if step.value == source:
                return
            self.kept.add(step.value)
