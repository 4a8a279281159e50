"""Finds what is computed around a loop over steps and can be computed in it, one step at a time.

State-space models expand what they scan: ``a = exp(-dt[..., None] * A)`` has 16 or more numbers for each of dt's, and
of the states only a sum over these is read.  A loop that computes a, and the sum, in its body reads and writes a
sixteenth.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakKeyDictionary

from autopallas.compat import ClosedJaxpr
from autopallas.graph import Body, Graph, Node
from autopallas.graph.body_links import is_at_hand
from autopallas.graph.edit import surviving
from autopallas.graph.extract import jaxpr_of
from autopallas.graph.program_digests import digest
from autopallas.kernels.respelling.step_evaluation import SUMMED, axes_read, axis_given, is_light

__all__ = ["Around", "around"]

_MOST = 64
"""Largest number of equations on each side of a loop that are computed in it."""
_FARTHEST = 512
"""How many values are looked at to learn that one does not depend on a loop; beyond that it counts as if it did."""


@dataclass(frozen=True, repr=False)
class Around:
    """What a loop computes beside its recurrence.

    Attributes:
      key: equal for equal programs, which jaxprs are not.
      before: from the site's operands to the recurrence's.
      after: from the recurrence's results and the site's operands to the site's results.
      axes: for each operand of the site, the axis of the steps; None for what is the same for all.
      steps_before, steps_after: the same for the result of each equation.
      results: the same for each result.
    """

    key: str
    before: ClosedJaxpr = field(compare=False)
    after: ClosedJaxpr = field(compare=False)
    axes: tuple[int | None, ...]
    steps_before: tuple[int, ...] = field(compare=False)
    steps_after: tuple[int, ...] = field(compare=False)
    results: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements of the largest array that is never written, all steps together."""
        return max(math.prod(v.shape) for v in (*self.before.out_avals, *self.after.in_avals))

    def __repr__(self) -> str:
        return f"{len(self.steps_before)} equations before and {len(self.steps_after)} after, {self.key}"


def around(
    graph: Graph,
    needed: Sequence[int],
    given: Sequence[int],
    axis: int,
    whole: Sequence[int] = (),
    known: Collection[int] = (),
    home: Body | None = None,
    size: int | None = None,
    body: Body | None = None,
) -> tuple[Around, tuple[int, ...], tuple[int, ...]] | None:
    """Finds what can be computed in a loop from ``needed`` to ``given``.

    Args:
      graph: the program.
      needed: what the recurrence reads.
      given: what it gives.
      axis: the axis of the steps in both.
      whole: those of ``needed`` that are read as they are.
      known: values that other loops give.
      home: a body that has what the recurrence reads, if the one that has its results lacks some of it.
      size: how many elements an array has at least that is not to be written; None for those of what is given, arrays
        of one shape.
      body: the body of the loop; None for that of what is given.

    Returns:
      What is computed in the loop, the operands and the results of the whole; None where the program expands nothing
      and reduces nothing.
    """
    body = body or graph.definitions[given[0]].body
    size = math.prod(graph.shape(given[0])) if size is None else size
    search = _Search(graph, body, size, frozenset((*whole, *known, *given)), _ReadByOthers(graph, given))
    for number in needed:
        search.axes[number] = axis
    before = search.above(needed)
    after = search.below(given, axis) if given else []
    if after is None or not before and not after:
        return None
    inner = {n for node in before for n in node.outputs} | {n for node in after for n in node.outputs} | set(given)
    read = [n for node in (*before, *after) for n in node.inputs]
    operands = tuple(dict.fromkeys(n for n in (*whole, *needed, *read) if n not in inner and n not in graph.literals))
    if not all(is_at_hand(graph, n, home or body, body) for n in operands):
        return None
    results = search.results(given, after)
    if not _smaller(graph, (*whole, *needed, *given), (*operands, *results)):
        return None
    first, last = jaxpr_of(graph, before, operands, needed), jaxpr_of(graph, after, (*given, *operands), results)
    axes = tuple(search.axes.get(n) for n in operands)
    steps = [tuple(search.axes[node.outputs[0]] for node in nodes) for nodes in (before, after)]
    kinds = tuple(search.axes[n] for n in results)
    key = digest([first, last], f"{axes} {steps} {kinds}".encode())
    return Around(key, first, last, axes, steps[0], steps[1], kinds), operands, results


def _smaller(graph: Graph, plain: Sequence[int], own: Sequence[int]) -> bool:
    """Returns whether a loop reads and writes less than three quarters of what it does without its surroundings."""
    sizes = [sum(math.prod(graph.shape(n)) for n in dict.fromkeys(numbers)) for numbers in (plain, own)]
    return 4 * sizes[1] < 3 * sizes[0]


_READERS: WeakKeyDictionary[Graph, tuple[Mapping[int, Sequence[int]], dict[int, list[int]]]] = WeakKeyDictionary()


class _ReadByOthers(Container[int]):
    """What sites read that do not compute any of ``given`` themselves, or values of the same site.

    A site of another operation that computes what a loop gives stands in its place, or is kept.
    """

    def __init__(self, graph: Graph, given: Collection[int]):
        self._graph, self._own = graph, {n for n in given if n in graph.reads}
        self._inside = {n for one in self._own for n in graph.reads[one]}
        self._alike = {graph.reads[n] for n in self._own}
        known = _READERS.get(graph)
        if known is None or known[0] is not graph.reads:  # what a value of a site is computed from, the other way round
            known = _READERS[graph] = graph.reads, {}
            for number, read in graph.reads.items():
                for n in read:
                    known[1].setdefault(n, []).append(number)
        self._readers = known[1]

    def __contains__(self, number: object) -> bool:
        return any(self._is_another(one) for one in self._readers.get(cast(int, number), ()))

    def _is_another(self, number: int) -> bool:
        read = self._graph.reads[number]
        return read not in self._alike and number not in self._inside and self._own.isdisjoint(read)


class _Search:
    """Follows values whose steps stand along an axis.

    Attributes:
      known: values that the loop, or another one, reads or gives.
      axes: the axis of the steps by value, or ``SUMMED``.
      fixed: values that are read as what is the same for all steps.
      read: what sites of other operations read.
      following: what is computed of the loop's results in it.
    """

    def __init__(self, graph: Graph, body: Body, size: int, known: frozenset[int], read: Container[int]):
        self.graph, self.body, self.size, self.known, self.read = graph, body, size, known, read
        self.axes: dict[int, int] = {}
        self.fixed: set[int] = set()
        self.following: frozenset[int] = frozenset()
        self.alive = surviving(graph)

    def _is_given(self, number: int) -> bool:
        """Returns whether something else gives a value."""
        return number in self.known or number in self.graph.replaced or number in self.graph.respelt

    def _is_large(self, number: int) -> bool:
        return math.prod(self.graph.shape(number)) >= self.size

    def _plain(self, node: Node | None) -> bool:
        return node is not None and node.body is self.body and len(node.outputs) == 1 and not node.equation.effects

    def _fits(self, inputs: Sequence[int], axes: Sequence[int | None]) -> bool:
        """Returns whether values can be read along these axes, as far as is known."""
        own: dict[int, int | None] = {}
        for number, axis in zip(inputs, axes, strict=True):
            if number in self.graph.literals:
                continue
            if own.setdefault(number, axis) != axis or self.axes.get(number, axis) != axis:
                return False
            if number in self.fixed and axis is not None:
                return False
        return True

    def _note(self, inputs: Sequence[int], axes: Sequence[int | None]) -> None:
        for number, axis in zip(inputs, axes, strict=True):
            if number not in self.graph.literals:
                if axis is None:
                    self.fixed.add(number)
                else:
                    self.axes[number] = axis

    def above(self, numbers: Sequence[int]) -> list[Node]:
        """Returns the nodes that compute large values of smaller ones step by step, in order."""
        graph = self.graph
        found: dict[int, Node] = {}
        todo = [-n for n in numbers]
        heapq.heapify(todo)
        while todo and len(found) < _MOST:
            number = -heapq.heappop(todo)
            node = graph.definitions.get(number)
            if number in found or self._is_given(number) or not self._is_large(number):
                continue
            if number in graph.returned or number in self.read:
                continue
            if node is None or not self._plain(node):
                continue
            axes = axes_read(node.equation, self.axes[number]) if is_light(node.equation) else None
            if axes is None or not self._fits(node.inputs, axes):
                continue
            self._note(node.inputs, axes)
            found[number] = node
            for n, axis in zip(node.inputs, axes, strict=True):
                if axis is not None and n not in graph.literals:
                    heapq.heappush(todo, -n)
        graph.steps.spend(len(found))
        return [node for _, node in sorted(found.items())]

    def below(self, given: Sequence[int], axis: int) -> list[Node] | None:
        """Returns the nodes that compute smaller values of what a loop gives step by step, in order."""
        graph = self.graph
        # What a loop carries in the end is there after its last step alone.
        follows = {n: True for one in given for n in graph.definitions[one].outputs}
        first = min(follows)
        if any(self.axes.get(n, axis) != axis or n in self.fixed for n in given):
            return None
        self.axes.update(dict.fromkeys(given, axis))
        found: dict[int, Node] = {}
        beside: dict[int, Node] = {}
        todo = [node.outputs[0] for n in given for node in graph.users.get(n, ()) if node.outputs]
        heapq.heapify(todo)
        while todo and len(found) + len(beside) < _MOST:
            number = heapq.heappop(todo)
            node = graph.definitions.get(number)
            if number in found or node is None or number not in self.alive or not self._plain(node):
                continue
            if self._is_given(number):
                continue
            inputs = [n for n in node.inputs if n not in graph.literals]
            inside = {n: self.axes[n] for n in inputs if n in given or n in found}
            rest = [n for n in inputs if n not in inside]
            if not inside or SUMMED in inside.values() or any(_computed_from(graph, n, follows, first) for n in rest):
                continue
            axes = self._completed(node, inside)
            step = None if axes is None else axis_given(node.equation, axes)
            if axes is None or step is None or number in self.axes or not self._fits(node.inputs, axes):
                continue
            self._note(node.inputs, axes)
            self.axes[number] = step
            found[number] = node
            large = [n for n, own in zip(node.inputs, axes, strict=True) if n in rest and own is not None]
            beside.update((one.outputs[0], one) for one in self.above(large))
            if self._is_large(number) and step != SUMMED:
                for user in graph.users.get(number, ()):
                    if user.outputs:
                        heapq.heappush(todo, user.outputs[0])
        while outside := self._outside(found):  # what does not end in a smaller value, and what reads that
            self.axes.pop(outside)
            del found[outside]
            following = {outside}
            for number in sorted(found):
                if not following.isdisjoint(found[number].inputs):
                    self.axes.pop(number)
                    del found[number]
                    following.add(number)
        self.following = frozenset(found)
        needed = {n for node in found.values() for n in node.inputs}
        for number in sorted(beside, reverse=True):
            if number in needed:
                found[number] = beside[number]
                needed.update(beside[number].inputs)
        graph.steps.spend(len(found) + len(follows))
        return [node for _, node in sorted(found.items())]

    def _outside(self, found: Mapping[int, Node]) -> int | None:
        """Returns the last large value that the rest of the program reads."""
        for number in sorted(found, reverse=True):
            if self._is_large(number) and self.axes[number] != SUMMED and self._leaves(number, found):
                return number
        return None

    def _completed(self, node: Node, inside: Mapping[int, int]) -> list[int | None] | None:
        """Returns the axes of a node's operands, of which some are known."""
        equation = node.equation
        known = [inside.get(n) for n in node.inputs]
        if equation.primitive.name == "dot_general":
            contracted, batch = equation.params["dimension_numbers"]
            place = next(i for i, axis in enumerate(known) if axis is not None)
            for pair in (contracted, batch):
                if known[place] in pair[place]:
                    other = int(pair[1 - place][list(pair[place]).index(known[place])])
                    known[1 - place] = other if known[1 - place] is None else known[1 - place]
            return known
        axis = next(axis for axis in known if axis is not None)
        if len(node.inputs) == 1:
            return known
        read = axes_read(equation, axis)
        return None if read is None else [axes if own is None else own for own, axes in zip(known, read, strict=True)]

    def _leaves(self, number: int, found: Mapping[int, Node]) -> bool:
        """Returns whether something reads a value that is not computed in the loop."""
        graph = self.graph
        if number in graph.returned or number in self.read:
            return True
        users = graph.users.get(number, ())
        alive = [u for u in users if not u.outputs or not self.alive.isdisjoint(u.outputs)]
        return any(not u.outputs or found.get(u.outputs[0]) is not u for u in alive)

    def results(self, given: Sequence[int], after: Sequence[Node]) -> tuple[int, ...]:
        """Returns what the rest of the program reads of a loop."""
        found = {node.outputs[0]: node for node in after}
        return tuple(n for n in (*given, *sorted(self.following)) if self._leaves(n, found))


def _computed_from(graph: Graph, value: int, known: dict[int, bool], first: int) -> bool:
    """Returns whether a value is computed from those that ``known`` maps to True, none of them before ``first``."""
    todo, most = [value], len(known) + _FARTHEST
    while todo:
        if len(known) > most:
            return True
        number = todo[-1]
        if number < first or number in known:
            known.setdefault(number, False)
            todo.pop()
            continue
        node = graph.definitions.get(number)
        inputs = [] if node is None else [n for n in node.inputs if n >= first]
        if any(known.get(n, False) for n in inputs):
            known[number] = True
        elif missing := [n for n in inputs if n not in known]:
            todo += missing
            continue
        else:
            known[number] = False
        todo.pop()
    return known[value]
