"""Convolutions of layers, and their gradients, as programs have them, to measure respellings on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

__all__ = ["Layer", "gradient_of", "layer"]


class Layer(NamedTuple):
    """A convolution as a layer has it, and the types of its arrays.

    Attributes:
      convolve: of an image (or a volume) and weights.
      image: the type of what is convolved.
      weights: that of the weights.
      result: that of the result, and so of its cotangent.
    """

    convolve: Callable[[jax.Array, jax.Array], jax.Array]
    image: jax.ShapeDtypeStruct
    weights: jax.ShapeDtypeStruct
    result: jax.ShapeDtypeStruct


def layer(
    order: str,
    space: Sequence[int],
    window: Sequence[int],
    channels: tuple[int, int],
    *,
    examples: int,
    stride: int = 1,
    dilation: int = 1,
    transposed: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> Layer:
    """Returns a layer's convolution with padding "SAME", with its axes in the order that libraries give them.

    Args:
      order: "last" or "first", where the channels are.  Weights are [*window, before, after] beside channels last, and
        [after, before, *window] beside channels first.
      space: the lengths of the image, or of the volume.
      window: those of the window, along as many axes.
      channels: how many there are before and after.
      examples: how many images there are.
      stride: along each axis.
      dilation: of the window, along each axis; 1 where it is transposed.
      transposed: whether it is a transposed convolution, whose results are larger than its images.
      dtype: of all arrays.
    """
    before, after = channels
    letters = "DHW"[-len(space) :]
    if order == "last":
        numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
        image, weights = (examples, *space, before), (*window, before, after)
    else:
        numbers = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
        image, weights = (examples, before, *space), (after, before, *window)
    strides, dilations = (stride,) * len(space), (dilation,) * len(space)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        run = lax.conv_transpose if transposed else lax.conv_general_dilated
        return run(x, w, strides, "SAME", rhs_dilation=dilations, dimension_numbers=numbers)

    x, w = jax.ShapeDtypeStruct(image, dtype), jax.ShapeDtypeStruct(weights, dtype)
    return Layer(convolve, x, w, jax.eval_shape(convolve, x, w))


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
