"""The steps t and s between which scores are: which of both a value varies with, and which pairs a mask keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.numerics.casts import keeps_range, rounds
from autopallas.patterns.linear_attention.masks import MaskReader, Seen

__all__ = ["BothSteps", "Role", "Unread"]

Role: TypeAlias = Literal["t", "s", ""]


class Unread(Exception):
    """A factor of scores is no mask, number or decay.

    Attributes:
      reason: what it is instead, in words; empty where nothing resembles a decay.
    """

    def __init__(self, reason: str = ""):
        super().__init__(reason)
        self.reason = reason


class BothSteps:
    """The steps t and s, and what values and masks have to do with them."""

    def __init__(self, masks: MaskReader, steps: tuple[Atom, ...]):
        self.masks, self.scope, self.space, self.graph = masks, masks.scope, masks.space, masks.graph
        self.steps = steps
        self.count = self.space.extent(steps)

    @property
    def keys(self) -> tuple[Atom, ...]:
        return self.space.resolve(self.masks.keys)

    def roles(self, ref: Ref) -> set[Role]:
        """Returns which of both steps a value varies with."""
        atoms = self.space.atoms(ref)
        found: set[Role] = set()
        if not atoms.isdisjoint(self.space.resolve(self.steps)):
            found.add("t")
        if not atoms.isdisjoint(self.keys):
            found.add("s")
        return found

    def mask(self, ref: Ref, kept: bool = True) -> Seen:
        """Returns which pairs of steps a mask keeps, where it compares positions."""
        found = self.masks.mask(ref)
        if found is None or self.space.resolve(found.steps) != self.space.resolve(self.steps):
            raise Unread("they are masked by something else than positions")
        return found.seen if kept else found.seen.inverted()

    def role_of(self, atoms: Sequence[Atom]) -> Role:
        atoms = self.space.resolve(atoms)
        if atoms == self.space.resolve(self.steps):
            return "t"
        if atoms == self.keys:
            return "s"
        raise Unread("decays are summed or counted along another axis than that of the steps")

    def keeps_numbers(self, source: Ref, target: Ref) -> bool:
        """Returns whether a cast keeps every number but for its rounding."""
        dtypes = self.graph.dtype(source.value), self.graph.dtype(target.value)
        return rounds(*dtypes) and keeps_range(*dtypes)

    def described(self, ref: Ref) -> str:
        """Returns what a value is, in words; an empty string of products, which are no decays."""
        if self.space.contraction(ref) is not None:
            return ""
        name = self.scope.name(ref)
        return "a factor is an argument of the program" if name is None else f"a factor is computed by {name}"
