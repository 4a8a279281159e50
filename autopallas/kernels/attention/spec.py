"""Describes one attention: patterns produce the description, and kernels consume it.

Letters, in this package: B batch, K key heads, G query heads per key head (N = K * G query heads), T query length,
S key length, D head size of queries and keys, Dv head size of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from autopallas.compat import Dtype
from autopallas.sites.elementwise import ElementwiseProgram, Score
from autopallas.sites.roundings import NARROW, WIDE, unrounded

if TYPE_CHECKING:
    from autopallas.kernels.attention.fills import Fill

__all__ = ["AttentionSpec", "AttentionSumSpec", "Layouts", "SideSpec", "Weight"]


@dataclass(frozen=True, slots=True)
class SideSpec:
    """A side input: its dtype, and along which of (B, K, G, T, S) it varies; along the others it has size 1."""

    dtype: Dtype
    varies: tuple[bool, bool, bool, bool, bool]

    @property
    def differentiable(self) -> bool:
        return np.issubdtype(self.dtype, np.floating) or self.dtype.name == "bfloat16"


@dataclass(frozen=True, slots=True)
class Weight:
    """A factor of the probabilities, evaluated on a tile from positions and side inputs.

    ``where``: the program computes a boolean; where it is False the probability is exactly 0, even if it was NaN.
    ``multiply``: the program computes a number, which multiplies the probability.
    """

    kind: Literal["where", "multiply"]
    program: ElementwiseProgram


class Layouts(NamedTuple):
    """In which order the program's arrays have the canonical axes in memory, from major to minor.

    The result's is supposed to be that of the queries.  What the program multiplies last gives it in any order, and a
    transpose that follows shows which one is wanted, as a rule that of the queries.

    Attributes:
      query: a permutation of (B, K, G, T, D); (0, 3, 1, 2, 4) for [B, T, N, D].
      key, value: a permutation of (B, K, S, D); (0, 2, 1, 3) for [B, S, K, D].
    """

    query: tuple[int, ...] = (0, 1, 2, 3, 4)
    key: tuple[int, ...] = (0, 1, 2, 3)
    value: tuple[int, ...] = (0, 1, 2, 3)

    @staticmethod
    def with_heads_after_lengths() -> Layouts:
        """Returns those of [B, T, N, D] and [B, S, K, D]."""
        return Layouts((0, 3, 1, 2, 4), (0, 2, 1, 3), (0, 2, 1, 3))


@dataclass(frozen=True)
class AttentionSpec:
    """One attention, in canonical shapes.

    With s = q k^T rounded to ``score_dtype``, x = ``score`` (s) in float32 (float64 for float64 scores)::

        e = exp(x - max) * inner_weights          the sum runs over S and, if ``sink``, one more logit
        p = e / (sum_S e + exp(sink - max)) * weights
        out = p v                                 [B, K, G, T, Dv] in ``result_dtype``
        logsumexp = max + log |sum|               [B, K, G, T] float32 (float64)

    ``max`` is the greatest of x + log |inner_weights|, and of the sink: keys whose weight is 0 do not count.  The
    logarithms are bounded; see ``tile_values.heights``.

    If every x of a row is -inf, its result is NaN, as ``0 / 0`` in the original, unless a ``where`` weight sets each of
    its probabilities to 0.

    With ``statistics`` nothing is divided by the sum, and 0 is subtracted instead of a maximum of -inf, so that the
    result of a row without any key is 0.  The numbers for each row are then, instead of the logsumexp: the sum; the
    maximum; for each statistic, the greatest value of a program like ``score``, or the sum of e with further weights;
    and, if there is a ``where`` weight, whether it keeps any key (1 or 0).

    Module :mod:`operands` defines operands and results.
    """

    batch: int
    key_heads: int
    groups: int
    query_length: int
    key_length: int
    head_size: int
    value_head_size: int
    query_dtype: Dtype
    key_dtype: Dtype
    value_dtype: Dtype
    score_dtype: Dtype
    result_dtype: Dtype
    score: ElementwiseProgram
    sides: tuple[SideSpec, ...] = ()
    inner_weights: tuple[Weight, ...] = ()
    weights: tuple[Weight, ...] = ()
    sink: tuple[bool, bool, bool, bool, bool] | None = None
    """Along which of (B, K, G, T, S) the sink, a logit without a value, varies (never S); None without a sink."""
    live: ElementwiseProgram | None = None
    """A boolean program of positions and side inputs: where it is False, the weight is exactly 0 in the original's
    precision, if the row has a live key at all.  None: every key may have weight."""
    statistics: tuple[ElementwiseProgram | tuple[Weight, ...], ...] | None = None
    """If not None, numerator and sum are separate results, and so are these.  If keys that are not ``live`` count in
    one of these, ``live`` is None."""
    score_precision: str | None = None
    """``lax.Precision`` of the original's first dot: None (default), "HIGH" or "HIGHEST"."""
    value_precision: str | None = None
    """``lax.Precision`` of the original's second dot."""
    weights_dtype: Dtype | None = None
    """Dtype in which the probabilities enter the original's product with the values, and in its backward the product
    that gives the values' gradient; None for that of x.  Kernels may round them to this dtype, and to no other."""
    score_gradient_dtype: Dtype | None = None
    """Dtype in which the gradient of s enters the products that give those of q and k; None for that of s."""
    assume_finite: bool = True
    """Whether dead tiles may be skipped, although infinities and NaNs in a dead key's value would reach the result."""
    layouts: Layouts = field(default=Layouts(), compare=False)
    """How the operands lie in the program's memory.  They are passed in canonical shapes all the same, and so are
    results: a kernel that reads an array as it lies transposes it first, and the compiler removes that together with
    the transpose that made it canonical.  Nothing else depends on it: specs that differ in it alone are equal."""

    @property
    def accumulation_dtype(self) -> Dtype:
        """float32, or float64 if the scores are float64."""
        return np.dtype(np.float64 if self.score_dtype == np.float64 else np.float32)

    @property
    def reads_weights(self) -> Dtype:
        """Dtype to which probabilities may be rounded."""
        return self.accumulation_dtype if self.weights_dtype is None else self.weights_dtype

    @property
    def reads_score_gradients(self) -> Dtype:
        """Dtype to which gradients of scores may be rounded."""
        return self.score_dtype if self.score_gradient_dtype is None else self.score_gradient_dtype

    def unrounded(self) -> AttentionSpec:
        """Returns the same with float32 scores, where the original rounds them and takes that back at once (see
        :func:`autopallas.sites.roundings.unrounded`)."""
        if self.score_dtype != NARROW:
            return self
        scores = frozenset({Score(NARROW)})
        score, *read = (
            unrounded(own, scores) if isinstance(own, ElementwiseProgram) else own
            for own in (self.score, *(self.statistics or ()))
        )
        if not isinstance(score, ElementwiseProgram) or None in read:
            return self
        return replace(
            self,
            score_dtype=WIDE,
            score=score,
            statistics=None if self.statistics is None else tuple(own for own in read if own is not None),
            score_gradient_dtype=self.reads_score_gradients,
        )

    @property
    def widest_dtype(self) -> Dtype:
        """Dtype under which tables file this attention."""
        return max((self.query_dtype, self.key_dtype, self.value_dtype), key=lambda d: d.itemsize)

    @property
    def keeps(self) -> bool:
        """Whether some weight may set all probabilities of a row to 0."""
        return any(weight.kind == "where" for weight in self.weights)

    @property
    def row_results(self) -> int:
        """Number of results with one number for each row: the logsumexp, or the statistics."""
        return 1 if self.statistics is None else 2 + len(self.statistics) + self.keeps

    @property
    def has_factor(self) -> bool:
        """Whether a factor of the probabilities is saved for the backward."""
        return self.statistics is None

    @property
    def sums(self) -> tuple[tuple[Weight, ...], ...]:
        """Weights of the statistics that are sums."""
        return tuple(statistic for statistic in self.statistics or () if isinstance(statistic, tuple))

    @property
    def sums_over_keys(self) -> bool:
        """Whether a gradient sums over the keys of a row: that of a sink, or of a side input that is the same for all
        keys.  The gradients of the logits cancel in such a sum, so that delta's rounding may be much of the result."""
        return self.sink is not None or any(s.differentiable and not s.varies[4] for s in self.sides)

    @property
    def delta_counts(self) -> bool:
        """Whether delta's rounding may be much of a gradient: it adds up over keys, or the score multiplies it."""
        return self.sums_over_keys or self.score.multiplies_score and any(s.differentiable for s in self.sides)

    @property
    def rounding_adds_up(self) -> bool:
        """Whether there is such a gradient, and the result, from which delta is computed, is rounded."""
        return self.sums_over_keys and self.result_dtype != self.accumulation_dtype

    @cached_property
    def mask_class(self) -> str:
        """The class of the mask: "full", "causal", "static" (another one of positions), "dynamic" (of side inputs),
        "causal and dynamic" or "static and dynamic" (of both).

        Masked keys are dead, or hidden by a low score."""
        from autopallas.kernels.attention.fills import mask_class

        return mask_class(self)

    def assumptions(self) -> tuple[str, ...]:
        """Returns in words what has to hold for the result to be the original's."""
        if self.assume_finite and self.live is not None and self.mask_class in ("causal", "static"):
            return ("values at keys without any weight are finite (assume_finite)",)
        return ()

    @property
    def fill(self) -> Fill | None:
        """The low score that hides keys, a :class:`fills.Fill`, or None."""
        from autopallas.kernels.attention.fills import fill_of

        return fill_of(self)

    def checks(self, implementation: str | None) -> tuple[str, ...]:
        """Returns in words what an implementation checks at run time."""
        from autopallas.kernels.attention.fills import hides_by_sides, skips

        if implementation == "pallas_gpu" and hides_by_sides(self):
            proof = "the mask and the norms of queries and keys prove"
            return (f"a mask of data with low scores: tiles are skipped where {proof} them zero (checked at run time)",)
        if self.fill is None or implementation is None or not skips(self, implementation):
            return ()
        mask = f"{self.fill.mask} mask" if self.fill.mask else "part of the mask known from positions"
        proof = "each row's maximum and the norms of queries and keys prove" if self.fill.is_added else (
            "each row's maximum proves"
        )  # fmt: skip
        return (f"{mask}, {self.fill}: its tiles are skipped where {proof} them zero (checked at run time)",)

    def tiles(self, query_block: int, key_block: int, implementation: str | None = None) -> dict[str, object]:
        """Returns which tiles of the scores are computed, for a picture; see :func:`fills.picture`."""
        from autopallas.kernels.attention.fills import picture

        return picture(self, query_block, key_block, implementation=implementation)

    def programs(self) -> str:
        """Returns the program that kernels evaluate on a tile of scores, as text."""
        return str(self.score)

    def __str__(self) -> str:
        heads = f"N={self.key_heads * self.groups}" + (f" K={self.key_heads}" if self.groups > 1 else "")
        value = f" Dv={self.value_head_size}" if self.value_head_size != self.head_size else ""
        fill = f" with {self.fill}" if self.fill is not None and self.fill.mask else ""
        extras = [f"{len(self.sides)} side input{'s' * (len(self.sides) > 1)}"] if self.sides else []
        extras += ["sink"] if self.sink else []
        extras += [f"{w.kind} weight" for w in self.inner_weights + self.weights]
        extras += ["row program"] if self.statistics is not None else []
        return (
            f"attention B={self.batch} {heads} T={self.query_length} S={self.key_length} D={self.head_size}{value} "
            f"{self.widest_dtype}, {self.mask_class} mask{fill}" + "".join(f", {e}" for e in extras)
        )

    def to_dict(self) -> dict[str, object]:
        """Returns the fields as plain data: numbers, strings and lists; without the layouts, by which nothing is chosen
        or filed."""

        def plain(x: object) -> object:
            if isinstance(x, (bool, int, float, str, type(None))):
                return x
            if isinstance(x, tuple):
                return [plain(i) for i in x]
            if isinstance(x, (SideSpec, Weight)):
                return {f.name: plain(getattr(x, f.name)) for f in fields(x)}
            return str(x)

        names = [f.name for f in fields(self) if f.name != "layouts"]
        return {name: plain(getattr(self, name)) for name in names} | {"mask_class": self.mask_class}


@dataclass(frozen=True)
class AttentionSumSpec(AttentionSpec):
    """A sum of attentions of one description, whose maps the program adds up before the product with the values.

    Kernels are called once for each of them, with its own description.  The original has one product with the values,
    so that measurements of a single attention do not apply.
    """

    maps: int = 2
    """Number of attentions."""

    @staticmethod
    def of(spec: AttentionSpec, maps: int) -> AttentionSumSpec:
        """Returns the description of a sum of that many attentions."""
        return AttentionSumSpec(**{f.name: getattr(spec, f.name) for f in fields(spec)}, maps=maps)

    def __str__(self) -> str:
        return f"{super().__str__()}, sum of {self.maps} maps"
