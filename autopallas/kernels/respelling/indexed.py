"""Loops that index arrays at their own step, as loops that are given slices and give results.

Under ``jax.grad`` a loop that reads ``x[i]`` adds to the whole of x's gradient in each step, zero but for one slice, so
that T steps cost T arrays of T slices.  Here each step gives its slice alone, and the arrays are put together after the
loop.  What a loop writes at its own step and reads nowhere else goes the same way.  Which arrays these are, and where
their slices lie, is told by :mod:`autopallas.graph.indexed_arrays`; any other array stays what the loop carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph.array_slices import Place, plus_slices, slices_at, with_axis, with_slices
from autopallas.graph.indexed_arrays import Action, IndexedArrays, Plan, Steps
from autopallas.graph.known_integers import Array
from autopallas.graph.program_digests import bits, digest

__all__ = ["IndexedLoop", "key_of", "planned"]

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
      tables: (number of the carried value, its place).
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
    tables: tuple[tuple[int, Place], ...] = field(compare=False)
    sums: tuple[tuple[int, tuple[Place, ...]], ...] = field(compare=False)

    def __repr__(self) -> str:
        arrays = len(self.tables) + len(self.sums)
        return f"{self.length} steps, {arrays} of {self.carried} carried values by slices, {self.key}"

    @cached_property
    def plan(self) -> Plan:
        return IndexedArrays(self.steps, frozenset(i for i, _ in (*self.tables, *self.sums))).plan()

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
        given = self.given(operands)
        last = self.constants + self.carried

        def one(carried: list[jax.Array], own: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            found = compat.jaxpr_as_fun(self.step)(*given[: self.constants], *carried, *own)
            return list(found[: self.carried]), list(found[self.carried :])

        ends, results = lax.scan(
            one, given[self.constants : last], given[last:], self.length, self.reverse, unroll=self.unroll
        )
        return [*ends, *results]

    def by_slices(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the same, from a loop that is given slices and gives slices."""
        given = self.given(operands)
        last = self.constants + self.carried
        first = given[self.constants : last]
        tables, sums = dict(self.tables), dict(self.sums)
        kept = [i for i in range(self.carried) if i not in tables and i not in sums]
        rows = {i: slices_at(first[i], place) for i, place in tables.items()}

        def one(
            carried: list[jax.Array], own: tuple[dict[int, jax.Array], list[jax.Array]]
        ) -> tuple[list[jax.Array], tuple[dict[int, jax.Array], dict[int, list[jax.Array]], list[jax.Array]]]:
            step = _Step(self, given[: self.constants], dict(zip(kept, carried, strict=True)), *own)
            return step.ends(kept), (step.rows(), step.added(), step.results())

        ends, (written, added, results) = lax.scan(
            one, [first[i] for i in kept], (rows, given[last:]), self.length, self.reverse, unroll=self.unroll
        )
        found = dict(zip(kept, ends, strict=True))
        for i, place in tables.items():
            found[i] = with_slices(first[i], place, written[i])
        for i, places in sums.items():
            found[i] = first[i]
            for place, slices in zip(places, added[i], strict=True):
                found[i] = plus_slices(found[i], place, slices)
        return [*(found[i] for i in range(self.carried)), *results]


def planned(loop: IndexedLoop) -> Plan | None:
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
            return plan if plan.whole_sums else None
        candidates -= analysis.refused
    return None


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
        rows: Mapping[int, jax.Array],
        slices: Sequence[jax.Array],
    ):
        jaxpr, captured = jaxprs.open_jaxpr(loop.step)
        self.loop, self.equations, self.outputs = loop, list(jaxpr.eqns), list(jaxpr.outvars)
        inputs, last = list(jaxpr.invars), loop.constants + loop.carried
        carries = inputs[loop.constants : last]
        self.values: dict[Var, jax.Array] = dict(zip(jaxpr.constvars, captured, strict=True))
        self.values.update(zip(inputs[: loop.constants], constants, strict=True))
        self.values.update((carries[i], x) for i, x in carried.items())
        self.values.update(zip(inputs[last:], slices, strict=True))
        self.own: dict[Var, jax.Array] = {carries[i]: x for i, x in rows.items()}
        """The slice of each table, by the variable that has the table."""
        self.definitions = {v: e for e in self.equations for v in e.outvars}
        self.sums: dict[int, list[jax.Array]] = {i: [] for i, _ in loop.sums}
        for position in range(len(self.equations)):
            action = loop.plan.actions.get(position)
            if action is not None:
                self._act(action, self.equations[position])

    def _act(self, action: Action, equation: JaxprEqn) -> None:
        if action.carried in self.sums:
            shapes = ((place, self.value(atom)) for place, atom in action.slices)
            self.sums[action.carried] += [with_axis(x, action.before.aval.shape, place) for place, x in shapes]
            return
        row, (result,) = self.own[action.before], equation.outvars
        if action.kind == "read":
            self.values[result] = row.reshape(result.aval.shape)
            return
        new = [with_axis(self.value(atom), action.before.aval.shape, place) for place, atom in action.slices]
        for x in new:
            row = x if action.kind == "set" else row + x
        self.own[result] = row

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
            inputs = [Var(v.aval) for v in equation.invars]
            outputs = [Var(v.aval) for v in equation.outvars]
            info = jaxprs.debug_info("indexed_loop", len(inputs), len(outputs))
            alone = equation.replace(invars=inputs, outvars=outputs)
            program = ClosedJaxpr(compat.new_jaxpr([], inputs, outputs, [alone], equation.effects, info), [])
            self.values.update(zip(equation.outvars, compat.jaxpr_as_fun(program)(*given), strict=True))
        return self.values[atom]

    def ends(self, kept: Sequence[int]) -> list[jax.Array]:
        return [self.value(self.outputs[i]) for i in kept]

    def rows(self) -> dict[int, jax.Array]:
        found: dict[int, jax.Array] = {}
        for i, _ in self.loop.tables:
            variable = self.outputs[i]
            assert isinstance(variable, Var)
            found[i] = self.own[variable]
        return found

    def added(self) -> dict[int, list[jax.Array]]:
        return self.sums

    def results(self) -> list[jax.Array]:
        return [self.value(atom) for atom in self.outputs[self.loop.carried :]]
