"""Many small systems with triangular matrices, solved by substitution on vectors.

For CPUs JAX calls a routine of LAPACK for each system, which takes longer than the few operations of a small one.
Written out, substitution runs on vectors, which hold numbers of many systems.  Such systems are what solutions by
Cholesky decompositions come down to, and the gradients of these decompositions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import JaxprEqn
from autopallas.kernels.respelling.fusion_barrier import unfused
from autopallas.kernels.respelling.kind import Kind, Sample, of_equation
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_LEAST_BATCH = 64
_MOST_ROWS = 4
"""Rows of a matrix up to which substitution is written out; more take seconds to compile."""
_MOST_COLUMNS = 64
_FLAGS = ("conjugate_a", "left_side", "lower", "transpose_a", "unit_diagonal")


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    matrices, sides = (variable.aval for variable in equation.invars)
    params = dict(equation.params)
    if sorted(params) != sorted(_FLAGS) or matrices.dtype != sides.dtype:
        return None
    if str(sides.dtype) not in ("float32", "float64") or 0 in sides.shape:
        return None
    *batch, rows, _ = matrices.shape
    columns = sides.shape[-1 if params["left_side"] else -2]
    if math.prod(batch) < _LEAST_BATCH or not 1 < rows <= _MOST_ROWS or columns > _MOST_COLUMNS:
        return None
    return {name: bool(params[name]) for name in _FLAGS}


# ---------------------------------------------------------------------- the two ways


def _original(spec: RespellingSpec, a: jax.Array, b: jax.Array) -> list[jax.Array]:
    flags = {name: bool(spec[name]) for name in _FLAGS}
    return [lax.linalg.triangular_solve(a, b, **flags)]


def _respelt(spec: RespellingSpec, a: jax.Array, b: jax.Array) -> list[jax.Array]:
    def solved(a: jax.Array, b: jax.Array) -> jax.Array:
        return _solved(spec, a, b)

    def alike(a: jax.Array, b: jax.Array) -> jax.Array:
        return a[..., :1, :1] + b

    return [unfused(solved, alike, a, b)]


def _solved(spec: RespellingSpec, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns X of A X = B, or of X A = B, which is A^T X^T = B^T.  The other triangle of A is not read."""
    rows, axis = a.shape[-1], -2 if spec["left_side"] else -1
    turned = bool(spec["transpose_a"]) == bool(spec["left_side"])  # whether row i is column i of the array
    lower = bool(spec["lower"]) != turned

    def entry(i: int, j: int) -> jax.Array:
        i, j = (j, i) if turned else (i, j)
        return a[..., i : i + 1, j]

    def side(i: int) -> jax.Array:
        return lax.index_in_dim(b, i, b.ndim + axis, keepdims=False)

    known: dict[int, jax.Array] = {}
    for i in range(rows) if lower else reversed(range(rows)):
        left = side(i)
        for j, x in known.items():
            left = left - entry(i, j) * x
        known[i] = left if spec["unit_diagonal"] else left / entry(i, i)
    return jnp.stack([known[i] for i in range(rows)], axis)


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns how many rows and columns a system has."""
    (matrix, _), (shape, _) = spec.operands
    columns = shape[-1 if spec["left_side"] else -2]
    count = "one column" if columns == 1 else "few columns" if columns <= 4 else "many columns"
    return f"{matrix[-1]} rows, {count}{'' if spec['left_side'] else ', matrices on the right'}"


def _fill(spec: RespellingSpec, random: np.random.Generator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Makes systems that can be solved: with a diagonal that is no smaller than what is beside it."""
    a, b = arrays
    diagonal = np.eye(a.shape[-1], dtype=bool)
    return [np.where(diagonal, 2 + np.abs(a), a).astype(a.dtype), b]


def _samples() -> Iterator[tuple[str, Sample]]:
    sizes = ((2, 1), (2, 2), (2, 16), (3, 1), (3, 3), (3, 16), (4, 1), (4, 4), (4, 16))
    for elements, (rows, columns) in itertools.product((2**12, 2**15, 2**19, 2**22), sizes):

        def function(a: jax.Array, b: jax.Array) -> jax.Array:
            return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)

        count = elements // (rows * max(rows, columns))
        shapes = (count, rows, rows), (count, rows, columns)
        yield (
            f"{count}x{rows}x{columns}",
            Sample(function, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)),
        )


KIND = Kind(
    name="triangular_solve",
    primitives=("triangular_solve",),
    numerics="tolerance",
    instead="substitution, written out",
    match=of_equation(_parameters),
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    assumptions=("both operands of triangular solves are finite, and no number on the diagonal is 0",),
    elsewhere_from=4.0,
    in_loops=True,
    fill=_fill,
)
