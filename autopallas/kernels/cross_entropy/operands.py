"""What the implementations of cross-entropy take and give: their contract, which all of them have.

Each offers, beside ``supports(spec, device)``::

    forward(spec, block_sizes, operands) -> Results
    backward(spec, block_sizes, operands, residuals, cotangents, wanted) -> Gradients

``backward`` is of a spec without products.  ``cotangents`` has one [N] array per statistic, or None for zero;
``wanted`` says, of (x, w, *sides), whether the gradient is asked for.

Letters: N rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, cast

import jax

from autopallas.compat import PyTree
from autopallas.kernels.cross_entropy.spec import SideArray

__all__ = ["Gradients", "Operands", "Residuals", "Results"]

Array: TypeAlias = jax.Array


class Operands(NamedTuple):
    """These are what a cross-entropy is computed from, in the spec's dtypes.

    Attributes:
      x: the activations, [N, D].
      w: the weight, [V, D] (``vocabulary_major``) or [D, V].
      sides: the spec's side inputs, [N|1, V|1] each; of the logits of a further head, its (x, w).
    """

    x: Array
    w: Array
    sides: tuple[SideArray, ...] = ()

    @property
    def side_arrays(self) -> tuple[Array, ...]:
        """The side inputs are arrays, where the spec has one head."""
        return cast(tuple[Array, ...], self.sides)


class Residuals(NamedTuple):
    """This is what the forward saves for the backward.

    Attributes:
      statistics: those of :class:`Results`.
    """

    statistics: tuple[Array, ...]


class Results(NamedTuple):
    """These are what a forward gives.

    Attributes:
      statistics: the spec's, [N] each, of its accumulation dtype; that of ``argmax`` of int32.
      products: the spec's, each of its own shape and dtype (:class:`autopallas.kernels.cross_entropy.spec.Product`).
    """

    statistics: tuple[Array, ...]
    products: tuple[Array, ...] = ()

    @property
    def residuals(self) -> Residuals:
        return Residuals(self.statistics)


class Gradients(NamedTuple):
    """These are what a backward gives: the gradients of the operands, each of its operand's shape and dtype.

    One is None where it is not wanted, or the operand is of integers or booleans.  The shift in ``exp_sum`` is a
    constant; equal maxima share the cotangent of ``max``; ``argmax`` and ``ties`` have no gradient.

    Attributes:
      x, w: of the activations and the weight.
      sides: of the side inputs; of the logits of a further head, those of its (x, w).
    """

    x: Array | None
    w: Array | None
    sides: tuple[SideArray | None, ...]

    @classmethod
    def at(cls, found: Mapping[int, PyTree], sides: int) -> Gradients:
        """``found`` has gradients by their operands' positions in (x, w, *sides), and the others are None."""
        return cls(found.get(0), found.get(1), tuple(found.get(2 + n) for n in range(sides)))
