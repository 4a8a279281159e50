"""Grouped convolutions as sums over taps: depthwise ones and their gradients, and the gradients of grouped weights.

A convolution from one channel to one, such as a stencil, a filter or a blurred image, is depthwise too, of one group.

A convolution has taps where its window is small (``w``): each adds a shifted slice of x times one weight.  Where the
result is small instead, as that of a weight's gradient, each of its elements is one product of x, shifted, with the
whole window (``y``).  Padding and the zeros between dilated elements are multiplied like any other element, as in the
original, so that infinities and NaNs give the same; where the original skips them, it is assumed that there are none.

The gradient of grouped weights divides the batch into groups, and XLA's CPU compiler computes it for each of them with
the features of all.  Where it has more taps, the groups are brought to the features, and a library computes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import Dtype, JaxprEqn
from autopallas.graph import Graph, Node
from autopallas.kernels.loop_carries import filled
from autopallas.kernels.respelling import window_products
from autopallas.kernels.respelling.convolution_spec import dimension_numbers, padding_of, parameters
from autopallas.kernels.respelling.gradients import gradient_of
from autopallas.kernels.respelling.inserted_zeros import assumed_finite
from autopallas.kernels.respelling.kind import Found, Kind, Sample, of_equation
from autopallas.kernels.respelling.library_order import in_a_loop_or_branch, is_ordered
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_MOST_TAPS = 64
_MOST_CONTRACTED = 9
"""Taps of a gradient of grouped weights up to which it is a product of matrices for each of them."""
_FEW_GROUPS = 4
"""Groups up to which the original computes a gradient of grouped weights about as fast, depending on its strides."""
_MOST_TAPS_IN_LOOPS = 4096
"""Taps of a window over one channel or over each of several, which stand in a loop over the window's first axis."""
_FEW_RESULTS = 9
"""Elements of a depthwise convolution's result up to which it is summed for each of them, if its window is large."""
_WEIGHTS_UNROLLED = 25
"""Weights above which a loop over the first axis of the window keeps the program short."""
_SUMS_UNROLLED = 12
"""Elements of a result above which a loop over its first axis keeps the program short."""
_BLOCK = 2**14
"""Elements that each step of a sum over a large window takes, about."""
_FEW, _SOME = 2**13, 2**8
"""Elements of the largest array up to which evidence is that of small arrays, which are below the table's first bucket,
and from which on: what takes 20 microseconds is mostly the call."""
_USUAL = (None, (lax.Precision.DEFAULT,) * 2)
"""Precisions of which a spec says nothing."""
_CACHED = 2**20
"""Elements of a window up to which it is read again for each element of the result: one loop is compiled then, not one
for each element of a row."""


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution, with the axes of its arrays in the order in which the program has them.

    Attributes:
      lhs, rhs, out: axes of (batch, features, *space); of ``rhs`` (result's features, features of a group, *space).
      strides, lhs_dilation, rhs_dilation, padding: for each axis of space.
      groups: number of groups.
      of_batch: whether the batch is divided into groups, and not the features.
      window, result: sizes of the window and of the result.
      image_padding, window_padding: with which the operands are read, along each axis of space: at least ``padding``
        before and after x; before, after and between the window's elements.
      examples: size of the result's batch.
      features: features of a group that are summed over.
      per_group: features of the result, of each group.
      dtype: that of the result.
      accumulation: that of the sums.
      precision: that is asked for, of products of matrices; None for the usual one.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    strides: tuple[int, ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int
    of_batch: bool
    window: tuple[int, ...]
    result: tuple[int, ...]
    image_padding: tuple[tuple[int, int], ...]
    window_padding: tuple[tuple[int, int, int], ...]
    examples: int
    features: int
    per_group: int
    dtype: Dtype
    accumulation: Dtype
    precision: tuple[lax.Precision, lax.Precision] | None

    @property
    def few_weights(self) -> bool:
        """Whether the sum is over the window, not over the result: that of a depthwise weight's gradient is over the
        result even where the window is as small, and that of depthwise convolutions over the window even where the
        result is smaller, as of late layers: no product of matrices is left then."""
        window, result = math.prod(self.window), math.prod(self.result)
        if self._is_depthwise_gradient:
            return not _are_few(self.result)
        if self._is_depthwise:
            return self.groups == 1 or window <= _MOST_TAPS or (_are_few(self.window) and result > _FEW_RESULTS)
        return window <= min(result, _MOST_TAPS)

    @property
    def _is_depthwise(self) -> bool:
        return self.features == 1 and self.per_group == 1 and not self.of_batch

    @property
    def _is_depthwise_gradient(self) -> bool:
        return self.of_batch and self.per_group == 1 and self.examples == 1

    @property
    def elementwise(self) -> bool:
        """Whether each group has one feature, so that no product of matrices is left."""
        if self.few_weights:
            return self._is_depthwise
        return self._is_depthwise_gradient

    @property
    def groups_features(self) -> bool:
        """Whether the groups of the batch become groups of features."""
        least_taps = min(math.prod(self.window), math.prod(self.result))
        return _becomes_features(self.of_batch, self._is_depthwise_gradient, len(self.window), least_taps)

    @property
    def taps(self) -> int:
        return math.prod(self.window if self.few_weights else self.result)


def _of(spec: RespellingSpec) -> _Convolution:
    (_, left_dtype), (right, right_dtype) = spec.operands
    ((given, dtype),) = spec.results

    known, unpadded = dict(spec.parameters), ((0, 0, 0),) * (len(given) - 2)
    rhs, out, groups = spec.numbers("rhs"), spec.numbers("out"), cast(int, spec["groups"])
    names = cast("tuple[str, str] | None", known.get("precision"))
    return _Convolution(
        lhs=spec.numbers("lhs"),
        rhs=rhs,
        out=out,
        strides=spec.numbers("strides"),
        lhs_dilation=spec.numbers("lhs_dilation"),
        rhs_dilation=spec.numbers("rhs_dilation"),
        padding=padding_of(spec),
        groups=groups,
        of_batch=cast(bool, spec["of_batch"]),
        window=tuple(right[axis] for axis in rhs[2:]),
        result=tuple(given[axis] for axis in out[2:]),
        image_padding=cast("tuple[tuple[int, int], ...]", known.get("image_padding", spec["padding"])),
        window_padding=cast("tuple[tuple[int, int, int], ...]", known.get("window_padding", unpadded)),
        examples=given[out[0]],
        features=right[rhs[1]],
        per_group=right[rhs[0]] // groups,
        dtype=dtype,
        accumulation=jnp.promote_types(jnp.promote_types(left_dtype, right_dtype), jnp.float32),
        precision=None if names is None else (lax.Precision[names[0]], lax.Precision[names[1]]),
    )


def _match(graph: Graph, node: Node) -> Found | None:
    """Returns a grouped convolution, or one of one channel, that one of the two sums computes with few taps."""
    params = _parameters(node.equation)
    if params is not None and params["groups"] == 1 and _sums_singly(node):
        window = math.prod(node.equation.invars[1].aval.shape)
        if window <= _WEIGHTS_UNROLLED:
            return None  # the compiler fuses such sums with what is around them
        params = {**params, "skips_zeros": True}
    if params is not None and params["of_batch"]:
        params = {**params, **_read_elsewhere(graph, node)}
    return of_equation(lambda equation: params)(graph, node)


def _sums_singly(node: Node) -> bool:
    """Returns whether the compiler sums up the taps of a convolution one after the other, as in a loop."""
    return in_a_loop_or_branch(node) and not is_ordered(node.equation.params["dimension_numbers"])


def _read_elsewhere(graph: Graph, node: Node) -> dict[str, Plain]:
    """Returns with which padding a gradient of weights can read what other convolutions read with that padding.

    The forward reads x so, and the gradient of the image the cotangent.  Each is computed once then, with its padding.
    """
    found: dict[str, Plain] = {}
    own = node.params["dimension_numbers"]
    for name, place, axes in (("image_padding", 0, own.lhs_spec), ("window_padding", 1, own.rhs_spec)):
        for user in graph.users.get(node.inputs[place], ()):
            if user is node or user.body is not node.body or user.name != node.name:
                continue
            params = user.params
            spread, padding = params["lhs_dilation"], params["padding"]
            same = user.inputs[0] == node.inputs[place] and params["dimension_numbers"].lhs_spec[2:] == axes[2:]
            if not same or params["feature_group_count"] == 1 or min(map(min, padding)) < 0:
                continue
            if place == 0:
                pairs = zip(node.params["padding"], padding, strict=True)
                if max(spread) == max(node.params["lhs_dilation"]) == 1 and all(
                    low == first and high <= last for (low, high), (first, last) in pairs
                ):
                    found[name] = tuple(map(tuple, padding))
                    break
            elif max(spread) == 1 or axes[0] == len(axes) - 1:
                found[name] = tuple((low, high, n - 1) for (low, high), n in zip(padding, spread, strict=True))
                break
    return found


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    params = equation.params
    groups = max(params["feature_group_count"], params["batch_group_count"])
    floats = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*equation.invars, *equation.outvars))
    if not floats or any(0 in v.aval.shape for v in (*equation.invars, *equation.outvars)):
        return None
    precision = params["precision"]
    known = precision in _USUAL or isinstance(precision, tuple) and all(isinstance(p, lax.Precision) for p in precision)
    if not known or params.get("out_sharding") is not None:
        return None
    sizes = params["dimension_numbers"]
    if len(sizes.lhs_spec) == 2:
        return None
    results, features, *windows = (equation.invars[1].aval.shape[axis] for axis in sizes.rhs_spec)
    window = math.prod(windows)
    result = math.prod(equation.outvars[0].aval.shape[axis] for axis in sizes.out_spec[2:])
    if groups == 1:
        known = len({v.aval.dtype for v in (*equation.invars, *equation.outvars)}) == 1
        if not (known and 1 < window <= result and _are_few(windows) and features == results == 1):
            return None
    elif min(window, result) > _MOST_TAPS:
        of_batch = params["batch_group_count"] > 1
        images = equation.outvars[0].aval.shape[sizes.out_spec[0]] if of_batch else features
        given = [equation.outvars[0].aval.shape[axis] for axis in sizes.out_spec[2:]] if of_batch else windows
        is_depthwise = images == 1 and results == groups
        if not (is_depthwise and _are_few(given)):
            if not _becomes_features(of_batch, is_depthwise, len(windows), min(window, result)):
                return None
    found = parameters(params) | {"groups": groups, "of_batch": params["batch_group_count"] > 1}
    return found if precision in _USUAL else found | {"precision": tuple(p.name for p in precision)}


def _becomes_features(of_batch: bool, is_depthwise: bool, axes: int, taps: int) -> bool:
    """Returns whether the groups of a batch become groups of features, by the numbers of axes of space and of taps."""
    return of_batch and not is_depthwise and axes < 3 and taps > _MOST_CONTRACTED


def _are_few(taps: Sequence[int]) -> bool:
    """Returns whether so many taps along each axis of space stand in a loop over the first one."""
    return math.prod(taps) <= _MOST_TAPS_IN_LOOPS and math.prod(taps[1:]) <= _MOST_TAPS


def _original(spec: RespellingSpec, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    own = _of(spec)
    found = lax.conv_general_dilated(
        x,
        w,
        own.strides,
        own.padding,
        own.lhs_dilation,
        own.rhs_dilation,
        dimension_numbers(spec),
        1 if own.of_batch else own.groups,
        own.groups if own.of_batch else 1,
        own.precision,
        preferred_element_type=own.dtype,
    )
    return [found]


def _respelt(spec: RespellingSpec, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    own = _of(spec)
    if own.groups_features:
        return [_by_features(spec, own, x, w).astype(own.dtype)]
    around = [(0, 0, 0)] * x.ndim
    for axis, (low, high), dilation in zip(own.lhs[2:], own.image_padding, own.lhs_dilation, strict=True):
        around[axis] = (low, high, dilation - 1)
    if any(around[axis] != (0, 0, 0) for axis in range(x.ndim)):
        x = lax.pad(x, jnp.zeros((), x.dtype), around)
    if own.elementwise:
        found = _weighted(own, x, w) if own.few_weights else _correlated(own, x, w)
    else:
        found = _contracted(own, x, w)
    return [found.astype(own.dtype)]


def _by_features(spec: RespellingSpec, own: _Convolution, x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes a convolution over groups of the batch as one over groups of features."""
    batch, features = own.lhs[:2]
    shape = [
        own.examples if a == batch else size * (own.groups if a == features else 1) for a, size in enumerate(x.shape)
    ]
    x = x.reshape(*x.shape[:batch], own.groups, own.examples, *x.shape[batch + 1 :])
    order = [a for a in range(x.ndim) if a != batch]
    order.insert(features, batch)  # the groups before the features
    x = lax.transpose(x, order).reshape(shape)
    return lax.conv_general_dilated(
        x.astype(own.accumulation),
        w.astype(own.accumulation),
        own.strides,
        own.padding,
        own.lhs_dilation,
        own.rhs_dilation,
        dimension_numbers(spec),
        own.groups,
        precision=own.precision,
    )


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))


def _slice(
    own: _Convolution, x: jax.Array, begin: Sequence[int], sizes: Sequence[int], steps: Sequence[int]
) -> jax.Array:
    """Returns the elements of x from ``begin`` on, so many with such steps along each axis of space."""
    low, high, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for axis, first, size, step in zip(own.lhs[2:], begin, sizes, steps, strict=True):
        low[axis], high[axis], strides[axis] = first, first + (size - 1) * step + 1, step
    return lax.slice(x, low, high, strides)


def _joined(own: _Convolution, x: jax.Array) -> Callable[[Sequence[int]], jax.Array]:
    """Returns a function from where a slice for all elements of the result begins to that slice.

    XLA replaces a slice of padded x that has no padding by one of x, and computes x anew for it; but not where two axes
    have been joined.
    """
    if max(own.strides) > 1 or max(own.lhs_dilation) > 1:
        return lambda begin: _slice(own, x, begin, own.result, own.strides)
    axis = max(own.lhs[:2]) - 1  # joined with the one behind it, of which all is read
    behind = x.shape[axis + 1]
    flat = lax.reshape(x, (*x.shape[:axis], x.shape[axis] * behind, *x.shape[axis + 2 :]))

    def read(begin: Sequence[int]) -> jax.Array:
        low, high = [0] * x.ndim, list(x.shape)
        for a, first, size in zip(own.lhs[2:], begin, own.result, strict=True):
            low[a], high[a] = first, first + size
        shape = [b - a for a, b in zip(low, high, strict=True)]
        for bounds in (low, high):
            bounds[axis] *= behind
            del bounds[axis + 1]
        return lax.reshape(lax.slice(flat, low, high), shape)

    return read


def _from(array: jax.Array, start: int | jax.Array, size: int, axis: int) -> jax.Array:
    """Returns so many elements from ``start`` on, which is not negative, along an axis."""
    return lax.dynamic_slice_in_dim(array, start, size, axis, allow_negative_indices=False)


def _weighted(own: _Convolution, x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes a depthwise convolution: the sum of shifted slices, each times a weight for each channel."""
    weights = lax.transpose(w, (*own.rhs[2:], own.rhs[1], own.rhs[0])).astype(own.accumulation)
    weights = lax.squeeze(weights, (weights.ndim - 2,))

    def some(x: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the sum over the window of which there are weights."""
        window, total = weights.shape[:-1], None
        weights = lax.reshape(weights, (math.prod(window), own.groups))
        read = _joined(own, x)
        for n, place in enumerate(_places(window)):
            begin = [i * step for i, step in zip(place, own.rhs_dilation, strict=True)]
            part = read(begin).astype(own.accumulation)
            weight = lax.index_in_dim(weights, n, keepdims=False)
            term = lax.mul(part, lax.broadcast_in_dim(weight, part.shape, (own.lhs[1],)))
            total = term if total is None else lax.add(total, term)
        return cast(jax.Array, total)

    if own.taps <= _WEIGHTS_UNROLLED:
        return lax.transpose(some(x, weights), _order(own.lhs, own.out))
    axis, rows = own.lhs[2], _WEIGHTS_UNROLLED if len(own.window) == 1 else 1

    def of_rows(first: int | jax.Array, rows: int) -> jax.Array:
        reach = (own.result[0] - 1) * own.strides[0] + (rows - 1) * own.rhs_dilation[0] + 1
        part = _from(x, first * own.rhs_dilation[0], reach, axis)
        return some(part, _from(weights, first, rows, 0))

    def add(total: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        return lax.add(total, of_rows(step * rows, rows)), None

    sizes = dict(zip(own.lhs, (own.examples, own.groups, *own.result), strict=True))
    start = filled([sizes[a] for a in range(x.ndim)], own.accumulation)
    steps, left = divmod(own.window[0], rows)
    total, _ = lax.scan(add, start, jnp.arange(steps, dtype=jnp.int32))
    if left:
        total = lax.add(total, of_rows(steps * rows, left))
    return lax.transpose(total, _order(own.lhs, own.out))


def _order(given: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Returns the permutation from the axes ``given`` for (batch, features, *space) to those ``wanted``."""
    own = dict(zip(wanted, given, strict=True))
    return tuple(own[axis] for axis in range(len(given)))


def _correlated(own: _Convolution, x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes a depthwise weight's gradient: for each element of the result, the sum of x times the window.

    The batch of x has the channels, and so have the result's features.  The sum goes over blocks of the first axis of
    space: the elements of a block are added up one by one, and at the end with each other.
    """
    if any(map(any, own.window_padding)):
        around = [(0, 0, 0)] * w.ndim
        for a, added in zip(own.rhs[2:], own.window_padding, strict=True):
            around[a] = added
        w = lax.pad(w, jnp.zeros((), w.dtype), around)
    w = lax.transpose(w, _order(own.rhs, own.lhs))  # the axes of x: its features are summed over
    shape, apart = list(w.shape), [1] * w.ndim
    for a, size, (_, _, between) in zip(own.lhs[2:], own.window, own.window_padding, strict=True):
        shape[a], apart[a] = size, between + 1
    axis, count = own.lhs[2], own.window[0]
    steps = count * own.features * math.prod(own.window[1:]) * own.groups // _BLOCK
    block = max(1, count // max(1, steps))
    # What is left of an axis whose length is no multiple is summed apart, which has kernels of its own.
    block = next((n for n in range(block, (block - 1) // 2, -1) if count % n == 0), block)
    others = [a + 1 for a in range(x.ndim) if a != own.lhs[0]]

    def sums(begin: Sequence[int] | Sequence[jax.Array], sizes: Sequence[int]) -> jax.Array:
        """Returns so many elements of the result, from ``begin`` on along each axis of space, one after the other."""
        places = list(_places(sizes))

        def terms(first: int | jax.Array, size: int) -> list[jax.Array]:
            """Returns the products of so many elements of the window's first axis, for each element of the result."""
            read, firsts = (size, *own.window[1:]), (first, *[0] * (len(sizes) - 1))
            at, reach = [jnp.int32(0)] * x.ndim, list(x.shape)
            for n, a in enumerate(own.lhs[2:]):
                at[a] = jnp.int32(begin[n] * own.strides[n] + firsts[n] * own.rhs_dilation[n])
                reach[a] = (sizes[n] - 1) * own.strides[n] + (read[n] - 1) * own.rhs_dilation[n] + 1
            part = lax.dynamic_slice(x, at, reach, allow_negative_indices=False)
            start: list[int | jax.Array] = [0] * w.ndim
            some = [*shape]
            for a, begins, (low, _, _) in zip(own.lhs[2:], firsts, own.window_padding, strict=True):
                start[a] = low + begins * apart[a]
            some[axis] = size
            wide = window_products.read(w, start, some, apart).astype(own.accumulation)
            starts = ([i * stride for i, stride in zip(o, own.strides, strict=True)] for o in places)
            slices = (_slice(own, part, s, read, own.rhs_dilation).astype(own.accumulation) for s in starts)
            return [lax.mul(one, wide) for one in slices]

        def add(step: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
            return list(map(lax.add, totals, terms(step * block, block)))

        each = [block if a == axis else size for a, size in enumerate(shape)]
        start = [filled(each, own.accumulation)] * len(places)
        totals = lax.fori_loop(jnp.int32(0), jnp.int32(count // block), add, start)
        found = jnp.stack(totals).sum(others)
        left = count % block
        return found + jnp.stack(terms(count - left, left)).sum(others) if left else found

    if math.prod(shape) > _CACHED and own.taps <= _SUMS_UNROLLED:
        found = sums([0] * len(own.result), own.result)
    else:
        sizes = (1,) * len(own.result) if math.prod(shape) <= _CACHED else (1, *own.result[1:])
        counts = [size // part for size, part in zip(own.result, sizes, strict=True)]
        begins = jnp.asarray(np.indices(counts, np.int32).reshape(len(counts), -1).T)
        each = math.prod(sizes) * own.groups

        def write(n: jax.Array, found: jax.Array) -> jax.Array:
            begin = _from(begins, n, 1, 0)[0]
            own_sums = sums([begin[axis] for axis in range(len(counts))], sizes)
            return lax.dynamic_update_slice(found, own_sums.reshape(each), [n * each], allow_negative_indices=False)

        # The sums stand along one axis, which takes XLA less time to compile than what lax.map stacks.
        start = _to_be_written(math.prod(own.result) * own.groups, own.accumulation)
        found = lax.fori_loop(jnp.int32(0), jnp.int32(len(begins)), write, start)
    found = found.reshape(1, *own.result, own.groups)
    return lax.transpose(found, _order((0, found.ndim - 1, *range(1, found.ndim - 1)), own.out))


def _to_be_written(size: int, dtype: Dtype) -> jax.Array:
    """Returns an array of which all is written: a constant, which needs no kernel as long as its elements differ."""
    if size > _BLOCK:
        return jnp.zeros(size, dtype)
    return jnp.asarray(np.arange(size) == size - 1, dtype)


def _contracted(own: _Convolution, x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes a grouped convolution by a product of matrices for each tap, batched over the groups."""
    space = len(own.window)
    x = lax.transpose(x, (own.lhs[0], *own.lhs[2:], own.lhs[1]))  # [batch, *space, features]
    w = lax.transpose(w, (*own.rhs[2:], own.rhs[1], own.rhs[0]))
    w = w.reshape(*own.window, own.features, own.groups, own.per_group)
    letters = "abcdefgh"[:space]
    rows = "gn{}i" if own.of_batch else "n{}gi"

    def product(part: jax.Array, weights: jax.Array, kept: str, summed: str) -> jax.Array:
        where = 0 if own.of_batch else part.ndim - 1
        groups = (own.groups, part.shape[where] // own.groups)
        part = part.reshape(*part.shape[:where], *groups, *part.shape[where + 1 :])
        left, right = rows.format(kept + summed), f"{summed}igf"
        found: jax.Array = jnp.einsum(
            f"{left},{right}->n{kept}gf", part, weights, precision=own.precision,
            preferred_element_type=own.accumulation,
        )  # fmt: skip
        return found

    def part(
        place: window_products.Place, apart: Sequence[int], sizes: Sequence[int], steps: Sequence[int]
    ) -> jax.Array:
        """Returns what a position reads of x, each position so far from the one before."""
        begin = [i * step for i, step in zip(place, apart, strict=True)]
        return window_products.read(x, [0, *begin, 0], [x.shape[0], *sizes, x.shape[-1]], [1, *steps, 1])

    def of_window(place: window_products.Place) -> jax.Array:
        weights = window_products.read(w, [*place, 0, 0, 0], [*(1 for _ in place), *w.shape[space:]], (1,) * w.ndim)
        weights = weights.reshape(w.shape[space:])
        return product(part(place, own.rhs_dilation, own.result, own.strides), weights, letters, "")

    def of_result(place: window_products.Place) -> jax.Array:
        return product(part(place, own.strides, own.window, own.rhs_dilation), w, "", letters)

    channels = (own.groups, own.per_group)
    if own.few_weights:
        shape = (own.examples, *own.result, *channels)
        found = window_products.summed(own.window, of_window, shape, own.accumulation)
    else:
        found = window_products.stacked(own.result, of_result, (own.examples, *channels), own.accumulation)
        found = jnp.moveaxis(found, 0, 1).reshape(own.examples, *own.result, *channels)
    found = found.reshape(*found.shape[:-2], own.groups * own.per_group)
    return lax.transpose(found, _order((0, space + 1, *range(1, space + 1)), own.out))


def _assumptions(spec: RespellingSpec) -> tuple[str, ...]:
    own = _of(spec)
    if dict(spec.parameters).get("skips_zeros") and (max(map(max, own.padding)) > 0 or max(own.lhs_dilation) > 1):
        return ("both operands are finite",)
    return assumed_finite((dtype for _, dtype in (*spec.operands, *spec.results)), own.padding, own.lhs_dilation)


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns what is computed, the number of taps, whether a large window exceeds the image, where the channels stand,
    and of windows over groups whether these have channels in fours, which XLA computes on vectors (JAX 0.10), or are
    groups of a batch, as in gradients, which it does not, and whether there are few elements; of groups that become
    features their number, that of the axes, strides, and whether there are more taps than the image has elements."""
    own = _of(spec)
    many = "" if own.elementwise else ", many groups" if own.groups > 16 else ", few groups"
    order = "channels last" if own.lhs[0 if own.of_batch else 1] == len(own.lhs) - 1 else "channels first"
    if own.groups_features:
        apart = ", strided" if max(own.rhs_dilation) > 1 else ""
        few = many if own.groups > _FEW_GROUPS else f", up to {_FEW_GROUPS} groups"
        beyond = ", beyond the image" if math.prod(own.window) < math.prod(own.result) else ""
        return f"grouped{few}, {len(own.window)} axes, more taps{apart}{beyond}"
    taps = next(limit for limit in (4, 9, 25, _MOST_TAPS, _MOST_TAPS_IN_LOOPS) if own.taps <= limit)
    dilated = ", dilated" if max(own.lhs_dilation) > 1 else ", strided" if max(own.strides) > 1 else ""
    if own.groups == 1:
        return f"one channel, {len(own.window)} axes, {taps} taps{dilated}"
    if own.few_weights and math.prod(own.window) > max(_MOST_TAPS, math.prod(own.result)):
        dilated += ", beyond the image"
    what = "depthwise" if own.elementwise else "grouped"
    where = "window" if own.few_weights else "result"
    given = spec.operands[0][0][own.lhs[1]] // own.groups
    fours = not own.elementwise and own.few_weights and (given % 4 == 0 or own.per_group % 4 == 0)
    few = "" if spec.elements > _FEW else ", few elements" if spec.elements >= _SOME else ", hardly any elements"
    groups = ", groups of a batch" if fours and own.of_batch else ", in fours" if fours else ""
    return f"{what}{many}, {taps} taps of the {where}{dilated}, {order}{groups}{few}"


_LINES = (1, 32, 128), (1, 128, 256), (2, 1024, 256), (8, 2048, 512)
_IMAGES = (1, 8, 8, 96), (1, 14, 14, 160), (4, 28, 28, 160), (4, 56, 56, 192)
"""Shapes with the channels last: one size for each bucket."""
_WINDOWS: tuple[tuple[str, tuple[int, ...], int, int | None, tuple[tuple[int, ...], ...]], ...] = (
    ("causal", (4,), 1, None, _LINES),
    ("3x3", (3, 3), 1, None, _IMAGES),
    ("3x3-stride", (3, 3), 2, None, _IMAGES),
    ("5x5", (5, 5), 1, None, _IMAGES),
    ("5x5-stride", (5, 5), 2, None, _IMAGES),
    ("7x7", (7, 7), 1, None, _IMAGES),
    ("7x7-stride", (7, 7), 2, None, _IMAGES),
    ("11x11", (11, 11), 1, None, _IMAGES),
    ("3x3-grouped", (3, 3), 1, 32, _IMAGES),
    ("3x3-few", (3, 3), 1, 8, _IMAGES),
    ("3x3-few-stride", (3, 3), 2, 8, _IMAGES),
    ("causal-few", (4,), 1, 8, _LINES),
)
"""Name, window, stride, groups (None: one for each channel) and shapes of each sample."""
_SIGNALS, _PICTURES = ((4, 4096), (16, 16384), (16, 131072)), ((1, 96, 96), (4, 256, 256), (4, 1024, 1024))
"""Shapes of one channel."""
_OF_ONE: tuple[tuple[tuple[int, ...], int, tuple[tuple[int, ...], ...]], ...] = (
    *(((taps,), 1, _SIGNALS) for taps in (4, 9, 25, 64, 500)),
    ((9,), 2, _SIGNALS),
    *(((side, side), 1, _PICTURES) for side in (2, 3, 5, 8, 13)),
    ((3, 3), 2, _PICTURES),
)
"""Window, stride and shapes of each sample of one channel."""


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields depthwise convolutions in one and two dimensions and grouped ones, and the gradients of each."""
    measured = ((name, window, stride, of, shape) for name, window, stride, of, shapes in _WINDOWS for shape in shapes)
    for name, window, stride, several, shape in measured:
        groups = several or shape[-1]
        padding = "SAME" if len(window) == 2 else ((3, 0),)
        letters = "HW"[: len(window)]
        for order in ("last", "first"):
            data = f"N{letters}C" if order == "last" else f"NC{letters}"
            own = shape if order == "last" else (shape[0], shape[-1], *shape[1:-1])
            numbers = (data, f"{letters}IO", data)
            base = f"{name}-{order}-{math.prod(shape)}"

            def convolve(
                x: jax.Array,
                w: jax.Array,
                stride: int = stride,
                padding: str | Sequence[tuple[int, int]] = padding,
                numbers: tuple[str, str, str] = numbers,
                groups: int = groups,
                rank: int = len(window),
            ) -> jax.Array:
                return lax.conv_general_dilated(
                    x, w, (stride,) * rank, padding, dimension_numbers=numbers, feature_group_count=groups
                )

            x = jax.ShapeDtypeStruct(own, jnp.float32)
            w = jax.ShapeDtypeStruct((*window, shape[-1] // groups, shape[-1]), jnp.float32)
            y = jax.eval_shape(convolve, x, w)
            yield base, Sample(convolve, (x, w))
            yield f"{base}-dx", Sample(gradient_of(convolve, x, 0), (w, y))
            yield f"{base}-dw", Sample(gradient_of(convolve, w, 1), (x, y))


_OF_GROUPED: tuple[tuple[tuple[int, ...], int, tuple[tuple[int, ...], ...]], ...] = tuple(
    (window, stride, shapes)
    for window, shapes in (
        ((12,), ((1, 200, 128), (2, 1000, 256), (1, 33000, 64))),
        ((128,), ((1, 24, 64), (2, 49, 128), (2, 49, 768))),
        ((4, 4), ((1, 14, 14, 96), (2, 56, 56, 96), (1, 184, 184, 64))),
    )
    for stride in (1, 4)
)
"""Window, stride and shapes, the channels last, of each gradient of grouped weights."""


def _samples_of_grouped() -> Iterator[tuple[str, Sample]]:
    """Yields gradients of grouped weights with more taps than what is a product of matrices for each of them."""
    for window, stride, shapes in _OF_GROUPED:
        for shape, groups in itertools.product(shapes, (2, 8, 32)):
            letters = "HW"[: len(window)]
            numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

            def convolve(
                x: jax.Array,
                w: jax.Array,
                strides: tuple[int, ...] = (stride,) * len(window),
                numbers: tuple[str, str, str] = numbers,
                groups: int = groups,
            ) -> jax.Array:
                return lax.conv_general_dilated(
                    x, w, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups
                )

            x = jax.ShapeDtypeStruct(shape, jnp.float32)
            w = jax.ShapeDtypeStruct((*window, shape[-1] // groups, shape[-1]), jnp.float32)
            name = f"{groups}-of-{'x'.join(map(str, window))}{'-stride' if stride > 1 else ''}-{math.prod(shape)}-dw"
            yield name, Sample(gradient_of(convolve, w, 1), (x, jax.eval_shape(convolve, x, w)))


def _samples_of_one() -> Iterator[tuple[str, Sample]]:
    """Yields convolutions from one channel to one; the gradients of images are such too."""
    for window, stride, shapes in _OF_ONE:
        for shape in shapes:

            def convolve(x: jax.Array, w: jax.Array, strides: tuple[int, ...] = (stride,) * len(window)) -> jax.Array:
                return lax.conv_general_dilated(x, w, strides, "SAME")

            x = jax.ShapeDtypeStruct((shape[0], 1, *shape[1:]), jnp.float32)
            w = jax.ShapeDtypeStruct((1, 1, *window), jnp.float32)
            name = f"one-{'x'.join(map(str, window))}{'-stride' if stride > 1 else ''}-{math.prod(shape)}"
            yield name, Sample(convolve, (x, w))
            if stride > 1:
                yield f"{name}-dx", Sample(gradient_of(convolve, x, 0), (w, jax.eval_shape(convolve, x, w)))


KIND = Kind(
    name="convolution",
    primitives=("conv_general_dilated",),
    numerics="reordered",
    assumptions=_assumptions,
    instead="a sum over the taps of the window, or of the result, of shifted slices times weights; "
    "of gradients of grouped weights with more taps a convolution over groups of features",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=lambda: itertools.chain(_samples(), _samples_of_one(), _samples_of_grouped()),
    elsewhere_from=2.6,  # of many groups two gain 2.1 and 2.5 with AVX2 and JAX 0.10, and nothing with AVX-512 and 0.12
)
