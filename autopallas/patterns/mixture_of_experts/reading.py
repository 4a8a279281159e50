"""What is read from a sum over experts that can be computed for the chosen experts alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.kernels.mixture_of_experts.steps import Step
from autopallas.patterns.expressions import Scope
from autopallas.patterns.mixture_of_experts.intervals import Interval
from autopallas.patterns.mixture_of_experts.picks import SlotPick
from autopallas.patterns.mixture_of_experts.refusals import DENSE
from autopallas.patterns.mixture_of_experts.slots import Slots
from autopallas.sites.index_notation import Operand, View

__all__ = ["PickedRows", "Reading", "SlotRows"]


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows that are picked from slots, before the values that describe them are computed.

    Attributes:
      pick: the gather.
      expert: labels of experts, among those of its places.
      slot: the other labels of its places.
      leaves: per value that differs between slots and is computed from no product, its view.
    """

    pick: SlotPick
    expert: tuple[Atom, ...]
    slot: tuple[Atom, ...]
    leaves: dict[int, View]


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Numbers of the values that describe rows picked from slots.

    Attributes:
      expert: the expert of each row.
      inside: whether the place of a row exists.
      reached: whether the row is read from a slot.
      other: what is read for rows that are not reached, if there is anything beside slots.
      leaves: per value that differs between slots, the value of each row: axes of rows, then the axes without a place.
    """

    expert: int
    inside: int
    reached: int
    other: int | None
    leaves: Mapping[int, int]


@dataclass(slots=True)
class Reading:
    """A sum over experts that can be computed for the chosen experts alone.

    Attributes:
      scope: the labels that all other attributes refer to.
      result: the sum.
      tokens, expert: labels.
      examples: of the tokens' labels, those of examples that have experts of their own; they come first.
      choices: where the experts of the tokens are, and the further labels of each such array.
      steps: what is computed for each row; arrays are numbered as in ``arrays``.
      arrays: values that the steps read.
      seeds: the comparisons and the products: whatever depends on one belongs to the mixture.
      kept: further values that belong to it, though others may read them too: the zeros that weights are scattered
        into.
      products: the products among the seeds.
      between: the products and how they are read, including one that is the sum itself.
      summed: of the tokens' labels, those of the rows of a token, whose results are added up; they come last.
      within: the intervals of rows whose experts are still to be counted.
      what: what the program does, in words.
      slots: the slots to which tokens are dispatched, if their weights are still to be added up.
      picked: the rows that are picked from slots, if the values that describe them are still to be computed.
    """

    scope: Scope
    result: Ref
    tokens: tuple[Atom, ...] = ()
    expert: tuple[Atom, ...] = ()
    examples: tuple[Atom, ...] = ()
    choices: list[tuple[Operand, tuple[Atom, ...]]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    arrays: list[int] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    products: set[int] = field(default_factory=set)
    between: dict[int, View] = field(default_factory=dict)
    summed: tuple[Atom, ...] = ()
    within: list[Interval] = field(default_factory=list)
    what: str = DENSE
    slots: Slots | None = None
    picked: SlotRows | None = None
