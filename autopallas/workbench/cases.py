"""One computation at one size, spelled as people write it: what tables are measured on, and benchmarks.

An operation that can be tuned by its name has a module ``cases``, with what :class:`Cases` lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, cast

import jax

from autopallas import compat
from autopallas.compat import ArrayFunction, Shaped
from autopallas.graph import Graph, flatten
from autopallas.patterns import Match, find
from autopallas.sites.operation import operation_named, operation_names

__all__ = ["DIRECTIONS", "Case", "Cases", "Direction", "cases_of", "match_of"]

Direction: TypeAlias = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")


@dataclass(frozen=True, slots=True)
class Case:
    """One computation at one size.  ``sizes`` are named by the operation's letters, in the order they are shown."""

    kernel: str
    direction: Direction
    dtype: str
    mask: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def shape(self) -> str:
        return " ".join(f"{letter}{size}" for letter, size in self.sizes)

    def __str__(self) -> str:
        return f"{self.kernel} {self.direction} {self.dtype} {self.mask} {self.shape}"

    def size(self, letter: str) -> int:
        return dict(self.sizes)[letter]

    def selected_by(self, words: str) -> bool:
        """Whether every word of ``words`` is a word of this case: "forward causal T2048"."""
        return set(words.split()) <= set(str(self).split())


class Cases(Protocol):
    """What the module ``cases`` of an operation offers."""

    ORIGINALS: Mapping[str, ArrayFunction]
    """The forward computation as people write it, by variant (:attr:`Case.mask`); the first is the plain one."""

    def table_grid(self, platform: str = "cpu") -> tuple[Case, ...]:
        """A case for each row of the tuned table: those of TPUs, which are simulated, or those that are measured."""

    def types(self, case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of all arguments; the cotangent of the result comes last, where there is a backward pass."""

    def in_direction(self, case: Case, function: ArrayFunction) -> ArrayFunction:
        """A function like an original, as a function of all the case's arguments, with gradients if it has them."""

    def case_of(self, types: Sequence[Shaped], variant: str, direction: Direction) -> Case:
        """The case of given arguments, without a cotangent.  ValueError where they are not the operation's."""

    def direct(self, case: Case) -> ArrayFunction | None:
        """The operation's own function, of the original's arguments; None where it has no such variant."""


def cases_of(operation: str) -> Cases | None:
    """The cases of an operation by its name, or None where it has none."""
    return cast("Cases | None", operation_named(operation).module("cases") if operation in operation_names() else None)


def match_of(case: Case) -> Match:
    """The one site of a case, as the pipeline sees it.

    Raises:
      ValueError: it is not recognised, or as several.
    """
    offered = cases_of(case.kernel)
    assert offered is not None
    function = offered.in_direction(case, offered.ORIGINALS[case.mask])
    matches, misses = find(Graph(flatten(compat.make_jaxpr(function, *offered.types(case)))), (case.kernel,), True)
    if len(matches) != 1:
        raise ValueError(f"{case}: {len(matches)} sites were recognised, not one: {[m.reason for m in misses]}")
    return matches[0]
