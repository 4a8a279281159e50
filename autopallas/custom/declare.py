"""Declares a custom pattern."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from autopallas.compat import ArrayFunction
from autopallas.custom.registry import PLATFORMS, Pattern, register
from autopallas.environment import OPERATIONS
from autopallas.errors import OptionError
from autopallas.patterns.spellings import check

__all__ = ["pattern"]


def pattern(
    reference: ArrayFunction,
    *,
    shapes: Sequence[ArrayLike | jax.ShapeDtypeStruct],
    scalars: Sequence[str] = (),
    name: str | None = None,
    differentiable: bool = False,
    platforms: Sequence[str] = PLATFORMS,
    inputs: Callable[[Sequence[jax.ShapeDtypeStruct]], Sequence[ArrayLike]] | None = None,
) -> Callable[[ArrayFunction], Pattern]:
    """Declares that the decorated function computes the same as ``reference``, and is to run in its place.

    It applies to every optimized function that is traced from then on.  The reference is traced, and its equations are
    looked up in the program's value-numbered graph, for whatever sizes the program has.  Layout copies, inner jits,
    operand order of sums and products, and loop bodies make no difference; other equations do.  In a train step the
    backward is found like that of the built-in operations, by differentiating the matched equations.

    A replacement runs only after it was compared with the reference in float64, once for each set of types and scalars:
    values, and gradients if the program has them.  If it fails or is off, the original equations stay, and the report
    says why.

    Args:
      reference: a function of arrays, and of ``scalars`` by keyword, that returns one array.
      shapes: an example of each operand: an array or a ``jax.ShapeDtypeStruct``.
      scalars: names of keyword arguments whose values may vary, such as an epsilon or a scale: the values are read from
        the program and given to the replacement.
      name: the pattern's name in reports; by default the decorated function's name.
      differentiable: whether JAX can differentiate the replacement (it has a rule, or is plain JAX).  If not, the
        backward differentiates the reference.
      platforms: a selection of "cpu", "gpu", "tpu"; elsewhere the original runs.
      inputs: returns operands of the types that it is given, for the comparison, if random numbers make no sense.

    Returns:
      A decorator that returns a :class:`Pattern`, which can be called like the function, and has ``remove()``.

    Raises:
      OptionError: the reference cannot be looked for, with the reason.

    Example:
      >>> import jax, jax.numpy as jnp, autopallas
      >>> def reference(x, *, eps):
      ...     return x / (jnp.sum(jnp.abs(x), axis=-1, keepdims=True) + eps)
      >>> @autopallas.pattern(reference, shapes=[jnp.ones((8, 16))], scalars=["eps"], differentiable=True)
      ... def l1_normalize(x, *, eps):
      ...     return x * (1 / (jnp.sum(jnp.abs(x), axis=-1, keepdims=True) + eps))
      >>> step = autopallas.optimize(lambda x: l1_normalize.reference(2 * x, eps=1e-3) + 1)
      >>> step(jnp.ones((4, 32))).shape, step.report().counts()
      ((4, 32), Counter({'l1_normalize': 1}))
      >>> l1_normalize.remove()
    """
    types = tuple(jax.ShapeDtypeStruct(np.shape(x), _dtype(x)) for x in shapes)
    if not callable(reference):
        raise OptionError(f"the reference of a pattern is a function, not {reference!r}")
    if not types:
        raise OptionError("a pattern has at least one operand; give an example of each as shapes=[...]")
    if isinstance(scalars, str) or not all(isinstance(s, str) and s.isidentifier() for s in scalars):
        raise OptionError(f"scalars is {scalars!r}; give a list of names of keyword arguments")
    wrong = [p for p in ([platforms] if isinstance(platforms, str) else platforms) if p not in PLATFORMS]
    if wrong or isinstance(platforms, str):
        raise OptionError(f"platforms is {platforms!r}; give a list out of {', '.join(PLATFORMS)}")

    def declare(replacement: ArrayFunction) -> Pattern:
        called = name if name is not None else str(getattr(replacement, "__name__", ""))
        if not called.isidentifier() or called in OPERATIONS:
            raise OptionError(f"{called!r} is no name for a pattern; give name=, other than {', '.join(OPERATIONS)}")
        _keywords(replacement, scalars)
        made = Pattern(called, reference, replacement, types, tuple(scalars), differentiable, tuple(platforms), inputs)
        check(made)
        register(made)
        return made

    return declare


def _dtype(x: ArrayLike | jax.ShapeDtypeStruct) -> DTypeLike:
    return x.dtype if hasattr(x, "dtype") else jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)


def _keywords(function: ArrayFunction, names: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    missing = [name for name in names if name not in signature.parameters and not takes_any]
    if missing:
        raise OptionError(f"the replacement takes no keyword argument {', '.join(missing)}")
