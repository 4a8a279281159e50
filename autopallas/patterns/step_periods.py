"""Finds how often, and in which distance, equations of a body repeat, and where steps of them begin."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence

from autopallas.graph import Graph, Node
from autopallas.patterns.equal_steps import kind_of, often

__all__ = ["FURTHEST", "LEAST_STEPS", "SHORTEST", "blocks_of", "runs"]

LEAST_STEPS = 4
SHORTEST = 2
"""Fewest equations of a step."""
_LONGEST = 4_000
"""Most equations of a step."""
FURTHEST = 2
"""Most steps between what gives a value and what reads it."""
_MOST_PERIODS = 24
"""Most lengths of a step that are tried, those first that most equations speak for."""
_MOST_RUNS = 16
_PLACES_BACK = 8
"""How many places of an equal equation, counted back from each, may be those of the step before."""


def runs(graph: Graph, nodes: Sequence[Node]) -> Iterator[tuple[Sequence[Node], int]]:
    """Yields equations of a body that repeat, with the length of a step, no equation twice."""
    if len(nodes) < LEAST_STEPS * SHORTEST:
        return
    kinds = [(node, kind_of(graph, node)) for node, _ in often(graph, nodes, LEAST_STEPS)]
    counts = Counter([kind for _, kind in kinds])
    numbers: dict[Hashable, int] = {}
    chosen: list[Node] = []
    ids: list[int] = []
    finer: list[int] = []
    for node, kind in kinds:
        if counts[kind] >= LEAST_STEPS:
            chosen.append(node)
            ids.append(numbers.setdefault(kind, len(numbers)))
            known = [(j, graph.literals[n].tobytes()) for j, n in enumerate(node.inputs) if n in graph.literals]
            finer.append(numbers.setdefault((kind, *known), len(numbers)))
    graph.steps.spend(len(chosen))
    for start, end, period in _repeated(ids, finer):
        yield chosen[start:end], period


def _repeated(ids: Sequence[int], finer: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns where numbers repeat at least four times, as (start, end, period), without overlap.

    Args:
      ids: the numbers.
      finer: numbers by which periods are looked for, which may differ where ``ids`` are equal.
    """
    places: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_PLACES_BACK))
    distances: Counter[int] = Counter()
    for place, number in enumerate(finer):
        before = places[number]
        distances.update(place - other for other in before)
        before.append(place)
    stretches: list[tuple[int, int, int]] = []
    likely = [period for period in distances if SHORTEST <= period <= _LONGEST]
    for period in sorted(likely, key=lambda period: (-distances[period], period))[:_MOST_PERIODS]:
        if distances[period] < LEAST_STEPS - 1:
            break
        start = 0
        for place in range(period, len(ids) + 1):
            if place == len(ids) or ids[place] != ids[place - period]:
                if place - period - start >= (LEAST_STEPS - 1) * period:
                    stretches.append((start, place, period))
                start = place - period + 1
    stretches.sort(key=lambda stretch: (stretch[0] - stretch[1], stretch[2]))
    free = [True] * len(ids)
    found: list[tuple[int, int, int]] = []
    for start, end, period in stretches[: 4 * _MOST_RUNS]:
        while start < end and not free[start]:
            start += 1
        while start < end and not free[end - 1]:
            end -= 1
        if end - start < LEAST_STEPS * period or not all(free[start:end]):
            continue
        free[start:end] = [False] * (end - start)
        found.append((start, end, period))
        if len(found) == _MOST_RUNS:
            break
    return sorted(found)


def blocks_of(graph: Graph, run: Sequence[Node], period: int) -> list[Sequence[Node]]:
    """Returns the steps of a run, which begin where the least is handed on."""
    made = {number: place for place, node in enumerate(run) for number in node.outputs}
    latest: dict[int, int] = {}
    for place, node in enumerate(run):
        for number in node.inputs:
            if number in made:
                latest[number] = max(latest.get(number, 0), place)
    middle = len(run) // period // 2 * period
    change = [0] * (period + 1)
    for number, end in latest.items():
        start = made[number]
        if not middle <= start < middle + period or (end - start) // period > FURTHEST:
            continue
        size = int(graph.avals[number].size)
        begin, rest = (start + 1) % period, (end - start) % period
        for a, b in ((begin, min(begin + rest, period)), (0, begin + rest - period)):
            if a < b:
                change[a] += size
                change[b] -= size
    handed = list(itertools.accumulate(change[:period]))
    first = min(range(period), key=lambda place: (handed[place], place))
    count = (len(run) - first) // period
    return [run[first + k * period : first + (k + 1) * period] for k in range(count)]
