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
from benchmarks.case import AUTOPALLAS, DIRECTIONS, ORIGINAL, Candidate, Case, Chosen, chosen_by

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

    return {
        ORIGINAL: Candidate(whole, lambda: Chosen(ORIGINAL)),
        AUTOPALLAS: Candidate(optimized, lambda: chosen_by(optimized)),
    }


def arguments(case: Case) -> tuple[jax.Array, ...]:
    """Query, key, value and decay, a delta rule's rate; and last the cotangent where there is a backward pass."""
    random = np.random.default_rng(0)
    scales = (0.1, 0.1, 1.0, 1.0, 1.0, 1.0)
    return tuple(
        jnp.asarray(random.standard_normal(t.shape, np.float32) * scale, t.dtype)
        for t, scale in zip(types(case), scales, strict=False)
    )


def grid(name: str) -> tuple[Case, ...]:
    """The cases: "quick" is a sample; "wide" adds lengths and sizes of states; "table" has those of the tuned table."""
    if name == "table":
        return table_grid()
    steps, sizes, variants = {
        "quick": ((1024,), (64,), ("scalar",)),
        "wide": ((512, 1024, 2048, 4096), (32, 64, 128), tuple(ORIGINALS)),
    }.get(name, ((1024, 2048), (64,), tuple(ORIGINALS)))
    return tuple(
        Case("recurrence", direction, "float32", variant, (("T", t), ("B", 1), ("H", 8), ("N", n), ("P", n)))
        for direction in DIRECTIONS
        for variant in variants
        for t in steps
        for n in sizes
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
    query, key, value, given, *rate = (np.asarray(x, np.float64) for x in arguments)
    decay = 1 / (1 + np.exp(-(given + 4)))
    state = np.zeros((batch, heads, rows, columns))
    found = np.zeros((steps, batch, heads, columns))
    for t in range(steps):
        factor = decay[t][..., None] if case.mask == "channel" else decay[t][..., None, None]
        state = factor * state
        k, change = key[t], value[t]
        if rate:
            k = k / np.sqrt(np.sum(k * k, -1, keepdims=True) + 1e-6)
            change = (change - np.einsum("bhn,bhnp->bhp", k, state)) / (1 + np.exp(-rate[0][t]))[..., None]
        state = state + k[..., :, None] * change[..., None, :]
        found[t] = np.einsum("bhn,bhnp->bhp", query[t], state)
    return found
