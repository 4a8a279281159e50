"""A program with two sites of each operation, of which the second is told by its sizes, and an own pattern.

``ODD`` is a size that only the second site of each operation has: a fault for that site alone looks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.graph import Graph
from autopallas.patterns.cross_entropy.region import Region
from tests.faults.programs import attention, cross_entropy, grouped_matmul

ODD = 20


def mixture(rows, weights, router):
    """Every expert computes every row; most of it is multiplied by zero."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax(rows @ router), 2)
    combine = jnp.sum(jax.nn.one_hot(chosen, weights.shape[0]) * gates[..., None], -2)
    return jnp.einsum("te,tef->tf", combine, jnp.einsum("td,edf->tef", rows, weights))


def several(given):
    """Results of two attentions, two losses, two grouped matmuls and two mixtures."""
    return (
        attention(*given["attention"]),
        attention(*given["odd attention"]),
        cross_entropy(*given["cross_entropy"]),
        cross_entropy(*given["odd cross_entropy"]),
        grouped_matmul(*given["grouped_matmul"]),
        grouped_matmul(*given["odd grouped_matmul"]),
        mixture(*given["mixture"]),
        mixture(*given["odd mixture"]),
    )


def step(given):
    """Value and gradients of the same by all floating operands."""
    moved = {name: tuple(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays) for name, arrays in given.items()}

    def total(floats):
        filled = {
            name: tuple(f if m else x for f, x, m in zip(floats[name], given[name], moved[name], strict=True))
            for name in given
        }
        return sum(jnp.sum(jnp.tanh(x)) for x in several(filled))

    floats = {name: tuple(x if m else None for x, m in zip(given[name], moved[name], strict=True)) for name in given}
    return jax.value_and_grad(total)(floats)


def operands() -> dict[str, tuple[Any, ...]]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape, np.float32)

    labels = np.arange(32, dtype=np.int32) % 20
    return {
        "attention": (normal(48, 32), normal(48, 32), normal(48, 32)),
        "odd attention": (normal(48, ODD), normal(48, ODD), normal(48, ODD)),
        "cross_entropy": (normal(32, 16), normal(96, 16), labels),
        "odd cross_entropy": (normal(32, ODD), normal(96, ODD), labels),
        "grouped_matmul": (normal(32, 16), normal(3, 16, 24), np.array([10, 2, 20], np.int32)),
        "odd grouped_matmul": (normal(32, ODD), normal(3, ODD, 24), np.array([10, 2, 20], np.int32)),
        "mixture": (normal(32, 16), normal(4, 16, 24), normal(16, 4)),
        "odd mixture": (normal(32, 16), normal(4, 16, ODD), normal(16, 4)),
    }


def is_odd(*things: Any) -> bool:
    """Whether something among the arguments of a function in the pipeline is of a second site."""
    return any(ODD in shape for thing in things if not isinstance(thing, Graph) for shape in _shapes(thing))


def _shapes(thing: Any) -> list[tuple[int, ...]]:
    """The shapes of what a node, a match or a part of one reads and gives."""
    if isinstance(thing, Region):
        return [thing.graph.shape(number) for number in thing.dot.inputs]
    for name in ("node", "second", "root", "equation"):
        inner = getattr(thing, name, None)
        if inner is not None and hasattr(inner, "equation" if name != "equation" else "invars"):
            return _shapes(inner)
    atoms: list[Any] = [use.variable for use in getattr(thing, "uses", ())]
    for name in ("in_avals", "out_avals", "invars", "outvars"):
        atoms += getattr(getattr(thing, "original", thing), name, ())
    return [tuple(getattr(getattr(atom, "aval", atom), "shape", ())) for atom in atoms]


def faulty(real: Callable[..., Any], error: Exception, everywhere: bool = False) -> Callable[..., Any]:
    """A function of the pipeline that raises an exception where it is given something of an odd site."""

    def fails(*arguments: Any, **keywords: Any) -> Any:
        if everywhere or is_odd(*arguments):
            raise error
        return real(*arguments, **keywords)

    return fails
