"""Writes the site of a chain of equal steps: what a loop over them is given, its step's program, and what it gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from autopallas import array_types
from autopallas.compat import ClosedJaxpr, JaxprAtom, Literal, Var
from autopallas.graph import Graph
from autopallas.graph.extract import closed
from autopallas.graph.program_digests import bits, digest
from autopallas.kernels.respelling.chained_steps import ChainedSteps, Slices, Values
from autopallas.kernels.respelling.kind import Found
from autopallas.patterns.chain import Chain, Family, Given, Longer, Place, Refused, Slot
from autopallas.patterns.step_periods import FURTHEST, LEAST_STEPS
from autopallas.patterns.step_slices import slices_of

__all__ = ["site_of"]

_MOST_ALTERNATING = 4
_FEW = 4
"""Of what only every fourth step is read, or fewer, the others would be kept for nothing."""
_CASTS = frozenset("broadcast_in_dim convert_element_type copy expand_dims reshape squeeze transpose".split())
_ADDS = frozenset({"add", "add_any", "and", "max", "min", "or"})
"""What puts together what steps give, in any order."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a step is given.

    Attributes:
      carried: by those before it.
      shared: what all steps read.
      own: what each reads of its own.
      of_operand: which of the latter two, or which literal, each operand from outside of the steps is.
    """

    carried: list[Place]
    shared: list[int]
    own: list[tuple[int, ...]]
    of_operand: dict[tuple[int, int], tuple[str, int]]


def site_of(
    chain: Chain,
    given_before: Given,
    ignored: Container[int] = (),
    stacks: Sequence[Slot] = (),
    stacks_read: Mapping[tuple[int, ...], int] = MappingProxyType({}),
) -> Found:
    """Returns the site of a chain's steps, and adds what it gives to ``given_before``.

    Args:
      chain: the chain, which leaves out first and last steps that read or give other things than the rest.
      given_before: what earlier chains give.
      ignored: identities of nodes whose reading does not count.
      stacks: what the site gives as one array of all steps, behind its results.
      stacks_read: by the numbers of a family of an earlier chain, that of the array of all.

    Raises:
      Refused: a loop would keep or copy more than the steps do.
    """
    read = _read(chain, given_before, ignored, stacks)
    graph, count = chain.graph, len(chain.blocks)
    ends, middle = _live(chain, {slot: [*range(count)] for slot in (*read, *stacks)} if stacks else read)
    live = sorted(middle | ends)
    inputs = _inputs(chain, live)
    _refuse_layers(chain, live, inputs)
    stacked, ended = _stacked(read, stacks, inputs.carried, count)
    sources = _Sources(graph)
    first = tuple(sources.of(chain.first[place]) for place in inputs.carried)
    shared = tuple(sources.of(number) for number in inputs.shared)
    own = _own(chain, inputs, given_before, stacks_read, sources)
    results, numbers = _results(chain, read, given_before)
    step = _program(chain, count // 2, sorted(middle), inputs, stacked)
    last = _program(chain, count - 1, live, inputs, [*stacked, *ended]) if ended else None
    avals = [graph.avals[n] for n in (*sources.operands, *numbers)]
    if array_types.varying_axes(avals) or any(array_types.explicit_sharding(aval) is not None for aval in avals):
        raise Refused
    places = [*inputs.carried, *((1, *slot) for slot in (*stacked, *ended))]
    place_of = {place: i for i, place in enumerate(places)}  # of what is handed on and read too, that which is read
    steps = ChainedSteps(
        key=digest([step] if last is None else [step, last], b"".join(bits(array) for array in sources.constants)),
        step=step,
        last=last,
        carried=first,
        shared=shared,
        own=tuple(own),
        results=tuple((place_of[(1, *slot)], k) for slot, k in results),
        count=count,
        constants=tuple(sources.constants),
        stacks=tuple(place_of[(1, *slot)] for slot in stacks),
    )
    return Found((("steps", steps),), tuple(sources.operands), tuple(numbers))


class _Sources:
    """Where the values come from that a site is given: the places of its operands, or of its constants."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self.operands: dict[int, int] = {}
        self.constants: list[np.ndarray] = []
        self._constant_of: dict[int, int] = {}

    def of(self, number: int) -> int:
        """Returns the place of an operand, or -1, -2, ... of a constant."""
        graph = self._graph
        if number in graph.literals:
            if number not in self._constant_of:
                aval = graph.avals[number]
                self.constants.append(np.asarray(graph.literals[number], aval.dtype))
                self._constant_of[number] = -len(self.constants)
            return self._constant_of[number]
        return self.operands.setdefault(number, len(self.operands))


# ---------------------------------------------------------------------- what steps give


def _read(chain: Chain, given_before: Given, ignored: Container[int], stacks: Sequence[Slot]) -> dict[Slot, list[int]]:
    """Returns what is read outside of the steps, each with the numbers of the steps; leaves out steps at the ends that
    read, or of which is read, what is not of the others."""
    chain.leave_out_ends(given_before)
    try:
        read = _read_after_first(chain, ignored, stacks)
    except Refused:
        if not stacks:
            _look_for_longer(chain, [tuple(numbers) for numbers in chain.read_alone()])
        raise
    chain.families = []
    chain.given = {n: given_before[n] for numbers in chain.read_alone() for n in numbers if n in given_before}
    return read


def _stacked(
    read: Mapping[Slot, Sequence[int]], stacks: Sequence[Slot], carried: Sequence[Place], count: int
) -> tuple[list[Slot], list[Slot]]:
    """Returns what every step gives beside what it hands on, and what the last one gives more."""
    stacked: list[Slot] = [*stacks]
    ended: list[Slot] = []
    for slot, steps in read.items():
        if slot in stacked:
            continue
        if steps != [count - 1] or (stacks and (1, *slot) not in carried):
            stacked.append(slot)
        elif (1, *slot) not in carried:
            ended.append(slot)
    return stacked, ended


def _results(
    chain: Chain, read: Mapping[Slot, Sequence[int]], given_before: Given
) -> tuple[list[tuple[Slot, int]], list[int]]:
    """Returns the slot and the step of each result of the site, and their numbers; adds what all steps give to
    ``given_before``."""
    results: list[tuple[Slot, int]] = []
    numbers: list[int] = []
    for slot, steps in read.items():
        if len(steps) == len(chain.blocks):
            family = Family(chain, slot, tuple([block[slot[0]].outputs[slot[1]] for block in chain.blocks]))
            given_before.update((number, (family, k)) for k, number in enumerate(family.numbers))
        for k in steps:
            results.append((slot, k))
            numbers.append(chain.blocks[k][slot[0]].outputs[slot[1]])
    return results, numbers


def _read_after_first(chain: Chain, ignored: Container[int], stacks: Sequence[Slot]) -> dict[Slot, list[int]]:
    """Returns what is read outside of the steps, each with the numbers of the steps; leaves out the first steps
    where more is read of these than of others."""
    for _ in range(FURTHEST + 1):
        read, count = chain.read_outside(ignored), len(chain.blocks)
        few = [
            steps
            for slot, steps in read.items()
            if len(steps) * _FEW < count and steps != [count - 1] and slot not in stacks
        ]
        if not few:
            if not read and not stacks:
                break
            return read
        if len(few) <= len(stacks):
            return read
        if stacks or any(step > FURTHEST and step < count - 1 for steps in few for step in steps):
            raise Refused("of few of many equal steps, one after the other, more is read than of the others")
        chain.leave_out_first()
    raise Refused


def _live(chain: Chain, read: dict[Slot, list[int]]) -> tuple[set[int], set[int]]:
    """Returns the positions of the equations that the last step needs for what the program reads of it, and of
    those that the others need for what the program and later steps read."""
    last = len(chain.blocks) - 1
    within: dict[int, list[int]] = defaultdict(list)
    before: dict[int, list[int]] = defaultdict(list)
    for (i, _), (position, _) in chain.reads.within.items():
        within[i].append(position)
    for (i, _), (_, position, _) in chain.reads.before.items():
        before[i].append(position)

    def reached(asked: set[int], later: bool) -> set[int]:
        todo, found = [*asked], set[int]()
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo += within[i]
                todo += before[i] if later else ()
        return found

    ends = reached({i for (i, _), steps in read.items() if steps[-1] == last}, later=False)
    asked = {i for (i, _), steps in read.items() if steps[0] < last}
    return ends, reached(asked | {position for i in ends for position in before[i]}, later=True)


# ---------------------------------------------------------------------- what steps read


def _inputs(chain: Chain, live: Sequence[int]) -> _Inputs:
    """Returns what the equations of a step at some positions read.

    Raises:
      Refused: nothing of that comes from an earlier step.
    """
    graph, blocks, needed = chain.graph, chain.blocks, set(live)
    places = {place for (i, _), place in chain.reads.before.items() if i in needed}
    carried = sorted({(less, p, o) for ago, p, o in places for less in range(1, ago + 1)})
    if not carried:
        raise Refused
    shared: dict[int, int] = {}
    own: dict[tuple[int, ...], int] = {}
    of_operand: dict[tuple[int, int], tuple[str, int]] = {}
    for i, j in chain.reads.outside:
        if i not in needed:
            continue
        numbers = tuple([block[i].inputs[j] for block in blocks])
        number = numbers[0]
        if all(other == number for other in numbers):
            if number in graph.literals:
                of_operand[i, j] = "literal", number
            else:
                of_operand[i, j] = "shared", shared.setdefault(number, len(shared))
        else:
            of_operand[i, j] = "own", own.setdefault(numbers, len(own))
    _look_for_longer(chain, list(own))
    graph.steps.spend(len(of_operand))
    return _Inputs(carried, list(shared), list(own), of_operand)


def _look_for_longer(chain: Chain, own: Sequence[tuple[int, ...]]) -> None:
    """Raises :class:`Longer` where what each step reads of its own alternates, as a matrix and its transpose."""
    for numbers in own:
        if numbers[0] not in chain.graph.literals and numbers[1:] != numbers[:-1]:
            for times in range(2, min(_MOST_ALTERNATING, len(chain.blocks) // LEAST_STEPS) + 1):
                if numbers[times:] == numbers[:-times]:
                    raise Longer(times)


def _own(
    chain: Chain,
    inputs: _Inputs,
    given_before: Given,
    stacks_read: Mapping[tuple[int, ...], int],
    sources: _Sources,
) -> list[Slices | Values]:
    """Returns where what each step reads of its own comes from: slices of an array that nothing of the steps reads
    otherwise, or values of which an earlier chain may give all."""
    cut = {numbers: slices_of(chain.graph, numbers) for numbers in inputs.own}
    read_whole = {
        *chain.first.values(),
        *inputs.shared,
        *(n for numbers, found in cut.items() if not found for n in numbers),
    }
    of_each: list[Slices | Values] = []
    for numbers, slices in cut.items():
        if slices is None or not read_whole.isdisjoint(numbers):
            ordered, at, apart = _in_order(chain, numbers, given_before)
            stack = stacks_read.get(ordered)
            if stack is not None:
                of_each.append(Slices(sources.of(stack), 0, at, apart, keeps=False))
                continue
            of_each.append(Values(tuple(sources.of(number) for number in ordered), at, apart))
        else:
            array, axis, start, apart, keeps = slices
            of_each.append(Slices(sources.of(array), axis, start, apart, keeps))
    return of_each


def _in_order(chain: Chain, numbers: tuple[int, ...], given: Given) -> tuple[tuple[int, ...], int, int]:
    """Returns values in the order in which they are computed, the place of the first step's one, and how far the
    next one lies behind it.

    Where an earlier chain gives them, all that it gives of the kind are returned: a compiler that has these in one
    array copies nothing then.
    """
    places = [given.get(number) for number in numbers[:2]]
    if places[0] is not None and places[1] is not None:
        (family, first), (other, second) = places[0], places[1]
        apart = second - first
        if family is other and abs(apart) == 1:
            end = first + (len(numbers) - 1) * apart
            low, high = min(first, end), max(first, end)
            if low >= 0 and family.numbers[low : high + 1] == numbers[::apart]:
                chain.families.append(family)
                return family.numbers, first, apart
    if numbers[0] > numbers[-1]:
        return numbers[::-1], len(numbers) - 1, -1
    return numbers, 0, 1


def _refuse_layers(chain: Chain, live: Sequence[int], inputs: _Inputs) -> None:
    """Raises where steps multiply what they hand on by arrays of their own, as the layers of a network do: a loop
    would copy all weights together."""
    graph, block = chain.graph, chain.blocks[0]
    handed = _handed_on(chain, live, inputs.carried)
    if not handed:  # each step only adds to what the others gave
        raise Refused
    given = [_is_given(graph, numbers) and slices_of(graph, numbers) is None for numbers in inputs.own]
    if not any(given):
        return
    chained: set[int] = set()
    weights: set[int] = set()
    """Positions of what is computed of weights of its step alone."""
    for i in live:
        kinds: list[str] = []
        for j in range(len(block[i].inputs)):
            if (i, j) in chain.reads.within:
                position = chain.reads.within[i, j][0]
                kinds.append("chained" if position in chained else "weight" if position in weights else "")
            elif (i, j) in chain.reads.before:
                kinds.append("chained")
            else:
                form, place = inputs.of_operand[i, j]
                kinds.append("weight" if form == "literal" or (form == "own" and given[place]) else "")
        if block[i].name == "dot_general" and i in handed and {*kinds} == {"chained", "weight"}:
            raise Refused
        if "chained" in kinds:
            chained.add(i)
        elif kinds and {*kinds} == {"weight"}:
            weights.add(i)


def _handed_on(chain: Chain, live: Sequence[int], carried: Sequence[Place]) -> set[int]:
    """Returns the positions of what steps compute of what they hand on, but for what they only add up."""
    readers: dict[int, set[int]] = defaultdict(set)
    needed = {*live}
    for (i, _), (*_, position, _) in (*chain.reads.before.items(), *chain.reads.within.items()):
        if i in needed:
            readers[position].add(i)
    used = {i for i in live if chain.blocks[0][i].name not in _ADDS}
    """Positions that are no sum, and those of which such a one is computed sooner or later."""
    sources: dict[int, set[int]] = defaultdict(set)
    for position, own in readers.items():
        for i in own:
            sources[i].add(position)
    todo = [*used]
    while todo:
        fresh = sources[todo.pop()] - used
        used |= fresh
        todo += fresh
    added = {position for position in needed if used.isdisjoint(readers[position])}
    reads: dict[int, list[int]] = defaultdict(list)
    for (i, _), (position, _) in chain.reads.within.items():
        reads[i].append(position)
    found = {position for _, position, _ in carried if position not in added}
    for i in reversed(live):
        if i in found:
            found.update(reads[i])
    return found


# ---------------------------------------------------------------------- the program of a step


def _program(chain: Chain, k: int, live: Sequence[int], inputs: _Inputs, given: Sequence[Slot]) -> ClosedJaxpr:
    """Returns the program of a step, which hands on what is carried and gives some results."""
    graph, block = chain.graph, chain.blocks[k]

    def variable(number: int) -> Var:
        return Var(graph.avals[number])

    before = {place: variable(block[place[1]].outputs[place[2]]) for place in inputs.carried}
    of_all = [variable(number) for number in inputs.shared]
    of_this = [variable(numbers[k]) for numbers in inputs.own]
    made: dict[Slot, Var] = {}

    def read(i: int, j: int, number: int) -> JaxprAtom:
        if (i, j) in chain.reads.within:
            return made[chain.reads.within[i, j]]
        if (i, j) in chain.reads.before:
            return before[chain.reads.before[i, j]]
        form, place = inputs.of_operand[i, j]
        if form == "literal":
            return Literal(graph.literals[number], graph.avals[number])
        return of_all[place] if form == "shared" else of_this[place]

    equations = []
    for i in live:
        node = block[i]
        operands = [read(i, j, number) for j, number in enumerate(node.inputs)]
        outputs = [variable(number) for number in node.outputs]
        made.update(((i, o), v) for o, v in enumerate(outputs))
        equations.append(node.equation.replace(invars=operands, outvars=outputs))
    results: list[JaxprAtom] = [
        made[position, output] if ago == 1 else before[ago - 1, position, output]
        for ago, position, output in inputs.carried
    ]
    results += [made[slot] for slot in given]
    return closed([*before.values(), *of_all, *of_this], results, equations)


def _is_given(graph: Graph, numbers: Sequence[int]) -> bool:
    """Returns whether values are inputs of the program, or casts of such."""
    for number in (numbers[0], numbers[-1]):
        node = graph.definitions.get(number)
        while node is not None and node.name in _CASTS and len(node.inputs) == 1:
            number = node.inputs[0]
            node = graph.definitions.get(number)
        if node is not None or number in graph.literals:
            return False
    return True
