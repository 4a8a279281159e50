"""Extracts a part of a graph as a jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, ShapedArray, Var
from autopallas.graph.equation_keys import Node
from autopallas.graph.numbering import Graph

__all__ = ["closed", "copied", "jaxpr_of", "nodes_between", "with_further_inputs"]


def nodes_between(graph: Graph, operands: Sequence[int], results: Sequence[int]) -> tuple[list[Node], list[int]]:
    """Returns the nodes that compute ``results`` from ``operands``, in order, and the further values that they read.

    Captured arrays count as values read; literals do not.
    """
    given = set(operands)
    found: dict[int, Node] = {}
    free: dict[int, None] = {}
    todo = list(results)
    while todo:
        number = todo.pop()
        if number in given or number in found or number in graph.literals:
            continue
        node = graph.definitions.get(number)
        if node is None:
            free[number] = None
            continue
        # An earlier loop may give some results of a loop; those do not tell where this loop stands.
        found.update((output, node) for output in node.outputs if graph.definitions.get(output) is node)
        todo += node.inputs
    graph.steps.spend(len(found))
    ordered = {id(node): node for _, node in sorted(found.items())}
    return list(ordered.values()), list(free)


def jaxpr_of(graph: Graph, nodes: Sequence[Node], operands: Sequence[int], results: Sequence[int]) -> ClosedJaxpr:
    """Returns a closed jaxpr from ``operands`` to ``results``, some of which may be literals, by way of ``nodes``.

    If operands have the same number, the first one is read.
    """
    inputs = [Var(graph.avals[number]) for number in operands]
    variables: dict[int, Var] = {}
    for number, variable in zip(operands, inputs, strict=True):
        variables.setdefault(number, variable)
    equations = copied(graph, nodes, variables)
    given = [variables[n] if n in variables else Literal(graph.literals[n], graph.avals[n]) for n in results]
    return closed(inputs, given, equations)


def copied(graph: Graph, nodes: Sequence[Node], variables: dict[int, Var]) -> list[JaxprEqn]:
    """Copies the equations of some nodes to ``variables``, and adds their results there."""
    equations = []
    for node in nodes:
        inputs = [
            Literal(graph.literals[number], graph.avals[number]) if number in graph.literals else variables[number]
            for number in node.inputs
        ]
        outputs = [Var(graph.avals[number]) for number in node.outputs]
        for number, variable in zip(node.outputs, outputs, strict=True):
            variables.setdefault(number, variable)
        equations.append(node.equation.replace(invars=inputs, outvars=outputs))
    return equations


def closed(inputs: Sequence[Var], results: Sequence[JaxprAtom], equations: Sequence[JaxprEqn]) -> ClosedJaxpr:
    """Returns a closed jaxpr without constants, and without casts that are bound in a ``shard_map`` alone."""
    info = jaxprs.debug_info("autopallas", len(inputs), len(results))
    found = ClosedJaxpr(compat.new_jaxpr([], inputs, results, equations, frozenset(), info), [])
    if not array_types.varying_axes([atom.aval for atom in (*inputs, *results)]):
        return found
    return cast("ClosedJaxpr", jaxprs.without_casts(found))


def with_further_inputs(program: ClosedJaxpr, types: Sequence[ShapedArray]) -> ClosedJaxpr:
    """Returns a closed jaxpr without constants with further inputs, which it does not read."""
    if not types:
        return program
    jaxpr, _ = jaxprs.open_jaxpr(program)
    return closed([*jaxpr.invars, *map(Var, types)], jaxpr.outvars, jaxpr.eqns)
