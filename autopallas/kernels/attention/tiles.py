"""Decides which tiles of the score matrix have to be computed, from positions alone, while JAX is tracing.

A tile is *dead* if ``spec.live`` is False throughout, *full* if it is True throughout, else *partial*.  Results do not
depend on this: a dead tile may be skipped if the rule in :func:`tile_map` allows it, and in full tiles comparisons with
a known outcome are not evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from autopallas.kernels.attention import intervals
from autopallas.kernels.attention.intervals import Interval, Ranges
from autopallas.kernels.attention.programs import causal
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Instruction, Score

if TYPE_CHECKING:
    from autopallas.kernels.attention.spec import AttentionSpec

__all__ = [
    "DEAD",
    "FULL",
    "HIDDEN",
    "PARTIAL",
    "Edges",
    "classify",
    "decided",
    "increasing",
    "of_positions",
    "rectangles",
    "rises",
    "scale_of",
    "simplified",
    "tile_map",
]

Array: TypeAlias = np.ndarray
MaskClass: TypeAlias = Literal["full", "causal", "static", "dynamic"]

DEAD, PARTIAL, FULL, HIDDEN = 0, 1, 2, 3
"""States of a tile; only :mod:`fills` finds HIDDEN ones."""

_BUDGET = 2**20  # rectangles to evaluate before giving up on an irregular mask


@lru_cache(maxsize=1024)
def classify(spec: AttentionSpec) -> MaskClass:
    """Classifies the mask by the keys that are live.

    "full": every key.  "causal": exactly the keys 0 .. t for row t.  "static": another mask of positions alone.
    "dynamic": a mask that depends on side inputs.
    """
    live = spec.live
    if live is None:
        return "full"
    if live.sides:
        return "dynamic"
    return of_positions(lambda ranges: intervals.evaluate(live, ranges), spec.query_length, spec.key_length)


def of_positions(
    decide: Callable[[Ranges], Interval], query_length: int, key_length: int, budget: int = _BUDGET
) -> Literal["full", "causal", "static"]:
    """Classifies a mask that positions alone decide."""
    whole = rectangles([(0, query_length)], [(0, key_length)])

    def agrees(ranges: Ranges) -> Interval:
        ours, wanted = decide(ranges), intervals.evaluate(causal(), ranges)
        same = (ours.always & wanted.always) | (ours.never & wanted.never)
        differs = (ours.always & wanted.never) | (ours.never & wanted.always)
        return Interval(same.astype(float), 1.0 - differs, ours.dtype)

    if decided(decide, whole, budget)[0] == FULL:
        return "full"
    return "causal" if decided(agrees, whole, budget)[0] == FULL else "static"


Edges: TypeAlias = tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def tile_map(spec: AttentionSpec, rows: Edges, columns: Edges) -> Array:
    """Returns the state of each tile ``rows[i] x columns[j]``, given as (start, stop): DEAD, PARTIAL or FULL.

    A tile is DEAD, and may be skipped, only if (1) values may be assumed to be finite (a NaN in a masked row of values
    would reach the original's result), and (2) each of its rows has a live key elsewhere: the weight of a masked key is
    exactly zero only beside a live one, and the result of a row without any is the mean of the values, or NaN.
    """
    shape = (len(rows), len(columns))
    live = spec.live
    if live is None:
        return np.full(shape, FULL, np.int8)
    if live.sides:
        return np.full(shape, PARTIAL, np.int8)

    def decide(ranges: Ranges) -> Interval:
        return intervals.evaluate(live, ranges)

    states = decided(decide, rectangles(rows, columns)).reshape(shape)
    for i, (start, stop) in enumerate(rows):
        if not np.any(states[i] == DEAD) or (spec.assume_finite and np.any(states[i] == FULL)):
            continue
        if not spec.assume_finite or not _every_row_live(decide, start, stop, spec.key_length):
            states[i] = np.where(states[i] == DEAD, PARTIAL, states[i])
    states.setflags(write=False)  # it is cached
    return states


def rectangles(rows: Sequence[tuple[int, int]], columns: Sequence[tuple[int, int]]) -> Ranges:
    row_edges = np.repeat(np.array(rows, np.int64).reshape(-1, 2), len(columns), axis=0)
    column_edges = np.tile(np.array(columns, np.int64).reshape(-1, 2), (len(rows), 1))
    return Ranges(row_edges[:, 0], row_edges[:, 1], column_edges[:, 0], column_edges[:, 1])


def decided(decide: Callable[[Ranges], Interval], ranges: Ranges, budget: int = _BUDGET) -> Array:
    """Returns DEAD, FULL or PARTIAL for each rectangle; cuts undecided ones in four until both outcomes are seen."""
    seen_true = np.zeros(len(ranges), bool)
    seen_false = np.zeros(len(ranges), bool)
    undecided = np.zeros(len(ranges), bool)
    owner = np.arange(len(ranges))
    spent = 0
    while len(ranges):
        spent += len(ranges)
        answer = decide(ranges)
        seen_true[owner[answer.always]] = True
        seen_false[owner[answer.never]] = True
        open_ = ~(answer.always | answer.never)
        stuck = open_ & (ranges.area == 1)
        undecided[owner[stuck]] = True
        open_ &= ~stuck & ~(seen_true & seen_false | undecided)[owner]
        ranges, owner = ranges.take(open_), owner[open_]
        if spent + 4 * len(ranges) > budget:
            undecided[owner] = True
            break
        ranges, owner = _quarters(ranges, owner)
    states = np.full(len(seen_true), PARTIAL, np.int8)
    states[seen_true & ~seen_false & ~undecided] = FULL
    states[seen_false & ~seen_true & ~undecided] = DEAD
    return states


def _quarters(ranges: Ranges, owner: Array) -> tuple[Ranges, Array]:
    middle_row = (ranges.query_start + ranges.query_stop + 1) // 2
    middle_column = (ranges.key_start + ranges.key_stop + 1) // 2
    rows = ((ranges.query_start, middle_row), (middle_row, ranges.query_stop))
    columns = ((ranges.key_start, middle_column), (middle_column, ranges.key_stop))
    parts = [(a, b, c, d) for a, b in rows for c, d in columns]
    cut = Ranges(*(np.concatenate([p[i] for p in parts]) for i in range(4)))
    nonempty = cut.area > 0
    return cut.take(nonempty), np.tile(owner, 4)[nonempty]


def _every_row_live(decide: Callable[[Ranges], Interval], start: int, stop: int, key_length: int) -> bool:
    """Returns whether each row in [start, stop) provably has a live key."""
    count = stop - start
    ranges = rectangles([(r, r + 1) for r in range(start, stop)], [(0, key_length)])
    owner = np.arange(count)
    alive = np.zeros(count, bool)
    spent = 0
    while len(ranges):
        spent += len(ranges)
        answer = decide(ranges)
        alive[owner[answer.always]] = True
        open_ = ~(answer.always | answer.never) & (ranges.area > 1) & ~alive[owner]
        ranges, owner = ranges.take(open_), owner[open_]
        if spent + 2 * len(ranges) > _BUDGET:
            break
        ranges, owner = _quarters(ranges, owner)
    return bool(np.all(alive))


def simplified(program: ElementwiseProgram, ranges: Ranges) -> ElementwiseProgram:
    """Simplifies a program to one that is equal on the given rectangles.

    Selections whose predicate is known there are resolved, values that are one number there, such as what a mask adds,
    become constants, and operations with these that change nothing are removed.
    """
    bounds = intervals.registers(program, ranges)

    def known(register: int) -> bool | None:
        b = bounds[register]
        if b.dtype != np.bool_:
            return None
        return True if bool(np.all(b.always)) else False if bool(np.all(b.never)) else None

    first = len(program.inputs)
    constants = _known_numbers(program, bounds)
    if constants:  # they become inputs, after the others
        added = tuple(constants.values())
        shift = len(added)

        def moved(register: int) -> int:
            return register if register < first else register + shift

        instructions = tuple(
            Instruction(i.primitive, i.params, tuple(map(moved, i.arguments)), i.dtype) for i in program.instructions
        )
        program = ElementwiseProgram((*program.inputs, *added), instructions, moved(program.result))
        bounds = [*bounds[:first], *(bounds[r] for r in constants), *bounds[first:]]
        same = {register + shift: first + n for n, register in enumerate(constants)}  # those equal to an earlier one
        first += shift
    else:
        same = {}

    def root(register: int) -> int:
        return same.get(register, register)

    plain = _ignores_the_sign_of_zeros(program)
    for offset, instruction in enumerate(program.instructions):
        name, arguments = instruction.primitive.name, instruction.arguments
        if name == "select_n" and len(arguments) == 3 and (which := known(arguments[0])) is not None:
            same[first + offset] = root(arguments[2 if which else 1])
        elif plain and (kept := _unchanged(name, [bounds[a] for a in arguments])) is not None:
            same[first + offset] = root(arguments[kept])
    return _without_dead_code(program, root) if same else program


def _known_numbers(program: ElementwiseProgram, bounds: Sequence[Interval]) -> dict[int, Constant]:
    """Returns the instructions whose result is one number on all rectangles, with that number."""
    found: dict[int, Constant] = {}
    for register, b in enumerate(bounds[len(program.inputs) :], len(program.inputs)):
        if b.dtype != np.bool_ and len(b.low) and np.all(b.low == b.low[0]) and np.all(b.high == b.low[0]):
            number = float(b.low[0])
            if number.is_integer() and abs(number) < 2**24:
                found[register] = Constant(int(number) if b.dtype.kind in "iu" else number, b.dtype)
    return found


def _ignores_the_sign_of_zeros(program: ElementwiseProgram) -> bool:
    """Returns whether the sign of an intermediate zero affects at most the sign of zeros in the result."""
    for instruction in program.instructions:
        name, divisor = instruction.primitive.name, instruction.arguments[-1]
        constant = divisor < len(program.inputs) and isinstance(program.inputs[divisor], Constant)
        if name not in _SIGNLESS and not (name == "div" and constant):
            return False
    return True


def _unchanged(name: str, arguments: Sequence[Interval]) -> int | None:
    """Returns which argument an instruction returns unchanged, except for the sign of zeros, or None."""
    if len(arguments) != 2 or name not in ("add", "sub", "mul", "div"):
        return None
    neutral = 0.0 if name in ("add", "sub") else 1.0
    at = [bool(np.all((x.low == neutral) & (x.high == neutral))) for x in arguments]
    return 0 if at[1] else 1 if at[0] and name in ("add", "mul") else None


def _without_dead_code(program: ElementwiseProgram, root: Callable[[int], int]) -> ElementwiseProgram:
    first = len(program.inputs)
    needed: set[int] = set()
    pending = [root(program.result)]
    while pending:
        register = pending.pop()
        if register in needed:
            continue
        needed.add(register)
        if register >= first:
            pending += [root(a) for a in program.instructions[register - first].arguments]
    number = {register: n for n, register in enumerate(sorted(needed))}
    instructions = tuple(
        Instruction(i.primitive, i.params, tuple(number[root(a)] for a in i.arguments), i.dtype)
        for r in sorted(needed)
        if r >= first
        for i in (program.instructions[r - first],)
    )
    inputs = tuple(program.inputs[r] for r in sorted(needed) if r < first)
    return ElementwiseProgram(inputs, instructions, number[root(program.result)])


def increasing(program: ElementwiseProgram) -> bool:
    """Returns whether the program is a non-decreasing function of the score alone.

    Rounding keeps the order, so that the program's value at a row's largest score is the row's largest value, bit for
    bit.
    """
    alone = all(isinstance(i, (Score, Constant)) for i in program.inputs)
    return alone and program.depends_on_score and rises(program, rectangles([(0, 1)], [(0, 1)]))


def rises(program: ElementwiseProgram, ranges: Ranges, magnitude: float | None = None) -> bool:
    """Returns whether the program does not decrease with the score, whatever the positions and side inputs are.

    Args:
      program: the program.
      ranges: where it is evaluated.
      magnitude: a bound on scores and floating side inputs, of which signs of factors may follow; None for none.
    """
    bounds = intervals.registers(program, ranges, magnitude)
    fixed = [not isinstance(i, Score) for i in program.inputs]  # registers that do not depend on the score
    rising = [isinstance(i, Score) for i in program.inputs]
    for instruction in program.instructions:
        name, arguments = instruction.primitive.name, instruction.arguments
        follows = [fixed[a] or rising[a] for a in arguments]
        fixed.append(all(fixed[a] for a in arguments))
        factors = [bounds[a] for a in arguments if fixed[a]]
        if len(arguments) == 1:
            ok = instruction.dtype.name in _FLOATING and name in _INCREASING and rising[arguments[0]]
        elif name in ("add", "add_any", "max", "min"):
            ok = all(follows)
        elif name == "sub":
            ok = follows[0] and fixed[arguments[1]]
        elif name in ("mul", "div"):
            finite = [bool(np.all((f.low >= 0) & (f.high < np.inf))) for f in factors]
            ok = len(finite) == 1 and finite[0] and (name == "mul" or (rising[arguments[0]] and _positive(factors[0])))
            ok &= any(rising[a] for a in arguments)
        elif name == "select_n":
            ok = fixed[arguments[0]] and all(follows[1:])
        elif name == "clamp":
            ok = fixed[arguments[0]] and follows[1] and fixed[arguments[2]]
        else:
            ok = False
        rising.append(ok and not fixed[-1])
    return rising[program.result]


def _positive(bounds: Interval) -> bool:
    return bool(np.all(bounds.low > 0))


def scale_of(program: ElementwiseProgram) -> float | None:
    """Returns c > 0 if the program is the score times c, in float32, except for rounding; else None."""
    first, scale = len(program.inputs), 1.0
    register = next((n for n, i in enumerate(program.inputs) if isinstance(i, Score)), None)
    constants = {n: i.value for n, i in enumerate(program.inputs) if isinstance(i, Constant)}
    for offset, instruction in enumerate(program.instructions):
        name, (one, *others) = instruction.primitive.name, instruction.arguments
        if name == "mul" and others == [register]:
            one, others = others[0], [one]
        if one != register or len(others) != 1 or name not in ("mul", "div") or others[0] not in constants:
            return None
        constant = float(constants[others[0]])
        scale *= constant if name == "mul" else 1 / (constant or np.nan)
        register = first + offset
    dtypes = {i.dtype.name for i in (*program.inputs, *program.instructions)}
    plain = register == program.result and dtypes == {"float32"} and len(program.inputs) == len(constants) + 1
    return scale if plain and 2.0**-60 < scale < 2.0**60 else None


_SIGNLESS = frozenset(
    "add sub mul neg abs max min clamp select_n tanh square convert_element_type copy stop_gradient exp "
    "lt le gt ge eq ne and or not xor".split()
)
_FLOATING = frozenset({"bfloat16", "float16", "float32", "float64"})
_INCREASING = frozenset({"convert_element_type", "reduce_precision", "tanh", "copy", "stop_gradient"})
