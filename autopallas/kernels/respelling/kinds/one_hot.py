"""Products with one-hot matrices as gathers, and their transposes as sums by index.

``one_hot(ids, n) @ table`` picks rows of a table; ``one_hot(ids, n).T @ rows`` adds rows up by their ids.  An id out of
range stands for a row of zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.graph import Graph, Node, Ref, Space
from autopallas.kernels.respelling.exact_sums import Sums, added_exactly
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.spec import Plain, RespellingSpec
from autopallas.numerics.casts import is_floating
from autopallas.patterns.expressions import Scope
from autopallas.patterns.indexing import is_position

__all__ = ["KIND"]

_BLOCK = 512
"""Rows that are added up one by one: of equal numbers, such sums lose the more digits the longer they are."""
_TINY = 8
"""Classes below which a product sums the rows of each class sooner than they are added one by one."""


def _match(graph: Graph, node: Node) -> Found | None:
    """Returns a product that is contracted over the classes of a one-hot matrix, or over all of its other axes."""
    (left, right), batch = node.equation.params["dimension_numbers"]
    if any(batch) or not all(is_floating(graph.dtype(n)) for n in (*node.inputs, *node.outputs)):
        return None
    for side, (summed, others) in enumerate(((left, right), (right, left))):
        value, other = node.inputs[side], node.inputs[1 - side]
        rank = len(graph.shape(value))
        if not _may_be_one_hot(graph, value) or other in graph.literals:
            continue
        for classes in range(rank):
            rest = [axis for axis in range(rank) if axis != classes]
            picks = tuple(summed) == (classes,)
            if not picks and sorted(summed) != rest:
                continue
            ids = _ids(graph, value, classes)
            if ids is None:
                continue
            along = tuple(others) if picks else tuple(others[list(summed).index(axis)] for axis in rest)
            parameters: dict[str, Plain] = {
                "along": along,
                "axes": tuple(-1 if axis is None else rest.index(axis) for axis in ids[1]),
                "classes": graph.shape(value)[classes],
                "first": side == 0,
                "picks": picks,
                "rows": tuple(graph.shape(value)[axis] for axis in rest),
            }
            return Found(tuple(parameters.items()), (ids[0], other), node.outputs)
    return None


def _may_be_one_hot(graph: Graph, value: int) -> bool:
    """Returns whether a value is a comparison of integers, as a float, perhaps transposed."""
    node = graph.definitions.get(value)
    if node is not None and node.name == "transpose":
        node = graph.definitions.get(node.inputs[0])
    inner = None if node is None or node.name != "convert_element_type" else graph.definitions.get(node.inputs[0])
    return inner is not None and inner.name == "eq" and jnp.issubdtype(graph.dtype(inner.inputs[0]), jnp.integer)


def _ids(graph: Graph, value: int, classes: int) -> tuple[int, list[int | None]] | None:
    """Returns the ids of a one-hot matrix, and for each of their axes the axis of the matrix, or None for an axis of
    size 1; None where it is none."""
    scope = Scope(graph)
    space = scope.space
    whole = space.full(value)
    outer = space.operands(space.canonical(whole))
    compared = None if outer is None else space.uses(outer[0])
    if compared is None:
        return None
    for positions, ids in (compared, compared[::-1]):
        if not is_position(scope, space.canonical(positions), whole.view[classes][1]):
            continue
        # As far back as whole arrays are read: of a slice, the ids are those of the slice.
        for at in reversed([*space.chain(ids)]):
            axes = _axes_read(space, at, whole, classes)
            if axes is not None:
                return (at.value, axes) if at.value not in graph.literals else None
    return None


def _axes_read(space: Space, ids: Ref, whole: Ref, classes: int) -> list[int | None] | None:
    """Returns for each axis of an array the axis of the one-hot matrix along which all of it is read, or None for an
    axis of size 1; None where the array is not read so, once along each axis but that of the classes."""
    own = [atoms for _, atoms in space.view(whole.view)]
    axes: list[int | None] = []
    for size, (offset, atoms) in zip(space.graph.shape(ids.value), space.view(ids.view), strict=True):
        if offset or space.extent(atoms) != size or atoms and atoms not in own:
            return None
        axes.append(own.index(atoms) if atoms else None)
    wanted = [axis for axis, atoms in enumerate(own) if atoms and axis != classes]
    return axes if sorted(axis for axis in axes if axis is not None) == wanted else None


def _in_order(spec: RespellingSpec, ids: jax.Array) -> jax.Array:
    """Returns the ids with the axes of the one-hot matrix, but for its classes."""
    axes = cast("tuple[int, ...]", spec["axes"])
    order = sorted(range(ids.ndim), key=lambda place: axes[place])  # those of size 1 are the first
    return jnp.transpose(ids, order).reshape(cast("tuple[int, ...]", spec["rows"]))


def _original(spec: RespellingSpec, ids: jax.Array, other: jax.Array) -> list[jax.Array]:
    ids = _in_order(spec, ids)
    matrix = jax.nn.one_hot(ids, cast(int, spec["classes"]), dtype=other.dtype)
    along = cast("tuple[int, ...]", spec["along"])
    summed = (ids.ndim,) if spec["picks"] else tuple(range(ids.ndim))
    given, axes = ((matrix, other), (summed, along)) if spec["first"] else ((other, matrix), (along, summed))
    (_, dtype), *_ = spec.results
    return [jax.lax.dot_general(*given, (axes, ((), ())), preferred_element_type=dtype)]


def _respelt(spec: RespellingSpec, ids: jax.Array, other: jax.Array) -> list[jax.Array]:
    ids = _in_order(spec, ids)
    classes, along = cast(int, spec["classes"]), cast("tuple[int, ...]", spec["along"])
    (_, dtype), *_ = spec.results
    ids, known = _in_range(ids, classes)
    if spec["picks"]:
        rows = jnp.moveaxis(other, along[0], 0)
        found = rows.at[ids].get(mode="promise_in_bounds")
        found = jnp.where(known.reshape(*ids.shape, *(1,) * (rows.ndim - 1)), found, 0).astype(dtype)
        own, rest = ids.ndim, rows.ndim - 1
        return [found if spec["first"] else jnp.transpose(found, (*range(own, own + rest), *range(own)))]
    rows = jnp.moveaxis(other, along, range(len(along)))
    shape = rows.shape[len(along) :]
    wide = jnp.promote_types(jnp.promote_types(other.dtype, dtype), jnp.float32)
    index = jnp.where(known, ids, classes).reshape(-1)
    sums = _summed(index, rows.reshape(-1, *shape), classes, wide)
    return [(sums if spec["first"] else jnp.moveaxis(sums, 0, -1)).astype(dtype)]


def _in_range(ids: jax.Array, classes: int) -> tuple[jax.Array, jax.Array]:
    """Returns (ids as indices, 0 for those out of range; which are in range).

    The number of classes need not be a number of the ids' dtype: 256 is none of ``uint8``.
    """
    known = ids >= 0
    if classes <= jnp.iinfo(ids.dtype).max:
        known &= ids < classes
    return jnp.where(known, ids, 0).astype(jnp.int32 if classes < 2**31 else jnp.int64), known


def _summed(index: jax.Array, rows: jax.Array, classes: int, dtype: Dtype) -> jax.Array:
    """Returns for each class the sum of its rows; those with an index beyond the classes are dropped.

    Rows are added one by one, which loses digits of long sums.  So blocks of them are added up apart, and the sum of
    the blocks carries what rounding lost.
    """

    def part(index: jax.Array, rows: jax.Array) -> jax.Array:
        zeros = jnp.zeros((classes, *rows.shape[1:]), dtype)
        return zeros.at[index].add(rows.astype(dtype), mode="drop")

    if rows.shape[0] <= _BLOCK:
        return part(index, rows)
    blocks = rows.shape[0] // _BLOCK

    def add(carried: Sums, block: jax.Array) -> tuple[Sums, None]:
        # Read where it stands: a scan over blocks is given a copy of them, where they are not all rows.
        own = (jax.lax.dynamic_slice_in_dim(array, block * _BLOCK, _BLOCK) for array in (index, rows))
        return added_exactly(*carried, part(*own)), None

    start = jnp.zeros((classes, *rows.shape[1:]), dtype)
    (total, lost), _ = jax.lax.scan(add, (start, start), jnp.arange(blocks))
    count = blocks * _BLOCK
    return added_exactly(total, lost, part(index[count:], rows[count:]))[0]


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns the direction, and how many rows and classes there are."""
    rows, classes = math.prod(spec.operands[0][0]), cast(int, spec["classes"])
    tiny = classes < _TINY and not spec["picks"]
    many = "tiny" if tiny else "few" if classes < 64 else "some" if classes < 2048 else "many"
    return f"{'picks' if spec['picks'] else 'sums'}, {many} classes, {'many' if rows >= 64 else 'few'} rows"


def _fill(spec: RespellingSpec, random: np.random.Generator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Draws ids in range."""
    ids, other = arrays
    return [random.integers(0, cast(int, spec["classes"]), ids.shape).astype(ids.dtype), other]


def _samples() -> Iterator[tuple[str, Sample]]:
    for rows, classes, width in itertools.product((16, 256, 2048), (16, 512, 8192), (64, 512)):

        def picks(ids: jax.Array, table: jax.Array, classes: int = classes) -> jax.Array:
            return jax.nn.one_hot(ids, classes, dtype=table.dtype) @ table

        def sums(ids: jax.Array, rows: jax.Array, classes: int = classes) -> jax.Array:
            return jax.nn.one_hot(ids, classes, dtype=rows.dtype).T @ rows

        ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
        yield (
            f"{rows}x{classes}x{width}-picks",
            Sample(picks, (ids, jax.ShapeDtypeStruct((classes, width), jnp.float32))),
        )
        yield f"{rows}x{classes}x{width}-sums", Sample(sums, (ids, jax.ShapeDtypeStruct((rows, width), jnp.float32)))


KIND = Kind(
    name="one_hot",
    primitives=("dot_general",),
    numerics="reordered",
    instead="a gather of the rows, or a sum of rows by their ids",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    assumptions=("the other operand of a product with a one-hot matrix is finite",),
    fill=_fill,
)
