"""How a spelling of attention is written down: a plain function of sizes and arrays, named as in the tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

__all__ = ["EQUAL", "ODD", "SPELLINGS", "Sizes", "Spelling", "array", "bhtd", "bthd", "registry", "spelling"]


class Sizes(NamedTuple):
    """B, N (query heads are ``heads * groups`` where keys have fewer), T, S, D."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    size: int

    @property
    def all_heads(self) -> int:
        return self.heads * self.groups

    @property
    def ahead(self) -> int:
        """How many keys lie before the first query's own."""
        return self.keys - self.queries


ODD = Sizes(batch=2, heads=3, groups=2, queries=7, keys=11, size=5)
EQUAL = Sizes(batch=4, heads=4, groups=4, queries=4, keys=4, size=4)
"""All axes of one size: labels cannot be told apart by it."""

Inputs = Callable[[Sizes, Any], Sequence[Any]]


def array(*shape: int, dtype: Any = jnp.float32, seed: int = 0, scale: float = 1.0) -> Any:
    generator = np.random.default_rng([seed, *shape])
    return jnp.asarray(generator.standard_normal(shape) * scale, dtype)


def bhtd(sizes: Sizes, dtype: Any, grouped: bool = False) -> Sequence[Any]:
    """q [B, N, T, D], k and v [B, K, S, D]."""
    b, h, g, t, s, d = sizes
    n = h * g if grouped else h
    return (
        array(b, n, t, d, dtype=dtype, seed=1),
        array(b, h, s, d, dtype=dtype, seed=2),
        array(b, h, s, d, dtype=dtype, seed=3),
    )


def bthd(sizes: Sizes, dtype: Any, grouped: bool = False) -> Sequence[Any]:
    """q [B, T, N, D], k and v [B, S, K, D]."""
    return [jnp.swapaxes(x, 1, 2) for x in bhtd(sizes, dtype, grouped)]


def registry() -> tuple[dict[str, Callable[..., Any]], Callable[..., Any]]:
    """A dictionary of functions by their names, and a decorator that enters them."""
    entries: dict[str, Callable[..., Any]] = {}

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        entries[function.__name__] = function
        return function

    return entries, enter


@dataclass(frozen=True)
class Spelling:
    name: str
    function: Callable[..., Any]
    inputs: Inputs
    extra: Inputs
    sites: Callable[[Sizes], int]
    gradients: bool

    def program(self, sizes: Sizes) -> Callable[..., Any]:
        return functools.partial(self.function, sizes)

    def arguments(self, sizes: Sizes, dtype: Any) -> Sequence[Any]:
        return [*self.inputs(sizes, dtype), *self.extra(sizes, dtype)]


SPELLINGS: dict[str, Spelling] = {}


def spelling(
    inputs: Inputs = bhtd,
    extra: Inputs = lambda sizes, dtype: (),
    sites: int | Callable[[Sizes], int] = 1,
    gradients: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a function into the catalogue.  ``sites`` is how many attentions are in it."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        assert name not in SPELLINGS, name
        count = sites if callable(sites) else lambda _: sites
        SPELLINGS[name] = Spelling(name, function, inputs, extra, count, gradients)
        return function

    return enter
