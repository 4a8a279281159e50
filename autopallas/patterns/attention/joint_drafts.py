"""Holds what drafts of several attentions in one site share: blocks of keys under one softmax, and sums of maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Self

from autopallas.graph import Graph
from autopallas.patterns.attention.draft import AttentionDraft, Proved
from autopallas.patterns.attention.score_terms import Product
from autopallas.patterns.forward import Forward, differentiable
from autopallas.patterns.settling import Search

__all__ = ["SeveralDraft"]


class SeveralDraft(AttentionDraft):
    """Treats several proved attentions, whose results are added up to one value, as one site.

    Attributes:
      parts: the attentions; the site stands at the place of the first one.
    """

    parts: list[AttentionDraft]
    _places: list[int]

    @classmethod
    def of(cls, parts: Sequence[AttentionDraft]) -> Self:
        """Makes the draft of all parts."""
        draft = cls(**{field.name: getattr(parts[0], field.name) for field in fields(AttentionDraft)})
        draft.parts = list(parts)
        return draft

    @property
    def proved(self) -> Proved:
        further = tuple(part.score.value for part in self.parts[1:])
        return replace(super().proved, further=further)

    def go_on(self, graph: Graph) -> None:
        for part in self.parts:
            part.go_on(graph)

    def place(self, role: int) -> int:
        return self._places[role]

    def _add_terms(self) -> None:
        """Adds nothing, since each part has one product."""

    # ------------------------------------------------------------------ the backward

    def search(self) -> Search | None:
        products = {number for part in self.parts for number in part._products(())}

        def within(number: int) -> bool:
            return number in products or any(part.scope.depends(number) for part in self.parts)

        forward = Forward(self.graph, self.body, self.root, within)
        if not forward.complete or self._uses(forward) is None:
            return None
        roles = self.role_uses(forward)
        wanted = [i for uses in roles for i in uses if differentiable(forward.uses[i])]
        every = {i for uses in roles for i in uses}
        others = [i for i, use in enumerate(forward.uses) if i not in every and differentiable(use)]
        several = [i for uses in roles if len(uses) > 1 for i in uses]
        return Search(forward, list(dict.fromkeys(wanted)), others, summed=several)

    def _terms_of(self, forward: Forward) -> tuple[Product, ...]:
        return ()

    def _uses(self, forward: Forward) -> tuple[int, ...] | None:
        """Returns the positions of queries, keys and values, part by part."""
        found = [AttentionDraft._uses(part, forward) for part in self.parts]
        return None if None in found else tuple(use for uses in found if uses is not None for use in uses)
