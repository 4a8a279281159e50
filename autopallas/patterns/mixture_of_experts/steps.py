"""Relates the steps of a loop over experts: sums of earlier counts, selections that hold in one step only."""

from __future__ import annotations

from autopallas import compat
from autopallas.compat import Var
from autopallas.graph import Graph, Node
from autopallas.graph.loop_slices import is_zero
from autopallas.patterns.mixture_of_experts.signs import Signs

__all__ = ["Steps"]

_REPEATS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
_INTEGERS = frozenset({"int32", "int64"})
"""Types that are assumed to hold the number of all rows."""
_DEPTH = 40


class Steps:
    """Answers questions about the steps of a scan."""

    def __init__(self, graph: Graph, node: Node):
        self.graph = graph
        self._constants, self._carried = compat.scan_parts(node.equation)
        (child,) = node.body.children[node.body.defined[node.equation.outvars[0]]]
        self._body, self._inputs = child.body, node.inputs
        numbers = graph.numbers[child.body]
        self._within = [numbers[v] for v in child.body.invars]
        self._after = [graph.find_literal(v) if not isinstance(v, Var) else numbers[v] for v in child.body.outvars]
        self._varies = dict.fromkeys(self._within[: self._constants], False)
        self._varies |= dict.fromkeys(self._within[self._constants :], True)

    def running_sum(self, place: int) -> int | None:
        """Returns the array whose slices, as read in earlier steps, add up to a carried integer."""
        number, after = self._within[self._constants + place], self._after[place]
        node = None if after is None else self.graph.definitions.get(after)
        if node is None or node.name != "add" or number not in node.inputs or len(set(node.inputs)) != 2:
            return None
        if self.graph.dtype(number).name not in _INTEGERS:
            return None
        if not is_zero(self.graph, self._inputs[self._constants + place]):
            return None
        (added,) = (i for i in node.inputs if i != number)
        read = self._within[self._constants + self._carried :]
        return self._inputs[self._constants + self._carried + read.index(added)] if added in read else None

    @property
    def contracts(self) -> bool:
        """Whether a step contains a contraction."""
        return any(equation.primitive.name == "dot_general" for equation in self._body.equations)

    def selects_one(self, place: int) -> bool:
        """Returns whether :meth:`selects` holds with a condition that is true in one step at most."""
        after = self._after[place]
        return self.selects(place) and after is not None and self._holds_once(self.graph.definitions[after].inputs[0])

    def selects(self, place: int) -> bool:
        """Returns whether each step replaces what is carried at a place where a condition holds, and does not read it
        otherwise."""
        carry = self._body.invars[self._constants + place]
        number, after = self._within[self._constants + place], self._after[place]
        node = None if after is None else self.graph.definitions.get(after)
        if node is None or node.name != "select_n" or len(node.inputs) != 3 or node.inputs[1] != number:
            return False
        if number in (node.inputs[0], node.inputs[2]) or self._within.count(number) != 1:
            return False
        readers = [e for e in self._body.equations if any(atom is carry for atom in e.invars)]
        alone = len(readers) == 1 and readers[0].primitive.name == "select_n"
        return alone and not any(v is carry for v in self._body.outvars)

    def _holds_once(self, number: int) -> bool:
        """Returns whether each element of a condition is true in one step at most."""
        node = self.graph.definitions.get(self._plain(number))
        if node is None:
            return False
        if node.name == "eq":
            sides = [self._plain(i) for i in node.inputs]
            return any(
                a in self.graph.counters and self._varies.get(a, False) and not self._may_vary(b)
                for a, b in (sides, sides[::-1])
            )
        if node.name != "and":
            return False
        if any(self._holds_once(i) for i in node.inputs):
            return True
        bounds = [self._bound(i) for i in node.inputs]
        for first, last in (bounds, bounds[::-1]):
            if first is None or last is None or (first[0], last[0]) != ("from", "to") or first[1] != last[1]:
                continue
            if not self._may_vary(first[1]) and self._follow_each_other(first[2], last[2]):
                return True
        return False

    def _bound(self, number: int) -> tuple[str, int, int] | None:
        """Returns (which, positions, bound) of ``bound <= positions`` or ``positions < bound``."""
        node = self.graph.definitions.get(number)
        if node is None or node.name not in ("ge", "le", "lt", "gt"):
            return None
        a, b = node.inputs
        left, right = (b, a) if node.name in ("ge", "gt") else (a, b)  # left <= right, or left < right
        return ("from", right, left) if node.name in ("ge", "le") else ("to", left, right)

    def _follow_each_other(self, start: int, end: int) -> bool:
        """Returns whether intervals begin where those of the steps before end."""
        if self._way(start) != self._way(end):
            return False
        start, end = self._plain(start), self._plain(end)
        for place in range(self._carried):
            if self._within[self._constants + place] == start:
                counts = self.running_sum(place)
                return self._after[place] == end and counts is not None and self._nonnegative(counts)
        return False

    def _way(self, number: int) -> list[object]:
        """Describes how a value is repeated."""
        way: list[object] = [self.graph.shape(number)]
        while number != (inner := self._plain(number, 1)):
            key = self.graph.key(self.graph.definitions[number].equation, (), ())
            way += [object() if key is None else key, self.graph.shape(inner)]
            number = inner
        return way

    def _nonnegative(self, number: int) -> bool:
        return Signs(self.graph).nonnegative(number)

    def _plain(self, number: int, most: int = _DEPTH) -> int:
        """Returns a value without the axes along which it is repeated."""
        for _ in range(most):
            node = self.graph.definitions.get(number)
            if node is None or node.name not in _REPEATS or len(node.inputs) != 1:
                break
            number = node.inputs[0]
        return number

    def _may_vary(self, number: int) -> bool:
        """Returns whether a value may differ from step to step."""
        first = min(self._varies, default=number)
        todo = [number]
        while todo:
            value = todo[-1]
            if value not in self._varies:
                self.graph.steps.spend()
                node = self.graph.definitions.get(value)
                waiting = [] if node is None or value < first else [i for i in node.inputs if i not in self._varies]
                if waiting:
                    todo += waiting
                    continue
                own = node is not None and any(self._varies.get(i, False) for i in node.inputs)
                self._varies[value] = value in self.graph.elements or value in self.graph.counters or own
            todo.pop()
        return self._varies[number]
