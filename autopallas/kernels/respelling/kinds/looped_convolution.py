"""Convolutions in loops, with their axes in the order that XLA's CPU compiler computes by a library.

The compiler puts the axes of convolutions into that order, images with the channels last, only outside of loops and
branches (JAX 0.10 to 0.12).  In the body of a scan it sums the others up one element after the other: gradients of
images and of weights, whose operands change places, and all that have the channels first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import JaxprEqn
from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.contractions import has_usual_precision
from autopallas.kernels.respelling.convolution_spec import (
    as_written,
    dimension_numbers,
    in_library_order,
    padding_of,
    parameters,
)
from autopallas.kernels.respelling.gradients import gradient_of, layer
from autopallas.kernels.respelling.kind import Found, Kind, Sample, of_equation
from autopallas.kernels.respelling.library_order import MOST_AXES, in_a_loop_or_branch, is_ordered, ordered
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_DTYPES = frozenset(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
_FEW = 64
"""Positions of a window up to which it is that of a layer, not of a weight's gradient."""
_FEW_SUMS = 64
"""Channels times results of a layer below which the library arranges more than it multiplies: a stencil over one
channel takes it up to 50 times as long as sums of one element after the other."""
_FEW_RESULTS, _MANY_EXAMPLES = 32, 16
"""Results of a weight's gradient below which the same holds with the channels first, but with many examples half of
them."""
_FEWEST_RESULTS, _FEWEST_IMAGES = 3, 4
"""Results of a weight's gradient, and channels times examples of its images, below which it holds with the channels
last.  From there on the library took 0.02 to 0.6 of the time (1 to 64 examples, 1 to 16 channels, one and two axes)."""


def _match(graph: Graph, node: Node) -> Found | None:
    """Returns a convolution in the body of a loop or in a branch."""
    return _of_any(graph, node) if in_a_loop_or_branch(node) else None


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    """Returns the parameters of a convolution without groups whose axes are in another order than the library's."""
    params, arrays = equation.params, (*equation.invars, *equation.outvars)
    if max(params["feature_group_count"], params["batch_group_count"]) > 1 or params.get("out_sharding") is not None:
        return None
    dtypes = {v.aval.dtype for v in arrays}
    if len(dtypes) > 1 or not dtypes <= _DTYPES or any(0 in v.aval.shape for v in arrays):
        return None
    if not has_usual_precision(equation):
        return None
    axes = params["dimension_numbers"]
    rank = len(axes.lhs_spec)
    if not 3 <= rank <= 2 + MOST_AXES or is_ordered(axes):
        return None
    for axis, sides, dilation in zip(axes.lhs_spec[2:], params["padding"], params["lhs_dilation"], strict=True):
        cut = sum(min(side, 0) for side in sides)
        if cut and (dilation > 1 or arrays[0].aval.shape[axis] + cut < 1):
            return None
    return parameters(params)


_of_any: Callable[[Graph, Node], Found | None] = of_equation(_parameters)


def _convolve(
    spec: RespellingSpec,
    x: jax.Array,
    w: jax.Array,
    padding: Sequence[tuple[int, int]],
    numbers: lax.ConvDimensionNumbers,
) -> jax.Array:
    strides, left, right = (spec.numbers(name) for name in ("strides", "lhs_dilation", "rhs_dilation"))
    return lax.conv_general_dilated(x, w, strides, padding, left, right, numbers)


def _original(spec: RespellingSpec, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    return [_convolve(spec, x, w, padding_of(spec), dimension_numbers(spec))]


def _respelt(spec: RespellingSpec, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    x, w = in_library_order(spec, x, w)
    # What negative padding leaves out is cut off first: the library may read beside the array (JAX 0.10).
    padding, shape = padding_of(spec), x.shape
    low = [0, *(max(-side, 0) for side, _ in padding), 0]
    high = [0, *(max(-side, 0) for _, side in padding), 0]
    x = lax.slice(x, low, [size - cut for size, cut in zip(shape, high, strict=True)])
    around = [(max(before, 0), max(after, 0)) for before, after in padding]
    return [as_written(spec, _convolve(spec, x, w, around, ordered(x.ndim)))]


def _assumptions(spec: RespellingSpec) -> tuple[str, ...]:
    # One element after the other, the compiler skips the zeros around and among the operand's elements.
    inserts = max(map(max, padding_of(spec))) > 0 or max(spec.numbers("lhs_dilation")) > 1
    return ("both operands are finite",) if inserts else ()


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns the axes of space, where they stand, whether the window is that of a layer, and where channels are few or
    elements are left out or inserted."""
    space = spec.numbers("lhs")[2:]
    order = "channels first" if len(space) + 1 in space else "channels last"
    window = math.prod(spec.operands[1][0][axis] for axis in spec.numbers("rhs")[2:])
    size = "a small window" if window <= _FEW else "a large window"
    results, channels = (spec.operands[1][0][axis] for axis in spec.numbers("rhs")[:2])
    if window <= _FEW:
        few = results * channels < _FEW_SUMS
    elif order == "channels first":
        few = results < (_FEW_RESULTS if channels < _MANY_EXAMPLES else _FEW_RESULTS // 2)
    else:
        few = results < _FEWEST_RESULTS or channels * spec.operands[0][0][spec.numbers("lhs")[0]] < _FEWEST_IMAGES
    if few:
        return f"{len(space)} axes, {order}, {size}, few channels"
    between = max(*spec.numbers("strides"), *spec.numbers("lhs_dilation"), *spec.numbers("rhs_dilation")) > 1
    return f"{len(space)} axes, {order}, {size}{', strided or dilated' if between else ''}"


_SHAPES: tuple[tuple[int, ...], ...] = (
    (2, 128, 64), (4, 1024, 64), (64, 2048, 32),
    (1, 16, 16, 64), (4, 32, 32, 64), (16, 128, 128, 16),
    (1, 8, 8, 8, 32), (2, 16, 16, 16, 32), (4, 64, 64, 32, 8),
    (6, 2048, 1), (4, 131072, 1), (1, 96, 96, 1), (8, 256, 256, 1),
)  # fmt: skip
"""Shapes of images with the channels last, of each size for one, two and three axes of space, and of one channel."""
_NARROW = tuple(
    (dtype, shape, 1, order)
    for dtype in (jnp.bfloat16, jnp.float16)
    for shape in _SHAPES[:5]
    if shape != _SHAPES[2]
    for order in ("first", "last")
)
"""What is measured in 16 bits: dtype, shape, stride, and where the channels stand."""


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields convolutions with the channels first, and the gradients of images and weights in both orders, each in a
    loop."""
    wide = itertools.product((jnp.float32,), _SHAPES, (1, 2), ("first", "last"))
    for dtype, shape, stride, order in (*wide, *_NARROW):
        if shape[-1] == 1 and stride > 1:
            continue  # the same evidence
        examples, *space, channels = shape
        axes = len(space)
        convolve, x, w, y = layer(
            order, space, (3,) * axes, (channels, channels), examples=examples, stride=stride, dtype=dtype
        )
        narrow = f"{jnp.dtype(dtype).name}-" if dtype != jnp.float32 else ""
        name = f"{narrow}{axes}-{order}-stride{stride}-{math.prod(shape)}"
        if order == "first":
            yield name, _looped(convolve, x, w)
        yield f"{name}-dx", _looped(gradient_of(convolve, x, 0), w, y)
        yield f"{name}-dw", _looped(gradient_of(convolve, w, 1), x, y)


def _looped(function: Callable[[jax.Array, jax.Array], jax.Array], *given: jax.ShapeDtypeStruct) -> Sample:
    """Returns a sample that computes a function twice, in a loop."""
    twice = tuple(jax.ShapeDtypeStruct((2, *t.shape), t.dtype) for t in given)
    return Sample(lambda *arrays: lax.map(lambda each: function(*each), arrays), twice)


KIND = Kind(
    name="looped_convolution",
    primitives=("conv_general_dilated",),
    numerics="reordered",
    assumptions=_assumptions,
    instead="the convolution with its axes in the order that a library computes",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    may_round_sums=True,
    elsewhere_from=2.0,  # one of 1.64 with AVX2 takes 1.2 times as long with AVX-512
    in_loops=True,
    least_steps=2,
)
