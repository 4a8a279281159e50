"""Grouped matmul as people write it, at the sizes of the tuned table.

Letters: M rows, K inner size, N columns, G groups.  Arrays are [M, K] and [G, K, N].  In the cases "dense", every one
of G experts computes every one of T = M / 2 tokens, of which two count: M is the rows that have to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from autopallas.compat import ArrayFunction, PyTree, Shaped
from autopallas.workbench.cases import DIRECTIONS, Case, Direction

__all__ = ["DENSE", "ORIGINALS", "case_of", "direct", "in_direction", "mixture", "ragged_dot", "table_grid", "types"]

DENSE = "dense"
"""The cases in which every expert computes every token."""


def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """A mixture's expert layer as people write it."""
    return jax.lax.ragged_dot(lhs, rhs, group_sizes)


def mixture(x: jax.Array, up: jax.Array, down: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
    """A mixture that leaves out no expert: x [T, K], up [G, K, N], down [G, N, K], the others [T, 2]."""
    chosen = jax.nn.one_hot(experts, up.shape[0], dtype=weights.dtype)
    combine = jnp.sum(chosen * weights[..., None], axis=1)
    hidden = jax.nn.silu(jnp.einsum("tk,gkn->tgn", x, up))
    return jnp.einsum("tgn,gnk,tg->tk", hidden, down, combine)


ORIGINALS: dict[str, Callable[..., jax.Array]] = {"uneven": ragged_dot, "even": ragged_dot, DENSE: mixture}
"""Groups of different and of equal size, and a mixture without groups."""


def in_direction(case: Case, function: Callable[..., jax.Array]) -> ArrayFunction:
    """The function itself, or with the gradients for all floating arguments from a cotangent, its last argument."""
    if case.direction == "forward":
        return function

    def forward_and_backward(*arguments: jax.Array) -> PyTree:
        *floating, integers, cotangent = arguments
        output, pull_back = jax.vjp(lambda *floating: function(*floating, integers), *floating)
        return output, pull_back(cotangent)

    return forward_and_backward


def types(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """lhs, rhs, group sizes, or those of :func:`mixture`; and last the cotangent where there is a backward pass."""
    rows, inner, columns, groups = (case.size(letter) for letter in "MKNG")
    tokens, dtype = rows // 2, jnp.dtype(case.dtype)
    shapes: list[tuple[int, ...]]
    integers: tuple[int, ...]
    if case.mask == DENSE:
        shapes = [(tokens, inner), (groups, inner, columns), (groups, columns, inner), (tokens, 2)]
        integers, result = (tokens, 2), (tokens, inner)
    else:
        shapes, integers, result = [(rows, inner), (groups, inner, columns)], (groups,), (rows, columns)
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    given.append(jax.ShapeDtypeStruct(integers, jnp.dtype(jnp.int32)))
    if case.direction == "forward+backward":
        given.append(jax.ShapeDtypeStruct(result, dtype))
    return tuple(given)


def case_of(types: Sequence[Shaped], variant: str, direction: Direction) -> Case:
    """The case of lhs [M, K], rhs [G, K, N] and, if given, group sizes [G]; or of the arguments of :func:`mixture`."""
    shapes = [tuple(getattr(t, "shape", (0,) * 9)) for t in types]
    if variant == DENSE:
        return _dense_case_of(types, shapes, direction)
    if list(map(len, shapes)) not in ([2, 3], [2, 3, 1]):
        raise ValueError("grouped_matmul takes lhs [M, K], rhs [G, K, N] and int32 group sizes [G]")
    (rows, inner), (groups, rhs_inner, columns) = shapes[:2]
    if inner != rhs_inner or types[0].dtype != types[1].dtype:
        raise ValueError("lhs and rhs must agree in inner size and dtype")
    if len(types) == 3 and (types[2].shape != (groups,) or types[2].dtype != jnp.int32):
        raise ValueError(f"the group sizes must be i32[{groups}], as many as rhs has groups")
    sizes = (("M", rows), ("K", inner), ("N", columns), ("G", groups))
    return Case("grouped_matmul", direction, types[0].dtype.name, variant, sizes)


def _dense_case_of(given: Sequence[Shaped], shapes: Sequence[tuple[int, ...]], direction: Direction) -> Case:
    if list(map(len, shapes)) != [2, 3, 3, 2, 2]:
        raise ValueError("a dense mixture takes x [T, K], up [G, K, N], down [G, N, K], weights [T, 2], experts [T, 2]")
    (tokens, inner), (groups, _, columns) = shapes[:2]
    sizes = (("M", 2 * tokens), ("K", inner), ("N", columns), ("G", groups))
    case = Case("grouped_matmul", direction, given[0].dtype.name, DENSE, sizes)
    if [(t.shape, t.dtype) for t in given] != [(t.shape, t.dtype) for t in types(case)][:5]:
        raise ValueError("the arguments of a dense mixture must agree in their sizes and dtypes, with int32 experts")
    return case


def direct(case: Case) -> ArrayFunction | None:
    """``grouped_matmul``; none of a mixture."""
    if case.mask == DENSE:
        return None
    from autopallas.kernels.grouped_matmul.api import grouped_matmul

    return grouped_matmul


def table_grid(platform: str = "cpu") -> tuple[Case, ...]:
    """A case for each row of the tuned table.

    Few rows for each of many groups in the largest cases: what is measured against grows with rows times groups.
    """
    if platform == "tpu":
        sizes = (("M", 8192), ("K", 4096), ("N", 4096))
        return tuple(
            Case("grouped_matmul", direction, "bfloat16", "even", (*sizes, ("G", groups)))
            for direction in DIRECTIONS
            for groups in (8, 64)
        )
    few = (2, 4, 8, 16, 32)
    counts = {4: (*few, 64), 16: (*few, 64), 64: (*few, 64), 256: few}
    dense = dict.fromkeys(counts, (4, 8, 16, 32))
    return tuple(
        Case("grouped_matmul", direction, dtype, variant, (("M", groups * rows), ("K", k), ("N", n), ("G", groups)))
        for variant, wanted in (("uneven", counts), (DENSE, dense))
        for direction in DIRECTIONS
        for dtype in ("float32", "bfloat16")
        for k, n in ((64, 64), (256, 512))
        for rows, numbers in wanted.items()
        for groups in numbers
    )
