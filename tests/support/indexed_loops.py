"""Finds and judges loops that index arrays at their own step."""

from __future__ import annotations

import jax

from autopallas.graph import Graph, flatten
from autopallas.patterns import find
from support.compare import compare

__all__ = ["judged", "loops", "only_sets"]


def loops(function, *arguments):
    sites = find(Graph(flatten(jax.make_jaxpr(function)(*arguments))), ("indexed_loop",), True)[0]
    return [dict(site.spec.parameters)["loop"] for site in sites]


def only_sets(loop):
    """Whether a loop copies no whole array in a step, as the forward of one that sets slices and reads none of them."""
    return not (loop.plan.whole_sums or loop.plan.clears or loop.plan.stacks)


def judged(function, *arguments, sites=1, argnums=(0, 1)):
    """Judges value and gradients by float64, and returns the loops that were found and copy arrays."""
    step = jax.value_and_grad(function, argnums)
    found = loops(step, *arguments)
    result = compare(step, arguments, gradients=False)
    assert result.complaints == []
    assert result.counts("respelling") >= len(found)  # loops that compile several steps as one are sites too
    copying = [loop for loop in found if not only_sets(loop)]
    assert len(copying) == sites
    return copying
