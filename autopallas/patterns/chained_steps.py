"""Finds equal steps with products or sums that stand one after the other, as a Python loop over a recurrent cell, over
steps of gradient descent or over a solver writes them, and as JAX writes the backward of such steps.

Each equation of each step is proved to be that of the step in the middle: it reads what the same step computed, what
one of the two steps before computed at one place, what all steps read, or what its step alone reads.  What its step
alone reads comes from outside: slices of an input, what a forward keeps for its backward, numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from autopallas import array_types, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, Literal, Var
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.extract import closed
from autopallas.graph.program_digests import bits, digest
from autopallas.kernels.respelling.chained_steps import ChainedSteps, Slices, Values
from autopallas.kernels.respelling.kind import Found
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.patterns.equal_steps import by_body
from autopallas.patterns.match import NearMiss
from autopallas.patterns.step_periods import FURTHEST, LEAST_STEPS, SHORTEST, blocks_of, runs
from autopallas.patterns.step_slices import slices_of

__all__ = ["Chain", "Family", "Refused", "find"]

_MOST_STEPS = 4_096
_MOST_PASSES = 8
"""Most looks at a run for what depends on it by way of other equations."""
_MOST_ALTERNATING = 4
_MOST_AT_ENDS = 3
"""Most steps at both ends that are left out for what an earlier chain gives."""
_FEW = 4
"""Of what only every fourth step is read, or fewer, the others would be kept for nothing."""

_MOVES = frozenset(
    """broadcast_in_dim concatenate copy expand_dims iota pad reshape rev slice split squeeze stack transpose
    unstack""".split()
)
_SUMS = frozenset({"argmax", "argmin", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum"})
_MORE = frozenset({"dynamic_slice", "dynamic_update_slice", "gather"})
_PRODUCT = "dot_general"
_STEPS_HOLD = ELEMENTWISE | _MOVES | _SUMS | _MORE | {_PRODUCT}
_CASTS = frozenset("broadcast_in_dim convert_element_type copy expand_dims reshape squeeze transpose".split())
_ADDS = frozenset({"add", "add_any", "and", "max", "min", "or"})
"""What puts together what steps give, in any order."""

_ADVICE = (
    "Compute what the steps read before the first of them, and what comes of them after the last; or write "
    "jax.lax.scan over the steps."
)

_Slot: TypeAlias = tuple[int, int]
"""A result of a step: the position of its equation, and its position among the results of that."""
_Place: TypeAlias = tuple[int, int, int]
"""A result of an earlier step: how many steps ago, and its slot."""


class Refused(Exception):
    """Raised where a run of steps is no chain; ``reason`` is empty where it is nothing of the kind."""

    def __init__(self, reason: str = ""):
        super().__init__(reason)
        self.reason = reason


class _Leaves(Refused):
    """Raised where something outside of the steps computes what a step reads of what an earlier one gave."""


class _Longer(Exception):
    """Raised where ``times`` steps are one: every step reads what the one as many steps before it read."""

    def __init__(self, times: int):
        super().__init__(times)
        self.times = times


@dataclass(frozen=True, eq=False, slots=True)
class Family:
    """What the steps of a chain give at one place.

    Attributes:
      chain: the chain.
      slot: the place.
      numbers: the numbers of the values, step by step.
    """

    chain: Chain
    slot: _Slot
    numbers: tuple[int, ...]


_Given: TypeAlias = dict[int, tuple[Family, int]]
"""By the numbers of what chains give in each of their steps: all of the kind, and the place among them."""


def find(graph: Graph) -> Iterator[tuple[Chain, Found] | NearMiss]:
    """Yields chains of equal steps, each with its site, and near misses."""

    def holds(node: Node) -> bool:
        return (node.name in _STEPS_HOLD or is_elementwise_call(node.equation)) and not node.equation.effects

    order: dict[int, int] = {}
    given: _Given = {}
    for nodes in by_body(graph, holds):
        for run, period in runs(graph, nodes):
            if not any(node.name == _PRODUCT or node.name in _SUMS for node in run[:period]):
                continue
            order = order or {id(node): place for place, node in enumerate(graph.nodes)}
            try:
                chain, found = _chain(graph, run, period, order, given)
            except Refused as refused:
                if refused.reason:
                    yield NearMiss(
                        OPERATION.name, jaxprs.location(run[-1].equation), refused.reason, run[-1].outputs[0], _ADVICE
                    )
                continue
            yield chain, found


def _chain(graph: Graph, run: Sequence[Node], period: int, order: dict[int, int], given: _Given) -> tuple[Chain, Found]:
    """Returns the chain of a run, and its site.

    Raises:
      Refused: it is none.
    """
    try:
        return _of_run(graph, run, period, order, given)
    except _Leaves:
        pass
    less, length, other = _independent(graph, run, period, order)
    try:
        return _of_run(graph, less, length, order, given)
    except Refused:
        if other is not None and other.name not in _STEPS_HOLD and _shares_a_factor(run, period):
            raise Refused(
                f"between equal steps, one after the other, stands what no loop of them can hold: {other.name}"
            ) from None
        raise


def _of_run(
    graph: Graph, run: Sequence[Node], period: int, order: dict[int, int], given: _Given
) -> tuple[Chain, Found]:
    """Returns the chain of equations that repeat, and its site.

    Raises:
      Refused: it is none.
    """
    if not run or len(run) < LEAST_STEPS * period:
        raise Refused
    for _ in range(2):
        try:
            chain = Chain(graph, blocks_of(graph, run, period), order)
            return chain, chain.found(given)
        except _Longer as longer:
            period *= longer.times
    raise Refused


def _shares_a_factor(run: Sequence[Node], period: int) -> bool:
    """Returns whether two steps multiply by the same array."""
    start = len(run) // period // 2 * period
    return any(
        node.name == _PRODUCT and any(a == b for a, b in zip(node.inputs, later.inputs, strict=True))
        for node, later in zip(run[start - period : start], run[start : start + period], strict=False)
    )


def _independent(
    graph: Graph, run: Sequence[Node], period: int, order: dict[int, int]
) -> tuple[Sequence[Node], int, Node | None]:
    """Returns the equations of a run without those positions of a step that read what others than the run compute of
    it, such as gradients of a whole array to which each step adds; the length of a step; and one of the others."""
    begin, end = order[id(run[0])], order[id(run[-1])]
    between = graph.nodes[begin : end + 1]
    definitions, literals, lowest = graph.definitions, graph.literals, run[0].outputs[0]
    between_steps: Node | None = None
    for _ in range(_MOST_PASSES):
        at = {id(node): place % period for place, node in enumerate(run)}
        made: set[int] = set()
        others: dict[int, Node] = {}
        left_out: set[int] = set()
        for node in between:
            position = at.get(id(node))
            read = next(
                (
                    others.get(n, node)
                    for n in node.inputs
                    if n in others or (n > lowest and n not in made and n not in definitions and n not in literals)
                ),
                None,
            )
            if position is not None and read is None and position not in left_out:
                made.update(node.outputs)
            elif position is not None or read is not None or any(n in made for n in node.inputs):
                if position is not None:
                    left_out.add(position)
                    between_steps = between_steps or read
                others.update(dict.fromkeys(node.outputs, read or node))
        graph.steps.spend(end - begin + 1)
        if not left_out:
            return run, period, between_steps
        run = [node for place, node in enumerate(run) if place % period not in left_out]
        period -= len(left_out)
        if period < SHORTEST or not run:
            break
    return [], period, between_steps


# ---------------------------------------------------------------------- what a step reads


@dataclass(slots=True)
class _Reads:
    """What the equations of the step in the middle read, per operand.

    Attributes:
      within: the slot of the same step.
      before: what an earlier step gave.
      outside: the others, which come from outside of the steps.
    """

    within: dict[tuple[int, int], _Slot]
    before: dict[tuple[int, int], _Place]
    outside: list[tuple[int, int]]


class Chain:
    """Steps that are proved to be equal, and of which each reads what an earlier one gave."""

    def __init__(self, graph: Graph, blocks: list[Sequence[Node]], order: dict[int, int]):
        self.graph = graph
        self.given: _Given = {}
        self.families: list[Family] = []
        """What earlier chains give and these steps read, once the site was asked for."""
        if len(blocks) < LEAST_STEPS:
            raise Refused
        if len(blocks) > _MOST_STEPS:
            raise Refused(f"there are more than {_MOST_STEPS:,} equal steps, one after the other")
        at = {
            number: (k, i, o)
            for k, block in enumerate(blocks)
            for i, node in enumerate(block)
            for o, number in enumerate(node.outputs)
        }
        middle = max(len(blocks) // 2, FURTHEST)
        self.reads = reads = self._of_one(blocks, at, middle)
        start, end = self._equal(blocks, at, middle, reads)
        self.blocks = blocks[start:end]
        self.first = self._given_at_first(reads)
        self._refuse_what_leaves(order)

    def _of_one(self, blocks: Sequence[Sequence[Node]], at: dict[int, _Place], middle: int) -> _Reads:
        reads = _Reads({}, {}, [])
        for i, node in enumerate(blocks[middle]):
            for j, number in enumerate(node.inputs):
                step, *slot = at.get(number, (-1, 0, 0))
                if step == middle:
                    reads.within[i, j] = (slot[0], slot[1])
                elif 0 <= middle - step <= FURTHEST and step >= 0:
                    reads.before[i, j] = (middle - step, slot[0], slot[1])
                else:
                    reads.outside.append((i, j))
        if not reads.before:
            raise Refused
        return reads

    def _equal(
        self, blocks: Sequence[Sequence[Node]], at: dict[int, _Place], middle: int, reads: _Reads
    ) -> tuple[int, int]:
        """Returns the first step and the end of those around the middle that read what that one reads."""

        def differs(k: int, start: int) -> int:
            """Returns the step from which on this step's reads are those of the middle: ``start``, if they are."""
            block = blocks[k]
            for (i, j), (position, output) in reads.within.items():
                if block[i].inputs[j] != block[position].outputs[output]:
                    return k + 1
            for (i, j), (ago, position, output) in reads.before.items():
                if k - ago >= start and block[i].inputs[j] != blocks[k - ago][position].outputs[output]:
                    start = k - ago + 1
            for i, j in reads.outside:
                step = at.get(block[i].inputs[j], (-1, 0, 0))[0]
                if step >= start:
                    start = step + 1
            return start

        start, end = 0, len(blocks)
        for k in range(middle, -1, -1):
            if k < start:
                break
            start = max(start, differs(k, start))
        if start > middle:
            raise Refused
        for k in range(middle + 1, end):
            if differs(k, start) > start:
                end = k
                break
        if end - start < LEAST_STEPS:
            raise Refused
        return start, end

    def _given_at_first(self, reads: _Reads) -> dict[_Place, int]:
        """Returns the numbers that the first steps read in the place of what earlier ones give; leaves out the first
        steps where two equations read others."""
        for _ in range(FURTHEST + 1):
            first: dict[_Place, int] = {}
            if self._agree(reads, first):
                return first
            self.blocks = self.blocks[1:]
            if len(self.blocks) < LEAST_STEPS:
                break
        raise Refused

    def _agree(self, reads: _Reads, first: dict[_Place, int]) -> bool:
        for k, block in enumerate(self.blocks[:FURTHEST]):
            for (i, j), (ago, position, output) in reads.before.items():
                if k < ago:
                    number = block[i].inputs[j]
                    if first.setdefault((ago - k, position, output), number) != number:
                        return False
        graph = self.graph
        made = {number for block in self.blocks for node in block for number in node.outputs}
        if not made.isdisjoint(first.values()):
            return False
        for (ago, position, output), number in [*first.items()]:
            result = self.blocks[0][position].outputs[output]
            if (graph.shape(number), graph.dtype(number)) != (graph.shape(result), graph.dtype(result)):
                return False
            if ago > 1 and (1, position, output) not in first:
                return False
        return True

    def _refuse_what_leaves(self, order: dict[int, int]) -> None:
        """Raises where something outside of the steps computes what a step reads of what an earlier one gave."""
        graph = self.graph
        within = {id(node) for block in self.blocks for node in block}
        begin, end = order[id(self.blocks[0][0])], order[id(self.blocks[-1][-1])]
        definitions, literals = graph.definitions, graph.literals
        lowest = self.blocks[0][0].outputs[0]
        made: set[int] = set()
        others: set[int] = set()
        for node in graph.nodes[begin : end + 1]:
            if id(node) in within:
                if not others.isdisjoint(node.inputs):
                    raise _Leaves
                made.update(node.outputs)
            elif any(
                n in made or n in others or (n > lowest and n not in definitions and n not in literals)
                for n in node.inputs
            ):
                others.update(node.outputs)
        graph.steps.spend(end - begin + 1)

    # ------------------------------------------------------------------ the site

    def found(
        self,
        given_before: _Given,
        ignored: Container[int] = (),
        stacks: Sequence[_Slot] = (),
        stacks_read: Mapping[tuple[int, ...], int] = MappingProxyType({}),
    ) -> Found:
        """Returns the site of the steps, and adds what it gives to ``given_before``.

        Args:
          given_before: what earlier chains give.
          ignored: identities of nodes whose reading does not count.
          stacks: what the site gives as one array of all steps, behind its results.
          stacks_read: by the numbers of a family of an earlier chain, that of the array of all.

        Raises:
          Refused: a loop would keep or copy more than the steps do.
        """
        self._leave_out_ends(given_before)
        try:
            read = self._read_after_first(ignored, stacks)
        except Refused:
            if not stacks:
                self._look_for_longer([tuple(numbers) for numbers in self._read_alone()])
            raise
        self.families = []
        self.given = {n: given_before[n] for numbers in self._read_alone() for n in numbers if n in given_before}
        graph, blocks, count = self.graph, self.blocks, len(self.blocks)
        ends, middle = self._live({slot: [*range(count)] for slot in (*read, *stacks)} if stacks else read)
        live = sorted(middle | ends)
        places = {place for (i, _), place in self.reads.before.items() if i in middle or i in ends}
        carried = sorted({(less, p, o) for ago, p, o in places for less in range(1, ago + 1)})
        if not carried:
            raise Refused
        shared, own, of_operand = self._outside(live)
        self._refuse_layers(live, of_operand, own, carried)

        stacked: list[_Slot] = [*stacks]
        ended: list[_Slot] = []
        for slot, steps in read.items():
            if slot in stacked:
                continue
            if steps != [count - 1] or (stacks and (1, *slot) not in carried):
                stacked.append(slot)
            elif (1, *slot) not in carried:
                ended.append(slot)
        given = [*((1, *slot) for slot in stacked), *((1, *slot) for slot in ended)]
        place_of = {place: i for i, place in enumerate(carried)} | {
            place: len(carried) + i for i, place in enumerate(given)
        }
        sources: dict[int, int] = {}
        constants: list[np.ndarray] = []
        constant_of: dict[int, int] = {}

        def source(number: int) -> int:
            if number in graph.literals:
                if number not in constant_of:
                    aval = graph.avals[number]
                    constants.append(np.asarray(graph.literals[number], aval.dtype))
                    constant_of[number] = -len(constants)
                return constant_of[number]
            return sources.setdefault(number, len(sources))

        first = tuple(source(self.first[place]) for place in carried)
        read_by_all = tuple(source(number) for number in shared)
        of_each: list[Slices | Values] = []
        cut = {numbers: slices_of(graph, numbers) for numbers in own}
        read_whole = {
            *self.first.values(),
            *shared,
            *(n for numbers, found in cut.items() if not found for n in numbers),
        }
        for numbers, slices in cut.items():
            if slices is None or not read_whole.isdisjoint(numbers):
                ordered, at, apart = self._in_order(numbers, given_before)
                stack = stacks_read.get(ordered)
                if stack is not None:
                    of_each.append(Slices(source(stack), 0, at, apart, keeps=False))
                    continue
                of_each.append(Values(tuple(source(number) for number in ordered), at, apart))
            else:
                array, axis, start, apart, keeps = slices
                of_each.append(Slices(source(array), axis, start, apart, keeps))
        results: list[tuple[int, int]] = []
        numbers_of_results: list[int] = []
        for slot, steps in read.items():
            if len(steps) == count:
                family = Family(self, slot, tuple([block[slot[0]].outputs[slot[1]] for block in blocks]))
                given_before.update((number, (family, k)) for k, number in enumerate(family.numbers))
            for k in steps:
                results.append((place_of[(1, *slot)], k))
                numbers_of_results.append(blocks[k][slot[0]].outputs[slot[1]])
        step = self._program(count // 2, sorted(middle), carried, shared, own, of_operand, stacked)
        last = self._program(count - 1, live, carried, shared, own, of_operand, [*stacked, *ended]) if ended else None
        operands = tuple(sources)
        avals = [graph.avals[n] for n in (*operands, *numbers_of_results)]
        if array_types.varying_axes(avals) or any(array_types.explicit_sharding(aval) is not None for aval in avals):
            raise Refused
        chain = ChainedSteps(
            key=digest([step] if last is None else [step, last], b"".join(bits(array) for array in constants)),
            step=step,
            last=last,
            carried=first,
            shared=read_by_all,
            own=tuple(of_each),
            results=tuple(results),
            count=count,
            constants=tuple(constants),
            stacks=tuple(place_of[(1, *slot)] for slot in stacks),
        )
        return Found((("steps", chain),), operands, tuple(numbers_of_results))

    def _read_after_first(self, ignored: Container[int], stacks: Sequence[_Slot]) -> dict[_Slot, list[int]]:
        """Returns what is read outside of the steps, each with the numbers of the steps; leaves out the first steps
        where more is read of these than of others."""
        for _ in range(FURTHEST + 1):
            read, count = self._read_outside(ignored), len(self.blocks)
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
            self.blocks = self.blocks[1:]
            if len(self.blocks) < LEAST_STEPS:
                break
            self.first = self._given_at_first(self.reads)
        raise Refused

    def _leave_out_ends(self, given: _Given) -> None:
        """Leaves out the first and last steps that read what an earlier chain does not give, where it gives the others
        the same."""
        start, end = 0, len(self.blocks)
        for numbers in self._read_alone():
            known = [k for k, number in enumerate(numbers) if number in given]
            if len(numbers) > len(known) >= max(LEAST_STEPS, len(numbers) - _MOST_AT_ENDS) and numbers[0] != numbers[1]:
                start, end = max(start, known[0]), min(end, known[-1] + 1)
        if end - start >= max(LEAST_STEPS, len(self.blocks) - _MOST_AT_ENDS) and end - start < len(self.blocks):
            self.blocks = self.blocks[start:end]
            self.first = self._given_at_first(self.reads)

    def _read_alone(self) -> Iterator[list[int]]:
        """Yields what each step reads from outside, operand by operand."""
        for i, j in self.reads.outside:
            yield [block[i].inputs[j] for block in self.blocks]

    def _read_outside(self, ignored: Container[int]) -> dict[_Slot, list[int]]:
        """Returns what is read outside of the steps, each with the numbers of the steps."""
        graph = self.graph
        within = {id(node) for block in self.blocks for node in block}
        read: dict[_Slot, list[int]] = defaultdict(list)
        for k, block in enumerate(self.blocks):
            for i, node in enumerate(block):
                for o, number in enumerate(node.outputs):
                    users = graph.users[number]
                    if number in graph.returned or any(id(u) not in within and id(u) not in ignored for u in users):
                        read[i, o].append(k)
        return dict(sorted(read.items()))

    def _live(self, read: dict[_Slot, list[int]]) -> tuple[set[int], set[int]]:
        """Returns the positions of the equations that the last step needs for what the program reads of it, and of
        those that the others need for what the program and later steps read."""
        last = len(self.blocks) - 1
        within: dict[int, list[int]] = defaultdict(list)
        before: dict[int, list[int]] = defaultdict(list)
        for (i, _), (position, _) in self.reads.within.items():
            within[i].append(position)
        for (i, _), (_, position, _) in self.reads.before.items():
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

    def _outside(
        self, live: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, ...]], dict[tuple[int, int], tuple[str, int]]]:
        """Returns what all steps read, what each reads of its own, and which of these each operand is."""
        graph, blocks = self.graph, self.blocks
        shared: dict[int, int] = {}
        own: dict[tuple[int, ...], int] = {}
        of_operand: dict[tuple[int, int], tuple[str, int]] = {}
        needed = set(live)
        for i, j in self.reads.outside:
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
        self._look_for_longer(list(own))
        graph.steps.spend(len(of_operand))
        return list(shared), list(own), of_operand

    def _look_for_longer(self, own: Sequence[tuple[int, ...]]) -> None:
        """Raises :class:`_Longer` where what each step reads of its own alternates, as a matrix and its transpose."""
        for numbers in own:
            if numbers[0] not in self.graph.literals and numbers[1:] != numbers[:-1]:
                for times in range(2, min(_MOST_ALTERNATING, len(self.blocks) // LEAST_STEPS) + 1):
                    if numbers[times:] == numbers[:-times]:
                        raise _Longer(times)

    def _in_order(self, numbers: tuple[int, ...], given: _Given) -> tuple[tuple[int, ...], int, int]:
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
                    self.families.append(family)
                    return family.numbers, first, apart
        if numbers[0] > numbers[-1]:
            return numbers[::-1], len(numbers) - 1, -1
        return numbers, 0, 1

    def _refuse_layers(
        self,
        live: Sequence[int],
        of_operand: dict[tuple[int, int], tuple[str, int]],
        own: Sequence[tuple[int, ...]],
        carried: Sequence[_Place],
    ) -> None:
        """Raises where steps multiply what they hand on by arrays of their own, as the layers of a network do: a loop
        would copy all weights together."""
        graph, block = self.graph, self.blocks[0]
        handed = self._handed_on(live, carried)
        if not handed:  # each step only adds to what the others gave
            raise Refused
        given = [_is_given(graph, numbers) and slices_of(graph, numbers) is None for numbers in own]
        if not any(given):
            return
        chained: set[int] = set()
        weights: set[int] = set()
        """Positions of what is computed of weights of its step alone."""
        for i in live:
            kinds: list[str] = []
            for j in range(len(block[i].inputs)):
                if (i, j) in self.reads.within:
                    position = self.reads.within[i, j][0]
                    kinds.append("chained" if position in chained else "weight" if position in weights else "")
                elif (i, j) in self.reads.before:
                    kinds.append("chained")
                else:
                    form, place = of_operand[i, j]
                    kinds.append("weight" if form == "literal" or (form == "own" and given[place]) else "")
            if block[i].name == _PRODUCT and i in handed and {*kinds} == {"chained", "weight"}:
                raise Refused
            if "chained" in kinds:
                chained.add(i)
            elif kinds and {*kinds} == {"weight"}:
                weights.add(i)

    def _handed_on(self, live: Sequence[int], carried: Sequence[_Place]) -> set[int]:
        """Returns the positions of what steps compute of what they hand on, but for what they only add up."""
        readers: dict[int, set[int]] = defaultdict(set)
        needed = {*live}
        for (i, _), (*_, position, _) in (*self.reads.before.items(), *self.reads.within.items()):
            if i in needed:
                readers[position].add(i)
        used = {i for i in live if self.blocks[0][i].name not in _ADDS}
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
        for (i, _), (position, _) in self.reads.within.items():
            reads[i].append(position)
        found = {position for _, position, _ in carried if position not in added}
        for i in reversed(live):
            if i in found:
                found.update(reads[i])
        return found

    def _program(
        self,
        k: int,
        live: Sequence[int],
        carried: Sequence[_Place],
        shared: Sequence[int],
        own: Sequence[tuple[int, ...]],
        of_operand: dict[tuple[int, int], tuple[str, int]],
        given: Sequence[_Slot],
    ) -> ClosedJaxpr:
        """Returns the program of a step."""
        graph, block = self.graph, self.blocks[k]

        def variable(number: int) -> Var:
            return Var(graph.avals[number])

        before = {place: variable(block[place[1]].outputs[place[2]]) for place in carried}
        of_all = [variable(number) for number in shared]
        of_this = [variable(numbers[k]) for numbers in own]
        made: dict[_Slot, Var] = {}

        def read(i: int, j: int, number: int) -> JaxprAtom:
            if (i, j) in self.reads.within:
                return made[self.reads.within[i, j]]
            if (i, j) in self.reads.before:
                return before[self.reads.before[i, j]]
            form, place = of_operand[i, j]
            if form == "literal":
                return Literal(graph.literals[number], graph.avals[number])
            return of_all[place] if form == "shared" else of_this[place]

        equations = []
        for i in live:
            node = block[i]
            inputs = [read(i, j, number) for j, number in enumerate(node.inputs)]
            outputs = [variable(number) for number in node.outputs]
            made.update(((i, o), v) for o, v in enumerate(outputs))
            equations.append(node.equation.replace(invars=inputs, outvars=outputs))
        results: list[JaxprAtom] = [
            made[position, output] if ago == 1 else before[ago - 1, position, output]
            for ago, position, output in carried
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
