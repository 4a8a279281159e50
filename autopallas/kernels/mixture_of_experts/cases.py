"""Writes a mixture of experts as people do, at the sizes of the tuned table: variants of the grouped matmul's cases.

Letters: T tokens, K their size, N columns, G experts. Every expert computes every token, and two experts count for each
token: M = 2 T is the number of rows that have to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from autopallas.compat import ArrayFunction, Shaped
from autopallas.kernels.grouped_matmul.cases import cases_of_rows, in_direction
from autopallas.kernels.mixture_of_experts.operation import OPERATION
from autopallas.workbench.cases import Case, Direction

__all__ = ["DENSE", "ORIGINALS", "case_of", "direct", "in_direction", "mixture", "table_grid", "types"]

DENSE = "dense"
"""Variant in which every expert computes every token."""


def mixture(x: jax.Array, up: jax.Array, down: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
    """Computes a mixture that leaves out no expert: x [T, K], up [G, K, N], down [G, N, K], the others [T, 2]."""
    chosen = jax.nn.one_hot(experts, up.shape[0], dtype=weights.dtype)
    combine = jnp.sum(chosen * weights[..., None], axis=1)
    hidden = jax.nn.silu(jnp.einsum("tk,gkn->tgn", x, up))
    return jnp.einsum("tgn,gnk,tg->tk", hidden, down, combine)


ORIGINALS: dict[str, Callable[..., jax.Array]] = {DENSE: mixture}
"""The mixture as written, without groups."""


def types(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the arguments of :func:`mixture`, and last of the cotangent if there is a backward pass."""
    rows, inner, columns, groups = (case.size(letter) for letter in "MKNG")
    tokens = rows // 2
    shapes = ((tokens, inner), (groups, inner, columns), (groups, columns, inner), (tokens, 2))
    given = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in shapes]
    given.append(jax.ShapeDtypeStruct((tokens, 2), jnp.int32))
    if case.direction == "forward+backward":
        given.append(jax.ShapeDtypeStruct((tokens, inner), case.dtype))
    return tuple(given)


def case_of(given: Sequence[Shaped], variant: str, direction: Direction) -> Case:
    """Returns the case of the arguments of :func:`mixture`."""
    shapes = [tuple(getattr(t, "shape", (0,) * 9)) for t in given]
    if list(map(len, shapes)) != [2, 3, 3, 2, 2]:
        raise ValueError("a dense mixture takes x [T, K], up [G, K, N], down [G, N, K], weights [T, 2], experts [T, 2]")
    (tokens, inner), (groups, _, columns) = shapes[:2]
    sizes = (("M", 2 * tokens), ("K", inner), ("N", columns), ("G", groups))
    case = Case(OPERATION.name, direction, given[0].dtype.name, variant, sizes)
    if [(t.shape, t.dtype) for t in given] != [(t.shape, t.dtype) for t in types(case)][:5]:
        raise ValueError("the arguments of a dense mixture must agree in their sizes and dtypes, with int32 experts")
    return case


def direct(case: Case) -> ArrayFunction | None:
    """Returns None, since no function computes a mixture directly."""
    return None


def table_grid(platform: str = "cpu") -> tuple[Case, ...]:
    """Returns a case for each row of the tuned table; none for TPUs."""
    if platform == "tpu":
        return ()
    return cases_of_rows(DENSE, dict.fromkeys((4, 16, 64, 256), (4, 8, 16, 32)))
