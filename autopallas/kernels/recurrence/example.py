"""Makes inputs to measure recurrences on: such with which a state neither grows nor dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Shaped
from autopallas.kernels.example import harmless, is_drawn, normal
from autopallas.kernels.recurrence.site import RecurrenceSite

__all__ = ["operands", "program"]

Array: TypeAlias = np.ndarray


def operands(site: RecurrenceSite, types: Sequence[Shaped], key: int = 0) -> list[Array]:
    """Returns an array for each operand of a site.

    Floats are normally distributed, but those that a decay is computed from are also tried as numbers just below one:
    they may be the decay. Keys of a delta rule are short: a state grows where they are longer than the root of 2.
    """
    random = np.random.default_rng(key)
    filled = harmless(random, types)
    scale = 0.7 * site.spec.rows**-0.5 if site.spec.delta else 0.3
    for i, array in enumerate(filled):
        if is_drawn(array.dtype):
            filled[i] = normal(random, array.shape, array.dtype, scale)
    return filled


def program() -> tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns retention with a decay for each head, and the types of queries, keys, values and decays."""

    def retention(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
        def step(state: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, k, v = own
            state = decay[:, None, None] * state + k[:, :, None] * v[:, None, :]
            return state, jnp.einsum("hn,hnp->hp", q, state)

        heads, rows, columns = *q.shape[1:], v.shape[-1]
        return jax.lax.scan(step, jnp.zeros((heads, rows, columns), q.dtype), (q, k, v))[1]

    types = [jax.ShapeDtypeStruct((512, 4, 64), jnp.float32)] * 3
    return retention, (*types, jax.ShapeDtypeStruct((4,), jnp.float32))
