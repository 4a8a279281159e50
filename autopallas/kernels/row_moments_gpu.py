"""The GPU kernels of normalisations of rows by their moments: each reads its rows once, straight into registers.

A block is one warpgroup.  Of narrow rows each of its four warps has one; the columns of a wide one are shared by all,
and then its sums go through a few words of shared memory.  Threads load 16 bytes at a time where the number of columns
allows it.  Main memory limits these kernels; several blocks on a multiprocessor keep its loads under way.

The forward keeps nothing for the backward, which computes the moments again from the rows that it reads: where a
residual is added to them, from the sum, if the forward gives that.  Gradients of what all rows share are summed in
shared memory by each block for its own rows, and XLA adds up the blocks.

Rows that are turned have kernels of their own (:mod:`row_turns_gpu`).

Letters: B models, M rows, N columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.compat import Dtype
from autopallas.kernels.gpu import array_bytes, call, mosaic, processors, reason_against, store, unravelled
from autopallas.kernels.refs import Ref
from autopallas.kernels.row_moments import APART, OF_ROWS, Arrays, MomentsKernels, Rows, divisor
from autopallas.kernels.row_norms import RowNormSpec
from autopallas.kernels.row_tiles_gpu import LANES, NARROW, WARPS, Tile
from autopallas.kernels.row_turns_gpu import reason_against_turning, turned_call
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["GpuMomentsKernels"]

Array: TypeAlias = jax.Array

_DTYPES = ("bfloat16", "float16", "float32")
_MOST_COLUMNS = 8192
"""Of a row, of which a thread of the backward then has 64 numbers of x and as many of the cotangent."""
_FOUR_BLOCKS = 2048
"""Columns up to which a multiprocessor has registers for four blocks of the backward, and otherwise for two."""


class GpuMomentsKernels(MomentsKernels):
    """The kernels of one normalisation."""

    def supports(self, spec: RowNormSpec, device: Device) -> Supported | Unsupported:
        """bfloat16, float16 and float32 on Hopper GPUs, and rows that the threads of a block can share and hold."""
        if (answer := reason_against(device)) is not None:
            return answer
        if spec.strided:
            return Unsupported(APART)
        for dtype in spec.dtypes():
            if dtype.name not in _DTYPES:
                return Unsupported(f"the GPU kernels of norms take {', '.join(_DTYPES)}, not {dtype}")
        if spec.turns and (answer := reason_against_turning(spec)) is not None:
            return answer
        threads = Tile.of(spec.rows, spec.columns, spec.x_dtype).threads
        if spec.columns % threads:
            rows = f"{spec.rows} rows" if spec.columns <= NARROW and threads > LANES else "rows"
            return Unsupported(f"{rows} of {spec.columns} columns cannot be shared evenly by {threads} threads each")
        if spec.columns > _MOST_COLUMNS:
            return Unsupported(f"{threads} threads do not hold rows of {spec.columns} columns in their registers")
        return Supported()

    def call(self, site: Rows, direction: str, more: Arrays, written: Mapping[str, Dtype]) -> list[Array]:
        """Runs the kernel of a direction."""
        if site.spec.turns:
            return turned_call(self, site, direction, more, written)
        columns = site.spec.columns
        shared = {name: jnp.broadcast_to(x[:, 0], (len(x), columns)) for name, x in site.shared.items()}
        read = {**site.given, **more, **shared}
        # Of a model's own rows: those of several together may be shared otherwise than supports knows.
        tile = Tile.of(site.spec.rows, columns, site.spec.x_dtype)
        tiles = site.rows // tile.rows
        # A block of the forward has one tile.  Those of the backward stay, since each leaves sums of its own.
        resident = processors(Device.current()) * (4 if columns <= _FOUR_BLOCKS else 2)
        blocks = tiles if direction == "forward" else min(tiles, -(-resident // site.models))
        sums = [name for name in written if name not in OF_ROWS]
        shapes = [
            jax.ShapeDtypeStruct((site.models, site.rows if name in OF_ROWS else blocks, columns), dtype)
            for name, dtype in written.items()
        ]
        place = _Place(self, site.spec, tuple(read), tuple(written), tile, tiles, blocks)
        found = call(
            partial(_forward if direction == "forward" else _backward, place),
            name=f"autopallas_{self.name}_{direction}",
            grid={"block": site.models * blocks},
            out_type=shapes,
            scratch=[mosaic().SMEM(tile.shape, jnp.float32) for _ in sums],
            warpgroups=1,
            flops=12 * site.models * site.rows * columns,
            bytes_accessed=array_bytes(*read.values(), *shapes),
            transcendentals=site.models * site.rows,
            by_lanes=True,
        )(*read.values())
        return [x if name in OF_ROWS else x.sum(1) for name, x in zip(written, found, strict=True)]


class _Place(NamedTuple):
    """What a block computes.

    Attributes:
      kernels, spec: of the site.
      read, written: names of the operands and the results.
      tile: the rows that it has at a time.
      tiles: how many of them a model has.
      blocks: of a model.
    """

    kernels: MomentsKernels
    spec: RowNormSpec
    read: Sequence[str]
    written: Sequence[str]
    tile: Tile
    tiles: int
    blocks: int

    def named(self, refs: Sequence[Ref]) -> tuple[dict[str, Ref], dict[str, Ref], dict[str, Ref]]:
        """Operands, results, and the sums in shared memory, by name."""
        operands, rest = refs[: len(self.read)], refs[len(self.read) :]
        results, sums = rest[: len(self.written)], rest[len(self.written) :]
        of_columns = [name for name in self.written if name not in OF_ROWS]
        return (
            dict(zip(self.read, operands, strict=True)),
            dict(zip(self.written, results, strict=True)),
            dict(zip(of_columns, sums, strict=True)),
        )


def _of_columns(place: _Place, operands: Mapping[str, Ref], name: str, model: Array) -> Array | None:
    """What there is per column under a name, for a tile of rows; None where there is nothing."""
    if name not in operands:
        return None
    ref, tile = operands[name], place.tile
    return tile.along(tile.loaded(ref.at[model if ref.shape[0] > 1 else 0], tile.of_columns))


def _added(place: _Place, operands: Mapping[str, Ref], model: Array, number: Array) -> Array:
    """A tile of the rows in float32, with the residual where that is still to be added."""
    names = ("x", "residual") if "residual" in operands else ("x",)
    tile = place.tile
    return reduce(jnp.add, (tile.loaded(tile.at(operands[name], model, number), tile.layout) for name in names))


def _mean(place: _Place, value: Array) -> Array:
    """The means of rows."""
    return jnp.sum(value, axis=-1) * np.float32(1 / place.spec.columns)


def _moments(place: _Place, x: Array) -> tuple[Array, Array, Array | None]:
    """The rows, taken from their means if they are to be, and what :func:`divisor` returns for their moment."""
    spec = place.spec
    centred = x - place.tile.across(_mean(place, x)) if place.kernels.centred else x
    square = jnp.sum(centred * centred, axis=-1) * np.float32(spec.factor / spec.columns)
    return centred, *divisor(spec, square)


def _forward(place: _Place, *refs: Ref) -> None:
    operands, results, _ = place.named(refs)
    tile = place.tile
    model, number = unravelled(lax.axis_index("block"), place.blocks)
    rows = _added(place, operands, model, number)
    if "sum" in results:
        dtype = place.spec.sum_dtype
        assert dtype is not None
        rounded_sum = rows.astype(dtype)
        store(tile.at(results["sum"], model, number), rounded_sum)
        rows = rounded_sum.astype(jnp.float32)
    centred, divides, _ = _moments(place, rows)
    # Read when the moments are known: the registers of wide rows would not hold all at once.
    scale, shift = (_of_columns(place, operands, name, model) for name in ("scale", "shift"))
    result = centred * tile.across(np.float32(place.spec.gain) / divides)
    result = result if scale is None else result * scale
    result = result if shift is None else result + shift
    store(tile.at(results["result"], model, number), result.astype(place.spec.result_dtype))


def _backward(place: _Place, *refs: Ref) -> None:
    """Each block goes through its tiles, and then writes its sums."""
    operands, results, sums = place.named(refs)
    tile = place.tile
    model, block = unravelled(lax.axis_index("block"), place.blocks)
    for total in sums.values():
        store(total, mosaic().layout_cast(jnp.zeros(tile.shape, jnp.float32), tile.layout))

    @pl.loop(0, lax.div(place.tiles - block + (place.blocks - 1), jnp.int32(place.blocks)))
    def visit(i: Array) -> None:
        _visit(place, operands, results, sums, model, block + i * place.blocks)

    for name, total in sums.items():
        parts = [total.at[warp] for warp in range(WARPS)] if tile.narrow else [total]
        found = reduce(jnp.add, [tile.loaded(part, tile.of_columns) for part in parts])
        store(results[name].at[model, block], found)


def _visit(
    place: _Place,
    operands: Mapping[str, Ref],
    results: Mapping[str, Ref],
    sums: Mapping[str, Ref],
    model: Array,
    number: Array,
) -> None:
    """Of y = g x / d, where d^2 = f mean(x^2): dx = g (dy / d - f x mean(dy x) / d^3), whose second term has a factor
    behind epsilon; less its mean where x is centred."""
    tile = place.tile
    x = _added(place, operands, model, number)
    cotangent = tile.loaded(tile.at(operands["cotangent"], model, number), tile.layout)
    centred, divides, passed = _moments(place, x)
    inverse = tile.across(1 / divides)
    normal = centred * inverse
    gain = np.float32(place.spec.gain)
    for name, total in sums.items():
        of_scale = cotangent * normal if place.spec.gain == 1 else cotangent * normal * gain
        store(total, tile.loaded(total, tile.layout) + (of_scale if name == "scale" else cotangent))
    if "x" not in results:
        return
    scale = _of_columns(place, operands, "scale", model)
    of_normal = cotangent if scale is None else cotangent * scale
    # Divided before it is summed, it is finite wherever what it is taken from is.
    along = jnp.sum(of_normal * (normal * np.float32(place.spec.factor / place.spec.columns)), axis=-1)
    gradient = of_normal - normal * tile.across(along if passed is None else along * passed)
    if place.kernels.centred:
        gradient = gradient - tile.across(_mean(place, of_normal))
    gradient = gradient * (inverse if place.spec.gain == 1 else inverse * gain)
    if "of_sum" in operands:
        gradient = gradient + tile.loaded(tile.at(operands["of_sum"], model, number), tile.layout)
    store(tile.at(results["x"], model, number), gradient.astype(place.kernels.added_dtype(place.spec)))
