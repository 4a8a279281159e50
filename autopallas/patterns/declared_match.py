"""Builds a match from the values of a declared operation's site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopallas import jaxprs
from autopallas.graph import Graph, Node, Ref
from autopallas.graph.extract import jaxpr_of, nodes_between
from autopallas.graph.labels import Atom
from autopallas.patterns.match import Match
from autopallas.sites.declared import DeclaredSite
from autopallas.sites.index_notation import Operand, View
from autopallas.sites.spec import Spec

__all__ = ["declared_match"]


def declared_match(
    graph: Graph,
    op: str,
    form: Spec,
    result: Node,
    operands: Mapping[str, Ref | None],
    letters: Mapping[str, Sequence[Atom]],
    dimensions: Sequence[Sequence[Atom]],
    sizes: Mapping[Atom, int],
    fixed: Mapping[str, Mapping[Atom, int]] | None = None,
) -> Match | None:
    """Builds the forward match of a place that computes a declared operation; None where it reads other values too.

    Args:
      graph: the program.
      op: the operation.
      form: its spec; the sizes of letters are filled in.
      result: the node that gives the result.
      operands: how each canonical operand is read, by its name; None for one that the site lacks.
      letters: the labels of each letter; two letters may have the same ones.
      dimensions: the labels of each axis of the result.
      sizes: the sizes of the labels.
      fixed: by operand, the labels of which it has one index alone, and that index.
    """
    given = {name: ref for name, ref in operands.items() if ref is not None}
    values = list(dict.fromkeys(ref.value for ref in given.values()))
    alone: Mapping[str, Mapping[Atom, int]] = fixed or {}
    every = [*(atom for own in letters.values() for atom in own), *(atom for own in alone.values() for atom in own)]
    number = {atom: i for i, atom in enumerate(dict.fromkeys(every))}

    def view(dimensions: Sequence[tuple[int, Sequence[Atom]]]) -> View:
        return tuple((offset, tuple(number[atom] for atom in own)) for offset, own in dimensions)

    def operand(name: str, ref: Ref) -> Operand:
        places = tuple((number[atom], index) for atom, index in alone.get(name, {}).items())
        return Operand(values.index(ref.value), view(ref.view), places)

    nodes, free = nodes_between(graph, values, [result.outputs[0]])
    if free or any(node.equation.effects for node in nodes):
        return None
    return Match(
        op=op,
        site=DeclaredSite(
            op=op,
            form=form,
            sizes=tuple(sizes[atom] for atom in number),
            operands=tuple((name, operand(name, ref)) for name, ref in given.items()),
            letters=tuple((letter, tuple(number[atom] for atom in own)) for letter, own in letters.items()),
            result=view([(0, own) for own in dimensions]),
            uses=tuple(range(len(values))),
        ),
        direction="forward",
        operands=tuple(values),
        results=(result.outputs[0],),
        equations=tuple(nodes),
        original=jaxpr_of(graph, nodes, values, [result.outputs[0]]),
        body=result.body,
        location=jaxprs.location(result.equation),
    )
