"""Loops whose steps sum exponentials of sums of arrays that lack axes, as of hidden Markov models and Sinkhorn's.

``logsumexp(a[:, None] + b, axis=0)`` takes an exponential for each element of b in each step.  It is the logarithm of a
product with the matrix ``exp(b)``, which is computed once for all steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.exponential_plan import Plan
from autopallas.kernels.respelling.exponential_products import can_be_sure, is_sure, run, shared
from autopallas.kernels.respelling.exponential_sums import may_sum, planned
from autopallas.kernels.respelling.indexed_loops import (
    IndexedLoop,
    as_written,
    chosen,
    key_of,
    loop_in,
    loop_of,
    results_of,
)
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.networks import float32_types
from autopallas.kernels.respelling.plain_steps import at_a_time, is_plain
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND", "LEAST_STEPS", "is_worth_it", "markov", "sinkhorn", "size_of"]

LEAST_STEPS = 4
_LEAST_ELEMENTS = 2**12
"""Exponentials of a step: 1024 and 2048 took 0.5 to 1.1 times as long as products and their tests."""
_MANY = 2**13


def _match(graph: Graph, node: Node) -> Found | None:
    if int(node.equation.params["length"]) < LEAST_STEPS or not may_sum(node.equation.params["jaxpr"]):
        return None
    place = loop_of(graph, node)
    if place is None:
        return None
    loop, numbers = place
    plan = _plan(loop)
    if plan is None or not (KIND.name in graph.named or is_worth_it(plan)):
        return None
    results, kept = results_of(graph, node)
    loop = replace(loop, known=())
    return Found((("loop", replace(loop, key=key_of(loop))), ("results", kept)), numbers, results)


def is_worth_it(plan: Plan) -> bool:
    """Returns whether a step takes exponentials enough, which may be known to be products before the loop, and nothing
    else that may gain more by itself."""
    return plan.elements >= _LEAST_ELEMENTS and can_be_sure(plan) and is_plain(plan.graph.root.source)


def _plan(loop: IndexedLoop) -> Plan | None:
    carried = {i: loop.constants + i for i in range(loop.carried)}
    return planned(loop.step, loop.constants, loop.zeros, carried)


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    loop = loop_in(spec)
    plan = _plan(loop)
    assert plan is not None
    constants = loop.given(operands)[: loop.constants]

    def as_products() -> list[jax.Array]:
        of_all = shared(plan, constants)

        def step(
            constants: Sequence[jax.Array], carried: Sequence[jax.Array], slices: Sequence[jax.Array]
        ) -> list[jax.Array]:
            return run(plan, of_all, [*constants, *carried, *slices])

        ends, stacks = replace(loop, unroll=at_a_time(loop.unroll, loop.length)).computed(
            operands, step, lambda _, first: first
        )
        return chosen(spec, [*ends, *stacks])

    if not can_be_sure(plan):
        return as_products()
    found: list[jax.Array] = lax.cond(is_sure(plan, constants), as_products, lambda: list(as_written(spec, *operands)))
    return found


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    plan = _plan(loop_in(spec))
    assert plan is not None
    return size_of(plan)


def size_of(plan: Plan) -> str:
    """Returns how many exponentials a step takes, in words."""
    return f"{'few' if plan.elements <= _MANY else 'many'} exponentials"


def _samples() -> Iterator[tuple[str, Sample]]:
    for batch, states in (*itertools.product((1, 8, 32), (64, 128, 256)), (8, 32), (32, 16), (32, 32), (1, 512)):
        yield f"markov-{batch}x{states}", Sample(markov, float32_types((64, batch, states), (states, states)))
    for n in (64, 128, 256, 512, 1024):
        yield f"sinkhorn-{n}", Sample(sinkhorn, float32_types((n, n)))


def markov(x: jax.Array, transitions: jax.Array) -> jax.Array:
    """Returns the log-likelihoods of a hidden Markov model; x is [time, batch, states]."""

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jax.nn.logsumexp(state[:, :, None] + transitions, axis=1) + x, None

    return jax.nn.logsumexp(lax.scan(step, x[0], x[1:])[0], axis=-1)


def sinkhorn(costs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the potentials of optimal transport between two uniform distributions; ``costs`` is [n, m]."""
    n, m = costs.shape

    def step(_: int, potentials: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        f, g = potentials
        f = -jax.nn.logsumexp(g[None] - costs, axis=1) - math.log(n)
        return f, -jax.nn.logsumexp(f[:, None] - costs, axis=0) - math.log(m)

    found: tuple[jax.Array, jax.Array] = lax.fori_loop(0, 50, step, (jnp.zeros(n), jnp.zeros(m)))
    return found


KIND = Kind(
    name="summed_exponentials",
    primitives=("scan",),
    numerics="tolerance",
    instead="products of matrices of exponentials, where these are large enough, and the logarithms of these",
    match=_match,
    original=as_written,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=1.5,
    platforms=("cpu",),
)
