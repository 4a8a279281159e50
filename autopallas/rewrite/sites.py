"""Puts sites into a flat program: equations that give results and cotangents become the site primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopallas import compat
from autopallas.compat import JaxprEqn, Var
from autopallas.graph import Body, Graph
from autopallas.graph.edit import Edit, check, rebuild, without_results
from autopallas.patterns.match import BackwardMatch, Match
from autopallas.plan import Decision
from autopallas.rewrite.primitive import backward_p, site_p

__all__ = ["splice"]


def splice(graph: Graph, matches: Sequence[Match], decisions: Sequence[Decision]) -> Any:
    """The program with the applied sites replaced, as a closed jaxpr; what is no longer needed is dropped.

    A site is replaced at every occurrence where its operands are at hand: a checkpoint's recomputation as well as the
    original computation.
    """
    splicer = _Splicer(graph)
    for match, decision in zip(matches, decisions, strict=True):
        if decision.verdict == "applied":
            splicer.replace(match, decision)
    program = compat.without_dead_code(rebuild(graph.root, splicer.edits))
    check(program)
    return program


class _Splicer:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.edits: dict[Body, Edit] = {}
        self._holders = {
            child.body: (body, position)
            for body in graph.numbers
            for position, children in body.children.items()
            for child in children
        }
        """Per body, the body and the position of the equation that holds it."""

    def _edit(self, body: Body) -> Edit:
        return self.edits.setdefault(body, Edit())

    def replace(self, match: Match, decision: Decision) -> None:
        """Replaces one site: its forward wherever it occurs, and its backwards."""
        params = {"site": match.site, "decision": decision, "original": match.original}
        outputs: dict[Body, list[Var]] = {}  # results and residuals of the first forward in each body
        for body, position in self.graph.occurrences(match.results[0]):
            known = self.graph.positions[body]
            if not all(n in known and known[n][0] < position for n in match.operands):
                continue
            equation = body.equations[position]
            new, variables = self._forward(match, params, body, list(equation.outvars), bool(match.backwards), equation)
            outputs.setdefault(body, variables)
            self._edit(body).replaced[position] = [new]
        for backward in match.backwards:
            self._replace_backward(match, params, backward, outputs)

    def _forward(
        self, match: Match, params: dict[str, Any], body: Body, results: list[Var], residuals: bool, like: JaxprEqn
    ) -> tuple[JaxprEqn, list[Var]]:
        """The equation of a site, and the variables of its results and residuals."""
        known = self.graph.positions[body]
        operands = [known[number][1] for number in match.operands]
        avals = [v.aval for v in operands]
        variables = list(results)
        if residuals:
            variables += [Var(compat.array_type(t.shape, t.dtype, avals)) for t in match.site.residual_types()]
        full = params | {"residuals": residuals}
        return compat.new_jaxpr_eqn(operands, variables, site_p, full, set(), like.source_info, like.ctx), variables

    def _replace_backward(
        self, match: Match, params: dict[str, Any], backward: BackwardMatch, outputs: dict[Body, list[Var]]
    ) -> None:
        body, edit = backward.body, self._edit(backward.body)
        known = self.graph.positions[body]
        like = body.equations[known[backward.gradients[0][1]][0]]
        variables = self._outputs_in(body, match, outputs)
        if variables is None:  # computed again, as the program did: in a checkpoint
            results = [Var(self.graph.avals[number]) for number in match.results]
            forward, variables = self._forward(match, params, body, results, True, like)
            edit.added.append(forward)
            outputs[body] = variables
        operands = [known[number][1] for number in match.operands]
        gradients = [Var(self.graph.avals[number]) for _, number in backward.gradients]
        edit.added.append(
            compat.new_jaxpr_eqn(
                [*operands, *variables, known[backward.cotangent][1]],
                gradients,
                backward_p,
                params | {"active": tuple(position for position, _ in backward.gradients)},
                set(),
                like.source_info,
                like.ctx,
            )
        )
        numbers = self.graph.numbers[body]
        for (_, number), gradient in zip(backward.gradients, gradients, strict=True):
            for holder, position in self.graph.occurrences(number):
                if holder is body:
                    equation = body.equations[position]
                    same = [v for v in equation.outvars if numbers[v] == number]
                    left = edit.replaced.get(position, [equation])
                    edit.replaced[position] = [kept for e in left for kept in without_results(e, same)]
                    edit.renamed.update(dict.fromkeys(same, gradient))

    def _outputs_in(self, body: Body, match: Match, outputs: dict[Body, list[Var]]) -> list[Var] | None:
        """The results and residuals of the forward in the body of the backward, where they can be brought there."""
        if body in outputs:
            return outputs[body]
        for source, variables in outputs.items():
            if self._linked(source, body):
                return [self._across(v, source, body) for v in variables]
        return None

    def _linked(self, source: Body, target: Body) -> bool:
        """Whether what one scan computes per step another can read per step, directly or through further scans."""
        if source is target:
            return True
        if source not in self._holders or target not in self._holders:
            return False
        (outer, i), (other, j) = self._holders[source], self._holders[target]
        scans = outer.equations[i], other.equations[j]
        return (
            all(e.primitive.name == "scan" for e in scans)
            and scans[0] is not scans[1]
            and scans[0].params["length"] == scans[1].params["length"]
            and self._linked(outer, other)
        )

    def _across(self, variable: Var, source: Body, target: Body) -> Var:
        """Stacks a variable of one scan's body and reads it in the other's."""
        if source is target:
            return variable
        numbers, known = self.graph.numbers[source], self.graph.positions[target]
        if variable in numbers and numbers[variable] in known:
            return known[numbers[variable]][1]
        (outer, i), (other, _) = self._holders[source], self._holders[target]
        length = outer.equations[i].params["length"]
        aval = variable.aval
        stacked = Var(compat.array_type((length, *aval.shape), aval.dtype, [aval]))
        self._edit(source).stacked.append((variable, stacked))
        inner = Var(aval)
        self._edit(target).read.append((inner, self._across(stacked, outer, other)))
        return inner
