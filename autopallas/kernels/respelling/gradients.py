"""Gradients of convolutions as programs have them, to measure respellings on."""

from __future__ import annotations

from collections.abc import Callable

import jax

__all__ = ["gradient_of"]


def gradient_of(
    convolve: Callable[..., jax.Array], kind: jax.ShapeDtypeStruct, place: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the gradient of a convolution for one of its operands, of (the other one, the cotangent).

    Args:
      convolve: of an image and weights.
      kind: the type of the operand.
      place: 0 for the image, 1 for the weights.
    """

    def gradient(other: jax.Array, cotangent: jax.Array) -> jax.Array:
        linear = (lambda x: convolve(x, other)) if place == 0 else (lambda w: convolve(other, w))
        found: jax.Array = jax.linear_transpose(linear, kind)(cotangent)[0]
        return found

    return gradient
