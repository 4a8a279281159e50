"""Sums of a few numbers each, such as the coordinates of points, the experts of a token or a batch of gradients.

XLA's CPU compiler hands these to a library that is made for long sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast

import jax
import jax.numpy as jnp

from autopallas.compat import JaxprEqn
from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.kind import Found, Kind, Sample, of_equation
from autopallas.kernels.respelling.recomputed_operands import is_computed_for_others
from autopallas.kernels.respelling.short_sums import LONGEST_COLUMN, LONGEST_ROW, short_sum, short_sums
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_FEWEST = 4096
"""Elements below which the library is not used."""
_MANY = 32768
"""Columns from which the library of JAX 0.10 takes up to 30 times as long."""


def _match(graph: Graph, node: Node) -> Found | None:
    return None if _is_read_by_others(graph, node) else of_equation(_parameters)(graph, node)


def _is_read_by_others(graph: Graph, node: Node) -> bool:
    """Returns whether what is summed costs little to compute, and other equations read it too.

    For the library it is written once, and read by all; a loop of the program computes it anew.  Train steps of hidden
    Markov models, which sum products over the batch and over the states, took 1.2 times as long, gradients of softmaxes
    over 8 and 32 columns 1.4 times (AVX-512, JAX 0.10.2).  Rows gain more, so that of those only what is summed itself
    counts, perhaps negated, and not what it is computed of, as differences of points.
    """
    (operand,) = node.equation.invars
    sizes = short_sums(operand.aval.shape, tuple(sorted(node.equation.params["axes"])))
    return is_computed_for_others(graph, node, deeply=sizes is not None and sizes[2] > 1)


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    (operand,) = equation.invars
    shape, axes = operand.aval.shape, tuple(sorted(equation.params["axes"]))
    if operand.aval.dtype != jnp.float32 or math.prod(shape) < _FEWEST or short_sums(shape, axes) is None:
        return None
    return {"axes": axes}


def _axes(spec: RespellingSpec) -> tuple[int, ...]:
    return cast("tuple[int, ...]", spec["axes"])


def _original(spec: RespellingSpec, x: jax.Array) -> list[jax.Array]:
    return [jnp.sum(x, _axes(spec))]


def _respelt(spec: RespellingSpec, x: jax.Array) -> list[jax.Array]:
    return [short_sum(x, _axes(spec))]


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    ((shape, _),) = spec.operands
    sizes = short_sums(shape, _axes(spec))
    assert sizes is not None  # the match has asked
    _, length, behind = sizes
    if behind == 1:
        return f"rows of up to {next(limit for limit in (4, LONGEST_ROW) if length <= limit)}"
    limit = next(limit for limit in (8, 32, LONGEST_COLUMN) if length <= limit)
    return f"{'many' if behind >= _MANY else 'few'} columns of up to {limit}"


def _samples() -> Iterator[tuple[str, Sample]]:
    for elements in (2**13, 2**15, 2**19, 2**23):
        for length in (3, 8):
            shape: tuple[int, ...] = (elements // length, length)
            yield f"rows-{'x'.join(map(str, shape))}", Sample(_total, (jax.ShapeDtypeStruct(shape, jnp.float32),))
    shapes = [(1, 8, 1024), (1, 32, 256), (1, 128, 64), (1, 8, 4096), (1, 32, 1024), (1, 128, 256), (8, 8, 1024)]
    shapes += [(16, 8, 4096), (8, 32, 2048), (8, 128, 512)]
    shapes += [(1, 8, 65536), (1, 32, 32768), (1, 2, 262144), (256, 8, 4096), (256, 32, 1024), (64, 128, 1024)]
    shapes += [(16, 8, 65536), (4, 32, 65536), (1, 128, 65536)]
    for shape in shapes:
        yield f"columns-{'x'.join(map(str, shape))}", Sample(_total, (jax.ShapeDtypeStruct(shape, jnp.float32),))


def _total(x: jax.Array) -> jax.Array:
    return jnp.sum(x, 1)


KIND = Kind(
    name="short_sum",
    primitives=("reduce_sum",),
    numerics="reordered",
    instead="a sum in a loop of the program's own",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=math.inf,  # sums of columns gain up to 31 with JAX 0.10, and up to 2 with 0.12
)
