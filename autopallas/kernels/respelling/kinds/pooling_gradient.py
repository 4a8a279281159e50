"""Gradients of maxima and minima over windows, as comparisons of slices.

XLA's CPU compiler goes through the windows one by one.  The element that each window picks, the first of equal ones,
is found by one comparison of slices for each tap, as the original compares them: so ties and NaNs give the same.  Each
element of the result then asks the few windows that it lies in whether they have picked it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import JaxprEqn
from autopallas.kernels.respelling.convolution_spec import padding_of
from autopallas.kernels.respelling.kind import Kind, Sample, of_equation
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_MOST_TAPS = 64
_KEEPS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"ge": lax.ge, "le": lax.le}
_NO_TAP, _NO_WINDOW = -1, -2
"""Two numbers that are no tap's, and differ: what a missing window has picked, and what reaches no window."""


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    params, (source, operand) = equation.params, equation.invars
    select, window = params["select_prim"].name, tuple(params["window_dimensions"])
    padding = tuple((int(low), int(high)) for low, high in params["padding"])
    dtype = operand.aval.dtype
    known = dtype == source.aval.dtype and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
    if select not in _KEEPS or not known or 0 in operand.aval.shape or 0 in source.aval.shape:
        return None
    if min(map(min, padding)) < 0 or not 1 < math.prod(window) <= _MOST_TAPS:
        return None
    return {"select": select, "window": window, "strides": tuple(params["window_strides"]), "padding": padding}


def _original(spec: RespellingSpec, source: jax.Array, operand: jax.Array) -> list[jax.Array]:
    window, strides, padding = spec.numbers("window"), spec.numbers("strides"), padding_of(spec)
    largest = spec["select"] == "ge"
    start = np.asarray(-np.inf if largest else np.inf, operand.dtype)

    def pool(x: jax.Array) -> jax.Array:
        found: jax.Array = lax.reduce_window(x, start, lax.max if largest else lax.min, window, strides, padding)
        return found

    return list(jax.vjp(pool, operand)[1](source))


def _respelt(spec: RespellingSpec, source: jax.Array, operand: jax.Array) -> list[jax.Array]:
    # What follows reads it once for each tap.  Where a compiler keeps the barrier, it is not computed again there.
    picked = lax.optimization_barrier(_picked(spec, operand, source.shape))
    return [_spread(spec, picked, source, operand.shape)]


def _picked(spec: RespellingSpec, x: jax.Array, count: Sequence[int]) -> jax.Array:
    """Returns for each window the number of the tap that it picks.  Infinite padding may be picked, as in JAX."""
    window, strides = spec.numbers("window"), spec.numbers("strides")
    around = [(low, high, 0) for low, high in padding_of(spec)]
    if any(map(any, around)):
        x = lax.pad(x, jnp.asarray(-np.inf if spec["select"] == "ge" else np.inf, x.dtype), around)
    keeps = _KEEPS[cast(str, spec["select"])]
    best: jax.Array | None = None
    picked = jnp.full(count, 0, jnp.int32)
    for tap, place in enumerate(itertools.product(*map(range, window))):
        end = [i + (n - 1) * step + 1 for i, n, step in zip(place, count, strides, strict=True)]
        value = lax.slice(x, place, end, strides)
        if best is None:
            best = value
            continue
        keep = keeps(best, value)
        best, picked = jnp.where(keep, best, value), jnp.where(keep, picked, np.int32(tap))
    return picked


def _spread(spec: RespellingSpec, picked: jax.Array, source: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns the sum, for each element, of what the windows have that picked it.

    With ``i = strides * block + phase``, the windows that element i lies in are a few before ``block``, and which of
    their taps it is depends on the phase alone: so blocks and phases are axes, and each earlier window is a shift.
    """
    window, strides, padding = spec.numbers("window"), spec.numbers("strides"), padding_of(spec)
    count = source.shape
    padded = [size + sum(edges) for size, edges in zip(shape, padding, strict=True)]
    blocks = [max(-(-size // step), n) for size, step, n in zip(padded, strides, count, strict=True)]
    back = [-(-size // step) for size, step in zip(window, strides, strict=True)]
    around = [(n - 1, size - given, 0) for n, size, given in zip(back, blocks, count, strict=True)]
    wide = jnp.promote_types(source.dtype, jnp.float32)
    if any(map(any, around)):
        picked = lax.pad(picked, jnp.int32(_NO_TAP), around)
        source = lax.pad(source, jnp.zeros((), source.dtype), around)

    total: jax.Array | None = None
    for shift in itertools.product(*map(range, back)):
        begin = [n - 1 - i for n, i in zip(back, shift, strict=True)]
        end = [i + size for i, size in zip(begin, blocks, strict=True)]
        phased = [n for size in blocks for n in (size, 1)]
        own, value = (lax.slice(array, begin, end).reshape(phased) for array in (picked, source))
        found = jnp.where(own == _taps(window, strides, shift), value.astype(wide), jnp.zeros((), wide))
        total = found if total is None else total + found
    assert total is not None
    total = total.reshape([size * step for size, step in zip(blocks, strides, strict=True)])
    begin = [low for low, _ in padding]
    missing = [max(0, low + size - given) for low, size, given in zip(begin, shape, total.shape, strict=True)]
    if any(missing):
        total = lax.pad(total, jnp.zeros((), wide), [(0, n, 0) for n in missing])
    end = [low + size for low, size in zip(begin, shape, strict=True)]
    return lax.slice(total, begin, end).astype(source.dtype)


def _taps(window: Sequence[int], strides: Sequence[int], shift: Sequence[int]) -> np.ndarray:
    """Returns which tap an element is of the window so many blocks before, by its phases: [1, phase] for each axis."""
    taps, beyond = np.zeros((), np.int32), np.zeros((), bool)
    for size, step, back in zip(window, strides, shift, strict=True):
        own = np.arange(step, dtype=np.int32) + back * step
        taps, beyond = taps[..., None, None] * size + own, beyond[..., None, None] | (own >= size)
    return np.where(beyond, np.int32(_NO_WINDOW), taps)


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns the number of taps, whether windows overlap and are padded, and whether the last axis is pooled."""
    window, strides = spec.numbers("window"), spec.numbers("strides")
    taps = next(limit for limit in (4, 9, 25, _MOST_TAPS) if math.prod(window) <= limit)
    overlap = "overlapping" if any(size > step for size, step in zip(window, strides, strict=True)) else "apart"
    strided = "" if overlap == "apart" else ", strided" if max(strides) > 1 else ", all"
    last = "along the last axis" if window[-1] > 1 else "beside the last axis"
    return f"{taps} taps, {overlap}{strided}, {last}"


def _samples() -> Iterator[tuple[str, Sample]]:
    shapes = ((1, 16, 16, 128), (4, 32, 32, 128), (8, 112, 112, 64))
    for shape, (size, stride), last in itertools.product(shapes, ((2, 2), (3, 1), (3, 2)), (False, True)):
        given = (shape[0], shape[3], *shape[1:3]) if last else shape
        where = (2, 3) if last else (1, 2)
        window, strides = ([n if axis in where else 1 for axis in range(4)] for n in (size, stride))
        x = jax.ShapeDtypeStruct(given, jnp.float32)

        def pool(x: jax.Array, window: Sequence[int] = window, strides: Sequence[int] = strides) -> jax.Array:
            found: jax.Array = lax.reduce_window(x, -float("inf"), lax.max, window, strides, "SAME")
            return found

        def gradient(cotangent: jax.Array, x: jax.Array, pool: Callable[[jax.Array], jax.Array] = pool) -> jax.Array:
            found: jax.Array = jax.vjp(pool, x)[1](cotangent)[0]
            return found

        y = jax.eval_shape(pool, x)
        name = f"{size}-{stride}-{'last' if last else 'beside'}-{math.prod(shape)}"
        yield name, Sample(gradient, (y, x))


KIND = Kind(
    name="pooling_gradient",
    primitives=("select_and_scatter_add",),
    numerics="reordered",
    instead="comparisons of slices, which find what each window picks",
    match=of_equation(_parameters),
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=2.5,  # two of 20 rows gain 1.7 to 2.4 with AVX2 and one line of JAX, and nothing with AVX-512
)
