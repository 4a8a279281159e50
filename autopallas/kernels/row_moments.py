"""What the kernels of normalisations of rows by their moments share on all devices: both directions of a site, as a
kernel sees it.

Letters: B models, M rows, N columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.numerics.classes import Numerics
from autopallas.sites.index_notation import summed_to
from autopallas.sites.spec import BlockSizes

__all__ = ["GAINS", "NUMERICS", "OF_ROWS", "TILES", "Arrays", "MomentsKernels", "MomentsSpec", "Rows"]

NUMERICS: Numerics = "tolerance"
"""How the results relate to the original's."""
GAINS: tuple[str, ...] = ()
"""Nothing that a measurement by itself would show: alone they move less than XLA does, but XLA computes norms within
the operations before and after them, which a kernel keeps apart."""
TILES = False
"""The kernels take as many rows at a time as fit into their memory."""
OF_ROWS = "x", "cotangent", "result"
"""Arrays of the size [rows, columns]; others hold one number per column."""

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
    def result_dtype(self) -> Dtype: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def outside(self) -> bool: ...
    def dtypes(self) -> tuple[Dtype, ...]: ...


class Rows(NamedTuple):
    """A site as a kernel sees it: models that share what they have per column have their rows side by side.

    Attributes:
      spec: what is computed.
      models, rows: how many there are; of each model.
      x: [models, rows, N].
      shared: what there is per column, [models|1, 1, N|1] each, in float32.
    """

    spec: MomentsSpec
    models: int
    rows: int
    x: Array
    shared: Arrays

    @staticmethod
    def of(spec: MomentsSpec, operands: Arrays) -> Rows:
        shared = {name: array[:, None].astype(jnp.float32) for name, array in operands.items() if name != "x"}
        models, rows = spec.batch, spec.rows
        if all(array.shape[0] == 1 for array in shared.values()):
            models, rows = 1, models * rows
        found = Rows(spec, models, rows, operands["x"], shared)
        return found._replace(x=found.flat(operands["x"]))

    def flat(self, array: Array) -> Array:
        """[B|1, M|1, N|1] as [models, rows, N]."""
        spec = self.spec
        return jnp.broadcast_to(array, (spec.batch, spec.rows, spec.columns)).reshape(self.models, self.rows, -1)

    def gradients(self, operands: Arrays, found: Arrays) -> dict[str, Array]:
        """Cotangents as a site takes them, from [models, rows, N] for x and [models, N] for the other operands."""
        spec, given = self.spec, dict(found)
        if "x" in given:
            given["x"] = given["x"].reshape(spec.batch, spec.rows, spec.columns)
        return {
            name: summed_to(x.astype(jnp.float32), operands[name].shape).astype(operands[name].dtype)
            for name, x in given.items()
        }


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

    def forward(self, spec: MomentsSpec, block_sizes: BlockSizes, operands: Arrays) -> Array:
        """Returns the result, [B, M, N]."""
        (found,) = self.call(Rows.of(spec, operands), "forward", {}, {"result": spec.result_dtype})
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
        results = self.call(rows, "backward", {"cotangent": rows.flat(cotangent)}, written)
        return rows.gradients(operands, dict(zip(written, results, strict=True)))
