"""Chooses how a sum over experts is read, and reads it until its labels are settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp

from autopallas.graph import Graph, Ref
from autopallas.graph.labels import Atom, is_product
from autopallas.patterns.advice import CHOOSE_FEW
from autopallas.patterns.expressions import Scope
from autopallas.patterns.match import Mismatch
from autopallas.patterns.mixture_of_experts.expert_choice import refuse_chosen, refuse_put_back, refuse_slots_read
from autopallas.patterns.mixture_of_experts.pick_reader import PickReader
from autopallas.patterns.mixture_of_experts.picks import Picking, pick_at, slots_at
from autopallas.patterns.mixture_of_experts.reading import PickedRows, Reading
from autopallas.patterns.mixture_of_experts.refusals import DENSE
from autopallas.patterns.mixture_of_experts.slot_reader import SlotReader
from autopallas.patterns.mixture_of_experts.sum_reader import SumReader

__all__ = ["read"]

_ROUNDS = 16


def read(
    graph: Graph,
    root: int,
    weights: int | None = None,
    experts_of: Mapping[int, int] | None = None,
    picked: PickedRows | None = None,
) -> Reading | None:
    """Reads the sum over experts that gives the value ``root``; returns None where the value does not resemble one.

    Where tokens are dispatched to slots, ``weights`` is the number of the combining weights summed over slots. Where an
    expert has an interval of rows, ``experts_of`` maps the number of the intervals' ends to that of the rows' experts.
    Where rows are picked from slots, ``picked`` describes them.

    Raises:
      Mismatch: the value resembles such a sum, and cannot be taken apart.
    """
    if graph.name(root) in ("scatter", "scatter-add"):
        refuse_chosen(graph, root)
        return None
    for reader in (
        _picked(graph, root),
        _in_slots(graph, root, picked),
        _summed(graph, root, weights, experts_of or {}),
    ):
        found = None if reader is None else _settled(reader)
        if found is not None:
            return found
    refuse_slots_read(graph, root)
    refuse_put_back(graph, root)
    return None


def _settled(reader: Callable[[], SumReader]) -> Reading | None:
    """Reads again until no label is refined any more, and returns the last reading: where labels are refined on the
    way, even what does not resemble a sum over experts may be one."""
    resembles = False
    for _ in range(_ROUNDS):
        now = reader()
        space = now.space
        before = space.refinements
        try:
            found = now.read()
            if space.refinements == before:
                return found
            resembles = found is not None
        except Mismatch:
            if space.refinements == before:
                raise
            resembles = True
    if not resembles:
        return None
    raise Mismatch(f"{DENSE}, and its axes are cut into parts in more than {_ROUNDS} ways", advice=CHOOSE_FEW)


def _summed(
    graph: Graph, root: int, weights: int | None, experts_of: Mapping[int, int]
) -> Callable[[], SumReader] | None:
    """Prepares a reader of a sum over experts."""
    scope = Scope(graph)
    scope.space = Picking(graph)
    top = scope.space.full(root)
    terms = _terms(scope, top)
    return None if terms is None else lambda: SumReader(scope, top, *terms, weights, experts_of)


def _picked(graph: Graph, root: int) -> Callable[[], SumReader] | None:
    """Prepares a reader of what is computed by experts that are chosen by gathers."""
    scope = Scope(graph)
    scope.space = space = Picking(graph)
    top = space.full(root)
    pick = pick_at(space, top)
    if pick is None:
        return None
    space.choose(pick)
    return lambda: PickReader(scope, top, space)


def _in_slots(graph: Graph, root: int, picked: PickedRows | None) -> Callable[[], SumReader] | None:
    """Prepares a reader of rows that are picked from what experts compute for slots."""
    scope = Scope(graph)
    scope.space = space = Picking(graph)
    top = space.full(root)
    slots = slots_at(space, top)
    if slots is None or not jnp.issubdtype(graph.dtype(root), jnp.floating):
        return None
    space.choose_slots(slots)
    return lambda: SlotReader(scope, top, slots, picked)


def _terms(scope: Scope, top: Ref) -> tuple[list[Ref], tuple[Atom, ...]] | None:
    """Returns the factors whose product is summed, and the summed labels."""
    space, graph = scope.space, scope.graph
    node = graph.definitions.get(top.value)
    if node is None or node.name not in ("dot_general", "reduce_sum") or is_product(node):
        return None
    if not jnp.issubdtype(graph.dtype(top.value), jnp.floating):
        return None
    contraction = space.contraction(top)
    if contraction is not None:
        a, b, dimensions = contraction
        return [a, b], tuple(x for _, atoms in dimensions for x in atoms)
    operand, dimensions = space.reduced(top)
    return [operand], tuple(x for _, atoms in dimensions for x in atoms)
