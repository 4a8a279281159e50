"""What one grouped matmul is: the description that patterns produce and kernels consume.

Letters, in this package: B batch, M rows, K and N the weights' two sides, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.sites.elementwise import ElementwiseProgram, Score
from autopallas.sites.spec import SiteSpec, plain_fields

__all__ = ["GroupedMatmulSpec", "ProductSpec", "Use"]


Use: TypeAlias = Literal["forward", "dlhs", "drhs"]
"""Which of the three arrays of a grouped matmul is computed from the other two.  Their names are those of its parts in
a train step; each may stand alone in a program."""


class ProductSpec(SiteSpec, Protocol):
    """What block sizes and tables ask of a spec: that of a grouped matmul, or of a part of the operation that computes
    several products, the largest of which it describes."""

    @property
    def use(self) -> str:
        """A :data:`Use`, or what a part has in its place."""

    @property
    def rows(self) -> int: ...

    @property
    def groups(self) -> int: ...

    @property
    def rows_per_group(self) -> int: ...

    @property
    def contracting(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def first_dtype(self) -> Dtype: ...

    @property
    def accumulation_dtype(self) -> Dtype: ...

    @property
    def original_form(self) -> str:
        """What kind of original a table's row was measured against; empty for ``lax.ragged_dot``."""

    @property
    def original_times_rows(self) -> int:
        """How many times as many rows the original computes, which decides what is gained."""


@dataclass(frozen=True)
class GroupedMatmulSpec:
    """One grouped matmul, in canonical shapes.

    Group g owns the rows ``start[g] <= m < end[g]`` with ``end = cumsum(group_sizes)``, ``start = end - group_sizes``,
    as far as there are such rows; rows that no group owns are zero, or contribute nothing::

        forward   out[m]  = sum over the groups g of row m of   lhs[m] rhs[g]          [B, M, N]
        dlhs      dlhs[m] = sum over the groups g of row m of   dout[m] rhs[g]^T       [B, M, K]
        drhs      drhs[g] = sum over the rows m of group g of   lhs[m]^T dout[m]       [B, G, K, N]

    The arrays that it is computed from are those of :class:`autopallas.kernels.grouped_matmul.operands.Operands`.
    """

    use: Use
    batch: int
    rows: int
    groups: int
    contracting: int
    """K."""
    columns: int
    """N."""
    first_dtype: Dtype
    second_dtype: Dtype
    result_dtype: Dtype
    precision: str | None = None
    """``lax.Precision`` of the original's dot: None (default), "HIGH" or "HIGHEST"."""
    assume_finite: bool = True
    """Whether a row need not be multiplied with the weights of groups that do not own it: ``lax.ragged_dot`` does on
    some platforms, with zeros in the row's place, so that an inf or NaN in one group's weights reaches every row."""
    epilogue: ElementwiseProgram | None = None
    """What becomes of each element of the result, such as an activation: a program over the product, its score, in
    ``result_dtype``.  Of "forward" and "dlhs" alone."""
    widening: ElementwiseProgram | None = None
    """What becomes of each weight before it is multiplied, in ``second_dtype``, where the program stores weights in 8
    bits: a program over the stored number, its score, and scales, its side inputs.  Of "forward" and "dlhs" alone."""
    scales: tuple[tuple[int, int, int], ...] = ()
    """Of each scale, how many numbers it has along (G, K, N): 1, or one for each of as many equal blocks."""

    @property
    def output_dtype(self) -> Dtype:
        """Of what an implementation gives: the product's, or the epilogue's."""
        return self.result_dtype if self.epilogue is None else self.epilogue.dtype

    @property
    def product(self) -> GroupedMatmulSpec:
        """The same without its epilogue."""
        return replace(self, epilogue=None)

    @property
    def widened(self) -> GroupedMatmulSpec:
        """The same of weights as they are multiplied."""
        return replace(self, widening=None, scales=())

    @property
    def stored_dtype(self) -> Dtype:
        """Of the second operand in memory."""
        if self.widening is None:
            return self.second_dtype
        return next(i.dtype for i in self.widening.inputs if isinstance(i, Score))

    def varying_side(self, numbers: tuple[int, int, int]) -> int | None:
        """Whether a scale of so many numbers varies from weight to weight along K (0) or N (1), or None."""
        _, k, n = numbers
        return 0 if 1 < k == self.contracting else 1 if 1 < n == self.columns else None

    def _repeated(self, scale: jax.Array) -> jax.Array:
        """A scale whose blocks along K or N are repeated for each weight of theirs."""
        for axis, size in ((2, self.contracting), (3, self.columns)):
            if 1 < scale.shape[axis] < size:
                scale = jnp.repeat(scale, size // scale.shape[axis], axis, total_repeat_length=size)
        return scale

    def widen(self, weights: jax.Array, scales: Sequence[jax.Array]) -> jax.Array:
        """Returns the weights [B|1, G, K, N] as they are multiplied, as the program computes them from those that it
        stores."""
        if self.widening is None:
            return weights
        found = self.widening.evaluate(weights, None, None, [self._repeated(scale) for scale in scales])
        return jnp.broadcast_to(found, jnp.broadcast_shapes(found.shape, weights.shape))

    def finished(self, product: jax.Array) -> jax.Array:
        """Returns the epilogue of what :attr:`product` gives, or of a part of it."""
        if self.epilogue is None:
            return product
        # A program of constants alone has no shape of its own.
        return jnp.broadcast_to(self.epilogue.evaluate(product, None, None, ()), product.shape)

    @property
    def accumulation_dtype(self) -> Dtype:
        """float32, or float64 where anything is float64."""
        double = np.dtype(np.float64)
        wide = double in (self.first_dtype, self.second_dtype, self.result_dtype)
        return double if wide else np.dtype(np.float32)

    @property
    def widest_dtype(self) -> Dtype:
        """The dtype under which tables file this grouped matmul."""
        return max((self.first_dtype, self.second_dtype), key=lambda d: d.itemsize)

    @property
    def rows_per_group(self) -> int:
        """The mean, at least 1."""
        return max(1, self.rows // self.groups)

    @property
    def original_form(self) -> str:
        """Empty: ``lax.ragged_dot``."""
        return ""

    @property
    def original_times_rows(self) -> int:
        """As many as there are groups: each meets every row."""
        return self.groups

    def first_shape(self) -> tuple[int, int]:
        return self.rows, self.columns if self.use == "dlhs" else self.contracting

    def second_shape(self) -> tuple[int, ...]:
        return (self.rows, self.columns) if self.use == "drhs" else (self.groups, self.contracting, self.columns)

    def result_shape(self) -> tuple[int, ...]:
        """Returns the result without its batch axis."""
        if self.use == "drhs":
            return self.groups, self.contracting, self.columns
        return self.rows, self.columns if self.use == "forward" else self.contracting

    def assumptions(self) -> tuple[str, ...]:
        """Returns what has to hold for the result to be the original's, in words."""
        if self.assume_finite and self.groups > 1 and self.use != "drhs":
            return ("the weights are finite, so that rows of other groups times zero are zero (assume_finite)",)
        return ()

    def programs(self) -> str:
        """Returns the widening of weights and the epilogue, one instruction a line; empty where there is none."""
        named = {"weights": self.widening, "epilogue": self.epilogue}
        return "\n".join(f"{name}: {program}" for name, program in named.items() if program is not None)

    def __str__(self) -> str:
        batch = f"B={self.batch} " if self.batch != 1 else ""
        use = "" if self.use == "forward" else f" {self.use}"
        epilogue = "" if self.epilogue is None else ", with an epilogue"
        stored = "" if self.widening is None else f", weights stored in {self.stored_dtype}"
        return (
            f"grouped_matmul{use} {batch}M={self.rows} K={self.contracting} N={self.columns} G={self.groups} "
            f"{self.widest_dtype}{stored}{epilogue}"
        )

    def to_dict(self) -> dict[str, object]:
        """Returns the fields as plain data: numbers and strings."""
        return plain_fields(self)
