"""Reads captured arrays of all pairs of steps: decays, masks, and differences of positions."""

from __future__ import annotations

import hashlib
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.numerics.casts import is_floating
from autopallas.patterns.linear_attention.masks import MaskReader, Seen

__all__ = ["CapturedDecay", "captured_decay", "captured_difference", "captured_steps"]

_LARGEST = 2**23
"""Most elements of an array that are looked at."""


class CapturedDecay(NamedTuple):
    """A mask whose elements are powers of one decay, or of one for each index of further axes.

    Attributes:
      seen: which pairs of steps it holds.
      ref: the use of the array that reads one of the powers.
      rate: one over the number of steps after which that one is left.
      rounding: the relative error with which the array holds them; 0 of ones.
    """

    seen: Seen
    ref: Ref
    rate: float
    rounding: float


class _Powers(NamedTuple):
    """What :class:`CapturedDecay` says of an array; ``after`` is the number of steps after which a power is left."""

    seen: Seen
    after: int
    rounding: float


class _Remembered:
    """What was found out about arrays that programs hold, as long as these are held, and their elements the same."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[object], bytes, dict[tuple[int, int], _Powers | float | None]]] = {}

    def of(self, array: object, axes: tuple[int, int]) -> _Powers | float | None:
        """Returns the decays, or the sign of the differences, that an array is along the axes of t and s."""
        number = id(array)
        # An array of NumPy may be changed between two traces.
        own = b"" if isinstance(array, jax.Array) else hashlib.blake2b(np.asarray(array).tobytes()).digest()
        if number not in self._known or self._known[number][1] != own:
            self._known[number] = weakref.ref(array, lambda _: self._known.pop(number, None)), own, {}
        known = self._known[number][2]
        if axes not in known:
            held = np.asarray(array)
            moved = np.moveaxis(held.astype(np.float64), axes, (-2, -1))
            difference = _difference(moved)
            known[axes] = _powers(moved, held.dtype) if difference is None else difference
        return known[axes]


_remembered = _Remembered()


def captured_steps(masks: MaskReader, ref: Ref) -> tuple[Atom, ...] | None:
    """Returns the labels of the steps t of a captured array of all pairs of steps: those with which it is a mask or the
    differences of positions, or else the first that are as many as the keys."""
    space, keys = masks.space, masks.space.resolve(masks.keys)
    axes = [own for _, own in space.view(ref.view) if own]
    if masks.constant(ref) is None or keys not in axes:
        return None
    like = [own for own in axes if own != keys and space.extent(own) == space.extent(keys)]
    return next((own for own in like if _read(masks, ref, own) is not None), next(iter(like), None))


def captured_difference(masks: MaskReader, ref: Ref, steps: tuple[Atom, ...]) -> float | None:
    """Returns 1 of a captured array of the differences t - s, and -1 of one of s - t; None of any other."""
    found = _read(masks, ref, steps)
    return found if isinstance(found, float) else None


def captured_decay(masks: MaskReader, ref: Ref, steps: tuple[Atom, ...]) -> CapturedDecay | None:
    """Returns the decays that a captured array holds up to the rounding of its dtype; None of any other array."""
    found = _read(masks, ref, steps)
    if not isinstance(found, _Powers):
        return None
    after, reverse = found.after, found.seen.reverse
    at = {steps: 0 if reverse else after, masks.space.resolve(masks.keys): after if reverse else 0}
    view = tuple((at[own], ()) if own in at else (start, own) for start, own in masks.space.view(ref.view))
    return CapturedDecay(found.seen, Ref(ref.value, view), 1 / after, found.rounding)


def _read(masks: MaskReader, ref: Ref, steps: tuple[Atom, ...]) -> _Powers | float | None:
    """Returns what a captured array is along the axes of t and s; None of any other value."""
    space, keys = masks.space, masks.space.resolve(masks.keys)
    constant = masks.constant(ref)
    if constant is None or constant.size > _LARGEST or constant.dtype.kind == "c":
        return None
    axes = [own for _, own in space.view(ref.view)]
    if axes.count(steps) != 1 or axes.count(keys) != 1 or any(start for start, _ in ref.view):
        return None
    if tuple(space.extent(own) for own in axes) != masks.graph.shape(ref.value):
        return None
    return _remembered.of(masks.graph.constants[ref.value], (axes.index(steps), axes.index(keys)))


def _difference(array: np.ndarray) -> float | None:
    """Returns the sign of the differences of positions that an array [..., T, T] holds; None of any other."""
    count = array.shape[-1]
    if array.size != count**2:
        return None
    difference = np.subtract.outer(np.arange(count), np.arange(count))
    signs = (1.0, -1.0)
    return next((sign for sign in signs if np.array_equal(array.reshape(count, count), sign * difference)), None)


def _powers(array: np.ndarray, dtype: np.dtype) -> _Powers | None:
    """Returns the decays that an array [..., T, T] holds; None of any other."""
    count = array.shape[-1]
    if count < 2:
        return None
    reverse = bool(array[..., 0, 1].any())
    lower = np.swapaxes(array, -1, -2) if reverse else array
    strict = not lower[..., 0, 0].any()
    of_distance = lower[..., :, 0].reshape(-1, count)  # after 0, 1, 2, ... steps
    least, rounding = (float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).eps)) if is_floating(dtype) else (1.0, 0.0)
    normal = np.flatnonzero((of_distance[:, 1:] >= least).all(0)) + 1
    if not normal.size or not np.isfinite(of_distance).all():
        return None
    after = int(normal[-1])
    distances = np.arange(count)
    exponents = (np.log(of_distance[:, after]) / after)[:, None] * distances
    expected = np.exp(exponents)
    allowed = 4 * rounding * (1 + np.abs(exponents)) * expected + (least if rounding else 0.0)
    pairs = np.subtract.outer(distances, distances)
    shown = pairs > 0 if strict else pairs >= 0
    places = np.maximum(pairs, 0)
    for own, right, error in zip(lower.reshape(-1, count, count), expected, allowed, strict=True):
        if not (np.abs(own - right[places]) <= error[places])[shown].all() or own[~shown].any():
            return None
    seen = Seen(reverse, (1 if reverse else -1) if strict else 0)
    return _Powers(seen, after, rounding if exponents.any() else 0.0)
