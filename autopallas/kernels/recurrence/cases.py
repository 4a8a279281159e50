"""Writes recurrences as people do, at the sizes of the tuned table.

Letters: T steps, B sequences, H heads, N rows and P columns of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from autopallas.compat import ArrayFunction, Shaped
from autopallas.kernels.recurrence.operation import OPERATION
from autopallas.workbench.cases import DIRECTIONS, Case, Direction, with_gradients

__all__ = ["ORIGINALS", "case_of", "delta", "direct", "gated", "in_direction", "retention", "table_grid", "types"]


def retention(query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array) -> jax.Array:
    """Computes a matrix state with one decay for each head and step: query, key [T, B, H, N], value [T, B, H, P]; the
    decay [T, B, H] is the sigmoid of what is given plus four."""

    def step(state: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, a = own
        state = jax.nn.sigmoid(a + 4)[..., None, None] * state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return _scanned(step, query, key, value, decay)


def gated(query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array) -> jax.Array:
    """Computes the same with a decay for each row of the state, [T, B, H, N]."""

    def step(state: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, a = own
        state = jax.nn.sigmoid(a + 4)[..., None] * state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return _scanned(step, query, key, value, decay)


def delta(query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, rate: jax.Array) -> jax.Array:
    """Computes the gated delta rule: the state decays, and each key's value is replaced at the sigmoid of a rate
    [T, B, H]; the decay is as in retention, and keys are normalised."""

    def step(state: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, a, b = own
        state = jax.nn.sigmoid(a + 4)[..., None, None] * state
        change = jax.nn.sigmoid(b)[..., None] * (v - jnp.einsum("bhn,bhnp->bhp", k, state))
        state = state + k[..., :, None] * change[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    unit = key * jax.lax.rsqrt(jnp.sum(key * key, -1, keepdims=True) + 1e-6)
    return _scanned(step, query, unit, value, decay, rate)


def _scanned(step: ArrayFunction, *given: jax.Array) -> jax.Array:
    key, value = given[1:3]
    found: jax.Array = jax.lax.scan(step, jnp.zeros((*key.shape[1:], value.shape[-1]), key.dtype), given)[1]
    return found


ORIGINALS: dict[str, Callable[..., jax.Array]] = {"scalar": retention, "channel": gated, "delta": delta}
"""By kind of decay; and the delta rule, with one decay for each head."""


def in_direction(case: Case, function: Callable[..., jax.Array]) -> ArrayFunction:
    """Returns the function itself, or with the gradients for all arguments from a cotangent, its last argument."""
    return with_gradients(case, function)


def types(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of query, key, value and decay, and of a delta rule's rate; and last of the cotangent if there
    is a backward pass."""
    steps, batch, heads, rows, columns = (case.size(letter) for letter in "TBHNP")
    lead = (steps, batch, heads)
    decay = (*lead, rows) if case.mask == "channel" else lead
    shapes = [(*lead, rows), (*lead, rows), (*lead, columns), decay]
    if case.mask == "delta":
        shapes.append(lead)
    if case.direction == "forward+backward":
        shapes.append((*lead, columns))
    return tuple(jax.ShapeDtypeStruct(shape, case.dtype) for shape in shapes)


def case_of(given: Sequence[Shaped], variant: str, direction: Direction) -> Case:
    """Returns the case of query, key, value and decay, and of a delta rule's rate.

    Raises:
      ValueError: they are of no case.
    """
    shapes = [tuple(getattr(t, "shape", ())) for t in given]
    if len(shapes) < 4 or [len(shape) for shape in shapes[:3]] != [4, 4, 4]:
        raise ValueError("a recurrence takes query and key [T, B, H, N], value [T, B, H, P], and decays")
    (steps, batch, heads, rows), columns = shapes[0], shapes[2][3]
    sizes = (("T", steps), ("B", batch), ("H", heads), ("N", rows), ("P", columns))
    case = Case(OPERATION.name, direction, given[0].dtype.name, variant, sizes)
    wanted = types(case) if direction == "forward" else types(case)[:-1]
    if [(t.shape, t.dtype) for t in given] != [(t.shape, t.dtype) for t in wanted]:
        raise ValueError("the arguments of a recurrence must agree in their sizes and dtypes")
    return case


def direct(case: Case) -> ArrayFunction | None:
    """Returns None: no function computes a recurrence directly."""
    return None


def table_grid(platform: str = "cpu") -> tuple[Case, ...]:
    """Returns a case for each row of the tuned table; none for GPUs."""
    variants, sizes = {"cpu": (tuple(ORIGINALS), (32, 64)), "tpu": (tuple(ORIGINALS), (64,))}.get(platform, ((), ()))
    return tuple(
        Case(OPERATION.name, direction, dtype, variant, (("T", steps), ("B", 1), ("H", 8), ("N", n), ("P", n)))
        for dtype in (("float32", "bfloat16") if platform == "cpu" else ("float32",))
        for direction in DIRECTIONS
        for variant in variants
        for steps in (512, 2048)
        for n in sizes
    )
