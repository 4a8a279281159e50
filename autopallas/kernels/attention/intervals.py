"""Bounds programs of positions by interval arithmetic: the values that they can have on a whole range of positions.

Everything here is plain numpy, because it runs while JAX is tracing.  A value is a pair of float64 arrays (low, high),
one entry per range.  NaN stands for "unknown"; numpy propagates it through arithmetic, and comparisons with it are
False, so that what is unknown stays unknown.  A boolean is a pair of 0 / 1, and (0, 1) is undecided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Index, Input, Instruction

__all__ = ["Interval", "Ranges", "evaluate", "registers"]

Array: TypeAlias = np.ndarray


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds, both inclusive, one pair per range."""

    low: Array
    high: Array
    dtype: Dtype

    @property
    def always(self) -> Array:
        """Ranges on which a boolean is certainly True."""
        return self.low > 0

    @property
    def never(self) -> Array:
        """Ranges on which a boolean is certainly False."""
        return self.high < 1


@dataclass(frozen=True, slots=True)
class Ranges:
    """Rectangles of positions: rows [query_start, query_stop) times columns [key_start, key_stop)."""

    query_start: Array
    query_stop: Array
    key_start: Array
    key_stop: Array

    def __len__(self) -> int:
        return len(self.query_start)

    def take(self, which: Array) -> Ranges:
        return Ranges(self.query_start[which], self.query_stop[which], self.key_start[which], self.key_stop[which])

    @property
    def area(self) -> Array:
        area: Array = (self.query_stop - self.query_start) * (self.key_stop - self.key_start)
        return area


def evaluate(program: ElementwiseProgram, ranges: Ranges, magnitude: float | None = None) -> Interval:
    """Bounds the program's result on each rectangle.

    Scores and floating side inputs are within ``magnitude`` of 0, or unknown without it; other inputs are unknown.
    """
    return registers(program, ranges, magnitude)[program.result]


def registers(program: ElementwiseProgram, ranges: Ranges, magnitude: float | None = None) -> list[Interval]:
    """Bounds every register of the program: inputs first, then instructions."""
    found: list[Interval] = []

    def load(i: Input) -> Interval:
        found.append(_load(i, ranges, magnitude))
        return found[-1]

    def apply(instruction: Instruction, arguments: list[Interval]) -> Interval:
        found.append(_apply(instruction, arguments))
        return found[-1]

    with np.errstate(all="ignore"):
        program.run(load, apply)
    return found


def _load(i: Input, ranges: Ranges, magnitude: float | None) -> Interval:
    count = len(ranges)
    match i:
        case Index():
            rows = i.axis == "query"
            low = (ranges.query_start if rows else ranges.key_start).astype(np.float64)
            high = (ranges.query_stop if rows else ranges.key_stop).astype(np.float64) - 1
            low, high = np.floor(low / i.stride), np.floor(high / i.stride)
            low, high = _modulo(low, high, np.full(count, float(i.extent)))
            return _settle(low + i.offset, high + i.offset, i.dtype)
        case Constant():
            floating = i.dtype.name in _DIGITS
            value = np.full(count, float(np.asarray(i.value, i.dtype) if floating else i.value))
            return _settle(value, value, i.dtype, rounded=False)
        case _ if magnitude is not None and i.dtype.name in _DIGITS:
            return Interval(np.full(count, -magnitude), np.full(count, magnitude), i.dtype)
        case _:
            return _unknown(count, i.dtype)


def _unknown(count: int, dtype: Dtype) -> Interval:
    if dtype == np.bool_:
        return Interval(np.zeros(count), np.ones(count), dtype)
    return Interval(np.full(count, np.nan), np.full(count, np.nan), dtype)


_DIGITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
_LARGEST = {name: float(jnp.finfo(name).max) for name in _DIGITS}


def _settle(low: Array, high: Array, dtype: np.dtype, rounded: bool = True) -> Interval:
    """Converts an interval to ``dtype``: integers that may wrap are unknown, and floats are widened by rounding, and
    infinite beyond the dtype's range."""
    if dtype == np.bool_:
        return Interval(low, high, dtype)
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        exact = 2.0**53  # beyond it float64 cannot represent every integer
        inside = (low >= max(limits.min, -exact)) & (high <= min(limits.max, exact))
        return Interval(np.where(inside, low, np.nan), np.where(inside, high, np.nan), dtype)
    if rounded:
        # A product and a sum may be contracted to one rounding or not: only small enough integers are known exactly.
        digits = _DIGITS.get(dtype.name, 1)
        margin = 2.0 ** (1 - digits)

        def inexact(x: Array) -> Array:
            found: Array = np.isfinite(x) & ((x != np.rint(x)) | (np.abs(x) > 2.0**digits))
            return found

        low = np.where(inexact(low), low - margin * np.abs(low) - 1e-37, low)
        high = np.where(inexact(high), high + margin * np.abs(high) + 1e-37, high)
        largest = _LARGEST.get(dtype.name, np.inf)
        low = np.where(low < -largest, -np.inf, np.where((low > largest) & (low < np.inf), largest, low))
        high = np.where(high > largest, np.inf, np.where((high < -largest) & (high > -np.inf), -largest, high))
    known = ~(np.isnan(low) | np.isnan(high))
    return Interval(np.where(known, low, np.nan), np.where(known, high, np.nan), dtype)


def _arithmetic(function: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """Returns the hull of ``function`` at the corners, for functions that are monotone in each argument separately.

    No interval holds a NaN.  A NaN that infinities may cause is found at a corner, except for 0 * inf between corners.
    """

    def bounds(*arguments: Interval) -> tuple[Array, Array]:
        corners = [function(*c) for c in _corners(arguments)]
        low, high = np.minimum.reduce(corners), np.maximum.reduce(corners)
        if function is not np.multiply:
            return low, high
        finite = np.logical_and.reduce([np.isfinite(a.low) & np.isfinite(a.high) for a in arguments])
        known = finite | ~np.logical_or.reduce([(a.low <= 0) & (a.high >= 0) for a in arguments])
        return np.where(known, low, np.nan), np.where(known, high, np.nan)

    return bounds


def _logarithm(x: Interval) -> tuple[Array, Array]:
    known = x.low >= 0
    return np.where(known, np.log(x.low), np.nan), np.where(known, np.log(x.high), np.nan)


def _corners(arguments: tuple[Interval, ...]) -> list[tuple[Array, ...]]:
    corners: list[tuple[Array, ...]] = [()]
    for a in arguments:
        corners = [(*c, bound) for c in corners for bound in (a.low, a.high)]
    return corners


def _modulo(low: Array, high: Array, divisor: Array) -> tuple[Array, Array]:
    """Bounds the remainder by a positive divisor, with the sign of the dividend."""
    same = np.trunc(low / divisor) == np.trunc(high / divisor)
    same &= (low >= 0) | (high <= 0)
    spread_low, spread_high = np.maximum(np.minimum(low, 0), 1 - divisor), np.minimum(np.maximum(high, 0), divisor - 1)
    return np.where(same, np.fmod(low, divisor), spread_low), np.where(same, np.fmod(high, divisor), spread_high)


def _remainder(x: Interval, divisor: Interval) -> tuple[Array, Array]:
    low, high = _modulo(x.low, x.high, divisor.low)
    known = (divisor.low == divisor.high) & (divisor.low > 0)
    known &= np.issubdtype(x.dtype, np.integer)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


def _divide(x: Interval, divisor: Interval) -> tuple[Array, Array]:
    low, high = _arithmetic(np.divide)(x, divisor)
    if np.issubdtype(x.dtype, np.integer):
        low, high = np.trunc(low), np.trunc(high)
    known = (divisor.low > 0) | (divisor.high < 0)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


def _shift_right(x: Interval, by: Interval) -> tuple[Array, Array]:
    known = (by.low == by.high) & (by.low >= 0) & (by.low < 31) & (x.low >= 0)
    low, high = np.floor(x.low / 2.0**by.low), np.floor(x.high / 2.0**by.low)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


def _absolute(x: Interval) -> tuple[Array, Array]:
    low, high = np.minimum(np.abs(x.low), np.abs(x.high)), np.maximum(np.abs(x.low), np.abs(x.high))
    return np.where((x.low <= 0) & (x.high >= 0), 0.0, low), high


def _less(x: Interval, y: Interval) -> tuple[Array, Array]:
    return (x.high < y.low).astype(float), 1.0 - (x.low >= y.high)


def _less_or_equal(x: Interval, y: Interval) -> tuple[Array, Array]:
    return (x.high <= y.low).astype(float), 1.0 - (x.low > y.high)


def _equal(x: Interval, y: Interval) -> tuple[Array, Array]:
    always = (x.low == x.high) & (y.low == y.high) & (x.low == y.low)
    return always.astype(float), 1.0 - ((x.high < y.low) | (x.low > y.high))


def _not(x: Interval) -> tuple[Array, Array]:
    return (1 - x.high, 1 - x.low) if x.dtype == np.bool_ else (-1 - x.high, -1 - x.low)


def _bits(
    on_booleans: Callable[[Interval, Interval], tuple[Array, Array]], on_integers: Callable[[Array, Array], Array]
) -> Callable[[Interval, Interval], tuple[Array, Array]]:
    """Returns a bitwise operation: on booleans by its truth table, on integers only if both are single known values."""

    def bounds(x: Interval, y: Interval) -> tuple[Array, Array]:
        if x.dtype == np.bool_:
            return on_booleans(x, y)
        known = (x.low == x.high) & (y.low == y.high)
        value = on_integers(np.where(known, x.low, 0).astype(np.int64), np.where(known, y.low, 0).astype(np.int64))
        value = np.where(known, value.astype(np.float64), np.nan)
        return value, value

    return bounds


def _exclusive(x: Interval, y: Interval) -> tuple[Array, Array]:
    low, high = _equal(x, y)
    return 1 - high, 1 - low


def _select(which: Interval, *cases: Interval) -> tuple[Array, Array]:
    if which.dtype != np.bool_ or len(cases) != 2:
        nothing = np.full_like(which.low, np.nan)
        return nothing, nothing
    off, on = cases
    low = np.where(which.never, off.low, np.where(which.always, on.low, np.minimum(off.low, on.low)))
    high = np.where(which.never, off.high, np.where(which.always, on.high, np.maximum(off.high, on.high)))
    return low, high


def _convert(x: Interval, dtype: Dtype) -> tuple[Array, Array]:
    if dtype == np.bool_:
        return ((x.low > 0) | (x.high < 0)).astype(float), 1.0 - ((x.low == 0) & (x.high == 0))
    if np.issubdtype(dtype, np.integer):
        return np.trunc(x.low), np.trunc(x.high)
    return x.low, x.high


def _each(function: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """Returns an operation that maps lower bounds to the lower and upper bounds to the upper, including infinities."""
    return lambda *a: (function(*(x.low for x in a)), function(*(x.high for x in a)))


_RULES: dict[str, Callable[..., tuple[Array, Array]]] = {
    "add": _arithmetic(np.add),
    "add_any": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "mul": _arithmetic(np.multiply),
    "div": _divide,
    "rem": _remainder,
    "neg": lambda x: (-x.high, -x.low),
    "abs": _absolute,
    "sign": _each(np.sign),
    "square": lambda x: _each(np.square)(Interval(*_absolute(x), x.dtype)),
    "log": _logarithm,
    "tanh": _each(np.tanh),
    "floor": _each(np.floor),
    "ceil": _each(np.ceil),
    "min": _each(np.minimum),
    "max": _each(np.maximum),
    "clamp": _each(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right,
    "lt": _less,
    "le": _less_or_equal,
    "gt": lambda x, y: _less(y, x),
    "ge": lambda x, y: _less_or_equal(y, x),
    "eq": _equal,
    "ne": _exclusive,
    "not": _not,
    "and": _bits(_each(np.minimum), np.bitwise_and),
    "or": _bits(_each(np.maximum), np.bitwise_or),
    "xor": _bits(_exclusive, np.bitwise_xor),
    "select_n": _select,
    "copy": _each(np.positive),
    "stop_gradient": _each(np.positive),
}

_EXACT = frozenset(  # these return an argument or a boolean: nothing is rounded
    "neg abs sign floor ceil min max clamp lt le gt ge eq ne not and or xor select_n copy stop_gradient".split()
)


def _apply(instruction: Instruction, arguments: list[Interval]) -> Interval:
    name, dtype = instruction.primitive.name, instruction.dtype
    if name == "convert_element_type":
        low, high = _convert(arguments[0], dtype)
        return _settle(low, high, dtype)
    rule = _RULES.get(name)
    if rule is None:
        return _unknown(len(arguments[0].low), dtype)
    low, high = rule(*arguments)
    return _settle(low, high, dtype, rounded=name not in _EXACT)
