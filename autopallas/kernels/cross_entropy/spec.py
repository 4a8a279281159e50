"""What one cross-entropy is: the description that patterns produce and kernels consume.

Letters, in this package: N rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias

import jax
import numpy as np

from autopallas.compat import Dtype
from autopallas.sites.elementwise import ElementwiseProgram, Input, Score, Side, honoured
from autopallas.sites.roundings import NARROW, WIDE, rounding_first, unrounded

__all__ = ["CrossEntropySpec", "Head", "Product", "SideArray", "SideSpec", "Statistic"]

SideArray: TypeAlias = jax.Array | tuple[jax.Array, jax.Array]
"""A side input: its array, or for the logits of a further head activations and weight."""


@dataclass(frozen=True, slots=True)
class Head:
    """What logits are a product of: activations [N, ``hidden``], and a weight [V, ``hidden``] (``vocabulary_major``) or
    [``hidden``, V]."""

    hidden: int
    row_dtype: Dtype
    weight_dtype: Dtype
    vocabulary_major: bool


@dataclass(frozen=True, slots=True)
class SideSpec:
    """A side input: its dtype, and whether it varies over (rows, vocabulary); it has size 1 along the others."""

    dtype: Dtype
    varies: tuple[bool, bool]
    head: Head | None = None
    """Of the logits of a further head: what they are a product of, rounded to ``dtype``.  Such a side input is given as
    the pair of its activations and its weight, and like the logits computed tile by tile."""

    @property
    def differentiable(self) -> bool:
        return np.issubdtype(self.dtype, np.floating) or self.dtype.name == "bfloat16"


@dataclass(frozen=True, slots=True)
class Statistic:
    """One number per row, of the values p[n, v] of an elementwise program of the logits.

    ``max``: the greatest p over V; NaN if one is NaN.
    ``exp_sum``: sum over V of exp(p - shift), with shift the greatest p of the row, or 0 where that is not finite.  A
      spec with this statistic has the ``max`` of the same program too.
    ``sum``: sum over V of p.
    ``pick``: p at v = label; 0 where the label is not in 0 .. V - 1.
    ``argmax``: the first v where p is greatest (a NaN counts as greatest), int32.
    ``ties``: how many v have the greatest p; 0 where that is NaN, which equals nothing.

    All but ``argmax`` are of the spec's ``accumulation_dtype``.
    """

    kind: Literal["max", "exp_sum", "sum", "pick", "argmax", "ties"]
    program: ElementwiseProgram
    label: int | None = None
    """For ``pick``: the position of the side input with the labels, integers that vary over rows at most."""


@dataclass(frozen=True, slots=True)
class Product:
    """What a backward pass makes of the values p[n, v] of an elementwise program of the logits.

    ``rows``: sum over V of p[n, v] w[v, d], shape [N, D].
    ``columns``: sum over N of p[n, v] x[n, d], in the layout of the weight.
    ``column_sum``: sum over N of p[n, v], shape [V].
    ``values``: p[n, v] itself, shape [N, V]: an array that the program asks for, such as the gradient of soft labels.

    x and w are those of one of the spec's ``heads``.
    """

    kind: Literal["rows", "columns", "column_sum", "values"]
    program: ElementwiseProgram
    dtype: Dtype
    head: int = 0


@dataclass(frozen=True)
class CrossEntropySpec:
    """Row statistics of logits, and products with functions of logits, in canonical shapes.

    With z = x w rounded to ``logit_dtype``, [N, V]: ``statistics`` are taken of programs of z.  The programs of
    ``products`` read z too, the side inputs, and behind these the values of the programs ``finish``, one per row, which
    are computed from the statistics.

    A program's ``Index("query")`` is the row, ``Index("key")`` the position in the vocabulary.  Programs of statistics
    and products read ``Side(i)``, side input i.  Programs of products read ``Side(len(sides) + k)``, the value of
    ``finish[k]``.  Programs of ``finish`` read ``Side(i)``, side input i, none of which varies over the vocabulary, and
    ``Side(len(sides) + k)``, statistic k.

    x, w and the side inputs are those of :class:`autopallas.kernels.cross_entropy.operands.Operands`.
    """

    rows: int
    hidden: int
    vocabulary: int
    row_dtype: Dtype
    weight_dtype: Dtype
    logit_dtype: Dtype
    vocabulary_major: bool
    statistics: tuple[Statistic, ...] = ()
    sides: tuple[SideSpec, ...] = ()
    finish: tuple[ElementwiseProgram, ...] = ()
    products: tuple[Product, ...] = ()
    precision: str | None = None
    """``lax.Precision`` of the original's dot: None (default), "HIGH" or "HIGHEST"."""
    doubled: bool = False
    """Whether the original computes in float64 with narrower logits."""
    rounded: bool = False
    """Whether another pass over the logits, that reads what this one gives or the other way round, has to round them to
    ``logit_dtype``.  Then this one rounds them too."""

    @property
    def heads(self) -> tuple[Head, ...]:
        """What the logits, and side inputs that are logits too, are products of."""
        own = Head(self.hidden, self.row_dtype, self.weight_dtype, self.vocabulary_major)
        return (own, *(side.head for side in self.sides if side.head is not None))

    @property
    def accumulation_dtype(self) -> Dtype:
        """float32, or float64 where the original has float64."""
        return np.dtype(np.float64 if self.doubled or self.logit_dtype == np.float64 else np.float32)

    def honoured(self) -> CrossEntropySpec:
        """Returns the same with roundings that XLA cannot leave out (:func:`autopallas.sites.elementwise.honoured`)."""
        return replace(
            self,
            statistics=tuple(replace(s, program=honoured(s.program, True)) for s in self.statistics),
            products=tuple(replace(p, program=honoured(p.program)) for p in self.products),
        )

    @property
    def _narrow(self) -> list[Input]:
        """The logits in bfloat16, as programs read them."""
        own: list[Input] = [Score(NARROW)] if self.logit_dtype == NARROW else []
        return own + [Side(n, NARROW) for n, s in enumerate(self.sides) if s.head is not None and s.dtype == NARROW]

    @property
    def has_to_round(self) -> bool:
        """Whether a program reads logits that are rounded to bfloat16, and :meth:`unrounded` leaves that as it is."""
        return bool(self._narrow) and self.unrounded() is self

    def unrounded(self) -> CrossEntropySpec:
        """Returns the same with logits in float32, where the original rounds them and takes that back at once (see
        :func:`autopallas.sites.roundings.unrounded`).  Which is the greatest of a row their rounding still decides."""
        narrow = self._narrow
        if self.rounded or not narrow:
            return self
        read: tuple[Statistic | Product, ...] = (*self.statistics, *self.products)
        found: list[ElementwiseProgram] = []
        for own in read:
            computed = rounding_first if own.kind == "argmax" else unrounded
            program = computed(own.program, frozenset(narrow))
            if program is None:
                return self
            found.append(program)
        count = len(self.statistics)
        return replace(
            self,
            logit_dtype=WIDE if self.logit_dtype == NARROW else self.logit_dtype,
            statistics=tuple(replace(s, program=p) for s, p in zip(self.statistics, found[:count], strict=True)),
            sides=tuple(
                replace(side, dtype=WIDE) if Side(n, NARROW) in narrow else side for n, side in enumerate(self.sides)
            ),
            products=tuple(replace(p, program=own) for p, own in zip(self.products, found[count:], strict=True)),
        )

    @property
    def widest_dtype(self) -> Dtype:
        """The dtype under which tables file this cross-entropy."""
        computed = (self.accumulation_dtype,) if self.doubled else ()
        return max((self.row_dtype, self.weight_dtype, *computed), key=lambda d: d.itemsize)

    def assumptions(self) -> tuple[str, ...]:
        """Returns what has to hold for the result to be the original's, in words."""
        return ()

    def programs(self) -> str:
        """Returns the programs that kernels evaluate on a tile of logits."""
        return "\n".join(
            [f"{s.kind}: {s.program}" for s in self.statistics] + [f"{p.kind}: {p.program}" for p in self.products]
        )

    def __str__(self) -> str:
        kinds = [s.kind for s in self.statistics]
        wanted = [kind for kind in dict.fromkeys(kinds) if not (kind == "max" and "exp_sum" in kinds)]
        parts = ["logsumexp" if kind == "exp_sum" else kind for kind in wanted]
        names = {"rows": "dx", "columns": "dw", "column_sum": "dbias", "values": "N x V values"}
        parts += [names[p.kind] + (str(p.head + 1) if p.head else "") for p in self.products]
        hidden = "+".join(str(head.hidden) for head in self.heads)
        return (
            f"cross_entropy N={self.rows} D={hidden} V={self.vocabulary} {self.widest_dtype}, "
            f"{self.logit_dtype} logits: {', '.join(parts)}"
        )

    def to_dict(self) -> dict[str, object]:
        """Returns the fields as plain data: numbers and strings.  ``rounded`` is there where it is True alone, so that
        what was stored of other specs without it is found."""

        def plain(x: object) -> object:
            if isinstance(x, (bool, int, float, str, type(None))):
                return x
            if isinstance(x, tuple):
                return [plain(i) for i in x]
            if isinstance(x, (Head, SideSpec, Statistic, Product)):
                return {f.name: plain(getattr(x, f.name)) for f in fields(x)}
            return str(x)

        return {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name != "rounded" or self.rounded}
