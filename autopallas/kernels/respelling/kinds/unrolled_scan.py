"""Loops that compile several steps as one, ``lax.scan(..., unroll=16)``: one step at a time.

XLA's CPU compiler makes a kernel of all that it can fuse, and computes again what several results read: of steps that
stand one after the other, the last computes what all of them compute.  A loop of single steps lacks nothing there,
since no call lies between its steps, and takes a fraction of the time to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas import jaxprs
from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.indexed_loops import (
    as_written,
    chosen,
    loop_in,
    loop_of,
    results_of,
    without_known_values,
)
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.kinds import scan_checkpoint
from autopallas.kernels.respelling.networks import float32_types
from autopallas.kernels.respelling.plain_steps import is_plain
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND", "LEAST_UNROLL"]

LEAST_UNROLL = 4
"""Loops of two or three steps at a time were 0.6 to 2 times as fast one by one."""


def _match(graph: Graph, node: Node) -> Found | None:
    params = node.equation.params
    if int(params["unroll"]) < LEAST_UNROLL or int(params["length"]) < 2 * int(params["unroll"]):
        return None
    place = loop_of(graph, node)
    if place is None or not is_plain(place[0].step):
        return None
    loop, numbers = place
    results, kept = results_of(graph, node)
    stacks = any(i >= loop.carried for i in kept)
    if not results or (stacks and scan_checkpoint.goes_before(graph, KIND.name)):
        return None
    return Found((("loop", without_known_values(loop)), ("results", kept)), numbers, results)


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    return chosen(spec, replace(loop_in(spec), unroll=1).as_written(operands))


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns what a step holds, whether it is long, and how many steps are compiled as one."""
    loop = loop_in(spec)
    names = {equation.primitive.name for equation in jaxprs.every_equation(loop.step)}
    holds = "products" if "dot_general" in names else "sums" if _REDUCTIONS & names else "elementwise"
    steps = "long" if len(jaxprs.open_jaxpr(loop.step)[0].eqns) >= _LONG else "short"
    several = "4 to 7" if loop.unroll < 8 else "8 to 15" if loop.unroll < 16 else "16 or more"
    return f"{holds}, {steps} steps, {several} at a time"


_LONG = 20
"""Equations of a step from which on the gains were greater."""
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin"})


Arrays: TypeAlias = tuple[jax.Array, ...]
Pair: TypeAlias = tuple[jax.Array, jax.Array]
Four: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields advantages of a policy, a simulated pole, a state-space model and its backward, and a gated recurrent unit
    and its backward, of several sizes."""
    for unroll in (4, 8, 16):
        for steps, width in ((128, 64), (128, 1024), (512, 4096)):
            types = float32_types((steps, width), (steps, width), (steps, width))
            yield f"advantages-{unroll}-{steps}x{width}", Sample(partial(_advantages, unroll), types)
        for steps, width in ((256, 64), (256, 1024), (256, 16384)):
            yield f"pole-{unroll}-{steps}x{width}", Sample(partial(_pole, unroll), float32_types((steps, width)))
        for steps, width, states in ((256, 32, 16), (256, 1024, 16), (1024, 4096, 16)):
            types = float32_types((steps, width), (steps, width), (steps, states))
            yield f"states-{unroll}-{steps}x{width}", Sample(partial(_states, unroll), types)
            types = float32_types((steps, width, states), *(type_.shape for type_ in types), (steps, width))
            if steps * width * states < 2**24:
                yield f"states_backward-{unroll}-{steps}x{width}", Sample(partial(_states_backward, unroll), types)
        for steps, batch, width in ((64, 8, 32), (128, 32, 128), (256, 64, 256)):
            weights = (width, 3 * width), (width, 3 * width)
            types = float32_types((steps, batch, width), *weights)
            yield f"gates-{unroll}-{steps}x{batch}x{width}", Sample(partial(_gates, unroll), types)
            types = float32_types(*[(steps, batch, width)] * 3, *weights)
            yield f"gates_backward-{unroll}-{steps}x{batch}x{width}", Sample(partial(_gates_backward, unroll), types)


def _advantages(unroll: int, reward: jax.Array, value: jax.Array, done: jax.Array) -> jax.Array:
    """Generalised advantages, with a bound, [time, environments]."""

    def step(carried: Pair, own: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Pair, jax.Array]:
        (advantage, following), (reward, value, done) = carried, own
        error = reward + 0.99 * following * (1 - done) - value
        advantage = jnp.clip(error + 0.94 * (1 - done) * advantage, -10, 10)
        return (advantage, value), advantage

    first = jnp.zeros_like(reward[0]), jnp.zeros_like(reward[0])
    return lax.scan(step, first, (reward, value, done), reverse=True, unroll=unroll)[1]


def _pole(unroll: int, action: jax.Array) -> tuple[Four, jax.Array]:
    """A pole on a cart, [time, environments]."""

    def step(carried: Four, action: jax.Array) -> tuple[Four, tuple[Four, jax.Array]]:
        place, speed, angle, turn = carried
        cosine, sine = jnp.cos(angle), jnp.sin(angle)
        push = (jnp.where(action > 0, 10.0, -10.0) + 0.05 * turn**2 * sine) / 1.1
        turned = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        pushed = speed + 0.02 * (push - 0.05 * turned * cosine / 1.1)
        carried = place + 0.02 * speed, pushed, angle + 0.02 * turn, turn + 0.02 * turned
        return carried, (carried, (jnp.abs(carried[2]) < 0.2).astype(jnp.float32))

    first = jnp.zeros_like(action[0])
    return lax.scan(step, (first, first, first, first), action, unroll=unroll)[1]


def _state(h: jax.Array, a: jax.Array, x: jax.Array, b: jax.Array) -> Pair:
    h = jnp.tanh(a[:, None] * h + x[:, None] * b)
    return h, (h * b).sum(-1)


def _states(unroll: int, a: jax.Array, x: jax.Array, b: jax.Array) -> jax.Array:
    first = jnp.zeros((a.shape[1], b.shape[1]), a.dtype)

    def step(h: jax.Array, own: tuple[jax.Array, jax.Array, jax.Array]) -> Pair:
        return _state(h, *own)

    return lax.scan(step, first, (a, x, b), unroll=unroll)[1]


def _gate(h: jax.Array, x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
    reset, update, new = jnp.split(x @ w, 3, -1)
    of_reset, of_update, of_new = jnp.split(h @ u, 3, -1)
    update = jax.nn.sigmoid(update + of_update)
    return (1 - update) * jnp.tanh(new + jax.nn.sigmoid(reset + of_reset) * of_new) + update * h


def _gates(unroll: int, x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
    def step(h: jax.Array, x: jax.Array) -> Pair:
        h = _gate(h, x, w, u)
        return h, h

    return lax.scan(step, jnp.zeros_like(x[0]), x, unroll=unroll)[1]


def _backward(
    unroll: int, step: Callable[..., jax.Array], h: jax.Array, own: Arrays, shared: Arrays, cotangent: jax.Array
) -> tuple[tuple[jax.Array, Arrays], Arrays]:
    """The backward of a loop whose steps are computed again; h are the states before the steps."""

    def one(
        carried: tuple[jax.Array, Arrays], given: tuple[jax.Array, Arrays, jax.Array]
    ) -> tuple[tuple[jax.Array, Arrays], Arrays]:
        (of_state, of_shared), (h, own, cotangent) = carried, given
        found = jax.vjp(step, h, *own, *shared)[1](of_state + cotangent)
        more = found[1 + len(own) :]
        return (found[0], tuple(a + b for a, b in zip(of_shared, more, strict=True))), found[1 : 1 + len(own)]

    first = jnp.zeros_like(h[0]), tuple(map(jnp.zeros_like, shared))
    found: tuple[tuple[jax.Array, Arrays], Arrays] = lax.scan(
        one, first, (h, own, cotangent), reverse=True, unroll=unroll
    )
    return found


def _states_backward(
    unroll: int, h: jax.Array, a: jax.Array, x: jax.Array, b: jax.Array, cotangent: jax.Array
) -> tuple[object, Arrays]:
    def step(h: jax.Array, a: jax.Array, x: jax.Array, b: jax.Array) -> jax.Array:
        return _state(h, a, x, b)[0]

    spread = jnp.broadcast_to(cotangent[..., None], h.shape)
    return _backward(unroll, step, h, (a, x, b), (), spread)


def _gates_backward(
    unroll: int, h: jax.Array, x: jax.Array, cotangent: jax.Array, w: jax.Array, u: jax.Array
) -> tuple[object, Arrays]:
    return _backward(unroll, _gate, h, (x,), (w, u), cotangent)


KIND = Kind(
    name="unrolled_scan",
    primitives=("scan",),
    numerics="reordered",
    instead="a loop that takes one step at a time",
    match=_match,
    original=as_written,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=3.0,  # one of 2.3 and 2.7 with JAX 0.10 takes 1.1 times as long with 0.12
    keeps_steps=True,
    platforms=("cpu",),
)
