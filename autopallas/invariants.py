"""Checks, under strict, what must hold after each pass of the pipeline, and names the pass that breaks it.

Every check is linear in the size of the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprEqn, Literal, Var
from autopallas.graph import Body, Graph
from autopallas.graph.edit import check
from autopallas.graph.flatten import Child
from autopallas.patterns import Match
from autopallas.plan.decision import Decision
from autopallas.sites.calls import SiteDescription
from autopallas.sites.division import Divisible
from autopallas.sites.index_notation import View

__all__ = ["InvariantError", "check_bodies", "check_decisions", "check_graph", "check_program", "check_sites"]


class InvariantError(RuntimeError):
    """Raised if the result of a pass of the pipeline cannot be right."""


def _broken(name: str, what: str) -> InvariantError:
    return InvariantError(f"after the pass {name!r}, {what}")


def check_bodies(name: str, root: Body) -> None:
    """Checks a tree of bodies.

    In each body, every variable is defined once, and before it is read.  What an equation passes to a body fits the
    body's inputs, and what the body returns fits the equation's results.  Bodies may share variables: the branches of a
    ``cond`` over one function are one jaxpr.

    Raises:
      InvariantError: an invariant does not hold after the pass ``name``.
    """
    for body in root.walk():
        where = f"in {' > '.join(body.path) or 'the program'}"
        if len(body.constvars) != len(body.consts):
            raise _broken(name, f"a constant {where} has no value")
        own: set[Var] = set()
        _define(name, own, (*body.constvars, *body.invars))
        for position, equation in enumerate(body.equations):
            for atom in equation.invars:
                if not (isinstance(atom, Literal) or atom in own):
                    raise _broken(name, f"an operand of {equation.primitive.name} {where} is not defined before it")
            _define(name, own, equation.outvars)
            for child in body.children.get(position, ()):
                _check_link(name, equation, child)
        for atom in body.outvars:
            if not (isinstance(atom, Literal) or atom in own):
                raise _broken(name, f"a result {where} is not defined")
        if any(not 0 <= position < len(body.equations) for position in body.children):
            raise _broken(name, f"a body {where} belongs to no equation")


def _define(name: str, own: set[Var], variables: Iterable[Var]) -> None:
    for variable in variables:
        if variable in own:
            raise _broken(name, f"the variable {variable} is defined twice")
        own.add(variable)


def _check_link(name: str, equation: JaxprEqn, child: Child) -> None:
    """Raises unless a body's inputs and results fit its equation's operands and results."""
    kind, inner = equation.primitive.name, child.body
    taken, given = _shapes(v.aval for v in inner.invars), _shapes(v.aval for v in inner.outvars)
    operands, results = _shapes(v.aval for v in equation.invars), _shapes(v.aval for v in equation.outvars)
    fits = True
    if kind == "scan":
        constants, carried = compat.scan_parts(equation)
        last = constants + carried
        steps = [(int(equation.params["length"]), *shape) for shape in (*taken[last:], *given[carried:])]
        fits = [*taken[:last], *given[:carried]] == [*operands[:last], *results[:carried]]
        fits = fits and steps == [*operands[last:], *results[carried:]]
    elif kind == "cond":
        fits = (taken, given) == (operands[1:], results)
    elif kind == "while" and child.parameter == "body_jaxpr":
        first = equation.params["cond_nconsts"]
        fits = (taken, given) == (operands[first:], results)
    elif kind in jaxprs.CHECKPOINTS | {"jit", "pjit"}:
        fits = (taken, given) == (operands, results)
    elif kind == "shard_map":
        fits = (len(taken), len(given)) == (len(operands), len(results))
    if not fits:
        raise _broken(name, f"the body of a {kind} does not fit its operands and results")


def _shapes(avals: Iterable[object]) -> list[tuple[int, ...]]:
    return [tuple(getattr(aval, "shape", ())) for aval in avals]


def check_graph(name: str, graph: Graph) -> None:
    """Checks a numbered graph.

    Every variable has one number, whose type is its own.  Operands come before results.  Each definition gives the
    value that it is said to define.  The bodies are held where they are said to be.

    Raises:
      InvariantError: an invariant does not hold after the pass ``name``.
    """
    bodies = list(graph.root.walk())
    if set(bodies) != set(graph.numbers):
        raise _broken(name, "bodies and numbered bodies are not the same")
    for body in bodies:
        numbers, places = graph.numbers[body], graph.positions[body]
        variables = [*body.constvars, *body.invars, *(v for e in body.equations for v in e.outvars)]
        if len(numbers) != len(variables):
            raise _broken(name, "a body has numbers of variables of another one")
        for variable in variables:
            number = numbers.get(variable, -1)
            if not 0 <= number < len(graph.avals):
                raise _broken(name, f"the variable {variable} has no number")
            if number not in places:
                raise _broken(name, f"value {number} is at no place of a body that has it")
            if _kind(variable.aval) != _kind(graph.avals[number]):
                raise _broken(name, f"the variable {variable} has the number of a value of another type")
        given = {*body.constvars, *body.invars}
        for number, (position, variable) in places.items():
            here = variable in (body.equations[position].outvars if position >= 0 else given)
            if not here or numbers[variable] != number:
                raise _broken(name, f"value {number} is not where it is said to be")
    for node in graph.nodes:
        for number in node.inputs:
            if not 0 <= number < len(graph.avals):
                raise _broken(name, f"{node.name} reads a value that does not exist")
    for number, node in graph.definitions.items():
        if number not in node.outputs:
            raise _broken(name, f"the definition of value {number} does not give it")
        if any(operand >= number for operand in node.inputs):
            raise _broken(name, f"value {number} is computed from one that comes after it")
        if number in graph.literals or number in graph.constants:
            raise _broken(name, f"value {number} is both given and computed")
    for body, (holder, position) in graph.holders.items():
        if all(child.body is not body for child in holder.children.get(position, ())):
            raise _broken(name, "a body is not held where it is said to be")


def _kind(aval: object) -> tuple[object, object]:
    return getattr(aval, "shape", None), getattr(aval, "dtype", None)


def check_sites(name: str, graph: Graph, matches: Sequence[Match]) -> None:
    """Checks sites.

    Operands and results are values of the program, with the types that the site's original has.  Labels of axes fit the
    operands and results.  No site reads what it replaces, and no two sites replace the same value; those that come last
    may replace what others do, until it is known which of these are applied.

    Raises:
      InvariantError: an invariant does not hold after the pass ``name``.
    """
    taken: set[int] = set()
    for match in matches:
        where = f"the {match.op} at {match.location}"
        if match.site.operation.priority >= 0:
            if not taken.isdisjoint(match.replaced):
                raise _broken(name, f"{where} replaces what another site replaces")
            taken.update(match.replaced)
        for number, read in match.reads.items():
            if number in read:
                raise _broken(name, f"{where} reads what it replaces")
        for part in match.passes:
            cotangents = [number for backward in part.backwards for number in backward.cotangents]
            for number in (*part.operands, *part.replaced, *cotangents):
                exists = 0 <= number < len(graph.avals) and number not in graph.supposed
                if not exists:
                    raise _broken(name, f"{where} names a value that the program does not have")
            shapes = part.shapes_read([graph.shape(number) for number in part.operands])
            read_types = list(zip(shapes, map(graph.dtype, part.operands), strict=True))
            given_types = [_kind(graph.avals[number]) for number in part.results]
            for own, avals in ((read_types, part.original.in_avals), (given_types, part.original.out_avals)):
                if own != list(map(_kind, avals)):
                    raise _broken(name, f"{where} has values of other types than its original")
            for position, _ in (gradient for backward in part.backwards for gradient in backward.gradients):
                if not 0 <= position < len(part.operands):
                    raise _broken(name, f"{where} has a gradient of no operand")
            if not _has_labels(part.site) or getattr(part.site, "prelude", None) is not None:
                continue  # after a prelude, labels belong to its results, not to the operands
            axes = part.site.shardable_axes()
            for use in axes.operands:
                known = 0 <= use.position < len(shapes)
                if not known or not _fits(use.view, shapes[use.position], part.site.sizes):
                    raise _broken(name, f"{where} has labels that do not fit its operands")
            for view, number in zip(axes.results, part.results, strict=True):
                if not _fits(view, graph.shape(number), part.site.sizes):
                    raise _broken(name, f"{where} has labels that do not fit its results")


def _has_labels(site: SiteDescription) -> TypeGuard[Divisible]:
    return hasattr(site, "shardable_axes")


def _fits(view: View, shape: tuple[int, ...], sizes: Sequence[int]) -> bool:
    """Returns whether all labels exist and stay within an array."""
    if len(view) != len(shape) or not all(0 <= label < len(sizes) for _, labels in view for label in labels):
        return False
    ends = (offset + math.prod(sizes[label] for label in labels) for offset, labels in view)
    return all(end <= size for end, size in zip(ends, shape, strict=True))


def check_decisions(name: str, matches: Sequence[Match], decisions: Sequence[Decision]) -> None:
    """Checks decisions: each site has one, and applied ones name an implementation for a site without an obstacle.

    Raises:
      InvariantError: an invariant does not hold after the pass ``name``.
    """
    if len(matches) != len(decisions):
        raise _broken(name, "there is not one decision for each site")
    for match, decision in zip(matches, decisions, strict=True):
        where = f"the {match.op} at {match.location}"
        applied = decision.verdict == "applied"
        if applied and match.obstacle:
            raise _broken(name, f"{where} is replaced where that must not be")
        if applied and not decision.implementation:
            raise _broken(name, f"{where} is replaced by nothing")


def check_program(name: str, original: ClosedJaxpr, program: ClosedJaxpr) -> None:
    """Checks a rewritten program: it has the original's signature, and defines what it reads.

    Raises:
      InvariantError: an invariant does not hold after the pass ``name``.
    """
    for ours, theirs in ((program.in_avals, original.in_avals), (program.out_avals, original.out_avals)):
        if list(map(_kind, ours)) != list(map(_kind, theirs)):
            raise _broken(name, "the program has another signature")
    try:
        check(program)
    except ValueError as error:
        raise InvariantError(f"after the pass {name!r}, {error}") from None
