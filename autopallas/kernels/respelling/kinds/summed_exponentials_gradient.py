"""Train steps of loops whose steps sum exponentials of sums of arrays that lack axes.

The loop stacks all exponentials for the reversed loop of its backward.  Here it keeps what each step is given, and the
backward computes each step again, as products of matrices of exponentials.  Places are found by
:mod:`autopallas.patterns.exponential_loops`, since each is two loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr
from autopallas.kernels.respelling.checkpointed_scan import CheckpointedScan, Part, pair_as_written, pair_in
from autopallas.kernels.respelling.chunks import Arrays
from autopallas.kernels.respelling.exponential_plan import Plan
from autopallas.kernels.respelling.exponential_products import can_be_sure, is_sure, run, shared
from autopallas.kernels.respelling.exponential_sums import planned
from autopallas.kernels.respelling.kind import Kind, Sample, of_no_equation
from autopallas.kernels.respelling.kinds import summed_exponentials
from autopallas.kernels.respelling.networks import float32_types
from autopallas.kernels.respelling.plain_steps import at_a_time
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND", "plan_of_backward"]


def plan_of_backward(pair: CheckpointedScan) -> Plan | None:
    """Returns what a step of the backward computes, that of the loop again included, or None if it is no such step."""
    forward, backward = pair.forward, pair.backward
    zeros = forward.zeros | {forward.constants + i for i in backward.zeros}
    first = backward.constants + forward.operands
    carried = {i: first + i for i in range(backward.carried)}
    return planned(_both_steps(pair), forward.constants + backward.constants, zeros, carried)


def _both_steps(pair: CheckpointedScan) -> ClosedJaxpr:
    """Returns a step of the loop followed by that of its backward: from the constants of both, what the loop carries,
    its slices, what the backward carries, and its own slices to what the backward carries, and its needed results."""
    forward, backward = pair.forward, pair.backward
    places = tuple(dict(pair.residuals))
    types = [[v.aval for v in jaxprs.open_jaxpr(loop.step)[0].invars] for loop in (forward, backward)]
    first, last = forward.constants, backward.constants + backward.carried
    again = compat.jaxpr_as_fun(forward.step_giving([forward.carried + i for i in places]))
    reversed_step = compat.jaxpr_as_fun(backward.step_giving([*range(backward.carried), *_stacked(pair)]))

    def both(*given: jax.Array) -> tuple[jax.Array, ...]:
        rest = list(given)
        of_first, of_second, own, carried, slices = (
            [rest.pop(0) for _ in range(count)]
            for count in (
                first, backward.constants, forward.operands - first, backward.carried, len(pair.own_slices),
            )
        )  # fmt: skip
        found = dict(zip(places, again(*of_first, *own), strict=True))
        return tuple(reversed_step(*of_second, *carried, *pair.with_residuals(slices, found)))

    own_slices = [types[1][last + i] for i in pair.own_slices]
    inputs = [*types[0][:first], *types[1][: backward.constants], *types[0][first:]]
    return compat.make_jaxpr(both, *inputs, *types[1][backward.constants : last], *own_slices)


def _stacked(pair: CheckpointedScan) -> list[int]:
    """Returns the places of the backward's needed results among what its step gives."""
    return [i for i in pair.given if i >= pair.backward.carried]


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    pair = pair_in(spec)
    match cast(Part, spec["part"]):
        case "forward":
            found, starts = _forward(pair, operands)
            return [*found, *starts]
        case "backward":
            return _backward(pair, operands)
        case "both":
            found, starts = _forward(pair, operands[: pair.forward_operands])
            return [*found, *_backward(pair, pair.after_forward(operands, starts))]


def _forward(pair: CheckpointedScan, operands: Sequence[jax.Array]) -> tuple[Arrays, Arrays]:
    """Returns the loop's needed results, and what it carries before each step."""
    forward = pair.forward
    given = forward.filled(operands)
    constants, last = given[: forward.constants], forward.constants + forward.carried
    step = forward.step_giving([*range(forward.carried), *(i for i in pair.needed if i >= forward.carried)])
    carries = {i: forward.constants + i for i in range(forward.carried)}
    plan = planned(step, forward.constants, forward.zeros, carries)
    plain = compat.jaxpr_as_fun(step)

    def computed(step: Callable[[Arrays], Sequence[jax.Array]]) -> tuple[Arrays, Arrays]:
        def one(carried: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
            found = list(step([*constants, *carried, *own]))
            return found[: forward.carried], [*found[forward.carried :], *carried]

        ends: Arrays
        stacks: Arrays
        ends, stacks = lax.scan(
            one,
            given[forward.constants : last],
            given[last:],
            pair.length,
            forward.reverse,
            unroll=at_a_time(forward.unroll, pair.length),
        )
        return ends, stacks

    ends, stacks = _where_sure(plan, constants, lambda every: plain(*every), computed)
    results = iter(stacks)
    needed = [ends[i] if i < forward.carried else next(results) for i in pair.needed]
    return needed, list(results)


def _backward(pair: CheckpointedScan, operands: Sequence[jax.Array]) -> Arrays:
    """Returns the backward's needed results."""
    backward = pair.backward
    of_loop, slices, starts, rest = pair.read_again(operands)
    last = backward.constants + backward.carried
    constants = [*of_loop, *rest[: backward.constants]]
    plan = plan_of_backward(pair)
    assert plan is not None
    plain = compat.jaxpr_as_fun(_both_steps(pair))

    def computed(step: Callable[[Arrays], Sequence[jax.Array]]) -> tuple[Arrays, Arrays]:
        def one(carried: Arrays, own: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            found = list(step([*constants, *own[0], *carried, *own[1]]))
            return found[: backward.carried], found[backward.carried :]

        ends: Arrays
        stacks: Arrays
        ends, stacks = lax.scan(
            one, rest[backward.constants : last], ([*starts, *slices], rest[last:]), pair.length, backward.reverse,
            unroll=at_a_time(backward.unroll, pair.length),
        )  # fmt: skip
        return ends, stacks

    return pair.chosen(*_where_sure(plan, constants, lambda every: plain(*every), computed))


def _where_sure(
    plan: Plan | None,
    constants: Arrays,
    plain: Callable[[Arrays], Sequence[jax.Array]],
    computed: Callable[[Callable[[Arrays], Sequence[jax.Array]]], tuple[Arrays, Arrays]],
) -> tuple[Arrays, Arrays]:
    """Returns what a loop gives whose steps take products where these are sure to be trusted, else what is written."""
    if plan is None:
        return computed(plain)

    def as_products() -> tuple[Arrays, Arrays]:
        of_all = shared(plan, constants)
        return computed(lambda every: run(plan, of_all, every))

    if not can_be_sure(plan):
        return as_products()
    found: tuple[Arrays, Arrays] = lax.cond(is_sure(plan, constants), as_products, lambda: computed(plain))
    return found


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    plan = plan_of_backward(pair_in(spec))
    assert plan is not None
    return summed_exponentials.size_of(plan)


def _samples() -> Iterator[tuple[str, Sample]]:
    for batch, states in (*itertools.product((1, 8, 32), (64, 128, 256)), (8, 32), (32, 16), (32, 32)):
        yield f"markov-{batch}x{states}", Sample(_markov, float32_types((64, batch, states), (states, states)))
    for n in (64, 128, 256, 512):
        yield f"sinkhorn-{n}", Sample(_sinkhorn, float32_types((n, n)))


def _markov(x: jax.Array, transitions: jax.Array) -> tuple[jax.Array, ...]:
    """Returns gradients of the log-likelihood of a hidden Markov model; x is [time, batch, states]."""
    found: tuple[jax.Array, ...] = jax.grad(
        lambda *given: jnp.sum(jnp.sin(summed_exponentials.markov(*given))), (0, 1)
    )(x, transitions)
    return found


def _sinkhorn(costs: jax.Array) -> jax.Array:
    """Returns the gradient of a function of the potentials of optimal transport; ``costs`` is [n, m]."""
    found: jax.Array = jax.grad(lambda costs: sum(jnp.sum(jnp.sin(x)) for x in summed_exponentials.sinkhorn(costs)))(
        costs
    )
    return found


KIND = Kind(
    name="summed_exponentials_gradient",
    primitives=(),
    numerics="tolerance",
    instead="products of matrices of exponentials, where these are large enough, and a backward that runs steps again",
    match=of_no_equation,
    original=pair_as_written,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=1.5,
    platforms=("cpu",),
)
