"""Loops that index arrays at their own step, as loops that are given slices and give results.

Under ``jax.grad`` a loop that reads ``x[i]`` adds to the whole of x's gradient in each step, zero but for one slice, so
that T steps cost T arrays of T slices.  So they do where a loop sets ``results.at[i]``: of the results' gradient each
step reads a slice and sets it to zero, for which XLA copies the array, as it does where a step sets ``x[i + 1]`` and
stacks the ``x[i]`` that it read.  Here each step gives its slice alone, and the arrays are put together after the loop.
What a loop writes at its own step, and reads there or a few steps later, goes the same way: the loop carries the slices
that later steps read in place of the array.  Which arrays these are, and where their slices lie, is told by
:mod:`autopallas.graph.indexed_arrays`; any other array stays what the loop carries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph import Graph, Node, flatten
from autopallas.graph.array_slices import Place, integers_of, plus_slices, slices_at, with_axis, with_slices
from autopallas.graph.equal_programs import same_programs
from autopallas.graph.indexed_arrays import Action, IndexedArrays, Plan, Steps
from autopallas.graph.known_integers import Array, KnownIntegers
from autopallas.graph.loop_slices import is_zero
from autopallas.graph.program_digests import bits, digest
from autopallas.graph.tables import Table
from autopallas.kernels.respelling.bfloat16_bits import as_bits, with_dtype
from autopallas.kernels.respelling.plain_steps import at_a_time
from autopallas.kernels.respelling.spec import RespellingSpec
from autopallas.numerics.casts import is_floating

__all__ = [
    "IndexedLoop",
    "as_written",
    "chosen",
    "evaluated",
    "key_of",
    "loop_in",
    "loop_of",
    "results_of",
    "with_plan",
    "with_small_weights",
    "without_known_values",
]

_MOST_KNOWN = 2**16
"""Most integers, of all steps together, that are written into the program in place of being stacked."""
_ROUNDS = 8
"""How often a plan is made anew without the arrays that turned out to be neither sums nor tables."""


@dataclass(frozen=True, repr=False)
class IndexedLoop:
    """A loop, and what each array is that it carries.

    Attributes:
      key: equal for equal loops, which jaxprs are not.
      step: from constants, carried values and slices to carried values and results.
      constants, carried: how many of each there are; the rest are slices.
      length: the number of steps.
      reverse: whether the last slices come first.
      unroll: steps that are compiled as one.
      operands: per operand of the loop its position among the site's operands, or the value of a literal.
      zeros: positions of the loop's operands that are zero in each element.
      known: what is known of the site's operands that are integers, as (position, array).
      tables: (number of the carried value, how steps come to its slices).
      sums: (number of the carried value, the places of what is added to it).
    """

    key: str
    step: ClosedJaxpr = field(compare=False)
    constants: int
    carried: int
    length: int
    reverse: bool
    unroll: int
    operands: tuple[int | np.generic | np.ndarray, ...] = field(compare=False)
    zeros: frozenset[int] = field(compare=False)
    known: tuple[tuple[int, Array], ...] = field(compare=False)
    tables: tuple[tuple[int, Table], ...] = field(compare=False)
    sums: tuple[tuple[int, tuple[Place, ...]], ...] = field(compare=False)

    def __repr__(self) -> str:
        arrays = len(self.tables) + len(self.sums)
        return f"{self.length} steps, {arrays} of {self.carried} carried values by slices, {self.key}"

    @cached_property
    def plan(self) -> Plan:
        return self._found[0]

    @cached_property
    def reads(self) -> Mapping[int, int]:
        """By the positions of equations that read a constant at the step's own number, the number of the constant: each
        step is given its slice."""
        return self._found[1]

    @cached_property
    def numbers(self) -> Mapping[int, Array]:
        """By the numbers of results, the integers that all steps together give, where these are known."""
        return self._found[2]

    @cached_property
    def _found(self) -> tuple[Plan, dict[int, int], dict[int, Array]]:
        steps = self.steps
        constants = {v: i for i, v in enumerate(steps.inputs[: self.constants]) if getattr(v.aval, "shape", ())}
        candidates = frozenset(i for i, _ in (*self.tables, *self.sums))
        analysis = IndexedArrays(steps, candidates, frozenset(constants))
        plan, own, reads = analysis.plan(), tuple(range(self.length)), dict[int, int]()
        for position, place in analysis.reads.items():
            array = steps.equations[position].invars[0]
            if place.axis == 0 and place.positions == own and array.aval.shape[0] == self.length:
                reads[position] = constants[cast(Var, array)]
        numbers = {}
        for i, atom in enumerate(steps.outputs[self.carried :]):
            found = analysis.known.get(atom) if isinstance(atom, Var) else None
            if found is not None and found.size <= _MOST_KNOWN:
                numbers[i] = found
        return plan, reads, numbers

    @property
    def steps(self) -> Steps:
        """What all steps compute, and what is known of it."""
        jaxpr, _ = jaxprs.open_jaxpr(self.step)
        known = dict(self.known)
        given = [known.get(x) if isinstance(x, int) else np.asarray(x) for x in self.operands]
        given = [x if x is None or x.dtype.kind in "iub" else None for x in given]
        return Steps(
            jaxpr.eqns, jaxpr.invars, jaxpr.outvars, self.constants, self.carried, given, self.zeros, self.length,
            self.reverse,
        )  # fmt: skip

    def given(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the loop's operands of the site's."""
        return [operands[x] if isinstance(x, int) else jnp.asarray(x) for x in self.operands]

    def as_written(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the loop's results, as the program computes them."""
        run = compat.jaxpr_as_fun(self.step)
        ends, results = self.computed(
            operands, lambda constants, carried, slices: run(*constants, *carried, *slices), lambda _, first: first
        )
        return [*ends, *results]

    def computed(
        self,
        operands: Sequence[jax.Array],
        step: Callable[[Sequence[jax.Array], Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]],
        first: Callable[[int, jax.Array], jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns what the loop carries in the end, and what it stacks.

        Args:
          operands: the site's.
          step: from constants, carried values and slices to carried values and results.
          first: of the number of a carried value, and of the value itself, what the first step is given.
        """
        given = self.given(operands)
        last = self.constants + self.carried

        def one(carried: list[jax.Array], own: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            found = step(given[: self.constants], carried, own)
            return list(found[: self.carried]), list(found[self.carried :])

        begin = [first(i, x) for i, x in enumerate(given[self.constants : last])]
        found: tuple[list[jax.Array], list[jax.Array]] = lax.scan(
            one, begin, given[last:], self.length, self.reverse, unroll=self.unroll
        )
        return found

    def by_slices(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the same, from a loop that is given slices and gives slices."""
        given = self.given(operands)
        last = self.constants + self.carried
        first = given[self.constants : last]
        tables, sums = dict(self.tables), dict(self.sums)
        kept = [i for i in range(self.carried) if i not in tables and i not in sums]
        own = {i: slices_at(first[i], table.place(table.summed)) for i, table in tables.items()}
        read = {i: given[i] for i in self.reads.values()}
        rows = {i: _before(first[i], table) for i, table in tables.items()}

        def one(
            carried: tuple[list[jax.Array], dict[int, list[jax.Array]]],
            given_slices: tuple[dict[int, jax.Array], dict[int, jax.Array], list[jax.Array]],
        ) -> tuple[
            tuple[list[jax.Array], dict[int, list[jax.Array]]],
            tuple[dict[int, jax.Array], dict[int, list[jax.Array]], list[jax.Array]],
        ]:
            values, before = carried
            new, read, slices = given_slices
            at_hand = {i: _at_hand(new[i], before[i], table) for i, table in tables.items()}
            step = _Step(self, given[: self.constants], dict(zip(kept, values, strict=True)), at_hand, slices, read)
            after = step.rows()
            left = {i: list(after[i][: table.depth]) for i, table in tables.items()}
            written = {i: after[i][table.last] for i, table in tables.items()}
            # A compiler may stack bfloat16 by converting the whole stack in each step.
            return (step.ends(kept), left), jax.tree.map(as_bits, (written, step.added(), step.results()))

        (ends, left), (written, added, results) = lax.scan(
            one, ([first[i] for i in kept], rows), (own, read, given[last:]), self.length, self.reverse,
            unroll=at_a_time(self.unroll, self.length),
        )  # fmt: skip
        found = dict(zip(kept, ends, strict=True))
        for i, table in tables.items():
            found[i] = with_slices(first[i], table.place(table.last), with_dtype(written[i], first[i].dtype))
            for lag in range(table.last, 0, -1):
                put = with_slices if lag > table.summed else plus_slices
                found[i] = put(found[i], table.after(lag), left[i][lag - 1][None])
        for i, places in sums.items():
            found[i] = first[i]
            for place, slices in zip(places, added[i], strict=True):
                found[i] = plus_slices(found[i], place, with_dtype(slices, first[i].dtype))
        types = self.step.out_avals[self.carried :]
        computed = iter(results)
        stacks = [
            integers_of(self.numbers[i]) if i in self.numbers else with_dtype(next(computed), type_.dtype)
            for i, type_ in enumerate(types)
        ]
        return [*(found[i] for i in range(self.carried)), *stacks]


def _before(first: jax.Array, table: Table) -> list[jax.Array]:
    """Returns what a loop carries of an array before its first step: the rows with the lags 1, 2, ..., those that are
    sums of what was added to them as zeros."""
    rows = [slices_at(first, table.before(lag))[0] for lag in range(1, table.depth + 1)]
    return [jnp.zeros_like(row) if lag <= table.summed else row for lag, row in enumerate(rows, 1)]


def _at_hand(new: jax.Array, carried: Sequence[jax.Array], table: Table) -> list[jax.Array]:
    """Returns the rows of a step with the lags 0, 1, ...; ``new`` is the one with the lag ``table.summed``, as the
    array had it before the loop."""
    rows = [jnp.zeros_like(new), *carried]
    rows[table.summed] = rows[table.summed] + new if table.summed else new
    return rows


_PLANNED: WeakKeyDictionary[Graph, dict[str, tuple[IndexedLoop, Plan | None]]] = WeakKeyDictionary()


def with_plan(graph: Graph, loop: IndexedLoop) -> tuple[IndexedLoop, Plan] | None:
    """Returns a loop whose tables and sums were not known yet with these, and its plan; None if it would gain nothing.

    Of the equal loops of a graph, as each layer of a model has one, the first is planned and stands for the others.
    """
    known, key = _PLANNED.setdefault(graph, {}), key_of(loop)
    if key not in known or not same_programs(known[key][0].step, loop.step):
        plan = _planned(loop)
        if plan is not None:
            loop = replace(loop, key=key, tables=plan.tables, sums=plan.sums)
        known[key] = loop, plan
    loop, plan = known[key]
    return None if plan is None else (loop, plan)


def _planned(loop: IndexedLoop) -> Plan | None:
    """Returns the plan of a loop whose tables and sums are not known yet, or None if it would gain nothing."""
    candidates = frozenset(
        i
        for i, v in enumerate(loop.step.jaxpr.invars[loop.constants : loop.constants + loop.carried])
        if getattr(v.aval, "shape", ())
    )
    for _ in range(_ROUNDS):
        analysis = IndexedArrays(loop.steps, candidates)
        plan = analysis.plan()
        if not analysis.refused:
            return plan if plan.whole_sums or plan.clears or plan.stacks or plan.sets else None
        candidates -= analysis.refused
    return None


def loop_of(graph: Graph, node: Node) -> tuple[IndexedLoop, tuple[int, ...]] | None:
    """Returns the loop of a scan, whose tables and sums are not known yet, and the numbers of its operands.

    Of a loop of parts for each device it returns None: the casts between such types, which a step may have, hold in the
    body of a ``shard_map`` alone.
    """
    params = node.equation.params
    body = flatten(params["jaxpr"])
    if array_types.varying_axes([v.aval for v in (*body.invars, *body.outvars)]):
        return None
    info = jaxprs.debug_info("indexed_loop", len(body.invars), len(body.outvars))
    jaxpr = compat.new_jaxpr(body.constvars, body.invars, body.outvars, body.equations, frozenset(), info)
    numbers = tuple(dict.fromkeys(number for number in node.inputs if number not in graph.literals))
    places = {number: position for position, number in enumerate(numbers)}
    operands = [places[n] if n in places else np.asarray(graph.literals[n], graph.dtype(n)) for n in node.inputs]
    integers = KnownIntegers(graph)
    known = [(position, integers.of(number)) for number, position in places.items()]
    constants, carried = compat.scan_parts(node.equation)
    loop = IndexedLoop(
        key="",
        step=ClosedJaxpr(jaxpr, body.consts),
        constants=constants,
        carried=carried,
        length=int(params["length"]),
        reverse=bool(params["reverse"]),
        unroll=int(params["unroll"]),
        operands=tuple(operands),
        zeros=frozenset(i for i, n in enumerate(node.inputs[:constants]) if is_zero(graph, n)),
        known=tuple((position, array) for position, array in known if array is not None),
        tables=(),
        sums=(),
    )
    return loop, numbers


def results_of(graph: Graph, node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the numbers of what a loop alone gives, and their positions among its results."""
    results = tuple(n for n in dict.fromkeys(node.outputs) if graph.definitions.get(n) is node)
    return results, tuple(node.outputs.index(n) for n in results)


def evaluated(equation: JaxprEqn, given: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns the results of an equation."""
    inputs = [Var(v.aval) for v in equation.invars]
    outputs = [Var(v.aval) for v in equation.outvars]
    info = jaxprs.debug_info("loop", len(inputs), len(outputs))
    alone = equation.replace(invars=inputs, outvars=outputs)
    program = ClosedJaxpr(compat.new_jaxpr([], inputs, outputs, [alone], equation.effects, info), [])
    found: Sequence[jax.Array] = compat.jaxpr_as_fun(program)(*given)
    return found


def loop_in(spec: RespellingSpec) -> IndexedLoop:
    """Returns the loop of a spec."""
    return cast(IndexedLoop, spec["loop"])


def with_small_weights(spec: RespellingSpec, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns operands of which those that all steps share are of the size of weights: others grow from step to step,
    until what is rounded decides."""
    loop, found = loop_in(spec), list(arrays)
    for position in {x for x in loop.operands[: loop.constants] if isinstance(x, int)}:
        array = found[position]
        if array.ndim >= 2 and is_floating(array.dtype):
            found[position] = (array / math.sqrt(max(array.shape))).astype(array.dtype)
    return found


def chosen(spec: RespellingSpec, results: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns those of a loop's results that a spec has."""
    return [results[i] for i in cast(tuple[int, ...], spec["results"])]


def as_written(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    """Computes a spec's loop as the program has it."""
    return chosen(spec, loop_in(spec).as_written(operands))


def without_known_values(loop: IndexedLoop) -> IndexedLoop:
    """Returns a loop without what is known of the values of its operands, under its key."""
    loop = replace(loop, known=(), zeros=frozenset())
    return replace(loop, key=key_of(loop))


def key_of(loop: IndexedLoop) -> str:
    """Returns a key that is equal for loops of equal steps, parameters and known integers."""
    further = (
        f"{sorted(loop.zeros)} {loop.constants} {loop.carried} {loop.length} {loop.reverse} {loop.unroll}".encode()
    )
    for operand in loop.operands:
        further += str(operand).encode() if isinstance(operand, int) else bits(operand)
    for position, array in loop.known:
        further += str(position).encode() + bits(array)
    return digest([loop.step], further)


# ---------------------------------------------------------------------- one step


class _Step:
    """Computes one step without the arrays that are sums and tables."""

    def __init__(
        self,
        loop: IndexedLoop,
        constants: Sequence[jax.Array],
        carried: Mapping[int, jax.Array],
        rows: Mapping[int, Sequence[jax.Array]],
        slices: Sequence[jax.Array],
        read: Mapping[int, jax.Array],
    ):
        jaxpr, captured = jaxprs.open_jaxpr(loop.step)
        self.loop, self.equations, self.outputs = loop, list(jaxpr.eqns), list(jaxpr.outvars)
        inputs, last = list(jaxpr.invars), loop.constants + loop.carried
        carries = inputs[loop.constants : last]
        self.values: dict[Var, jax.Array] = dict(zip(jaxpr.constvars, captured, strict=True))
        self.values.update(zip(inputs[: loop.constants], constants, strict=True))
        self.values.update((carries[i], x) for i, x in carried.items())
        self.values.update(zip(inputs[last:], slices, strict=True))
        self.tables = dict(loop.tables)
        self.own: dict[Var, Sequence[jax.Array]] = {carries[i]: own for i, own in rows.items()}
        """The rows of each table that the step may read and write by their lags, by the variable that has the table."""
        self.definitions = {v: e for e in self.equations for v in e.outvars}
        self.sums: dict[int, list[jax.Array]] = {i: [] for i, _ in loop.sums}
        for position, constant in loop.reads.items():
            (result,) = self.equations[position].outvars
            self.values[result] = read[constant].reshape(result.aval.shape)
        for position in range(len(self.equations)):
            action = loop.plan.actions.get(position)
            if action is not None:
                self._act(action, self.equations[position])

    def _act(self, action: Action, equation: JaxprEqn) -> None:
        if action.carried in self.sums:
            shapes = ((place, self.value(atom)) for place, atom in action.slices)
            self.sums[action.carried] += [with_axis(x, action.before.aval.shape, place) for place, x in shapes]
            return
        rows, (result,) = list(self.own[action.before]), equation.outvars
        lags = self.tables[action.carried].lags
        for place, atom in action.slices:
            lag = lags[place]
            if action.kind == "read":
                self.values[result] = rows[lag].reshape(result.aval.shape)
                return
            row = with_axis(self.value(atom), action.before.aval.shape, place)
            row = lax.convert_element_type(row, rows[lag].dtype)
            rows[lag] = row if action.kind == "set" else rows[lag] + row
        self.own[result] = rows

    def value(self, atom: JaxprAtom) -> jax.Array:
        """Returns a value, and computes what it needs."""
        if isinstance(atom, Literal):
            return jnp.asarray(atom.val, atom.aval.dtype)
        todo = [atom]
        while todo:
            variable = todo[-1]
            if variable in self.values:
                todo.pop()
                continue
            equation = self.definitions[variable]
            missing = [v for v in equation.invars if isinstance(v, Var) and v not in self.values]
            if missing:
                todo += missing
                continue
            given = [
                self.values[v] if isinstance(v, Var) else jnp.asarray(v.val, v.aval.dtype) for v in equation.invars
            ]
            self.values.update(zip(equation.outvars, evaluated(equation, given), strict=True))
        return self.values[atom]

    def ends(self, kept: Sequence[int]) -> list[jax.Array]:
        return [self.value(self.outputs[i]) for i in kept]

    def rows(self) -> dict[int, Sequence[jax.Array]]:
        """Returns the rows of each table after the step."""
        found: dict[int, Sequence[jax.Array]] = {}
        for i, _ in self.loop.tables:
            variable = self.outputs[i]
            assert isinstance(variable, Var)
            found[i] = self.own[variable]
        return found

    def added(self) -> dict[int, list[jax.Array]]:
        return self.sums

    def results(self) -> list[jax.Array]:
        """Returns what the loop stacks, without what is known."""
        results = enumerate(self.outputs[self.loop.carried :])
        return [self.value(atom) for i, atom in results if i not in self.loop.numbers]
