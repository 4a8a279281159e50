"""Transposed convolutions, and gradients of the images of strided ones, as a convolution of each phase of the result.

JAX writes both as convolutions of an image with zeros between its elements, and XLA's CPU compiler multiplies these
zeros.  The results that lie as far apart as the elements, a phase, read the same part of the window, and neighbouring
phases mostly the same elements: these are one convolution, of the image as it is, with as many results for each element
as there are such phases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import JaxprEqn
from autopallas.kernels.respelling.convolution_spec import (
    as_written,
    dimension_numbers,
    in_library_order,
    is_plain,
    padding_of,
    parameters,
)
from autopallas.kernels.respelling.gradients import gradient_of, layer
from autopallas.kernels.respelling.kind import Kind, Sample, of_equation
from autopallas.kernels.respelling.library_order import ordered
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_MOST_AXES = 2
"""Axes of space: those of volumes are another kind of respelling."""
_FEW, _MANY = 4, 64 * 64
"""Results up to which, and channels times results above which nothing is gained."""
_THIN = 32 * 32
"""Channels times results below which a convolution along one axis has evidence of its own: from 32 channels to 16 it
took 1.2 times as long."""


@dataclass(frozen=True, slots=True)
class _Phases:
    """Neighbouring phases of the result along an axis, which read the same elements.

    Attributes:
      first: the positions of the window that each of them reads first, one for each phase; the next ones follow at the
        distance of the elements.
      taps: how many positions each of them reads; 0 where they read only zeros.
      offset: the element that the first of them meets, for the phase's first result.
    """

    first: tuple[int, ...]
    taps: int
    offset: int


def _phases(window: int, apart: int, before: int) -> tuple[_Phases, ...]:
    """Returns the phases of an axis in order.

    Args:
      window: its length.
      apart: the distance of the elements.
      before: zeros before the first element.
    """
    first = [(before - phase) % apart for phase in range(apart)]
    reads = [
        (-(-(window - own) // apart) if own < window else 0, (phase + own - before) // apart)
        for phase, own in enumerate(first)
    ]
    grouped = itertools.groupby(range(apart), key=lambda phase: reads[phase] if reads[phase][0] else (0, 0))
    return tuple(_Phases(tuple(first[phase] for phase in own), *read) for read, own in grouped)


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    """Returns the parameters of a convolution in float32 with zeros between the elements of its image."""
    params, (_, w), (y,) = equation.params, equation.invars, equation.outvars
    if not is_plain(equation):
        return None
    axes, spread = params["dimension_numbers"], params["lhs_dilation"]
    if not 1 <= len(spread) <= _MOST_AXES or max(spread) == 1:
        return None
    if max(*params["window_strides"], *params["rhs_dilation"]) > 1:
        return None
    window = [w.aval.shape[axis] for axis in axes.rhs_spec[2:]]
    results, channels = (w.aval.shape[axis] for axis in axes.rhs_spec[:2])
    if results <= _FEW or results * channels > _MANY:
        return None
    if all(size <= step for size, step in zip(window, spread, strict=True)):
        return None  # each result is one product, of which nothing is gained
    if math.prod(window) >= math.prod(y.aval.shape[axis] for axis in axes.out_spec[2:]):
        return None  # the gradient of a weight, mostly, whose products are faster
    return parameters(params)


def _original(spec: RespellingSpec, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    ones = (1,) * len(spec.numbers("strides"))
    spread = spec.numbers("lhs_dilation")
    return [lax.conv_general_dilated(x, w, ones, padding_of(spec), spread, ones, dimension_numbers(spec))]


def _respelt(spec: RespellingSpec, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    x, w = in_library_order(spec, x, w)
    apart, padding = spec.numbers("lhs_dilation"), padding_of(spec)
    sizes = list(zip(x.shape[1:-1], w.shape, apart, padding, strict=False))
    lengths = [(count - 1) * step + 1 + sum(sides) - taps + 1 for count, taps, step, sides in sizes]
    counts = [-(-length // step) for length, step in zip(lengths, apart, strict=True)]
    phases = [_phases(taps, step, before) for _, taps, step, (before, _) in sizes]
    found = _assembled(x, w, apart, counts, phases, ())
    found = found.reshape(x.shape[0], *(count * step for count, step in zip(counts, apart, strict=True)), w.shape[-1])
    found = lax.slice(found, (0,) * x.ndim, (x.shape[0], *lengths, w.shape[-1]))
    return [as_written(spec, found)]


def _assembled(
    x: jax.Array,
    w: jax.Array,
    apart: Sequence[int],
    counts: Sequence[int],
    phases: Sequence[tuple[_Phases, ...]],
    chosen: tuple[_Phases, ...],
) -> jax.Array:
    """Returns the results of all phases along the axes for which none are chosen yet, those of an axis behind it:
    [examples, count, phases, count, phases, ..., results]."""
    axis = len(chosen)
    if axis == len(phases):
        return _convolved(x, w, apart, counts, chosen)
    parts = [_assembled(x, w, apart, counts, phases, (*chosen, own)) for own in phases[axis]]
    return lax.concatenate(parts, 2 + 2 * axis)


def _convolved(
    x: jax.Array, w: jax.Array, apart: Sequence[int], counts: Sequence[int], chosen: Sequence[_Phases]
) -> jax.Array:
    """Returns the same for the chosen phases, in one convolution."""
    rank, results = len(chosen), w.shape[-1]
    each = [len(own.first) for own in chosen]
    shape = [x.shape[0], *itertools.chain.from_iterable(zip(counts, each, strict=True)), results]
    if not all(own.taps for own in chosen):
        return jnp.zeros(shape, x.dtype)
    for axis, (own, step) in enumerate(zip(chosen, apart, strict=True)):
        # [*taps, *window, channels, *phases, results], one axis after the other
        at = [lax.slice_in_dim(w, first, first + (own.taps - 1) * step + 1, step, axis=axis) for first in own.first]
        w = jnp.stack(at, -2)
    w = w.reshape(*w.shape[: rank + 1], -1)
    sides = [
        (-own.offset, own.offset + own.taps - 1 + count - size)
        for own, count, size in zip(chosen, counts, x.shape[1:-1], strict=True)
    ]
    # What a phase does not reach is cut off first: the library may read beside the array.
    starts = [max(0, -before) for before, _ in sides]
    ends = [size + min(0, after) for size, (_, after) in zip(x.shape[1:-1], sides, strict=True)]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return jnp.zeros(shape, x.dtype)
    x = lax.slice(x, (0, *starts, 0), (x.shape[0], *ends, x.shape[-1]))
    around = [(max(0, before), max(0, after)) for before, after in sides]
    found = lax.conv_general_dilated(x, w, (1,) * rank, around, dimension_numbers=ordered(x.ndim))
    found = found.reshape(x.shape[0], *counts, *each, results)
    order = itertools.chain.from_iterable((1 + axis, 1 + rank + axis) for axis in range(rank))
    return lax.transpose(found, (0, *order, found.ndim - 1))


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns how many axes there are, how far apart elements are, how many of them a window reaches, and along one
    axis whether channels are so few that a phase's products take less time than what puts the phases together."""
    (_, (window, _)), spread = spec.operands, spec.numbers("lhs_dilation")
    taps = [window[axis] for axis in spec.numbers("rhs")[2:]]
    reach = max(-(-size // step) for size, step in zip(taps, spread, strict=True))
    whole = all(size % step == 0 for size, step in zip(taps, spread, strict=True))
    far = "2" if max(spread) == 2 else "4" if max(spread) <= 4 else "8"
    axes = "one axis" if len(taps) == 1 else "two axes"
    thin = len(taps) == 1 and far == "2" and math.prod(window[axis] for axis in spec.numbers("rhs")[:2]) < _THIN
    return f"{axes}, apart {far}, reach {min(reach, 4)}{'' if whole else ' or less'}{', few channels' if thin else ''}"


_SAMPLES: tuple[tuple[int, int, int, tuple[tuple[int, int, int, int], ...]], ...] = (
    (2, 3, 2, ((4, 28, 64, 64), (8, 32, 32, 64), (16, 28, 64, 64), (16, 56, 64, 64))),
    (2, 4, 2, ((8, 16, 64, 32), (8, 32, 64, 32), (16, 32, 64, 32), (16, 64, 32, 32))),
    (2, 5, 2, ((32, 14, 64, 32), (64, 14, 64, 64))),
    (2, 8, 4, ((2, 32, 32, 32), (2, 64, 32, 32))),
    (1, 4, 2, ((8, 1024, 64, 32), (8, 4096, 32, 32))),
    (1, 8, 4, ((4, 4096, 64, 32), (4, 16384, 32, 16))),
    (1, 16, 8, ((8, 256, 64, 32), (8, 1024, 64, 32), (8, 4096, 64, 32))),
)
"""Axes of space, window, distance, and (examples, length, channels before, channels after) for each size."""


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields transposed convolutions, and the gradients of the images of strided ones."""
    for axes, window, step, sizes in _SAMPLES:
        for examples, length, before, after in sizes:
            convolve, x, w, _ = layer(
                "last",
                (length,) * axes,
                (window,) * axes,
                (before, after),
                examples=examples,
                stride=step,
                transposed=True,
            )
            name = f"{'x'.join([str(window)] * axes)}-{step}-{before}-{after}-{math.prod(x.shape)}"
            yield name, Sample(convolve, (x, w))
            if window == 3:
                convolve, x, w, y = layer(
                    "last",
                    (length * step,) * axes,
                    (window,) * axes,
                    (after, before),
                    examples=examples,
                    stride=step,
                )
                yield f"{name}-dx", Sample(gradient_of(convolve, x, 0), (w, y))


KIND = Kind(
    name="transposed_convolution",
    primitives=("conv_general_dilated",),
    numerics="reordered",
    assumptions=("both operands are finite",),
    instead="a convolution for each phase of the result, which reads no inserted zeros",
    match=of_equation(_parameters),
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=1.5,  # one of 1.2 with AVX-512 takes 1.3 times as long with AVX2
)
