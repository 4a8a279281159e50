"""What the kernels of normalisations of rows by their moments share on all devices: both directions of a site, as a
kernel sees it.

Rows that are turned are so by tables, which have a number for each turned column: the cosine, and the sine with its
sign.  The other column of a pair is multiplied by that.

Letters: B models, M rows, N columns; of rows that are turned P positions, H neighbouring rows of each, and A pairs of
columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import Dtype
from autopallas.kernels.row_norms import RowNormSpec, normalised
from autopallas.numerics.classes import Numerics
from autopallas.sites.index_notation import summed_to
from autopallas.sites.spec import BlockSizes

__all__ = ["APART", "GAINS", "NUMERICS", "OF_ROWS", "TILES", "TURNING", "Arrays", "MomentsKernels", "Rows", "divisor"]

NUMERICS: Numerics = "tolerance"
"""How the results relate to the original's."""
GAINS: tuple[str, ...] = ()
"""Nothing that a measurement by itself would show: alone they move less than XLA does, but XLA computes norms within
the operations before and after them, which a kernel keeps apart."""
TILES = False
"""The kernels take as many rows at a time as fit into their memory."""
TURNING = "cos", "sin"
"""Operands of which kernels read tables."""
OF_ROWS = "x", "residual", "cotangent", "of_sum", "result", "sum"
"""Arrays of the size [rows, columns]; others but tables hold one number per column.  "of_sum" is the
cotangent of the sum."""
APART = "its columns lie apart: a kernel would be given a transposed copy of the rows, and its result transposed back"
"""Why kernels take no rows whose neighbouring columns are no neighbours in memory."""

Array: TypeAlias = jax.Array
Arrays: TypeAlias = Mapping[str, jax.Array]


class Rows(NamedTuple):
    """A site as a kernel sees it: models that share what they have per column have their rows side by side.

    Attributes:
      spec: what is computed.
      models, rows: how many there are; of each model.
      given: the rows that are normalised, [models, rows, N]: "x", and "residual" where that is still to be added.
      shared: what there is per column, [B|1, 1, N|1] each, in float32.
      groups: how many of the models have each of these, one after the other.
      heads: how many neighbouring rows have the same row of the tables.
      tables: "cos" and "sin" where rows are turned, [B|1, rows / heads, 2 A].
    """

    spec: RowNormSpec
    models: int
    rows: int
    given: Arrays
    shared: Arrays
    groups: int = 1
    heads: int = 1
    tables: Arrays = MappingProxyType({})

    @staticmethod
    def of(spec: RowNormSpec, operands: Arrays) -> Rows:
        """Returns the site of a kernel; where the operands have the sum, as in a backward, it is what is read as x."""
        of_columns = {name: array for name, array in operands.items() if name not in (*OF_ROWS, *TURNING)}
        shared = {name: array[:, None].astype(jnp.float32) for name, array in of_columns.items()}
        models, rows = spec.batch, spec.rows
        if not spec.turns and all(array.shape[0] == 1 for array in shared.values()):
            models, rows = 1, models * rows
        given = {name: operands[name] for name in ("x", "residual") if name in operands}
        given = given if "sum" not in operands else {"x": operands["sum"]}
        found = Rows(spec, models, rows, {}, shared)
        found = found._turned(operands["cos"], operands["sin"]) if spec.turns else found
        return found._replace(given={name: found.flat(array) for name, array in given.items()})

    def _turned(self, cos: Array, sin: Array) -> Rows:
        """Returns the site with its tables: each time that all positions come counts as a model of its own."""
        spec = self.spec
        positions, heads = spec.positions, spec.heads
        groups = spec.rows // (positions * heads)
        if max(cos.shape[2], sin.shape[2]) > 1:  # each row has numbers of its own
            positions, heads = positions * heads, 1
        own = spec.positions, positions // spec.positions, 2, spec.angles
        signs = np.asarray(spec.sine_signs)[:, None]
        tables = {}
        for name, array in (("cos", cos), ("sin", sin)):
            table = jnp.broadcast_to(array, (len(array), *own))
            table = table * signs.astype(table.dtype) if name == "sin" else table
            table = table.swapaxes(-1, -2) if spec.neighbours else table
            tables[name] = table.reshape(len(array), positions, -1)
        models, rows = self.models * groups, positions * heads
        return self._replace(models=models, rows=rows, groups=groups, heads=heads, tables=tables)

    def flat(self, array: Array) -> Array:
        """[B|1, M|1, N|1] as [models, rows, N]."""
        spec = self.spec
        return jnp.broadcast_to(array, (spec.batch, spec.rows, spec.columns)).reshape(self.models, self.rows, -1)

    def gradients(self, operands: Arrays, found: Arrays) -> dict[str, Array]:
        """Cotangents as a site takes them, from [models, rows, N] for what is of rows and [models, N] for other
        operands."""
        return {
            name: summed_to(self._whole(name, x).astype(jnp.float32), operands[name].shape).astype(operands[name].dtype)
            for name, x in found.items()
        }

    def results(self, found: Sequence[Array]) -> Array | tuple[Array, ...]:
        """Results as a site gives them, from [models, rows, N]."""
        result, *further = (self._whole("result", x) for x in found)
        return (result, *further) if further else result

    def _whole(self, name: str, array: Array) -> Array:
        spec = self.spec
        if name in OF_ROWS:
            return array.reshape(spec.batch, spec.rows, spec.columns)
        return array.reshape(-1, self.groups, array.shape[1]).sum(1) if self.groups > 1 else array


def divisor(spec: RowNormSpec, square: Array) -> tuple[Array, Array | None]:
    """Returns what divides rows whose moment is given, and the factor that epsilon gives to the part of the gradient
    that passes through it, or None: where epsilon is added to the moment, that part is as it would be without."""
    epsilon = np.float32(spec.epsilon)
    before = lax.sqrt(square) if spec.outside else square
    if not spec.floor:
        after = before + epsilon
        return (after, after / before) if spec.outside else (lax.sqrt(after), None)
    after = jnp.where(before <= epsilon, epsilon, before)  # a NaN stays one
    # A maximum of equal numbers has half of its gradient from each.
    passed = jnp.where(before > epsilon, np.float32(1), jnp.where(before == epsilon, np.float32(0.5), np.float32(0)))
    return (after, passed * after / before) if spec.outside else (lax.sqrt(after), passed)


@dataclass(frozen=True)
class MomentsKernels(ABC):
    """The kernels of one normalisation on one kind of device, with the functions of an implementation's module.

    Attributes:
      name: of the operation.
      centred: whether rows are taken from their means first.
    """

    name: str
    centred: bool

    @abstractmethod
    def call(self, site: Rows, direction: str, more: Arrays, written: Mapping[str, Dtype]) -> list[Array]:
        """Runs the kernel of a direction.

        Args:
          site: what is computed.
          direction: "forward" or "backward".
          more: further arrays [models, rows, N].
          written: names and dtypes of the results: the result's, or of the operands whose gradients they are.

        Returns:
          Arrays [models, rows, N], or [models, N] for what there is per column.
        """

    def forward(self, spec: RowNormSpec, block_sizes: BlockSizes, operands: Arrays) -> Array | tuple[Array, ...]:
        """Returns the result, [B, M, N], or a tuple of it and the sum."""
        written = {"result": spec.result_dtype}
        if spec.sum_dtype is not None:
            written["sum"] = spec.sum_dtype
        rows = Rows.of(spec, operands)
        return rows.results(self.call(rows, "forward", {}, written))

    def backward(
        self,
        spec: RowNormSpec,
        block_sizes: BlockSizes,
        operands: Arrays,
        cotangent: Array | tuple[Array, ...],
        wanted: frozenset[str],
    ) -> dict[str, Array]:
        """Returns the cotangents of the operands named in ``wanted``; that of x is the residual's too, and those of
        cosines and sines, which few programs want, are the reference's."""
        rows = Rows.of(spec, operands)
        turning = {name: operands[name] for name in TURNING if name in wanted}
        wanted -= turning.keys()
        names = ("cotangent", "of_sum") if isinstance(cotangent, tuple) else ("cotangent",)
        given = cotangent if isinstance(cotangent, tuple) else (cotangent,)
        more = {name: rows.flat(array) for name, array in zip(names, given, strict=True)}
        added = [name for name in ("x", "residual") if name in wanted]
        written: dict[str, Dtype] = {"x": self.added_dtype(spec)} if added else {}
        written |= {name: np.dtype(np.float32) for name in operands if name in wanted and name not in OF_ROWS}
        found = dict(zip(written, self.call(rows, "backward", more, written), strict=True)) if written else {}
        of_rows = dict.fromkeys(added, found.pop("x")) if added else {}
        gradients = rows.gradients(operands, of_rows | found)
        if turning:
            others = {name: array for name, array in operands.items() if name not in (*turning, "sum")}
            _, pull = jax.vjp(lambda own: normalised(spec, **others, **own, centred=self.centred), turning)
            gradients |= pull(cotangent)[0]
        return gradients

    @staticmethod
    def added_dtype(spec: RowNormSpec) -> Dtype:
        """Returns the dtype of the one gradient that x and the residual have."""
        dtypes = (spec.x_dtype, spec.residual_dtype)
        return max((dtype for dtype in dtypes if dtype is not None), key=lambda dtype: dtype.itemsize)
