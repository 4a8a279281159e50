"""Adds floats one after the other, or steps a recurrence, without losing what each addition rounds away.

Kahan, 1965, doi:10.1145/363707.363723.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Sums", "added_exactly", "stepped_exactly"]

Sums: TypeAlias = tuple[jax.Array, jax.Array]
"""A sum so far, and by how much it is too large."""


def added_exactly(total: jax.Array, lost: jax.Array, given: jax.Array) -> Sums:
    """Adds to a sum.  What is infinite or NaN stays so, as in a plain sum.

    Args:
      total: the sum so far.
      lost: by how much rounding has made it too large.
      given: what is added, in the same dtype.
    """
    term = given - lost
    found = total + term
    return found, jnp.where(jnp.isfinite(found), (found - total) - term, 0)


def stepped_exactly(state: Sums, decay: jax.Array, given: jax.Array) -> Sums:
    """Computes one step of a recurrence, ``decay * state + given``.

    The product of the state and a decay near 1, -1, i or -i would round the same way in many steps.  So what is taken
    off the state is computed, and subtracted from it, and what that subtraction rounds away is carried.

    Args:
      state: the state before, with what rounding has added to it.
      decay, given: the step's, in the same dtype.
    """
    before, lost = state
    near = _sign(decay) if jnp.isrealobj(decay) else _complex_sign(decay)
    found, left = added_exactly(near * before, decay * lost, given - (near - decay) * before)
    return jnp.where(jnp.isfinite(found), found, decay * before + given), left


def _sign(x: jax.Array) -> jax.Array:
    """Returns 1 or -1, or 0 up to a magnitude of 0.5, at which a decay makes roundings vanish by itself."""
    return lax.round(jnp.clip(x, -1, 1), lax.RoundingMethod.TO_NEAREST_EVEN)  # three selections take longer


def _complex_sign(x: jax.Array) -> jax.Array:
    """Returns 1, -1, i or -i, whichever is nearest, or 0 for small numbers."""
    real, imaginary = jnp.real(x), jnp.imag(x)
    along = jnp.abs(real) >= jnp.abs(imaginary)
    return lax.complex(jnp.where(along, _sign(real), 0), jnp.where(along, 0, _sign(imaginary)))
