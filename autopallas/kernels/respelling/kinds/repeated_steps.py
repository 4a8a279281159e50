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
from autopallas.kernels.respelling.repeated import StepsApart, steps_in
from autopallas.kernels.respelling.spec import RespellingSpec

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
    """Returns whether a step rolls arrays or reads slices of them, whether it is long, and how many there are."""
    steps = steps_in(spec)
    equations = steps.step.jaxpr.eqns
    names = {e.primitive.name for e in equations}
    apart = "apart, " if isinstance(steps, StepsApart) else ""
    sums = "sums" if not names.isdisjoint(("dot_general", "reduce_max", "reduce_min", "reduce_sum")) else ""
    reads = "rolls" if "concatenate" in names else "elements" if names.isdisjoint(("pad", "slice")) else "slices"
    length = "long" if len(equations) >= _LONG else "short"
    several = "4 to 7" if steps.count < 8 else "8 to 15" if steps.count < 16 else "16 or more"
    return f"{apart}{sums or reads}, {several} {length} steps"


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
    elsewhere_from=2.0,
    keeps_steps=True,
    platforms=("cpu",),
)
