"""The cases in the forms in which people run them: narrower arguments, transforms, loops over microbatches.

A form takes a function of (parameters, *batch) and its arguments and gives another function with its own arguments.
Each keeps the number of textual sites: ``vmap`` does not multiply, and the body of a loop counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Program = tuple[Callable[..., Any], tuple[Any, ...]]

_COPIES = 2
"""So many examples or microbatches."""


def _floats(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]


def _stacked(tree: Any) -> Any:
    """Copies that differ: floats are scaled, integers stay in range."""

    def stack(x: Any) -> Any:
        x = jnp.asarray(x)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(x, _COPIES)
        factors = [x * (1 - 0.25 * i) if jnp.issubdtype(x.dtype, jnp.floating) else x for i in range(_COPIES)]
        return jnp.stack([f.astype(x.dtype) for f in factors])

    return jax.tree.map(stack, tree)


def plain(f: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    return f, args


def bf16(f: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    def narrow(x: Any) -> Any:
        return x.astype(jnp.bfloat16) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) else x

    return f, jax.tree.map(narrow, args)


def remat(f: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    return jax.checkpoint(f), args


def vmap(f: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Over examples, with shared parameters."""
    params, *batch = args
    return jax.vmap(f, in_axes=(None, *[0] * len(batch))), (params, *_stacked(tuple(batch)))


def stacked(f: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Over everything: an ensemble."""
    return jax.vmap(f), _stacked(args)


def scan(f: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Over microbatches; results are summed."""
    params, *batch = args

    def run(params: Any, *batch: Any) -> Any:
        def body(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, f(params, *part)), None

        shapes = jax.eval_shape(lambda: f(params, *jax.tree.map(lambda x: x[0], batch)))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return lax.scan(body, zeros, batch)[0]

    return run, (params, *_stacked(tuple(batch)))


def map_(f: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Over microbatches; results are stacked."""
    params, *batch = args
    return lambda params, *batch: lax.map(lambda part: f(params, *part), batch), (params, *_stacked(tuple(batch)))


FORMS: dict[str, Callable[..., Program]] = {
    "plain": plain, "bf16": bf16, "remat": remat, "vmap": vmap, "stacked": stacked, "scan": scan, "map": map_,
}  # fmt: skip


def scalar(f: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of whatever a function gives."""
    return lambda *args: sum((jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in _floats(f(*args))), jnp.float32(0))


def gradient(f: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Of a form's results by its first argument (the parameters), or by the first that has floats."""
    position = next(i for i, a in enumerate(args) if _floats(a))
    return jax.value_and_grad(scalar(f), argnums=position, allow_int=True), args


def accumulated(f: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Gradients by the parameters, added up over microbatches in a scan."""
    position = next(i for i, a in enumerate(args) if _floats(a))
    if position:
        raise NotImplementedError("without parameters")
    return scan(jax.value_and_grad(scalar(f), allow_int=True), args)


def programs(f: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Every form of a program, forward and under a gradient, that JAX can trace: (name, function, arguments)."""
    for name, form in FORMS.items():
        yield (name, *form(f, args))
    for name, form in FORMS.items():
        yield (f"{name} grad", *gradient(*form(f, args)))
    yield ("accum grad", *accumulated(f, args))
