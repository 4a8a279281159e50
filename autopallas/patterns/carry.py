"""Cuts the side inputs of a site's elementwise part where they are smallest."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from autopallas.graph import Body, Graph, Ref
from autopallas.graph.body_links import is_at_hand, may_be_given
from autopallas.graph.labels import Atom, Dimension
from autopallas.numerics.casts import counts_exactly, kind_of
from autopallas.patterns.advice import DIAGONAL, IN_THE_BODY, OWN_DERIVATIVE
from autopallas.patterns.expressions import Scope
from autopallas.patterns.match import Match, Mismatch
from autopallas.sites.index_notation import Operand, Positions

__all__ = ["DEEPEST", "Carrier", "fewest_side_elements", "is_available", "not_passed_in"]

DEEPEST = 128
"""Most operations on one path of a program for a kernel; longer paths are left to the compiler."""


def is_available(graph: Graph, value: int, homes: Sequence[Body], body: Body, across: bool) -> bool:
    """Returns whether a body has a variable for a value or, with ``across``, can be given the variable of one of
    ``homes``, or integers, such as labels, of a body around it."""
    if value in graph.positions[body]:
        return True
    if not across:
        return False
    integers = kind_of(graph.dtype(value)) in "iu"
    return any(is_at_hand(graph, value, h, body) or integers and may_be_given(graph, value, body, h) for h in homes)


def not_passed_in(graph: Graph, value: int, bodies: Sequence[Body], what: str = "an operand is") -> Mismatch:
    """Returns the reason why a site in some bodies lacks a value, with what helps: one of the bodies, or that of the
    value, may be one of a function with a derivative of its own."""
    node = graph.definitions.get(value)
    held = [*bodies, *(() if node is None else (node.body,))]
    ruled = any(step.startswith("custom_") for body in held for step in body.path)
    advice = OWN_DERIVATIVE if ruled else IN_THE_BODY
    return Mismatch(f"{what} computed in an enclosing body and not passed in", value, advice=advice)


def fewest_side_elements(graph: Graph, attempt: Callable[[bool], Match], enough: int) -> Match:
    """Builds the match twice, with local values only and with values from other bodies, and returns the one with fewer
    side-input elements.

    A mask that is at hand, for example, gives way to the smaller values that it is computed from. If the first match
    has fewer than ``enough`` elements, it is returned at once.

    Raises:
      Mismatch: neither can be built.
    """

    def size(match: Match) -> int:
        parts = (part for side in getattr(match.site, "sides", ()) for part in getattr(side, "parts", (side,)))
        sides = {side.position for side in parts if isinstance(side, Operand)}
        return sum(math.prod(graph.shape(match.operands[position])) for position in sides)

    found: list[Match] = []
    for across in (False, True):
        try:
            found.append(attempt(across))
        except Mismatch:
            if across and not found:
                raise
        if found and size(found[0]) < enough:
            return found[0]
    return min(found, key=size)


class Carrier:
    """Collects what one site reads: operands (values of the program) and side inputs of its programs."""

    def __init__(
        self,
        scope: Scope,
        bodies: Sequence[Body],
        axes: tuple[tuple[Atom, ...], tuple[Atom, ...]],
        score: Ref,
        pinned: frozenset[int] = frozenset(),
        across: bool = False,
        homes: Sequence[Body] = (),
        roles: int = 3,
        absorbed: Sequence[Ref] = (),
    ):
        self.scope, self.bodies, self.score = scope, bodies, score
        self.axes = axes
        """Labels of (T, S), along which positions count."""
        self.pinned = pinned
        """Values that must be operands as they are, since their cotangents are asked for."""
        self.across, self.homes = across, homes
        """Whether values that one of ``homes`` has may be brought into the bodies."""
        self.roles = roles
        """Number of leading operands that have a role."""
        self.absorbed = absorbed
        """Products that are added to the scores; the scores here are the sum."""
        self.operands: list[int] = []
        self.sides: list[Operand | Positions] = []
        self._costs: dict[Hashable, float] = {}

    # ------------------------------------------------------------------ operands

    def available(self, value: int) -> bool:
        """Returns whether every body in which a part of the site will stand has a variable for this value, or can be
        given one."""
        return all(is_available(self.scope.graph, value, self.homes, body, self.across) for body in self.bodies)

    def further(self, value: int) -> None:
        """Adds an operand that no program reads, only the original equations do."""
        if not self.available(value):
            raise not_passed_in(self.scope.graph, value, self.bodies)
        self.operands.append(value)

    def role(self, ref: Ref, value: int | None = None, name: str = "") -> Operand:
        """Adds an operand with a role (queries, keys, values), even where its value is an operand already.

        Of the values that hold the same elements, ``value`` is taken; by default the furthest back that is at hand.
        ``name`` is how an error message calls the operand.
        """
        found = self._furthest(ref, value, f"the {name} are" if name else "an operand is")
        self.operands.append(found.value)
        return Operand(len(self.operands) - 1, found.view)

    def side_operand(self, ref: Ref) -> Operand:
        """Adds a use of a value as a side input, unless it is one already."""
        found = self._furthest(ref, self.pin(ref))
        if found.value not in self.operands[self.roles :]:
            self.operands.append(found.value)
        return Operand(self.operands.index(found.value, self.roles), found.view)

    def pin(self, ref: Ref) -> int | None:
        return next((step.value for step in self.scope.space.chain(ref) if step.value in self.pinned), None)

    def _at_hand(self, ref: Ref) -> Ref | None:
        """Finds the furthest back of the values that hold the elements of a use and are at hand.

        If there is none between this use and the origin of the elements, such as a mask before a loop, the body may be
        given the elements in another use.
        """
        space = self.scope.space
        found: Ref | None = None
        for step in space.chain(ref):
            if self.available(step.value):
                found = step
        if found is None:
            labels = space.atoms(self.score) | space.atoms(space.canonical(ref))
            others = [
                step
                for other in space.met(ref)
                for step in space.chain(other)
                if self.available(step.value) and space.atoms(step) <= labels
            ]
            found = min(others, key=lambda step: math.prod(self.scope.graph.shape(step.value)), default=None)
        return found

    def _furthest(self, ref: Ref, value: int | None, what: str = "an operand is") -> Ref:
        space = self.scope.space
        if value is None:
            found = self._at_hand(ref)
        else:
            found = next((step for step in space.chain(ref) if step.value == value), None)
        if found is None:
            raise not_passed_in(self.scope.graph, ref.value, self.bodies, what)
        view = space.view(found.view)
        labels = [a for _, atoms in view for a in atoms]
        if len(set(labels)) != len(labels):
            raise Mismatch(f"{what} read along a diagonal", found.value, advice=DIAGONAL)
        return Ref(found.value, view)

    def source(self, ref: Ref) -> Operand | Positions:
        """Returns a side operand, or positions where the value is an iota."""
        canonical = self.scope.space.canonical(ref)
        if (dimension := self.iota(canonical)) is not None:
            return Positions(dimension, self.scope.graph.dtype(canonical.value))
        return self.side_operand(ref)

    def iota(self, ref: Ref) -> Dimension | None:
        """Returns the positions that a value counts, if its dtype holds them all; otherwise it is an array like any
        other."""
        node = self.scope.node(ref)
        if node is None or node.name != "iota":
            return None
        axis, graph = node.params["dimension"], self.scope.graph
        if not counts_exactly(graph.dtype(ref.value), graph.shape(ref.value)[axis] - 1):
            return None
        offset, atoms = ref.view[axis]
        return offset, self.scope.space.resolve(atoms)

    def absorbs(self, ref: Ref) -> bool:
        """Returns whether a value is a sum of nothing but products that the scores include already."""
        space, scope = self.scope.space, self.scope
        todo, seen = [ref], 0
        while todo:
            at = space.canonical(todo.pop())
            seen += 1
            if any(at.value == other.value and space.same(at, other) for other in self.absorbed):
                continue
            name, operands = scope.name(at), space.operands(at)
            if operands is None or seen > DEEPEST or scope.number(at) is not None:
                return False
            if name in ("add", "add_any", "sub"):
                todo += operands
            elif name in ("mul", "div", "neg", "convert_element_type"):
                todo += [o for o in operands if scope.number(o) is None]
            else:
                return False
        return True

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Suppresses a Mismatch that the block raises, and removes the operands and side inputs that the block
        added."""
        operands, sides = len(self.operands), len(self.sides)
        try:
            yield
        except Mismatch:
            del self.operands[operands:], self.sides[sides:]

    def side(self, source: Operand | Positions) -> int:
        if source not in self.sides:
            self.sides.append(source)
        return self.sides.index(source)

    # ------------------------------------------------------------------ where to cut

    def leaf_cost(self, ref: Ref) -> float:
        """Returns the bytes of a value as a side input; infinite if it cannot be one."""
        if self.iota(self.scope.space.canonical(ref)) is not None:
            return 0.0
        if self._at_hand(ref) is None:
            return math.inf
        space, graph = self.scope.space, self.scope.graph
        atoms = space.atoms(space.canonical(ref))
        return float(math.prod(space.sizes[a] for a in atoms) * graph.dtype(ref.value).itemsize)

    def cost(self, ref: Ref, depth: int = 0) -> float:
        """Returns the least bytes of side inputs from which a value can be computed."""
        if self.pin(ref) is not None or self.scope.number(ref) is not None:
            return 0.0
        key = self.scope.key(ref)
        if key not in self._costs:
            self._costs[key] = leaf = self.leaf_cost(ref)
            if leaf > 0 and depth < DEEPEST and (parts := self.parts(ref)) is not None:
                distinct = {self.scope.key(part): part for part in parts}
                self._costs[key] = min(leaf, sum(self.cost(part, depth + 1) for part in distinct.values()))
        return self._costs[key]

    def parts(self, ref: Ref) -> list[Ref] | None:
        """Returns the operands of an elementwise value that a kernel could compute itself."""
        ref = self.scope.space.canonical(ref)
        node = self.scope.node(ref)
        return None if node is None or node.equation.effects else self.scope.space.uses(ref)

    def cut_here(self, ref: Ref) -> bool:
        """Returns whether a value that does not depend on the scores is best passed in as it is."""
        parts = self.parts(ref)
        if parts is None:
            return True
        distinct = {self.scope.key(part): part for part in parts}
        return sum(self.cost(part) for part in distinct.values()) >= self.leaf_cost(ref)
