"""Experts that are chosen by gathers: of what all of them compute, or of their matrices, one for each row.

``y[t, chosen[t]]`` and ``x[t] @ w[chosen[t]]`` are what the chosen expert of a row computes.  Under the labels of rows,
such a gather is a view: its operand is seen with a label of experts where the chosen one is read.  So gathers with the
same index vanish like layout does, and what is left is read as in the other spellings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax.lax import GatherScatterMode

from autopallas.graph import Graph, Node, Ref, Space
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.labels import Atom, Dimension, is_product
from autopallas.patterns.experts_axes import position_of
from autopallas.patterns.expressions import Scope

__all__ = ["GATHERED", "PICKED", "Pick", "Picking", "pick_at", "slots_picked"]

PICKED = "every expert computes every token, of which those chosen are picked"
GATHERED = "the matrices of a token's experts are gathered for it"
LAYOUT = frozenset("reshape transpose broadcast_in_dim squeeze expand_dims slice concatenate".split())
_LOOKED_AT = 60
"""Values that are looked at between what is picked from slots and what is scattered to them."""
_STEPS = 8
"""Casts and layout operations between a gather of matrices and their product."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Rows that choose one expert each.

    Attributes:
      index: the chosen expert, under labels of rows.
      expert: labels of experts.
      size: how many there are.
    """

    index: Ref
    expert: tuple[Atom, ...]
    size: int


class Picking(Space):
    """Labels under which gathers of the chosen experts are views.

    Attributes:
      pick: the rows that choose, once known.
      gathers: the gathers that were read as views.
    """

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.pick: Pick | None = None
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
        view, index, size, place = found
        if index is None:  # of positions alone
            return Ref(node.inputs[0], view)
        if self.pick is None or size != self.pick.size or not self.same(index, self.pick.index):
            return None
        self.gathers.add(ref.value)
        return Ref(node.inputs[0], (*view[:place], (0, self.pick.expert), *view[place + 1 :]))

    def gathered(self, ref: Ref, node: Node) -> tuple[tuple[Dimension, ...], Ref | None, int, int] | None:
        """(view of the operand, index, size, dimension of experts in that view) of a gather of one expert for each row.

        The index is given as it is computed, None where a program gathers by positions alone; else the view lacks the
        dimension of experts.
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
        index: Ref | None = None
        place = 0
        for part, d in enumerate(numbers.start_index_map):
            piece = self.canonical(Ref(indices, (*batch, (part, ()))))
            number = self._scope.number(piece)
            if sizes[d] == shape[d] and d in window:  # a whole axis begins where it begins
                if number != 0 and params["mode"] == GatherScatterMode.FILL_OR_DROP:
                    return None
                continue
            if sizes[d] != 1:
                return None
            along = position_of(self._scope, piece)
            if along is not None and not along[0] and self.extent(along[1]) == shape[d]:
                view[d] = along
            elif index is None and number is None:
                index, place = piece, d
                view[d] = (0, ())
            else:
                return None
        if any(sizes[d] != shape[d] for d in window if d not in numbers.start_index_map):
            return None
        return tuple(view[d] for d in range(len(shape))), index, shape[place], place

    def choose(self, pick: Pick) -> None:
        """Reads the gathers of these rows' experts as views from now on."""
        self.pick = pick
        self._canonical.clear()


def slots_picked(graph: Graph, root: int) -> bool:
    """Whether a value is picked, by several indices, from what experts compute for slots with scattered tokens."""
    node = graph.definitions.get(root)
    if node is None or node.name != "gather":
        return False
    numbers = node.params["dimension_numbers"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if len(numbers.start_index_map) < 2 or len(gone) < 2:
        return False
    todo, seen, multiplied = [node.inputs[0]], set[int](), False
    while todo and len(seen) < _LOOKED_AT:
        number = todo.pop()
        found = graph.definitions.get(number)
        if number in seen or found is None:
            continue
        seen.add(number)
        graph.steps.spend()
        if found.name in ("scatter", "scatter-add"):
            own = found.params["dimension_numbers"]
            if own.update_window_dims and len(own.scatter_dims_to_operand_dims) > 1:
                return multiplied
        elif found.name == "dot_general":
            multiplied = multiplied or bool(found.params["dimension_numbers"][1][0])
            todo += found.inputs
        elif found.name in ELEMENTWISE or found.name in LAYOUT or is_elementwise_call(found.equation):
            todo += found.inputs
    return False


def pick_at(space: Picking, top: Ref) -> Pick | None:
    """The rows of a value that is a gather, or a product with gathered matrices; None if it is neither."""
    for ref, node in _gathers(space, top):
        found = space.gathered(ref, node)
        if found is None:
            continue
        _, index, size, _ = found
        if index is not None and size > 1 and space.atoms(index) and space.graph.dtype(index.value).kind in "iu":
            return Pick(index, space.fresh(size), size)
    return None


def _gathers(space: Picking, top: Ref) -> Iterator[tuple[Ref, Node]]:
    """The gather that a value is, or those that are factors of a product."""
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
