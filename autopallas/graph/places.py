"""Tells where the equations of a site were written: on which lines, in which functions, under which named scopes."""

from __future__ import annotations

from collections.abc import Iterable

from autopallas import compat, jaxprs
from autopallas.compat import JaxprEqn
from autopallas.graph.flatten import Body
from autopallas.graph.numbering import Graph
from autopallas.place_selectors import Frame, Places

__all__ = ["places_of"]


def places_of(graph: Graph, equations: Iterable[tuple[Body, JaxprEqn]]) -> Places:
    """Returns the places of equations, each of which is given with the body that holds it.

    An equation is at its own lines and under its own scopes, at those of the calls that were dissolved around it, and
    at those of the loops and checkpoints that hold it.
    """
    frames: set[Frame] = set()
    scopes: set[tuple[str, ...]] = set()
    known: dict[Body, tuple[frozenset[Frame], tuple[str, ...]]] = {}
    for body, equation in equations:
        own, names = _at(graph, body, equation, known)
        frames |= own
        scopes.add(names)
    return Places(frozenset(frames), frozenset(scopes))


def _at(
    graph: Graph, body: Body, equation: JaxprEqn, known: dict[Body, tuple[frozenset[Frame], tuple[str, ...]]]
) -> tuple[frozenset[Frame], tuple[str, ...]]:
    """Returns the frames and the scopes of one equation; ``known`` has those of the bodies that were met before."""
    if body not in known:
        holder = graph.holders.get(body)
        if holder is None:
            known[body] = frozenset(), ()
        else:
            outer, position = holder
            known[body] = _at(graph, outer, outer.equations[position], known)
    frames, scopes = known[body]
    calls = body.calls.get(equation.outvars[0], ()) if equation.outvars else ()
    own = [frame for one in (*calls, equation) for frame in jaxprs.frames(one)]
    return frames.union(own), (*scopes, *compat.scope_names(equation))
