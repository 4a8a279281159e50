"""The site of a part of a program that is known to be a sum over experts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import Var
from autopallas.graph import Graph, flatten
from autopallas.graph.extract import jaxpr_of, nodes_between
from autopallas.kernels.grouped_matmul.experts import ExpertsSite, Gathered, Pointwise, Prelude, Product, Step
from autopallas.kernels.layout import Operand, View
from autopallas.patterns.experts_loops import loop_at, rolled
from autopallas.patterns.experts_reading import Reading, read
from autopallas.patterns.experts_refusals import DENSE
from autopallas.patterns.experts_slots import Slots
from autopallas.patterns.match import Mismatch

__all__ = ["NoMixture", "site_of"]


class NoMixture(Mismatch):
    """A loop, or a sum, of something else."""


def site_of(program: Any, loops: bool, outside: Graph, operands: Sequence[int]) -> ExpertsSite:
    """The site that computes what a jaxpr from ``operands`` of a graph to a sum over experts computes."""
    graph, root = _opened(program, outside, operands)
    if loops:
        loop = loop_at(graph, root)
        if loop is None:
            raise NoMixture(f"{DENSE}, and it cannot be read by itself")
        graph, root = _opened(rolled(graph, root, loop), outside, operands)
    reading, slots, seen = read(graph, root), 0, not loops
    if reading is not None and reading.slots is not None:
        seen = False
        slots = reading.scope.space.extent(reading.slots.slot)
        graph, root, weights = _weighted(graph, root, reading.slots)
        reading = read(graph, root, weights)
    if reading is None or reading.slots is not None:
        raise NoMixture(f"{DENSE}, and it cannot be read by itself")
    space = reading.scope.space
    labels: dict[int, int] = {}

    def named(atoms: Sequence[int]) -> tuple[int, ...]:
        return tuple(labels.setdefault(x, len(labels)) for x in space.resolve(atoms))

    def written(view: View) -> View:
        return tuple((offset, named(atoms)) for offset, atoms in view)

    def operand(source: Operand) -> Operand:
        return Operand(source.position, written(source.view))

    def step(given: Step) -> Step:
        match given:
            case Gathered():
                return Gathered(operand(given.source), named(given.labels))
            case Pointwise():
                return Pointwise(given.program, given.arguments, named(given.labels))
            case Product():
                weights, inner, outer = operand(given.weights), named(given.inner), named(given.labels)
                return Product(given.rows, weights, inner, outer, given.dtype, given.precision)
            case _:
                return given

    tokens, expert = named(reading.tokens), named(reading.expert)
    choices = tuple((operand(source), named(several)) for source, several in reading.choices)
    steps = tuple(map(step, reading.steps))
    result = written(space.view(reading.result.view))
    return ExpertsSite(
        sizes=tuple(space.sizes[atom] for atom in labels),
        token_labels=tokens,
        expert_labels=expert,
        prelude=_prelude(graph, reading, root if seen else None),
        choices=choices,
        steps=steps,
        result=result,
        result_dtype=graph.dtype(reading.result.value),
        types=tuple(graph.dtype(number) for number in reading.arrays),
        slots=slots,
        products=tuple(map(written, reading.between.values())) if seen else (),
    )


def _part(program: Any, outside: Graph, operands: Sequence[int]) -> Graph:
    """The graph of a program whose inputs are values of another one."""
    graph = Graph(flatten(program))
    graph.steps = outside.steps
    numbers = (graph.numbers[graph.root][v] for v in graph.root.invars)
    graph.outside.update((number, (outside, own)) for number, own in zip(numbers, operands, strict=True))
    return graph


def _opened(program: Any, outside: Graph, operands: Sequence[int]) -> tuple[Graph, int]:
    """The graph of such a program with one result, and the number of that."""
    graph = _part(program, outside, operands)
    (result,) = graph.root.outvars
    assert isinstance(result, Var)
    return graph, graph.numbers[graph.root][result]


def _weighted(graph: Graph, root: int, slots: Slots) -> tuple[Graph, int, int]:
    """The same program with what an expert's slots are combined with added up: (graph, result, that sum)."""
    axes = tuple(d for d, (_, atoms) in enumerate(slots.combine.view) if set(atoms) & set(slots.slot))
    if any(slots.combine.view[d][1] != slots.slot for d in axes):
        raise Mismatch(f"{DENSE}, and slots have no axis of their own")
    inputs = [graph.numbers[graph.root][v] for v in graph.root.invars]
    results = [root, slots.combine.value]
    nodes, free = nodes_between(graph, inputs, results)
    if free:
        raise Mismatch(f"{DENSE}, and a captured array is read")
    run = compat.jaxpr_as_fun(jaxpr_of(graph, nodes, inputs, results))

    def function(*operands: Any) -> Any:
        out, combine = run(*operands)
        return out, lax.reduce(combine, np.zeros((), combine.dtype), lax.add, axes)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in graph.root.invars]
    extended = Graph(flatten(compat.make_jaxpr(function, *avals)))
    extended.steps = graph.steps
    extended.outside.update(
        (extended.numbers[extended.root][new], graph.outside[graph.numbers[graph.root][old]])
        for new, old in zip(extended.root.invars, graph.root.invars, strict=True)
    )
    out, weights = (extended.numbers[extended.root][v] for v in extended.root.outvars if isinstance(v, Var))
    return extended, out, weights


def _prelude(graph: Graph, reading: Reading, root: int | None) -> Prelude:
    """The part of a program that gives the arrays that are read; with a witness where that is to give ``root`` too."""
    inputs = [graph.numbers[graph.root][v] for v in graph.root.invars]
    nodes, free = nodes_between(graph, inputs, reading.arrays)
    if free or any(number in graph.literals for number in reading.arrays):
        raise Mismatch(f"{DENSE}, and a captured array is read")
    jaxpr = jaxpr_of(graph, nodes, inputs, reading.arrays)
    places = {number: i for i, number in enumerate(inputs)}
    lines: list[Hashable] = []
    reads: dict[int, frozenset[int]] = {number: frozenset((i,)) for i, number in enumerate(inputs)}
    for node in nodes:
        own: frozenset[int] = frozenset().union(*(reads.get(i, frozenset()) for i in node.inputs))
        reads.update(dict.fromkeys(node.outputs, own))
        key = graph.key(node.equation, (), ())
        literals = tuple(repr(graph.literals[i]) if i in graph.literals else places[i] for i in node.inputs)
        lines.append((key if key is not None else id(node.equation), literals))
        places.update({number: len(places) + i for i, number in enumerate(node.outputs)})
    types = tuple((graph.shape(number), str(graph.dtype(number))) for number in inputs)
    key = (types, tuple(lines), tuple(places[number] for number in reading.arrays))
    witness = None
    if root is not None:
        results = [root, *reading.arrays, *reading.between]
        nodes, _ = nodes_between(graph, inputs, results)
        witness = jaxpr_of(graph, nodes, inputs, results)
    return Prelude(key, jaxpr, tuple(reads[number] for number in reading.arrays), witness=witness)
