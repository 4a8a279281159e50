"""Loops whose steps compute exponentials of parts of a slice, as gates of what a network computed of its inputs before.

``z = x @ w`` of all steps, and then in each ``i, f, g, o = split(z[t] + h @ u, 4)``: XLA's CPU compiler reads the slice
where it computes the gates, whose functions it then computes one number after the other.  Here each step hands on the
slice that the next one reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import Jaxpr, JaxprEqn, Var
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import CUSTOM_RULES, ELEMENTWISE
from autopallas.kernels.respelling.chunks import Arrays
from autopallas.kernels.respelling.indexed_loops import (
    IndexedLoop,
    as_written,
    chosen,
    loop_in,
    loop_of,
    results_of,
    with_small_weights,
    without_known_values,
)
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.networks import float32_types
from autopallas.kernels.respelling.plain_steps import at_a_time, is_plain
from autopallas.kernels.respelling.prefetched_slices import scan_ahead
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND", "read_in_parts"]

_LEAST_STEPS = 8
_MOST_EQUATIONS = 256
"""Equations of a step up to which it is looked at: cells of networks have a few dozen."""
_PARTS = frozenset({"slice", "split"})
_SLOW = frozenset("cos cosh erf exp exp2 expm1 log log1p logistic pow sin sinh tan tanh".split())
"""Functions that a compiler computes on vectors, where it can."""
_SAME = ELEMENTWISE | {"copy", "expand_dims", "reshape", "squeeze"}


def _match(graph: Graph, node: Node) -> Found | None:
    named = KIND.name in graph.named
    if int(node.equation.params["length"]) < (2 if named else _LEAST_STEPS) or not _may_read_parts(node.equation):
        return None
    place = loop_of(graph, node)
    if place is None:
        return None
    loop, numbers = place
    if not is_plain(loop.step) or not read_in_parts(loop):
        return None
    results, kept = results_of(graph, node)
    return Found((("loop", without_known_values(loop)), ("results", kept)), numbers, results)


def _may_read_parts(scan: JaxprEqn) -> bool:
    """Returns whether a scan's step is short, is given slices, and takes parts of arrays: a quick look."""
    jaxpr, _ = jaxprs.open_jaxpr(scan.params["jaxpr"])
    has_slices = len(jaxpr.invars) > sum(compat.scan_parts(scan))
    return has_slices and len(jaxpr.eqns) <= _MOST_EQUATIONS and _takes_parts(jaxpr)


def _takes_parts(jaxpr: Jaxpr) -> bool:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _PARTS or (
            name in CUSTOM_RULES | {"jit", "pjit"}
            and any(_takes_parts(jaxprs.open_jaxpr(body)[0]) for _, _, body in jaxprs.bodies(equation))
        ):
            return True
    return False


def read_in_parts(loop: IndexedLoop) -> list[int]:
    """Returns the numbers of the slices of parts of which a step computes functions that take long."""
    jaxpr, _ = jaxprs.open_jaxpr(loop.step)
    slices = jaxpr.invars[loop.constants + loop.carried :]
    wholes: dict[Var, set[int]] = {v: {i} for i, v in enumerate(slices) if v.aval.ndim}
    """Which slices values follow from, element by element, of which no part was taken yet."""
    parts: dict[Var, set[int]] = {}
    """The same, of which one was."""
    found = set[int]()
    for equation in jaxpr.eqns:
        name, result = equation.primitive.name, equation.outvars[0]
        inputs = [v for v in equation.invars if isinstance(v, Var)]
        if name in _PARTS:
            taken = wholes.get(inputs[0], set()) | parts.get(inputs[0], set())
            parts.update((v, taken) for v in equation.outvars if taken)
        elif name in _SAME or (name in CUSTOM_RULES and len(equation.outvars) == 1):
            for known in (wholes, parts):
                own = set[int]().union(*(known.get(v, ()) for v in inputs if v.aval.size == result.aval.size))
                if own:
                    known[result] = own
            if name in _SLOW or name in CUSTOM_RULES:
                found |= parts.get(result, set())
    return sorted(found)


# ---------------------------------------------------------------------- what is computed


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    loop = loop_in(spec)
    given, last = loop.given(operands), loop.constants + loop.carried
    ahead = read_in_parts(loop)
    others = [i for i in range(len(given) - last) if i not in ahead]
    slices = given[last:]
    run = compat.jaxpr_as_fun(loop.step)

    def step(carried: Arrays, own: Arrays, of_ahead: Arrays) -> tuple[Arrays, Arrays]:
        read = dict(zip((*others, *ahead), (*own, *of_ahead), strict=True))
        found = run(*given[: loop.constants], *carried, *(read[i] for i in range(len(slices))))
        return list(found[: loop.carried]), list(found[loop.carried :])

    ends, stacks = scan_ahead(
        step, given[loop.constants : last], [slices[i] for i in others], [slices[i] for i in ahead], loop.length,
        reverse=loop.reverse, unroll=at_a_time(loop.unroll, loop.length),
    )  # fmt: skip
    return chosen(spec, [*ends, *stacks])


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns whether steps multiply matrices, and whether they stack more than a slice, as for a gradient."""
    loop = loop_in(spec)
    jaxpr, _ = jaxprs.open_jaxpr(loop.step)
    slices = jaxpr.invars[loop.constants + loop.carried :]
    stacked = sum(math.prod(aval.shape) for aval in loop.step.out_avals[loop.carried :])
    more = stacked > sum(int(slices[i].aval.size) for i in read_in_parts(loop))
    products = any(e.primitive.name == "dot_general" for e in jaxpr.eqns)
    return f"{'products' if products else 'no products'}, {'much' if more else 'little'} stacked"


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields an LSTM, a GRU and gates without a product, of inputs that were multiplied before, and gradients."""
    networks: tuple[tuple[str, int, Callable[..., jax.Array]], ...] = (
        ("lstm", 4, _lstm), ("gru", 3, _gru), ("gates", 3, _gates),
    )  # fmt: skip
    sizes = (64, 1, 64), (64, 16, 64), (64, 64, 64), (64, 8, 256), (128, 32, 256)
    for (name, gates, function), (steps, rows, width) in itertools.product(networks, sizes):
        types = float32_types((steps, rows, gates * width), *[(width, gates * width)] * (name != "gates"))
        yield f"{name}-{steps}x{rows}x{width}", Sample(function, types)
        if rows == 16:
            yield f"{name}-gradients-{steps}x{rows}x{width}", Sample(jax.grad(function), types, place=0)


def _lstm(z: jax.Array, u: jax.Array) -> jax.Array:
    """Returns a loss of an LSTM; z is [time, batch, 4 width], u is [width, 4 width]."""

    def step(carried: tuple[jax.Array, jax.Array], z: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h, c = carried
        i, f, g, o = jnp.split(z + h @ u, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    first = jnp.zeros((z.shape[1], len(u)))
    return jnp.sum(jnp.sin(lax.scan(step, (first, first), z)[1]))


def _gru(z: jax.Array, u: jax.Array) -> jax.Array:
    """Returns a loss of a GRU; z is [time, batch, 3 width], u is [width, 3 width]."""

    def step(h: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        reset, update, new = jnp.split(z, 3, -1)
        of_reset, of_update, of_new = jnp.split(h @ u, 3, -1)
        update = jax.nn.sigmoid(update + of_update)
        h = (1 - update) * jnp.tanh(new + jax.nn.sigmoid(reset + of_reset) * of_new) + update * h
        return h, h

    return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros((z.shape[1], len(u))), z)[1]))


def _gates(z: jax.Array) -> jax.Array:
    """Returns a loss of states that gates let pass; z is [time, batch, 3 width]."""

    def step(h: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        keep, take, new = jnp.split(z, 3, -1)
        h = jax.nn.sigmoid(keep) * h + jax.nn.sigmoid(take) * jnp.tanh(new)
        return h, h

    return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros((z.shape[1], z.shape[2] // 3)), z)[1]))


KIND = Kind(
    name="gates_of_slices",
    primitives=("scan",),
    numerics="reordered",
    instead="the same loop, whose steps hand on the slice that the next one reads",
    match=_match,
    original=as_written,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=1.5,
    gives_way=lambda spec: True,
    keeps_steps=True,
    platforms=("cpu",),
    fill=lambda spec, random, arrays: with_small_weights(spec, arrays),
)
