"""Gradients of the weights of ordinary convolutions, as products of matrices.

JAX writes such a gradient as a convolution too, whose window is the cotangent and whose result is as large as the
kernel.  XLA's CPU compiler is slow at it, at that of a transposed convolution most of all, whose zeros it multiplies.
Each position of the kernel is one product: of the rows of x that the position reads, and of the cotangent's.  Where
x has few channels, or the kernel many positions, the rows of all positions stand beside each other in one product.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import Dtype, JaxprEqn
from autopallas.kernels.respelling import window_products
from autopallas.kernels.respelling.contractions import has_usual_precision
from autopallas.kernels.respelling.convolution_spec import dimension_numbers, padding_of, parameters
from autopallas.kernels.respelling.fusion_barrier import unfused
from autopallas.kernels.respelling.gradients import gradient_of, layer
from autopallas.kernels.respelling.inserted_zeros import assumed_finite
from autopallas.kernels.respelling.kind import Kind, Sample, of_equation
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_MOST_TAPS = 64
"""Positions of the kernel up to which there is a slice for each."""
_FEW = 16
"""Channels up to which the rows of all positions stand in one product."""


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A gradient of weights, with the axes of its arrays in the order in which the program has them.

    Attributes:
      lhs, rhs, out: axes of x as (own channels, examples, *space), of the cotangent alike, and of the result as
        (channels of x, channels of the cotangent, *space).
      spread: the distance of x's elements, between which are zeros, along each axis of space.
      reach: the distance of the elements of x that the cotangent's neighbours meet.
      padding: before and after x, along each axis of space.
      window, taps: sizes of the cotangent and of the result, along each axis of space.
      dtype: that of the result.
      accumulation: that of the sums.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    spread: tuple[int, ...]
    reach: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    window: tuple[int, ...]
    taps: tuple[int, ...]
    dtype: Dtype
    accumulation: Dtype

    @property
    def transposed(self) -> bool:
        """Whether there are zeros between the elements of x, as for a transposed convolution."""
        return max(self.spread) > 1

    @property
    def x_first(self) -> bool:
        """Whether the result has the channels of x before those of the cotangent."""
        return self.out[0] < self.out[1]

    @property
    def apart(self) -> bool:
        """Whether no element of x is read for two positions of the kernel."""
        return not self.transposed and _apart(self.taps, self.reach)

    @property
    def pointwise(self) -> bool:
        """Whether the kernel has one position, which reads all of x and nothing else."""
        return self.apart and math.prod(self.taps) == max(self.reach) == 1 and not any(map(any, self.padding))


def _apart(taps: Sequence[int], reach: Sequence[int]) -> bool:
    return all(size <= step for size, step in zip(taps, reach, strict=True))


def _of(spec: RespellingSpec) -> _Gradient:
    _, (window, dtype) = spec.operands
    ((given, result), *_) = spec.results

    return _Gradient(
        lhs=spec.numbers("lhs"),
        rhs=spec.numbers("rhs"),
        out=spec.numbers("out"),
        spread=spec.numbers("lhs_dilation"),
        reach=spec.numbers("rhs_dilation"),
        padding=padding_of(spec),
        window=tuple(window[axis] for axis in spec.numbers("rhs")[2:]),
        taps=tuple(given[axis] for axis in spec.numbers("out")[2:]),
        dtype=result,
        accumulation=jnp.promote_types(dtype, jnp.float32),
    )


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    """Returns the parameters of an ordinary convolution with a large window and a small result."""
    params, (x, w), (y,) = equation.params, equation.invars, equation.outvars
    if max(params["feature_group_count"], params["batch_group_count"]) > 1 or params.get("out_sharding") is not None:
        return None
    if not has_usual_precision(equation) or max(params["window_strides"], default=2) > 1:
        return None
    dtypes = {v.aval.dtype for v in (x, w, y)}
    known = len(dtypes) == 1 and jnp.issubdtype(x.aval.dtype, jnp.floating) and x.aval.dtype.itemsize > 1
    if not known or any(0 in v.aval.shape for v in (x, w, y)):
        return None
    numbers = params["dimension_numbers"]
    window = [w.aval.shape[axis] for axis in numbers.rhs_spec[2:]]
    taps = [y.aval.shape[axis] for axis in numbers.out_spec[2:]]
    spread, reach = tuple(params["lhs_dilation"]), tuple(params["rhs_dilation"])
    if max(spread) > 1 and max(reach) > 1:
        return None
    apart = max(spread) == 1 and _apart(taps, reach)
    few = math.prod(taps) <= min(_MOST_TAPS, math.prod(window))
    if math.prod(window) == 1 or not (few or apart):
        return None
    found = parameters(params)
    del found["strides"]  # all are 1
    return found


def _original(spec: RespellingSpec, x: jax.Array, cotangent: jax.Array) -> list[jax.Array]:
    own = _of(spec)
    found = lax.conv_general_dilated(
        x,
        cotangent,
        (1,) * len(own.taps),
        own.padding,
        own.spread,
        own.reach,
        dimension_numbers(spec),
        preferred_element_type=own.dtype,
    )
    return [found]


def _respelt(spec: RespellingSpec, x: jax.Array, cotangent: jax.Array) -> list[jax.Array]:
    own = _of(spec)
    x, cotangent = (
        lax.transpose(array, (axes[1], *axes[2:], axes[0]))  # the channels last
        for array, axes in ((x, own.lhs), (cotangent, own.rhs))
    )
    read, whole = (cotangent, x) if own.transposed else (x, cotangent)
    if own.pointwise and own.dtype == jnp.float32:
        return [_arranged(own, _of_rows(own, read, whole)[None])]
    if own.apart:
        tiles = _tiles(own, read)  # [examples, *space, *taps, channels]
    else:
        reads = _Reads.of(own, read, whole.shape[1:-1])
        if read.shape[-1] > _FEW:

            def product(place: window_products.Place) -> jax.Array:
                return _product(own, reads.at(place), whole)

            channels = (read, whole) if own.transposed != own.x_first else (whole, read)
            shape = [array.shape[-1] for array in channels]
            return [_arranged(own, window_products.stacked(own.taps, product, shape, own.accumulation))]
        tiles = reads.side_by_side()
    found = _product(own, tiles.reshape(*whole.shape[:-1], -1), whole)
    taps = math.prod(own.taps)
    if own.transposed == own.x_first:  # what is read is the second operand
        return [_arranged(own, jnp.moveaxis(found.reshape(found.shape[0], taps, -1), 1, 0))]
    return [_arranged(own, found.reshape(taps, -1, found.shape[-1]))]


@dataclass(frozen=True, slots=True)
class _Reads:
    """What each position of the kernel reads of x; or of the cotangent, if x has zeros between.

    Attributes:
      read: [examples, *space, channels], padded.
      first, sign: for each axis of space, where the first position begins; each next one begins ``sign`` further.
      taps: for each axis, the number of positions.
      steps, count: for each axis, the distance of the elements that are read, and their number.
    """

    read: jax.Array
    first: tuple[int, ...]
    sign: int
    taps: tuple[int, ...]
    steps: tuple[int, ...]
    count: tuple[int, ...]

    @staticmethod
    def of(own: _Gradient, read: jax.Array, count: Sequence[int]) -> _Reads:
        if own.transposed:
            low = [max(0, taps - 1 - low) for taps, (low, _) in zip(own.taps, own.padding, strict=True)]
            last = [(n - 1) * step + low for n, step, (low, _) in zip(count, own.spread, own.padding, strict=True)]
            around = [(a, max(0, b + 1 - size)) for a, b, size in zip(low, last, own.window, strict=True)]
            first, steps = [a + b for a, (b, _) in zip(low, own.padding, strict=True)], own.spread
            sign = -1
        else:
            around, first, steps, sign = list(own.padding), [0] * len(own.taps), own.reach, 1
        return _Reads(_padded(read, around), tuple(first), sign, own.taps, tuple(steps), tuple(count))

    def at(self, place: window_products.Place) -> jax.Array:
        """Returns what a position reads."""
        begin = [start + self.sign * i for start, i in zip(self.first, place, strict=True)]
        examples, *_, channels = self.read.shape
        return window_products.read(self.read, [0, *begin, 0], [examples, *self.count, channels], [1, *self.steps, 1])

    def side_by_side(self) -> jax.Array:
        """Returns what all positions read, one beside the other along the channels.

        They are put together axis by axis: XLA takes the longer to compile this, the more parts are put together.
        """
        found = self.read
        for axis, (step, n) in reversed(list(enumerate(zip(self.steps, self.count, strict=True)))):
            starts = [self.first[axis] + self.sign * i for i in range(self.taps[axis])]
            ends = [start + (n - 1) * step + 1 for start in starts]
            parts = [lax.slice_in_dim(found, a, b, step, axis + 1) for a, b in zip(starts, ends, strict=True)]
            found = lax.concatenate(parts, found.ndim - 1)
        return found


def _padded(array: jax.Array, around: Sequence[tuple[int, int]]) -> jax.Array:
    if not any(map(any, around)):
        return array
    return lax.pad(array, jnp.zeros((), array.dtype), ((0, 0, 0), *((low, high, 0) for low, high in around), (0, 0, 0)))


def _tiles(own: _Gradient, x: jax.Array) -> jax.Array:
    """Returns what all positions of the kernel read of x, without a slice for each: a tile for each of the cotangent's
    elements, of which what lies between tiles is left out."""
    lengths = [n * step for n, step in zip(own.window, own.reach, strict=True)]
    around = [
        (low, length - size - low) for (low, _), length, size in zip(own.padding, lengths, x.shape[1:-1], strict=True)
    ]
    x = _padded(x, around)
    split = [n for pair in zip(own.window, own.reach, strict=True) for n in pair]
    x = x.reshape(x.shape[0], *split, x.shape[-1])
    for axis, size in enumerate(own.taps):
        x = lax.slice_in_dim(x, 0, size, axis=2 * axis + 2)
    rank = len(own.taps)
    return lax.transpose(x, (0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1))


def _product(own: _Gradient, read: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns the product of both along their rows, with the channels in the order of the result.

    It is not transposed: of products of bfloat16 in float32 that are, XLA's CPU compiler makes such as it cannot run.
    """
    first, second = (whole, read) if own.transposed == own.x_first else (read, whole)
    rows = (tuple(range(first.ndim - 1)),) * 2
    return lax.dot_general(first, second, (rows, ((), ())), preferred_element_type=own.accumulation)


def _of_rows(own: _Gradient, read: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns the product of arrays of equal rows, which are read as they stand.

    Of arrays with several axes of rows XLA's CPU compiler makes copies, turns one, and computes both anew for them.
    """
    first, second = (read, whole) if own.x_first else (whole, read)

    def product(first: jax.Array, second: jax.Array, precision: lax.Precision | None = None) -> jax.Array:
        first, second = (array.reshape(-1, array.shape[-1]) for array in (first, second))
        return lax.dot_general(first, second, (((0,), (0,)), ((), ())), precision)

    return unfused(product, functools.partial(product, precision=lax.Precision.HIGHEST), first, second)


def _arranged(own: _Gradient, found: jax.Array) -> jax.Array:
    """Returns the result of [positions, channels, channels], these in the order of the result."""
    rank = len(own.taps)
    order = dict(zip((*sorted(own.out[:2]), *own.out[2:]), (rank, rank + 1, *range(rank)), strict=True))
    found = found.reshape(*own.taps, *found.shape[1:])
    return lax.transpose(found, [order[axis] for axis in range(rank + 2)]).astype(own.dtype)


def _assumptions(spec: RespellingSpec) -> tuple[str, ...]:
    """Returns that the operands are finite where they meet other zeros than in the original."""
    own = _of(spec)
    if own.transposed:
        return ("both operands are finite",)
    return assumed_finite((dtype for _, dtype in (*spec.operands, *spec.results)), own.padding, own.spread)


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns the number of positions, how they lie, where the channels stand, and whether the result is what is large.

    A result that is larger than both operands, as behind the last layers of a network, costs memory: the products are
    put together, while the original writes it in place.  The compiler's library is slow at volumes.
    """
    own = _of(spec)
    (left, _), (right, _) = spec.operands
    wide = math.prod(spec.results[0][0]) > _LARGER * max(math.prod(left), math.prod(right))
    taps = math.prod(own.taps)
    size = "one tap" if taps == 1 else next((f"{n} taps" for n in (4, 9, _MOST_TAPS) if taps <= n), "many taps")
    how = "transposed" if own.transposed else "apart" if own.apart else "strided" if max(own.reach) > 1 else "plain"
    channels = left[own.lhs[0]], right[own.rhs[0]]
    few = ", few channels" if min(channels) <= _FEW else ""
    orders = {len(own.lhs) - 1: "channels last", 1: "channels first"}
    order = orders.get(own.lhs[0], "examples last")  # as in a convolution whose window is as large as its operand
    axes = ", three axes" if len(own.taps) > _PLANE else ""
    return f"{size}, {how}{few}, {order}{', large result' if wide else ''}{axes}"


_PLANE = 2
"""Axes of space of images."""
_LARGER = 2
"""How many times as large as both operands a result is that counts as large: chosen between layers in the middle of a
network, whose results are up to twice as large, and the last ones of VGG, 4.5 times and more."""
_SAMPLES: tuple[tuple[str, int, int, bool, tuple[tuple[int, int, int, int], ...]], ...] = (
    ("1x1", 1, 1, False, ((2, 14, 64, 64), (4, 28, 64, 128), (8, 56, 64, 256))),
    ("1x1-few", 1, 1, False, ((2, 24, 16, 64), (4, 48, 16, 96), (8, 112, 16, 96))),
    ("1x1-stride", 1, 2, False, ((2, 14, 64, 64), (4, 28, 128, 256), (4, 56, 256, 512))),
    ("1x1-late", 1, 1, False, ((4, 3, 256, 256), (4, 6, 512, 512), (4, 7, 2048, 2048))),
    ("3x3", 3, 1, False, ((2, 14, 64, 64), (4, 28, 128, 128), (4, 112, 64, 64))),
    ("3x3-stride", 3, 2, False, ((2, 14, 64, 64), (4, 28, 128, 256), (4, 112, 64, 128))),
    ("3x3-stride-few", 3, 2, False, ((1, 96, 3, 32), (4, 96, 3, 32), (16, 224, 3, 32))),
    ("3x3-few", 3, 1, False, ((1, 32, 3, 32), (8, 32, 3, 64), (8, 112, 3, 64))),
    ("7x7-stride-few", 7, 2, False, ((1, 32, 3, 64), (2, 112, 3, 64), (8, 224, 3, 64))),
    ("2x2-patches", 2, 2, False, ((2, 14, 96, 192), (4, 28, 96, 192), (4, 112, 96, 192))),
    ("2x2-patches-late", 2, 2, False, ((1, 8, 64, 128), (1, 16, 192, 384), (2, 8, 768, 1536))),
    ("4x4-patches", 4, 4, False, ((8, 32, 3, 96), (4, 112, 3, 96), (16, 224, 3, 96))),
    ("16x16-patches", 16, 16, False, ((1, 112, 3, 192), (4, 224, 3, 384), (16, 224, 3, 768))),
    ("2x2-up", 2, 2, True, ((1, 14, 64, 32), (2, 28, 128, 64), (4, 64, 64, 64))),
    ("3x3-up", 3, 2, True, ((1, 14, 64, 32), (2, 28, 64, 64), (4, 64, 32, 64))),
    ("4x4-up", 4, 2, True, ((1, 14, 64, 32), (2, 16, 256, 128), (4, 64, 32, 64))),
    ("4x4-up-few", 4, 2, True, ((1, 32, 32, 3), (4, 32, 64, 3), (8, 64, 128, 3))),
)
"""Name, kernel, stride, whether transposed, and (examples, length, channels before, channels after) for each bucket."""
_VOLUMES: tuple[tuple[str, int, int, bool, tuple[tuple[int, int, int, int], ...]], ...] = (
    ("1x1x1-stride", 1, 2, False, ((1, 8, 32, 32), (1, 16, 32, 64), (2, 32, 32, 64))),
    ("3x3x3", 3, 1, False, ((1, 8, 32, 32), (1, 16, 32, 64), (2, 32, 32, 32))),
    ("3x3x3-few", 3, 1, False, ((1, 16, 3, 16), (1, 32, 8, 16), (2, 48, 16, 16))),
    ("3x3x3-late", 3, 1, False, ((1, 4, 64, 64), (1, 4, 128, 128))),
    ("3x3x3-stride", 3, 2, False, ((1, 8, 32, 64), (1, 16, 32, 64), (2, 32, 32, 64))),
    ("3x3x3-stride-few", 3, 2, False, ((1, 16, 3, 16), (1, 32, 8, 16), (2, 48, 16, 16))),
    ("2x2x2-patches", 2, 2, False, ((1, 8, 32, 64), (1, 16, 32, 64), (2, 32, 32, 64))),
    ("2x2x2-up", 2, 2, True, ((1, 8, 32, 32), (1, 16, 32, 32), (1, 32, 32, 32))),
    ("2x2x2-up-few", 2, 2, True, ((1, 8, 16, 8), (1, 16, 16, 8), (1, 32, 16, 8))),
)
"""The same of volumes."""
_CHANNELS_FIRST = ("1x1", "3x3", "2x2-up", "4x4-up", "3x3x3", "3x3x3-few", "3x3x3-stride", "2x2x2-up")
"""The samples that are measured with channels first too."""


def _samples() -> Iterator[tuple[str, Sample]]:
    for (name, kernel, stride, up, sizes), order in itertools.product((*_SAMPLES, *_VOLUMES), ("last", "first")):
        if order == "first" and name not in _CHANNELS_FIRST:
            continue
        axes = name.split("-")[0].count("x") + 1
        for examples, length, before, after in sizes:
            convolve, x, w, y = layer(
                order,
                (length,) * axes,
                (kernel,) * axes,
                (before, after),
                examples=examples,
                stride=stride,
                transposed=up,
            )
            yield f"{name}-{order}-{math.prod(x.shape)}", Sample(gradient_of(convolve, w, 1), (x, y))


KIND = Kind(
    name="weight_gradient",
    primitives=("conv_general_dilated",),
    numerics="reordered",
    assumptions=_assumptions,
    instead="products of matrices, along the rows that each position of the kernel reads",
    match=of_equation(_parameters),
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=4.0,  # one gains 3.1 with AVX2, and is half as fast with AVX-512
    may_round_sums=True,
)
