"""Convolutions of volumes, as convolutions of their planes.

XLA's CPU compiler hands convolutions over three axes of space to a library that is slow at them, and those of them with
zeros between the elements of an operand, as gradients of strided ones and transposed ones have, to none: it sums these
up one element after the other.  Over two axes it has a faster library, which knows such zeros.  So what a window reads
along the first axis of space stands side by side in the channels, and planes become examples.  Of elements that lie
apart along that axis, each phase of the result reads a part of the window alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

_AXES = 3
_DEEPEST = 8
"""Positions of a window along the first axis of space up to which they are put side by side."""
_FEW, _MANY = 4, 64 * 64
"""Channels up to which there are few, and channels times results above which there are many."""


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    """Returns the parameters of a convolution of volumes with a layer's window, without groups, in float32."""
    params, (x, w), (y,) = equation.params, equation.invars, equation.outvars
    if not is_plain(equation):
        return None
    axes, strides = params["dimension_numbers"], params["window_strides"]
    if len(strides) != _AXES:
        return None
    window = [w.aval.shape[axis] for axis in axes.rhs_spec[2:]]
    spread = params["lhs_dilation"]
    if window[0] > _DEEPEST or (window[0] == 1 and max(spread) == 1):
        return None
    if math.prod(window) >= math.prod(y.aval.shape[axis] for axis in axes.out_spec[2:]):
        return None  # the gradient of a weight, mostly, whose products are faster
    for axis, sides, step, apart in zip(axes.lhs_spec[2:], params["padding"], strides, spread, strict=True):
        if step > 1 and apart > 1:
            return None
        cut = sum(min(side, 0) for side in sides)
        if cut and (apart > 1 or x.aval.shape[axis] + cut < 1):
            return None
    return parameters(params)


def _original(spec: RespellingSpec, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    strides, left, right = (spec.numbers(name) for name in ("strides", "lhs_dilation", "rhs_dilation"))
    return [lax.conv_general_dilated(x, w, strides, padding_of(spec), left, right, dimension_numbers(spec))]


def _respelt(spec: RespellingSpec, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    x, w = in_library_order(spec, x, w)
    # What negative padding leaves out is cut off first, as the library may read beside the array.
    padding, end = padding_of(spec), list(x.shape)
    for axis, (_, after) in enumerate(padding):
        end[axis + 1] += min(after, 0)
    x = lax.slice(x, [0, *(max(-before, 0) for before, _ in padding), 0], end)
    (before, after), *around = ((max(low, 0), max(high, 0)) for low, high in padding)
    apart = spec.numbers("lhs_dilation")[0]
    length = (x.shape[1] - 1) * apart + 1 + before + after - (w.shape[0] - 1) * spec.numbers("rhs_dilation")[0]
    length = (length - 1) // spec.numbers("strides")[0] + 1
    count = -(-length // apart)
    phases = [_phase(spec, x, w, tuple(around), before - phase, count) for phase in range(apart)]
    given = next(found for found in phases if found is not None)
    planes = [jnp.zeros_like(given) if found is None else found for found in phases]
    found = planes[0] if apart == 1 else jnp.stack(planes, 2).reshape(x.shape[0], count * apart, *given.shape[2:])
    found = lax.slice_in_dim(found, 0, length, axis=1)
    return [as_written(spec, found)]


def _phase(
    spec: RespellingSpec, x: jax.Array, w: jax.Array, around: tuple[tuple[int, int], ...], before: int, count: int
) -> jax.Array | None:
    """Returns every so many planes of the result, or None where they are zero, since they read only inserted zeros.

    Args:
      spec: the convolution.
      x: [examples, *space, channels].
      w: [*window, channels, results].
      around: what is padded along the axes of planes.
      before: zeros before what the first of these planes reads.
      count: the number of these planes.
    """
    step, apart, reach = (spec.numbers(name)[0] for name in ("strides", "lhs_dilation", "rhs_dilation"))
    reads = _reads(w.shape[0], reach, apart, before)
    if not reads:
        return None
    first, last = min(read.plane for read in reads), max(read.plane for read in reads) + (count - 1) * step
    low, high = max(0, -first), max(0, last + 1 - x.shape[1])
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (low, high, 0), *[(0, 0, 0)] * 3])
    parts = [
        lax.slice_in_dim(x, low + read.plane, low + read.plane + (count - 1) * step + 1, step, axis=1) for read in reads
    ]
    planes = lax.concatenate(parts, x.ndim - 1)
    planes = planes.reshape(-1, *planes.shape[2:])
    window = lax.concatenate([w[read.tap] for read in reads], 2)
    strides, left, right = (spec.numbers(name)[1:] for name in ("strides", "lhs_dilation", "rhs_dilation"))
    found = lax.conv_general_dilated(planes, window, strides, around, left, right, ordered(planes.ndim))
    return found.reshape(x.shape[0], count, *found.shape[1:])


@dataclass(frozen=True, slots=True)
class _Read:
    """A position of the window, and the plane of x that it meets for the first plane of a phase."""

    tap: int
    plane: int


def _reads(taps: int, reach: int, apart: int, before: int) -> list[_Read]:
    """Returns what of the window meets elements, and not the zeros between them."""
    met = ((tap, tap * reach - before) for tap in range(taps))
    return [_Read(tap, place // apart) for tap, place in met if place % apart == 0]


def _assumptions(spec: RespellingSpec) -> tuple[str, ...]:
    # One element after the other, the compiler skips the zeros around and among the operand's elements.
    inserts = max(map(max, padding_of(spec))) > 0
    dilated = max(*spec.numbers("lhs_dilation"), *spec.numbers("rhs_dilation")) > 1
    return ("both operands are finite",) if inserts or dilated else ()


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns how elements are read, how many channels there are, and whether these come first."""
    (shape, _), (window, _) = spec.operands
    strides, left, right = (max(spec.numbers(name)) for name in ("strides", "lhs_dilation", "rhs_dilation"))
    how = "spread" if left > 1 else "dilated" if right > 1 else "strided" if strides > 1 else "plain"
    results, channels = (window[axis] for axis in spec.numbers("rhs")[:2])
    few = min(results, channels) <= _FEW
    size = "few channels" if few else "many channels" if results * channels > _MANY else "channels"
    first = spec.numbers("lhs")[1] < len(shape) - 1
    return f"{how}, {size} {'first' if first else 'last'}"


_SAMPLES: tuple[tuple[str, int, int, int, tuple[tuple[int, int, int, int], ...]], ...] = (
    ("3x3x3", 3, 1, 1, ((1, 8, 32, 32), (1, 16, 32, 64), (1, 32, 16, 16), (2, 48, 16, 32))),
    ("3x3x3-few", 3, 1, 1, ((1, 16, 1, 8), (1, 24, 3, 16), (1, 48, 4, 16), (1, 64, 3, 32))),
    ("3x3x3-many", 3, 1, 1, ((1, 4, 128, 128), (2, 8, 256, 128), (2, 16, 128, 128))),
    ("3x3x3-stride", 3, 2, 1, ((1, 8, 32, 32), (1, 16, 32, 64), (1, 32, 32, 32))),
    ("3x3x3-stride-few", 3, 2, 1, ((1, 16, 1, 16), (1, 32, 3, 16), (2, 64, 3, 16))),
    ("3x3x3-stride-many", 3, 2, 1, ((1, 8, 128, 128), (2, 16, 128, 256))),
    ("2x2x2-patches", 2, 2, 1, ((1, 8, 32, 64), (1, 16, 32, 64), (2, 32, 16, 32))),
    ("3x3x3-dilated", 3, 1, 2, ((1, 8, 32, 32), (1, 16, 32, 32), (1, 32, 16, 16))),
    ("5x5x5", 5, 1, 1, ((1, 8, 16, 16), (1, 16, 16, 16))),
)
"""Name, window, stride, dilation, and (examples, length, channels before, channels after) for each size."""
_CHANNELS_FIRST = ("3x3x3", "3x3x3-few", "3x3x3-stride", "3x3x3-many")
"""The samples that are measured with channels first too."""


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields convolutions and the gradients of their volumes."""
    for name, kernel, stride, dilation, sizes in _SAMPLES:
        for order in ("last", "first") if name in _CHANNELS_FIRST else ("last",):
            for examples, length, before, after in sizes:
                convolve, x, w, y = layer(
                    order,
                    (length,) * _AXES,
                    (kernel,) * _AXES,
                    (before, after),
                    examples=examples,
                    stride=stride,
                    dilation=dilation,
                )
                size = f"{name}-{order}-{math.prod(x.shape)}"
                yield size, Sample(convolve, (x, w))
                if dilation == 1:
                    yield f"{size}-dx", Sample(gradient_of(convolve, x, 0), (w, y))


KIND = Kind(
    name="convolution_of_volumes",
    primitives=("conv_general_dilated",),
    numerics="reordered",
    assumptions=_assumptions,
    instead="convolutions of planes, with what the window reads along the first axis side by side in the channels",
    match=of_equation(_parameters),
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=2.5,  # of 27 rows that gain with AVX-512, four gain nothing with AVX2, three of them 1.2 to 1.4
)
