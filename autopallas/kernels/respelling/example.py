"""Makes inputs to measure respellings on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import ArrayFunction, Shaped
from autopallas.kernels.example import harmless, is_drawn, normal
from autopallas.kernels.respelling import reference
from autopallas.kernels.respelling.kinds import kind_named
from autopallas.kernels.respelling.site import RespellingSite
from autopallas.kernels.respelling.step_sequences import StepsApart
from autopallas.sites.operation import Kernel

__all__ = ["operands", "original", "program", "read", "repeats"]

_ELEMENTS, _MOST_REPEATS = 2**19, 2**12
"""Of a loop that a search measures: its elements are about so many, and its steps at most so many."""


def operands(site: RespellingSite, types: Sequence[Shaped], key: int = 0) -> list[np.ndarray]:
    """Returns an array for each operand of a site: normally distributed where it is floating."""
    random = np.random.default_rng(key)
    filled = harmless(random, types)
    for i, array in enumerate(filled):
        if is_drawn(array.dtype):
            filled[i] = normal(random, array.shape, array.dtype)
    fill = kind_named(site.form.kind).fill
    return filled if fill is None else fill(site.form, random, filled)


def repeats(site: RespellingSite) -> int:
    """Returns how often a call of a search computes the site: small ones that occur in loops, in a loop."""
    kind = kind_named(site.form.kind)
    if not kind.in_loops:
        return 1
    return min(max(_ELEMENTS // site.spec.elements, kind.least_steps), _MOST_REPEATS)


def original(site: RespellingSite) -> ArrayFunction | None:
    """Returns what a search measures in the place of a site's equations; None where these show how fast they are."""
    if not kind_named(site.form.kind).is_slow_among_others:
        return None
    return lambda *given: site.forward(cast(Kernel, reference), None, given)[0]


def read(site: RespellingSite, results: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the results as a program reads them: of steps whose results it fuses with what reads them, a zero is
    added to these, since what computes a result of a program is not computed again."""
    steps = dict(site.form.parameters).get("steps")
    if not isinstance(steps, StepsApart):
        return list(results)
    zero = next((x.ravel()[0] * 0 for x in operands if jnp.issubdtype(x.dtype, jnp.floating)), None)
    if zero is None:
        return list(results)
    return [
        x + zero.astype(x.dtype) if fused and jnp.issubdtype(x.dtype, jnp.floating) else x
        for x, fused in zip(results, steps.fused, strict=True)
    ]


def program() -> tuple[ArrayFunction, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns a program with one respelling, and the types of its arguments."""
    _, sample = next(iter(kind_named("convolution").samples()))
    return sample.function, sample.arguments
