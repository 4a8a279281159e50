"""Finds masks that give keys a low score instead of a weight of exactly 0, and decides when their tiles are skipped.

A key that is masked with -1e9 may have weight: its row may have no other key, or lower scores.  Beside a score of usual
size its exponential underflows, so that it adds exactly 0 to sums, results and gradients.  While JAX is tracing,
positions show which tiles have no score above a bound, if scores are not huge: these tiles are *hidden*.  At run time a
kernel computes the other tiles first, and then a block's hidden tiles too, unless

* the greatest score of each of its rows is so far above the bound that the exponentials in hidden tiles are 0, and
* what these are multiplied with is finite, and scores are not huge if the bound presumes so (:func:`usual`).

So nothing is assumed: results equal those of all tiles, for rows without a key, low scores, infinities and NaNs too.

A kernel of a GPU finds at run time which tiles side inputs hide too (:func:`hides_by_sides`, :mod:`.fill_proofs`).
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
    rises,
    tile_map,
)
from autopallas.numerics.casts import exponential_underflows_below
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Index, Score, Side

if TYPE_CHECKING:
    from autopallas.kernels.attention.spec import AttentionSpec

__all__ = [
    "LOW",
    "Fill",
    "TileStates",
    "fill_of",
    "greatest_product",
    "hides_by_sides",
    "least_beside",
    "mask_class",
    "picture",
    "skips",
    "tile_states",
    "usual",
]

Array: TypeAlias = jax.Array
States: TypeAlias = np.ndarray

_IMPLEMENTATIONS = frozenset({"xla", "pallas_tpu", "pallas_gpu"})
"""Implementations that skip hidden tiles; the others compute all of them."""

LOW = -500.0
"""Greatest score that hides a key: the maximum of most rows is more than 200 above it."""
_LEAST_SCORES = 2**20
"""Scores of a head from which it is found at run time which tiles side inputs hide: fewer take a GPU less time than the
small kernels that find it."""
_LEAST_SHARING = 8
"""Heads that share what is evaluated for that; for each of them it would cost much of what the attention does."""
_MAGNITUDES = (None, 2.0**30, 2.0**24, 2.0**20, 2.0**16, 2.0**13, 2.0**10)
"""Bounds on scores and floating side inputs, the weakest presumption first; None for no bound."""
_SPACING = 2.0**-18
"""Part of a score by which another has to be above it, whatever was rounded."""
_ROUNDING = 1.05
"""Factor for the rounding of a product, beside the product of the norms, which bounds a score."""
_COARSE = 32
"""Number of parts along each axis into which scores are divided to find a mask."""
_TAME = frozenset(
    "add sub mul div neg abs sign max min clamp select_n tanh square integer_pow convert_element_type reduce_precision "
    "copy stop_gradient add_any".split()
)
"""Functions of scores with finite derivatives, which times 0 are 0."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A mask of positions whose hidden keys have a low score.

    Attributes:
      score: the greatest score of hidden keys if the product of query and key is 0, for messages.
      magnitude: the size of scores and floating side inputs up to which the bounds hold; None for any size.
      mask: the class of the mask; None if side inputs hide keys too.
    """

    score: float
    magnitude: float | None
    mask: Literal["causal", "static"] | None

    @property
    def is_added(self) -> bool:
        """Whether the mask is added to the product, so that hidden scores vary with it."""
        return self.magnitude is not None

    def __str__(self) -> str:
        number = f"{self.score:.3g}".replace("e+0", "e").replace("e+", "e")
        return f"{number} added" if self.is_added else f"fill {number}"


class TileStates(NamedTuple):
    """The tiles of an attention.

    Attributes:
      states: DEAD, PARTIAL, FULL or HIDDEN for each.
      least: if the maximum of each row of a block is at least this, the block's hidden tiles add nothing.
    """

    states: States
    least: float

    @property
    def hides(self) -> bool:
        return bool(np.any(self.states == HIDDEN))


@lru_cache(maxsize=1024)
def fill_of(spec: AttentionSpec) -> Fill | None:
    """Finds the mask of low scores; returns None if no tile can be shown to be hidden."""
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


def tile_states(spec: AttentionSpec, rows: Edges, columns: Edges, hides: bool = True) -> TileStates:
    """Returns the state of each tile ``rows[i] x columns[j]``, given as (start, stop).

    Without ``hides`` none is hidden.
    """
    return _tile_states(spec, rows, columns, hides)


@lru_cache(maxsize=256)
def _tile_states(spec: AttentionSpec, rows: Edges, columns: Edges, hides: bool) -> TileStates:
    states = tile_map(spec, rows, columns)
    fill = fill_of(spec) if hides else None
    if fill is None:
        return TileStates(states, -math.inf)
    bounds = _Bounds(spec, fill.magnitude)
    found = decided(bounds, rectangles(rows, columns), bounds.budget(states.size)).reshape(states.shape)
    # A dead tile stays dead; a tile is full only if it is full by both masks.
    states = np.where(states == DEAD, DEAD, np.where(found == DEAD, HIDDEN, np.minimum(states, found))).astype(np.int8)
    states.setflags(write=False)  # it is cached
    return TileStates(states, _least(bounds.greatest, spec.accumulation_dtype))


def picture(
    spec: AttentionSpec, query_block: int, key_block: int, most: int = 32, implementation: str | None = None
) -> dict[str, object]:
    """Returns the tiles as plain data for a report: a digit (DEAD, PARTIAL, FULL, HIDDEN) for each, one string per row.

    Blocks are drawn together if there would be more than ``most`` along an axis.  For an implementation that does not
    skip hidden tiles there are none.
    """

    def edges(length: int, block: int) -> Edges:
        step = block * -(-length // (block * most))
        return tuple((start, min(start + step, length)) for start in range(0, length, step))

    rows, columns = edges(spec.query_length, query_block), edges(spec.key_length, key_block)
    found = tile_states(spec, rows, columns, skips(spec, implementation)).states
    states = ["".join(map(str, row)) for row in found.tolist()]
    return {"rows": rows[0][1], "columns": columns[0][1], "states": states} if states else {}


def mask_class(spec: AttentionSpec, implementation: str | None = None) -> str:
    """Returns the class of the mask, on which times depend; hidden tiles count if the implementation skips them.

    It is one of :func:`~.tiles.classify`, or "causal and dynamic" or "static and dynamic" if positions alone leave keys
    out, and side inputs leave out more of them.
    """
    hides = skips(spec, implementation)
    fill = fill_of(spec) if hides else None
    if fill is not None and fill.mask is not None:
        return fill.mask
    found = classify(spec)
    if fill is None and found != "dynamic":
        return found
    by_positions = _known_from_positions(spec, hides)
    return found if by_positions is None else f"{by_positions} and dynamic"


def _known_from_positions(spec: AttentionSpec, hides: bool) -> Literal["causal", "static"] | None:
    """Returns the class of what positions alone leave out of a mask that side inputs decide too; None for nothing."""
    rows, columns = (_parts(length, _COARSE) for length in (spec.query_length, spec.key_length))
    found = tile_states(spec, rows, columns, hides).states
    left_out = (found == DEAD) | (found == HIDDEN)
    if not np.any(left_out):
        return None
    causal = [[start >= stop for start, _ in columns] for _, stop in rows]
    return "causal" if np.array_equal(left_out, np.asarray(causal)) else "static"


@lru_cache(maxsize=1024)
def skips(spec: AttentionSpec, implementation: str | None) -> bool:
    """Returns whether an implementation skips hidden tiles where nothing is lost; without one, whether some do.

    That of GPUs decides before it knows any score, by the least that a row's maximum can be; for that the score program
    must not decrease with the score.
    """
    if implementation is None or implementation not in _IMPLEMENTATIONS:
        return implementation is None
    fill = fill_of(spec)
    if implementation != "pallas_gpu" or fill is None:
        return True
    return rises(spec.score, rectangles([(0, spec.query_length)], [(0, spec.key_length)]), fill.magnitude)


def hides_by_sides(spec: AttentionSpec) -> bool:
    """Returns whether tiles that side inputs may hide by low scores are looked for at run time, on a GPU.

    There has to be an array that may be a mask: one of booleans or integers beside a low constant, or one of floating
    numbers with one for each key and not for each head.  What is evaluated must be shared by several heads.
    """
    if spec.query_length * spec.key_length < _LEAST_SCORES:
        return False
    read = [spec.sides[number].varies for number in spec.score.sides]
    heads = (spec.key_heads, spec.groups)
    sharing = math.prod(n for axis, n in enumerate(heads, 1) if not any(varies[axis] for varies in read))
    return sharing >= _LEAST_SHARING and _may_hide_by_sides(spec)


@lru_cache(maxsize=1024)
def _may_hide_by_sides(spec: AttentionSpec) -> bool:
    sides, low = [spec.sides[number] for number in spec.score.sides], _mentions_low_scores(spec.score)
    masks = any(side.varies[4] if side.differentiable else low for side in sides)
    # What keys are dead is known at run time too, and needs no proof.
    if not masks or spec.live is not None or not _is_eligible(spec, of_positions=False):
        return False
    return rises(spec.score, rectangles([(0, spec.query_length)], [(0, spec.key_length)]))


def usual(spec: AttentionSpec, operands: Operands, dout: Array | None = None, bounds: bool = True) -> Array:
    """Returns whether hidden tiles add nothing to a row whose maximum is great enough, a boolean scalar.

    That is so if the bounds hold that are known while tracing, if those are used, and if what weights of 0 are
    multiplied with is finite.  With the result's cotangent the answer is for the backward, whose products read queries
    and keys too.
    """
    fill, dtype = fill_of(spec), spec.accumulation_dtype
    magnitude = fill.magnitude if bounds and fill is not None else None

    found = _sum_of_squares(operands.value, dtype) < jnp.inf
    if dout is not None:
        found &= _sum_of_squares(dout, dtype) < jnp.inf
    if magnitude is not None:
        greatest = (magnitude / _ROUNDING) ** 2
        found &= _greatest_square(operands.query, dtype) * _greatest_square(operands.key, dtype) <= greatest
        for number in spec.score.sides:
            if spec.sides[number].differentiable:
                found &= jnp.all(jnp.abs(operands.sides[number].astype(dtype)) <= magnitude)
    elif dout is not None:
        found &= _sum_of_squares(operands.query, dtype) * _sum_of_squares(operands.key, dtype) < jnp.inf
    return found


def greatest_product(spec: AttentionSpec, operands: Operands) -> Array:
    """Returns a bound on the size of the products of queries and keys; infinity where there is none, or a NaN."""
    dtype = spec.accumulation_dtype
    norms = (jnp.sqrt(_greatest_square(x, dtype)) for x in (operands.query, operands.key))
    return math.prod(norms, start=jnp.asarray(_ROUNDING, dtype))


def _greatest_square(x: Array, dtype: Dtype) -> Array:
    """Returns the greatest square of a row's norm; infinity if it is beyond the dtype or there is a NaN, which a
    maximum does not show on every platform.  The squares lie in one row, so that operands share kernels."""
    squares = jnp.sum(jnp.square(x.astype(dtype)), axis=-1).reshape(-1)
    return jnp.max(jnp.where(squares < jnp.inf, squares, jnp.inf))


def _sum_of_squares(x: Array, dtype: Dtype) -> Array:
    """Returns the sum of all squares, which is finite only if all elements are.  XLA's CPU compiler takes it from a
    library: there is nothing to compile."""
    return jnp.sum(jnp.square(x.astype(dtype)))


class _Bounds:
    """Decides whether rectangles of scores are always shown, never shown, or neither; records bounds of hidden scores.

    A key is hidden if its score is low whatever the product of query and key.  It is shown if the score is not low for
    a product of 0, which is a guess, on which no result depends.
    """

    def __init__(self, spec: AttentionSpec, magnitude: float | None):
        self._program = spec.score
        self._magnitude = magnitude
        self.of_positions = spec.live is None and all(spec.sides[n].differentiable for n in spec.score.sides)
        self.greatest = -math.inf
        """A bound on the scores of hidden keys."""
        self.usual = -math.inf
        """That bound if products and floating side inputs are 0."""

    def __call__(self, ranges: Ranges) -> Interval:
        bound = intervals.evaluate(self._program, ranges, self._magnitude)
        guess = intervals.evaluate(self._program, ranges, 0.0)
        hidden = bound.high <= LOW
        if np.any(hidden):
            self.greatest = max(self.greatest, float(bound.high[hidden].max()))
            self.usual = max(self.usual, float(guess.high[hidden].max()))
        shown = (guess.low > LOW) & ~hidden
        return Interval(shown.astype(float), 1.0 - hidden, np.dtype(bool))

    def budget(self, count: int) -> int:
        """Returns how many rectangles to evaluate: if side inputs decide, smaller rectangles decide no more."""
        return 2**20 if self.of_positions else 6 * count


def _is_eligible(spec: AttentionSpec, of_positions: bool = True) -> bool:
    """Returns whether a key of weight 0 only adds 0 to a row, or nothing at all if weights hide it; with
    ``of_positions`` also whether positions may hide it."""
    weights = [*spec.weights, *(weight for sums in spec.sums for weight in sums)]
    maxima = [s for s in spec.statistics or () if isinstance(s, ElementwiseProgram)]
    return (
        spec.assume_finite
        and not spec.inner_weights
        and all(weight.kind == "where" for weight in weights)
        and all(s == spec.score and spec.sink is None for s in maxima)
        and not (spec.statistics is not None and spec.keeps)
        # If positions alone decide which keys are dead, tiles are skipped without any check.
        and (spec.live is None or bool(spec.live.sides))
        and (not of_positions or any(isinstance(i, Index) for i in spec.score.inputs))
        and _is_tame(spec)
    )


def _is_tame(spec: AttentionSpec) -> bool:
    """Returns whether derivatives with respect to scores and floating side inputs are finite."""
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
    """Returns whether there may be a mask: a great constant, or a logarithm."""
    great = any(isinstance(i, Constant) and abs(i.value) >= -LOW for i in program.inputs)
    return great or "log" in program.primitives


def _parts(length: int, most: int) -> Edges:
    step = -(-length // most)
    return tuple((start, min(start + step, length)) for start in range(0, length, step))


def _least(bound: float, dtype: Dtype) -> float:
    """Returns the least maximum beside which the exponential of a score up to ``bound`` is 0, in the dtype."""
    largest = float(jnp.finfo(dtype).max)
    # If numbers are so great that their spacing is wider than that, the distance has to be greater.
    distance = max(-exponential_underflows_below(dtype), abs(bound) * _SPACING) if math.isfinite(bound) else 0.0
    return float(np.asarray(max(bound + distance, -largest), dtype))


def least_beside(bound: Array) -> Array:
    """Returns the same for bounds that are known at run time, in their dtype, none of which is above those of hidden
    scores."""
    largest, underflow = float(jnp.finfo(bound.dtype).max), -exponential_underflows_below(bound.dtype)
    found = bound + jnp.maximum(underflow, jnp.where(bound > -jnp.inf, -bound, 0.0) * _SPACING)
    return jnp.maximum(found, -largest)
