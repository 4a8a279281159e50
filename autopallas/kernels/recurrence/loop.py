"""Runs parts of a loop's step for all steps at once, or as loops of their own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ArrayFunction, ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, Var

__all__ = ["AllSteps", "Loop"]

Array: TypeAlias = jax.Array


@dataclass(frozen=True)
class Loop:
    """A loop: constants, carried values and slices give carried values and results, step by step.

    Attributes:
      key: equal for equal loops, which jaxprs are not.
      lead: from a site's operands to the loop's constants, first values and arrays to be sliced.
      step: from constants, carried values and slices to carried values and results.
      tail: from a site's operands and what it needs of the loop to its results; None where these are that.
      constants, carried: how many of each there are; the rest are slices.
      length: the number of steps.
      reverse: whether the last slices come first.
    """

    key: Hashable
    lead: ClosedJaxpr = field(compare=False)
    step: ClosedJaxpr = field(compare=False)
    constants: int
    carried: int
    length: int
    reverse: bool
    tail: ClosedJaxpr | None = field(default=None, compare=False)

    @cached_property
    def equations(self) -> list[JaxprEqn]:
        return list(jaxprs.open_jaxpr(self.step)[0].eqns)

    @cached_property
    def inputs(self) -> list[Var]:
        return list(jaxprs.open_jaxpr(self.step)[0].invars)

    @cached_property
    def outputs(self) -> list[JaxprAtom]:
        return list(jaxprs.open_jaxpr(self.step)[0].outvars)

    @cached_property
    def variables(self) -> list[Var]:
        """The variables of the step by their numbers."""
        return [*self.inputs, *(v for e in self.equations for v in e.outvars)]

    @cached_property
    def defined(self) -> dict[Var, int]:
        """Position of the equation that gives each variable."""
        return {v: i for i, e in enumerate(self.equations) for v in e.outvars}

    @property
    def carries(self) -> list[Var]:
        return self.inputs[self.constants : self.constants + self.carried]

    def started(self, operands: Sequence[Array]) -> tuple[list[Array], list[Array], list[Array]]:
        """Returns (constants, first carried values, arrays to be sliced) of a site's operands."""
        given = array_types.varied_alike(compat.jaxpr_as_fun(self.lead)(*operands), operands)
        last = self.constants + self.carried
        return list(given[: self.constants]), list(given[self.constants : last]), list(given[last:])

    def run(self, operands: Sequence[Array]) -> list[Array]:
        """Returns the last carried values and the stacked results, computed as the program does."""
        constants, first, slices = self.started(operands)
        step: ArrayFunction = compat.jaxpr_as_fun(self.step)

        def one(carried: list[Array], own: list[Array]) -> tuple[list[Array], list[Array]]:
            found = step(*constants, *carried, *own)
            return list(found[: self.carried]), list(found[self.carried :])

        last, results = lax.scan(one, first, slices, length=self.length, reverse=self.reverse)
        return [*last, *results]

    def finished(self, operands: Sequence[Array], needed: Sequence[Array]) -> list[Array]:
        """Returns a site's results, of its operands and what it needs of what the loop gives."""
        return list(needed) if self.tail is None else list(compat.jaxpr_as_fun(self.tail)(*operands, *needed))

    def leading_to(self, wanted: Iterable[Var], known: Mapping[Var, object]) -> list[int]:
        """Returns the positions of the equations that compute variables from known ones, in order."""
        found: set[int] = set()
        todo = list(wanted)
        while todo:
            variable = todo.pop()
            position = None if variable in known else self.defined.get(variable)
            if position is not None and position not in found:
                found.add(position)
                todo += [atom for atom in self.equations[position].invars if isinstance(atom, Var)]
        return sorted(found)


class AllSteps:
    """Values of a loop's variables: one for all steps, or one for each step along a leading axis, the first first."""

    def __init__(self, loop: Loop, operands: Sequence[Array]):
        self.loop = loop
        constants, self.first, slices = loop.started(operands)
        slices = [jnp.flip(x, 0) for x in slices] if loop.reverse else slices
        self.fixed: dict[Var, Array] = dict(zip(loop.inputs, constants, strict=False))
        self.varying: dict[Var, Array] = dict(zip(loop.inputs[loop.constants + loop.carried :], slices, strict=True))

    @property
    def known(self) -> dict[Var, Array]:
        return self.fixed | self.varying

    def compute(self, wanted: Iterable[Var]) -> None:
        """Computes variables from those that are known, each step at the same time."""
        wanted = list(wanted)
        positions = self.loop.leading_to(wanted, self.known)
        equations = [self.loop.equations[position] for position in positions]
        varying = set(self.varying)
        alike: list[JaxprEqn] = []
        each: list[JaxprEqn] = []
        for equation in equations:
            if varying.isdisjoint([a for a in equation.invars if isinstance(a, Var)]):
                alike.append(equation)
            else:
                each.append(equation)
                varying.update(equation.outvars)
        self.fixed |= _evaluated(alike, self.fixed, [v for e in alike for v in e.outvars])
        results = list(dict.fromkeys(v for v in wanted if v in varying and v not in self.varying))
        if not results:
            return
        read = {a for e in each for a in e.invars if isinstance(a, Var)}
        inputs = [v for v in self.varying if v in read]

        def one(*own: Array) -> list[Array]:
            found = _evaluated(each, self.fixed | dict(zip(inputs, own, strict=True)), results)
            return [found[v] for v in results]

        found = jax.vmap(one)(*(self.varying[v] for v in inputs))
        self.varying |= dict(zip(results, found, strict=True))

    def scan(self, carried: Sequence[int], stacked: Sequence[Var]) -> dict[int, Array]:
        """Computes some of the carried values in a loop of their own; it makes known what they are before each step,
        or the variables in ``stacked``.  Returns what they are at the end, by their places."""
        loop = self.loop
        inner = [loop.carries[i] for i in carried]
        after = [loop.outputs[i] for i in carried]
        wanted = [v for v in (*after, *stacked) if isinstance(v, Var)]
        known = self.known | dict.fromkeys(inner)
        equations = [loop.equations[position] for position in loop.leading_to(wanted, known)]
        read = {a for e in equations for a in e.invars if isinstance(a, Var)} | set(wanted)
        inputs = [v for v in self.varying if v in read]
        shown = list(stacked) or inner

        def one(state: list[Array], own: list[Array]) -> tuple[list[Array], list[Array]]:
            values = self.fixed | dict(zip(inputs, own, strict=True)) | dict(zip(inner, state, strict=True))
            values |= _evaluated(equations, values, [v for e in equations for v in e.outvars])
            return [_value(v, values) for v in after], [values[v] for v in shown]

        first = [self.first[i] for i in carried]
        last, sequences = lax.scan(one, first, [self.varying[v] for v in inputs], length=loop.length)
        self.varying |= dict(zip(shown, sequences, strict=True))
        return dict(zip(carried, last, strict=True))

    def stacked(self, atom: JaxprAtom) -> Array:
        """Returns what the loop stacks of a variable, in the order of its slices."""
        if isinstance(atom, Var) and atom in self.varying:
            found = self.varying[atom]
            return jnp.flip(found, 0) if self.loop.reverse else found
        value = _value(atom, self.fixed)
        return jnp.broadcast_to(value, (self.loop.length, *jnp.shape(value)))


def _value(atom: JaxprAtom, values: Mapping[Var, Array]) -> Array:
    return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]


def _evaluated(equations: Sequence[JaxprEqn], values: Mapping[Var, Array], wanted: Sequence[Var]) -> dict[Var, Array]:
    """Returns variables that equations compute from known ones."""
    if not equations:
        return {v: values[v] for v in wanted}
    own = {v for e in equations for v in e.outvars}
    read = dict.fromkeys(a for e in equations for a in e.invars if isinstance(a, Var) and a not in own)
    given = [v for v in wanted if v in own]
    info = jaxprs.debug_info("recurrence", len(read), len(given))
    jaxpr = ClosedJaxpr(compat.new_jaxpr([], list(read), given, equations, frozenset(), info), [])
    found = compat.jaxpr_as_fun(jaxpr)(*(values[v] for v in read))
    return dict(zip(given, found, strict=True)) | {v: values[v] for v in wanted if v not in own}
