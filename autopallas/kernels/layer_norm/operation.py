"""Declares the operation LayerNorm (Ba, Kiros and Hinton, 2016, arXiv:1607.06450)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from autopallas.kernels.row_norms import RowNormSpec, declared_norm, normalised

__all__ = ["OPERATION", "LayerNormSpec", "reference"]


@dataclass(frozen=True)
class LayerNormSpec(RowNormSpec):
    """One normalisation of B times M rows of N columns, rounded at the end:
    ``(x - mean(x)) / sqrt(mean((x - mean(x))**2) + epsilon) * scale + shift``.

    Operands, rows that are turned, and everything else: :class:`RowNormSpec`.
    """

    def __str__(self) -> str:
        return self.described("layer_norm")


reference = partial(normalised, centred=True)
"""Computes the formula of :class:`LayerNormSpec`."""

OPERATION = declared_norm("layer_norm", reference, LayerNormSpec)
