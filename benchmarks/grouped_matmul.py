"""Grouped matmul: the spellings that are measured, and the cases.

Letters: M rows, K inner size, N columns, G groups.  Arrays are [M, K] and [G, K, N].  In the cases "dense", every one
of G experts computes every one of T = M / 2 tokens, of which two count: M is the rows that have to be computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from autopallas.kernels.grouped_matmul.cases import in_direction
from autopallas.kernels.mixture_of_experts.cases import DENSE
from autopallas.workbench.cases import cases_of
from benchmarks.case import AUTOPALLAS, DIRECTIONS, ORIGINAL, Candidate, Case, Chosen, Direction, chosen_by

CASES = cases_of("grouped_matmul")
"""Those of mixtures of experts included."""
assert CASES is not None

ORACLE_LIMIT = 2**33
"""How many multiplications there may be for a float64 result to be computed: some seconds of NumPy."""


def original(case: Case) -> Callable[..., jax.Array]:
    """The forward computation as people write it."""
    return CASES.ORIGINALS[case.mask]


def candidates(case: Case) -> dict[str, Candidate]:
    """The original, and the original under ``autopallas.optimize``."""
    optimized = autopallas.optimize(original(case), objective="always", strict=True)

    return {
        ORIGINAL: Candidate(in_direction(case, original(case)), lambda: Chosen(ORIGINAL)),
        AUTOPALLAS: Candidate(in_direction(case, optimized), lambda: chosen_by(optimized)),
    }


def group_sizes(case: Case) -> np.ndarray[Any, Any]:
    """How many rows each group has: all of them together have all rows."""
    rows, groups = case.size("M"), case.size("G")
    if case.mask == "even":
        return np.full(groups, rows // groups, np.int32) + (np.arange(groups) < rows % groups)
    random = np.random.default_rng(0)
    return random.multinomial(rows, random.dirichlet(np.full(groups, 2.0))).astype(np.int32)


def arguments(case: Case) -> tuple[jax.Array, ...]:
    """lhs, rhs, group sizes, or those of a mixture; and last the cotangent where there is a backward pass."""
    rows, inner, columns, groups = (case.size(letter) for letter in "MKNG")
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32), case.dtype)

    if case.mask == DENSE:
        tokens = rows // 2
        popular = np.log(random.dirichlet(np.full(groups, 2.0)))
        experts = np.argsort(popular + random.gumbel(size=(tokens, groups)), axis=1)[:, -2:]
        given = [normal(tokens, inner), normal(groups, inner, columns), normal(groups, columns, inner)]
        given += [normal(tokens, 2), jnp.asarray(experts, jnp.int32)]
        return (*given, normal(tokens, inner)) if case.direction == "forward+backward" else tuple(given)
    given = [normal(rows, inner), normal(groups, inner, columns), jnp.asarray(group_sizes(case), jnp.int32)]
    if case.direction == "forward+backward":
        given.append(normal(rows, columns))
    return tuple(given)


def operations(case: Case) -> float:
    """A multiply-add for each row, inner element and column; twice that more in the backward pass."""
    forward = (4.0 if case.mask == DENSE else 2.0) * case.size("M") * case.size("K") * case.size("N")
    return forward * (3.0 if case.direction == "forward+backward" else 1.0)


def oracle(case: Case, arguments: tuple[Any, ...]) -> Any:
    """The result in float64, of the arguments as they were rounded; None for large and for dense cases."""
    if case.mask == DENSE or case.size("M") * case.size("K") * case.size("N") > ORACLE_LIMIT:
        return None
    lhs, rhs = (np.asarray(a).astype(np.float64) for a in arguments[:2])
    sizes = np.asarray(arguments[2])
    cotangent = np.asarray(arguments[3]).astype(np.float64) if case.direction == "forward+backward" else None
    out, dlhs, drhs = np.zeros((lhs.shape[0], rhs.shape[2])), np.zeros_like(lhs), np.zeros_like(rhs)
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + int(size))
        start += int(size)
        out[rows] = lhs[rows] @ rhs[group]
        if cotangent is not None:
            dlhs[rows] = cotangent[rows] @ rhs[group].T
            drhs[group] = lhs[rows].T @ cotangent[rows]
    return out if cotangent is None else (out, (dlhs, drhs))


def grid(name: str) -> tuple[Case, ...]:
    """The cases.

    "quick" is a sample; "standard" is checked in for the CPU; "wide" adds numbers of groups; "table" has a case for
    each row of the tuned table.
    """
    dtypes = ("float32", "bfloat16")
    if name == "quick":
        return (_case("forward", "float32", 4096, 8), _case("forward+backward", "float32", 4096, 8))
    dense = [_case(direction, dtype, 2048, 16, 256, 512, DENSE) for direction in DIRECTIONS for dtype in dtypes]
    if name == "standard":
        return (
            *(_case("forward", dtype, 4096, groups) for dtype in dtypes for groups in (8, 64)),
            *(_case("forward+backward", dtype, 4096, groups) for dtype in dtypes for groups in (8, 64)),
            *dense,
        )
    if name == "wide":
        many = (
            _case(direction, dtype, 4096, groups, mask=mask)
            for direction in DIRECTIONS
            for dtype in dtypes
            for groups in (2, 4, 8, 16, 32, 64)
            for mask in ("uneven", "even")
        )
        return (*many, *dense)
    if name == "table":
        return CASES.table_grid()
    raise ValueError(f"no grid is called {name!r}")


def _case(
    direction: Direction,
    dtype: str,
    rows: int,
    groups: int,
    inner: int = 512,
    columns: int = 1024,
    mask: str = "uneven",
) -> Case:
    sizes = (("M", rows), ("K", inner), ("N", columns), ("G", groups))
    return Case("grouped_matmul", direction, dtype, mask, sizes)
