"""Takes an attention with its backward over from an equal one, such as that of another layer.

A proof at one place holds at another place of the same form (:mod:`autopallas.graph.proof_cache`).  What follows the
proof is compared value by value: the forward's equations, what they read, and the cotangents that were found.  Wherever
anything differs, or lies in several bodies, the place gets a proof of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopallas import jaxprs
from autopallas.graph import Body, Graph, Node
from autopallas.graph.body_links import homes_of
from autopallas.kernels.attention.site import AttentionSite
from autopallas.patterns.attention.draft import AttentionDraft, Proved, original_of
from autopallas.patterns.backward import Backward
from autopallas.patterns.expressions import computed_from
from autopallas.patterns.forward import Forward, PerExample
from autopallas.patterns.match import BackwardMatch, Match, Mismatch
from autopallas.patterns.settling import Search

__all__ = ["TakenOver"]


@dataclass(eq=False)
class TakenOver:
    """A draft at a place where a proof was taken over.

    Attributes:
      graph: the program.
      model: the draft that was proved, at another place.
      image: per value that its proof met, the corresponding one here.
      second: the contraction of probabilities and values here.
      proved: what is proved here.
      anew: makes a draft by a proof of its own.
    """

    graph: Graph
    model: AttentionDraft
    image: Mapping[int, int]
    second: Node
    proved: Proved
    anew: Callable[[], AttentionDraft]
    _forwards: tuple[Forward, ...] = ()
    _own: AttentionDraft | None = None

    def search(self) -> Search | None:
        """Returns what to look for as this site's backward; None if the site spans several bodies."""
        self._forwards = self._same_forwards()
        search: Search | None = None
        for forward, first in zip(self._forwards[::-1], self.model.searched[::-1], strict=False):
            search = Search(forward, first.roles, first.others, instead=search)
        if search is None:
            self._own = self.anew()
            search = self._own.search()
        return search

    def match_with(self, search: Search) -> Match:
        """Builds the site together with the backwards that were found for it.

        Raises:
          Mismatch: values that the site reads are not available where its backward stands.
        """
        again = self._own is not None or isinstance(search.forward, PerExample)
        match = None if again else self._match(search)
        if match is None:
            match = (self._own or self.anew()).match_with(search)
        return match

    def _same_forwards(self) -> tuple[Forward, ...]:
        """Returns the forwards of this site, one for each search of the model; none if one differs from the model's."""
        scope, body = self.model.scope, self.graph.definitions[self.proved.root].body
        if body is not self.model.body or self.model.candidates or scope.follows is not None or scope.further:
            return ()
        found = [self._same_forward(search.forward) for search in self.model.searched]
        forwards = tuple(forward for forward in found if forward is not None)
        return forwards if len(forwards) == len(found) else ()

    def _same_forward(self, first: Forward) -> Forward | None:
        """Returns the forward of this site if it does what the model's does, to the corresponding values."""
        graph, image, body = self.graph, self.image, self.model.body
        numbers = graph.numbers[body]
        inside = {image.get(numbers[v]) for equation in first.equations for v in equation.outvars}
        if None in inside:
            return None
        forward = Forward(graph, body, self.proved.root, inside.__contains__)
        if not forward.complete or [use.number for use in forward.uses] != [image.get(u.number) for u in first.uses]:
            return None
        known, score = {self.proved.score: True}, self.proved.score
        if any(computed_from(graph, use.number, known, score) for use in forward.uses):
            return None
        return forward if forward.shape() == first.shape() else None

    def _match(self, search: Search) -> Match | None:
        """Returns the model's match for the corresponding values; None where something does not correspond."""
        graph, model, forward = self.graph, self.model, search.forward
        if model.matched is None:
            return None
        first, found, match = model.matched
        if isinstance(first, PerExample):
            return None
        if [one.forward for one in model.searched].index(first) != self._forwards.index(forward):
            return None
        roles = model.role_uses(first)  # the same places, since the forwards are equal
        body = model.body
        if match.homes != (body,) or any(backward.body is not body for backward in match.backwards):
            return None
        if {home for home, _ in graph.occurrences(self.proved.root)} != {body}:
            return None
        here = self._corresponding(found, search.found, {use for uses in roles for use in uses}, body)
        if here is None or not here.keys() >= {*match.replaced, *match.operands}:
            return None
        operands = [here[number] for number in match.operands]
        types, site = tuple(graph.dtype(number) for number in operands), match.site
        assert isinstance(site, AttentionSite)
        if types != site.types or not all(number in graph.positions[body] for number in operands):
            return None
        places = [model.place(role) for role in range(len(roles))]
        leading = 1 + max(places)
        try:
            original = original_of(graph, body, forward, roles, places, operands, leading, _refuse)
        except (Mismatch, _Different):
            return None
        return replace(
            match,
            operands=tuple(operands),
            results=(self.proved.root,),
            original=original,
            location=jaxprs.location(self.second.equation),
            backwards=tuple(
                BackwardMatch(
                    body, here[b.cotangent], tuple((place, here[number]) for place, number in b.gradients), b.mapped
                )
                for b in match.backwards
            ),
        )

    def _corresponding(
        self, there: Sequence[Backward], here: Sequence[Backward], roles: set[int], body: Body
    ) -> dict[int, int] | None:
        """Returns, per value of the model and its backwards, the corresponding one; None where backwards differ."""
        graph, known = self.graph, self.graph.positions[body]
        pairs: dict[int, int] = {**self.image, self.model.root: self.proved.root}
        if len(there) != len(here):
            return None
        for first, second in zip(there, here, strict=True):
            same = first.mapped == second.mapped and list(first.levels) == list(second.levels)
            homes = homes_of(graph, second.cotangent, second.gradients)
            if not same or not roles.issuperset(first.levels) or homes != [body]:
                return None
            if pairs.setdefault(first.cotangent, second.cotangent) != second.cotangent:
                return None
            for use, levels in first.levels.items():
                if len(levels) != len(second.levels[use]):
                    return None
                for a, b in zip(levels, second.levels[use], strict=True):
                    fits = [known.get(level.cotangent, (-1,))[0] >= 0 and level.operand in known for level in (a, b)]
                    if fits[0] != fits[1] or self.image.get(a.operand) != b.operand:
                        return None
                    if pairs.setdefault(a.cotangent, b.cotangent) != b.cotangent:
                        return None
        return pairs if len(set(pairs.values())) == len(pairs) else None


class _Different(Exception):
    """Reports that this site reads something that the model does not read."""


def _refuse(number: int) -> None:
    """Refuses a value that the site would read in addition to the model's."""
    raise _Different(number)
