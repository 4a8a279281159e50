"""Brings an own pattern to court: its replacement is the kernel, and its reference the reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jax.typing import ArrayLike

from autopallas.compat import ArrayFunction
from autopallas.court.case import Inputs
from autopallas.custom.registry import Pattern

__all__ = ["subject_of"]


def subject_of(
    pattern: Pattern,
) -> tuple[ArrayFunction, ArrayFunction, tuple[jax.ShapeDtypeStruct, ...], Inputs | None]:
    """Returns a pattern's replacement and reference, with values for its scalars, its example's types, its inputs."""
    marks, own = pattern.marks, pattern.inputs
    kernel, reference = functools.partial(pattern, **marks), functools.partial(pattern.reference, **marks)
    if own is None:
        return kernel, reference, pattern.shapes, None

    def inputs(types: Sequence[jax.ShapeDtypeStruct], seed: int) -> Sequence[ArrayLike]:
        return own(types)

    return kernel, reference, pattern.shapes, inputs
