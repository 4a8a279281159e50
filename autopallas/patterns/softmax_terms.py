"""What proofs about softmaxes are written in: terms of sums of logarithms, factors, exponentials, logsumexps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autopallas.graph import Ref
from autopallas.patterns.advice import BETWEEN_PRODUCTS
from autopallas.patterns.expressions import Expression
from autopallas.patterns.match import Mismatch

__all__ = [
    "APART",
    "HIDDEN",
    "ROUNDED",
    "UNSHIFTED",
    "Exponential",
    "Factor",
    "InBlocks",
    "KeysOfEachQuery",
    "LogSumExp",
    "NoNormaliser",
    "SeveralBlocks",
    "SeveralMaps",
    "Term",
]

Kind = Literal["constant", "value", "log", "logsumexp"]

UNSHIFTED = "no maximum is subtracted before the exponential, which neither overflows nor vanishes in a whole row"
"""Assumption about scores that enter an exponential without a shift, or less a maximum that a cast may make infinite:
where the exponential overflows, the program gives NaN."""
HIDDEN = "keys are hidden after the maximum is subtracted, none of which is so great that a whole row vanishes"
"""Assumption about scores that are not masked themselves while their exponentials are: where all remaining exponentials
vanish, the program gives NaN."""


ROUNDED = "the maximum is rounded before it is subtracted, by less than makes an exponential overflow"
"""Assumption about scores less a maximum in a narrower dtype. A maximum of 45,000 loses up to 88 in bfloat16: the
exponential of so much overflows, and the program gives NaN."""

APART = "each block of keys has a finite maximum of its own in every row"
"""Assumption about blocks of keys whose exponentials are relative to maxima of their own: where -inf hides all keys of
one block, the program gives NaN."""


class SeveralBlocks(Mismatch):
    """Reports that one softmax runs over several blocks of scores that could not be merged."""

    def __init__(self) -> None:
        super().__init__(
            "the softmax runs over several blocks of scores, each with values of its own: concatenated keys and values "
            "would be one attention",
            advice="Concatenate the keys, the values and the masks along the keys, and write one softmax over all of "
            "them.",
        )


class KeysOfEachQuery(SeveralBlocks):
    """Reports that one softmax runs over several blocks of scores whose queries are others: each has keys of its
    own."""

    def __init__(self) -> None:
        Mismatch.__init__(
            self,
            "the softmax runs over several blocks of scores whose keys lie along different axes, such as the row and "
            "the column of each pixel, so that each query has keys of its own",
            advice="Nothing has to be changed: concatenated keys would be as many for each query. An attention to rows "
            "and one to columns, each with a softmax of its own, are recognised.",
        )


class NoNormaliser(Mismatch):
    """Reports an exponential that nothing over S divides: the division may come after the contraction."""


class InBlocks(NoNormaliser):
    """Reports that a program goes through the keys block by block itself, and so normalises elsewhere."""


class SeveralMaps(Mismatch):
    """Reports weights that are a sum, as several softmaxes are that are added up before the product with the values.

    Args:
      through: what the weights are computed by.
    """

    def __init__(self, through: str = "a sum"):
        super().__init__(f"the probabilities pass through {through}", advice=BETWEEN_PRODUCTS)


class Term(NamedTuple):
    """``coefficient * f(expression)`` in a sum of logarithms; a constant's coefficient is its value."""

    coefficient: float
    kind: Kind
    expression: Ref | LogSumExp | None

    @property
    def value(self) -> Ref:
        """Value that the term stands for or takes the logarithm of."""
        assert isinstance(self.expression, Ref)
        return self.expression

    @property
    def inner(self) -> LogSumExp:
        assert isinstance(self.expression, LogSumExp)
        return self.expression

    def scaled(self, factor: float) -> Term:
        return self._replace(coefficient=self.coefficient * factor)


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor that carries S. Kind ``where`` / ``unless``: zero where the mask is false / true. Other kinds multiply /
    divide."""

    kind: Literal["where", "unless", "multiply", "divide"]
    source: Ref
    after_normalisation: bool
    """Whether the factor was applied to a quotient: then a mask also turns the 0 / 0 of an empty row into 0."""


@dataclass(slots=True)
class Exponential:
    """``exp(argument) * product of weights * exp(sum of rows)``."""

    argument: Expression
    weights: list[Factor] = field(default_factory=list)
    rows: list[Term] = field(default_factory=list)
    guarded: bool = False
    """Whether NaN, as in a row without any key, is replaced by 0."""
    under_mask: list[Term] = field(default_factory=list)
    """Subset of ``rows`` over which a mask stood: in a row whose keys it hides all, they do not matter."""

    @property
    def is_normalised(self) -> bool:
        """Whether a sum divides the exponentials already."""
        return any(t.kind in ("logsumexp", "log") for t in self.rows)


@dataclass(frozen=True, slots=True)
class LogSumExp:
    """``log(sum over S of exp(argument) * weights  +  sum of exp(extra))``; each extra is a sum of terms."""

    argument: Expression
    weights: tuple[Factor, ...]
    extras: tuple[tuple[Term, ...], ...] = ()
