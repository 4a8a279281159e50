"""Declares the operation RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from autopallas.kernels.row_norms import RowNormSpec, declared_norm, normalised

__all__ = ["OPERATION", "RmsNormSpec", "reference"]


@dataclass(frozen=True)
class RmsNormSpec(RowNormSpec):
    """One normalisation of B times M rows of N columns, rounded at the end:
    ``gain * x / sqrt(factor * mean(x**2) + epsilon) * scale + shift``.

    Operands, rows that are turned, and everything else: :class:`RowNormSpec`.
    """

    gain: float = 1.0
    """A number by which the rows are multiplied too."""
    factor: float = 1.0
    """What the mean is multiplied by: N for the sum of the squares, as where rows are divided by their norm."""

    def __str__(self) -> str:
        return self.described("rms_norm")


reference = partial(normalised, centred=False)
"""Computes the formula of :class:`RmsNormSpec`."""

OPERATION = declared_norm("rms_norm", reference, RmsNormSpec)
