"""Recurrences: the spellings that are measured, and the cases.

Letters: T steps, B sequences, H heads, N rows and P columns of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from autopallas.kernels.recurrence.cases import ORIGINALS, in_direction, table_grid, types
from benchmarks.case import AUTOPALLAS, DIRECTIONS, ORIGINAL, Candidate, Case, Chosen

__all__ = ["arguments", "candidates", "grid", "in_direction", "operations", "oracle", "original"]

ORACLE_LIMIT = 2**27
"""How many elements of a state in all steps there may be for a float64 result to be computed."""


def original(case: Case) -> Callable[..., jax.Array]:
    """The forward computation as people write it."""
    return ORIGINALS[case.mask]


def candidates(case: Case) -> dict[str, Candidate]:
    """The original, and the whole case under ``autopallas.optimize``: a backward is found in the program."""
    whole = in_direction(case, original(case))
    optimized = autopallas.optimize(whole, objective="always", strict=True)

    def chosen() -> Chosen:
        report = optimized.report()
        for site in report.sites:
            if site.verdict == "applied":
                return Chosen(site.implementation or "", site.block_sizes)
        reasons = [site.reason for site in report.sites] + [miss.reason for miss in report.near_misses]
        return Chosen("kept: " + ("; ".join(reasons) or "no site was found"))

    return {ORIGINAL: Candidate(whole, lambda: Chosen(ORIGINAL)), AUTOPALLAS: Candidate(optimized, chosen)}


def arguments(case: Case) -> tuple[jax.Array, ...]:
    """Query, key, value and decay; and last the cotangent where there is a backward pass."""
    random = np.random.default_rng(0)
    scales = (0.1, 0.1, 1.0, 1.0, 1.0)
    return tuple(
        jnp.asarray(random.standard_normal(t.shape, np.float32) * scale, t.dtype)
        for t, scale in zip(types(case), scales, strict=False)
    )


def grid(name: str) -> tuple[Case, ...]:
    """The cases of a grid."""
    if name == "table":
        return table_grid()
    steps, variants = {"quick": ((1024,), ("scalar",))}.get(name, ((1024, 2048), tuple(ORIGINALS)))
    return tuple(
        Case("recurrence", direction, "float32", variant, (("T", t), ("B", 1), ("H", 8), ("N", 64), ("P", 64)))
        for direction in DIRECTIONS
        for variant in variants
        for t in steps
    )


def operations(case: Case) -> float:
    """Multiplications and additions of the loop."""
    steps, batch, heads, rows, columns = (case.size(letter) for letter in "TBHNP")
    forward = 5.0 * steps * batch * heads * rows * columns
    return forward if case.direction == "forward" else 3 * forward


def oracle(case: Case, arguments: tuple[Any, ...]) -> Any:
    """The result in float64, or None where the case is too large for it."""
    steps, batch, heads, rows, columns = (case.size(letter) for letter in "TBHNP")
    if case.direction != "forward" or steps * batch * heads * rows * columns > ORACLE_LIMIT:
        return None
    query, key, value, given = (np.asarray(x, np.float64) for x in arguments)
    decay = 1 / (1 + np.exp(-(given + 4)))
    state = np.zeros((batch, heads, rows, columns))
    found = np.zeros((steps, batch, heads, columns))
    for t in range(steps):
        factor = decay[t][..., None, None] if case.mask == "scalar" else decay[t][..., None]
        state = factor * state + key[t][..., :, None] * value[t][..., None, :]
        found[t] = np.einsum("bhn,bhnp->bhp", query[t], state)
    return found
