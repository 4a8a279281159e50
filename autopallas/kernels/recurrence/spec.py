"""Describes a linear recurrence as far as implementations and tables know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopallas.sites.spec import Dtype, Spec

__all__ = ["Decay", "RecurrenceSpec"]

Decay: TypeAlias = Literal["scalar", "channel", "elementwise"]


@dataclass(frozen=True)
class RecurrenceSpec(Spec):
    """A loop of T steps whose state is a matrix of N rows and P columns for each of G times H heads:

    ``S[t] = a[t] * S[t-1] + k[t] (x) v[t]``, of which it reads ``q[t] . S[t]`` or ``q[t] . S[t-1]``, sums over N.

    Where the state is no such matrix, but any array that is multiplied and added to elementwise, N and P are 1 and H
    counts its elements.

    Attributes:
      steps, groups, heads, rows, columns: T, G, H, N, P of the largest state. The heads of a group share q and k.
      decay: whether a head has one decay ("scalar"), each row of it ("channel"), or each element ("elementwise").
      delta: whether a step also corrects a state along one row, by what it reads of it (the delta rule):
        ``S[t] = a[t] * S[t-1] + u[t] (x) (w[t] . S[t-1]) + k[t] (x) v[t]``.
      products: how many matrix products of a step do not lead to the state, and can be taken out of the loop.
      states: how many carried values are such states.
      readouts: how many times a step reads them.
      loops: how many other carried values have loops of their own.
      substeps: how many outer products a step adds to a state, and corrects it by, one after the other.
      state_dtype: that of the largest state.
      result_dtype: that of the first result.
    """

    steps: int
    groups: int
    heads: int
    rows: int
    columns: int
    decay: Decay
    products: int
    states: int
    readouts: int
    loops: int
    state_dtype: Dtype
    result_dtype: Dtype
    delta: bool = False
    substeps: int = 1

    @property
    def is_single(self) -> bool:
        """Whether the loop is one matrix state that a step reads once, and nothing else."""
        return (self.states, self.readouts, self.loops, self.products, self.substeps) == (1, 1, 0, 0, 1)

    @property
    def is_matrix(self) -> bool:
        """Whether matrix products can compute several steps together."""
        return self.decay != "elementwise"

    def assumptions(self) -> tuple[str, ...]:
        if not self.is_matrix:
            return ()
        return ("what a state is multiplied by over some steps, and what is added to it, is finite (assume_finite)",)

    def __str__(self) -> str:
        sizes = f"T={self.steps} H={self.groups * self.heads}"
        if self.is_matrix:
            sizes += f" N={self.rows} P={self.columns}"
        rule = ", delta rule" if self.delta else ""
        rule += f", {self.substeps} products a step" if self.substeps > 1 else ""
        states = f", {self.states} states" if self.states > 1 else ""
        return (
            f"recurrence {sizes} {self.state_dtype}, {self.decay} decay{rule}{states}, {self.products} products apart"
        )
