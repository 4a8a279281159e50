"""What the kernels of normalisations of rows by their moments share on all devices: both directions of a site, as a
kernel sees it.

Letters: B models, M rows, N columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.numerics.classes import Numerics
from autopallas.sites.index_notation import summed_to
from autopallas.sites.spec import BlockSizes

__all__ = ["APART", "GAINS", "NUMERICS", "OF_ROWS", "TILES", "Arrays", "MomentsKernels", "MomentsSpec", "Rows"]

NUMERICS: Numerics = "tolerance"
"""How the results relate to the original's."""
GAINS: tuple[str, ...] = ()
"""Nothing that a measurement by itself would show: alone they move less than XLA does, but XLA computes norms within
the operations before and after them, which a kernel keeps apart."""
TILES = False
"""The kernels take as many rows at a time as fit into their memory."""
OF_ROWS = "x", "residual", "cotangent", "of_sum", "result", "sum"
"""Arrays of the size [rows, columns]; others hold one number per column.  "of_sum" is the cotangent of the sum."""
APART = "its columns lie apart: a kernel would be given a transposed copy of the rows, and its result transposed back"
"""Why kernels take no rows whose neighbouring columns are no neighbours in memory."""

Array: TypeAlias = jax.Array
Arrays: TypeAlias = Mapping[str, jax.Array]


class MomentsSpec(Protocol):
    """What is asked of the spec of such a normalisation."""

    @property
    def batch(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def x_dtype(self) -> Dtype: ...
    @property
    def residual_dtype(self) -> Dtype | None: ...
    @property
    def result_dtype(self) -> Dtype: ...
    @property
    def sum_dtype(self) -> Dtype | None: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def outside(self) -> bool: ...
    @property
    def gain(self) -> float: ...
    @property
    def factor(self) -> float: ...
    @property
    def strided(self) -> bool: ...
    def dtypes(self) -> tuple[Dtype, ...]: ...


class Rows(NamedTuple):
    """A site as a kernel sees it: models that share what they have per column have their rows side by side.

    Attributes:
      spec: what is computed.
      models, rows: how many there are; of each model.
      given: the rows that are normalised, [models, rows, N]: "x", and "residual" where that is still to be added.
      shared: what there is per column, [models|1, 1, N|1] each, in float32.
    """

    spec: MomentsSpec
    models: int
    rows: int
    given: Arrays
    shared: Arrays

    @staticmethod
    def of(spec: MomentsSpec, operands: Arrays) -> Rows:
        """Returns the site of a kernel; where the operands have the sum, as in a backward, it is what is read as x."""
        shared = {name: array[:, None].astype(jnp.float32) for name, array in operands.items() if name not in OF_ROWS}
        models, rows = spec.batch, spec.rows
        if all(array.shape[0] == 1 for array in shared.values()):
            models, rows = 1, models * rows
        given = {name: operands[name] for name in ("x", "residual") if name in operands}
        given = given if "sum" not in operands else {"x": operands["sum"]}
        found = Rows(spec, models, rows, {}, shared)
        return found._replace(given={name: found.flat(array) for name, array in given.items()})

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
        return array.reshape(spec.batch, spec.rows, spec.columns) if name in OF_ROWS else array


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

    def forward(self, spec: MomentsSpec, block_sizes: BlockSizes, operands: Arrays) -> Array | tuple[Array, ...]:
        """Returns the result, [B, M, N], or a tuple of it and the sum."""
        written = {"result": spec.result_dtype}
        if spec.sum_dtype is not None:
            written["sum"] = spec.sum_dtype
        rows = Rows.of(spec, operands)
        return rows.results(self.call(rows, "forward", {}, written))

    def backward(
        self,
        spec: MomentsSpec,
        block_sizes: BlockSizes,
        operands: Arrays,
        cotangent: Array | tuple[Array, ...],
        wanted: frozenset[str],
    ) -> dict[str, Array]:
        """Returns the cotangents of the operands named in ``wanted``; that of x is the residual's too."""
        rows = Rows.of(spec, operands)
        names = ("cotangent", "of_sum") if isinstance(cotangent, tuple) else ("cotangent",)
        given = cotangent if isinstance(cotangent, tuple) else (cotangent,)
        more = {name: rows.flat(array) for name, array in zip(names, given, strict=True)}
        added = [name for name in ("x", "residual") if name in wanted]
        written: dict[str, Dtype] = {"x": self.added_dtype(spec)} if added else {}
        written |= {name: np.dtype(np.float32) for name in operands if name in wanted and name not in OF_ROWS}
        found = dict(zip(written, self.call(rows, "backward", more, written), strict=True))
        of_rows = dict.fromkeys(added, found.pop("x")) if added else {}
        return rows.gradients(operands, of_rows | found)

    @staticmethod
    def added_dtype(spec: MomentsSpec) -> Dtype:
        """Returns the dtype of the one gradient that x and the residual have."""
        dtypes = (spec.x_dtype, spec.residual_dtype)
        return max((dtype for dtype in dtypes if dtype is not None), key=lambda dtype: dtype.itemsize)
