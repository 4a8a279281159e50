"""Tells which calls are given truth values or integers that a function may compare by identity, as no trace does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from autopallas.arguments import in_objects, is_flag
from autopallas.compat import PyTree
from autopallas.trace_context import TraceContext

__all__ = ["MayHaveFlags", "MayHaveNames", "as_jit_traces", "has_flags", "may_have_flags", "may_have_names"]


class MayHaveFlags(Exception):
    """Aborts the trace of a plain function that is given a truth value somewhere, which may be a flag, or a number with
    a fraction inside of an object, which may be none of the object's arrays."""


class MayHaveNames(Exception):
    """Aborts the first trace of a plain function that is given an integer inside of another argument, which may have a
    name."""


as_jit_traces = TraceContext(False)
"""Whether truth values are traced, as ``jax.jit`` does: where a function is lowered and not called, and where none of
them is a flag."""


def may_have_flags(args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> bool:
    """Returns whether a call is given a truth value anywhere, or a number with a fraction inside of an object, traced
    or not, unless flags are traced anyway."""
    if as_jit_traces.value:
        return False

    def is_truth_value(leaf: PyTree) -> bool:
        return isinstance(leaf, bool) or (getattr(leaf, "dtype", None) == jax.numpy.bool_ and not leaf.shape)

    def is_quantity(leaf: PyTree) -> bool:
        if isinstance(leaf, (float, complex)):
            return True
        weak = getattr(leaf, "weak_type", False) and not leaf.shape
        return weak and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)

    leaves, structure = jax.tree.flatten((args, kwargs))
    if any(map(is_truth_value, leaves)):
        return True
    quantities = [is_quantity(leaf) for leaf in leaves]
    return any(quantities) and any(
        one and inside for one, inside in zip(quantities, in_objects(structure), strict=True)
    )


def may_have_names(args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> bool:
    """Returns whether a call is given one of Python's integers, traced or not, inside of another argument, unless flags
    are traced anyway."""
    if as_jit_traces.value:
        return False

    def is_integer(leaf: PyTree) -> bool:
        if isinstance(leaf, int):
            return True
        weak = getattr(leaf, "weak_type", False) and not leaf.shape
        return weak and jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)

    inside = [one for one in (*args, *kwargs.values()) if not jax.tree_util.all_leaves([one])]
    return any(map(is_integer, jax.tree.leaves(inside)))


def has_flags(args: Sequence[PyTree], kwargs: Mapping[str, PyTree], inside: bool = False) -> bool:
    """Returns whether a call is given flags, which a function may compare by identity; with ``inside`` also inside of
    other arguments, where a program that was traced for an integer would run for one with a name."""
    if inside:
        try:
            return any(map(is_flag, {*map(type, jax.tree.leaves((args, kwargs)))}))
        except Exception:  # as of a dictionary whose keys have no order, which jit cannot take apart either
            return True
    for one in args:
        if isinstance(one, int) and type(one) is not int:
            return True
    return any(isinstance(one, int) and type(one) is not int for one in kwargs.values()) if kwargs else False
