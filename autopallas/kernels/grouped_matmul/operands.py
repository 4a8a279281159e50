"""What the implementations of grouped matmul take and give: their contract, which all of them have.

Each offers, beside ``supports(spec, device)``::

    forward(spec, block_sizes, operands) -> Array
    backward(spec, block_sizes, operands, cotangent, wanted) -> Gradients

``forward`` gives out [B, M, N], dlhs [B, M, K] or drhs [B, G, K, N], as the spec's ``use`` says, in the spec's
``output_dtype``.  It takes a spec with an epilogue if the implementation has ``EPILOGUES = True``.

``backward`` is of a spec without an epilogue, and of operands that have all of the batch, but for the group sizes.  It
needs nothing that the forward has saved: each gradient is one of the other two uses.  ``cotangent`` has the shape and
the dtype of the result; ``wanted`` says, of (first, second), whether the gradient is asked for.

Letters: B batch, M rows, K and N the weights' two sides, G groups.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax

__all__ = ["Gradients", "Operands"]

Array: TypeAlias = jax.Array


class Operands(NamedTuple):
    """These are what a grouped matmul is computed from.  One whose batch axis has size 1 is shared by all examples.

    (``first``, ``second``) are (lhs, rhs), or (dout, rhs) for "dlhs", or (lhs, dout) for "drhs".

    Attributes:
      first: lhs [B|1, M, K] or dout [B|1, M, N], of the spec's ``first_dtype``.
      second: rhs [B|1, G, K, N] or dout [B|1, M, N], of its ``second_dtype``.
      group_sizes: [B|1, G], integer.
      scales: those of weights that are stored in 8 bits, [B|1, ...] each, with the spec's ``scales`` behind.
    """

    first: Array
    second: Array
    group_sizes: Array
    scales: tuple[Array, ...] = ()


class Gradients(NamedTuple):
    """These are what a backward gives: the gradients of the operands in their dtypes, None where one is not wanted."""

    first: Array | None
    second: Array | None
