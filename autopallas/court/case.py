"""Generates the cases of a trial: sizes that keep the relations between axes, dtypes, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from autopallas.compat import Dtype

__all__ = [
    "LARGEST",
    "Case",
    "Inputs",
    "Numbers",
    "Types",
    "dtype_variants",
    "in_words",
    "number_variants",
    "random_array",
    "size_variants",
    "special_variants",
]

Types: TypeAlias = tuple[jax.ShapeDtypeStruct, ...]
Inputs: TypeAlias = Callable[[Sequence[jax.ShapeDtypeStruct], int], Sequence[ArrayLike]]
"""``inputs(types, seed)`` returns an array for each type."""

_MOST_BYTES = 2**25
"""Size of all arguments that a generated case does not exceed, in bytes."""
LARGEST = float(np.finfo(np.float64).max)
"""Special value that stands for the largest number of a dtype."""
_ODD = (3, 5, 7, 9, 11, 13, 17, 19, 23, 29)
_SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int64": "i64"}


@dataclass(frozen=True, slots=True)
class Numbers:
    """What floating-point arguments hold: normal numbers times ``scale`` plus ``offset``, and one special value.

    Attributes:
      special: the value that one element of one argument has, or None.
      argument: the position of that argument among the floating-point ones.
      place: where in the flat argument it stands, from 0, the first element, to 1, the last one.
    """

    words: str = "normal numbers"
    scale: float = 1.0
    offset: float = 0.0
    special: float | None = None
    argument: int = 0
    place: float = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """One hearing: types of the arguments, and what they hold."""

    types: Types
    numbers: Numbers = Numbers()
    seed: int = 0

    def __str__(self) -> str:
        return f"{in_words(self.types)}: {self.numbers.words}, seed {self.seed}"

    @property
    def size(self) -> int:
        """How many elements all arguments have."""
        return sum(kind.size for kind in self.types)

    def arguments(self, inputs: Inputs | None) -> list[np.ndarray]:
        """Returns the arguments: those that ``inputs`` gives or random ones, with this case's numbers."""
        given = [None] * len(self.types) if inputs is None else list(inputs(self.types, self.seed))
        random = np.random.default_rng(self.seed)
        found: list[np.ndarray] = []
        floats = 0
        for kind, own in zip(self.types, given, strict=True):
            array = random_array(random, kind) if own is None else np.asarray(jnp.asarray(own, kind.dtype))
            if array.shape != kind.shape:
                raise ValueError(f"the inputs have shape {array.shape} where {kind.shape} was asked for")
            if jnp.issubdtype(kind.dtype, jnp.inexact):
                array = self._held(array, floats)
                floats += 1
            found.append(array)
        return found

    def _held(self, array: np.ndarray, position: int) -> np.ndarray:
        numbers = self.numbers
        if (numbers.scale, numbers.offset) != (1.0, 0.0):
            wide = np.complex128 if np.iscomplexobj(array) else np.float64
            with np.errstate(over="ignore"):
                scaled = array.astype(wide) * numbers.scale
                array = np.asarray(scaled + numbers.offset if numbers.offset else scaled).astype(array.dtype)
        if numbers.special is not None and numbers.argument == position and array.size:
            array = array.copy()
            limit = float(jnp.finfo(array.dtype).max)
            value = numbers.special if not np.isfinite(numbers.special) else np.clip(numbers.special, -limit, limit)
            array.reshape(-1)[round(numbers.place * (array.size - 1))] = value
        return array


def random_array(random: np.random.Generator, kind: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns an array of a type: normal numbers, or 0 and 1 where these are no floats."""
    if jnp.issubdtype(kind.dtype, jnp.inexact):
        return np.asarray(random.standard_normal(kind.shape), kind.dtype)
    return np.asarray(random.integers(0, 2, kind.shape), kind.dtype)


def in_words(types: Types) -> str:
    """Returns types as ``--shapes`` takes them."""
    return ", ".join(f"{_SHORT.get(t.dtype.name, t.dtype.name)}[{','.join(map(str, t.shape))}]" for t in types)


# ---------------------------------------------------------------------- sizes


def size_variants(types: Types) -> Iterator[tuple[str, Types]]:
    """Yields types with other sizes, with words for each; axes of equal size stay equal, and those of size 1 are kept.

    Sizes that the reference does not accept, such as those of axes of which one is a multiple of the other, are left
    out later, since only the reference knows them.
    """
    sizes = sorted({n for kind in types for n in kind.shape if n > 1})
    yield "the given sizes", types
    variants: list[tuple[str, dict[int, int]]] = [
        ("odd sizes", dict(zip(sizes, _ODD, strict=False))),
        ("one more than given", {n: n + 1 for n in sizes}),
        ("one less than given", {n: n - 1 for n in sizes}),
        ("doubled", {n: 2 * n for n in sizes}),
        ("doubled, and one more", {n: 2 * n + 1 for n in sizes}),
        ("all of size 1", dict.fromkeys(sizes, 1)),
    ]
    for n in sizes:
        variants += [(f"{n} becomes {m}", {n: m}) for m in (0, 1, n + 1, 4 * n, 8 * n + 3)]
    seen = {types}
    for words, new in variants:
        changed = tuple(jax.ShapeDtypeStruct(tuple(new.get(n, n) for n in t.shape), t.dtype) for t in types)
        if changed not in seen and _bytes(changed) <= max(_MOST_BYTES, _bytes(types)):
            seen.add(changed)
            yield words, changed


def _bytes(types: Types) -> int:
    return sum(kind.size * np.dtype(kind.dtype).itemsize for kind in types)


# ---------------------------------------------------------------------- dtypes and numbers


def dtype_variants(types: Types, dtypes: Sequence[Dtype]) -> Iterator[Types]:
    """Yields the types with each of some dtypes in the place of those that are real floating-point numbers."""
    for dtype in dtypes:
        changed = tuple(
            jax.ShapeDtypeStruct(t.shape, dtype if jnp.issubdtype(t.dtype, jnp.floating) else t.dtype) for t in types
        )
        if changed != types:
            yield changed


def number_variants(types: Types) -> tuple[Numbers, ...]:
    """Returns magnitudes and offsets that the floating-point arguments may have."""
    if not _floating(types):
        return ()
    return (
        Numbers("numbers of size 1e-4", scale=1e-4),
        Numbers("numbers of size 30", scale=30.0),
        Numbers("numbers of size 1e4", scale=1e4),
        Numbers("normal numbers plus 1000", offset=1000.0),
        Numbers("zeros", scale=0.0),
        Numbers("zeros of both signs", scale=-0.0),
    )


def special_variants(types: Types) -> tuple[Numbers, ...]:
    """Returns one special value in one argument, at its end and in its middle."""
    values = {
        "NaN": np.nan,
        "inf": np.inf,
        "-inf": -np.inf,
        "-0.0": -0.0,
        "the largest number": LARGEST,
    }
    return tuple(
        Numbers(f"{name} {where} argument {argument}", special=float(value), argument=argument, place=place)
        for argument in range(_floating(types))
        for name, value in values.items()
        for where, place in (("at the end of floating", 1.0), ("in the middle of floating", 0.5))
        if place == 1.0 or name in ("NaN", "inf")
    )


def _floating(types: Types) -> int:
    return sum(bool(jnp.issubdtype(kind.dtype, jnp.inexact)) for kind in types)
