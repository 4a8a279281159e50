"""Masks that give hidden keys a low score, not a weight of exactly 0: what is shown of their tiles, and when.

A key that is masked with -1e9 has a weight of its own: its row may have no other key, or lower scores.  Beside a score
that is usual its exponential underflows, so that it adds exactly 0 to sums, results and gradients.  While JAX traces,
positions show which tiles have no score above a bound, if scores are not huge: these tiles are *hidden*.  When the
program runs, a kernel computes the other tiles first, and a block's hidden tiles too unless

* the greatest score of each of its rows is so far above the bound that the exponential of what is hidden is 0, and
* what that would be multiplied with is finite, and scores are not huge where the bound presumes so (:func:`usual`).

So nothing is assumed: the results are those of all tiles, for rows without a key, low scores, infinities and NaNs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.kernels.attention import intervals
from autopallas.kernels.attention.intervals import Interval, Ranges
from autopallas.kernels.attention.operands import Operands
from autopallas.kernels.attention.tiles import (
    DEAD,
    HIDDEN,
    Edges,
    classify,
    decided,
    of_positions,
    rectangles,
    tile_map,
)
from autopallas.numerics.casts import exponential_underflows_below
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Index, Score, Side

if TYPE_CHECKING:
    from autopallas.kernels.attention.spec import AttentionSpec

__all__ = ["IMPLEMENTATIONS", "Fill", "TileStates", "fill_of", "mask_class", "picture", "tile_states", "usual"]

Array: TypeAlias = jax.Array
States: TypeAlias = np.ndarray

IMPLEMENTATIONS = frozenset({"xla", "pallas_tpu"})
"""Those that skip hidden tiles; for the others such a mask is no mask."""

_LOW = -500.0
"""A score that hides a key is this low at least: rows whose maximum is 200 above are usual."""
_MAGNITUDES = (None, 2.0**30, 2.0**24, 2.0**20, 2.0**16, 2.0**13, 2.0**10)
"""How large scores and floating side inputs may be, the weakest presumption first; None: that does not matter."""
_ROUNDING = 1.05
"""What the rounding of a product may add to the product of the norms, which bounds a score."""
_COARSE = 32
"""Along an axis, parts of the scores that are looked at to find a mask."""
_TAME = frozenset(
    "add sub mul div neg abs sign max min clamp select_n tanh square integer_pow convert_element_type reduce_precision "
    "copy stop_gradient add_any".split()
)
"""Functions of scores whose derivative is finite, so that times 0 it is 0."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A mask of positions whose hidden keys have a low score.

    Attributes:
      score: the greatest that hidden keys have where the product of query and key is 0, for words.
      magnitude: how large scores and floating side inputs may be for the bounds to hold, or None for any size.
      mask: the class of the mask; None where side inputs hide keys too.
    """

    score: float
    magnitude: float | None
    mask: Literal["causal", "static"] | None

    @property
    def is_added(self) -> bool:
        """Whether hidden scores vary with the product, since the mask is added to it."""
        return self.magnitude is not None

    def __str__(self) -> str:
        number = f"{self.score:.3g}".replace("e+0", "e").replace("e+", "e")
        return f"{number} added" if self.is_added else f"fill {number}"


class TileStates(NamedTuple):
    """The tiles of an attention.

    Attributes:
      states: DEAD, PARTIAL, FULL or HIDDEN for each.
      least: the maximum that each row of a block needs for its hidden tiles to add nothing.
    """

    states: States
    least: float

    @property
    def hides(self) -> bool:
        return bool(np.any(self.states == HIDDEN))


@lru_cache(maxsize=1024)
def fill_of(spec: AttentionSpec) -> Fill | None:
    """The mask of low scores, or None where no tile can be shown to be hidden."""
    if not _is_eligible(spec) or not _mentions_low_scores(spec.score):
        return None
    rows, columns = (_parts(length, _COARSE) for length in (spec.query_length, spec.key_length))
    for magnitude in _MAGNITUDES:
        bounds = _Bounds(spec, magnitude)
        if np.any(bounds(rectangles(rows, columns)).never):
            mask = of_positions(bounds, spec.query_length, spec.key_length) if bounds.of_positions else None
            assert mask != "full"
            return Fill(bounds.usual, magnitude, mask)
    return None


@lru_cache(maxsize=256)
def tile_states(spec: AttentionSpec, rows: Edges, columns: Edges) -> TileStates:
    """The state of each tile ``rows[i] x columns[j]``, given as (start, stop)."""
    states = tile_map(spec, rows, columns)
    fill = fill_of(spec)
    if fill is None:
        return TileStates(states, -math.inf)
    bounds = _Bounds(spec, fill.magnitude)
    found = decided(bounds, rectangles(rows, columns), bounds.budget(states.size)).reshape(states.shape)
    # A tile that is dead anyway stays so; one is full only if both say so.
    states = np.where(states == DEAD, DEAD, np.where(found == DEAD, HIDDEN, np.minimum(states, found))).astype(np.int8)
    states.setflags(write=False)  # it is cached
    return TileStates(states, _least(bounds.greatest, spec.accumulation_dtype))


def picture(
    spec: AttentionSpec, query_block: int, key_block: int, most: int = 32, implementation: str | None = None
) -> dict[str, object]:
    """The tiles as plain data, for a report: a digit (DEAD, PARTIAL, FULL, HIDDEN) for each tile, one string per row.

    Blocks are drawn several together where there would be more than ``most`` along an axis.  For an implementation that
    does not skip hidden tiles there are none.
    """

    def edges(length: int, block: int) -> Edges:
        step = block * -(-length // (block * most))
        return tuple((start, min(start + step, length)) for start in range(0, length, step))

    rows, columns = edges(spec.query_length, query_block), edges(spec.key_length, key_block)
    skips = implementation is None or implementation in IMPLEMENTATIONS
    found = tile_states(spec, rows, columns).states if skips else tile_map(spec, rows, columns)
    states = ["".join(map(str, row)) for row in found.tolist()]
    return {"rows": rows[0][1], "columns": columns[0][1], "states": states} if states else {}


def mask_class(spec: AttentionSpec, implementation: str | None = None) -> str:
    """The class of the mask, by which kernels cost; for an implementation that does not skip hidden tiles, without
    them."""
    fill = fill_of(spec) if implementation is None or implementation in IMPLEMENTATIONS else None
    return classify(spec) if fill is None or fill.mask is None else fill.mask


def usual(spec: AttentionSpec, operands: Operands, dout: Array | None = None) -> Array:
    """Whether the bounds hold, and what weights of 0 are multiplied with is finite: then hidden tiles add nothing to a
    row whose maximum is great enough.  A boolean scalar.

    With the result's cotangent it is for the backward, whose products read queries and keys too.
    """
    fill, dtype = fill_of(spec), spec.accumulation_dtype
    assert fill is not None

    def norm(x: Array) -> Array:
        """The greatest of the rows' norms; infinite where it is beyond the dtype, as are its square and all NaNs, which
        a maximum does not show on every platform."""
        squares = jnp.sum(jnp.square(x.astype(dtype)), axis=-1)
        return jnp.where(jnp.all(squares < jnp.inf), jnp.sqrt(jnp.max(squares)), jnp.inf)

    value = norm(operands.value)
    found = jnp.isfinite(value if dout is None else value * norm(dout))
    if fill.magnitude is not None or dout is not None:
        scores = norm(operands.query) * norm(operands.key) * _ROUNDING
        found &= jnp.isfinite(scores) if fill.magnitude is None else scores <= fill.magnitude
    if fill.magnitude is not None:
        for number in spec.score.sides:
            if spec.sides[number].differentiable:
                found &= jnp.all(jnp.abs(operands.sides[number].astype(dtype)) <= fill.magnitude)
    return found


class _Bounds:
    """Decides about rectangles of scores: always shown, never shown, or neither; remembers what hidden keys have.

    A key is shown where the score is not low if the product of query and key is 0, and hidden where it is low whatever
    the product.  That the former is shown is a guess, and nothing rests on it.
    """

    def __init__(self, spec: AttentionSpec, magnitude: float | None):
        self._program = spec.score
        self._magnitude = magnitude
        self.of_positions = spec.live is None and all(spec.sides[n].differentiable for n in spec.score.sides)
        self.greatest = -math.inf
        """A bound on the scores of hidden keys."""
        self.usual = -math.inf
        """The same where products and floating side inputs are 0."""

    def __call__(self, ranges: Ranges) -> Interval:
        bound = intervals.evaluate(self._program, ranges, self._magnitude)
        guess = intervals.evaluate(self._program, ranges, 0.0)
        hidden = bound.high <= _LOW
        if np.any(hidden):
            self.greatest = max(self.greatest, float(bound.high[hidden].max()))
            self.usual = max(self.usual, float(guess.high[hidden].max()))
        shown = (guess.low > _LOW) & ~hidden
        return Interval(shown.astype(float), 1.0 - hidden, np.dtype(bool))

    def budget(self, count: int) -> int:
        """Rectangles to look at: where side inputs decide, cutting those in smaller ones decides nothing."""
        return 2**20 if self.of_positions else 6 * count


def _is_eligible(spec: AttentionSpec) -> bool:
    """Whether all that a key of weight 0 does to a row is to add 0, or nothing at all where weights hide it."""
    weights = [*spec.weights, *(weight for sums in spec.sums for weight in sums)]
    maxima = [s for s in spec.statistics or () if isinstance(s, ElementwiseProgram)]
    return (
        spec.assume_finite
        and not spec.inner_weights
        and all(weight.kind == "where" for weight in weights)
        and all(s == spec.score and spec.sink is None for s in maxima)
        and not (spec.statistics is not None and spec.keeps)
        # Where positions alone decide which keys are dead, tiles are skipped without any check.
        and (spec.live is None or bool(spec.live.sides))
        and any(isinstance(i, Index) for i in spec.score.inputs)
        and _is_tame(spec)
    )


def _is_tame(spec: AttentionSpec) -> bool:
    """Whether derivatives are finite with respect to scores and floating side inputs."""
    program = spec.score
    varied = [
        isinstance(i, Score) or (isinstance(i, Side) and spec.sides[i.position].differentiable) for i in program.inputs
    ]
    for instruction in program.instructions:
        name, reads = instruction.primitive.name, [varied[a] for a in instruction.arguments]
        differentiated = any(reads) and instruction.dtype.kind not in "biu"
        varied.append(differentiated)
        if not differentiated:
            continue
        power = dict(instruction.params).get("y", 1)
        if name not in _TAME or (name == "div" and reads[1]) or (isinstance(power, int) and power < 1):
            return False
    return True


def _mentions_low_scores(program: ElementwiseProgram) -> bool:
    """Whether there may be a mask: a great constant, or the logarithm of one."""
    great = any(isinstance(i, Constant) and abs(i.value) >= -_LOW for i in program.inputs)
    return great or "log" in program.primitives


def _parts(length: int, most: int) -> Edges:
    step = -(-length // most)
    return tuple((start, min(start + step, length)) for start in range(0, length, step))


def _least(bound: float, dtype: Dtype) -> float:
    """The least maximum beside which the exponential of a score up to ``bound`` is 0, as a number of the dtype."""
    largest = float(jnp.finfo(dtype).max)
    # Where numbers are so great that they are further apart than that, a greater one is needed all the same.
    distance = max(-exponential_underflows_below(dtype), abs(bound) * 2.0**-18) if math.isfinite(bound) else 0.0
    return float(np.asarray(max(bound + distance, -largest), dtype))
