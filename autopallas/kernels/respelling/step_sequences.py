"""Steps that a program writes one after the other, each from what the one before gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas import compat
from autopallas.compat import ArrayFunction, ClosedJaxpr
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["RepeatedSteps", "StepsApart", "steps_in"]


@dataclass(frozen=True, repr=False)
class RepeatedSteps:
    """A number of equal steps, and what the program needs of the last one.

    Attributes:
      key: equal for equal steps, which jaxprs are not.
      step: from what a step gives the next one, and from what all steps read, to what it gives the next one.
      last: from the same to what the program needs of the last step.
      first: per carried value its position among the site's operands.
      read: the positions of what all steps read.
      count: the number of steps.
    """

    key: str
    step: ClosedJaxpr = field(compare=False)
    last: ClosedJaxpr = field(compare=False)
    first: tuple[int, ...]
    read: tuple[int, ...]
    count: int

    def __repr__(self) -> str:
        return f"{self.count} steps of {len(self.step.jaxpr.eqns)} equations, {self.key}"

    def written_out(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results, as the program computes them."""
        carried, read = [operands[i] for i in self.first], [operands[i] for i in self.read]
        step = compat.jaxpr_as_fun(self.step)
        for _ in range(self.count - 1):
            carried = list(step(*carried, *read))
        return list(compat.jaxpr_as_fun(self.last)(*carried, *read))

    def looped(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results; a loop computes all steps but the last."""
        carried, read = [operands[i] for i in self.first], [operands[i] for i in self.read]
        step = compat.jaxpr_as_fun(self.step)

        def one(carried: list[jax.Array], _: None) -> tuple[list[jax.Array], None]:
            found = step(*carried, *read)
            return [lax.convert_element_type(x, before.dtype) for x, before in zip(found, carried, strict=True)], None

        carried, _ = lax.scan(one, carried, None, self.count - 1)
        return list(compat.jaxpr_as_fun(self.last)(*carried, *read))


@dataclass(frozen=True, repr=False)
class StepsApart:
    """Steps that the program reads more of than what the last one gives.

    Values are numbered: the site's operands, then what each step gives, in order.

    Attributes:
      key: equal for equal steps, which jaxprs are not.
      steps: the program of each step.
      reads: per step, the numbers of the values that it reads.
      results: the numbers of the site's results.
      fused: per result, whether the program fuses what computes it with what reads it.
      path: the names of the equations by which a step computes what it hands on of what it is given, with nothing that
        is stored on the way.
    """

    key: str
    steps: tuple[ClosedJaxpr, ...] = field(compare=False)
    reads: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]
    fused: tuple[bool, ...]
    path: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of steps."""
        return len(self.steps)

    @property
    def step(self) -> ClosedJaxpr:
        """The program of one of the steps."""
        return self.steps[len(self.steps) // 2]

    def __repr__(self) -> str:
        return f"{self.count} steps of {len(self.step.jaxpr.eqns)} equations apart, {self.key}"

    def written_out(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results, as the program computes them."""
        return self._computed(operands, lambda step, given: step(*given))

    def apart(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results; each step is computed in a branch that is always taken, which XLA does not fuse with
        the steps before and after it."""
        taken = lax.optimization_barrier(jnp.asarray(True))

        def computed(step: ArrayFunction, given: Sequence[jax.Array]) -> Sequence[jax.Array]:
            types = jax.eval_shape(step, *given)

            def alike(*given: jax.Array) -> list[jax.Array]:
                known = {(x.shape, x.dtype): x for x in reversed(given)}
                return [known[t.shape, t.dtype] if (t.shape, t.dtype) in known else jnp.zeros_like(t) for t in types]

            found: Sequence[jax.Array] = lax.cond(taken, step, alike, *given)
            return found

        return self._computed(operands, computed)

    def _computed(
        self,
        operands: Sequence[jax.Array],
        computed: Callable[[ArrayFunction, Sequence[jax.Array]], Sequence[jax.Array]],
    ) -> list[jax.Array]:
        values = list(operands)
        for step, read in zip(self.steps, self.reads, strict=True):
            values += computed(compat.jaxpr_as_fun(step), [values[i] for i in read])
        return [values[i] for i in self.results]


def steps_in(spec: RespellingSpec) -> RepeatedSteps | StepsApart:
    """Returns the steps of a spec."""
    return cast(RepeatedSteps | StepsApart, spec["steps"])
