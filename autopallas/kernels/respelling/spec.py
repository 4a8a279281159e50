"""Describes a respelling as plain data: its kind, the parameters of what it replaces, and the types."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.kernels.respelling.kinds import kind_named
from autopallas.sites.spec import Dtype, plain_fields

if TYPE_CHECKING:
    from autopallas.kernels.respelling.chained_steps import ChainedSteps
    from autopallas.kernels.respelling.checkpointed_scan import CheckpointedScan
    from autopallas.kernels.respelling.indexed_loops import IndexedLoop
    from autopallas.kernels.respelling.loop_surroundings import Around
    from autopallas.kernels.respelling.step_sequences import RepeatedSteps, StepsApart

__all__ = ["ArrayType", "Parameters", "Plain", "RespellingSpec"]

Plain: TypeAlias = (
    "bool | int | str | tuple[Plain, ...] | Around | ChainedSteps | CheckpointedScan | IndexedLoop | RepeatedSteps |"
    "StepsApart | None"
)
Parameters: TypeAlias = tuple[tuple[str, Plain], ...]
"""Parameters by name, sorted."""
ArrayType: TypeAlias = tuple[tuple[int, ...], Dtype]
"""Shape and dtype of an array."""


@dataclass(frozen=True)
class RespellingSpec:
    """One respelling.

    Attributes:
      kind: its kind, the name of a module in ``kinds``.
      parameters: what the kind knows of the replaced equations, beyond the types.
      operands: the types of the operands.
      results: the types of the results.
      mapped: number of examples under ``vmap``, all axes together.
    """

    kind: str
    parameters: Parameters
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    mapped: int = 1

    def __getitem__(self, name: str) -> Plain:
        """Returns a parameter."""
        return dict(self.parameters)[name]

    def numbers(self, name: str) -> tuple[int, ...]:
        """Returns a parameter of several numbers, such as one for each axis."""
        return cast("tuple[int, ...]", self[name])

    @property
    def widest_dtype(self) -> Dtype:
        """Dtype under which tables file the respelling: that of its first floating operand, else of its first; of what
        is drawn from random keys, that of the result."""
        dtypes = [dtype for _, dtype in self.operands]
        if jnp.issubdtype(dtypes[0], jax.dtypes.extended):
            return self.results[0][1]
        return next((d for d in dtypes if not jnp.issubdtype(d, jnp.integer) and d != np.bool_), dtypes[0])

    @property
    def elements(self) -> int:
        """Number of elements of the largest operand or result, or of the states of a loop that computes them from
        smaller operands, of all examples together."""
        inside: list[int] = [getattr(value, "elements", 0) for _, value in self.parameters]
        return self.mapped * max(*inside, *(math.prod(shape) for shape, _ in (*self.operands, *self.results)))

    def assumptions(self) -> tuple[str, ...]:
        """Returns in words what has to hold for the result to equal the original's."""
        return kind_named(self.kind).assumptions_of(self)

    def programs(self) -> str:
        """Returns what is written instead, in words."""
        return kind_named(self.kind).instead

    def to_dict(self) -> dict[str, object]:
        """Returns the fields as plain data: numbers and strings."""
        return plain_fields(self)

    def __str__(self) -> str:
        types = ", ".join(f"{dtype.name}[{','.join(map(str, shape))}]" for shape, dtype in self.operands)
        parameters = " ".join(f"{name}={value}" for name, value in self.parameters)
        several = f", {self.mapped} times" if self.mapped > 1 else ""
        return f"{self.kind} of {types} {parameters}{several}".strip()
