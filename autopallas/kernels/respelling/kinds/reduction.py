"""Sums over a short last axis and others, between which an axis stays: in two stages.

Statistics of groups of channels are such sums: of ``[batch, height, width, group, channel]`` all axes but batch and
group are added up.  CPUs do that one by one, for what a vector holds belongs to several results.  Sums over the leading
axes run on vectors, and leave little for the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import JaxprEqn
from autopallas.kernels.respelling.kind import Kind, Sample, of_equation
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_DTYPES = (jnp.dtype("float32"), jnp.dtype("float64"))
_LONGEST = 64
"""Elements of the last axes up to which they are short: longer ones fill vectors by themselves."""


def _split(axes: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Returns where the axes that stay before the last reduced ones begin and end."""
    end = rank
    while end - 1 in axes:
        end -= 1
    begin = end
    while begin > 0 and begin - 1 not in axes:
        begin -= 1
    return begin, end


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    (operand,) = equation.invars
    shape, axes = operand.aval.shape, tuple(sorted(equation.params["axes"]))
    if operand.aval.dtype not in _DTYPES or 0 in shape:
        return None
    begin, end = _split(axes, len(shape))
    short = 1 < math.prod(shape[end:]) <= _LONGEST
    leading = math.prod(shape[axis] for axis in axes if axis < begin)
    return {"axes": axes} if short and leading > 1 and math.prod(shape[begin:end]) > 1 else None


def _original(spec: RespellingSpec, x: jax.Array) -> list[jax.Array]:
    return [jnp.sum(x, cast("tuple[int, ...]", spec["axes"]))]


def _respelt(spec: RespellingSpec, x: jax.Array) -> list[jax.Array]:
    axes = cast("tuple[int, ...]", spec["axes"])
    begin, end = _split(axes, x.ndim)
    leading = tuple(axis for axis in axes if axis < begin)
    # XLA makes one sum of two, if it may.
    sums = lax.optimization_barrier(x.reshape(*x.shape[:begin], -1).sum(leading))
    ((shape, _),) = spec.results
    return [sums.reshape(*sums.shape[:-1], math.prod(x.shape[begin:end]), -1).sum(-1).reshape(shape)]


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns how long the last axes are, and what is left of the vectors of the first stage."""
    ((shape, _),) = spec.operands
    begin, end = _split(cast("tuple[int, ...]", spec["axes"]), len(shape))
    last = math.prod(shape[end:])
    length = next(limit for limit in (4, 16, _LONGEST) if last <= limit)
    return f"up to {length} last, {'few' if last * math.prod(shape[begin:end]) < 64 else 'many'} together"


def _samples() -> Iterator[tuple[str, Sample]]:
    sizes = ((1, 16, 16), (2, 56, 56), (16, 56, 56))
    for (batch, height, width), (groups, channels) in (
        (size, form) for size in sizes for form in ((32, 2), (32, 10), (8, 16), (8, 32), (8, 4))
    ):

        def function(x: jax.Array) -> jax.Array:
            return jnp.sum(x, (1, 2, 4))

        shape = (batch, height, width, groups, channels)
        yield f"{'x'.join(map(str, shape))}", Sample(function, (jax.ShapeDtypeStruct(shape, jnp.float32),))


KIND = Kind(
    name="reduction",
    primitives=("reduce_sum",),
    numerics="reordered",
    instead="a sum over the leading axes, and then one over the last",
    match=of_equation(_parameters),
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=4.0,  # with AVX2 one gains 3.7 times as much as with AVX-512, where it gains nothing
)
