"""The vector-Jacobian product of row statistics, on a tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Statistic
from autopallas.kernels.cross_entropy.statistics import finite
from autopallas.kernels.cross_entropy.tiles import Block, Tile, cut_row, cut_rows
from autopallas.sites.elementwise import ElementwiseProgram, Index, Score, Side, traced

__all__ = ["Pull"]

Array: TypeAlias = jax.Array


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """What the vector-Jacobian product of the statistics needs on a tile, [N, 1] each."""

    spec: CrossEntropySpec
    terms: tuple[tuple[Statistic, Array], ...]
    """Statistics with their cotangents; that of a maximum is divided among the ties already."""
    shifts: dict[ElementwiseProgram, Array]
    maxima: dict[ElementwiseProgram, tuple[Array, ...]]
    """(max, ties, argmax) of programs whose maximum has a cotangent."""
    labels: dict[int, Array]

    @staticmethod
    def of(
        spec: CrossEntropySpec,
        labels: dict[int, Array],
        statistics: Sequence[Array],
        cotangents: Sequence[Array | None],
        compute: Callable[[CrossEntropySpec], Sequence[Array]],
    ) -> Pull:
        """Prepares the product.

        Args:
          spec: what the statistics are of.
          labels: canonical labels [N|1, 1] by the position of their side input.
          statistics, cotangents: as of ``backward``.
          compute: gives the statistics of another spec for the same operands: where the greatest values are.
        """
        known = dict(zip(spec.statistics, statistics, strict=True))
        given = [
            (s, jnp.asarray(c))
            for s, c in zip(spec.statistics, cotangents, strict=True)
            if c is not None and c.dtype != jax.dtypes.float0 and s.kind not in ("argmax", "ties")
        ]
        # How often, and where, the greatest value is; those of one program at once.
        greatest = {
            s.program: (Statistic("ties", s.program), Statistic("argmax", s.program))
            for s, _ in given
            if s.kind == "max"
        }
        missing = tuple(s for pair in greatest.values() if not known.keys() >= {*pair} for s in pair)
        if missing:
            counted = replace(spec, statistics=missing, finish=(), products=())
            known |= dict(zip(missing, compute(counted), strict=True))
        terms = []
        for statistic, cotangent in given:
            if statistic.kind == "max":
                ties = known[Statistic("ties", statistic.program)]
                cotangent = jnp.where(ties == 0, jnp.nan, cotangent / ties)
            terms.append((statistic, cotangent.astype(spec.accumulation_dtype)[:, None]))
        shifts = {
            s.program: finite(known[Statistic("max", s.program)])[:, None] for s, _ in given if s.kind == "exp_sum"
        }
        maxima = {
            program: tuple(known[s][:, None] for s in (Statistic("max", program), *pair))
            for program, pair in greatest.items()
        }
        return Pull(spec, tuple(terms), shifts, maxima, labels)

    def arrays(self) -> list[Array]:
        """All arrays, [N|1, 1] each."""
        maxima = [array for arrays in self.maxima.values() for array in arrays]
        return [*(c for _, c in self.terms), *self.shifts.values(), *maxima, *self.labels.values()]

    def over(self, arrays: Sequence[Array]) -> Pull:
        """Returns the same with other arrays in the places of :meth:`arrays`: those of some of the rows."""
        left = iter(arrays)
        return Pull(
            self.spec,
            tuple((statistic, next(left)) for statistic, _ in self.terms),
            {program: next(left) for program in self.shifts},
            {program: tuple(next(left) for _ in arrays) for program, arrays in self.maxima.items()},
            {position: next(left) for position in self.labels},
        )

    def tile(self, tile: Tile, rows: Block, floating: Sequence[int]) -> tuple[Array, tuple[Array, ...]]:
        """Cotangents of the logits, and of the side inputs numbered in ``floating``, on one tile."""
        programs = tuple(dict.fromkeys(s.program for s, _ in self.terms))

        def values(score: Array, sides: tuple[Array, ...]) -> tuple[Array, ...]:
            merged = list(tile.sides)
            for n, side in zip(floating, sides, strict=True):
                merged[n] = side
            return tuple(tile._replace(score=score, sides=tuple(merged)).value(program) for program in programs)

        # Sides are broadcast first: what each entry of the tile contributes is summed later, in the accumulation dtype.
        # Where programs read a side widened, it is so before that: else each contribution would be rounded.
        wide = [tile.sides[n].astype(_widened(programs, n, tile.sides[n].dtype)) for n in floating]
        sides = tuple(jnp.broadcast_to(side, tile.score.shape) for side in wide)
        found, vjp = jax.vjp(values, tile.score, sides)
        dscore, dsides = vjp(tuple(self._cotangent(p, v, tile, rows) for p, v in zip(programs, found, strict=True)))
        return dscore, dsides

    def program(self, number: int | None) -> ElementwiseProgram:
        """Returns the cotangent of the logits, or of the side input of this number, of one entry.

        The program reads, behind the side inputs, one number per row of each of :meth:`arrays`.
        """
        sides = [Side(n, s.dtype) for n, s in enumerate(self.spec.sides)]
        own = [Side(len(sides) + n, np.dtype(a.dtype)) for n, a in enumerate(self.arrays())]
        floating = () if number is None else (number,)

        def element(score: Array, query: Array, key: Array, *given: Array) -> Array:
            tile = Tile(score, query, key, given[: len(sides)])
            dscore, dsides = self.over(given[len(sides) :]).tile(tile, (0, 1), floating)
            return dsides[0] if floating else dscore

        index = np.dtype(np.int32)
        with jax.enable_x64(False):
            return traced(
                element, Score(self.spec.logit_dtype), Index("query", index), Index("key", index), *sides, *own
            )

    def _cotangent(self, program: ElementwiseProgram, value: Array, tile: Tile, rows: Block) -> Array:
        wide = value.astype(self.spec.accumulation_dtype)
        parts = []
        for statistic, cotangents in self.terms:
            if statistic.program != program:
                continue
            cotangent = cut_row(cotangents, rows)
            match statistic.kind:
                case "exp_sum":
                    parts.append(cotangent * jnp.exp(wide - cut_row(self.shifts[program], rows)))
                case "sum":
                    parts.append(cotangent)
                case "max":
                    maximum, ties, argmax = cut_rows(self.maxima[program], rows)
                    # Computed anew, a value may differ from the maximum that it was by a rounding.  (Mosaic does not
                    # select booleans in all layouts.)
                    greatest = ((ties == 1) & (tile.key == argmax)) | ((ties != 1) & (wide == maximum))
                    parts.append(jnp.where(greatest | (ties == 0), cotangent, 0))
                case "pick":
                    assert statistic.label is not None
                    label = cut_row(self.labels[statistic.label], rows)
                    parts.append(jnp.where(label == tile.key, cotangent, 0))
        total: Array = reduce(jnp.add, parts)
        return jnp.broadcast_to(total, value.shape).astype(value.dtype)


def _widened(programs: Sequence[ElementwiseProgram], number: int, dtype: Dtype) -> Dtype:
    """The float dtype to which all programs that read a side convert it first; its own dtype where they do not."""
    found = set()
    for program in programs:
        places = {i for i, given in enumerate(program.inputs) if isinstance(given, Side) and given.position == number}
        if program.result in places:
            return dtype
        readers = [i for i in program.instructions if places.intersection(i.arguments)]
        if any(i.primitive.name != "convert_element_type" for i in readers):
            return dtype
        found |= {i.dtype for i in readers}
    (wide,) = found if len(found) == 1 else (dtype,)
    exact = jnp.issubdtype(wide, jnp.floating) and jnp.promote_types(wide, dtype) == wide
    return wide if exact else dtype
