"""The GPU kernels of normalisations whose rows are turned behind them: each reads its rows once.

The columns of a pair are half of a row apart, so a row is two halves, each in the layout of a tile of its own: then a
thread has both columns of its pairs, and nothing is moved between threads.  A block is one warpgroup, whose four warps
have a row each.  It goes through all rows of a position, with that position's cosines and sines in registers; where
positions are neighbours, each warp has those of its own.

Letters: M rows, N columns, P positions, H neighbouring rows of each, A pairs of columns, 2 A = N.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.compat import Dtype
from autopallas.kernels.gpu import array_bytes, call, mosaic, processors, store, unravelled
from autopallas.kernels.refs import Ref
from autopallas.kernels.row_moments import OF_ROWS, Arrays, MomentsKernels, Rows, divisor
from autopallas.kernels.row_norms import RowNormSpec
from autopallas.kernels.row_tiles_gpu import LANES, NARROW, WARPS, Tile
from autopallas.sites.device import Device
from autopallas.sites.operation import Unsupported

__all__ = ["reason_against_turning", "turned_call"]

Array: TypeAlias = jax.Array
Halves: TypeAlias = tuple[Array, Array]

_RESIDENT = 4
"""Blocks of the backward on a multiprocessor."""


def reason_against_turning(spec: RowNormSpec) -> Unsupported | None:
    """Returns why the kernels do not turn the rows of a site; None where they do."""
    if spec.neighbours:
        return Unsupported("the columns of a pair are neighbours, which the GPU kernels of norms do not turn")
    if spec.start or 2 * spec.angles != spec.columns:
        return Unsupported(f"{2 * spec.angles} of {spec.columns} columns are turned; the GPU kernels of norms turn all")
    if spec.angles % LANES or spec.columns > NARROW:
        return Unsupported(
            f"half rows of {spec.angles} columns cannot be shared evenly by {LANES} threads in registers"
        )
    if spec.heads % WARPS and (spec.heads > 1 or spec.positions % WARPS):
        return Unsupported(
            f"{spec.heads} rows of each of {spec.positions} positions cannot be shared evenly by {WARPS} warps"
        )
    return None


class _Place(NamedTuple):
    """What a block computes.

    Attributes:
      kernels, spec: of the site.
      read, written: names of the operands and the results.
      tile: of a half of the rows that it has at a time.
      groups: models that share what there is per column, and the tables.
      shares: whether all rows of a unit have one position; else each of its four rows has its own.
      units: of a model.
      tiles: of a unit.
      blocks: of a model.
    """

    kernels: MomentsKernels
    spec: RowNormSpec
    read: Sequence[str]
    written: Sequence[str]
    tile: Tile
    groups: int
    shares: bool
    units: int
    tiles: int
    blocks: int

    @property
    def of_columns(self) -> list[str]:
        """Names of the results that are summed."""
        return [name for name in self.written if name not in OF_ROWS]

    def rows(self, ref: Ref, model: Array, number: Array) -> tuple[Ref, Ref]:
        """Returns where both halves of the rows of a tile are in an array [models, rows, N]."""
        half, place = self.tile.columns, pl.ds(number * WARPS, WARPS)
        return ref.at[model, place, pl.ds(0, half)], ref.at[model, place, pl.ds(half, half)]

    def loaded(self, ref: Ref, model: Array, number: Array) -> Halves:
        """Both halves of the rows of a tile, in float32."""
        first, second = self.rows(ref, model, number)
        return self.tile.loaded(first, self.tile.layout), self.tile.loaded(second, self.tile.layout)

    def shared(self, ref: Ref, model: Array) -> Halves:
        """Both halves of what there is per column."""
        return self._of_all_rows(ref.at[self._of_group(ref, model)])

    def table(self, ref: Ref, model: Array, unit: Array) -> Halves:
        """Both halves of a table for the rows of a unit."""
        own = self._of_group(ref, model)
        return self._of_all_rows(ref.at[own, unit]) if self.shares else self.loaded(ref, own, unit)

    def _of_group(self, ref: Ref, model: Array) -> Array:
        return lax.div(model, jnp.int32(self.groups)) if ref.shape[0] > 1 else jnp.int32(0)

    def _of_all_rows(self, ref: Ref) -> Halves:
        half, tile = self.tile.columns, self.tile
        first, second = (tile.along(tile.loaded(ref.at[pl.ds(i * half, half)], tile.of_columns)) for i in (0, 1))
        return first, second

    def named(self, refs: Sequence[Ref]) -> tuple[dict[str, Ref], dict[str, Ref], dict[str, tuple[Ref, Ref]]]:
        """Operands, results, and both halves of the sums in shared memory, by name."""
        operands, rest = refs[: len(self.read)], refs[len(self.read) :]
        results, sums = rest[: len(self.written)], rest[len(self.written) :]
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return (
            dict(zip(self.read, operands, strict=True)),
            dict(zip(self.written, results, strict=True)),
            dict(zip(self.of_columns, pairs, strict=True)),
        )


def turned_call(
    kernels: MomentsKernels, site: Rows, direction: str, more: Arrays, written: Mapping[str, Dtype]
) -> list[Array]:
    """Runs the kernel of a direction, as :meth:`~autopallas.kernels.row_moments.MomentsKernels.call` says."""
    spec, columns = site.spec, site.spec.columns
    shared = {name: jnp.broadcast_to(x[:, 0], (len(x), columns)) for name, x in site.shared.items()}
    read = {**site.given, **more, **shared, **site.tables}
    tile = Tile.of(site.rows, spec.angles, spec.x_dtype)
    shares = site.heads > 1
    units, tiles = (site.rows // site.heads, site.heads // WARPS) if shares else (site.rows // WARPS, 1)
    # A block of the forward has one unit.  Those of the backward stay, since each leaves sums of its own.
    resident = processors(Device.current()) * _RESIDENT
    blocks = units if direction == "forward" else min(units, -(-resident // site.models))
    sums = [name for name in written if name not in OF_ROWS]
    shapes = [
        jax.ShapeDtypeStruct((site.models, site.rows if name in OF_ROWS else blocks, columns), dtype)
        for name, dtype in written.items()
    ]
    place = _Place(kernels, spec, tuple(read), tuple(written), tile, site.groups, shares, units, tiles, blocks)
    found = call(
        partial(_forward if direction == "forward" else _backward, place),
        name=f"autopallas_{kernels.name}_turned_{direction}",
        grid={"block": site.models * blocks},
        out_type=shapes,
        scratch=[mosaic().SMEM(tile.shape, jnp.float32) for _ in sums for _ in range(2)],
        warpgroups=1,
        flops=18 * site.models * site.rows * columns,
        bytes_accessed=array_bytes(*read.values(), *shapes),
        transcendentals=site.models * site.rows,
        by_lanes=True,
    )(*read.values())
    return [x if name in OF_ROWS else x.sum(1) for name, x in zip(written, found, strict=True)]


def _each(function: Callable[..., Array], *halves: Halves) -> Halves:
    """Computes both halves of an array from those of others."""
    first, second = (function(*own) for own in zip(*halves, strict=True))
    return first, second


def _along(halves: Halves) -> Array:
    """The sums of rows."""
    return jnp.sum(halves[0] + halves[1], axis=-1)


def _rows(place: _Place, operands: Mapping[str, Ref], model: Array, number: Array) -> Halves:
    """The rows of a tile, with the residual where that is still to be added."""
    names = ("x", "residual") if "residual" in operands else ("x",)
    given = (place.loaded(operands[name], model, number) for name in names)
    return reduce(partial(_each, jnp.add), given)


def _moments(place: _Place, x: Halves) -> tuple[Halves, Array, Array | None]:
    """The rows, taken from their means if they are to be, and what :func:`divisor` returns for their moment."""
    spec, across = place.spec, place.tile.across
    if place.kernels.centred:
        mean = across(_along(x) * np.float32(1 / spec.columns))
        x = _each(lambda own: own - mean, x)
    square = _along(_each(lambda own: own * own, x)) * np.float32(spec.factor / spec.columns)
    return x, *divisor(spec, square)


def _stored(place: _Place, ref: Ref, model: Array, number: Array, halves: Halves, dtype: Dtype) -> None:
    for own, value in zip(place.rows(ref, model, number), halves, strict=True):
        store(own, value.astype(dtype))


def _through(place: _Place, visit: Callable[[Array], None], unit: Array) -> None:
    """Visits the tiles of a unit."""
    if place.tiles == 1:
        visit(unit)
        return

    @pl.loop(0, place.tiles)
    def _(i: Array) -> None:
        visit(unit * place.tiles + i)


def _forward(place: _Place, *refs: Ref) -> None:
    operands, results, _ = place.named(refs)
    spec, across = place.spec, place.tile.across
    model, unit = unravelled(lax.axis_index("block"), place.blocks)
    cos, sin = place.table(operands["cos"], model, unit), place.table(operands["sin"], model, unit)

    def visit(number: Array) -> None:
        rows = _rows(place, operands, model, number)
        if "sum" in results:
            dtype = spec.sum_dtype
            assert dtype is not None
            _stored(place, results["sum"], model, number, rows, dtype)
            rows = _each(lambda own: own.astype(dtype).astype(jnp.float32), rows)
        centred, divides, _ = _moments(place, rows)
        inverse = across(np.float32(spec.gain) / divides)
        found = _each(lambda own: own * inverse, centred)
        found = _each(jnp.multiply, found, place.shared(operands["scale"], model)) if "scale" in operands else found
        found = _each(jnp.add, found, place.shared(operands["shift"], model)) if "shift" in operands else found
        found = _each(lambda own, other, c, s: own * c + other * s, found, found[::-1], cos, sin)
        _stored(place, results["result"], model, number, found, spec.result_dtype)

    _through(place, visit, unit)


def _backward(place: _Place, *refs: Ref) -> None:
    """Each block goes through its units, and then writes its sums."""
    operands, results, sums = place.named(refs)
    tile = place.tile
    model, block = unravelled(lax.axis_index("block"), place.blocks)
    for total in sums.values():
        for own in total:
            store(own, mosaic().layout_cast(jnp.zeros(tile.shape, jnp.float32), tile.layout))

    @pl.loop(0, lax.div(place.units - block + (place.blocks - 1), jnp.int32(place.blocks)))
    def _(i: Array) -> None:
        unit = block + i * place.blocks
        turn = place.table(operands["cos"], model, unit), place.table(operands["sin"], model, unit)
        _through(place, partial(_visit, place, operands, results, sums, model, turn), unit)

    for name, total in sums.items():
        for half, own in enumerate(total):
            found = reduce(jnp.add, [tile.loaded(own.at[warp], tile.of_columns) for warp in range(WARPS)])
            store(results[name].at[model, block, pl.ds(half * tile.columns, tile.columns)], found)


def _visit(
    place: _Place,
    operands: Mapping[str, Ref],
    results: Mapping[str, Ref],
    sums: Mapping[str, tuple[Ref, Ref]],
    model: Array,
    turn: tuple[Halves, Halves],
    number: Array,
) -> None:
    """Turns the cotangent back: that of y is the cotangent times the cosine, and the other half's times the sine that
    it had there.  Of y = g x / d, where d^2 = f mean(x^2): dx = g (dy / d - f x mean(dy x) / d^3), whose second term
    has a factor behind epsilon; less its mean where x is centred."""
    spec, tile = place.spec, place.tile
    x = _rows(place, operands, model, number)
    cotangent, (cos, sin) = place.loaded(operands["cotangent"], model, number), turn
    with_sine = _each(jnp.multiply, cotangent, sin)
    cotangent = _each(lambda own, c, other: own * c + other, cotangent, cos, with_sine[::-1])
    centred, divides, passed = _moments(place, x)
    inverse = tile.across(1 / divides)
    normal = _each(lambda own: own * inverse, centred)
    gain = np.float32(spec.gain)
    for name, total in sums.items():
        of_scale = _each(lambda dy, n: dy * n * gain, cotangent, normal) if name == "scale" else cotangent
        for own, value in zip(total, of_scale, strict=True):
            store(own, tile.loaded(own, tile.layout) + value)
    if "x" not in results:
        return
    of_normal = cotangent
    if "scale" in operands:
        of_normal = _each(jnp.multiply, cotangent, place.shared(operands["scale"], model))
    # Divided before it is summed, it is finite wherever what it is taken from is.
    share = np.float32(spec.factor / spec.columns)
    along = _along(_each(lambda dy, n: dy * (n * share), of_normal, normal))
    along = tile.across(along if passed is None else along * passed)
    gradient = _each(lambda dy, n: dy - n * along, of_normal, normal)
    if place.kernels.centred:
        mean = tile.across(_along(of_normal) * np.float32(1 / spec.columns))
        gradient = _each(lambda own: own - mean, gradient)
    gradient = _each(lambda own: own * inverse * gain, gradient)
    if "of_sum" in operands:
        gradient = _each(jnp.add, gradient, place.loaded(operands["of_sum"], model, number))
    _stored(place, results["x"], model, number, gradient, place.kernels.added_dtype(spec))
