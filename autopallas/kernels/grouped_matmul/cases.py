"""Grouped matmul as people write it, at the sizes of the tuned table.

Letters: M rows, K inner size, N columns, G groups.  Arrays are [M, K] and [G, K, N].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from autopallas.compat import ArrayFunction, Shaped
from autopallas.kernels.grouped_matmul.example import ragged_dot
from autopallas.workbench.cases import DIRECTIONS, Case, Direction, with_gradients

__all__ = ["ORIGINALS", "case_of", "cases_of_rows", "direct", "in_direction", "ragged_dot", "table_grid", "types"]


ORIGINALS: dict[str, Callable[..., jax.Array]] = {"uneven": ragged_dot, "even": ragged_dot}
"""Groups of different and of equal size."""


def in_direction(case: Case, function: Callable[..., jax.Array]) -> ArrayFunction:
    """Returns the function itself, or with the gradients for all floating arguments from a cotangent, its last
    argument."""
    return with_gradients(case, function, -1)


def types(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """lhs, rhs, group sizes; and last the cotangent where there is a backward pass."""
    rows, inner, columns, groups = (case.size(letter) for letter in "MKNG")
    given = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in ((rows, inner), (groups, inner, columns))]
    given.append(jax.ShapeDtypeStruct((groups,), jnp.int32))
    if case.direction == "forward+backward":
        given.append(jax.ShapeDtypeStruct((rows, columns), case.dtype))
    return tuple(given)


def case_of(types: Sequence[Shaped], variant: str, direction: Direction) -> Case:
    """Returns the case of lhs [M, K], rhs [G, K, N] and, if given, group sizes [G]."""
    shapes = [tuple(getattr(t, "shape", (0,) * 9)) for t in types]
    if list(map(len, shapes)) not in ([2, 3], [2, 3, 1]):
        raise ValueError("grouped_matmul takes lhs [M, K], rhs [G, K, N] and int32 group sizes [G]")
    (rows, inner), (groups, rhs_inner, columns) = shapes[:2]
    if inner != rhs_inner or types[0].dtype != types[1].dtype:
        raise ValueError("lhs and rhs must agree in inner size and dtype")
    if len(types) == 3 and (types[2].shape != (groups,) or types[2].dtype != jnp.int32):
        raise ValueError(f"the group sizes must be i32[{groups}], as many as rhs has groups")
    sizes = (("M", rows), ("K", inner), ("N", columns), ("G", groups))
    return Case("grouped_matmul", direction, types[0].dtype.name, variant, sizes)


def direct(case: Case) -> ArrayFunction | None:
    """``grouped_matmul``."""
    from autopallas.kernels.grouped_matmul.api import grouped_matmul

    return grouped_matmul


def table_grid(platform: str = "cpu") -> tuple[Case, ...]:
    """Returns a case for each row of the tuned table.

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
    return cases_of_rows("uneven", {4: (*few, 64), 16: (*few, 64), 64: (*few, 64), 256: few})


def cases_of_rows(variant: str, groups: Mapping[int, Sequence[int]]) -> tuple[Case, ...]:
    """Returns a variant in both directions, two dtypes and with small and large matrices, for numbers of groups by the
    rows of each."""
    return tuple(
        Case("grouped_matmul", direction, dtype, variant, (("M", number * rows), ("K", k), ("N", n), ("G", number)))
        for direction in DIRECTIONS
        for dtype in ("float32", "bfloat16")
        for k, n in ((64, 64), (256, 512))
        for rows, numbers in groups.items()
        for number in numbers
    )
