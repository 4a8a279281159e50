"""The cases in the forms in which people run them: narrower arguments, transforms, loops over microbatches.

A form takes a function, its arguments, and which of these are shared by all examples, and gives another function with
arguments of its own.  Each keeps the number of textual sites: ``vmap`` does not multiply, a loop's body counts once.

``make forms`` counts what is found, per operation and form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .registry import Case

__all__ = ["FORMS", "programs", "shared"]

Function = Callable[..., Any]
Arguments = tuple[Any, ...]
Program = tuple[Function, Arguments]

_COPIES = 2
"""So many examples or microbatches."""


def shared(case: Case, args: Arguments) -> Any:
    """For each array among the arguments, whether all examples share it: parameters, of losses by hand the weight.

    Of attention by hand the first argument holds queries, keys and values, which no two examples share.
    """
    params, *batch = args
    alike = case.origin != "hand"
    own: Any = jax.tree.map(lambda _: alike, params)
    if case.count("ce") and not alike and isinstance(params, tuple):
        own = (True, *(False for _ in params[1:]))
    return own, *jax.tree.map(lambda _: False, tuple(batch))


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jnp.floating))


def _copies(x: Any) -> Any:
    """Copies that differ, where they may: floats are scaled, indices stay in range."""
    x = jnp.asarray(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(x, _COPIES)
    return jnp.stack([(x * (1 - 0.25 * i)).astype(x.dtype) if _is_float(x) else x for i in range(_COPIES)])


def _narrow(x: Any) -> Any:
    return x.astype(jnp.bfloat16) if _is_float(x) else x


def _mapped(args: Arguments, alike: Any) -> Arguments:
    return jax.tree.map(lambda x, same: x if same else _copies(x), args, alike)


def _over_examples(f: Function, args: Arguments, alike: Any) -> Program:
    axes = jax.tree.map(lambda same: None if same else 0, alike)
    return jax.vmap(f, in_axes=axes), _mapped(args, alike)


def _over_everything(f: Function, args: Arguments, alike: Any) -> Program:
    return jax.vmap(f), jax.tree.map(_copies, args)


def _apart(args: Any, alike: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays of arguments that are not shared, and what puts others in their place."""
    leaves, structure = jax.tree.flatten(args)
    same = jax.tree.leaves(alike)

    def whole(parts: Sequence[Any]) -> Any:
        left = iter(parts)
        return jax.tree.unflatten(structure, [x if s else next(left) for x, s in zip(leaves, same, strict=True)])

    return [x for x, s in zip(leaves, same, strict=True) if not s], whole


def _scanned(f: Function, args: Arguments, alike: Any) -> Program:
    """Results are summed."""

    def run(*args: Any) -> Any:
        parts, whole = _apart(args, alike)
        shapes = jax.eval_shape(lambda: f(*whole([x[0] for x in parts])))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return lax.scan(lambda sum_, xs: (jax.tree.map(jnp.add, sum_, f(*whole(xs))), None), zeros, parts)[0]

    return run, _mapped(args, alike)


def _one_after_the_other(f: Function, args: Arguments, alike: Any) -> Program:
    """Results are stacked."""

    def run(*args: Any) -> Any:
        parts, whole = _apart(args, alike)
        return lax.map(lambda xs: f(*whole(xs)), parts)

    return run, _mapped(args, alike)


FORMS: dict[str, Callable[[Function, Arguments, Any], Program]] = {
    "plain": lambda f, args, alike: (f, args),
    "bfloat16": lambda f, args, alike: (f, jax.tree.map(_narrow, args)),
    "checkpoint": lambda f, args, alike: (jax.checkpoint(f), args),
    "vmap": _over_examples,
    "vmap of all": _over_everything,
    "scan": _scanned,
    "map": _one_after_the_other,
}


def _scalar(f: Function) -> Function:
    """A loss of whatever a function gives."""

    def loss(*args: Any) -> Any:
        floats = [x for x in jax.tree.leaves(f(*args)) if _is_float(x)]
        return sum((jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in floats), jnp.float32(0))

    return loss


def _gradient(f: Function, args: Arguments) -> Function:
    """With the gradient by the first argument that holds floats."""
    first = next(i for i, a in enumerate(args) if any(map(_is_float, jax.tree.leaves(a))))
    return jax.value_and_grad(_scalar(f), argnums=first, allow_int=True)


def programs(case: Case) -> Iterator[tuple[str, Function, Arguments]]:
    """Every form of a case, forward and with a gradient: (name, function, arguments).

    ``accumulation`` adds up gradients of microbatches in a loop.
    """
    f, args = case.build()
    alike = shared(case, args)
    for name, form in FORMS.items():
        given, own = form(f, args, alike)
        yield name, given, own
        yield f"{name}, gradient", _gradient(given, own), own
    yield "accumulation", *_scanned(_gradient(f, args), args, alike)
