"""Defines cases: one computation at one size, spelled as people write it, to measure tables and benchmarks on.

An operation that can be tuned by its name has a module ``cases`` with what :class:`Cases` lists; its parts may have
one too, which adds their variants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, cast

import jax

from autopallas import compat
from autopallas.compat import ArrayFunction, Shaped
from autopallas.graph import Graph, flatten
from autopallas.patterns import Match, find
from autopallas.sites.operation import operation_folders, operation_named

__all__ = ["DIRECTIONS", "Case", "Cases", "Direction", "cases_of", "match_of"]

Direction: TypeAlias = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")


@dataclass(frozen=True, slots=True)
class Case:
    """One computation at one size.  ``sizes`` are named by the operation's letters, in display order."""

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
        """Returns whether every word of ``words`` is a word of this case: "forward causal T2048"."""
        return set(words.split()) <= set(str(self).split())


class Cases(Protocol):
    """Interface of an operation's module ``cases``."""

    @property
    def ORIGINALS(self) -> Mapping[str, ArrayFunction]:
        """Forward computation as people write it, by variant (:attr:`Case.mask`); the first is the plain one."""

    def table_grid(self, platform: str = "cpu") -> tuple[Case, ...]:
        """Returns a case for each row of the tuned table: the simulated rows of TPUs, or the measured ones."""

    def types(self, case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the types of all arguments; if there is a backward pass, the result's cotangent comes last."""

    def in_direction(self, case: Case, function: ArrayFunction) -> ArrayFunction:
        """Turns a function like an original into one of all the case's arguments, with gradients if it has them."""

    def case_of(self, types: Sequence[Shaped], variant: str, direction: Direction) -> Case:
        """Returns the case of arguments, without a cotangent.  Raises ValueError if they are not the operation's."""

    def direct(self, case: Case) -> ArrayFunction | None:
        """Returns the operation's own function, of the original's arguments; None if it has no such variant."""


@dataclass(frozen=True, slots=True)
class _Together:
    """The cases of an operation and of its parts, each of which has its variants."""

    each: tuple[Cases, ...]

    @property
    def ORIGINALS(self) -> Mapping[str, ArrayFunction]:
        return {variant: function for cases in self.each for variant, function in cases.ORIGINALS.items()}

    def _of(self, variant: str) -> Cases:
        return next((cases for cases in self.each if variant in cases.ORIGINALS), self.each[0])

    def table_grid(self, platform: str = "cpu") -> tuple[Case, ...]:
        return tuple(case for cases in self.each for case in cases.table_grid(platform))

    def types(self, case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self._of(case.mask).types(case)

    def in_direction(self, case: Case, function: ArrayFunction) -> ArrayFunction:
        return self._of(case.mask).in_direction(case, function)

    def case_of(self, types: Sequence[Shaped], variant: str, direction: Direction) -> Case:
        return self._of(variant).case_of(types, variant, direction)

    def direct(self, case: Case) -> ArrayFunction | None:
        return self._of(case.mask).direct(case)


def cases_of(operation: str) -> Cases | None:
    """Returns the cases of an operation and its parts by the operation's name, or None if it has none."""
    found = tuple(_modules(operation))
    return found[0] if len(found) == 1 else _Together(found) if found else None


def _modules(operation: str) -> Iterator[Cases]:
    for folder in operation_folders(operation):
        cases = cast("Cases | None", operation_named(folder).module("cases"))
        if cases is not None:
            yield cases


def match_of(case: Case) -> Match:
    """Returns the one site of a case, as the pipeline sees it.

    Raises:
      ValueError: no site is recognised, or several are.
    """
    offered = cases_of(case.kernel)
    assert offered is not None
    function = offered.in_direction(case, offered.ORIGINALS[case.mask])
    matches, misses = find(Graph(flatten(compat.make_jaxpr(function, *offered.types(case)))), (case.kernel,), True)
    if len(matches) != 1:
        raise ValueError(f"{case}: {len(matches)} sites were recognised, not one: {[m.reason for m in misses]}")
    return matches[0]
