"""Holds the outcome of recognition as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autopallas import jaxprs
from autopallas.compat import ClosedJaxpr
from autopallas.graph import Body, Graph, Node
from autopallas.graph.steps import OutOfSteps
from autopallas.numerics.casts import is_quantised
from autopallas.patterns.advice import QUANTISED
from autopallas.sites.calls import SiteDescription
from autopallas.sites.spec import SiteSpec

__all__ = ["BackwardMatch", "Match", "Mismatch", "NearMiss", "Spread", "bounded", "describe_reason", "refuse_quantised"]


class Mismatch(Exception):
    """Raised inside a pattern where a guard fails, and turned into a NearMiss in one place.

    Attributes:
      reason: what failed, in words that hold at every place of the same form.
      operand: the number of the value that the reason is about, if it is about one.
      advice: what to write instead, in one or two sentences; empty where nothing general can be said.
    """

    def __init__(self, reason: str, operand: int | None = None, *, advice: str = ""):
        super().__init__(reason)
        self.reason, self.operand, self.advice = reason, operand, advice


def describe_reason(graph: Graph, reason: str, operand: int | None) -> str:
    """Completes a reason with the type, primitive and line of the value that it is about."""
    if operand is None:
        return reason
    node = graph.definitions.get(operand)
    kind = f"{graph.dtype(operand)}[{','.join(map(str, graph.shape(operand)))}]"
    if node is None:
        return f"{reason}: {kind}, an input"
    return f"{reason}: {kind} of {node.name} at {jaxprs.location(node.equation)}"


def refuse_quantised(graph: Graph, operands: Iterable[int]) -> None:
    """Refuses a site that reads floats of 8 bits, which JAX promotes to no other type, as kernels would have to.

    Raises:
      Mismatch: it does.
    """
    for number in operands:
        if is_quantised(graph.dtype(number)):
            raise Mismatch("an operand has floats of 8 bits", number, advice=QUANTISED)


@contextmanager
def bounded(graph: Graph) -> Iterator[None]:
    """Limits the steps of one attempt to find something in a graph.

    Raises:
      Mismatch: the attempt needed more steps.
    """
    try:
        with graph.steps.one_try():
            yield
    except OutOfSteps as out:
        raise Mismatch(str(out)) from None


@dataclass(frozen=True, slots=True, eq=False)
class BackwardMatch:
    """A backward of a site in the same program.

    Attributes:
      body: the body that holds it.
      cotangent: number of the cotangent of the site's result; of the first one, where there are several.
      gradients: (position among the site's operands, number of the value that is its cotangent).
      mapped: how many cotangents there are, along a leading axis of each; None for one without that axis.
      further: numbers of the cotangents of the site's other results, in their order.
      moved: (number of such a value, order of its operand's axes in it) for each value that has them in another order.
    """

    body: Body
    cotangent: int
    gradients: tuple[tuple[int, int], ...]
    mapped: int | None = None
    further: tuple[int, ...] = ()
    moved: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def cotangents(self) -> tuple[int, ...]:
        """The numbers of the cotangents of the site's results."""
        return (self.cotangent, *self.further)


class Spread(NamedTuple):
    """An operand that a site reads repeated along an axis, which is new, or of size 1 in the program."""

    position: int
    axis: int
    size: int
    of_one: bool


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A place that computes a known operation.

    Attributes:
      op: the operation.
      site: its description: what the operation's implementations compute, and from which operands.
      direction: "forward", or "forward+backward" where the program holds the site's backward too.
      operands: numbers of the values that the site reads, in the order of the site's operands.
      results: numbers of the values that the site computes.
      equations: the nodes that compute results from operands, in order.
      original: the same computation as a closed jaxpr.
      body: the body in which the site was found.
      location: "file:line (function)" of the user's code.
      backwards: the backwards that the program holds; with any, each operand is one use of a value.
    """

    op: str
    site: SiteDescription
    direction: Literal["forward", "forward+backward"]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    equations: tuple[Node, ...]
    original: ClosedJaxpr
    body: Body
    location: str
    backwards: tuple[BackwardMatch, ...] = ()
    homes: tuple[Body, ...] = ()
    """Bodies that have all operands, while other bodies with a part of the site may lack some; by default ``body``."""
    spread: tuple[Spread, ...] = ()
    """Operands that the site reads repeated along an axis."""
    then: tuple[Match, ...] = ()
    """Further passes of the same site, such as its backward where that is a computation of its own."""
    obstacle: str = ""
    """Reason why the site must not be replaced where it is, or an empty string."""
    shared: str = ""
    """What the program computes once for this site and for others, in words, or an empty string: measurements of such
    a site by itself are no evidence of time."""
    denied: str = ""
    """Reason why the user does not want the site replaced, or an empty string."""
    assumptions: tuple[str, ...] = ()
    """Assumptions of the proof about the program's numbers, in words."""
    made: tuple[int, ...] = ()
    """Numbers among the results of values that the program lacks, for a further pass to read."""
    in_body: bool = False
    """Whether the site is replaced in ``body`` alone, and not wherever the program computes its results."""
    measured: Match | None = None
    """The same site as one computation, to measure, where its passes leave each other what the original lacks."""

    neighbours: tuple[int, ...] = ()
    """Results of equations that read what the site reads in the same way, and beside which it may gain nothing."""
    own_results: int | None = None
    """How many of the results are values of the forward, where one computation of both passes is measured; the others
    are gradients."""

    def shapes_read(self, shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Returns the shapes of the operands as the site reads them, for those that they have in the program."""
        found = list(shapes)
        for position, axis, size, of_one in self.spread:
            found[position] = (*found[position][:axis], size, *found[position][axis + of_one :])
        return found

    @property
    def passes(self) -> tuple[Match, ...]:
        return (self, *self.then)

    @property
    def sources(self) -> tuple[Body, ...]:
        return self.homes or (self.body,)

    @property
    def replaced(self) -> tuple[int, ...]:
        """Numbers of all values that a kernel computes in place of the program."""
        gradients = (number for b in self.backwards for _, number in b.gradients)
        return (*self.results, *gradients, *(number for p in self.then for number in p.replaced))

    @property
    def reads(self) -> dict[int, tuple[int, ...]]:
        """For each replaced value, the values from which a kernel computes it."""
        found = dict.fromkeys(self.results, self.operands)
        for backward in self.backwards:
            read = (*self.operands, *self.results, *backward.cotangents)
            found.update((number, read) for _, number in backward.gradients)
        for further in self.then:
            found.update(further.reads)
        return found

    def holds_any(self, numbers: Iterable[int]) -> bool:
        """Returns whether the forward computes any of these values, on the way or as a result."""
        return not {n for node in self.equations for n in node.outputs}.isdisjoint(numbers)

    @property
    def spec(self) -> SiteSpec:
        spec: SiteSpec = self.site.spec
        return spec


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A place that got past the anchors of a pattern and then failed, with the reason.

    ``value`` is the number of the value that the miss is about: the miss is dropped where a site computes that value in
    the program's place. ``advice`` says what to write instead.
    """

    op: str
    location: str
    reason: str
    value: int = field(default=-1, compare=False)
    advice: str = ""
