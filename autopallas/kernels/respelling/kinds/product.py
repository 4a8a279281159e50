"""Matrix products whose result is transposed, computed in the order of that result.

The gradient of a weight is such a product in every program: JAX multiplies cotangents by activations, and transposes
the result.  XLA's CPU compiler multiplies faster where the operands change places instead, and, in bfloat16, where two
matrices that are summed along their rows have these rows on two axes.

XLA turns the operand that comes first, together with what computes it.  So in float32 the wider of two operands is not
to come first: such gradients, of a block's second layer, gained 1.5x alone, and in whole train steps nothing to -8%.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.contractions import Axes, Contraction, Pair, has_usual_precision
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def _match(graph: Graph, node: Node) -> Found | None:
    """Returns a product whose transposed result is that of its operands exchanged, or one of rows in bfloat16."""
    if _turned(graph, node.outputs[0]):
        return None  # what follows is looked at
    product, order = node, list(range(len(graph.shape(node.outputs[0]))))
    while product.name == "transpose":
        order = [product.params["permutation"][axis] for axis in order]
        inner = graph.definitions.get(product.inputs[0])
        if inner is None or inner.body is not node.body or not _turned(graph, product.inputs[0]):
            return None
        product = inner
    if not _is_product(graph, product):
        return None
    shapes = [graph.shape(number) for number in product.inputs]
    axes = Contraction.of(shapes, product.params["dimension_numbers"])
    summed = axes.summed
    turned = order != sorted(order)
    narrow = graph.dtype(product.inputs[0]) == jnp.bfloat16
    if not (_exchanged(order, summed, shapes) if turned else narrow and _rows(summed, shapes)):
        return None
    if turned and not narrow and axes.columns > axes.rows:
        return None
    return Found((("result", tuple(order)), ("summed", summed)), product.inputs, node.outputs)


def _turned(graph: Graph, number: int) -> bool:
    """Returns whether a value is transposed and nothing else reads it."""
    users = graph.users.get(number, ())
    return len(users) == 1 and users[0].name == "transpose" and number not in graph.returned


def _is_product(graph: Graph, node: Node) -> bool:
    """Returns whether a node multiplies two arrays of one dtype, at the usual precision, without shared axes."""
    if node.name != "dot_general" or not has_usual_precision(node.equation):
        return False
    if node.params.get("out_sharding") is not None:
        return False  # which the transposition changes with the axes
    numbers, (summed, batch) = (*node.inputs, *node.outputs), node.params["dimension_numbers"]
    first, second, result = map(graph.dtype, numbers)
    known = first == second and first in _DTYPES and result in _DTYPES
    empty = any(number in graph.literals or 0 in graph.shape(number) for number in numbers)
    return known and not empty and bool(summed[0]) and not any(batch)


def _letters(summed: Pair, shapes: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Returns the axes of both operands, each as (letter, size), without those of size one, which XLA leaves out."""
    first, second = map(len, shapes)
    own = [list(range(first)), list(range(first, first + second))]
    for one, other in zip(*summed, strict=True):
        own[1][other] = own[0][one]
    return [
        [(letter, size) for letter, size in zip(letters, shape, strict=True) if size != 1]
        for letters, shape in zip(own, shapes, strict=True)
    ]


def _rows(summed: Pair, shapes: Sequence[Sequence[int]]) -> int:
    """Returns the number of rows along which two matrices are summed, if it is even; else 0."""
    first, second = _letters(summed, shapes)
    return first[0][1] if len(first) == len(second) == 2 and first[0] == second[0] and first[0][1] % 2 == 0 else 0


def _exchanged(order: Sequence[int], summed: Pair, shapes: Sequence[Sequence[int]]) -> bool:
    """Returns whether a result has the axes of the second operand before those of the first, each in their order."""
    sizes = [
        [size for axis, size in enumerate(shape) if axis not in s] for s, shape in zip(summed, shapes, strict=True)
    ]
    own = [[axis for axis, size in enumerate(sizes[0]) if size != 1]]
    own += [[axis for axis, size in enumerate(sizes[1], len(sizes[0])) if size != 1]]
    long = {*own[0], *own[1]}
    return all(own) and [axis for axis in order if axis in long] == [*own[1], *own[0]]


def _original(spec: RespellingSpec, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    summed, order = cast(Pair, spec["summed"]), cast(Axes, spec["result"])
    (_, dtype), *_ = spec.results
    found = lax.dot_general(first, second, (summed, ((), ())), preferred_element_type=dtype)
    return [found if list(order) == sorted(order) else lax.transpose(found, order)]


def _respelt(spec: RespellingSpec, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    summed, order = cast(Pair, spec["summed"]), cast(Axes, spec["result"])
    (shape, dtype), *_ = spec.results
    axes = _letters(summed, (first.shape, second.shape))
    rows = _rows(summed, (first.shape, second.shape)) if first.dtype == jnp.bfloat16 else 0
    if rows:
        upper = first.ndim + second.ndim
        axes = [[(upper, 2), (own[0][0], rows // 2), *own[1:]] for own in axes]
    operands = [x.reshape([size for _, size in own]) for own, x in zip(axes, (first, second), strict=True)]
    letters = [[letter for letter, _ in own] for own in axes]
    if list(order) != sorted(order):
        operands.reverse()
        letters.reverse()
    shared = [letter for letter in letters[0] if letter in letters[1]]
    left, right = ([own.index(letter) for letter in shared] for own in letters)
    found = lax.dot_general(operands[0], operands[1], ((left, right), ((), ())), preferred_element_type=dtype)
    return [found.reshape(shape)]


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns whether the operands are exchanged, and how many axes are summed."""
    summed, order = cast(Pair, spec["summed"]), cast(Axes, spec["result"])
    first, second = _letters(summed, [shape for shape, _ in spec.operands])
    axes = "several axes summed" if len({*first} & {*second}) > 1 else "one axis summed"
    return f"transposed result, {axes}" if list(order) != sorted(order) else "rows summed"


def _weight_gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Computes the gradient of w in ``x @ w`` as JAX does."""
    summed = tuple(range(x.ndim - 1))
    return lax.dot_general(cotangent, x, ((summed, summed), ((), ()))).T


def _of_rows(x: jax.Array, cotangent: jax.Array) -> jax.Array:
    return lax.dot_general(x, cotangent, (((0,), (0,)), ((), ())))


def _samples() -> Iterator[tuple[str, Sample]]:
    sizes = ((2, 64, 64, 64), (2, 128, 128, 512), (4, 256, 512, 512), (4, 512, 512, 2048), (2, 1024, 512, 8192))
    for dtype, (batch, length, inner, outer) in itertools.product(_DTYPES, sizes):
        name = f"{jnp.dtype(dtype).name}-{batch}x{length}x{inner}x{outer}"
        stacked = tuple(jax.ShapeDtypeStruct((batch, length, width), dtype) for width in (inner, outer))
        flat = tuple(jax.ShapeDtypeStruct((batch * length, width), dtype) for width in (inner, outer))
        yield f"gradient-{name}", Sample(_weight_gradient, stacked)
        yield f"flat-gradient-{name}", Sample(_weight_gradient, flat)
        if dtype == jnp.bfloat16:
            yield f"rows-{name}", Sample(_of_rows, flat)


KIND = Kind(
    name="product",
    primitives=("dot_general", "transpose"),
    numerics="reordered",
    instead="a product of the operands in the order of the result",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    may_round_sums=True,
)
