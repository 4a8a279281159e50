"""Equal steps with products or sums that Python wrote one after the other, and the backward of such steps: a loop.

A recurrent cell in a ``for`` loop, steps of gradient descent, a sampler or a solver is compiled step by step as it is
written.  XLA's CPU compiler takes long for it, and computes anew in each kernel of a backward what several results
read.  Places are found by :mod:`autopallas.patterns.chained_steps`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.kernels.respelling.chained_steps import ChainedSteps, Slices, chain_in, pass_on
from autopallas.kernels.respelling.kind import Kind, Sample, of_no_equation
from autopallas.kernels.respelling.networks import float32_types
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]

Arrays: TypeAlias = Sequence[jax.Array]


def _original(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    return _computed(spec, operands, ChainedSteps.written_out)


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    return _computed(spec, operands, ChainedSteps.looped)


def _computed(
    spec: RespellingSpec, operands: Sequence[jax.Array], run: Callable[[ChainedSteps, Sequence[jax.Array]], Arrays]
) -> list[jax.Array]:
    steps = chain_in(spec)
    if not _is_pair(spec):
        return [*run(steps, operands)]
    first, last = spec.numbers("operands")[0], chain_in(spec, "then")
    results, given = pass_on(run(steps, operands[:first]), steps, operands[first:], spec.numbers("places"))
    return [*results, *run(last, given)]


def _is_pair(spec: RespellingSpec) -> bool:
    """Returns whether a spec holds the steps and those of their backward."""
    return any(name == "then" for name, _ in spec.parameters)


# ---------------------------------------------------------------------- evidence

_LONG = 20
"""Equations of a step from which on it is filed as long."""


def _feature(spec: RespellingSpec) -> str:
    """Returns whether steps multiply, whether they hand on more than all of them read, whether they read and give
    arrays of their own, whether they are long, and how many there are."""
    steps = chain_in(spec)
    if _is_pair(spec):
        return f"train step, {_said(chain_in(spec, 'then'), _hands_on_more(steps), gives=False, reads=False)}"
    reads = any(not isinstance(own, Slices) and any(s >= 0 for s in own.sources) for own in steps.own)
    return _said(steps, _hands_on_more(steps), gives=any(k < steps.count - 1 for _, k in steps.results), reads=reads)


def _hands_on_more(steps: ChainedSteps) -> bool:
    """Returns whether steps hand on more than all of them read, as weights that are trained."""
    sizes = [int(v.aval.size) for v in steps.step.jaxpr.invars]
    carried = len(steps.carried)
    return sum(sizes[:carried]) > sum(sizes[carried : carried + len(steps.shared)])


def _said(steps: ChainedSteps, hands_on_more: bool, gives: bool, reads: bool) -> str:
    names = [e.primitive.name for e in steps.step.jaxpr.eqns]
    holds = "products" if "dot_general" in names else "sums"
    if hands_on_more:
        holds += " of large states"
    arrays = {(0, 0): "", (1, 0): ", arrays read", (0, 1): ", arrays given", (1, 1): ", arrays read and given"}
    length = "long" if len(names) >= _LONG else "short"
    several = "4 to 15" if steps.count < 16 else "16 to 31" if steps.count < 32 else "32 or more"
    return f"{holds}{arrays[int(reads), int(gives)]}, {several} {length} steps"


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields recurrent cells, a sampler, Sinkhorn's iterations, steps of proximal and of plain gradient descent, and a
    solver of several stages, each with and without its gradients."""
    for count in (10, 20, 40):
        for name, make in _PROGRAMS.items():
            for rows, width in ((16, 64), (64, 256)):
                loss, shapes = make(count, rows, width)
                types = float32_types(*shapes)
                size = f"{count}-{rows}x{width}"
                yield f"{name}-{size}", Sample(loss, types)
                step = jax.value_and_grad(loss, argnums=tuple(range(len(shapes))))
                yield f"{name}-gradients-{size}", Sample(step, types)


Made: TypeAlias = tuple[Callable[..., jax.Array], tuple[tuple[int, ...], ...]]


def _lstm(count: int, rows: int, width: int) -> Made:
    def loss(x: jax.Array, w: jax.Array, u: jax.Array, b: jax.Array) -> jax.Array:
        h = c = jnp.zeros_like(x[:, 0])
        states = []
        for t in range(count):
            i, f, g, o = jnp.split(x[:, t] @ w + h @ u + b, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            states.append(h)
        return (jnp.stack(states, 1) ** 2).mean()

    return loss, ((rows, count, width), (width, 4 * width), (width, 4 * width), (4 * width,))


def _gru(count: int, rows: int, width: int) -> Made:
    def loss(x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
        h = jnp.zeros_like(x[0])
        for t in range(count):
            reset, update, new = jnp.split(x[t] @ w, 3, -1)
            of_reset, of_update, of_new = jnp.split(h @ u, 3, -1)
            update = jax.nn.sigmoid(update + of_update)
            h = (1 - update) * jnp.tanh(new + jax.nn.sigmoid(reset + of_reset) * of_new) + update * h
        return (h**2).mean()

    return loss, ((count, rows, width), (width, 3 * width), (width, 3 * width))


def _rnn(count: int, rows: int, width: int) -> Made:
    def loss(x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
        h = jnp.zeros_like(x[0])
        states = []
        for t in range(count):
            h = jnp.tanh(x[t] @ w + h @ u)
            states.append(h)
        return (jnp.stack(states) ** 2).mean()

    return loss, ((count, rows, width), (width, width), (width, width))


def _sampler(count: int, rows: int, width: int) -> Made:
    times = np.linspace(1, 0.02, count)

    def loss(x: jax.Array, w: jax.Array, b: jax.Array, u: jax.Array) -> jax.Array:
        for t in times:
            noise = jax.nn.silu(x @ w + b + float(t)) @ u
            x = (x - float(0.02 * t) * noise) / float(np.sqrt(1 - 0.02 * t))
        return (x**2).mean()

    return loss, ((rows, width), (width, 4 * width), (4 * width,), (4 * width, width))


def _transport(count: int, rows: int, width: int) -> Made:
    def loss(cost: jax.Array) -> jax.Array:
        kernel = jnp.exp(-(cost**2))
        u, v = jnp.ones(2 * width), jnp.ones(2 * width)
        for _ in range(count):
            u = 1 / (kernel @ v) / width
            v = 1 / (kernel.T @ u) / width
        return (u[:, None] * kernel * v * cost).sum()

    return loss, ((2 * width, 2 * width),)


def _proximal(count: int, rows: int, width: int) -> Made:
    def loss(dictionary: jax.Array, y: jax.Array) -> jax.Array:
        z = jnp.zeros((rows, width))
        for _ in range(count):
            z = z - 0.1 * ((z @ dictionary - y) @ dictionary.T)
            z = jnp.sign(z) * jnp.maximum(jnp.abs(z) - 0.01, 0)
        return (z**2).mean()

    return loss, ((width, width // 2), (rows, width // 2))


def _descent(count: int, rows: int, width: int) -> Made:
    def loss(w: jax.Array, b: jax.Array, u: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        def inner(w: jax.Array, b: jax.Array, u: jax.Array) -> jax.Array:
            return ((jnp.tanh(x @ w + b) @ u - y) ** 2).mean()

        for _ in range(count):
            gradients = jax.grad(inner, argnums=(0, 1, 2))(w, b, u)
            w, b, u = (p - 0.01 * g for p, g in zip((w, b, u), gradients, strict=True))
        return inner(w, b, u)

    return loss, ((width, width), (width,), (width, 8), (rows, width), (rows, 8))


def _solver(count: int, rows: int, width: int) -> Made:
    def loss(x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
        def rate(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ w) @ u

        for _ in range(count):
            a = rate(x)
            b = rate(x + 0.05 * a)
            c = rate(x + 0.05 * b)
            x = x + 0.1 / 6 * (a + 2 * b + 2 * c + rate(x + 0.1 * c))
        return (x**2).mean()

    return loss, ((rows, width), (width, width), (width, width))


_PROGRAMS: dict[str, Callable[[int, int, int], Made]] = {
    "lstm": _lstm, "gru": _gru, "rnn": _rnn, "sampler": _sampler, "transport": _transport, "proximal": _proximal,
    "descent": _descent, "solver": _solver,
}  # fmt: skip


def _fill(spec: RespellingSpec, random: np.random.Generator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns arrays of which those that all steps multiply by are of the size of weights: others grow from step to
    step, until what is rounded decides."""
    shared = {*chain_in(spec).shared}
    if _is_pair(spec):
        first = spec.numbers("operands")[0]
        places = [i for i, stack in enumerate(spec.numbers("places")) if stack < 0]
        shared |= {first + i for i, place in enumerate(places) if place in chain_in(spec, "then").shared}
    found = list(arrays)
    for i in shared:
        if found[i].ndim == 2 and found[i].dtype.kind == "f":
            found[i] = (found[i] / math.sqrt(max(found[i].shape))).astype(found[i].dtype)
    return found


KIND = Kind(
    name="python_loop",
    primitives=(),
    numerics="reordered",
    instead="a loop over the steps",
    match=of_no_equation,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=1.5,
    keeps_steps=True,
    is_searched_quickly=False,
    platforms=("cpu",),
    fill=_fill,
)
