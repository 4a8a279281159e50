"""Finds equations that a platform may compute slowly, each kind by its primitives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import TypeVar, cast

import numpy as np

from autopallas import jaxprs
from autopallas.faults import contained
from autopallas.graph import Graph, Node
from autopallas.graph.extract import jaxpr_of, nodes_between
from autopallas.kernels.respelling.kind import Found, Kind
from autopallas.kernels.respelling.kinds import (
    associative_scan,
    kinds_by_primitive,
    python_loop,
    repeated_steps,
    scan_checkpoint,
    summed_exponentials_gradient,
)
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.kernels.respelling.site import RespellingSite
from autopallas.kernels.respelling.spec import ArrayType, RespellingSpec
from autopallas.numerics.casts import is_quantised
from autopallas.patterns import chained_pairs, chained_steps, checkpointed_scans, exponential_loops, steps_apart
from autopallas.patterns import repeated_steps as runs_of_steps
from autopallas.patterns.associative_scans import unknown_scans
from autopallas.patterns.chain import Chain
from autopallas.patterns.match import Match, NearMiss
from autopallas.patterns.selection import looks_for

__all__ = ["find"]

T = TypeVar("T")


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Finds every respelling in a graph.  An equation that no kind knows is no near miss, but for associative scans; a
    loop that stacks much for its backward is one, where such loops are looked for.
    """
    graph.respelt = set()
    found = [*_pairs_of_loops(graph)]
    found += _single_equations(graph, found, assume_finite)
    steps, apart = _equal_steps(graph)
    chains, misses = _chains(graph, apart)
    found += [*steps, *chains]
    if looks_for(tuple(graph.named) or None, OPERATION.name, associative_scan.KIND.name):
        with contained():
            misses += unknown_scans(graph)
    if graph.objective != "memory" and scan_checkpoint.KIND.name not in graph.named:
        return found, misses
    taken = {node for match in found for node in match.equations}
    pairs, missed = checkpointed_scans.find(graph, taken)
    return [*found, *pairs], [*misses, *missed]


def _pairs_of_loops(graph: Graph) -> Iterator[Match]:
    """Yields loops that sum exponentials, with the loops of their backward."""
    if _is_looked_for(graph, summed_exponentials_gradient.KIND):
        for loops in exponential_loops.find(graph):
            graph.respelt.update((*loops.results, *(n for later in loops.then for n in later.results)))
            yield loops


def _single_equations(graph: Graph, before: Sequence[Match], assume_finite: bool) -> list[Match]:
    """Returns what kinds find by their primitives, in equations that no match before has.

    An equation that was found goes before one that follows it and would hold it: a product with a one-hot matrix before
    the transposition of its result.  Of two kinds that find an equation, one may give way (``Kind.gives_way``).
    """
    wanted = {kind: False for own in kinds_by_primitive().values() for kind in own}
    for kind in wanted:
        with contained(kind.name, OPERATION.name, "recognition"):
            wanted[kind] = _is_looked_for(graph, kind) and (kind.is_in is None or kind.is_in(graph))
    kinds = {name: [kind for kind in own if wanted[kind]] for name, own in kinds_by_primitive().items()}
    places = {node for match in before for node in match.equations}
    found: list[Match] = []
    others: list[Match] = []
    for node in graph.nodes:
        for kind in kinds.get(node.name, ()):
            match = _looked(graph, node, kind)
            if match is None or (match.spec.assumptions() and not assume_finite):
                continue
            if kind.gives_way is not None and kind.gives_way(cast(RespellingSpec, match.spec)):
                others.append(match)
                continue
            if places.isdisjoint(match.equations):
                found.append(match)
                places.add(node)
                graph.respelt.update(match.results)
                break
    for match in others:
        if places.isdisjoint(match.equations):
            found.append(match)
            places.update(match.equations)
            graph.respelt.update(match.results)
    return found


def _equal_steps(graph: Graph) -> tuple[list[Match], set[Node]]:
    """Returns equal elementwise steps that stand one after the other, and the equations of those that stand apart:
    whether a loop of these gains more is not measured."""
    found: list[Match] = []
    looped: set[Node] = set()
    apart: set[Node] = set()
    if _is_looked_for(graph, repeated_steps.KIND):
        with contained("equal steps one after the other", OPERATION.name, "recognition"):
            for places, equations in ((runs_of_steps.find(graph), looped), (steps_apart.find(graph, looped), apart)):
                for node, place in places:
                    match = _match(graph, node, repeated_steps.KIND, place)
                    if match is not None:
                        found.append(match)
                        equations.update(match.equations)
    return found, apart


def _chains(graph: Graph, apart: Set[Node]) -> tuple[list[Match], list[NearMiss]]:
    """Returns loops that Python wrote out, but for those with steps that stand apart."""
    found: list[Match] = []
    misses: list[NearMiss] = []
    # Until rows say where it gains, looking would cost all other programs a tenth of their trace for nothing.
    asked = graph.objective == "always" or python_loop.KIND.name in graph.named
    if not asked or not _is_looked_for(graph, python_loop.KIND):
        return found, misses
    with contained("equal steps in a chain", OPERATION.name, "recognition"):
        chains: dict[Chain, Found] = {}
        for chain in chained_steps.find(graph):
            if isinstance(chain, NearMiss):
                misses.append(chain)
            elif all(apart.isdisjoint(block) for block in chain[0].blocks):
                chains[chain[0]] = chain[1]
        for first, second, match in chained_pairs.pairs(graph, [*chains]):
            del chains[first], chains[second]
            found.append(match)
        for own, place in chains.items():
            last = _match(graph, own.blocks[-1][-1], python_loop.KIND, place)
            found += [] if last is None else [last]
    return found, misses


def _is_looked_for(graph: Graph, kind: Kind) -> bool:
    """Returns whether a kind is asked for: what is left out takes no equation from another kind."""
    if kind.on_request and kind.name not in graph.named:
        return False
    return looks_for(tuple(graph.named) or None, OPERATION.name, kind.name)


def _looked(graph: Graph, node: Node, kind: Kind) -> Match | None:
    """Returns what a kind makes of an equation; None too where an exception costs the candidate.

    That context is entered for an exception alone: most equations of a program are of some kind's primitives, and to
    enter it takes as long as the kind's first look.
    """
    try:
        place = kind.match(graph, node)
        return None if place is None else _match(graph, node, kind, place)
    except Exception:
        with contained(node, OPERATION.name, "recognition"):
            raise
    return None


def _match(graph: Graph, node: Node, kind: Kind, place: Found) -> Match | None:
    nodes, free = nodes_between(graph, place.operands, place.results)
    if free or any(one.equation.effects for one in nodes):
        return None
    types = [tuple((graph.shape(n), graph.dtype(n)) for n in numbers) for numbers in (place.operands, place.results)]
    operands: tuple[ArrayType, ...]
    operands, results = types
    if any(is_quantised(dtype) for _, dtype in (*operands, *results)):
        return None
    return Match(
        op=OPERATION.name,
        site=RespellingSite(RespellingSpec(kind.name, _plain(place.parameters), operands, results)),
        direction="forward",
        operands=place.operands,
        results=place.results,
        equations=tuple(nodes),
        original=jaxpr_of(graph, nodes, place.operands, place.results),
        body=node.body,
        location=jaxprs.location(node.equation),
        homes=() if place.home is None else (place.home,),
        neighbours=place.neighbours,
    )


def _plain(value: T) -> T:
    """Returns parameters with Python's integers: derivatives that JAX writes have axes of NumPy's, by whose text a
    cache and a lockfile would not know the same site."""
    if isinstance(value, tuple):
        return cast(T, tuple(map(_plain, value)))
    return cast(T, int(value)) if isinstance(value, np.integer) else value
