"""Recognises tokens that are dispatched to slots of their experts by one-hot products, with a capacity.

``out[s] = sum over e, c of combine[s, e, c] f_e(sum over s' of dispatch[s', e, c] x[s'])``, where f acts row by row. If
every slot (e, c) holds one token at most, and ``combine`` is zero wherever ``dispatch`` is, then a slot that counts for
a token holds that token, and ``out[s] = sum over e of (sum over c of combine[s, e, c]) f_e(x[s])``.

:mod:`autopallas.patterns.mixture_of_experts.capacity` proves both conditions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.patterns.expressions import Scope
from autopallas.patterns.mixture_of_experts.capacity import unproved
from autopallas.patterns.mixture_of_experts.values import Values

__all__ = ["DISPATCHED", "SCATTERED", "Slots", "Unproved", "slots_of"]

_WALKED = 500
DISPATCHED = "tokens are dispatched to slots of their experts, with a capacity"
SCATTERED = f"{DISPATCHED}, by a scatter and a gather"


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of experts, with at most one token each.

    Attributes:
      combine: the weight of a token's slot, under labels of tokens, experts and slots.
      outputs: what is computed for the slots.
      rows: the tokens in their slots.
      tokens: the tokens themselves, under labels of the result's tokens.
      free: the dimensions of ``rows`` that are features, each with its dimension in ``tokens``.
      expert, slot: labels.
      dispatch: which token is in which slot, under the labels of ``combine``.
      needed: values on whose definitions the proof relies.
    """

    combine: Ref
    outputs: Ref
    rows: Ref
    tokens: Ref
    free: tuple[tuple[int, int], ...]
    expert: tuple[Atom, ...]
    slot: tuple[Atom, ...]
    dispatch: Ref
    needed: frozenset[int]

    def filled(self, scope: Scope, ref: Ref) -> Ref | None:
        """Returns the tokens for a use of the rows with the same slots; None for another use of them."""
        space = scope.space
        features = {d for d, _ in self.free}
        own, known = space.view(ref.view), space.view(self.rows.view)
        if any(own[d] != known[d] for d in range(len(own)) if d not in features):
            return None
        view = list(self.tokens.view)
        for d, target in self.free:
            view[target] = ref.view[d]
        return Ref(self.tokens.value, tuple(view))


@dataclass(frozen=True, slots=True)
class Unproved:
    """Apparent slots of experts for which a condition was not proved, with the reason."""

    combine: Ref
    reason: str


def slots_of(scope: Scope, top: Ref, factors: Sequence[Ref], summed: Sequence[Atom]) -> Slots | Unproved | None:
    """Returns the slots over which a sum runs, if tokens can be read in their place; None for another sum."""
    if len(factors) != 2:
        return None
    space = scope.space
    refused: Unproved | None = None
    both = frozenset(space.resolve(summed))
    for combine, outputs in (tuple(factors), tuple(factors[::-1])):
        found = _dispatched(scope, outputs, both)
        if found is None:
            continue
        rows, expert = found
        order = space.resolve(summed)
        experts, slots = (tuple(x for x in order if (x in expert) is kept) for kept in (True, False))
        if not experts or not slots:
            continue
        for dispatch, tokens, free, own in _sides(scope, top, combine, outputs, rows, both):
            values = Values(scope)
            reason = unproved(values, dispatch, combine, own, space.resolve(experts), space.resolve(slots))
            if reason is None:
                return Slots(combine, outputs, rows, tokens, free, experts, slots, dispatch, frozenset(values.needed))
            refused = Unproved(combine, reason)
    return refused


def _dispatched(scope: Scope, outputs: Ref, both: frozenset[Atom]) -> tuple[Ref, frozenset[Atom]] | None:
    """Finds the contraction that brings tokens to their slots, and the labels of experts among ``both``."""
    space, expert = scope.space, frozenset(both)
    seen: set[Hashable] = set()
    todo, rows = [outputs], None
    matrices = False
    while todo and len(both) > 1:  # a single label cannot stand for both experts and slots
        ref = space.canonical(todo.pop())
        key = space.pattern(ref, both)
        if key in seen or len(seen) > _WALKED or not both <= space.atoms(ref):
            continue
        seen.add(key)
        sides = space.contraction(ref)
        if sides is None:
            todo += space.uses(ref) or []
            continue
        labels = [space.atoms(space.canonical(side)) & both for side in sides[:2]]
        if both in labels and frozenset() in labels:
            if scope.name(ref) != "dot_general" or (rows is not None and rows.value != ref.value):
                return None
            rows = ref
        elif both in labels:
            expert &= labels[1 - labels.index(both)]
            matrices = True
            todo.append(sides[0] if labels[0] == both else sides[1])
    return (rows, expert) if rows is not None and matrices and expert < both else None


def _sides(
    scope: Scope, top: Ref, combine: Ref, outputs: Ref, rows: Ref, both: frozenset[Atom]
) -> Iterator[tuple[Ref, Ref, tuple[tuple[int, int], ...], tuple[Atom, ...]]]:
    """Yields (dispatch, tokens, pairs of equal features, labels of tokens), with the result's labels for what is
    summed."""
    space, graph = scope.space, scope.graph
    own = space.atoms(space.canonical(outputs))
    wanted = space.atoms(space.canonical(combine))
    places = [(offset, atoms) for offset, atoms in space.view(top.view)
              if atoms and set(atoms) <= wanted and not set(atoms) & own]  # fmt: skip
    node = graph.definitions[rows.value]
    contracted = node.params["dimension_numbers"][0]
    if len(contracted[0]) != len(places):
        return
    if any(graph.shape(node.inputs[0])[d] != space.extent(a) for d, (_, a) in zip(contracted[0], places, strict=True)):
        return
    left, right, _ = space.dot(rows, places)
    known = [a for _, atoms in space.view(rows.view) for a in atoms if a not in both]
    gates = wanted
    for dispatch, tokens in ((left, right), (right, left)):
        if space.atoms(tokens) & both or not both <= space.atoms(dispatch):
            continue
        features = frozenset(known) - gates
        if features & space.atoms(dispatch):
            continue
        free = []
        for d, (offset, atoms) in enumerate(rows.view):
            if set(space.resolve(atoms)) & features:
                at = [i for i, e in enumerate(tokens.view) if e == (offset, atoms)]
                if len(at) != 1:
                    break
                free.append((d, at[0]))
        else:
            yield dispatch, tokens, tuple(free), tuple(x for _, atoms in places for x in atoms)
