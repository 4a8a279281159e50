"""Loops that stack bfloat16 results of their steps, as under ``jax.grad``: the bits are stacked, as integers.

XLA's CPU compiler of JAX 0.10 updates an array of bfloat16 in float32: in each step it converts the whole of what was
stacked to float32, and back, so that T steps cost T stacks of T results.  Integers it updates in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from autopallas import jaxprs
from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.indexed import chosen, key_of, loop_in, loop_of, results_of
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.kinds import scan_checkpoint
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]

_BFLOAT16 = jnp.dtype(jnp.bfloat16)
_IN_PLACE = jax.__version_info__[:2] > (0, 10)
"""Whether the compiler updates bfloat16 in place, as those of JAX 0.11.2 and 0.12 do."""
_LEAST_STEPS = 64
"""Loops of 16 steps were 0.7 to 1.9 times as fast."""
_APART = frozenset(
    """conv_general_dilated cummax cummin cumprod cumsum cumlogsumexp gather random_bits reduce_window reduce_window_max
    reduce_window_min reduce_window_sum scatter scatter-add scatter_add select_and_gather_add select_and_scatter_add
    sort threefry2x32 top_k triangular_solve""".split()
)
"""Equations that may gain more by a respelling of their own, which is none where the loop around them is respelt."""


def _match(graph: Graph, node: Node) -> Found | None:
    equation = node.equation
    # Where less memory is wanted, a loop that stacks less of its results goes before one that stacks them faster.
    elsewhere = _IN_PLACE or graph.objective == "memory" or scan_checkpoint.KIND.name in graph.named
    if elsewhere and KIND.name not in graph.named:
        return None
    if int(equation.params["length"]) < _LEAST_STEPS or all(v.aval.dtype != _BFLOAT16 for v in equation.outvars):
        return None
    place = loop_of(graph, node)
    if place is None:
        return None
    loop, numbers = place
    results, kept = results_of(graph, node)
    if not any(i >= loop.carried and graph.dtype(n) == _BFLOAT16 for i, n in zip(kept, results, strict=True)):
        return None
    step, _ = jaxprs.open_jaxpr(loop.step)
    if any(jaxprs.bodies(e) or e.primitive.name in _APART or e.effects for e in step.eqns):
        return None
    loop = replace(loop, known=(), zeros=frozenset())
    return Found((("loop", replace(loop, key=key_of(loop))), ("results", kept)), numbers, results)


# ---------------------------------------------------------------------- what is computed


def _original(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    return chosen(spec, loop_in(spec).as_written(operands))


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    ends, stacks = loop_in(spec).stacked(operands, _bits)
    types = loop_in(spec).step.out_avals[len(ends) :]
    given = [_of_bits(x) if type_.dtype == _BFLOAT16 else x for x, type_ in zip(stacks, types, strict=True)]
    return chosen(spec, [*ends, *given])


def _bits(x: jax.Array) -> jax.Array:
    found: jax.Array = lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == _BFLOAT16 else x
    return found


def _of_bits(x: jax.Array) -> jax.Array:
    found: jax.Array = lax.bitcast_convert_type(x, _BFLOAT16)
    return found


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns whether the steps have matrix products, and how many there are."""
    loop = loop_in(spec)
    step, _ = jaxprs.open_jaxpr(loop.step)
    products = any(e.primitive.name == "dot_general" for e in step.eqns)
    steps = "64 to 255" if loop.length < 256 else "256 or more"
    return f"{'products' if products else 'elementwise'}, {steps} steps"


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields loops with a product in each step, and without; two lengths in three sizes."""
    sizes = ((64, 4, 32), (64, 16, 256), (64, 256, 256), (256, 2, 16), (256, 16, 64), (256, 64, 256))
    for steps, batch, width in sizes:
        x, w = (jax.ShapeDtypeStruct(shape, _BFLOAT16) for shape in ((steps, batch, width), (width, width)))

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


KIND = Kind(
    name="stacked_bfloat16",
    primitives=("scan",),
    numerics="reordered",
    instead="a loop that stacks the bits of bfloat16 results as integers",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=1.5,  # measured with AVX-512 alone: what gains little there may lose with other extensions
    platforms=("cpu",),
)
