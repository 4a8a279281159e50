"""Settles which of several sites have a complete backward, so that nothing inside them remains in the program."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from autopallas.faults import contained
from autopallas.graph import Graph
from autopallas.graph.edit import surviving
from autopallas.graph.steps import OutOfSteps
from autopallas.patterns.backward import Backward, Lookup
from autopallas.patterns.forward import Forward, PerExample

__all__ = ["Search", "settle"]

_ROUNDS = 20
"""Most rounds in which incomplete sites are dropped; without them, others may become incomplete."""
_WAYS = 4
"""Most searches for one site, the second ones of each instead of the first."""


@dataclass(slots=True)
class Search:
    """Search for the backward of one site.

    Asks for the cotangents of ``roles`` first, then for those of ``roles`` and ``others``; where that does not find all
    of the backward, turns to the search ``instead``.
    """

    forward: Forward
    roles: Sequence[int]
    others: Sequence[int]
    found: list[Backward] = field(default_factory=list)
    instead: Search | None = None
    summed: Sequence[int] = ()
    """Uses of one value, among ``roles``, whose cotangents the program may add up."""
    by_example: bool = False
    """Whether the backwards of examples that share some operands are looked for, if all else fails."""

    def give_way(self) -> bool:
        """Turns to the search ``instead``; returns whether there is one."""
        other = self.instead
        if other is None:
            return False
        self.forward, self.roles, self.others, self.instead = other.forward, other.roles, other.others, other.instead
        self.summed = other.summed
        return True

    @property
    def root(self) -> int:
        """Number of the value that the site gives."""
        return self.forward.graph.numbers[self.forward.body][self.forward.root]

    def replaced(self) -> set[int]:
        """Returns the values that kernels would compute in place of the program."""
        return {self.root} | {levels[0].cotangent for b in self.found for levels in b.levels.values()}

    def inner(self) -> set[int]:
        """Returns the values that must no longer be computed."""
        return self.forward.own - self.replaced()


def settle(graph: Graph, lookup: Lookup, searches: Sequence[Search], given: set[int]) -> list[Search]:
    """Returns the searches whose backward is complete: nothing between operands and results remains in the program.

    A site that is only partly found keeps its forward and its backward, for its probabilities would stay alive. A
    search that raises an exception finds nothing. ``given`` are the values that other sites give.
    """

    def look(search: Search, wanted: Sequence[int]) -> None:
        search.found = []
        with contained(graph.definitions[search.root]), suppress(OutOfSteps), graph.steps.one_try():
            search.found = lookup.backwards(search.forward, wanted)
            for backward in search.found:
                lookup.add_up(search.forward, backward, [*search.others, *search.summed])

    def by_example(search: Search) -> list[tuple[PerExample, list[int]]]:
        """Returns the ways to read a forward as one of examples, with the uses that may have cotangents then."""
        found: list[tuple[PerExample, list[int]]] = []
        with contained(graph.definitions[search.root]), suppress(OutOfSteps), graph.steps.one_try():
            found += lookup.per_example(search.forward, [*search.roles, *search.others])
        return found

    for search in searches:
        look(search, search.roles)
    _drop_echoes(searches)

    def incomplete(chosen: Sequence[Search]) -> list[Search]:
        still = surviving(graph, given.union(*(s.replaced() for s in chosen)))
        return [s for s in chosen if s.inner() & still]

    chosen = list(searches)
    left = incomplete(chosen)
    for ways in range(_WAYS):
        if ways:
            asked = [search for search in left if search.give_way()]
        else:
            asked = left if any(search.others for search in left) else []
        for search in asked:
            look(search, [*search.roles, *search.others])
        if asked:
            _drop_echoes(searches)
            left = incomplete(chosen)
    examples = [(search, found) for search in left if search.by_example and (found := by_example(search))]
    while examples:
        for search, found in examples:
            search.forward, wanted = found.pop(0)
            look(search, wanted)
        _drop_echoes(searches)
        left = incomplete(chosen)
        examples = [(search, found) for search, found in examples if found and search in left]
    for _ in range(_ROUNDS):
        if not left:
            return chosen
        chosen = [s for s in chosen if s not in left]
        left = incomplete(chosen) if chosen else []
    return [] if left else chosen


def _drop_echoes(searches: Sequence[Search]) -> None:
    """Drops backwards that are a part of another site's, found again because the sites share values.

    Of rows that two norms scale, the gradient of one scale is read as that of the other, with the other's cotangent.
    """
    of_cotangent: dict[int, list[frozenset[int]]] = {}

    def given(backward: Backward) -> frozenset[int]:
        return frozenset(backward.gradients)

    for search in searches:
        for backward in search.found:
            of_cotangent.setdefault(backward.cotangent, []).append(given(backward))
    for search in searches:
        own = search.found
        search.found = [b for b in own if not any(given(b) < other for other in of_cotangent[b.cotangent])]
