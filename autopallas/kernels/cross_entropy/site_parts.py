"""The parts that a cross-entropy's site consists of: its results, and heads among its side inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from autopallas.compat import Dtype
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.index_notation import Labels, Operand, Reader, Source, View

__all__ = ["HeadSource", "Result", "SideSource"]


@dataclass(frozen=True, slots=True)
class Result:
    """One result of the site.

    Attributes:
      source: a program of the side inputs and statistics (as those of ``CrossEntropySpec.finish``), which gives one
        number per row; or the position of a product.
      view: its dimensions.  What it lacks of the labels of rows, and of the batch, is summed over.
      dtype: its dtype.
    """

    source: ElementwiseProgram | int
    view: View
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class HeadSource(Reader):
    """A side input that is the logits of a further head.

    Attributes:
      rows, weight: how activations and weight are read from the operands.
      hidden_labels: the labels over which they are multiplied.
      dtype: that of the logits.
    """

    rows: Operand
    weight: Operand
    hidden_labels: Labels
    dtype: Dtype

    @property
    def labels(self) -> Labels:
        """Those of the logits."""
        return tuple(a for a in (*self.rows.labels, *self.weight.labels) if a not in self.hidden_labels)


SideSource: TypeAlias = Source | HeadSource
"""Where a side input of the programs comes from."""
