"""Traces TPU kernels for the simulation of a schedule, which reads all memory as zeros and measures the time.

Inside ``with simulated() as record`` a kernel is traced with arithmetic in the place of each table of scalars whose
contents are known, so that the simulated schedule visits the same tiles as the kernel does. Facts that are only known
at run time may be assumed there, such as groups of equal sizes, and the record says so. A grid whose steps are alike is
run only in part. What kernels read and write lies in main memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import ArrayFunction, PyTree
from autopallas.kernels.refs import Number, Types
from autopallas.trace_context import TraceContext

__all__ = [
    "Record",
    "Table",
    "assume",
    "concrete",
    "in_main_memory",
    "is_simulated",
    "limit_of",
    "part_of",
    "simulated",
    "tables_of",
    "unknown",
]

_MOST_WORDS = 64
"""Most words of 32 bits that a table may take as constants of the program."""


@dataclass(eq=False)
class Record:
    """Record of what the traced kernels depend on.

    Attributes:
      kernels: how many were traced.
      altered: kernels whose tables were replaced, and what was assumed about data.
      unknown: kernels with tables whose contents are not known.
      parts: by kernel, the number of steps of its grid divided by the number of traced steps.
      steps: how many steps of a grid are traced, where they are alike; None: all.
      most: bytes of vector memory that a kernel asks for at most; None: as where it runs.
    """

    kernels: int = 0
    altered: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    steps: int | None = None
    most: int | None = None


_current: TraceContext[Record | None] = TraceContext(None)


@contextmanager
def simulated(steps: int | None = None, most: int | None = None) -> Iterator[Record]:
    """Marks kernels that are traced inside as meant for a simulation; they must not be run.

    Args:
      steps: how many steps of a grid to trace, where they are alike; None: all.
      most: bytes of vector memory that a kernel may ask for; None: as where it runs.
    """
    record = Record(steps=steps, most=most)
    with _current(record):
        yield record


def is_simulated() -> bool:
    """Returns whether kernels are traced for a simulation."""
    return _current.value is not None


def assume(what: str) -> None:
    """Notes, in a simulation, that what is traced is right for some data only."""
    if _current.value is not None:
        _current.value.altered.append(what)


def unknown(kernel: str) -> None:
    """Notes, in a simulation, that a kernel depends on unknown data."""
    if _current.value is not None:
        _current.value.unknown.append(kernel)


def limit_of(asked: int | None) -> int | None:
    """Returns the bytes of vector memory that a kernel asks for."""
    most = None if _current.value is None else _current.value.most
    return asked if asked is None or most is None else min(asked, most)


def in_main_memory(call: ArrayFunction, shapes: Types, scalars: int) -> ArrayFunction:
    """Makes a kernel for results of some shapes; in a simulation its arrays lie in main memory.

    Left to itself, a compiler that simulates keeps arrays in vector memory until kernels have no room there.

    Args:
      call: makes the kernel, given the shapes and dtypes of its results.
      shapes: these shapes and dtypes.
      scalars: how many leading operands are tables, and stay where they are.
    """
    if _current.value is None:
        made: ArrayFunction = call(shapes)
        return made
    from jax.experimental.pallas import tpu as pltpu

    _current.value.kernels += 1
    kernel = call(jax.tree.map(lambda one: pltpu.HBM(one.shape, one.dtype), shapes))

    def placed(*operands: jax.Array) -> PyTree:
        arrays = jax.tree.map(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), operands[scalars:])
        return kernel(*operands[:scalars], *arrays)

    return placed


def part_of(kernel: str, grid: Sequence[Number], alike: int) -> tuple[Number, ...]:
    """Returns the grid, or in a simulation a part of it; the record then holds how many times as long the whole takes.

    Args:
      kernel: its name.
      grid: the extents, outermost first.
      alike: how many of the first dimensions have steps that all take the same time, except those at the ends.
    """
    extents, record = [n for n in grid if isinstance(n, int)], _current.value
    if record is None or record.steps is None or len(extents) < len(grid):
        return tuple(grid)
    whole = math.prod(extents)
    for axis in range(alike):
        others = math.prod(extents) // max(extents[axis], 1)
        extents[axis] = min(extents[axis], max(1, -(-record.steps // max(others, 1))))
    part = whole / max(math.prod(extents), 1)
    if part > 1:
        record.parts[kernel] = max(part, record.parts.get(kernel, 1.0))
    return tuple(extents)


def concrete() -> AbstractContextManager[None]:
    """Returns a context in which to make tables: in a simulation, values computed inside from constants are known."""
    context: AbstractContextManager[None] = jax.ensure_compile_time_eval() if is_simulated() else nullcontext()
    return context


def tables_of(kernel: str, operands: Sequence[jax.Array]) -> tuple[Table, ...] | None:
    """Returns what stands for a kernel's tables in a simulation; None where the tables are to be read."""
    if not operands or not is_simulated():
        return None
    if not any(isinstance(x, jax.core.Tracer) for x in operands):
        tables = tuple(Table(np.asarray(x)) for x in operands)
        if all(table.words <= _MOST_WORDS for table in tables):
            assume(kernel)
            return tables
    unknown(kernel)
    return None


class Table:
    """A table [n] of integers that is read like a reference, ``table[i]``, and computed.

    Its entries are a multiple of ``i`` plus a constant, or are packed into words, each of which is a constant.

    Example:
      >>> [int(Table(np.array([3, 1, 4, 1, 5]))[i]) for i in range(5)]
      [3, 1, 4, 1, 5]
    """

    def __init__(self, values: np.ndarray):
        self._least = int(values.min())
        self._step = int(values[1] - values[0]) if len(values) > 1 else 0
        self._affine = bool(np.all(values == values[0] + self._step * np.arange(len(values))))
        self._start = int(values[0])
        self._bits = max(int(values.max() - self._least).bit_length(), 1)
        self._each = 32 // self._bits
        self._packed = [] if self._affine else _packed(values - self._least, self._bits, self._each)

    @property
    def words(self) -> int:
        """Number of constants that the table takes."""
        return len(self._packed)

    def __getitem__(self, index: Number) -> jax.Array:
        i = jnp.asarray(index, jnp.int32)
        if self._affine:
            return i * np.int32(self._step) + np.int32(self._start)
        word = lax.div(i, np.int32(self._each))
        shift = lax.mul(lax.rem(i, np.int32(self._each)), np.int32(self._bits))
        shifted = lax.shift_right_logical(_chosen(self._packed, word), shift)
        return (shifted & np.int32(2**self._bits - 1 if self._bits < 32 else -1)) + np.int32(self._least)


def _packed(values: np.ndarray, bits: int, each: int) -> list[int]:
    words = []
    for first in range(0, len(values), each):
        word = sum(int(x) << bits * n for n, x in enumerate(values[first : first + each]))
        words.append(word - 2**32 if word >= 2**31 else word)
    return words


def _chosen(words: Sequence[int], index: Number, first: int = 0) -> jax.Array:
    """Returns ``words[index - first]``, by halving."""
    if len(words) == 1:
        return jnp.asarray(words[0], jnp.int32)
    half = len(words) // 2
    low, high = _chosen(words[:half], index, first), _chosen(words[half:], index, first + half)
    return jnp.where(index < first + half, low, high)
