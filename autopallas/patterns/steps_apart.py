"""Finds steps that stand one after the other and give more than what the next one reads: a trajectory, or what a
gradient keeps.

Here steps need not be equal, nor read the same: each value that steps hand on is computed by its own equations, apart
from those of other steps.  What repeats only shows where steps begin.

A compiler that fuses computes a value anew for each equation that reads it, unless one of these is not fused with what
computes its operands: such a value is stored.  Steps whose states are stored in any case gain nothing, and are left
alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass

from autopallas import array_types
from autopallas.compat import ClosedJaxpr
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.extract import jaxpr_of
from autopallas.graph.prices import LONG
from autopallas.graph.program_digests import digest
from autopallas.kernels.respelling.kind import Found
from autopallas.kernels.respelling.step_sequences import StepsApart
from autopallas.patterns.equal_steps import by_body, often

__all__ = ["find"]

_LEAST_STEPS = 4
_SHORTEST = 4
"""Fewest equations of a step."""
_LONGEST = 2_000
"""Most equations of a step."""
_MOST_STEPS = 256
_SHORTEST_PATH = 4
"""Fewest equations from what a step is given to what it hands on, where it neither reads neighbours nor multiplies
matrices (two, where it does): to add up a few stored arrays again takes as long as to read them."""
_MOST_AT_ONCE = 8
"""Most occurrences of a step's rarest equation in one step."""
_MOST_TRIES = 64
"""Most equations, the rarest first, by whose places runs of steps are looked for."""
_MOST_RUNS = 16

_NEIGHBOURS = frozenset({"concatenate", "pad", "slice"})
_MOVES = _NEIGHBOURS | frozenset(
    """broadcast_in_dim copy expand_dims iota reshape rev split squeeze stack transpose unstack""".split()
)
_SUMS = frozenset({"dot_general", "reduce_max", "reduce_min", "reduce_sum"})
_FUSED = ELEMENTWISE | _MOVES
_STEPS_HOLD = _FUSED | _SUMS
_KEPT = LONG | _SUMS | {"custom_jvp_call"}
"""What is not computed again where something else reads it."""


def find(graph: Graph, taken: Container[Node]) -> Iterator[tuple[Node, Found]]:
    """Yields runs of steps, each with the node that ends it.

    Args:
      graph: the program.
      taken: what steps that are found here do not hold.
    """
    places: dict[int, int] = {}
    for nodes in by_body(graph, lambda node: node.name in _STEPS_HOLD or is_elementwise_call(node.equation)):
        for run in _runs(graph, nodes, taken):
            places = places or {id(node): place for place, node in enumerate(graph.nodes)}
            found = _of_run(graph, run, places)
            if found is not None:
                yield run.nodes[-1], found


@dataclass(frozen=True, slots=True)
class _Run:
    """Equations that repeat.

    Attributes:
      nodes: the equations, in order.
      period: how many equations a step has.
    """

    nodes: Sequence[Node]
    period: int


def _runs(graph: Graph, nodes: Sequence[Node], taken: Container[Node]) -> Iterator[_Run]:
    """Yields what repeats among the equations of a body, no equation twice."""
    if len(nodes) < _LEAST_STEPS * _SHORTEST:
        return
    untaken = [pair for pair in often(graph, nodes, _LEAST_STEPS) if pair[0] not in taken]
    chosen: list[Node] = [node for node, _ in untaken]
    kinds: list[Hashable] = [name for _, name in untaken]
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    runs = 0
    for own in sorted(places.values(), key=lambda own: (len(own), own))[:_MOST_TRIES]:
        own = [place for place in own if kinds[place] is not None]
        run = _around(kinds, own)
        if run is None:
            continue
        first, period, end = run
        kinds[first:end] = [None] * (end - first)
        yield _Run(chosen[first:end], period)
        runs += 1
        if runs == _MOST_RUNS:
            return


def _around(kinds: Sequence[Hashable], own: Sequence[int]) -> tuple[int, int, int] | None:
    """Returns where what repeats begins, how many equations a step has, and where it ends, by the places of one of
    them."""
    for together in range(1, min(_MOST_AT_ONCE, len(own) // _LEAST_STEPS) + 1):
        middle = len(own) // 2 - together // 2
        start = own[min(middle, len(own) - 1 - together)]
        period = own[min(middle + together, len(own) - 1)] - start
        if not _SHORTEST <= period <= _LONGEST:
            continue
        first = start
        while first > 0 and kinds[first - 1] is not None and kinds[first - 1] == kinds[first - 1 + period]:
            first -= 1
        end = start
        while (
            end < len(kinds) and kinds[end] is not None and (end - period < first or kinds[end] == kinds[end - period])
        ):
            end += 1
        if (end - first) // period >= 2:
            period = _shortest_period(kinds[first:end], period)
        if _LEAST_STEPS <= (end - first) // period <= _MOST_STEPS:
            return first, period, end
    return None


def _shortest_period(kinds: Sequence[Hashable], period: int) -> int:
    """Returns the shortest period of what has a period, of those that it is a multiple of."""
    for parts in range(_MOST_AT_ONCE, 1, -1):
        shorter, rest = divmod(period, parts)
        if not rest and shorter >= _SHORTEST and all(a == b for a, b in zip(kinds, kinds[shorter:], strict=False)):
            return shorter
    return period


def _of_run(graph: Graph, run: _Run, places: dict[int, int]) -> Found | None:
    """Returns the steps of a run, if they hand on anything that is computed of what they hold alone."""
    begin = _Run(run.nodes[: _LEAST_STEPS * run.period], run.period)
    if not _handed_on(_independent(graph, begin, places), 0, run.period):  # as layers of a network do not
        return None
    nodes = _independent(graph, run, places)
    first = _first_boundary(graph, nodes, run)
    handed = _handed_on(nodes, first, run.period)
    if not handed:
        return None
    latest = {(i - first) % run.period: i for i in nodes}
    positions = {(i - first) % run.period for i, node in nodes.items() if not handed.isdisjoint(node.outputs)}
    handed.update(number for position in positions for number in nodes[latest[position]].outputs)
    nodes = _of_what_is_given(nodes, first, run, handed)
    blocks: dict[int, list[Node]] = defaultdict(list)
    for i, node in _needed(nodes, handed).items():
        blocks[(i - first) // run.period].append(node)
    if len(blocks) < _LEAST_STEPS:
        return None
    steps = list(blocks.values())
    path = _fused_path(graph, steps[len(steps) // 2], handed)
    multiplies = any(node.name == "dot_general" for node in steps[len(steps) // 2])
    if len(path) < (2 if multiplies else _SHORTEST_PATH) and _NEIGHBOURS.isdisjoint(path):
        return None
    return _site(graph, steps, handed, path)


def _of_what_is_given(nodes: dict[int, Node], first: int, run: _Run, handed: set[int]) -> dict[int, Node]:
    """Returns the equations that compute something of what an earlier step hands on, in a step in the middle, and those
    at the same positions."""
    middle = len(run.nodes) // run.period // 2
    given: set[int] = set()
    positions: set[int] = set()
    for i, node in nodes.items():
        if (i - first) // run.period < middle:
            given.update(handed.intersection(node.outputs))
        elif (i - first) // run.period == middle and not given.isdisjoint(node.inputs):
            positions.add((i - first) % run.period)
            given.update(node.outputs)
    return {i: node for i, node in nodes.items() if (i - first) % run.period in positions}


def _is_stored(graph: Graph, number: int) -> bool:
    """Returns whether a value is stored in any case: it is a result, or an equation reads it that is not fused with
    what computes its operands.  Sums are such, with a product before them."""
    if number in graph.returned:
        return True
    for user in graph.users[number]:
        if user.name not in _FUSED and not is_elementwise_call(user.equation):
            return True
        if user.name == "mul" and [reader.name for reader in graph.users[user.outputs[0]]] == ["reduce_sum"]:
            return True
    return False


def _fused_path(graph: Graph, block: Sequence[Node], handed: set[int]) -> list[str]:
    """Returns the names of the equations of a step by which it computes what it hands on, of what it is given, with
    nothing that is stored on the way."""
    own = {number for node in block for number in node.outputs}
    known: dict[int, bool] = {}

    def is_free(number: int) -> bool:
        if number not in known:
            known[number] = not _is_stored(graph, number)
        return known[number]

    reached: set[int] = set()
    on_it: list[Node] = []
    for node in block:
        if node.name in _FUSED or is_elementwise_call(node.equation):
            if any(n in reached or (n in handed and n not in own and is_free(n)) for n in node.inputs):
                on_it.append(node)
                reached.update(n for n in node.outputs if is_free(n))
    ends = {n for n in reached if n in handed}
    names: list[str] = []
    for node in reversed(on_it):
        if not ends.isdisjoint(node.outputs):
            names.append(node.name)
            ends.update(n for n in node.inputs if n in reached)
    return names


def _handed_on(nodes: dict[int, Node], first: int, period: int) -> set[int]:
    """Returns the numbers of what one step gives and a later one reads."""
    step = {number: (i - first) // period for i, node in nodes.items() for number in node.outputs}
    return {n for i, node in nodes.items() for n in node.inputs if step.get(n, i) < (i - first) // period}


def _independent(graph: Graph, run: _Run, places: dict[int, int]) -> dict[int, Node]:
    """Returns the equations of a run, by their places there, that read nothing which other equations compute of the
    run's results, and no product of two arrays that both differ from step to step."""
    sums = _sums(graph, run)
    at = {id(node): i for i, node in enumerate(run.nodes) if i not in sums}
    begin, end = places[id(run.nodes[0])], places[id(run.nodes[-1])]
    lowest = run.nodes[0].outputs[0]
    within: set[int] = set()
    others: set[int] = set()
    """Numbers that depend on the run by way of what it does not hold."""
    found: dict[int, Node] = {}
    definitions, literals = graph.definitions, graph.literals
    for node in graph.nodes[begin : end + 1]:
        i = at.get(id(node))
        depends = False
        for n in node.inputs:
            if n in others or (n > lowest and n not in within and n not in definitions and n not in literals):
                depends = True
                break
        if i is not None and not depends and not _multiplies_own(run, i, within):
            found[i] = node
            within.update(node.outputs)
        elif depends or any(n in within for n in node.inputs) or i is not None:
            others.update(node.outputs)
    graph.steps.spend(end - begin + 1)
    return found


def _sums(graph: Graph, run: _Run) -> set[int]:
    """Returns the places in a run of what only adds up what steps give, as gradients of what all of them read: a
    compiler adds all of it at once."""
    at = {id(node): i for i, node in enumerate(run.nodes)}
    last = len(run.nodes) - run.period
    sums: set[int] = set()
    for i in range(len(run.nodes) - 1, -1, -1):
        node = run.nodes[i]
        if node.name not in ("add", "add_any"):
            continue
        (number,) = node.outputs
        users = [at.get(id(user)) for user in graph.users[number]]
        if i < last and (len(users) != 1 or None in users or number in graph.returned):
            continue
        if all(user is None or user in sums for user in users):
            sums.add(i)
    found: set[int] = set()
    without: set[int] = set()
    for i in sorted(sums):
        if i < last or not without.isdisjoint(run.nodes[i].inputs):
            found.add(i)
            without.update(run.nodes[i].outputs)
    return found


def _multiplies_own(run: _Run, place: int, within: Container[int]) -> bool:
    """Returns whether an equation is a product of no array that the one a step earlier or later multiplies too."""
    node = run.nodes[place]
    if node.name != "dot_general":
        return False
    other = run.nodes[place - run.period if place >= run.period else place + run.period]
    return not any(a == b and a not in within for a, b in zip(node.inputs, other.inputs, strict=True))


def _first_boundary(graph: Graph, nodes: dict[int, Node], run: _Run) -> int:
    """Returns the place among a run's first equations where a step hands on the least."""
    made = {number: i for i, node in nodes.items() for number in node.outputs}
    latest: dict[int, int] = {}
    for i, node in nodes.items():
        for number in node.inputs:
            if number in made:
                latest[number] = max(latest.get(number, 0), i)
    middle = len(run.nodes) // run.period // 2 * run.period
    change = [0] * (run.period + 1)
    whole = 0
    for number, end in latest.items():
        start = made[number]
        if not middle <= start < middle + run.period:
            continue
        size = int(graph.avals[number].size)
        whole += (end - start) // run.period * size
        begin, rest = (start + 1) % run.period, (end - start) % run.period
        for a, b in ((begin, min(begin + rest, run.period)), (0, begin + rest - run.period)):
            if a < b:
                change[a] += size
                change[b] -= size
    handed, best = 0, (-1, 0)
    for place in range(run.period):
        handed += change[place]
        if best[0] < 0 or handed < best[0]:
            best = handed, place
    return best[1]


def _needed(nodes: dict[int, Node], handed: set[int]) -> dict[int, Node]:
    """Returns the equations of which what steps hand on is computed, in order."""
    needed: dict[int, Node] = {}
    wanted = set(handed)
    for i in sorted(nodes, reverse=True):
        if not wanted.isdisjoint(nodes[i].outputs):
            needed[i] = nodes[i]
            wanted.update(nodes[i].inputs)
    return dict(sorted(needed.items()))


def _given_out(graph: Graph, blocks: Sequence[Sequence[Node]], handed: set[int]) -> set[int]:
    """Returns the values that steps give to what is outside of them: what they hand on, and what is not to be computed
    again of that, since something within the step takes long, or reads neighbours."""
    nodes = [node for block in blocks for node in block]
    once = set(handed)
    for node in nodes:
        far = node.name in _KEPT or node.name in _NEIGHBOURS
        if far or any(n in once and n not in handed for n in node.inputs):
            once.update(node.outputs)
    within = set(map(id, nodes))
    read: set[int] = set()
    """Numbers of what is read outside, or of which something is computed again there."""
    for node in reversed(nodes):
        for number in node.outputs:
            if number in graph.returned or any(id(user) not in within for user in graph.users[number]):
                read.add(number)
            if number in read and number not in once:
                read.update(node.inputs)
    return read & once


def _site(graph: Graph, blocks: Sequence[Sequence[Node]], handed: set[int], path: Sequence[str]) -> Found | None:
    """Returns the site of some steps."""
    made = {number for block in blocks for node in block for number in node.outputs}
    given_out = _given_out(graph, blocks, handed)
    read_in = [
        list(dict.fromkeys(n for node in block for n in node.inputs if n not in graph.literals)) for block in blocks
    ]
    operands = list(dict.fromkeys(n for read in read_in for n in read if n not in made))
    number_of = {number: i for i, number in enumerate(operands)}
    reads: list[tuple[int, ...]] = []
    programs: list[ClosedJaxpr] = []
    results: list[int] = []
    for block, read in zip(blocks, read_in, strict=True):
        own = {number for node in block for number in node.outputs}
        given = [number for node in block for number in node.outputs if number in handed or number in given_out]
        results += [number for number in given if number in given_out]
        outer = [n for n in read if n not in own]
        reads.append(tuple(number_of[n] for n in outer))
        programs.append(jaxpr_of(graph, block, outer, given))
        number_of.update({number: len(number_of) + i for i, number in enumerate(given)})
    avals = [graph.avals[n] for n in (*operands, *results)]
    if not results or array_types.varying_axes(avals):
        return None
    if any(array_types.explicit_sharding(aval) is not None for aval in avals):
        return None
    steps = StepsApart(
        key=digest(programs),
        steps=tuple(programs),
        reads=tuple(reads),
        results=tuple(number_of[n] for n in results),
        fused=tuple(not _is_stored(graph, n) for n in results),
        path=tuple(sorted(path)),
    )
    return Found((("steps", steps),), tuple(operands), tuple(results))
