"""Defines what the implementations of attention take and return: the contract that all of them keep.

Each implementation offers, besides ``supports(spec, device)``::

    forward(spec, block_sizes, operands) -> Results
    backward(spec, block_sizes, operands, residuals, cotangents) -> Gradients

Implementations without tiles ignore the block sizes.

Letters: B batch, K key heads, G query heads per key head, T query length, S key length, D head size of queries and
keys, Dv head size of values.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax

__all__ = ["Cotangents", "Gradients", "Operands", "Residuals", "Results", "ScaledRows"]

Array: TypeAlias = jax.Array


class Operands(NamedTuple):
    """Arrays from which an attention is computed, of the spec's dtypes.

    Attributes:
      query: [B, K, G, T, D].
      key: [B, K, S, D].
      value: [B, K, S, Dv].
      sides: the spec's side inputs, each [B|1, K|1, G|1, T|1, S|1].
      sink: a further logit of each row, without a key, [B|1, K|1, G|1, T|1, 1]; None if the spec has no sink.
    """

    query: Array
    key: Array
    value: Array
    sides: tuple[Array, ...] = ()
    sink: Array | None = None


class Residuals(NamedTuple):
    """Results that the forward saves for the backward.

    Attributes:
      out: the result of :class:`Results`.
      shift: a number for each row, [B, K, G, T]: the logsumexp, or the maximum if the spec has statistics.
      factor: [B, K, G, T]: the probabilities are exp(x - shift) times it, more precisely than without; None where that
        is not known, or if the spec has statistics.
    """

    out: Array
    shift: Array
    factor: Array | None = None


class Results(NamedTuple):
    """Arrays that a forward returns.

    Attributes:
      out: [B, K, G, T, Dv], of the spec's ``result_dtype``.
      rows: numbers for each row, each [B, K, G, T], of the spec's ``accumulation_dtype``: the logsumexp alone; or, if
        the spec has statistics, the sum of the exponentials, their maximum, each statistic, and, if there is a
        ``where`` weight, whether it keeps any key.
      factor: that of :class:`Residuals`.
    """

    out: Array
    rows: tuple[Array, ...]
    factor: Array | None = None

    @property
    def residuals(self) -> Residuals:
        logsumexp_or_maximum = self.rows[0] if len(self.rows) == 1 else self.rows[1]
        return Residuals(self.out, logsumexp_or_maximum, self.factor)


class Cotangents(NamedTuple):
    """Cotangents of a forward's results.  Those of the logsumexp and of maxima are zero.

    Attributes:
      out: of the result; any floating dtype.
      sums: of the sum of the exponentials, and of each statistic that is a sum; empty if the spec has no statistics.
    """

    out: Array
    sums: tuple[Array, ...] = ()


class Gradients(NamedTuple):
    """Arrays that a backward returns: the gradients of the operands, each of its operand's shape and dtype.

    Attributes:
      query, key, value: always given.
      sides: None for side inputs of integers or booleans.
      sink: None if the spec has no sink.
    """

    query: Array
    key: Array
    value: Array
    sides: tuple[Array | None, ...]
    sink: Array | None


class ScaledRows(NamedTuple):
    """What the Pallas kernels of a backward read of each row.  The probabilities are exp(x - shift) times a factor.

    Attributes:
      dout: cotangents of the result times the factor, [B, K, G, T, Dv].
      shift: [B, K, G, T].
      delta: the sum of the gradients of the probabilities, each times its probability, [B, K, G, T].
    """

    dout: Array
    shift: Array
    delta: Array
