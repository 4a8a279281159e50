"""Holds in a spec what the equation of a convolution says, and reads it there."""

from __future__ import annotations

from typing import cast

from jax import lax

from autopallas.compat import Params
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["dimension_numbers", "padding_of", "parameters"]


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


def padding_of(spec: RespellingSpec) -> tuple[tuple[int, int], ...]:
    return cast("tuple[tuple[int, int], ...]", spec["padding"])


def dimension_numbers(spec: RespellingSpec) -> lax.ConvDimensionNumbers:
    return lax.ConvDimensionNumbers(spec.numbers("lhs"), spec.numbers("rhs"), spec.numbers("out"))
