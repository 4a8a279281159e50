"""Defines what a kind of respelling declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from autopallas.compat import ArrayFunction, JaxprEqn
from autopallas.graph import Body, Graph, Node
from autopallas.kernels.respelling.spec import Parameters, Plain, RespellingSpec
from autopallas.numerics.classes import Numerics

__all__ = ["Found", "Kind", "Sample", "of_equation", "of_no_equation"]


@dataclass(frozen=True, slots=True)
class Found:
    """A place that a kind can respell.

    Attributes:
      parameters: what the kind needs to know beyond the types.
      operands: the numbers of the values that it reads.
      results: the numbers of the values that it gives.
      home: a body that has those of the operands which the body with the results lacks and can be given.
      neighbours: the results of equations that read what it reads likewise, and beside which it may gain nothing.
    """

    parameters: Parameters
    operands: tuple[int, ...]
    results: tuple[int, ...]
    home: Body | None = None
    neighbours: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A typical computation, to measure a row of the table on.

    Attributes:
      function: the computation as people write it.
      arguments: the types of its arguments.
      place: which of its sites of the kind is measured, as an index; None where there is one.
    """

    function: ArrayFunction
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    place: int | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of respelling.

    Attributes:
      name: its name in options, reports and tables, and of its module.
      primitives: names of the primitives whose equations are looked at.
      numerics: how the results relate to the original's: a class, or ``numerics(spec)`` that returns one.
      instead: what is written instead, in words.
      match: ``match(graph, node)`` returns the respelling of a node with one of the primitives, or None.
      original: ``original(spec, *operands)`` computes the original, as a list.
      respelt: ``respelt(spec, *operands)`` computes the same otherwise, as a list.
      feature: ``feature(spec)`` names what, beside the size, decides which of the two is faster.
      samples: yields what to measure, with a name; programs that only run have no need of it.
      assumptions: what has to hold for the results to be equal, in words; or a function of the spec that returns it.
      may_round_sums: whether a platform may round the original's sums of 16-bit numbers to 16 bits, so that a search
        compares with the original in float32.
      elsewhere_from: the gain from which evidence holds for other vector extensions, and for another minor version of
        JAX, than it was measured with.
      on_request: whether it is looked for only where the option ``ops`` names it.
      maps_alike: whether many examples are one with larger arrays, for which the same evidence holds.
      gives_way: of a spec, whether another kind that finds the same equation goes before this one.
      keeps_steps: whether the steps of a loop are computed as they are, in a loop of another form, so that sites within
        them may gain more.
      in_loops: whether small ones usually occur in loops, so that a search measures them there: alone, they take less
        time than the call.
      least_steps: of such a loop: 2 where the original is only slow in one.
      is_searched_quickly: whether a first step may wait for a search that nobody asked for; not where the original
        takes long to compile, which no budget interrupts.
      is_slow_among_others: whether the original's equations are only slow where others read the same operands, so that
        a search measures ``original`` in their place.
      platforms: on which it may be of use; empty for all.
      is_in: whether a program may hold a place, asked once where looking at each equation would take longer.
      fill: ``fill(spec, random, arrays)`` may replace the arrays of a search by such that occur.
    """

    name: str
    primitives: tuple[str, ...]
    numerics: Numerics | Callable[[RespellingSpec], Numerics]
    instead: str
    match: Callable[[Graph, Node], Found | None]
    original: Callable[..., list[jax.Array]]
    respelt: Callable[..., list[jax.Array]]
    feature: Callable[[RespellingSpec], str]
    samples: Callable[[], Iterable[tuple[str, Sample]]]
    assumptions: tuple[str, ...] | Callable[[RespellingSpec], tuple[str, ...]] = ()
    may_round_sums: bool = False
    elsewhere_from: float = 0.0
    on_request: bool = False
    maps_alike: bool = False
    gives_way: Callable[[RespellingSpec], bool] | None = None
    keeps_steps: bool = False
    in_loops: bool = False
    least_steps: int = 1
    is_searched_quickly: bool = True
    is_slow_among_others: bool = False
    platforms: tuple[str, ...] = ()
    is_in: Callable[[Graph], bool] | None = None
    fill: Callable[[RespellingSpec, np.random.Generator, Sequence[np.ndarray]], list[np.ndarray]] | None = field(
        default=None
    )

    def numerics_of(self, spec: RespellingSpec) -> Numerics:
        """Returns how the results of one respelling relate to the original's."""
        return self.numerics(spec) if callable(self.numerics) else self.numerics

    def assumptions_of(self, spec: RespellingSpec) -> tuple[str, ...]:
        """Returns what has to hold for the results of one respelling to equal the original's."""
        return self.assumptions(spec) if callable(self.assumptions) else self.assumptions


def of_no_equation(graph: Graph, node: Node) -> Found | None:
    """Finds nothing: the ``match`` of a kind whose places are two loops, which a pattern of its own finds."""
    return None


def of_equation(
    parameters: Callable[[JaxprEqn], Mapping[str, Plain] | None],
) -> Callable[[Graph, Node], Found | None]:
    """Returns the ``match`` of a kind that respells single equations.

    Args:
      parameters: returns the parameters of an equation, or None where it is to be left alone.
    """

    def match(graph: Graph, node: Node) -> Found | None:
        if any(number in graph.literals for number in node.inputs):
            return None
        found = parameters(node.equation)
        return None if found is None else Found(tuple(sorted(found.items())), node.inputs, node.outputs)

    return match
