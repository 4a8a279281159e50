"""The GPU kernels of normalisations of rows by their moments: each reads its rows once, straight into registers.

A block is one warpgroup and has whole rows, whose columns its 128 threads share: they load 16 bytes at a time where the
number of columns allows it, and the sums of a row go through a few words of shared memory.  Main memory limits these
kernels: several blocks on a multiprocessor, and several narrow rows in a block, keep its loads under way.

The forward keeps nothing for the backward, which computes the moments again from the rows that it reads.  Gradients of
what all rows share are summed in shared memory by each block for its own rows, and XLA adds up the blocks.

Letters: B models, M rows, N columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.compat import Dtype
from autopallas.kernels.gpu import array_bytes, call, mosaic, processors, reason_against, store, unravelled
from autopallas.kernels.refs import Ref
from autopallas.kernels.row_moments import OF_ROWS, Arrays, MomentsSpec, Rows
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import BlockSizes

__all__ = ["MomentsKernels"]

Array: TypeAlias = jax.Array

_DTYPES = ("bfloat16", "float16", "float32")
_THREADS, _WARP = 128, 32
_LOAD = 16
"""Bytes that a thread loads at once, at most."""
_MOST_COLUMNS = 8192
"""Of a row, of which a thread of the backward then has 64 numbers of x and as many of the cotangent."""
_TOGETHER = 4096
"""Numbers in the rows that a block loads together."""
_NARROW = 2048
"""Columns up to which a multiprocessor has registers for four blocks of the backward, and otherwise for two."""


@dataclass(frozen=True)
class MomentsKernels:
    """The kernels of one normalisation, with the functions of an implementation's module.

    Attributes:
      name: of the operation.
      centred: whether rows are taken from their means first.
    """

    name: str
    centred: bool

    def supports(self, spec: MomentsSpec, device: Device) -> Supported | Unsupported:
        """bfloat16, float16 and float32 on Hopper GPUs, and rows that 128 threads can share and hold."""
        if (answer := reason_against(device)) is not None:
            return answer
        for dtype in spec.dtypes():
            if dtype.name not in _DTYPES:
                return Unsupported(f"the GPU kernels of norms take {', '.join(_DTYPES)}, not {dtype}")
        if spec.columns % _THREADS:
            return Unsupported(f"rows of {spec.columns} columns cannot be shared evenly by {_THREADS} threads")
        if spec.columns > _MOST_COLUMNS:
            return Unsupported(f"{_THREADS} threads do not hold rows of {spec.columns} columns in their registers")
        return Supported()

    def forward(self, spec: MomentsSpec, block_sizes: BlockSizes, operands: Arrays) -> Array:
        """Returns the result, [B, M, N]."""
        (found,) = _call(self, Rows.of(spec, operands), "forward", {}, {"result": spec.result_dtype})
        return found.reshape(spec.batch, spec.rows, spec.columns)

    def backward(
        self,
        spec: MomentsSpec,
        block_sizes: BlockSizes,
        operands: Arrays,
        cotangent: Array,
        wanted: frozenset[str],
    ) -> dict[str, Array]:
        """Returns the cotangents of the operands named in ``wanted``."""
        rows = Rows.of(spec, operands)
        written = {name: spec.x_dtype if name == "x" else np.dtype(np.float32) for name in operands if name in wanted}
        results = _call(self, rows, "backward", {"cotangent": rows.flat(cotangent)}, written)
        return rows.gradients(operands, dict(zip(written, results, strict=True)))


def _call(
    kernels: MomentsKernels, site: Rows, direction: str, more: Arrays, written: Mapping[str, Dtype]
) -> list[Array]:
    """Runs the kernel of a direction.

    Args:
      kernels, site: what is computed.
      direction: "forward" or "backward".
      more: further arrays [models, rows, N].
      written: names and dtypes of the results: the result's, or of the operands whose gradients they are.

    Returns:
      Arrays [models, rows, N], or [models, N] for what there is per column.
    """
    columns = site.spec.columns
    shared = {name: jnp.broadcast_to(x[:, 0], (len(x), columns)) for name, x in site.shared.items()}
    read = {"x": site.x, **more, **shared}
    together = next(n for n in (4, 2, 1) if n == 1 or (site.rows % n == 0 and n * columns <= _TOGETHER))
    tiles = site.rows // together
    # A block of the forward has one tile.  Those of the backward stay, since each leaves sums of its own.
    resident = processors(Device.current()) * (4 if columns <= _NARROW else 2)
    blocks = tiles if direction == "forward" else min(tiles, -(-resident // site.models))
    sums = [name for name in written if name not in OF_ROWS]
    shapes = [
        jax.ShapeDtypeStruct((site.models, site.rows if name in OF_ROWS else blocks, columns), dtype)
        for name, dtype in written.items()
    ]
    place = _Place(kernels, site.spec, tuple(read), tuple(written), tiles, together, blocks)
    found = call(
        partial(_forward if direction == "forward" else _backward, place),
        name=f"autopallas_{kernels.name}_{direction}",
        grid={"block": site.models * blocks},
        out_type=shapes,
        scratch=[mosaic().SMEM((columns,), jnp.float32) for _ in sums],
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
      tiles: of the rows of a model.
      together: rows of a tile.
      blocks: of a model.
    """

    kernels: MomentsKernels
    spec: MomentsSpec
    read: Sequence[str]
    written: Sequence[str]
    tiles: int
    together: int
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

    def rows(self, tile: Array) -> Iterator[Array]:
        """The rows of a tile."""
        return (tile * self.together + i for i in range(self.together))


def _layout(columns: int, dtype: Dtype) -> object:
    """How the 128 threads share a row: each has a few neighbouring columns at a time."""
    plgpu, each = mosaic(), 1
    while 2 * each * dtype.itemsize <= _LOAD and columns % (2 * each * _THREADS) == 0:
        each *= 2
    tiling = plgpu.Tiling(((_THREADS * each,), (_WARP * each,), (each,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _loaded(place: _Place, ref: Ref) -> Array:
    """A row [N] in float32."""
    # All arrays have the layout that suits x, so that what is computed of them need not be moved between threads.
    layout = _layout(place.spec.columns, place.spec.x_dtype)
    row: Array = mosaic().load(ref, layout=layout, optimized=False)
    return row.astype(jnp.float32)


def _of_columns(place: _Place, operands: Mapping[str, Ref], name: str, model: Array) -> Array | None:
    """What there is per column under a name [N], where there is any."""
    if name not in operands:
        return None
    ref = operands[name]
    return _loaded(place, ref.at[model if ref.shape[0] > 1 else 0])


def _mean(place: _Place, row: Array) -> Array:
    return jnp.sum(row) * np.float32(1 / place.spec.columns)


def _moments(place: _Place, row: Array) -> tuple[Array, Array, Array]:
    """The row, taken from its mean if it is to be; the root of its mean square; and what divides it."""
    spec = place.spec
    centred = row - _mean(place, row) if place.kernels.centred else row
    square = _mean(place, centred * centred)
    root = lax.sqrt(square if spec.outside else square + np.float32(spec.epsilon))
    return centred, root, root + np.float32(spec.epsilon) if spec.outside else root


def _forward(place: _Place, *refs: Ref) -> None:
    operands, results, _ = place.named(refs)
    model, tile = unravelled(lax.axis_index("block"), place.blocks)
    rows = list(place.rows(tile))
    loaded = [_loaded(place, operands["x"].at[model, row]) for row in rows]
    moments = [_moments(place, x) for x in loaded]
    # Read when the row's moments are known: the registers of wide rows would not hold all at once.
    scale, shift = (_of_columns(place, operands, name, model) for name in ("scale", "shift"))
    for row, (centred, _, divisor) in zip(rows, moments, strict=True):
        result = centred * (1 / divisor)
        result = result if scale is None else result * scale
        result = result if shift is None else result + shift
        store(results["result"].at[model, row], result.astype(place.spec.result_dtype))


def _backward(place: _Place, *refs: Ref) -> None:
    """Each block goes through its tiles, and then writes its sums."""
    operands, results, sums = place.named(refs)
    model, block = unravelled(lax.axis_index("block"), place.blocks)
    layout = _layout(place.spec.columns, place.spec.x_dtype)
    for total in sums.values():
        store(total, mosaic().layout_cast(jnp.zeros((place.spec.columns,), jnp.float32), layout))

    @pl.loop(0, lax.div(place.tiles - block + (place.blocks - 1), jnp.int32(place.blocks)))
    def visit(i: Array) -> None:
        _visit(place, operands, results, sums, model, block + i * place.blocks)

    for name, total in sums.items():
        store(results[name].at[model, block], _loaded(place, total))


def _visit(
    place: _Place,
    operands: Mapping[str, Ref],
    results: Mapping[str, Ref],
    sums: Mapping[str, Ref],
    model: Array,
    tile: Array,
) -> None:
    """Of y = x / d, where d = root + c: dx = dy / d - x mean(dy x) / (d^2 root), less its mean where x is centred."""
    rows = list(place.rows(tile))
    loaded = [tuple(_loaded(place, operands[name].at[model, row]) for name in ("x", "cotangent")) for row in rows]
    found, parts = list[tuple[Array, Array, Array, Array | None]](), dict[str, Array]()
    for x, cotangent in loaded:
        centred, root, divisor = _moments(place, x)
        inverse = 1 / divisor
        normal = centred * inverse
        found.append((cotangent, normal, inverse, divisor / root if place.spec.outside else None))
        for name in sums:
            part = cotangent * normal if name == "scale" else cotangent
            parts[name] = parts[name] + part if name in parts else part
    for name, part in parts.items():
        store(sums[name], _loaded(place, sums[name]) + part)
    if "x" not in results:
        return
    scale = _of_columns(place, operands, "scale", model)
    for row, (cotangent, normal, inverse, ratio) in zip(rows, found, strict=True):
        of_normal = cotangent if scale is None else cotangent * scale
        # Divided before it is summed, it is finite wherever what it is taken from is.
        along = jnp.sum(of_normal * (normal * np.float32(1 / place.spec.columns)))
        gradient = of_normal - normal * (along if ratio is None else along * ratio)
        if place.kernels.centred:
            gradient = gradient - _mean(place, of_normal)
        store(results["x"].at[model, row], (gradient * inverse).astype(place.spec.x_dtype))
