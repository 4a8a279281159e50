"""Matrix products of integers and booleans, as products that the compiler hands to a library.

XLA's CPU compiler has a library's routine for products of 8-bit integers that give 32-bit ones, if the first operand is
summed along its rows, and computes others in loops of its own.  With AVX-512 and JAX 0.10.2, products of 256x512x512
and more took 3.7 to 5.4 times as long as what is written here where the result has 32 bits, and 8 to 91 times where it
is as narrow as the operands, or unsigned.

Integers of 8 bits multiply to less than 2^16, so that float32 holds sums of many such products exactly.  Wider ones are
multiplied as 32-bit integers.  Both wrap around as the original does: what is lost are multiples of the result's range.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import Dtype
from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.contractions import Axes, Contraction, Pair, has_usual_precision, numbers_in
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_INT8, _INT32 = jnp.dtype(jnp.int8), jnp.dtype(jnp.int32)
_LARGEST = {jnp.dtype(jnp.bool_): 1, _INT8: 128, jnp.dtype(jnp.uint8): 255}
"""The largest magnitude of numbers of up to 8 bits."""
_WIDE = frozenset(map(jnp.dtype, ("int16", "int32", "uint16", "uint32")))
_EXACT = 2**24
"""Integers up to this are float32 numbers."""
_MOST_PARTS = 16
"""How many sums in float32 a product may be made of."""
_LEAST_WORK, _FEWEST_TERMS, _FEWEST_ROWS = 2**16, 16, 4
"""Multiplications of one product, terms, and rows or columns below which XLA's own loops are as fast."""


# ---------------------------------------------------------------------- recognition


def _match(graph: Graph, node: Node) -> Found | None:
    if not has_usual_precision(node.equation) or node.params.get("out_sharding") is not None:
        return None
    read, result = tuple(graph.dtype(number) for number in node.inputs), graph.dtype(node.outputs[0])
    if not all(dtype in _LARGEST or dtype in _WIDE for dtype in (*read, result)):
        return None
    if (result == jnp.bool_) != all(dtype == jnp.bool_ for dtype in read) and result != _INT32:
        return None
    shapes = [graph.shape(number) for number in node.inputs]
    axes = Contraction.of(shapes, node.params["dimension_numbers"])
    if not _is_large(axes):
        return None
    operands = tuple(_source(graph, node, number) for number in node.inputs)
    if any(number in graph.literals for number in operands):
        return None
    sources = [graph.dtype(number) for number in operands]
    if _is_fast(shapes, axes.summed, read, result) or _parts(shapes, axes.summed, sources) is None and result == _INT32:
        return None
    parameters: tuple[tuple[str, Plain], ...] = (
        ("batch", axes.batch), ("read", tuple(dtype.name for dtype in read)), ("summed", axes.summed)
    )  # fmt: skip
    return Found(parameters, operands, node.outputs)


def _is_large(axes: Contraction) -> bool:
    enough = axes.terms >= _FEWEST_TERMS and min(axes.rows, axes.columns) >= _FEWEST_ROWS
    return axes.count > 0 and enough and axes.work >= _LEAST_WORK


def _source(graph: Graph, node: Node, number: int) -> int:
    """Returns the numbers of up to 8 bits that an operand was converted from, in the same place, without loss."""
    made = graph.definitions.get(number)
    if made is None or made.body is not node.body or made.name != "convert_element_type":
        return number
    source, dtype = graph.dtype(made.inputs[0]), graph.dtype(number)
    return made.inputs[0] if source in _LARGEST and jnp.can_cast(source, dtype, "safe") else number


def _is_fast(shapes: Sequence[Sequence[int]], summed: Pair, read: Sequence[Dtype], result: Dtype) -> bool:
    """Returns whether XLA multiplies fast: by the library, or along the rows of both operands, on vectors."""
    first, second = (_by_rows(shape, own) for shape, own in zip(shapes, summed, strict=True))
    return first and (tuple(read) == (_INT8, _INT8) if result == _INT32 else second)


def _by_rows(shape: Sequence[int], summed: Axes) -> bool:
    """Returns whether an array is summed along its last axes alone."""
    return sorted(summed) == list(range(len(shape) - len(summed), len(shape)))


def _parts(
    shapes: Sequence[Sequence[int]], summed: Pair, sources: Sequence[Dtype]
) -> tuple[tuple[int, int], int] | None:
    """Returns how to take sums apart that float32 holds exactly.

    Returns:
      The axes of both operands along which terms are taken apart, and how many of that axis go together; None where
      there is no such sum, or too many.
    """
    if not all(dtype in _LARGEST for dtype in sources):
        return None
    together = _EXACT // math.prod(_LARGEST[dtype] for dtype in sources)
    axes = max(zip(*summed, strict=True), key=lambda pair: shapes[0][pair[0]])
    length, terms = shapes[0][axes[0]], math.prod(shapes[0][axis] for axis in summed[0])
    step = min(length, together // (terms // length))
    return (axes, step) if step and -(-length // step) <= _MOST_PARTS else None


# ---------------------------------------------------------------------- the two ways


def _original(spec: RespellingSpec, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    left, right = cast("tuple[str, str]", spec["read"])
    ((_, dtype),) = spec.results
    return [lax.dot_general(first.astype(left), second.astype(right), numbers_in(spec), preferred_element_type=dtype)]


def _respelt(spec: RespellingSpec, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    ((_, dtype),) = spec.results
    parts = _parts((first.shape, second.shape), numbers_in(spec)[0], (first.dtype, second.dtype))
    if parts is None:
        wide = [x.astype(_INT32) for x in (first, second)]
        return [lax.dot_general(wide[0], wide[1], numbers_in(spec), preferred_element_type=_INT32).astype(dtype)]
    (left, right), step = parts
    length = first.shape[left]
    sums = [
        lax.dot_general(
            lax.slice_in_dim(first, start, min(start + step, length), axis=left).astype(jnp.float32),
            lax.slice_in_dim(second, start, min(start + step, length), axis=right).astype(jnp.float32),
            numbers_in(spec),
            precision=lax.Precision.HIGHEST,
        ).astype(_INT32)
        for start in range(0, length, step)
    ]
    found = functools.reduce(lax.add, sums)
    return [found != 0 if dtype == jnp.bool_ else found.astype(dtype)]


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns what is multiplied, whether the result is as narrow, and along what it is summed."""
    shapes, dtypes = zip(*spec.operands, strict=True)
    ((_, result),) = spec.results
    summed, batch = numbers_in(spec)
    parts = _parts(shapes, summed, dtypes)
    sums = "32 bits" if parts is None else "float32" if parts[1] >= shapes[0][parts[0][0]] else "parts in float32"
    first, second = ("rows" if _by_rows(s, own) else "columns" for s, own in zip(shapes, summed, strict=True))
    width = "to 32 bits" if result == _INT32 else "narrow"
    return f"{sums}, {width}, {first} and {second} summed{', a batch' if batch[0] else ''}"


_FORMS = (
    ("int8", "int8", "int8"), ("int8", "int8", "int32"), ("uint8", "uint8", "uint8"), ("uint8", "uint8", "int32"),
    ("bool", "bool", "bool"), ("bool", "bool", "int32"), ("int16", "int16", "int16"), ("uint32", "uint32", "uint32"),
)  # fmt: skip
"""Dtypes of the operands, of what is multiplied, and of the result."""
_SHAPES = (
    (64, 64, 64), (16, 256, 256), (128, 128, 128), (16, 512, 1024), (256, 512, 512), (512, 2048, 512)
)  # fmt: skip
"""Rows, terms and columns of single products."""
_BATCH = 32, (64, 64, 64)


def _samples() -> Iterator[tuple[str, Sample]]:
    for form, layout in itertools.product(_FORMS, ((True, True), (True, False), (False, True), (False, False))):
        for count, shape in (*((0, shape) for shape in _SHAPES), _BATCH):
            found = _sample(form, layout, count, shape)
            if found is not None:
                name = f"{count}x" * bool(count) + "x".join(map(str, shape))
                yield f"{'-'.join(form)}-{name}-{'cr'[layout[0]]}{'cr'[layout[1]]}", found


def _sample(form: tuple[str, str, str], layout: tuple[bool, bool], count: int, shape: Axes) -> Sample | None:
    """Returns a product, of operands that are summed along their rows (True) or columns; None where XLA's is fast."""
    own, read, result = map(jnp.dtype, form)
    lengths, terms, many = (shape[0], shape[2]), shape[1], (count,) if count else ()
    sizes = tuple((*many, n, terms) if rows else (*many, terms, n) for n, rows in zip(lengths, layout, strict=True))
    summed = (len(many) + int(layout[0]),), (len(many) + int(layout[1]),)
    batch: Pair = ((0,), (0,)) if many else ((), ())
    if _is_fast(sizes, summed, (read, read), result):
        return None

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x.astype(read), y.astype(read), (summed, batch), preferred_element_type=result)

    return Sample(function, tuple(jax.ShapeDtypeStruct(size, own) for size in sizes))


KIND = Kind(
    name="integer_product",
    primitives=("dot_general",),
    numerics="identical",
    instead="products of float32 numbers, or of 32-bit integers",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    # With float16 arithmetic, rows that gain 1.9 to 2.5 with JAX 0.10.2 gained 0.3 to 1 with 0.12, whose own loops are
    # faster; those of 4 and more gained 2.1 and more.
    elsewhere_from=4.0,
    platforms=("cpu",),
)
