"""Puts sites into a flat program: replaces equations that give results and cotangents by the site primitives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import jax

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, Params, Var
from autopallas.graph import Body, Graph, flatten
from autopallas.graph.body_links import linked, may_be_given
from autopallas.graph.edit import Edit, check, rebuild, without_results
from autopallas.patterns.carry import is_available
from autopallas.patterns.match import BackwardMatch, Match
from autopallas.places import scope
from autopallas.plan.decision import Decision
from autopallas.rewrite.manual_axes import casts_to, with_casts
from autopallas.rewrite.primitive import allow_checks, allow_taylor_mode, backward_p, site_p

__all__ = ["splice"]


def splice(graph: Graph, matches: Sequence[Match], decisions: Sequence[Decision]) -> ClosedJaxpr:
    """Returns the program with the applied sites replaced, as a closed jaxpr without dead code.

    A site is replaced at every occurrence where its operands are available: in a checkpoint's recomputation as well as
    in the original computation.
    """
    splicer = _Splicer(graph)
    for match, decision in zip(matches, decisions, strict=True):
        if decision.verdict == "applied":
            for part in match.passes:
                splicer.replace(part, decision)
    program = jaxprs.without_dead_code(with_casts(rebuild(graph.root, splicer.edits)))
    check(program)
    return program


class _Splicer:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.edits: dict[Body, Edit] = {}
        self._brought: dict[tuple[Var, Body], Var] = {}
        self._scans: dict[int, list[tuple[Body, int]]] | None = None
        self._made: dict[int, dict[Body, Var]] = defaultdict(dict)
        """Variables of the values that sites give and the program lacks."""

    def _edit(self, body: Body) -> Edit:
        return self.edits.setdefault(body, Edit())

    def replace(self, match: Match, decision: Decision) -> None:
        """Replaces one site: its forward wherever it occurs, and its backwards."""
        params = {"site": match.site, "decision": decision, "original": match.original}
        outputs: dict[Body, list[Var]] = {}  # results and residuals of the first forward in each body
        if len(match.results) > 1 and match.backwards:
            self._replace_results(match, params, outputs)
            self._replace_several(match, params, outputs)
            for backward in match.backwards:
                self._replace_backward(match, params, backward, outputs)
            return
        alone = len(match.results) == 1 and not self._is_one_of_several(match.results[0])
        if match.in_body or not alone or not (match.backwards or self._known_before(match)):
            self._replace_together(match, params)
            return
        self._replace_loop(match, params, outputs)
        for body, position in self.graph.occurrences(match.results[0]):
            if position in body.children:  # a checkpoint; the loop meets the occurrence in its body
                continue
            if not all(self._is_before(n, body, position, bool(match.backwards)) for n in match.operands):
                continue
            equation = body.equations[position]
            new, variables = self._forward(match, params, body, list(equation.outvars), bool(match.backwards), equation)
            outputs.setdefault(body, variables)
            self._edit(body).replaced[position] = [new]
        for backward in match.backwards:
            self._replace_backward(match, params, backward, outputs)

    def _replace_loop(self, match: Match, params: Params, outputs: dict[Body, list[Var]]) -> None:
        """Replaces a site that is one result of a scan; the scan keeps its other results, or goes as dead code."""
        for body, position in self._places(match.results[0]):
            equation, known = body.equations[position], self.graph.positions[body]
            again = all(n in known and known[n][0] < position for n in match.operands)
            if equation.primitive.name == "scan" and (body is match.body or again):
                numbers = self.graph.numbers[body]
                own = [v for v in equation.outvars if numbers[v] == match.results[0]]
                new, variables = self._forward(match, params, body, own[:1], bool(match.backwards), equation)
                outputs.setdefault(body, variables)
                kept = without_results(equation, own)
                self._edit(body).replaced[position] = [*kept, new]
                self._edit(body).renamed.update(dict.fromkeys(own[1:], own[0]))  # stacked twice

    def _replace_results(self, match: Match, params: Params, outputs: dict[Body, list[Var]]) -> None:
        """Replaces a site with backwards that is several results of a scan; the scan keeps its others, or goes as dead
        code."""
        wanted = dict.fromkeys(match.results)
        for body, position in self._places(match.results[0]):
            equation, known = body.equations[position], self.graph.positions[body]
            again = all(n in known and known[n][0] < position for n in match.operands)
            numbers = self.graph.numbers[body]
            own = {numbers[v]: v for v in reversed(equation.outvars) if numbers[v] in wanted}
            if equation.primitive.name == "scan" and len(own) == len(wanted) and (body is match.body or again):
                results = [own[number] for number in match.results]
                new, variables = self._forward(match, params, body, results, True, equation)
                outputs.setdefault(body, variables)
                same = [v for v in equation.outvars if numbers[v] in wanted]
                self._edit(body).replaced[position] = [*without_results(equation, same), new]
                self._edit(body).renamed.update((v, own[numbers[v]]) for v in same if v not in results)

    def _replace_several(self, match: Match, params: Params, outputs: dict[Body, list[Var]]) -> None:
        """Replaces a site with several results and backwards wherever equations compute all of its results from its
        operands."""
        for body, position in self.graph.occurrences(match.results[0]):
            known, equation = self.graph.positions[body], body.equations[position]
            computed = all(number in known and known[number][0] >= 0 for number in match.results)
            if position in body.children or body in outputs or not computed or not known.keys() >= {*match.operands}:
                continue
            results = [Var(self.graph.avals[number]) for number in match.results]
            new, outputs[body] = self._forward(match, params, body, results, True, equation)
            self._edit(body).added.append(new)
            for number, variable in zip(match.results, results, strict=True):
                self._give(body, number, variable)

    def _forward(
        self, match: Match, params: Params, body: Body, results: list[Var], residuals: bool, like: JaxprEqn
    ) -> tuple[JaxprEqn, list[Var]]:
        """Returns the equation of a site, and the variables of its results and residuals."""
        operands = self._operands_in(body, match)
        avals = [v.aval for v in operands]
        variables = list(results)
        if residuals:
            variables += [Var(array_types.array_type(t.shape, t.dtype, avals, t)) for t in match.site.residual_types()]
        full = params | {"residuals": residuals}
        allow_taylor_mode()
        allow_checks()
        source = compat.scoped(like.source_info, scope(match.op, match.location))
        return compat.new_jaxpr_eqn(operands, variables, site_p, full, set(), source, like.ctx), variables

    def _replace_backward(
        self, match: Match, params: Params, backward: BackwardMatch, outputs: dict[Body, list[Var]]
    ) -> None:
        body, edit = backward.body, self._edit(backward.body)
        known = self.graph.positions[body]
        like = body.equations[known[backward.gradients[0][1]][0]]
        variables = self._outputs_in(body, outputs)
        if variables is None:  # recomputed here, as by the program's checkpoint
            results = [Var(self.graph.avals[number]) for number in match.results]
            forward, variables = self._forward(match, params, body, results, True, like)
            edit.added.append(forward)
            outputs[body] = variables
        operands = self._operands_in(body, match)
        moved = dict(backward.moved)
        gradients = []
        for position, number in backward.gradients:
            aval = self.graph.avals[number]
            if number in moved:
                aval = array_types.array_type(operands[position].aval.shape, aval.dtype, [aval])
            gradients.append(Var(aval))
        given = [*operands, *variables, *(known[number][1] for number in backward.cotangents)]
        full = params | {"active": tuple(position for position, _ in backward.gradients)}
        source = compat.scoped(like.source_info, scope(match.op, match.location))
        if backward.mapped is None:
            edit.added.append(compat.new_jaxpr_eqn(given, gradients, backward_p, full, set(), source, like.ctx))
        else:
            edit.added += [e.replace(source_info=source) for e in _mapped(given, gradients, full)]
        for (_, number), gradient in zip(backward.gradients, gradients, strict=True):
            given_back = gradient
            if number in moved:
                equation = jaxprs.transposed_equation(gradient, moved[number])
                edit.added.append(equation)
                (given_back,) = equation.outvars
            self._give(body, number, given_back)

    def _is_before(self, number: int, body: Body, position: int, given: bool) -> bool:
        """Returns whether a body knows a value before one of its equations or, with ``given``, lacks it and can be
        given it by the loops around it."""
        known = self.graph.positions[body]
        return known[number][0] < position if number in known else given and may_be_given(self.graph, number, body)

    def _is_one_of_several(self, number: int) -> bool:
        """Returns whether the equation that gives a value, such as a sort, gives others too; loops are no such."""
        return any(
            len(body.equations[position].outvars) > 1 and position not in body.children
            for body, position in self.graph.occurrences(number)
        )

    def _known_before(self, match: Match) -> bool:
        """Returns whether the operands are known before each occurrence of the site's result."""
        for body, position in self.graph.occurrences(match.results[0]):
            known = self.graph.positions[body]
            if position not in body.children and not all(n in known and known[n][0] < position for n in match.operands):
                return False
        return True

    def _replace_together(self, match: Match, params: Params) -> None:
        """Replaces a site with several results, or with operands from elsewhere, by one equation in each body that
        computes any of the results."""
        bodies = dict.fromkeys(body for number in match.results for body, _ in self._places(number))
        if match.in_body:
            bodies = {match.body: None}
        for body in bodies:
            if not all(self._is_available(number, match, body) for number in match.operands):
                continue
            results = [Var(self.graph.avals[number]) for number in match.results]
            places = (i for n in match.results for b, i in self._places(n) if b is body)
            like = match.equations[0].equation if match.in_body else body.equations[next(places)]
            equation, _ = self._forward(match, params, body, results, False, like)
            self._edit(body).added.append(equation)
            for number, variable in zip(match.results, results, strict=True):
                if number in match.made:
                    self._made[number][body] = variable
                self._give(body, number, variable)

    def _is_available(self, number: int, match: Match, body: Body) -> bool:
        """Returns whether an operand of a site is known in a body, or can be brought there."""
        if is_available(self.graph, number, match.sources, body, across=True):
            return True
        return any(linked(self.graph, home, body) for home in self._made.get(number, ()))

    def _give(self, body: Body, number: int, variable: Var) -> None:
        """Makes one body read ``variable`` instead of a value wherever it computed that value itself."""
        edit, numbers = self._edit(body), self.graph.numbers[body]
        for holder, position in self._places(number):
            if holder is body:
                equation = body.equations[position]
                same = [v for v in equation.outvars if numbers[v] == number]
                left = edit.replaced.get(position, [equation])
                edit.replaced[position] = [kept for e in left for kept in without_results(e, same)]
                for v in same:
                    if casts := casts_to(v, variable, equation):
                        edit.added += casts
                    else:
                        edit.renamed[v] = variable

    def _places(self, number: int) -> list[tuple[Body, int]]:
        """Returns (body, position) of every equation that computes a value itself, and of every scan that gives it."""
        if self._scans is None:
            self._scans = defaultdict(list)
            for body, numbers in self.graph.numbers.items():
                for position in body.children:
                    equation = body.equations[position]
                    for own in {numbers[v] for v in equation.outvars} if equation.primitive.name == "scan" else ():
                        self._scans[own].append((body, position))
        return [*self.graph.occurrences(number), *self._scans.get(number, ())]

    def _outputs_in(self, body: Body, outputs: dict[Body, list[Var]]) -> list[Var] | None:
        """Returns the forward's results and residuals in the backward's body, or None if they cannot go there."""
        if body in outputs:
            return outputs[body]
        for source, variables in outputs.items():
            if linked(self.graph, source, body):
                return [self._across(v, source, body) for v in variables]
        return None

    def _operands_in(self, body: Body, match: Match) -> list[Var]:
        """Returns the operands in a body; those that it lacks are brought there from the loop of the forward."""
        operands = [self._known_or_brought(match.sources, number, body) for number in match.operands]
        for position, axis, size, of_one in match.spread:
            equation = jaxprs.repeated_equation(operands[position], axis, size, of_one)
            self._edit(body).added.append(equation)
            (operands[position],) = equation.outvars
        return operands

    def _known_or_brought(self, homes: Sequence[Body], number: int, body: Body) -> Var:
        known = self.graph.positions[body]
        return known[number][1] if number in known else self._brought_from(homes, number, body)

    def _brought_from(self, homes: Sequence[Body], number: int, body: Body) -> Var:
        graph = self.graph
        for made, variable in self._made.get(number, {}).items():
            if linked(graph, made, body):
                return self._across(variable, made, body)
        home = next((h for h in homes if number in graph.positions[h] and linked(graph, h, body)), None)
        if home is None:
            return self._passed_in(number, body, homes)
        return self._across(graph.positions[home][number][1], home, body)

    def _passed_in(self, number: int, body: Body, homes: Sequence[Body]) -> Var:
        """Brings a value of a body around this one into it, as a further operand of the equation that holds it."""
        outer, position = self.graph.holders[body]
        holder, given = outer.equations[position], self._known_or_brought(homes, number, outer)
        if (given, body) not in self._brought:
            self._brought[given, body] = inner = Var(given.aval)
            edit = self._edit(body)
            (edit.given if holder.primitive.name == "scan" else edit.read).append((inner, given))
        return self._brought[given, body]

    def _across(self, variable: Var, source: Body, target: Body) -> Var:
        """Brings a variable of one body into another body that is linked to it.

        An input that the equation around the first body passes in is passed to the second body in the same way.  Any
        other variable becomes a further result of the first body and a further operand of the second.
        """
        if source is target:
            return variable
        numbers, known = self.graph.numbers[source], self.graph.positions[target]
        if variable in numbers and numbers[variable] in known:
            return known[numbers[variable]][1]
        if (variable, target) not in self._brought:
            (outer, i), (other, _) = self.graph.holders[source], self.graph.holders[target]
            holder = outer.equations[i]
            self._brought[variable, target] = inner = Var(variable.aval)
            place = source.invars.index(variable) if variable in source.invars else None
            if place is not None and not _carried(holder, place):
                atom = holder.invars[place + (holder.primitive.name == "cond")]
                given = atom if isinstance(atom, Literal) else self._across(atom, outer, other)
                self._enter(holder, place, inner, given, self._edit(target))
            else:
                self._leave(holder, variable, inner, source, target, lambda v: self._across(v, outer, other))
        return self._brought[variable, target]

    def _enter(self, holder: JaxprEqn, place: int, inner: Var, given: Var | Literal, edit: Edit) -> None:
        """Passes to a body the value that the equation ``holder`` passes to its own body as the input at ``place``."""
        if holder.primitive.name == "scan" and place < compat.scan_parts(holder)[0]:
            edit.given.append((inner, given))
            return
        edit.read.append((inner, given))
        if holder.primitive.name == "shard_map":
            edit.specs[inner] = holder.params["in_specs"][place]

    def _leave(
        self, holder: JaxprEqn, variable: Var, inner: Var, source: Body, target: Body, outside: Callable[[Var], Var]
    ) -> None:
        """Passes to a body a value that is computed in another one, the body of the equation ``holder``."""
        edits, aval = (self._edit(source), self._edit(target)), variable.aval
        match holder.primitive.name:
            case "scan":
                stacked = Var(array_types.array_type((holder.params["length"], *aval.shape), aval.dtype, [aval], aval))
            case "shard_map":
                if not aval.shape:  # a scalar has no axis along which the devices' parts can be concatenated
                    line = jaxprs.reshape_equation(variable, (1,))
                    edits[0].added.append(line)
                    (variable,) = line.outvars
                    whole, inner = inner, Var(variable.aval)
                    back = jaxprs.reshape_equation(inner, ())
                    edits[1].added.append(back.replace(outvars=[whole]))
                spec, type_ = compat.spread(holder.params, variable.aval)
                stacked = Var(type_)
                edits[0].specs[variable] = edits[1].specs[inner] = spec
            case _:
                stacked = Var(aval)
        edits[0].stacked.append((variable, stacked))
        edits[1].read.append((inner, outside(stacked)))


def _mapped(given: Sequence[Var], gradients: Sequence[Var], params: Params) -> list[JaxprEqn]:
    """Returns the equations of a site's backward for many cotangents, along a leading axis of the last operand."""
    shapes = [array_types.shape_of(v.aval) for v in given]
    axes = (*(None for _ in given[1:]), 0)
    many = jax.vmap(lambda *given: backward_p.bind(*given, **params), in_axes=axes)
    inner = flatten(compat.make_jaxpr(many, *shapes))
    names: dict[JaxprAtom, Var] = dict(zip([*inner.invars, *inner.outvars], [*given, *gradients], strict=True))

    def named(atom: JaxprAtom) -> JaxprAtom:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    return [
        e.replace(invars=[named(a) for a in e.invars], outvars=[named(v) for v in e.outvars]) for e in inner.equations
    ]


def _carried(holder: JaxprEqn, place: int) -> bool:
    """Returns whether a body's input is carried over from the previous scan step."""
    if holder.primitive.name != "scan":
        return False
    constants, carried = compat.scan_parts(holder)
    return constants <= place < constants + carried
