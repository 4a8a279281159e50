"""Loops of a train step whose backward reads values of each step: only the beginnings of chunks are kept.

Places are found by :mod:`autopallas.patterns.checkpointed_scans`, since each is two loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.graph import Graph
from autopallas.kernels.respelling.checkpointed_scan import Part, pair_as_written, pair_in
from autopallas.kernels.respelling.kind import Kind, Sample, of_no_equation
from autopallas.kernels.respelling.networks import float32_types, lstm
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND", "goes_before"]


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    return pair_in(spec).by_chunks(cast(Part, spec["part"]), operands)


# ---------------------------------------------------------------------- evidence


_LARGE = 2**25
"""Values that fill the vector memory of a TPU in 32 bits: stacks of more stay in main memory there."""


def _feature(spec: RespellingSpec) -> str:
    """Returns whether a step has matrix products, whose computing again takes long, and whether stacks are large."""
    pair = pair_in(spec)
    steps = "steps with products" if pair.has_products else "elementwise steps"
    return f"{steps}, large stacks" if spec.elements > _LARGE else steps


def _samples() -> Iterator[tuple[str, Sample]]:
    for length, batch, width in ((64, 4, 32), (256, 8, 32), (256, 16, 128), (512, 32, 256)):
        types = float32_types((length, batch, width), (width, 4 * width), (width, 4 * width))
        yield f"lstm_{length}x{batch}x{width}", Sample(lstm, types)
    for length, width in ((64, 128), (256, 1024), (1024, 4096), (1024, 16384)):
        yield f"elementwise_{length}x{width}", Sample(_elementwise, float32_types((length, width), (width,), (width,)))


def _elementwise(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients of a loop of elementwise steps; x is [time, width], a and b are [width]."""

    def loss(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            gate = jax.nn.sigmoid(a * h + x)
            h = gate * jnp.tanh(b * h + x) + (1 - gate) * h
            return h, h

        return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros_like(x[0]), x)[1]))

    found: tuple[jax.Array, ...] = jax.grad(loss, (0, 1, 2))(x, a, b)
    return found


def goes_before(graph: Graph, name: str) -> bool:
    """Returns whether loops that stack are left to this kind, which stacks less, and not to one of another name that
    takes less time: under the objective "memory", or where this one is asked for by name and the other is not."""
    return name not in graph.named and (graph.objective == "memory" or KIND.name in graph.named)


KIND = Kind(
    name="scan_checkpoint",
    primitives=(),
    numerics="reordered",
    instead="a loop that keeps what it carries at the beginnings of chunks, and a backward that runs each chunk again",
    match=of_no_equation,
    original=pair_as_written,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    maps_alike=True,
)
