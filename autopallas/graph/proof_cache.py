"""Transfers the outcome of a proof at one place of a graph to other places of the same form.

A proof asks a graph for definitions, types and users of values.  The questions are recorded, and another place is
compared: if the values correspond one to one, in the same order, and every answer is the same, the same proof has the
same outcome for the corresponding values.  So of equal layers only one or two are proved.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, cast, overload

from autopallas.compat import Dtype, ShapedArray
from autopallas.graph.equal_programs import same_parameters
from autopallas.graph.equation_keys import Node
from autopallas.graph.flatten import Body
from autopallas.graph.numbering import Graph

__all__ = ["ProofCache"]

T = TypeVar("T")
V = TypeVar("V")

_MOST = 3
"""Largest number of places to compare another one with, beside the one that may be expected: what came after the place
that the last one was like, since layers repeat."""


class ProofCache(Generic[T]):
    """Outcomes of proofs that begin at nodes of a graph.

    Args:
      graph: the graph.
      marks: per value, what the proofs know of it besides what they ask the graph, such as a note.
    """

    def __init__(self, graph: Graph, marks: Sequence[Hashable]):
        self._graph, self._marks = graph, marks
        self._known: dict[Hashable, list[_Known[T]]] = {}
        self._last: _Known[T] | None = None
        self._next: dict[int, _Known[T]] = {}
        """By the identity of what was known of the place before, what is known of the one that came after it last."""

    def like(self, node: Node, key: Hashable) -> Iterator[tuple[T, dict[int, int]]]:
        """Yields the outcomes at places of the same form as a node's, each with {value there: value here}; ``key`` is
        what the proof is given besides the node."""
        known = self._known.get((key, self._types(node)), [])
        expected = self._next.get(id(self._last))
        tried = known[: -1 - _MOST : -1]
        if expected is not None and expected in known:
            tried = [expected, *(own for own in tried if own is not expected)]
        for own in tried:
            image = own.form.at(node)
            if image is not None:
                self._follow(own)
                yield own.outcome, image

    def prove(self, node: Node, key: Hashable, proof: Callable[[Graph], T]) -> T:
        """Runs a proof and keeps its outcome for other places.  The proof's graph records questions."""
        watched = _Watched(self._graph)
        outcome = proof(cast("Graph", watched))
        own = _Known(_Form(watched, node, self._marks), outcome)
        self._known.setdefault((key, self._types(node)), []).append(own)
        self._follow(own)
        return outcome

    def _follow(self, own: _Known[T]) -> None:
        """Notes what is known of the next place."""
        self._next[id(self._last)] = self._last = own

    def _types(self, node: Node) -> Hashable:
        return node.name, tuple(map(self._graph.shape, node.inputs))


@dataclass(frozen=True, slots=True, eq=False)
class _Known(Generic[T]):
    """The outcome of a proof, and what other places are compared with."""

    form: _Form
    outcome: T


class _Asked(Mapping[int, V]):
    """A mapping from numbers that records which of them were asked for."""

    def __init__(self, known: Mapping[int, V], asked: set[int]):
        self._known, self._asked = known, asked

    def __getitem__(self, number: int) -> V:
        self._asked.add(number)
        return self._known[number]

    @overload
    def get(self, number: int, default: None = None, /) -> V | None: ...
    @overload
    def get(self, number: int, default: V | T, /) -> V | T: ...
    def get(self, number: int, default: V | T | None = None, /) -> V | T | None:
        self._asked.add(number)
        return self._known.get(number, default)

    def __contains__(self, number: object) -> bool:
        self._asked.add(cast("int", number))
        return number in self._known

    def __iter__(self) -> Iterator[int]:
        raise TypeError("a watched graph is asked for single values")

    def __len__(self) -> int:
        raise TypeError("a watched graph is asked for single values")


class _Members:
    """The values that a body has a variable for; records which of them were asked for."""

    def __init__(self, known: Container[int], asked: set[int]):
        self._known, self._asked = known, asked

    def __contains__(self, number: int) -> bool:
        self._asked.add(number)
        return number in self._known


class _Places:
    """The values that each body has a variable for; records which of them were asked for."""

    def __init__(self, positions: Mapping[Body, Container[int]]):
        self._positions = positions
        self.asked: dict[Body, set[int]] = {}

    def __getitem__(self, body: Body) -> _Members:
        return _Members(self._positions[body], self.asked.setdefault(body, set()))


class _Watched:
    """A graph for one proof, which records what the proof asks.

    Attributes:
      graph: the graph.
      asked: values whose definition or type was asked for.
      used: values whose users were asked for.
      found: values for which the proof asked where they are computed.
      further: whether something else was asked, in which other places are not compared.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.asked: set[int] = set()
        self.used: set[int] = set()
        self.found: set[int] = set()
        self.further = False
        self.definitions = _Asked(graph.definitions, self.asked)
        self.literals = _Asked(graph.literals, self.asked)
        self.constants = _Asked(graph.constants, self.asked)
        self.users = _Asked(graph.users, self.used)
        self.positions = _Places(graph.positions)
        self.notes, self.steps, self.outside = graph.notes, graph.steps, graph.outside
        self.inner = _Asked(graph.inner, self.asked)

    def shape(self, number: int) -> tuple[int, ...]:
        self.asked.add(number)
        return self.graph.shape(number)

    def dtype(self, number: int) -> Dtype:
        self.asked.add(number)
        return self.graph.dtype(number)

    def name(self, number: int) -> str | None:
        self.asked.add(number)
        return self.graph.name(number)

    def occurrences(self, number: int) -> list[tuple[Body, int]]:
        self.found.add(number)
        return self.graph.occurrences(number)

    def __getattr__(self, name: str) -> object:
        self.further = True
        return getattr(self.graph, name)


class _Step(NamedTuple):
    """Answers about one value that another place has to match."""

    number: int
    definition: Node | None
    fixed: bool
    """Whether the value has to be the same itself: a literal or a captured array."""
    aval: ShapedArray
    users: Sequence[Node] | None
    """Nodes that read the value, if the proof asked for them."""
    places: Sequence[tuple[Body, bool]]
    """Bodies that the proof asked about, and whether they have a variable for the value."""
    homes: Sequence[Body] | None
    """Bodies that compute the value, if the proof asked for them."""


class _Form:
    """Answers that a proof got which began at one node, to be compared with other places.

    Args:
      watched: the record of what the proof asked.
      start: the node.
      marks: per value of the graph, what else the proof knew about it.
    """

    def __init__(self, watched: _Watched, start: Node, marks: Sequence[Hashable]):
        self._graph, self._start, self._marks = watched.graph, start, marks
        graph = self._graph
        reached = dict.fromkeys((*start.outputs, *start.inputs))
        todo = list(reached)
        self._steps: list[_Step] = []
        places = watched.positions.asked
        asked = watched.asked | watched.used | watched.found
        asked = asked.union(*places.values())
        for number in todo:
            if number not in asked:
                continue
            node = graph.definitions.get(number)
            users = graph.users[number] if number in watched.used else None
            for other in (*([] if node is None else [node]), *(users or ())):
                new = dict.fromkeys(n for n in (*other.outputs, *other.inputs) if n not in reached)
                reached.update(new)
                todo += new
            self._steps.append(
                _Step(
                    number,
                    node,
                    number in graph.literals or number in graph.constants,
                    graph.avals[number],
                    users,
                    [(b, number in graph.positions[b]) for b, numbers in places.items() if number in numbers],
                    _homes(graph, number) if number in watched.found else None,
                )
            )
        self._complete = not watched.further and asked <= reached.keys()

    def at(self, node: Node) -> dict[int, int] | None:
        """Returns, per value that the proof met, the value that corresponds to it if the proof begins at another
        ``node``; None if something differs."""
        graph, start, marks = self._graph, self._start, self._marks
        avals, definitions, literals, constants = graph.avals, graph.definitions, graph.literals, graph.constants
        image: dict[int, int] = {}
        bodies: dict[Body, Body] = {}
        nodes: dict[Node, Node] = {}
        if not self._complete or not _same(start, node, image, bodies, nodes):
            return None
        for there, expected, fixed, aval, readers, places, computed in self._steps:
            number = image[there]
            if number != there:
                own = avals[number]
                if own.shape != aval.shape or own.dtype != aval.dtype:
                    return None
                if fixed or number in literals or number in constants:
                    return None
            definition = definitions.get(number)
            if definition is None or expected is None:
                if definition is not expected:
                    return None
            elif not _same(expected, definition, image, bodies, nodes):
                return None
            if readers is not None:
                users = graph.users[number]
                if len(users) != len(readers):
                    return None
                if not all(_same(a, b, image, bodies, nodes) for a, b in zip(readers, users, strict=True)):
                    return None
            for body, known in places:
                if body not in bodies or (number in graph.positions[bodies[body]]) != known:
                    return None
            if computed is not None and list(map(bodies.get, computed)) != _homes(graph, number):
                return None
        before = -1
        for number, other in sorted(image.items()):
            if other <= before or marks[number] != marks[other]:
                return None
            before = other
        if len(set(bodies.values())) < len(bodies):
            return None
        return image


def _homes(graph: Graph, number: int) -> list[Body]:
    return [body for body, _ in graph.occurrences(number)]


def _same(a: Node, b: Node, image: dict[int, int], bodies: dict[Body, Body], nodes: dict[Node, Node]) -> bool:
    """Returns whether two nodes compute the same from corresponding values; records which values and nodes
    correspond."""
    if nodes.get(a) is b:
        return True
    first, second = a.equation, b.equation
    if first.primitive is not second.primitive or first.effects != second.effects:
        return False
    if bodies.setdefault(a.body, b.body) is not b.body:
        return False
    if len(a.inputs) != len(b.inputs) or len(a.outputs) != len(b.outputs):
        return False
    for i, j in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
        if image.setdefault(i, j) != j:
            return False
    if a.params is not b.params and not same_parameters(first, second):
        return False
    nodes[a] = b
    return True
