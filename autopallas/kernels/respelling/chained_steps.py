"""Equal steps of a loop that Python wrote out: what each reads of its own, and what the program reads of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import ClosedJaxpr
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["ChainedSteps", "Slices", "Values", "chain_in", "pass_on"]

Source: TypeAlias = int
"""The position of an operand; -1, -2, ... for the first, second, ... constant."""


@dataclass(frozen=True, slots=True)
class Slices:
    """What each step reads of one array, at a place that follows from the number of the step.

    Attributes:
      array: the position of the array among the site's operands.
      axis: the axis of the places.
      first: the place that the first step reads.
      apart: how far the place that the next step reads lies behind it; not zero.
      keeps: whether a slice keeps the axis, of size 1.
    """

    array: int
    axis: int
    first: int
    apart: int
    keeps: bool


@dataclass(frozen=True, slots=True)
class Values:
    """Values of the same type, of which each step reads one.

    Attributes:
      sources: where they come from, in the order in which the program computes them.
      first: the place among them of the one that the first step reads.
      apart: how far the one that the next step reads lies behind it: 1 or -1.
    """

    sources: tuple[Source, ...]
    first: int
    apart: int


@dataclass(frozen=True, repr=False)
class ChainedSteps:
    """Equal steps, of which each reads what those before it gave.

    Attributes:
      key: equal for equal steps, which jaxprs are not.
      step: from what a step is given by those before it, what all steps read, and what it alone reads, to what it gives
        the next one, and what the program reads of each step.
      last: the same for the last step, with what the program reads of that one alone behind it; None if nothing is.
      carried: where the values come from that the first step is given.
      shared: the positions of what all steps read.
      own: what each step alone reads.
      results: per result of the site, the position among what a step gives, and the number of the step.
      count: the number of steps.
      constants: numbers that stand in the program.
      stacks: positions among what a step gives, of which the site gives all steps' in one array, behind its results.
    """

    key: str
    step: ClosedJaxpr = field(compare=False)
    last: ClosedJaxpr | None = field(compare=False)
    carried: tuple[Source, ...]
    shared: tuple[int, ...]
    own: tuple[Slices | Values, ...]
    results: tuple[tuple[int, int], ...]
    count: int
    constants: tuple[np.ndarray, ...] = field(compare=False)
    stacks: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"{self.count} steps of {len(self.step.jaxpr.eqns)} equations in a chain, {self.key}"

    def written_out(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results, as the program computes them."""
        carried, shared = self._given(operands)
        step, found = jax.jit(compat.jaxpr_as_fun(self.step)), []  # traced once
        for k in range(self.count):
            program = step if self.last is None or k < self.count - 1 else compat.jaxpr_as_fun(self.last)
            given = list(program(*carried, *shared, *(self._read(own, k, operands) for own in self.own)))
            carried = given[: len(carried)]
            found.append(given)
        return [*(found[k][i] for i, k in self.results), *(jnp.stack([own[i] for own in found]) for i in self.stacks)]

    def looped(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results; a loop computes the steps, but for the last one, if more is read of that."""
        carried, shared = self._given(operands)
        step, looped = compat.jaxpr_as_fun(self.step), self.count - (self.last is not None)

        arrays = [self._array(own, operands) for own in self.own]

        def one(before: list[jax.Array], k: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            given = [_at(own, array, k) for own, array in zip(self.own, arrays, strict=True)]
            found = list(step(*before, *shared, *given))
            after = [lax.convert_element_type(x, old.dtype) for x, old in zip(found, before, strict=False)]
            return after, found[len(before) :]

        carried, stacks = lax.scan(one, carried, jnp.arange(looped, dtype=jnp.uint32))
        end = carried
        if self.last is not None:
            own = [self._read(each, looped, operands) for each in self.own]
            end = list(compat.jaxpr_as_fun(self.last)(*carried, *shared, *own))
        results = []
        for i, k in self.results:
            if k == looped or i < len(carried):  # of what is carried, the loop's end is all that is read
                results.append(end[i])
            else:
                results.append(stacks[i - len(carried)][k])
        return [*results, *(stacks[i - len(carried)] for i in self.stacks)]

    def _given(self, operands: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns what the first step is given, and what all steps read."""
        carried = [jnp.asarray(self._value(i, operands)) for i in self.carried]
        strong = [lax.convert_element_type(x, x.dtype) for x in carried]
        return strong, [operands[i] for i in self.shared]

    def _value(self, source: Source, operands: Sequence[jax.Array]) -> jax.Array | np.ndarray:
        return operands[source] if source >= 0 else self.constants[-1 - source]

    def _read(self, own: Slices | Values, k: int, operands: Sequence[jax.Array]) -> jax.Array:
        """Returns what a step reads."""
        place = own.first + k * own.apart
        if isinstance(own, Values):
            return jnp.asarray(self._value(own.sources[place], operands))
        found: jax.Array = lax.index_in_dim(operands[own.array], place, own.axis, own.keeps)
        return found

    def _array(self, own: Slices | Values, operands: Sequence[jax.Array]) -> jax.Array:
        """Returns what holds all that steps read."""
        if isinstance(own, Slices):
            return operands[own.array]
        if all(source < 0 for source in own.sources):
            return jnp.asarray(np.stack([self.constants[-1 - source] for source in own.sources]))
        return jnp.stack([jnp.asarray(self._value(source, operands)) for source in own.sources])


def _at(own: Slices | Values, array: jax.Array, k: jax.Array) -> jax.Array:
    """Returns what a step reads of an array, by the number of the step, without a sign."""
    further = k * jnp.uint32(abs(own.apart))
    place = own.first + further if own.apart > 0 else own.first - further
    axis, keeps = (own.axis, own.keeps) if isinstance(own, Slices) else (0, False)
    found: jax.Array = lax.dynamic_index_in_dim(array, place, axis, keeps)
    return found


def pass_on(
    first: Sequence[jax.Array], chain: ChainedSteps, operands: Sequence[jax.Array], places: Sequence[int]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the results of a chain that gives stacks, and the operands of the one that reads these.

    Args:
      first: what the first chain gives.
      chain: the first chain.
      operands: those of the second one that are no stacks.
      places: per operand of the second one, which stack it is, or -1.
    """
    end = len(first) - len(chain.stacks)
    stacks, rest = first[end:], iter(operands)
    return list(first[:end]), [next(rest) if place < 0 else stacks[place] for place in places]


def chain_in(spec: RespellingSpec, name: str = "steps") -> ChainedSteps:
    """Returns the steps of a spec, or those of the chain that reads what these stack."""
    return cast(ChainedSteps, spec[name])
