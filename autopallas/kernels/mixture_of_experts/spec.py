"""Describes a mixture of experts as far as implementations and tables know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopallas.compat import Dtype
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.sites.spec import plain_fields

__all__ = ["ExpertsSpec"]


@dataclass(frozen=True)
class ExpertsSpec:
    """Description of a mixture for implementations and tables: its largest product, and how few experts a token has.

    ``slots`` is the number of slots of each expert in the original; 0 where every expert computes every token there.
    Products bring tokens to slots, or where they are ``scattered``, scatters and gathers, which cost less.
    """

    tokens: int
    choices: int
    groups: int
    contracting: int
    columns: int
    widest_dtype: Dtype
    products: int
    assume_finite: bool = True
    slots: int = 0
    scattered: bool = False
    use: Literal["experts"] = "experts"

    @property
    def largest_product(self) -> GroupedMatmulSpec:
        """The grouped matmul that computes the largest product, as far as it is known."""
        dtype = self.widest_dtype
        return GroupedMatmulSpec(
            use="forward",
            batch=1,
            rows=self.rows,
            groups=self.groups,
            contracting=self.contracting,
            columns=self.columns,
            first_dtype=dtype,
            second_dtype=dtype,
            result_dtype=dtype,
            assume_finite=self.assume_finite,
        )

    @property
    def rows(self) -> int:
        """Number of rows of all grouped matmuls."""
        return self.tokens * self.choices

    @property
    def rows_per_group(self) -> int:
        """Mean number of rows per group, at least 1."""
        return max(1, self.rows // self.groups)

    @property
    def first_dtype(self) -> Dtype:
        return self.widest_dtype

    @property
    def accumulation_dtype(self) -> Dtype:
        """float32, or float64 where anything is float64."""
        return np.dtype(np.float64 if self.widest_dtype == np.float64 else np.float32)

    @property
    def original_form(self) -> str:
        """How the original computes: densely (every expert computes every token), or how it brings tokens to slots."""
        return "scattered slots" if self.scattered else "slots" if self.slots else "dense"

    @property
    def original_times_rows(self) -> int:
        """How many times as many rows a dense original computes."""
        return self.groups // self.choices

    def assumptions(self) -> tuple[str, ...]:
        """Returns what has to hold for the result to be the original's, in words."""
        if self.scattered:
            return ("what experts compute for slots of which nothing is read is finite (assume_finite)",)
        if self.slots:
            return ("tokens, and what experts compute for them and for empty slots, are finite (assume_finite)",)
        return ("what experts compute for tokens that they are not given is finite (assume_finite)",)

    def programs(self) -> str:
        """Returns nothing, since the site holds the programs."""
        return ""

    def __str__(self) -> str:
        form = self.original_form
        original = f"experts with {self.slots} {form}" if self.slots else f"{form} experts"
        return (
            f"grouped_matmul of {original} T={self.tokens} k={self.choices} K={self.contracting} N={self.columns} "
            f"G={self.groups} {self.widest_dtype}, {self.products} products"
        )

    def to_dict(self) -> dict[str, object]:
        """Returns the fields as plain data: numbers and strings."""
        return plain_fields(self)
