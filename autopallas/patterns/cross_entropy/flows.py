"""Tells from which ends of some logits' flow a value is computed, for many logits in one pass over a program."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopallas.graph import Graph, Node

__all__ = ["Flow", "Flows"]

_TOGETHER = 256
"""Number of flows that are followed in one pass. Each has a few bits in an integer per value."""


class Flows:
    """Holds the flows of a program. Flows that were added one after the other are followed together.

    A value carries bits. For each flow, one bit says that the value is computed from the logits, one that it is
    computed from a value inside, and one per end that it is computed from that end. What follows an end does not count
    as computed from values inside.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._flows: list[Flow] = []
        self._followed: int | None = None
        self._bits: list[int] = []
        self._meanings: list[int | None] = []
        """Per bit, the end's result, or None for values inside."""
        self._own: dict[int, int] = {}
        """Per flow, the bits of values inside and of ends."""
        self._logits: dict[int, int] = {}
        """Per flow, the bit of the logits."""

    def add(self, logits: Sequence[int], inside: Collection[int], ends: Sequence[Node]) -> Flow:
        """Adds the flow of some ``logits``, of one head or several, through the values ``inside``, which ``ends``
        read."""
        results = [end.outputs[0] for end in ends if end.outputs]
        self._flows.append(Flow(self, len(self._flows), logits, inside, results))
        return self._flows[-1]

    def follows(self, position: int, value: int) -> bool:
        """Answers :meth:`Flow.follows`."""
        self._ask(position)
        return bool(self._bits[value] & self._logits[position])

    def sources(self, position: int, value: int) -> list[int | None]:
        """Answers :meth:`Flow.sources`."""
        self._ask(position)
        bits, found = self._bits[value] & self._own[position], []
        while bits:
            lowest = bits & -bits
            found.append(self._meanings[lowest.bit_length() - 1])
            bits ^= lowest
        return found

    def _ask(self, position: int) -> None:
        if self._followed != position // _TOGETHER:
            self._followed = position // _TOGETHER
            self._follow(self._flows[self._followed * _TOGETHER : (self._followed + 1) * _TOGETHER])

    def _follow(self, flows: Sequence[Flow]) -> None:
        graph = self._graph
        self._meanings, self._own, self._logits = [], {}, {}
        within: dict[int, int] = {}
        ended: dict[int, list[tuple[int, int]]] = {}
        for flow in flows:
            self._own[flow.position] = 0
            self._logits[flow.position] = 1 << len(self._meanings)
            for number in flow.logits:
                within[number] = within.get(number, 0) | self._logits[flow.position]
            self._meanings.append(None)
            own = self._new_bit(flow, None)
            for number in flow.inside:
                within[number] = within.get(number, 0) | own
            for number in flow.ends:
                ended.setdefault(number, []).append((flow.position, self._new_bit(flow, number)))
        bits = self._bits = [0] * len(graph.avals)
        for number, value in within.items():
            bits[number] = value
        for node in graph.nodes:
            read = 0
            for number in node.inputs:
                read |= bits[number]
            if not read:
                continue
            for output in node.outputs:
                if graph.definitions.get(output) is not node:
                    continue
                found = read
                for position, bit in ended.get(output, ()):
                    found = found & ~self._own[position] | bit
                # The result of a custom rule's call is that of its body, if the body's result follows an end.
                inner = bits[graph.inner[output]] if output in graph.inner else 0
                for flow in flows if inner else ():
                    if inner & self._own[flow.position] and output not in flow.inside:
                        found = found & ~self._own[flow.position] | self._new_bit(flow, output)
                bits[output] |= found

    def _new_bit(self, flow: Flow, meaning: int | None) -> int:
        bit = 1 << len(self._meanings)
        self._meanings.append(meaning)
        self._own[flow.position] |= bit
        return bit


class Flow:
    """The flow of some logits: the values ``inside``, and the results of its ends."""

    __slots__ = ("_flows", "ends", "inside", "logits", "position")

    def __init__(
        self, flows: Flows, position: int, logits: Sequence[int], inside: Collection[int], ends: Sequence[int]
    ):
        self._flows, self.position, self.logits, self.inside, self.ends = flows, position, logits, inside, ends

    def follows(self, value: int) -> bool:
        """Returns whether a value is computed from the logits."""
        return self._flows.follows(self.position, value)

    def sources(self, value: int) -> list[int | None]:
        """Returns the results of ends from which a value is computed, and None if it is computed from values inside
        otherwise."""
        return self._flows.sources(self.position, value)
