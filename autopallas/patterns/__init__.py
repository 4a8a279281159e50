"""Recognises the reference computations, with one module per operation, as a Match or as a NearMiss with a reason."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType

from autopallas.custom.registry import declared
from autopallas.environment import OPERATIONS
from autopallas.faults import contained
from autopallas.graph import Graph
from autopallas.graph.edit import surviving
from autopallas.patterns.match import Match, NearMiss
from autopallas.patterns.routers import without_routers
from autopallas.patterns.selection import looks_for
from autopallas.patterns.site_order import circle, in_some_order
from autopallas.sites.operation import Operation, operation_named
from autopallas.sites.spec import kind_of

__all__ = ["Match", "NearMiss", "find"]


def find(
    graph: Graph, ops: Iterable[str] | None, assume_finite: bool, objective: str = "time"
) -> tuple[list[Match], list[NearMiss]]:
    """Finds all sites in a graph of the operations and patterns in ``ops`` (None: of all), and the near misses.

    Sites that save memory and take time are looked for under the objective "memory", or by name, alone. Sites of
    patterns that the user declared come first. Sites may still lie within each other here: planning decides later which
    of them are applied. Where failures are collected (:mod:`autopallas.faults`), an exception in one
    candidate costs that candidate, and an exception in a pattern's preparation costs that pattern.
    """
    matches: list[Match] = []
    misses: list[NearMiss] = []
    asked = None if ops is None else tuple(ops)
    graph.objective, graph.named = objective, frozenset(asked or ())
    for name in OPERATIONS:
        if looks_for(asked, name) and _may_have(graph, operation_named(name)):
            graph.steps.begin()
            with contained(op=name, stage="recognition"):
                found, missed = _pattern(name).find(graph, assume_finite)
                found = [match for match in found if looks_for(asked, name, kind_of(match.spec))]
                matches = _once([*matches, *found])  # self-attention looks like a loss
                misses += missed
                if found:
                    graph.replaced = frozenset(number for match in matches for number in match.replaced)
                    graph.reads = {number: read for match in matches for number, read in match.reads.items()}
                    graph.read = frozenset(n for read in graph.reads.values() for n in read)
    if patterns := [pattern for pattern in declared() if looks_for(asked, pattern.name)]:
        with contained(op="own patterns", stage="recognition"):
            own = importlib.import_module("autopallas.patterns.spellings")
            found, missed = own.find(graph, patterns)
            matches = [*found, *matches]
            misses += missed
    alive = surviving(graph) if matches else frozenset[int]()
    matches = [match for match in matches if not alive.isdisjoint(match.replaced)]  # nothing needs the others
    matches, waiting = in_some_order(graph, _once(matches))
    misses += waiting
    matches = _widened(graph, matches)
    if misses:
        # Near misses inside of what a site replaces, its backward included, are dropped; a respelling of one of its
        # equations is no answer to a near miss.
        counted = [match for match in matches if match.site.operation.priority >= 0]
        reads = {number: read for match in counted for number, read in match.reads.items()}
        still = surviving(graph, {number for match in counted for number in match.replaced}, reads)
        misses = [miss for miss in misses if miss.value < 0 or miss.value in still]
    return without_routers(graph, matches, misses)


def _widened(graph: Graph, matches: list[Match]) -> list[Match]:
    """Lets patterns take more into their sites than they had to prove, now that all sites are known: what no other site
    gives, and what does not make sites wait for each other.

    A pattern does so by ``widened(graph, match, given, still)``, which returns the match as it is or a wider one.
    ``given`` are the values that sites give, and ``still`` those that the program computes beside them.
    """
    operations = {match.op for match in matches} & {*OPERATIONS}
    hooks = {op: hook for op in operations if (hook := getattr(_pattern(op), "widened", None)) is not None}
    asked = [match for match in matches if match.op in hooks]
    reads = {number: read for match in reversed(matches) for number, read in match.reads.items()} if asked else {}
    given, still = set(reads), surviving(graph, reads, reads) if asked else frozenset[int]()
    found: dict[Match, Match] = {}
    for match in asked:
        with contained(match.location, match.op, "recognition"):
            wider = hooks[match.op](graph, match, given, still)
            if wider is not match:
                found[match] = wider
                given.update(wider.replaced)
    while found and (around := circle(graph, [found.get(match, match) for match in matches])):
        left = {match: wider for match, wider in found.items() if wider not in around}
        found = left if len(left) < len(found) else {}
    return [found.get(match, match) for match in matches]


def _pattern(op: str) -> ModuleType:
    """Returns the module that recognises an operation."""
    return importlib.import_module(f"autopallas.patterns.{op}")


def _may_have(graph: Graph, operation: Operation) -> bool:
    """Returns whether a program may have sites of an operation; if not, its pattern is not even imported."""
    return not operation.anchors or not operation.anchors.isdisjoint(graph.primitives)


def _once(matches: list[Match]) -> list[Match]:
    """Drops the matches that compute a value which an earlier match computes.

    Those of operations that look last may compute what those of other operations do: such a site is dropped where the
    other is applied, and stays where it is not, which is not known yet. Of each other they may compute the gradients.
    """
    first, last = set[int](), set[int]()
    kept = []
    for match in matches:
        looks_last = match.site.operation.priority < 0
        taken = last if looks_last else first
        if taken.isdisjoint(match.replaced):
            kept.append(match)
            taken.update(_results(match) if looks_last else match.replaced)
    return kept


def _results(match: Match) -> tuple[int, ...]:
    """Returns the results of all passes of a match, without the gradients of its backwards."""
    return tuple(number for part in match.passes for number in part.results)
