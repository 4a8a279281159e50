"""Steps that a program writes one after the other, each from what the one before gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import jax
from jax import lax

from autopallas import compat
from autopallas.compat import ClosedJaxpr
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["RepeatedSteps", "steps_in"]


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


def steps_in(spec: RespellingSpec) -> RepeatedSteps:
    """Returns the steps of a spec."""
    return cast(RepeatedSteps, spec["steps"])
