"""Matrix products of complex numbers, as products of their parts.

XLA's CPU compiler hands products of real matrices to a library, and has loops of its own for those of complex ones,
which take up to 2.5 times as long as four products of the parts.  Diagonal state-space models (S4D, S5, LRU) project
real activations to complex states, and read the real part of what the states are projected to: there two products of
parts are enough, forward and in each gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.graph import Graph, Node
from autopallas.graph.edit import surviving
from autopallas.graph.loop_slices import is_zero
from autopallas.kernels.respelling.contractions import Axes, Contraction, has_usual_precision, numbers_in
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]

_Part: TypeAlias = Literal["real", "imag", ""]

_REAL, _COMPLEX = jnp.dtype(jnp.float32), jnp.dtype(jnp.complex64)
_LEAST_WORK = 2**18
"""Multiplications of complex numbers from which on products of parts may be faster."""
_NARROW, _WIDE = 16, 64
"""Rows, columns and terms below which XLA's own loop is as fast; and from which on products of one batch each gain."""
_LAYOUT = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})
_FARTHEST = 64
"""Values that are looked at to learn which part of a product is read; beyond that both are."""


# ---------------------------------------------------------------------- recognition


def _match(graph: Graph, node: Node) -> Found | None:
    dtypes = [graph.dtype(number) for number in node.inputs]
    if graph.dtype(node.outputs[0]) != _COMPLEX or not {*dtypes} <= {_REAL, _COMPLEX}:
        return None
    if not has_usual_precision(node.equation) or node.params.get("out_sharding") is not None:
        return None
    axes = Contraction.of([graph.shape(number) for number in node.inputs], node.params["dimension_numbers"])
    if not _gains(axes):
        return None
    operands = tuple(_real_source(graph, node, number) for number in node.inputs)
    if any(number in graph.literals for number in operands):
        return None
    parameters = (("batch", axes.batch), ("part", _part_read(graph, node.outputs[0])), ("summed", axes.summed))
    return Found(parameters, operands, node.outputs)


def _gains(axes: Contraction) -> bool:
    """Returns whether a product is large enough for parts to be faster."""
    least = _NARROW if axes.count == 1 else _WIDE
    return min(axes.rows, axes.terms, axes.columns) >= least and axes.count * axes.work >= _LEAST_WORK


def _real_source(graph: Graph, node: Node, number: int) -> int:
    """Returns the real numbers that an operand was made of where it was made complex beside the product, else it."""
    source = graph.definitions.get(number)
    if graph.dtype(number) == _REAL or source is None or source.body is not node.body:
        return number
    made = source.name == "convert_element_type" or (source.name == "complex" and is_zero(graph, source.inputs[1]))
    real = source.inputs[0]
    same = made and graph.dtype(real) == _REAL and graph.shape(real) == graph.shape(number)
    return real if same else number


def _part_read(graph: Graph, result: int) -> _Part:
    """Returns the part of a product that all its readers take, or nothing where some take both or another one."""
    alive, todo, seen, parts = surviving(graph), [result], {result}, set[_Part]()
    while todo:
        number = todo.pop()
        if number in graph.returned or number in graph.read or len(seen) > _FARTHEST:
            return ""
        for user in graph.users.get(number, ()):
            if user.outputs and alive.isdisjoint(user.outputs):
                continue
            narrowed = user.name == "convert_element_type" and not _is_complex(graph, user.outputs[0])
            if user.name == "real" or narrowed:
                parts.add("real")
            elif user.name == "imag":
                parts.add("imag")
            elif user.name in _LAYOUT:
                todo += [n for n in user.outputs if n not in seen]
                seen.update(user.outputs)
            else:
                return ""
    graph.steps.spend(len(seen))
    return parts.pop() if len(parts) == 1 else ""


def _is_complex(graph: Graph, number: int) -> bool:
    return bool(jnp.issubdtype(graph.dtype(number), jnp.complexfloating))


# ---------------------------------------------------------------------- the two ways


def _product(spec: RespellingSpec, first: jax.Array, second: jax.Array) -> jax.Array:
    return lax.dot_general(first, second, numbers_in(spec), preferred_element_type=jnp.result_type(first, second))


def _original(spec: RespellingSpec, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    """Computes the product as it is written; the part that nothing reads is zero."""
    found = _product(spec, first.astype(_COMPLEX), second.astype(_COMPLEX))
    if spec["part"] == "real":
        found = lax.complex(lax.real(found), jnp.zeros_like(lax.real(found)))
    elif spec["part"] == "imag":
        found = lax.complex(jnp.zeros_like(lax.imag(found)), lax.imag(found))
    return [found]


def _respelt(spec: RespellingSpec, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    (a, b), (c, d) = (_parts(x) for x in (first, second))
    ((shape, _),) = spec.results
    real = imaginary = jnp.zeros(shape, _REAL)
    if spec["part"] != "imag":
        real = _product(spec, a, c)
        if b is not None and d is not None:
            real = real - _product(spec, b, d)
    if spec["part"] != "real":
        sums = [_product(spec, x, y) for x, y in ((a, d), (b, c)) if x is not None and y is not None]
        imaginary = sum(sums[1:], start=sums[0]) if sums else imaginary
    return [lax.complex(real, imaginary)]


def _parts(x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    return (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x, None)


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns how many products of parts there are, and whether one product is narrow, or there are many."""
    axes = Contraction.in_spec(spec)
    real = any(dtype == _REAL for _, dtype in spec.operands)
    parts = (2 if real else 4) // (2 if spec["part"] else 1)
    form = "a batch" if axes.count > 1 else "narrow" if min(axes.rows, axes.terms, axes.columns) < _WIDE else "wide"
    return f"{parts} product{'s' * (parts > 1)} of parts, {form}"


_FORMS = ("both complex", "left real", "right real", "real part", "left real, real part")
_SHAPES = ((128, 64, 64), (512, 64, 128), (2048, 128, 128), (4096, 256, 512), (2048, 32, 64), (16384, 16, 32))
"""Rows, terms and columns of single products."""


def _samples() -> Iterator[tuple[str, Sample]]:
    for form in _FORMS:
        for rows, terms, columns in _SHAPES:
            yield f"{rows}x{terms}x{columns}, {form}", _sample(form, (rows, terms), (terms, columns))
        for count, size in ((8, 64), (16, 128), (64, 128)):
            yield f"{count} of {size}, {form}", _sample(form, (count, size, size), (count, size, size))


def _sample(form: str, first: Axes, second: Axes) -> Sample:
    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        found = jnp.matmul(x.astype(_COMPLEX), y.astype(_COMPLEX))
        return jnp.real(found) if "part" in form else found

    dtypes = (_REAL if "left real" in form else _COMPLEX, _REAL if "right real" in form else _COMPLEX)
    return Sample(function, tuple(jax.ShapeDtypeStruct(s, d) for s, d in zip((first, second), dtypes, strict=True)))


KIND = Kind(
    name="complex_product",
    primitives=("dot_general",),
    numerics="reordered",
    instead="products of the real and imaginary parts",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    assumptions=("both operands are finite",),  # zero imaginary parts times infinities are NaN
    platforms=("cpu",),
)
