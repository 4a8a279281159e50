"""Builds the site of a part of a program that is known to be a sum over experts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprEqn, JaxprLike, Literal, Var
from autopallas.errors import one_line
from autopallas.graph import Graph, Space, flatten
from autopallas.graph.custom_rules import is_elementwise_call, rule_key
from autopallas.graph.extract import jaxpr_of, nodes_between
from autopallas.graph.keys import literal_key
from autopallas.kernels.mixture_of_experts.site import ExpertsSite
from autopallas.kernels.mixture_of_experts.steps import Gathered, Pointwise, Prelude, Product, Step
from autopallas.patterns.advice import CAPTURED, CHOOSE_FEW
from autopallas.patterns.match import Mismatch
from autopallas.patterns.mixture_of_experts.loops import loop_at, rolled
from autopallas.patterns.mixture_of_experts.readers import read
from autopallas.patterns.mixture_of_experts.reading import PickedRows, Reading, SlotRows
from autopallas.patterns.mixture_of_experts.refusals import DENSE
from autopallas.patterns.mixture_of_experts.signs import Answer, Outside
from autopallas.patterns.mixture_of_experts.slot_rows import RowsOfSlots
from autopallas.patterns.mixture_of_experts.slots import Slots
from autopallas.sites.index_notation import Operand, View

__all__ = ["NoMixture", "Sites"]

_GATHERS = ("dimension_numbers", "slice_sizes", "unique_indices", "indices_are_sorted", "mode", "fill_value")
_MOST = 3
"""Most sites of one form with which another one is compared."""


class NoMixture(Mismatch):
    """Reports that a loop or a sum is no mixture after all."""


class Sites:
    """Holds the sites of a program.

    Equal layers have equal sites: the first one is read, and the others are compared with it.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._known: dict[Hashable, list[tuple[Sequence[Answer], ExpertsSite, ClosedJaxpr]]] = {}
        """Per form, the answers, sites and programs; the programs are kept alive since forms refer to them by
        identity."""

    def of(self, program: ClosedJaxpr, loops: bool, operands: Sequence[int]) -> ExpertsSite:
        """Returns the site that computes what a jaxpr from ``operands`` to a sum over experts computes."""
        outside = Outside(self._graph, operands)
        known = self._known.setdefault((loops, self._form(program)), [])
        for answers, site, _ in known[:_MOST]:
            if outside.answers_alike(answers):
                return site
        outside.answers.clear()
        site = _site_of(program, loops, outside)
        known.append((outside.answers, site, program))
        return site

    def _form(self, program: JaxprLike) -> Hashable:
        """Returns a key that is equal for programs that do the same, in the same order."""
        jaxpr, constants = jaxprs.open_jaxpr(program)
        self._graph.steps.spend(len(jaxpr.eqns))
        if constants:
            return id(program)
        places: dict[Var, int] = {v: i for i, v in enumerate(jaxpr.invars)}
        lines: list[Hashable] = [tuple((v.aval.shape, str(v.aval.dtype)) for v in jaxpr.invars)]
        for equation in jaxpr.eqns:
            read = tuple(literal_key(a) if isinstance(a, Literal) else places[a] for a in equation.invars)
            lines.append((self._does(equation), read))
            for v in equation.outvars:
                places[v] = len(places)
        results = (literal_key(a) if isinstance(a, Literal) else places[a] for a in jaxpr.outvars)
        return tuple(lines), tuple(results)

    def _does(self, equation: JaxprEqn) -> Hashable:
        """Returns a key that is equal for equations that do the same to other operands."""
        if is_elementwise_call(equation):
            return self._graph.key(equation, (), ()), rule_key(equation)
        bodies = jaxprs.bodies(equation)
        held = {parameter for parameter, _, _ in bodies}
        others = {name: value for name, value in equation.params.items() if name not in held}
        key = self._graph.key(equation.replace(params=others), (), ()) if bodies else self._graph.key(equation, (), ())
        return id(equation) if key is None else (key, tuple(self._form(body) for _, _, body in bodies))


def _site_of(program: ClosedJaxpr, loops: bool, outside: Outside) -> ExpertsSite:
    graph, root = _opened(program, outside)
    if loops:
        loop = loop_at(graph, root)
        if loop is None:
            raise NoMixture(f"{DENSE}, and it cannot be read by itself", advice=CHOOSE_FEW)
        try:
            over_experts = rolled(graph, root, loop)
        except NotImplementedError as error:  # JAX maps some equations, such as ragged products, along some axes only
            raise NoMixture(f"{DENSE}, and it cannot be read by itself: {one_line(error)}", advice=CHOOSE_FEW) from None
        graph, root = _opened(over_experts, outside)
    reading, slots, scattered, seen = read(graph, root), 0, False, not loops
    if reading is not None and reading.what != DENSE:
        seen = False
    if reading is not None and reading.slots is not None:
        seen = False
        slots = reading.scope.space.extent(reading.slots.slot)
        graph, root, weights = _weighted(graph, root, reading.slots, outside)
        reading = read(graph, root, weights)
    if reading is not None and reading.within:
        seen = False
        graph, root, known = _counted(graph, root, reading, outside)
        reading = read(graph, root, None, known)
    if reading is not None and reading.picked is not None:
        slots, scattered = reading.scope.space.extent(reading.picked.slot), True
        graph, root, picked = _picked(graph, root, reading.picked, reading.scope.space, outside)
        reading = read(graph, root, None, None, picked)
    if reading is None or reading.slots is not None or reading.within or reading.picked is not None:
        raise NoMixture(f"{DENSE}, and it cannot be read by itself", advice=CHOOSE_FEW)
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
        batch_labels=named(reading.examples),
        summed_labels=named(reading.summed),
        slots=slots,
        scattered=scattered,
        products=tuple(map(written, reading.between.values())) if seen else (),
    )


def _part(program: ClosedJaxpr, outside: Outside) -> Graph:
    """Builds the graph of a program whose inputs are values of another program."""
    graph = Graph(flatten(program))
    graph.steps = outside.graph.steps
    graph.outside.update((graph.numbers[graph.root][v], (outside, i)) for i, v in enumerate(graph.root.invars))
    return graph


def _opened(program: ClosedJaxpr, outside: Outside) -> tuple[Graph, int]:
    """Builds the graph of such a program with one result; returns it with the number of that result."""
    graph = _part(program, outside)
    (result,) = graph.root.outvars
    assert isinstance(result, Var)
    return graph, graph.numbers[graph.root][result]


def _weighted(graph: Graph, root: int, slots: Slots, outside: Outside) -> tuple[Graph, int, int]:
    """Extends a program by the sum of the weights with which an expert's slots are combined: (graph, result, sum)."""
    axes = tuple(d for d, (_, atoms) in enumerate(slots.combine.view) if set(atoms) & set(slots.slot))
    if any(slots.combine.view[d][1] != slots.slot for d in axes):
        raise Mismatch(f"{DENSE}, and slots have no axis of their own", advice=CHOOSE_FEW)

    def added(combine: jax.Array) -> tuple[jax.Array, ...]:
        return (lax.reduce(combine, np.zeros((), combine.dtype), lax.add, axes),)

    extended, (out, _, weights) = _extended(graph, [root, slots.combine.value], added, outside)
    return extended, out, weights


def _counted(graph: Graph, root: int, reading: Reading, outside: Outside) -> tuple[Graph, int, dict[int, int]]:
    """Extends a program by the experts of rows in intervals: (graph, result, {number of ends: number of the experts}).

    A row's expert is the number of intervals that end before it: no two overlap, and the first one begins at zero.
    """
    found = {within.ends.value: within for within in reading.within}

    def counted(*ends: jax.Array) -> tuple[jax.Array, ...]:
        experts = []
        for last, within in zip(ends, found.values(), strict=True):
            last = jnp.moveaxis(last, within.along(reading.scope.space), -1)
            rows = jnp.arange(within.dimension(graph)[1], dtype=last.dtype)
            experts.append(jnp.sum(last[..., None, :] <= rows[:, None], -1, dtype=jnp.int32))
        return tuple(experts)

    extended, (out, *others) = _extended(graph, [root, *found], counted, outside)
    return extended, out, dict(zip(others[: len(found)], others[len(found) :], strict=True))


def _picked(graph: Graph, root: int, rows: SlotRows, space: Space, outside: Outside) -> tuple[Graph, int, PickedRows]:
    """Extends a program by values that describe the rows it picks from slots: (graph, result, those values)."""
    leaves, node = list(rows.leaves), graph.definitions[root]
    picked, main = RowsOfSlots(rows, space), rows.pick.beside
    parts = () if main is None else graph.definitions[node.inputs[0]].inputs
    beside = [part for i, part in enumerate(parts) if i != main]
    params = {name: value for name, value in node.params.items() if name in _GATHERS}

    def computed(indices: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        index = picked.index(indices)
        own = [picked.of(a, rows.leaves[n], index) for n, a in zip(leaves, arrays[: len(leaves)], strict=True)]
        if main is None:
            return index.expert, index.inside, index.reached, *own
        joined = [*arrays[len(leaves) :]]
        joined.insert(main, jnp.zeros(graph.shape(parts[main]), graph.dtype(parts[main])))
        axis = graph.definitions[node.inputs[0]].params["dimension"]
        other = lax.gather(lax.concatenate(joined, axis), indices, **params)
        return index.expert, index.inside, index.reached, *own, other

    results = [root, node.inputs[1], *leaves, *beside]
    extended, (out, _, *others) = _extended(graph, results, computed, outside)
    arrays, (expert, inside, reached, *given) = others[: len(leaves)], others[len(results) - 2 :]
    other = None if main is None else given.pop()
    return extended, out, PickedRows(expert, inside, reached, other, dict(zip(arrays, given, strict=True)))


def _extended(
    graph: Graph, results: Sequence[int], function: Callable[..., tuple[jax.Array, ...]], outside: Outside
) -> tuple[Graph, list[int]]:
    """Extends a program by the results of a function of all its ``results`` but the first.

    Returns:
      The graph, and the numbers of the results and of the function's results in it.
    """
    inputs = [graph.numbers[graph.root][v] for v in graph.root.invars]
    nodes, free = nodes_between(graph, inputs, results)
    if free:
        raise Mismatch(f"{DENSE}, and a captured array is read", advice=CAPTURED)
    run = compat.jaxpr_as_fun(jaxpr_of(graph, nodes, inputs, results))

    def extended(*operands: jax.Array) -> tuple[jax.Array, ...]:
        given = run(*operands)
        return *given, *function(*given[1:])

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in graph.root.invars]
    found = _part(compat.make_jaxpr(extended, *avals), outside)
    if not all(isinstance(v, Var) for v in found.root.outvars):
        raise Mismatch(f"{DENSE}, and a captured array is read", advice=CAPTURED)
    return found, [found.numbers[found.root][v] for v in found.root.outvars if isinstance(v, Var)]


def _literal(graph: Graph, number: int) -> Hashable:
    """Returns the key of a literal."""
    return literal_key(Literal(graph.literals[number], graph.avals[number]))


def _prelude(graph: Graph, reading: Reading, root: int | None) -> Prelude:
    """Returns the part of a program that computes the arrays that are read; with a witness if it has to compute
    ``root`` too."""
    inputs = [graph.numbers[graph.root][v] for v in graph.root.invars]
    nodes, free = nodes_between(graph, inputs, reading.arrays)
    if free or any(number in graph.literals for number in reading.arrays):
        raise Mismatch(f"{DENSE}, and a captured array is read", advice=CAPTURED)
    jaxpr = jaxpr_of(graph, nodes, inputs, reading.arrays)
    places = {number: i for i, number in enumerate(inputs)}
    lines: list[Hashable] = []
    reads: dict[int, frozenset[int]] = {number: frozenset((i,)) for i, number in enumerate(inputs)}
    for node in nodes:
        own: frozenset[int] = frozenset().union(*(reads.get(i, frozenset()) for i in node.inputs))
        reads.update(dict.fromkeys(node.outputs, own))
        key = graph.key(node.equation, (), ())
        read = tuple(_literal(graph, i) if i in graph.literals else places[i] for i in node.inputs)
        lines.append((node.equation if key is None else key, rule_key(node.equation), read))
        places.update({number: len(places) + i for i, number in enumerate(node.outputs)})
    types = tuple((graph.shape(number), str(graph.dtype(number))) for number in inputs)
    key = (types, tuple(lines), tuple(places[number] for number in reading.arrays))
    witness = None
    if root is not None:
        results = [root, *reading.arrays, *reading.between]
        nodes, _ = nodes_between(graph, inputs, results)
        witness = jaxpr_of(graph, nodes, inputs, results)
    return Prelude(key, jaxpr, tuple(reads[number] for number in reading.arrays), witness=witness)
