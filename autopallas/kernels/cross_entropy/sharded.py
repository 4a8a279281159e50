"""A cross-entropy whose vocabulary is divided among devices: row statistics of the parts, and how they are combined.

The rows' maxima are exchanged once, and their sums once, as in the vocabulary-parallel loss of Megatron-LM (Shoeybi et
al. 2019, https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.cross_entropy.operands import Gradients, Operands, Residuals, Results
from autopallas.kernels.cross_entropy.site import CrossEntropySite
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, SideSpec, Statistic
from autopallas.kernels.cross_entropy.statistics import finite, required
from autopallas.kernels.cross_entropy.tiles import canonical_labels
from autopallas.sites.division import Division, PositionOperand
from autopallas.sites.elementwise import ElementwiseProgram, Index, Input, Score, Side
from autopallas.sites.operation import Kernel
from autopallas.sites.spec import BlockSizes

__all__ = ["DividedCrossEntropySite", "divide"]

Array: TypeAlias = jax.Array


@dataclass(frozen=True)
class DividedCrossEntropySite(CrossEntropySite):
    """What one device computes.

    Attributes:
      across: the mesh axes over which the vocabulary is divided.
      vocabulary: how long it is on all devices.
    """

    across: tuple[str, ...] = ()
    vocabulary: int = 0

    @property
    def _greatest_label(self) -> int:
        return self.vocabulary - 1

    def _once(self, gradient: Array) -> Array:
        """Of what every device has, the gradient on one of them only, since it will be summed over all."""
        return jnp.where(lax.axis_index(self.across) == 0, gradient, jnp.zeros_like(gradient))

    def running(self, kernel: Kernel) -> Kernel:
        """Returns an implementation, of the part of the vocabulary here."""
        return _Kernel(kernel, self.across, self.vocabulary)


def divide(site: CrossEntropySite, division: Division) -> tuple[CrossEntropySite, tuple[PositionOperand, ...]]:
    """Returns what each device computes: where the vocabulary is divided, statistics of the whole."""
    part, extras = site.per_device(division)
    across = tuple(axis for label in site.vocabulary_labels for axis in division.of(label))
    if across:
        own = {f.name: getattr(part, f.name) for f in fields(part)}
        part = DividedCrossEntropySite(**own, across=across, vocabulary=site.spec.vocabulary)
    return part, extras


@dataclass(frozen=True, slots=True)
class _Kernel:
    """An implementation, run by each device on its part of the vocabulary; the statistics are those of the whole."""

    part: Kernel
    across: tuple[str, ...]
    vocabulary: int

    def forward(self, spec: CrossEntropySpec, block_sizes: BlockSizes | None, operands: Operands) -> Results:
        """Products over the vocabulary are those of the part."""
        statistics = self._statistics(spec, spec.statistics, block_sizes, operands) if spec.statistics else ()
        if not spec.products:
            return Results(statistics)
        environment = [*operands.side_arrays, *(s[:, None] for s in statistics)]
        rows = jnp.arange(spec.rows, dtype=jnp.int32)[:, None]
        finished = [jnp.broadcast_to(p.evaluate(None, rows, None, environment), (spec.rows, 1)) for p in spec.finish]
        known = tuple(SideSpec(np.dtype(f.dtype), (True, False)) for f in finished)
        rest = replace(spec, statistics=(), finish=(), sides=(*spec.sides, *known))
        rest, given = self._here(rest, operands._replace(sides=(*operands.sides, *finished)))
        found: Results = self.part.forward(rest, block_sizes, given)
        return Results(statistics, found.products)

    def backward(
        self,
        spec: CrossEntropySpec,
        block_sizes: BlockSizes | None,
        operands: Operands,
        residuals: Residuals,
        cotangents: Sequence[Array | None],
        wanted: Sequence[bool],
    ) -> Gradients:
        """Gradients of what has no vocabulary are those of the part."""
        maxima = [s for s, c in zip(spec.statistics, cotangents, strict=True) if s.kind == "max" and c is not None]
        further = [Statistic(kind, s.program) for s in maxima for kind in ("ties", "argmax")]
        missing = tuple(dict.fromkeys(s for s in further if s not in spec.statistics))
        found = self._statistics(spec, missing, block_sizes, operands) if missing else ()
        full = replace(spec, statistics=(*spec.statistics, *missing))
        known = [
            value - self._start(spec) if statistic.kind == "argmax" else value
            for statistic, value in zip(full.statistics, (*residuals.statistics, *found), strict=True)
        ]
        here, given = self._here(full, operands)
        own = len(operands.sides)
        every = [*cotangents, *(None for _ in missing)]
        asked = (*wanted, *(False for _ in given.sides[own:]))
        gradients: Gradients = self.part.backward(here, block_sizes, given, Residuals(tuple(known)), every, asked)
        return gradients._replace(sides=gradients.sides[:own])

    def _start(self, spec: CrossEntropySpec) -> Array:
        start: Array = lax.axis_index(self.across) * spec.vocabulary
        return start

    def _here(self, spec: CrossEntropySpec, operands: Operands) -> tuple[CrossEntropySpec, Operands]:
        """The same in numbers of the part: labels without what is before it, and positions in the whole read from a
        side input."""
        given, types = list(operands.sides), list(spec.sides)
        start = self._start(spec)
        places: dict[int, int] = {}
        for position in sorted({s.label for s in spec.statistics if s.label is not None}):
            label = canonical_labels(operands.side_arrays[position], self.vocabulary)
            places[position] = len(given)
            given.append(jnp.where(label < 0, -1, label - start))
            types.append(SideSpec(np.dtype(np.int32), spec.sides[position].varies))
        counted: dict[Index, int] = {}

        def placed(i: Input) -> Input:
            if not (isinstance(i, Index) and i.axis == "key"):
                return i
            if i not in counted:
                counted[i] = len(given)
                key = start + jnp.arange(spec.vocabulary, dtype=jnp.int32)
                given.append(((key // i.stride % i.extent) + i.offset).astype(i.dtype)[None])
                types.append(SideSpec(i.dtype, (False, True)))
            return Side(counted[i], i.dtype)

        def program(p: ElementwiseProgram) -> ElementwiseProgram:
            return replace(p, inputs=tuple(map(placed, p.inputs)))

        statistics = tuple(
            replace(s, program=program(s.program), label=None if s.label is None else places[s.label])
            for s in spec.statistics
        )
        products = tuple(replace(p, program=program(p.program)) for p in spec.products)
        here = replace(spec, statistics=statistics, products=products, sides=tuple(types))
        return here, operands._replace(sides=tuple(given))

    def _statistics(
        self,
        spec: CrossEntropySpec,
        wanted: Sequence[Statistic],
        block_sizes: BlockSizes | None,
        operands: Operands,
    ) -> tuple[Array, ...]:
        """Statistics of the whole vocabulary, the same on all devices."""
        needed = required(wanted)
        here, given = self._here(replace(spec, statistics=needed, finish=(), products=()), operands)
        own = dict(zip(needed, self.part.forward(here, block_sizes, given).statistics, strict=True))
        maxima = {s: _exact(s, value) for s, value in own.items() if s.kind == "max"}
        greatest = self._together(list(maxima), maxima, lax.pmax)
        whole = {s: value.astype(own[s].dtype) for s, value in greatest.items()}
        sums, places = {}, {}
        for statistic, part in own.items():
            if statistic.kind == "max":
                continue
            if statistic.kind in ("sum", "pick"):
                sums[statistic] = part
                continue
            maximum = Statistic("max", statistic.program)
            mine, all_ = own[maximum], whole[maximum]
            if statistic.kind == "exp_sum":  # 0 times what overflows would be no number
                sums[statistic] = jnp.where(part == 0, 0, part * jnp.exp(finite(mine) - finite(all_)))
            elif statistic.kind == "ties":
                sums[statistic] = jnp.where(mine == all_, part, 0)
            else:
                is_greatest = (mine == all_) | (mine != mine)
                places[statistic] = jnp.where(is_greatest, part + self._start(spec), jnp.iinfo(jnp.int32).max)
        whole |= self._together(list(sums), sums, lax.psum) | self._together(list(places), places, lax.pmin)
        return tuple(whole[s] for s in wanted)

    def _together(
        self, chosen: Sequence[Statistic], parts: dict[Statistic, Array], reduce: Callable[..., Array]
    ) -> dict[Statistic, Array]:
        """Some statistics of all devices, in one exchange."""
        if not chosen:
            return {}
        found = reduce(jnp.stack([parts[s] for s in chosen]), self.across)
        return dict(zip(chosen, found, strict=True))


def _exact(maximum: Statistic, value: Array) -> Array:
    """A maximum in the dtype in which it is sent: that of logits holds the greatest of them exactly."""
    given = [*maximum.program.inputs, *maximum.program.instructions][maximum.program.result]
    return value.astype(given.dtype) if isinstance(given, Score) else value
