"""Runs the passes of the pipeline: names and times each one, and under strict checks its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from autopallas import jaxprs
from autopallas.compat import ClosedJaxpr, Jaxpr
from autopallas.graph import Body, Graph
from autopallas.graph.flatten import may_hold_bodies
from autopallas.invariants import check_bodies, check_decisions, check_graph, check_program, check_sites
from autopallas.patterns import Match
from autopallas.plan.decision import Decision
from autopallas.report import Pass
from autopallas.rewrite.primitive import backward_p, site_p

__all__ = ["Passes"]

P = ParamSpec("P")
R = TypeVar("R")


class Passes:
    """The passes over one program, in order.

    A pass returns a tree of bodies, a graph, sites, decisions, a program, or several of these.  Their equations and
    sites are counted.  With ``checked``, their invariants are checked, so that the pass that breaks one is named.

    Attributes:
      stage: the stage of the pass that runs or ran last.
      done: the records of the passes that have finished.
    """

    def __init__(self, program: ClosedJaxpr, checked: bool):
        self.stage = "graph"
        self.done: list[Pass] = []
        self._program = program
        self._checked = checked
        self._graph: Graph | None = None
        self._matches: list[Match] = []
        self._equations = 0
        self._sites = 0

    def __call__(self, stage: str, name: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the pass ``work(*args, **kwargs)`` and returns its result."""
        self.stage = stage
        start = time.perf_counter()
        result = work(*args, **kwargs)
        seconds = time.perf_counter() - start
        for part in result if isinstance(result, tuple) else (result,):
            self._look(name, part)
        self.done.append(Pass(name, stage, round(seconds, 6), self._equations, self._sites))
        return result

    def _look(self, name: str, part: object) -> None:
        """Counts what is in the result of a pass, and checks it."""
        if isinstance(part, Body):
            self._equations = sum(len(body.equations) for body in part.walk())
            if self._checked:
                check_bodies(name, part)
        elif isinstance(part, Graph):
            self._graph = part
            if self._checked:
                check_graph(name, part)
        elif isinstance(part, ClosedJaxpr):
            if part is not self._program:
                self._equations = _equations(part)
            if self._checked:
                check_program(name, self._program, part)
        elif isinstance(part, list) and part and isinstance(part[0], Match):
            self._matches, self._sites = part, len(part)
            if self._checked and self._graph is not None:
                check_sites(name, self._graph, part)
        elif isinstance(part, list) and part and isinstance(part[0], Decision):
            self._sites = sum(decision.verdict == "applied" for decision in part)
            if self._checked:
                check_decisions(name, self._matches, part)


def _equations(program: ClosedJaxpr | Jaxpr) -> int:
    """Counts the equations of a program and its bodies; a site counts as one."""
    found, todo = 0, [program]
    while todo:
        jaxpr, _ = jaxprs.open_jaxpr(todo.pop())
        found += len(jaxpr.eqns)
        for equation in jaxpr.eqns:
            if equation.primitive not in (site_p, backward_p) and may_hold_bodies(equation):
                todo += [inner for _, _, inner in jaxprs.bodies(equation)]
    return found
