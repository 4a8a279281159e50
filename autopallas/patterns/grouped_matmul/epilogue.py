"""Finds the epilogue of a product: what a program does with each of its elements alone, such as an activation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from autopallas.compat import Var
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.extract import closed, copied, nodes_between
from autopallas.kernels.grouped_matmul.site import GroupedMatmulSite
from autopallas.patterns.expressions import Scope, operation
from autopallas.patterns.match import Match, Mismatch
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Input, Instruction, Score, parameters

__all__ = ["with_epilogue"]

_LONGEST = 40


def with_epilogue(graph: Graph, match: Match, alive: frozenset[int]) -> Match:
    """Returns a grouped matmul together with its epilogue, where it has one.

    The epilogue reads only the product and known scalars, and nothing else reads the product. The longest epilogue is
    taken that ends in a single floating-point value.
    """
    (node,) = match.equations
    found: list[Node] = []
    longest = 0
    for step in _elementwise(graph, node, alive):
        found.append(step)
        if _encloses(graph, [node, *found[:-1]], found, alive):
            if jnp.issubdtype(graph.dtype(step.outputs[0]), jnp.floating):
                longest = len(found)
    if not longest:
        return match
    (product,), (result,) = node.outputs, found[longest - 1].outputs
    nodes, captured = nodes_between(graph, [product], [result])
    if captured:
        return match
    inputs = [Var(graph.avals[number]) for number in match.operands]
    made = {product: Var(graph.avals[product])}
    equations = [node.equation.replace(invars=inputs, outvars=[made[product]]), *copied(graph, nodes, made)]
    site = match.site
    assert isinstance(site, GroupedMatmulSite)
    return replace(
        match,
        site=replace(site, epilogue=_program(graph, product, found[:longest])),
        results=(result,),
        equations=(node, *found[:longest]),
        original=closed(inputs, [made[result]], equations),
    )


def _elementwise(graph: Graph, node: Node, alive: frozenset[int]) -> Iterator[Node]:
    """Yields the nodes after a product that are computed from it and from known scalars alone, element by element."""
    scope = Scope(graph)
    (product,) = node.outputs
    shape, inside = graph.shape(product), {product}
    waiting = _users(graph, product, alive)
    while waiting and len(inside) <= _LONGEST:
        number = min(waiting)  # operands before results
        step = waiting.pop(number)
        if step.body is not node.body or step.equation.effects or len(step.outputs) != 1 or number in inside:
            continue
        if step.name not in ELEMENTWISE and not is_elementwise_call(step.equation) or graph.shape(number) != shape:
            continue
        if any(i not in inside and scope.number(scope.space.full(i)) is None for i in step.inputs):
            continue
        try:
            hash(parameters(operation(step)[1]))
        except (Mismatch, TypeError):
            continue
        inside.add(number)
        waiting |= _users(graph, number, alive)
        yield step


def _users(graph: Graph, number: int, alive: frozenset[int]) -> dict[int, Node]:
    """Returns the nodes that read a value, by the number of their first result."""
    return {
        user.outputs[0]: user for user in graph.users[number] if user.outputs and not alive.isdisjoint(user.outputs)
    }


def _encloses(graph: Graph, nodes: list[Node], readers: list[Node], alive: frozenset[int]) -> bool:
    """Returns whether nothing else reads what the nodes compute."""
    known = {id(reader) for reader in readers}
    for node in nodes:
        (number,) = node.outputs
        others = (u for u in graph.users[number] if id(u) not in known)
        if number in graph.returned or any(u.equation.effects or not alive.isdisjoint(u.outputs) for u in others):
            return False
    return True


def _program(graph: Graph, product: int, steps: list[Node]) -> ElementwiseProgram:
    scope = Scope(graph)
    inputs: dict[Input, None] = {Score(graph.dtype(product)): None}
    registers: dict[int, Input] = {product: Score(graph.dtype(product))}
    for step in steps:
        for number in step.inputs:
            if number not in registers and graph.definitions.get(number) not in steps:
                value, dtype = scope.number(scope.space.full(number)), graph.dtype(number)
                assert value is not None
                kind = int if dtype.kind in "iu" else bool if dtype.kind == "b" else float
                registers[number] = Constant(kind(value), dtype)
                inputs.setdefault(registers[number])
    places = {value: i for i, value in enumerate(inputs)}
    numbers = {number: places[value] for number, value in registers.items()}
    instructions = []
    for step in steps:
        primitive, params = operation(step)
        (number,) = step.outputs
        arguments = tuple(numbers[i] for i in step.inputs)
        instructions.append(Instruction(primitive, parameters(params), arguments, np.dtype(graph.dtype(number))))
        numbers[number] = len(inputs) + len(instructions) - 1
    return ElementwiseProgram(tuple(inputs), tuple(instructions), numbers[steps[-1].outputs[0]])
