"""Takes the addition before a normalisation into its site: the kernel then reads both terms, and gives their sum too.

What adds up the cotangents of the sum in the program's backward goes with it: the cotangent from the sum's other uses
and that from the normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp

from autopallas.compat import ClosedJaxpr, Var
from autopallas.graph import Graph, Node
from autopallas.graph.edit import surviving
from autopallas.graph.extract import closed, copied
from autopallas.patterns.match import BackwardMatch, Match
from autopallas.sites.declared import DeclaredSite
from autopallas.sites.index_notation import Operand
from autopallas.sites.spec import Spec

__all__ = ["with_residual"]

_LONGEST = 32
"""Longest chain of additions in which the sum of a value's cotangents is looked for."""


def with_residual(graph: Graph, match: Match, given: Set[int], still: Set[int]) -> Match:
    """Returns a site with the addition that gives its x, or the site as it is where that cannot be part of it.

    Args:
      graph: the program.
      match: a site of an operation with the operands x and residual and the further result sum.
      given: the values that sites give, which no other site may give too.
      still: the values that the program computes beside its sites.
    """
    site = match.site
    assert isinstance(site, DeclaredSite)
    found = _addition(graph, match, site)
    if found is None or found.sum in given:
        return match
    bodies = tuple(body for body in match.sources if graph.positions[body].keys() >= {*found.terms})
    places = [place for place, use in enumerate(site.uses) if use != found.value]
    if match.body not in bodies or any(own.position not in places for own in match.spread):
        return match
    backwards = []
    for backward in match.backwards:
        whole = _backward(graph, site, backward, found, places, given, still)
        if whole is None:
            return match
        backwards.append(whole)
    results = (*match.results, found.sum) if backwards or _is_read(graph, match, found) else match.results
    own = dict(site.operands)["x"]
    dtype = graph.dtype(found.sum)
    second = max(site.uses) + 1
    form: Callable[..., Spec] = partial(replace, site.form)
    wider = replace(
        site,
        form=form(residual_dtype=dtype, sum_dtype=dtype if len(results) > 1 else None),
        operands=(*site.operands, ("residual", Operand(second, own.view))),
        uses=(found.value, second, *(site.uses[place] for place in places)),
        further=(("sum", own.view),) if len(results) > 1 else (),
    )
    return replace(
        match,
        site=wider,
        operands=(*found.terms, *(match.operands[place] for place in places)),
        spread=tuple(own._replace(position=2 + places.index(own.position)) for own in match.spread),
        results=results,
        equations=(found.node, *match.equations),
        original=_original(graph, match, found, places, len(results) > 1),
        backwards=tuple(backwards),
        homes=bodies if match.homes else (),
    )


class _Addition(NamedTuple):
    """An addition: its node, its terms, their sum, and the number of the sum among the values of the site."""

    node: Node
    terms: tuple[int, int]
    sum: int
    value: int


def _addition(graph: Graph, match: Match, site: DeclaredSite) -> _Addition | None:
    """Returns the addition of two arrays that gives x as a whole, if one does."""
    operands = dict(site.operands)
    x = operands["x"]
    number = match.operands[site.uses.index(x.position)]
    node = graph.definitions.get(number)
    if node is None or node.name != "add" or node.body is not match.body or "residual" in operands:
        return None
    first, second = node.inputs
    kinds = {(graph.shape(n), graph.dtype(n)) for n in (number, first, second)}
    if first == second or len(kinds) > 1 or not jnp.issubdtype(graph.dtype(number), jnp.floating):
        return None
    if any(n in graph.literals or n in match.operands or _is_made_larger(graph, n) for n in node.inputs):
        return None
    if match.original.consts or any(other.position == x.position for name, other in operands.items() if name != "x"):
        return None
    labels = [label for _, own in x.view for label in own]
    every = {label for _, own in site.result for label in own}
    extents = tuple(math.prod(site.sizes[label] for label in own) for _, own in x.view)
    whole = not x.fixed and extents == graph.shape(number) and not any(offset for offset, _ in x.view)
    if not whole or len(set(labels)) != len(labels) or set(labels) != every:
        return None
    return _Addition(node, (first, second), number, x.position)


def _is_made_larger(graph: Graph, number: int) -> bool:
    """Returns whether a value is a repeated or widened one, which takes more memory than what it is made of."""
    node = graph.definitions.get(number)
    if node is None or node.name not in ("broadcast_in_dim", "convert_element_type"):
        return False
    return graph.avals[node.inputs[0]].size * graph.dtype(node.inputs[0]).itemsize < (
        graph.avals[number].size * graph.dtype(number).itemsize
    )


def _is_read(graph: Graph, match: Match, found: _Addition) -> bool:
    """Returns whether the program needs the sum elsewhere than in the site."""
    own, alive = {id(node) for node in match.equations}, surviving(graph)
    users = (node for node in graph.users[found.sum] if id(node) not in own)
    return found.sum in graph.returned or any(n.equation.effects or not alive.isdisjoint(n.outputs) for n in users)


def _original(graph: Graph, match: Match, found: _Addition, places: Sequence[int], gives: bool) -> ClosedJaxpr:
    """Returns the original from both terms and the other operands to the result, and the sum if the site gives it."""
    jaxpr = match.original.jaxpr
    terms = [Var(graph.avals[number]) for number in found.terms]
    known = dict(zip(found.terms, terms, strict=True))
    equations = copied(graph, [found.node], known)
    total = known[found.sum]
    others = [jaxpr.invars[place] for place in places]
    names = {v: total for place, v in enumerate(jaxpr.invars) if place not in places}
    for equation in jaxpr.eqns:
        read = [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in equation.invars]
        equations.append(equation.replace(invars=read))
    return closed([*terms, *others], [*jaxpr.outvars, *([total] if gives else [])], equations)


def _backward(
    graph: Graph,
    site: DeclaredSite,
    backward: BackwardMatch,
    found: _Addition,
    places: Sequence[int],
    given: Set[int],
    still: Set[int],
) -> BackwardMatch | None:
    """Returns a backward that also adds the cotangent from the sum's other uses, if the program adds it up so."""
    own = [number for place, number in backward.gradients if site.uses[place] == found.value]
    known = graph.positions[backward.body]
    added = _added_up(graph, own, still) if own and backward.mapped is None else None
    if added is None or added[0] in given or not known.keys() >= {*added, *found.terms} or known[added[0]][0] < 0:
        return None
    total, other = added
    kept = [(2 + places.index(place), number) for place, number in backward.gradients if place in places]
    return replace(backward, gradients=((0, total), *kept), further=(other,))


def _added_up(graph: Graph, own: Sequence[int], still: Set[int]) -> tuple[int, int] | None:
    """Returns a sum of some values and of one more, with that one, where nothing else reads its parts.

    A value that is the cotangent of several uses is part of the sum as often.
    """

    def readers(number: int) -> list[Node]:
        return [n for n in graph.users[number] if n.equation.effects or not still.isdisjoint(n.outputs)]

    at = own[0]
    for _ in range(_LONGEST):
        users = readers(at)
        if len(users) != 1 or users[0].name != "add_any" or at in graph.returned:
            return None
        at = users[0].outputs[0]
        terms, sums = _terms(graph, at, own)
        others = [number for number in terms if number not in own]
        inside = (*own, *(number for number in sums if number != at))
        within = all(n.outputs[0] in sums for number in inside for n in readers(number))
        if len(terms) == len(own) + 1 and len(others) == 1 and within and graph.returned.isdisjoint(inside):
            return (at, others[0]) if terms[own[0]] == terms[others[0]] == 1 else None
    return None


def _terms(graph: Graph, number: int, own: Sequence[int]) -> tuple[dict[int, int], list[int]]:
    """Returns how often each term is part of a sum, and the sums that are taken apart: it, and parts with ``own``."""
    terms: dict[int, int] = {}
    sums = [number]
    for at in sums:
        for part in graph.definitions[at].inputs if len(sums) <= _LONGEST else ():
            if part not in own and _holds(graph, part, own):
                sums.append(part)
            else:
                terms[part] = terms.get(part, 0) + 1
    return terms, sums


def _holds(graph: Graph, number: int, own: Sequence[int]) -> bool:
    """Returns whether a value is a sum of cotangents with one of ``own`` among its terms."""
    todo, seen, first = [number], 0, min(own)
    while todo and seen < _LONGEST:
        seen += 1
        at = todo.pop()
        if at in own:
            return True
        if at > first and graph.name(at) == "add_any":
            todo += graph.definitions[at].inputs
    return False
