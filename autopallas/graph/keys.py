"""Computes the keys by which a graph identifies values: equal keys mean equal values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from jax.sharding import PartitionSpec

from autopallas import array_types
from autopallas.compat import JaxprEqn, Literal
from autopallas.graph.equal_loops import loops
from autopallas.graph.flatten import Body, Child

__all__ = [
    "branch_key",
    "chosen_key",
    "enters_mesh",
    "hashable",
    "literal_key",
    "spec_key",
    "spread_over_all",
    "stacked_key",
]


def stacked_key(equation: JaxprEqn, body: Body, number: int | None, frame: tuple[int, ...]) -> Hashable:
    """Returns the key of what a scan stacks: its number in a step, the length, and how many loops are around it."""
    return "stacked", number, equation.params["length"], loops(body), frame


def chosen_key(equation: JaxprEqn, operands: Sequence[int], given: Sequence[int | None]) -> Hashable:
    """Returns the key of a cond's result: the predicate, and what each branch gives."""
    return "chosen", operands[0], tuple(given)


def branch_key(equation: JaxprEqn, operands: list[int], child: Child, number: int | None) -> Hashable:
    """Returns the key of a value within one branch.  If another cond on the same predicate gave the value, the key
    leads to what that cond's same branch gave."""
    return "branch", operands[0], len(equation.params["branches"]), child.position, number


def spread_over_all(equation: JaxprEqn, position: int) -> bool:
    """Returns whether each device has its own part of a shard_map's result.  A result that is declared to be the same
    on all devices need not be, unless that is checked."""
    parts, _, _ = spec_key(equation.params["out_specs"][position])
    return {name for part in parts for name in part} == set(equation.params["newly_manual_axes"])


def spec_key(spec: PartitionSpec | tuple[()]) -> tuple[tuple[tuple[str, ...], ...], Hashable, Hashable]:
    """Returns a key that is equal for equivalent partition specs."""
    partitions = spec.partitions if isinstance(spec, PartitionSpec) else spec
    parts = [() if part is None else part if isinstance(part, tuple) else (part,) for part in partitions]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts), getattr(spec, "unreduced", frozenset()), getattr(spec, "reduced", frozenset())


def literal_key(literal: Literal) -> Hashable:
    """Returns a key that is equal for literals with the same bits of the same type."""
    aval, value = literal.aval, np.asarray(literal.val)
    if value.dtype != aval.dtype:
        with np.errstate(all="ignore"):  # a literal holds the number as written, which its dtype may be unable to hold
            value = value.astype(aval.dtype)
    return "literal", aval.dtype, value.tobytes(), tuple(aval.shape)


def enters_mesh(equation: JaxprEqn) -> bool:
    """Returns whether an equation moves an array to a mesh with axes of other types, as ``auto_axes`` and
    ``explicit_axes`` do around a function: what is computed on one side of it cannot be computed on the other."""
    if equation.primitive.name != "reshard":
        return False
    before, after = (array_types.axis_types(v.aval) for v in (equation.invars[0], equation.outvars[0]))
    return before != after and bool(before)  # an array that is on no mesh yet leaves none


def hashable(value: object) -> Hashable:
    """Makes a parameter hashable: numpy integers, dtypes, tuples, and occasionally an array or dictionary."""
    if isinstance(value, (tuple, list)):
        return tuple(hashable(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((str(k), hashable(v)) for k, v in value.items()))
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype), value.tobytes())
    if isinstance(value, np.integer):
        return int(value)
    return value
