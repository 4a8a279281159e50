"""Matrix products that are written by broadcasting, of which several share a broadcast operand.

``(x[:, None] * y[None]).sum(-1)`` is a matrix product, and XLA computes it as one as long as nothing else reads what is
broadcast.  Its gradients are two more, ``(g[..., None] * y[None]).sum(1)`` and ``(g[..., None] * x[:, None]).sum(0)``,
which share the broadcast ``g``, and share those of x and y with the product.  XLA's CPU compiler then stores what is
shared for all pairs of rows, and reads it element by element for each product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.fusion_barrier import unfused
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.short_sums import short_sums
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]

_Axes = tuple[int, ...]
_DTYPES = frozenset(map(jnp.dtype, ("float32", "float64")))
_FEWEST = 4096
"""Multiplications below which both ways take as long."""


def _match(graph: Graph, node: Node) -> Found | None:
    """Returns a sum over the axes that both factors of a product have, where each has an axis that the other lacks."""
    (summed,) = node.inputs
    product = graph.definitions.get(summed)
    if product is None or product.name != "mul" or product.body is not node.body:
        return None
    if node.params.get("out_sharding") is not None or len(graph.users[summed]) > 1 or summed in graph.returned:
        return None
    shape, dtype = graph.shape(summed), graph.dtype(summed)
    if dtype not in _DTYPES or math.prod(shape) < _FEWEST:
        return None
    if short_sums(shape, tuple(node.params["axes"])) is not None:
        return None  # which is a kind of its own, with evidence
    if any(number in graph.literals or graph.dtype(number) != dtype for number in product.inputs):
        return None
    operands, axes = zip(*(_narrow(graph, number, len(shape)) for number in product.inputs), strict=True)
    if any(number in graph.literals for number in operands):
        return None
    long = {axis for axis, size in enumerate(shape) if size > 1}
    first, second = ({axis for axis in own if axis >= 0} for own in axes)
    reduced = {int(axis) for axis in node.params["axes"]} & long
    if not reduced or first & second != reduced or first | second != long or reduced in (first, second):
        return None  # several products, a sum over what one factor lacks, or a vector
    shared = [i for i, number in enumerate(product.inputs) if _is_shared(graph, number, shape)]
    if not shared:
        return None
    parameters = (("axes", axes), ("shape", shape), ("shared", shared[0]), ("summed", tuple(node.params["axes"])))
    around = dict.fromkeys(n for number in product.inputs for n in _products_of(graph, number, shape))
    neighbours = tuple(number for number in around if number not in node.outputs)
    return Found(parameters, operands, node.outputs, neighbours=neighbours)


def _narrow(graph: Graph, number: int, rank: int) -> tuple[int, _Axes]:
    """Returns what a factor is broadcast from, and the product's axis of each of its own, -1 where it is of size 1."""
    node = graph.definitions.get(number)
    places: Sequence[int] = range(rank)
    if node is not None and node.name == "broadcast_in_dim" and len(node.inputs) == 1:
        (number,), places = node.inputs, node.params["broadcast_dimensions"]
    sizes = graph.shape(number)
    return number, tuple(int(axis) if size > 1 else -1 for axis, size in zip(places, sizes, strict=True))


def _is_shared(graph: Graph, number: int, shape: Sequence[int]) -> bool:
    """Returns whether several equations read a factor as an array of that shape."""
    users = graph.users[number]
    graph.steps.spend(len(users))
    return len({user for user in users if tuple(shape) in map(graph.shape, user.outputs)}) > 1


def _products_of(graph: Graph, number: int, shape: Sequence[int]) -> Iterator[int]:
    """Yields the sums of products of a factor, of that shape."""
    for user in graph.users[number]:
        graph.steps.spend()
        if user.name == "mul" and graph.shape(user.outputs[0]) == tuple(shape):
            readers = graph.users[user.outputs[0]]
            graph.steps.spend(len(readers))
            yield from (n for reader in readers if reader.name == "reduce_sum" for n in reader.outputs)


# ---------------------------------------------------------------------- the two ways


def _original(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    shape, summed = spec.numbers("shape"), spec.numbers("summed")
    axes, shared = cast("tuple[_Axes, _Axes]", spec["axes"]), cast(int, spec["shared"])
    other = 1 - shared

    def product(wide: jax.Array, narrow: jax.Array) -> jax.Array:
        return jnp.sum(wide * _spread(narrow, axes[other], shape), summed)

    def part(wide: jax.Array, narrow: jax.Array) -> jax.Array:
        return jnp.max(wide, summed)

    # What is shared is an array of its own in a program, which the compiler would not make of a single product.
    return [unfused(product, part, _spread(operands[shared], axes[shared], shape), operands[other])]


def _spread(x: jax.Array, axes: _Axes, shape: Sequence[int]) -> jax.Array:
    return lax.broadcast_in_dim(_squeezed(x, axes), shape, [axis for axis in axes if axis >= 0])


def _squeezed(x: jax.Array, axes: _Axes) -> jax.Array:
    return lax.squeeze(x, [own for own, axis in enumerate(axes) if axis < 0])


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    axes = cast("tuple[_Axes, _Axes]", spec["axes"])
    left, right = ([axis for axis in own if axis >= 0] for own in axes)
    kept = [axis for axis in range(len(spec.numbers("shape"))) if axis not in spec.numbers("summed")]
    first, second = map(_squeezed, operands, axes)
    result = [axis for axis in kept if axis in left or axis in right]
    found = jnp.einsum(first, left, second, right, result, precision=lax.Precision.HIGHEST)
    ((shape, _),) = spec.results
    return [found.reshape(shape)]


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns over how many numbers the sums are, and whether these lie next to each other in what is multiplied."""
    shape, summed = spec.numbers("shape"), spec.numbers("summed")
    count = math.prod(shape[axis] for axis in summed)
    length = next((f"up to {limit}" for limit in (16, 128) if count <= limit), "more")
    return f"sums of {length}, {'rows' if len(shape) - 1 in summed else 'columns'}"


def _samples() -> Iterator[tuple[str, Sample]]:
    def gradient(g: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = g[:, :, None]
        return (wide * y[None]).sum(1), (wide - y[None]).max(1)

    def product(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = x[:, None]
        return (wide * y[None]).sum(-1), (wide - y[None]).max(-1)

    def arrays(*shapes: tuple[int, int]) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    for rows, inner in itertools.product((64, 256, 1024), (16, 128, 256)):
        yield f"{rows}x{inner}", Sample(product, arrays((rows, inner), (rows, inner)))
    for rows in (64, 256, 1024):
        yield f"256x{rows}-gradient", Sample(gradient, arrays((256, 256), (256, rows)))


KIND = Kind(
    name="broadcast_product",
    primitives=("reduce_sum",),
    numerics="reordered",
    instead="a matrix product",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    is_slow_among_others=True,
    platforms=("cpu",),
)
