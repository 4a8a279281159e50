"""Loops that stack bfloat16 results of their steps, as under ``jax.grad``, or set slices of bfloat16 arrays that they
carry, as of caches: the bits are stacked and carried, as integers.

XLA's CPU compiler of JAX 0.10 updates an array of bfloat16 in float32: in each step it converts the whole of what was
stacked, or is carried, to float32, and back, so that T steps cost T such arrays.  Integers it updates in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas import jaxprs
from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.bfloat16_bits import BFLOAT16, as_bits, of_bits
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
from autopallas.kernels.respelling.loops_in_bits import set_by_slices, step_in_bits
from autopallas.kernels.respelling.plain_steps import at_a_time, is_plain
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]

_IN_PLACE = jax.__version_info__[:2] > (0, 10)
"""Whether the compiler updates bfloat16 in place, as those of JAX 0.11.2 and 0.12 do."""
_LEAST_STACKED, _LEAST_CARRIED = 64, 16
"""Loops of 16 steps were 0.7 to 1.9 times as fast where they stack."""


def _match(graph: Graph, node: Node) -> Found | None:
    equation = node.equation
    if _IN_PLACE and KIND.name not in graph.named:
        return None
    length = int(equation.params["length"])
    if length < _LEAST_CARRIED or all(v.aval.dtype != BFLOAT16 for v in equation.outvars):
        return None
    place = loop_of(graph, node)
    if place is None:
        return None
    loop, numbers = place
    results, kept = results_of(graph, node)
    stacked = [n for i, n in zip(kept, results, strict=True) if i >= loop.carried]
    if stacked and scan_checkpoint.goes_before(graph, KIND.name):
        return None
    stacks = any(graph.dtype(number) == BFLOAT16 for number in stacked)
    carried, whole = set_by_slices(loop)
    if not carried and not (stacks and length >= _LEAST_STACKED) or not is_plain(loop.step):
        return None
    found = ("carried", tuple(sorted(carried))), ("loop", without_known_values(loop)), ("results", kept)
    return Found((*found, ("whole", tuple(sorted(whole)))), numbers, results)


# ---------------------------------------------------------------------- what is computed


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    loop, carried = loop_in(spec), set(spec.numbers("carried"))
    of_loop = step_in_bits(loop, carried)
    stacked = {i for i, type_ in enumerate(loop.step.out_avals) if i >= loop.carried and type_.dtype == BFLOAT16}
    in_bits = carried | (stacked if loop.length >= _LEAST_STACKED else set())

    def step(
        constants: Sequence[jax.Array], first: Sequence[jax.Array], slices: Sequence[jax.Array]
    ) -> list[jax.Array]:
        found = of_loop(constants, first, slices)
        return [as_bits(x) if i in in_bits else x for i, x in enumerate(found)]

    ends, stacks = replace(loop, unroll=at_a_time(loop.unroll, loop.length)).computed(
        operands, step, lambda i, x: as_bits(x) if i in carried else x
    )
    return chosen(spec, [of_bits(x) if i in in_bits else x for i, x in enumerate([*ends, *stacks])])


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns how arrays are set and read that the loop carries as bits, or, where it carries none, whether its steps
    have matrix products, and how many steps there are."""
    loop, carried = loop_in(spec), spec.numbers("carried")
    step, _ = jaxprs.open_jaxpr(loop.step)
    names = {e.primitive.name for e in step.eqns}
    if not carried:
        steps = "64 to 255" if loop.length < 256 else "256 or more"
        return f"{'products' if 'dot_general' in names else 'elementwise'}, {steps} steps"
    how = "slices updated" if "dynamic_update_slice" in names else "indices set"
    read = " and read in products" if spec.numbers("whole") else ""
    return f"{how}{read}, {'16 to 63' if loop.length < 64 else '64 or more'} steps"


_Two: TypeAlias = tuple[jax.Array, jax.Array]
_Three: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields loops that stack, with a product in each step and without, of two lengths in three sizes; and loops that
    set slices, and read the whole in products or do not, of two lengths in four sizes."""
    sizes = ((64, 4, 32), (64, 16, 256), (64, 256, 256), (256, 2, 16), (256, 16, 64), (256, 64, 256))
    for steps, batch, width in sizes:
        x, w = (jax.ShapeDtypeStruct(shape, BFLOAT16) for shape in ((steps, batch, width), (width, width)))

        def product(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                h = jnp.tanh(h @ w + x)
                return h, h

            found: tuple[jax.Array, jax.Array] = lax.scan(step, jnp.zeros_like(x[0]), x)
            return found

        def elementwise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                h = jnp.tanh(h + x)
                return h, h

            found: tuple[jax.Array, jax.Array] = lax.scan(step, jnp.zeros_like(x[0]), x)
            return found

        name = f"{steps}-{math.prod(x.shape)}"
        yield f"products-{name}", Sample(product, (x, w))
        yield f"elementwise-{name}", Sample(elementwise, (x,))
    for steps in (16, 64):
        for shape in ((1, 2, 32, 32), (1, 4, 64, 64), (1, 8, 512, 64), (4, 16, 1024, 64)):
            width = shape[1] * shape[3]
            cache, w = (jax.ShapeDtypeStruct(shape, BFLOAT16) for shape in (shape, (3, width, width)))
            for name, put in (("update", _update), ("set", _set)):
                slices, attention = _cached(steps, put)
                yield f"{name}-{steps}-{math.prod(shape)}", Sample(slices, (cache,))
                yield f"{name}-attention-{steps}-{math.prod(shape)}", Sample(attention, (cache, cache, w))


def _update(cache: jax.Array, x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(cache, x[:, :, None], i, 2)


def _set(cache: jax.Array, x: jax.Array, i: jax.Array) -> jax.Array:
    return cache.at[:, :, i].set(x)


def _cached(
    steps: int, put: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
) -> tuple[Callable[..., _Two], Callable[..., _Three]]:
    """Returns loops that set slices of caches, and read the slices before them, or all of it as attention does."""

    def slices(cache: jax.Array) -> _Two:
        def step(i: jax.Array, carried: _Two) -> _Two:
            cache, x = carried
            x = 0.5 * (x + cache[:, :, i])
            return put(cache, x, i + 1), x

        found: _Two = lax.fori_loop(0, steps, step, (cache, cache[:, :, 0]))
        return found

    def attention(keys: jax.Array, values: jax.Array, w: jax.Array) -> _Three:
        def step(i: jax.Array, carried: _Three) -> _Three:
            keys, values, x = carried
            query, key, value = (x @ w).reshape(3, *keys.shape[:2], keys.shape[3])
            keys, values = put(keys, key, i), put(values, value, i)
            weights = jax.nn.softmax(jnp.einsum("bhd,bhsd->bhs", query, keys).astype(jnp.float32))
            x = jnp.einsum("bhs,bhsd->bhd", weights.astype(keys.dtype), values).reshape(x.shape)
            return keys, values, jnp.tanh(x)

        first = keys, values, keys[:, :, 0].reshape(keys.shape[0], -1)
        found: _Three = lax.fori_loop(0, steps, step, first)
        return found

    return slices, attention


KIND = Kind(
    name="looped_bfloat16",
    primitives=("scan",),
    numerics="reordered",
    instead="a loop that stacks and carries the bits of bfloat16 numbers as integers",
    match=_match,
    original=as_written,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=1.5,  # of 36 rows that gain with AVX-512, five gain nothing with AVX2, most of them 1.3 to 1.5
    platforms=("cpu",),
)
