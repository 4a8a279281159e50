"""Makes sites of examples, each of which has gradients of its own of what all of them read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopallas.graph.one_example import OneExample
from autopallas.patterns.backward import Backward
from autopallas.patterns.forward import PerExample
from autopallas.patterns.match import Match, Mismatch, Spread
from autopallas.sites.indexed_site import IndexedSite

__all__ = ["of_examples"]


def of_examples(match: Match, forward: PerExample, found: Sequence[Backward]) -> Match:
    """Returns a site with backwards as one that reads what its examples share once for each of them.

    Args:
      match: the site, which has an operand for each use that has a gradient.
      forward: its forward.
      found: the backwards that were found for it.

    Raises:
      Mismatch: the site cannot be read so.
    """
    if not any(backward.spread for backward in found):
        return match
    axes: dict[int, int] = {}
    for backward in found:
        for use, axis in backward.spread.items():
            alone = forward.example.alone[use]
            if alone not in (None, axis) or axes.setdefault(forward.uses[use].number, axis) != axis:
                raise _differs()
    places = {position: axes[number] for position, number in enumerate(match.operands) if number in axes}
    site, example = match.site, OneExample.of(match.original, forward.example.axis)
    if not isinstance(site, IndexedSite) or example is None or any(example.axes[place] is not None for place in places):
        raise _differs()
    _, labels = site.result_views[0][example.axis]
    every = tuple(places.get(i) if own is None else own for i, own in enumerate(example.axes))
    repeated = {place for place in places if example.alone[place] is not None}
    original = example.mapped(every)
    gradients = [gradient for backward in match.backwards for gradient in backward.gradients]
    if any(forward.graph.shape(number) != original.in_avals[position].shape for position, number in gradients):
        raise _differs()
    spread = site.spread(places, repeated, labels)
    if spread is None:
        raise _differs()
    return replace(
        match,
        site=spread,
        original=original,
        spread=tuple(Spread(place, axis, example.size, place in repeated) for place, axis in places.items()),
    )


def _differs() -> Mismatch:
    return Mismatch(
        "each example of a vmap has gradients of its own of a value that all of them read, and it is read in several "
        "ways",
        advice="Read the value in one place, or map the parameters too: jax.vmap(jax.grad(loss)), with a copy of each.",
    )
