"""Sites that wait for each other, of which some come last."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from autopallas.graph import Graph, flatten
from autopallas.plan.nested_sites import without_nested


def program(x):
    first, second = jnp.sin(x), jnp.cos(x)
    return first, second, jnp.exp(second), jnp.tanh(first)


def site(reads, priority):
    """What planning asks of a match that computes values from others."""
    return SimpleNamespace(
        site=SimpleNamespace(operation=SimpleNamespace(priority=priority)),
        results=tuple(reads),
        replaced=tuple(reads),
        reads=reads,
        equations=(),
        sources=(),
        operands=tuple(n for own in reads.values() for n in own),
        holds_any=lambda numbers: False,
    )


@pytest.mark.parametrize("applied", [False, True])
def test_a_site_that_comes_last_is_ordered_by_what_is_applied_beside_it(applied):
    """A site that gives the same value hides what it waits for, until it is known not to be applied."""
    graph = Graph(flatten(jax.make_jaxpr(program)(jnp.ones(4))))
    root = graph.root
    (x,) = (graph.numbers[root][v] for v in root.invars)
    first, second, of_second, of_first = (graph.numbers[root][v] for v in root.outvars)
    other = site({first: (x,)}, 0)
    one = site({first: (x, second), of_second: (x, second)}, -1)
    another = site({second: (x, first), of_first: (x, first)}, -1)
    decided = [SimpleNamespace(verdict="applied" if own else "kept") for own in (applied, True, True)]
    left, _ = without_nested(graph, [other, one, another], decided)
    assert other in left
    assert (one in left and another in left) is applied  # one of them waits for what is applied, or for the other
