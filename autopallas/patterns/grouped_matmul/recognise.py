"""Finds grouped matmuls: the ``ragged_dot_general`` equations of a program, each forward with those of its backward.

The dimension numbers tell the three uses that JAX makes of that primitive apart: rows times a matrix per group, with
the matrices as they are stored or transposed (a gradient of the rows), and a matrix per group as the product of the
group's rows in two arrays (a gradient of the matrices).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from autopallas import jaxprs
from autopallas.faults import contained
from autopallas.graph import Body, Graph, Node
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.patterns.grouped_matmul.epilogue import with_epilogue
from autopallas.patterns.grouped_matmul.ragged_dot import ragged_dot
from autopallas.patterns.grouped_matmul.widening import with_widening
from autopallas.patterns.match import Match, Mismatch, NearMiss, bounded

__all__ = ["grouped"]

Origin: TypeAlias = Literal["forward", "backward", "again"]
"""Whether an equation is computed by the program itself, for its derivative, or a second time for a checkpoint."""


def grouped(graph: Graph, alive: frozenset[int], assume_finite: bool) -> tuple[list[Match], Sequence[NearMiss]]:
    """Finds the grouped matmuls among the values that are needed, and the near misses."""
    products = [node for node in graph.nodes if node.name == "ragged_dot_general"]
    origins = _Origins(graph)
    forwards: list[_Forward] = []
    parts: list[tuple[Match, Origin]] = []
    misses: dict[str, NearMiss] = {}
    for node in products:
        with contained(node):
            if node.outputs[0] not in alive:
                continue
            origin = origins.of(node)
            try:
                with bounded(graph):
                    match = ragged_dot(graph, node, assume_finite)
                    if _spec(match).use != "drhs":
                        match = with_widening(graph, with_epilogue(graph, match, alive), alive)
            except Mismatch as mismatch:
                location = jaxprs.location(node.equation)
                miss = NearMiss("grouped_matmul", location, mismatch.reason, node.outputs[0], mismatch.advice)
                misses.setdefault(miss.location, miss)  # a near miss's backward is no second miss
                continue
            if origin != "forward" or _spec(match).use == "drhs":
                parts.append((match, origin))
            else:
                forwards.append(_Forward(match))
    alone = _attach(forwards, parts)
    return [*(forward.finished() for forward in forwards), *alone], [*misses.values()]


class _Origins:
    """Tells the origin of an equation from the transformations that it went through."""

    def __init__(self, graph: Graph):
        self._holders = {
            child.body: (body, position)
            for body in graph.numbers
            for position, children in body.children.items()
            for child in children
        }

    def of(self, node: Node) -> Origin:
        stack = jaxprs.name_stack(node.equation)
        body: Body = node.body
        while body in self._holders:
            body, position = self._holders[body]
            stack = f"{jaxprs.name_stack(body.equations[position])}/{stack}"
        _, again, after = stack.rpartition("rematted_computation")
        if "transpose(" in after:
            return "backward"
        return "again" if again else "forward"


@dataclass(slots=True)
class _Forward:
    """A forward, and the parts that are known to belong to it."""

    match: Match
    parts: tuple[Match, ...] = ()
    direction: Literal["forward", "forward+backward"] = "forward"

    def likeness(self, bundle: _Bundle) -> int:
        """Rates how likely these are parts of this forward's backward; 0 where they cannot be."""
        if any(_sizes(self.match) != _sizes(part) for part in bundle.parts):
            return 0
        if bundle.origin == "again" and _spec(bundle.parts[0]).use != _spec(self.match).use:
            return 0
        shared = len(set(self.match.operands) & bundle.operands)
        same_place = any(part.location == self.match.location for part in bundle.parts)
        return 4 + 8 * shared + 4 * same_place - min(len(self.parts), 3)

    def take(self, bundle: _Bundle) -> None:
        self.parts += bundle.parts
        if bundle.origin == "backward":
            self.direction = "forward+backward"

    def finished(self) -> Match:
        return replace(self.match, direction=self.direction, then=self.parts)


@dataclass(slots=True)
class _Bundle:
    """Parts that belong together: the gradients of rows and of matrices that come from one cotangent."""

    parts: tuple[Match, ...]
    origin: Origin

    @property
    def operands(self) -> set[int]:
        return {number for part in self.parts for number in part.operands}


def _spec(match: Match) -> GroupedMatmulSpec:
    spec = match.spec
    assert isinstance(spec, GroupedMatmulSpec)
    return spec


def _sizes(match: Match) -> tuple[int, int, frozenset[int]]:
    """Returns what a forward and its derivatives have in common, however each orders the sides of the matrices."""
    spec = _spec(match)
    return spec.rows, spec.groups, frozenset((spec.contracting, spec.columns))


def _bundles(parts: Sequence[tuple[Match, Origin]]) -> list[_Bundle]:
    """Groups the parts into bundles, those of two first: they name both the rows and the matrices of their forward."""
    of_rows = [match for match, origin in parts if origin == "backward" and _spec(match).use != "drhs"]
    of_matrices = [match for match, _ in parts if _spec(match).use == "drhs"]
    bundles = [_Bundle((match,), origin) for match, origin in parts if origin == "again" and _spec(match).use != "drhs"]
    for rows in of_rows:
        cotangent = rows.operands[0]
        partner = next((match for match in of_matrices if cotangent in match.operands[:2]), None)
        if partner is not None:
            of_matrices.remove(partner)
        bundles.append(_Bundle((rows,) if partner is None else (rows, partner), "backward"))
    bundles += [_Bundle((match,), "backward") for match in of_matrices]
    return sorted(bundles, key=lambda bundle: -len(bundle.parts))


def _attach(forwards: Sequence[_Forward], parts: Sequence[tuple[Match, Origin]]) -> list[Match]:
    """Gives each part of a backward to its forward; returns those without one, which are sites of their own.

    A part is a function of its own operands: whose backward it is decides what the report says, not what is computed.
    For the same reason a forward may be replaced without its backward, and vice versa: neither reads what the other
    computes, so nothing stays alive for the sake of the one that was not found.
    """
    alone: list[Match] = []
    readers: dict[int, list[int]] = {}  # per value, the forwards that read it
    for i, forward in enumerate(forwards):
        for number in set(forward.match.operands):
            readers.setdefault(number, []).append(i)
    for bundle in _bundles(parts):
        with contained(bundle.parts[0].location):
            # A forward that shares an operand is likelier than any that does not.
            near = sorted({i for number in bundle.operands for i in readers.get(number, ())})
            likeness = {i: forwards[i].likeness(bundle) for i in near}
            if not any(likeness.values()):
                likeness = {i: forward.likeness(bundle) for i, forward in enumerate(forwards)}
            best = max(likeness, key=lambda i: (likeness[i], -i), default=None)
            if best is not None and likeness[best]:
                forwards[best].take(bundle)
            else:
                alone += bundle.parts
    return alone
