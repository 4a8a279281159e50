"""Steps that are proved to be equal, and of which each reads what an earlier one gave.

Each equation of each step is proved to be that of the step in the middle: it reads what the same step computed, what
one of the two steps before computed at one place, what all steps read, or what its step alone reads.  What its step
alone reads comes from outside: slices of an input, what a forward keeps for its backward, numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopallas.graph import Graph, Node
from autopallas.patterns.step_periods import FURTHEST, LEAST_STEPS

__all__ = ["Chain", "Family", "Given", "Leaves", "Longer", "Place", "Reads", "Refused", "Slot"]

_MOST_STEPS = 4_096
_MOST_AT_ENDS = 3
"""Most steps at both ends that are left out for what an earlier chain gives."""

Slot: TypeAlias = tuple[int, int]
"""A result of a step: the position of its equation, and its position among the results of that."""
Place: TypeAlias = tuple[int, int, int]
"""A result of an earlier step: how many steps ago, and its slot."""


class Refused(Exception):
    """Raised where a run of steps is no chain; ``reason`` is empty where it is nothing of the kind."""

    def __init__(self, reason: str = ""):
        super().__init__(reason)
        self.reason = reason


class Leaves(Refused):
    """Raised where something outside of the steps computes what a step reads of what an earlier one gave."""


class Longer(Exception):
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
    slot: Slot
    numbers: tuple[int, ...]


Given: TypeAlias = dict[int, tuple[Family, int]]
"""By the numbers of what chains give in each of their steps: all of the kind, and the place among them."""


@dataclass(slots=True)
class Reads:
    """What the equations of the step in the middle read, per operand.

    Attributes:
      within: the slot of the same step.
      before: what an earlier step gave.
      outside: the others, which come from outside of the steps.
    """

    within: dict[tuple[int, int], Slot]
    before: dict[tuple[int, int], Place]
    outside: list[tuple[int, int]]


class Chain:
    """Steps that are proved to be equal, and of which each reads what an earlier one gave."""

    def __init__(self, graph: Graph, blocks: list[Sequence[Node]], order: dict[int, int]):
        self.graph = graph
        self.given: Given = {}
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

    def _of_one(self, blocks: Sequence[Sequence[Node]], at: dict[int, Place], middle: int) -> Reads:
        reads = Reads({}, {}, [])
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
        self, blocks: Sequence[Sequence[Node]], at: dict[int, Place], middle: int, reads: Reads
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

    def _given_at_first(self, reads: Reads) -> dict[Place, int]:
        """Returns the numbers that the first steps read in the place of what earlier ones give; leaves out the first
        steps where two equations read others."""
        for _ in range(FURTHEST + 1):
            first: dict[Place, int] = {}
            if self._agree(reads, first):
                return first
            self.blocks = self.blocks[1:]
            if len(self.blocks) < LEAST_STEPS:
                break
        raise Refused

    def _agree(self, reads: Reads, first: dict[Place, int]) -> bool:
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
                    raise Leaves
                made.update(node.outputs)
            elif any(
                n in made or n in others or (n > lowest and n not in definitions and n not in literals)
                for n in node.inputs
            ):
                others.update(node.outputs)
        graph.steps.spend(end - begin + 1)

    def leave_out_first(self) -> None:
        """Leaves out the first step.

        Raises:
          Refused: too few are left.
        """
        self.blocks = self.blocks[1:]
        if len(self.blocks) < LEAST_STEPS:
            raise Refused
        self.first = self._given_at_first(self.reads)

    def leave_out_ends(self, given: Given) -> None:
        """Leaves out the first and last steps that read what an earlier chain does not give, where it gives the others
        the same."""
        start, end = 0, len(self.blocks)
        for numbers in self.read_alone():
            known = [k for k, number in enumerate(numbers) if number in given]
            if len(numbers) > len(known) >= max(LEAST_STEPS, len(numbers) - _MOST_AT_ENDS) and numbers[0] != numbers[1]:
                start, end = max(start, known[0]), min(end, known[-1] + 1)
        if end - start >= max(LEAST_STEPS, len(self.blocks) - _MOST_AT_ENDS) and end - start < len(self.blocks):
            self.blocks = self.blocks[start:end]
            self.first = self._given_at_first(self.reads)

    def read_alone(self) -> Iterator[list[int]]:
        """Yields what each step reads from outside, operand by operand."""
        for i, j in self.reads.outside:
            yield [block[i].inputs[j] for block in self.blocks]

    def read_outside(self, ignored: Container[int]) -> dict[Slot, list[int]]:
        """Returns what is read outside of the steps, each with the numbers of the steps."""
        graph = self.graph
        within = {id(node) for block in self.blocks for node in block}
        read: dict[Slot, list[int]] = defaultdict(list)
        for k, block in enumerate(self.blocks):
            for i, node in enumerate(block):
                for o, number in enumerate(node.outputs):
                    users = graph.users[number]
                    if number in graph.returned or any(id(u) not in within and id(u) not in ignored for u in users):
                        read[i, o].append(k)
        return dict(sorted(read.items()))
