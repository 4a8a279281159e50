"""Reads rows that are picked from what experts compute for slots."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.kernels.mixture_of_experts.steps import Gathered, Product
from autopallas.patterns.advice import CHOOSE_FEW, DIAGONAL, PICK_ROWS
from autopallas.patterns.expressions import Scope
from autopallas.patterns.match import Mismatch
from autopallas.patterns.mixture_of_experts.picks import SlotPick
from autopallas.patterns.mixture_of_experts.reading import PickedRows, Reading, SlotRows
from autopallas.patterns.mixture_of_experts.refusals import DENSE
from autopallas.patterns.mixture_of_experts.slots import SCATTERED
from autopallas.patterns.mixture_of_experts.sum_reader import SumReader
from autopallas.sites.elementwise import conversion_params
from autopallas.sites.index_notation import Operand, View

__all__ = ["SlotReader"]

_WALKED = 500
_NEAR = 32
"""Most values behind a gather of slots among which the products with the experts' matrices are looked for."""
_STOP_GRADIENT = jax.make_jaxpr(lax.stop_gradient)(0.0).eqns[0].primitive


class SlotReader(SumReader):
    """Reads rows that are picked from what experts compute for their slots.

    What an expert computes for a slot depends on the contents of that slot alone. So the picked row is what the expert
    computes from the contents picked at the same place, whatever they are and whoever shares them.
    """

    _farthest = _NEAR

    def __init__(self, scope: Scope, top: Ref, pick: SlotPick, known: PickedRows | None):
        super().__init__(scope, top, [top], ())
        self.pick, self.known = pick, known
        self.places: tuple[Atom, ...] = ()
        while not self.places or self.places != self._resolved(pick):  # a reshape may cut a place into several
            self.places = self._resolved(pick)
            self.expert = self._experts()
        self.slot = frozenset(self.places) - self.expert
        self.row_labels = self.space.view(pick.rows)
        self.leaves: dict[int, View] = {}
        self.brought = False
        self.result.what = SCATTERED

    def read(self) -> Reading | None:
        space, result = self.space, self.result
        own = {x for _, atoms in self.row_labels for x in atoms}
        self.rows = frozenset(own) | self.slot
        order = [x for _, atoms in space.view(self.top.view) for x in atoms]
        if not self.expert or not self._add_tokens(own, order) or not self.holds_product(self.top):
            return None
        result.expert = tuple(x for x in self.places if x in self.expert)
        graph = self.graph
        indices = graph.definitions[self.top.value].inputs[1] if self.known is None else self.known.expert
        try:
            result.choices.append((self._array(indices, self.row_labels), ()))
            last = self._term()
            if set(order) != self.tokens | set(last):
                raise Mismatch(f"{DENSE}, and the result has an axis that its terms lack", advice=CHOOSE_FEW)
            beside = self._beside()
            if any(map(self._made_of_products, [*result.arrays, *beside])):
                raise Mismatch(f"{SCATTERED}, and what is computed for them is mixed", advice=PICK_ROWS)
        except Mismatch as mismatch:
            if not self.brought or not self._are_matrices():
                return None
            advice = PICK_ROWS if mismatch.advice == CHOOSE_FEW else mismatch.advice
            raise Mismatch(mismatch.reason.replace(DENSE, SCATTERED, 1), advice=advice) from None
        if not self.brought or not self._are_matrices():
            return None
        if self.known is None:
            slot = tuple(x for x in self.places if x in self.slot)
            result.picked = SlotRows(self.pick, result.expert, slot, self.leaves)
        result.seeds.add(self.top.value)
        return self._finished()

    def _resolved(self, pick: SlotPick) -> tuple[Atom, ...]:
        return tuple(x for place in pick.places for x in self.space.resolve(place.labels))

    def _experts(self) -> frozenset[Atom]:
        """Returns the labels of places that matrices have; none where there is no product with such matrices."""
        space, places = self.space, frozenset(self.places)
        seen: set[Hashable] = set()
        todo = [self.top]
        while todo and len(seen) <= _NEAR:
            ref = space.canonical(todo.pop())
            key = space.pattern(ref, places)
            if key in seen or not places <= space.atoms(ref):
                continue
            seen.add(key)
            sides = space.contraction(ref)
            if sides is None:
                todo += space.uses(ref) or []
                continue
            own = [space.atoms(space.canonical(side)) & places for side in sides[:2]]
            for rows, matrices in (own, own[::-1]):
                if rows == places and matrices and matrices < places:
                    return matrices
            todo += sides[:2]
        return frozenset()

    def _term(self) -> tuple[Atom, ...]:
        """Adds the steps of a row; returns its labels."""
        value = self._row(self.top)
        node, dtype = self.graph.definitions[self.top.value], self._dtype(value)
        if self.known is not None and node.params["mode"] != GatherScatterMode.CLIP:
            inside = self._add(Gathered(self._array(self.known.inside, self.row_labels), ()))
            if node.params["mode"] == GatherScatterMode.FILL_OR_DROP:
                fill = node.params["fill_value"]
                other = self._constant(float("nan") if fill is None else float(fill), dtype)
            else:  # a place out of range reads the nearest one, without a derivative
                other = self._pointwise_on(_STOP_GRADIENT, {}, (value,), dtype)
            value = self._pointwise_on(lax.select_n_p, {}, (inside, other, value), dtype)
        if self.known is not None and self.known.other is not None:
            reached = self._add(Gathered(self._array(self.known.reached, self.row_labels), ()))
            source = self._array(self.known.other, self.space.view(self.top.view))
            beside = self._add(Gathered(source, tuple(x for x in source.labels if x not in self.tokens)))
            value = self._pointwise_on(lax.select_n_p, {}, (reached, beside, value), dtype)
        wide = jnp.promote_types(dtype, jnp.float32)
        return self._labels(self._pointwise_on(lax.convert_element_type_p, conversion_params(wide), (value,), wide))

    def _are_matrices(self) -> bool:
        """Returns whether the matrices are not scattered or gathered themselves, unlike the keys of padded or sorted
        sequences."""
        graph, seen = self.graph, set[int]()
        todo = [self.result.arrays[s.weights.position] for s in self.result.steps if isinstance(s, Product)]
        while todo and len(seen) < _WALKED:
            number = todo.pop()
            node = graph.definitions.get(number)
            if number in seen or node is None:
                continue
            several = node.name == "gather" and math.prod(graph.shape(node.inputs[1])[:-1]) > 1
            if several or node.name in ("scatter", "scatter-add"):
                return False
            seen.add(number)
            graph.steps.spend()
            todo += node.inputs
        return True

    def _made_of_products(self, value: int) -> bool:
        """Returns whether a value is computed from the products of the site."""
        products, seen, todo = self.result.products, set(), [value]
        first = min(products)
        while todo:
            number = todo.pop()
            if number in products:
                return True
            if number not in seen and number > first:
                self.graph.steps.spend()
                seen.add(number)
                node = self.graph.definitions.get(number)
                todo += node.inputs if node is not None else ()
        return False

    def _beside(self) -> Sequence[int]:
        """Returns the numbers of what the gather reads beside slots."""
        if self.pick.beside is None or self.known is not None:
            return ()
        parts = self.graph.definitions[self.graph.definitions[self.top.value].inputs[0]].inputs
        return [part for i, part in enumerate(parts) if i != self.pick.beside]

    def _array(self, number: int, view: View) -> Operand:
        if number not in self.result.arrays:
            self.result.arrays.append(number)
        return Operand(self.result.arrays.index(number), view)

    def _operand(self, ref: Ref) -> Operand:
        found = self.space.canonical(ref)
        if self.slot.isdisjoint(self.space.atoms(found)):
            return super()._operand(found)
        # Tokens may have labels besides those of the picked rows: examples whose rows lie at the same places.
        named = self.expert.union(self.slot, *(own for _, own in self.row_labels))
        view = self.space.view(found.view)
        atoms = [x for _, own in view for x in own]
        if len(set(atoms)) != len(atoms):
            raise Mismatch(f"{DENSE}, and an operand is read along a diagonal", advice=DIAGONAL)
        kept = tuple(dimension for dimension in view if named.isdisjoint(dimension[1]))
        if any(not named >= set(own) for _, own in view if not named.isdisjoint(own)):
            raise Mismatch(f"{DENSE}, and places are merged with other axes", advice=CHOOSE_FEW)
        placed = tuple((0, ()) if dimension in kept else dimension for dimension in view)
        before = self.leaves.setdefault(found.value, placed)
        if placed != before:
            raise Mismatch(f"{DENSE}, and slots are read in two ways", advice=CHOOSE_FEW)
        source = found.value
        while self.graph.name(source) == "convert_element_type":
            source = self.graph.definitions[source].inputs[0]
        # In a part of a program, the rows brought to slots may be an input.
        given = source in self.graph.outside
        self.brought = self.brought or given or self.graph.name(source) in ("scatter", "scatter-add", "gather")
        number = found.value if self.known is None else self.known.leaves[found.value]
        return self._array(number, (*self.row_labels, *kept))
