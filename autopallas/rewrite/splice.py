"""Puts sites into a flat program: the equation that gives a site's result becomes the site primitive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopallas import compat
from autopallas.graph import Body, Graph
from autopallas.patterns.match import Match
from autopallas.plan import Decision
from autopallas.rewrite.primitive import site_p

__all__ = ["splice"]

_Edits = dict[Body, dict[int, tuple[Match, Decision]]]


def splice(graph: Graph, matches: Sequence[Match], decisions: Sequence[Decision]) -> Any:
    """The program with the applied sites replaced, as a closed jaxpr; what is no longer needed is dropped.

    A site is replaced at every occurrence where its operands are at hand: a checkpoint's recomputation as well as the
    original computation.
    """
    edits: _Edits = {}
    for match, decision in zip(matches, decisions, strict=True):
        if decision.verdict != "applied":
            continue
        for body, position in graph.occurrences(match.results[0]):
            known = graph.positions[body]
            if all(n in known and known[n][0] < position for n in match.operands):
                edits.setdefault(body, {})[position] = (match, decision)
    return compat.without_dead_code(_rebuild(graph, graph.root, edits))


def _rebuild(graph: Graph, body: Body, edits: _Edits) -> Any:
    """The body as a jaxpr, with the edits in it and below it."""
    here: Mapping[int, tuple[Match, Decision]] = edits.get(body, {})
    equations = []
    for position, equation in enumerate(body.equations):
        if position in here:
            match, decision = here[position]
            known = graph.positions[body]
            equations.append(
                compat.new_jaxpr_eqn(
                    [known[number][1] for number in match.operands],
                    list(equation.outvars),
                    site_p,
                    {"site": match.site, "decision": decision, "original": match.original, "residuals": False},
                    set(),
                    equation.source_info,
                    equation.ctx,
                )
            )
            continue
        children = body.children.get(position, ())
        if any(inner in edits for child in children for inner in child.body.walk()):
            params = dict(equation.params)
            for child in children:
                new = _rebuild(graph, child.body, edits)
                if child.position is None:
                    params[child.parameter] = new
                else:
                    bodies = list(params[child.parameter])
                    bodies[child.position] = new
                    params[child.parameter] = type(params[child.parameter])(bodies)
            equation = equation.replace(params=params)
        equations.append(equation)
    return compat.rebuilt(body.source, body.constvars, body.consts, body.outvars, equations)
