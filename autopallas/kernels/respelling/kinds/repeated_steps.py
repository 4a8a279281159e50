"""Equal steps that a program writes one after the other, as a Python loop does: a loop.

XLA's CPU compiler puts into each kernel all that the kernel needs of the steps before it, and computes again what
several elements and results read: of steps that read their neighbours, some are computed hundreds of times.  Places are
found by :mod:`autopallas.patterns.repeated_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from autopallas.kernels.respelling.kind import Kind, Sample, of_no_equation
from autopallas.kernels.respelling.networks import float32_types
from autopallas.kernels.respelling.spec import RespellingSpec
from autopallas.kernels.respelling.step_sequences import StepsApart, steps_in

__all__ = ["KIND"]


def _original(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    return steps_in(spec).written_out(operands)


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    steps = steps_in(spec)
    return steps.apart(operands) if isinstance(steps, StepsApart) else steps.looped(operands)


# ---------------------------------------------------------------------- evidence

_LONG = 20
"""Equations of a step from which on it is filed as long."""


def _feature(spec: RespellingSpec) -> str:
    """Returns whether steps are a loop or apart, multiply or sum, roll arrays or read slices of them, whether they are
    long, and how many there are."""
    steps = steps_in(spec)
    names = [e.primitive.name for e in steps.step.jaxpr.eqns]
    product = "products, " if "dot_general" in names else ""
    apart = isinstance(steps, StepsApart)
    if isinstance(steps, StepsApart):
        names = list(steps.path)
    reads = "rolls" if "concatenate" in names else "elements" if {*names}.isdisjoint(("pad", "slice")) else "slices"
    length = "long" if len(names) >= _LONG else "short"
    several = "4 to 7" if steps.count < 8 else "8 to 15" if steps.count < 16 else "16 or more"
    return f"{f'apart, {product}' if apart else ''}{reads}, {several} {length} steps"


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields heat and two reacting substances on a torus, a relaxed potential, a convecting fluid's three numbers, and
    roots by iteration, of three sizes."""
    steps: dict[str, tuple[int, Callable[..., tuple[jax.Array, ...]]]] = {
        "heat": (1, _heat), "reaction": (2, _reaction), "relaxed": (2, _relaxed), "convection": (3, _convection),
        "iterated": (2, _iterated),
    }  # fmt: skip
    for count in (5, 10, 20):
        for name, (carried, step) in steps.items():
            for rows, columns in ((64, 64), (256, 256), (1024, 1024)):
                if (name, count, rows) == ("reaction", 20, 64):
                    continue  # the original takes minutes to compile with JAX 0.10
                function = partial(_repeated, step, count)
                yield f"{name}-{count}-{rows}", Sample(function, float32_types(*[(rows, columns)] * carried))
    yield from _apart_samples()


def _apart_samples() -> Iterator[tuple[str, Sample]]:
    """Yields trajectories of such steps and of waves, and the gradients by each state of these and of gated units."""
    steps: dict[str, tuple[int, Callable[..., tuple[jax.Array, ...]]]] = {
        "heat": (1, _heat), "reaction": (2, _reaction), "wave": (2, _wave), "convection": (3, _convection),
    }  # fmt: skip
    for name, (carried, step) in steps.items():
        for count, rows in ((6, 64), (10, 64), (20, 64), (10, 256)):
            if (name, count) in (("reaction", 20), ("heat", 6), ("reaction", 6), ("wave", 6)):
                continue  # with 20 steps, the original takes minutes to compile
            state = (rows, rows)
            if (name, rows) not in (("heat", 256), ("reaction", 256)):
                forward = partial(_trajectory, step, count)
                yield f"{name}-states-{count}-{rows}", Sample(forward, float32_types(*[state] * carried))
            if count > 6:
                given = [*[(count, *state)] * carried, *[state] * carried]
                yield f"{name}-gradients-{count}-{rows}", Sample(partial(_pulled, step, count), float32_types(*given))
    yield "reaction-kept-10-64", Sample(partial(_kept, 10), float32_types((64, 64), (64, 64)))
    for count, batch, width in ((10, 16, 64), (20, 16, 64), (10, 32, 128), (20, 32, 128)):
        shapes = [
            (count, batch, width), (count, batch, 3 * width), (count, batch, width), (width, 3 * width), (3 * width,)
        ]  # fmt: skip
        yield f"unit-gradients-{count}-{width}", Sample(partial(_pulled_unit, count), float32_types(*shapes))


def _trajectory(step: Callable[..., tuple[jax.Array, ...]], count: int, *state: jax.Array) -> jax.Array:
    """Returns what each of the steps gives first."""
    found = []
    for _ in range(count):
        state = step(*state)
        found.append(state[0])
    return jnp.stack(found)


def _kept(count: int, u: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Returns the states of a reaction, and how fast both substances spread in each step, as a gradient keeps it."""
    found: list[jax.Array] = []
    kept: list[jax.Array] = []
    for _ in range(count):
        spread = _neighbours(u) - 4 * u, _neighbours(v) - 4 * v
        reacted = u * v * v
        u, v = u + 0.16 * spread[0] - reacted + 0.035 * (1 - u), v + 0.08 * spread[1] + reacted - 0.1 * v
        found.append(u)
        kept += spread
    return [jnp.stack(found), *kept]


def _pulled(step: Callable[..., tuple[jax.Array, ...]], count: int, *given: jax.Array) -> list[jax.Array]:
    """Returns the gradients of all states, of what comes of the last one."""
    carried = len(given) // 2
    states, gradients = given[:carried], given[carried:]
    found = []
    for i in reversed(range(count)):
        _, pull = jax.vjp(step, *(x[i] for x in states))
        gradients = pull(gradients)
        found.append(gradients[0])
    return [*gradients, jnp.stack(found)]


def _unit(h: jax.Array, x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the next state of a gated recurrent unit [batch, width]."""
    g, width = h @ w, h.shape[-1]
    z = x + b
    reset, update = (jax.nn.sigmoid(z[:, i : i + width] + g[:, i : i + width]) for i in (0, width))
    candidate = jnp.tanh(z[:, 2 * width :] + reset * g[:, 2 * width :])
    return (1 - update) * candidate + update * h


def _pulled_unit(
    count: int, h: jax.Array, x: jax.Array, given: jax.Array, w: jax.Array, b: jax.Array
) -> list[jax.Array]:
    """Returns the gradients of the first state and of the weights, of what comes of each state."""
    gradient, total = jnp.zeros_like(given[0]), jnp.zeros_like(w)
    for i in reversed(range(count)):
        _, pull = jax.vjp(lambda h, w, x=x[i]: _unit(h, x, w, b), h[i], w)
        gradient, own = pull(gradient + given[i])
        total = total + own
    return [gradient, total]


def _repeated(step: Callable[..., tuple[jax.Array, ...]], count: int, *state: jax.Array) -> tuple[jax.Array, ...]:
    for _ in range(count):
        state = step(*state)
    return state


def _neighbours(u: jax.Array) -> jax.Array:
    return jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)


def _heat(u: jax.Array) -> tuple[jax.Array, ...]:
    return (u + 0.1 * (_neighbours(u) - 4 * u),)


def _reaction(u: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    reacted = u * v * v
    u, v = (
        u + 0.16 * (_neighbours(u) - 4 * u) - reacted + 0.035 * (1 - u),
        v + 0.08 * (_neighbours(v) - 4 * v) + reacted - 0.1 * v,
    )
    return u, v


def _relaxed(u: jax.Array, source: jax.Array) -> tuple[jax.Array, ...]:
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    return jnp.pad(0.25 * (around + source[1:-1, 1:-1]), 1), source


def _convection(x: jax.Array, y: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
    def rates(x: jax.Array, y: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
        return 10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z

    half = [a + 0.005 * b for a, b in zip((x, y, z), rates(x, y, z), strict=True)]
    x, y, z = (a + 0.01 * b for a, b in zip((x, y, z), rates(*half), strict=True))
    return x, y, z


def _wave(u: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    return 2 * u - v + 0.2 * (_neighbours(u) - 4 * u), u


def _iterated(x: jax.Array, a: jax.Array) -> tuple[jax.Array, ...]:
    return x - (jnp.exp(x) - a) / (jnp.exp(x) + 1), a


KIND = Kind(
    name="repeated_steps",
    primitives=(),
    numerics="reordered",
    instead="a loop over the steps, or each step apart from the others",
    match=of_no_equation,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=3.0,  # three of 2.1 to 2.6 with AVX-512 take up to 1.5 times as long with AVX2
    keeps_steps=True,
    is_searched_quickly=False,
    platforms=("cpu",),
)
