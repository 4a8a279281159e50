"""Holds in a spec what the equation of a convolution says, and reads it there."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import JaxprEqn, Params
from autopallas.kernels.respelling.contractions import has_usual_precision
from autopallas.kernels.respelling.library_order import ordered
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["as_written", "dimension_numbers", "in_library_order", "is_plain", "padding_of", "parameters"]


def parameters(params: Params) -> dict[str, Plain]:
    """Returns the axes, strides, padding and dilations of a convolution from the equation's parameters."""
    numbers = params["dimension_numbers"]
    return {
        "lhs": tuple(numbers.lhs_spec),
        "rhs": tuple(numbers.rhs_spec),
        "out": tuple(numbers.out_spec),
        "strides": tuple(params["window_strides"]),
        "padding": tuple(map(tuple, params["padding"])),
        "lhs_dilation": tuple(params["lhs_dilation"]),
        "rhs_dilation": tuple(params["rhs_dilation"]),
    }


def is_plain(equation: JaxprEqn) -> bool:
    """Returns whether a convolution is of float32 arrays that hold something, without groups, a precision that is asked
    for, or a sharding of its result."""
    params = equation.params
    if max(params["feature_group_count"], params["batch_group_count"]) > 1 or params.get("out_sharding") is not None:
        return False
    if any(v.aval.dtype != jnp.float32 or 0 in v.aval.shape for v in (*equation.invars, *equation.outvars)):
        return False
    return has_usual_precision(equation)


def padding_of(spec: RespellingSpec) -> tuple[tuple[int, int], ...]:
    return cast("tuple[tuple[int, int], ...]", spec["padding"])


def dimension_numbers(spec: RespellingSpec) -> lax.ConvDimensionNumbers:
    return lax.ConvDimensionNumbers(spec.numbers("lhs"), spec.numbers("rhs"), spec.numbers("out"))


def in_library_order(spec: RespellingSpec, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns an image as [examples, *space, channels] and weights as [*window, channels, results]."""
    (batch, features, *space), (results, own, *window) = spec.numbers("lhs"), spec.numbers("rhs")
    return lax.transpose(x, (batch, *space, features)), lax.transpose(w, (*window, own, results))


def as_written(spec: RespellingSpec, found: jax.Array) -> jax.Array:
    """Returns a result [examples, *space, results] with the axes in the order in which the program has them."""
    out = dict(zip(spec.numbers("out"), ordered(found.ndim).out_spec, strict=True))
    return lax.transpose(found, [out[axis] for axis in range(found.ndim)])
