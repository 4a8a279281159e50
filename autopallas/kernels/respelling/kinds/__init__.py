"""The kinds of respellings: one module each, whose ``KIND`` declares it."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopallas.kernels.respelling.kind import Kind

__all__ = ["kind_named", "kind_names", "kinds_by_primitive"]


@functools.cache
def kind_names() -> tuple[str, ...]:
    """Returns the names of all kinds."""
    return tuple(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem != "__init__"))


@functools.cache
def kind_named(name: str) -> Kind:
    """Returns the kind of a name."""
    found: Kind = importlib.import_module(f"{__name__}.{name}").KIND
    return found


@functools.cache
def kinds_by_primitive() -> dict[str, tuple[Kind, ...]]:
    """Returns, for each primitive, the kinds that look at its equations; first those that are looked for on request
    alone, which would find nothing where another one has taken the equation."""
    kinds = sorted(map(kind_named, kind_names()), key=lambda kind: not kind.on_request)
    primitives = sorted({primitive for kind in kinds for primitive in kind.primitives})
    return {name: tuple(kind for kind in kinds if name in kind.primitives) for name in primitives}
