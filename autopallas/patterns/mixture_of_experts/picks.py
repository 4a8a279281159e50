"""Recognises experts that are chosen by gathers: from what all of them compute, or from their matrices, one per row.

``y[t, chosen[t]]`` and ``x[t] @ w[chosen[t]]`` are what the chosen expert of a row computes. Under the labels of rows,
such a gather is a view: its operand is seen with a label of experts where the chosen one is read. So gathers with the
same index vanish like layout does, and the rest is read as in the other spellings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.lax import GatherScatterMode

from autopallas.graph import Graph, Node, Ref, Space
from autopallas.graph.labels import Atom, Dimension, View, is_product
from autopallas.numerics.casts import kind_of
from autopallas.patterns.expressions import Scope
from autopallas.patterns.mixture_of_experts.axes import position_of

__all__ = ["GATHERED", "PICKED", "Pick", "Picking", "Place", "SlotPick", "pick_at", "slots_at"]

PICKED = "every expert computes every token, of which those chosen are picked"
GATHERED = "the matrices of a token's experts are gathered for it"
_STEPS = 8
"""Most casts and layout operations between a gather of matrices and their product."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Rows that choose one expert each.

    Attributes:
      index: the chosen expert, under labels of rows.
      expert: labels of experts.
      size: number of experts.
    """

    index: Ref
    expert: tuple[Atom, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    """One index of a gather.

    Attributes:
      part: its position among the parts of the gather's indices.
      first, labels: the elements of the indexed dimension that are slots: where they start, and their labels.
      size: the size of that dimension.
    """

    part: int
    first: int
    labels: tuple[Atom, ...]
    size: int


@dataclass(frozen=True, slots=True)
class SlotPick:
    """Rows that are picked from the slots of experts.

    Attributes:
      number: the number of the gather's result.
      rows: its dimensions that run over rows.
      places: where a row is read: the expert and its slot, in one index or in several.
      beside: which of several concatenated parts has the slots; None where slots are all that is picked from.
    """

    number: int
    rows: View
    places: tuple[Place, ...]
    beside: int | None = None


class Picking(Space):
    """Provides labels under which gathers of the chosen experts are views.

    Attributes:
      pick: the rows that choose, once known.
      slots: the rows that are picked from slots, if that is what is read.
      gathers: the gathers that were read as views.
    """

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.pick: Pick | None = None
        self.slots: SlotPick | None = None
        self.gathers: set[int] = set()
        self._scope = Scope(graph)
        self._scope.space = self

    def _step(self, ref: Ref) -> Ref | None:
        node = self.graph.definitions.get(ref.value)
        if node is None or node.name != "gather":
            return super()._step(ref)
        found = self.gathered(ref, node)
        if found is None:
            return None
        view, indices = found
        labels: list[Dimension]
        if self.slots is not None and ref.value == self.slots.number:
            labels = [(place.first, place.labels) for place in self.slots.places]
        elif not indices:  # it has only positions as indices
            labels = []
        elif self.pick is not None and self._picks(node, indices):
            self.gathers.add(ref.value)
            labels = [(0, self.pick.expert)]
        else:
            return None
        own = list(view)
        for (_, _, d), dimension in zip(indices, labels, strict=True):
            own[d] = dimension
        return Ref(node.inputs[0], tuple(own))

    def _picks(self, node: Node, indices: Sequence[tuple[Ref, int, int]]) -> bool:
        """Returns whether a gather reads the chosen experts."""
        assert self.pick is not None
        if len(indices) != 1:
            return False
        ((index, _, d),) = indices
        return self.graph.shape(node.inputs[0])[d] == self.pick.size and self.same(index, self.pick.index)

    def gathered(self, ref: Ref, node: Node) -> tuple[View, list[tuple[Ref, int, int]]] | None:
        """Reads a gather of one place for each row: (view of the operand, [(index, its part, dimension of the
        operand)]).

        The indices are given as they are computed, except positions; the view lacks their dimensions.
        """
        graph, params = self.graph, node.params
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        operand, indices = node.inputs[:2]
        shape = graph.shape(operand)
        batch = [dimension for d, dimension in enumerate(ref.view) if d not in numbers.offset_dims]
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        window = [d for d in range(len(shape)) if d not in gone]
        view: dict[int, Dimension] = {d: ref.view[o] for d, o in zip(window, numbers.offset_dims, strict=True)}
        for own, theirs in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            view[own] = batch[theirs]
        found: list[tuple[Ref, int, int]] = []
        for part, d in enumerate(numbers.start_index_map):
            piece = self.canonical(Ref(indices, (*batch, (part, ()))))
            number = self._scope.number(piece)
            if sizes[d] == shape[d] and d in window:  # a whole axis has only one place to begin
                if number != 0 and params["mode"] == GatherScatterMode.FILL_OR_DROP:
                    return None
                continue
            if sizes[d] != 1:
                return None
            along = position_of(self._scope, piece)
            if along is not None and not along[0] and self.extent(along[1]) == shape[d]:
                view[d] = along
            elif number is None:
                found.append((piece, part, d))
                view[d] = (0, ())
            else:
                return None
        if any(sizes[d] != shape[d] for d in window if d not in numbers.start_index_map):
            return None
        return tuple(view[d] for d in range(len(shape))), found

    def choose(self, pick: Pick) -> None:
        """Reads the gathers of these rows' experts as views from now on."""
        self.pick = pick
        self._canonical.clear()

    def choose_slots(self, slots: SlotPick) -> None:
        """Reads the gather of these rows as a view from now on."""
        self.slots = slots
        self._canonical.clear()


def pick_at(space: Picking, top: Ref) -> Pick | None:
    """Returns the pick of a value that is a gather, or a product with gathered matrices; None if it is neither."""
    for ref, node in _gathers(space, top):
        found = space.gathered(ref, node)
        if found is None or len(found[1]) != 1:
            continue
        ((index, _, d),) = found[1]
        size = space.graph.shape(node.inputs[0])[d]
        if size > 1 and space.atoms(index) and kind_of(space.graph.dtype(index.value)) in "iu":
            return Pick(index, space.fresh(size), size)
    return None


def slots_at(space: Picking, top: Ref) -> SlotPick | None:
    """Returns the rows that a value picks by indices, possibly of experts and their slots; None for any other value."""
    graph = space.graph
    node = graph.definitions.get(top.value)
    if node is None or node.name != "gather":
        return None
    found = space.gathered(top, node)
    if found is None or not found[1]:
        return None
    shape, offsets = graph.shape(node.inputs[0]), node.params["dimension_numbers"].offset_dims
    rows = tuple(dimension for d, dimension in enumerate(top.view) if d not in offsets)
    axis, beside, first, size = _largest_part(graph, node)
    places = tuple(
        Place(part, first, space.fresh(size), shape[d])
        if d == axis
        else Place(part, 0, space.fresh(shape[d]), shape[d])
        for _, part, d in found[1]
    )
    among = any(d == axis for _, _, d in found[1])
    return SlotPick(top.value, rows, places, beside if among else None) if all(p.labels for p in places) else None


def _largest_part(graph: Graph, node: Node) -> tuple[int, int, int, int]:
    """Returns (dimension, which part, where it begins, its size) of the largest part of what a gather reads; the
    dimension is -1 where the gather reads one whole value."""
    joined = graph.definitions.get(node.inputs[0])
    if joined is None or joined.name != "concatenate":
        return -1, 0, 0, 0
    axis = int(joined.params["dimension"])
    sizes = [graph.shape(i)[axis] for i in joined.inputs]
    part = max(range(len(sizes)), key=sizes.__getitem__)
    return axis, part, sum(sizes[:part]), sizes[part]


def _gathers(space: Picking, top: Ref) -> Iterator[tuple[Ref, Node]]:
    """Yields the gather that a value is, or those that are factors of a product."""
    node = space.graph.definitions.get(top.value)
    if node is None:
        return
    if node.name == "gather":
        yield top, node
    elif node.name == "dot_general" and not is_product(node):
        for side in space.dot(top)[:2]:
            ref = space.canonical(side)
            for _ in range(_STEPS):
                if space.graph.name(ref.value) != "convert_element_type":
                    break
                (ref,) = space.operands(ref) or (ref,)
            inner = space.graph.definitions.get(ref.value)
            if inner is not None and inner.name == "gather":
                yield ref, inner
